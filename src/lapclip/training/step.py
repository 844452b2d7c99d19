"""One update: a batch in, a better model and what there is to know about the update out.

Shapes: B batch, S image side, C colour channels, L tokens, E embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.data.batches import Batch
from lapclip.data.pixels import draw_boxes, mean_and_std, normalise, view
from lapclip.data.tokenizers import LENGTH_STEP
from lapclip.loss import (
    LOSSES,
    accuracy_of_rows,
    batch_accuracy,
    contrastive_loss,
    contrastive_loss_of_rows,
    distillation_loss,
    word_loss,
)
from lapclip.machine.device import DTYPES, Device
from lapclip.machine.ranks import ALONE, Ranks
from lapclip.machine.transfer import Delivered
from lapclip.measure.phases import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.model.freezing import boundary, parts_of
from lapclip.model.kernels import has_triton
from lapclip.model.pretrained_towers import PretrainedTower
from lapclip.seeding import generator
from lapclip.training.head_dropout import HeadDropout
from lapclip.training.inputs import Inputs, Sent
from lapclip.training.optimizer import apply_gradients
from lapclip.training.precision import LossScale, RoundedCopy
from lapclip.training.schedule import image_side
from lapclip.training.sharded_update import take_by_shards

TEXT_CHUNKS, LEAST_CHUNK = 4, 16
"""Into how many chunks captions are cut, by length, and the fewest that are worth a chunk."""


@dataclass(frozen=True)
class StepMetrics:
    """What there is to know about an update. The logit scale and bias are those the loss was computed with."""

    loss: float
    t2i_accuracy: float
    i2t_accuracy: float
    logit_scale: float
    grad_norm: float
    teacher_loss: float
    """How far from the teacher; 0 without one."""
    logit_bias: float
    """0 for a loss without one."""
    phrase_loss: float
    """That of phrases, which `loss` leaves out; 0 without them."""
    word_loss: float
    """How badly words are predicted, before it is weighed; 0 where none are."""
    part_norms: dict[str, float]


class Losses(NamedTuple):
    """The loss of a batch in its parts."""

    learnt: Tensor
    """What the gradients are of: all parts, each with its weight."""
    captions: Tensor
    """Of whole captions, the teacher's part included: what guessing can be compared with."""
    teacher: Tensor
    """The teacher's part before it is weighed; 0 without one."""
    phrases: Tensor | None
    """Of phrases; None without them."""
    words: Tensor
    """How badly words are predicted, before it is weighed; 0 where none are."""
    accuracies: tuple[Tensor, Tensor]
    """Of whole captions, from text to image and back."""


class TrainStep:
    """The model, its optimiser and the device, ready to take batches."""

    def __init__(
        self, model: CLIP, optimizer: torch.optim.Optimizer, config: TrainConfig, device: Device
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.config, self.device = config, device
        self.ranks: Ranks = ALONE
        """Who shares the work: nobody, while settings are tried."""
        self.rounded = (
            None if config.dtype == "float32" else RoundedCopy(model, DTYPES[config.dtype])
        )
        self.worker = self.rounded.model if self.rounded else model
        """The model that computes: the model itself, or its copy in half precision."""
        self._contrastive = LOSSES[config.loss]
        self._dropout = HeadDropout(self.worker, config)
        self.loss_scale = LossScale(device.torch) if config.dtype == "float16" else None
        self.touched = False
        """Whether the weights may have changed since the loop last checked."""
        self._transfer = device.transfer()
        self._towers = device.side_by_side(at_once="graph" in config.compile)
        self.boundaries = {tower: boundary(model, tower) for tower in ("image", "text")}
        """The first block of each tower that learns: where features enter."""
        names, self._parameters = zip(
            *((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True
        )
        self.learnt_in_towers = [
            p
            for n, p in zip(names, self._parameters, strict=True)
            if n.startswith(("image.", "text."))
        ]
        """What learns in the towers. The rest, such as the scale, has its gradient from the loss alone."""
        part_of_name = parts_of(model)
        parts = [part_of_name[name] for name in names]
        self.parts = list(dict.fromkeys(parts))
        self._part_index = torch.tensor(
            [self.parts.index(part) for part in parts], device=device.torch
        )

    def __call__(
        self, batch: Batch | Sent, step: int, lr: float, watch: Stopwatch
    ) -> Callable[[], StepMetrics]:
        """Update the model. The function returned reads the metrics: at once, that would make a device wait."""
        with ExitStack() as receiving:
            with watch.phase("transfer"):
                inputs, _ = receiving.enter_context(self.received(batch, step))
            self.set_learning_rate(lr)
            metrics = self.update(inputs, watch)
        return self.reader(metrics)

    @property
    def sends_ahead(self) -> bool:
        """Whether another thread may `send` a batch while the device works on the one before."""
        return self._transfer.ahead

    def send(self, batch: Batch, step: int) -> Sent:
        """Draw what is random in an update, and start to bring all that it needs to the device."""
        inputs = self.inputs(batch, step)
        on_its_way = self._transfer.send(inputs.tensors())
        return Sent(replace(inputs, **on_its_way.tensors), on_its_way)

    @contextmanager
    def received(self, batch: Batch | Sent, step: int) -> Iterator[tuple[Inputs, Delivered]]:
        """Inside it, an update may be sent to the device that works on a batch. One that was not sent before is now."""
        sent = self.send(batch, step) if isinstance(batch, Batch) else batch
        with sent.on_its_way.received() as delivered:
            yield replace(sent.inputs, **delivered.tensors), delivered

    @property
    def others(self) -> dict[str, Tensor]:
        """What the next update depends on beside the weights and the optimiser."""
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state}

    def inputs(self, batch: Batch, step: int) -> Inputs:
        """What an update needs, still on the CPU, by shards where there are several."""
        inputs = self._whole_inputs(batch, step)
        # A single rank that leaves sums to the collective does what it would do beside others.
        together = self._shards != 1 or (self.ranks.connected and not self.config.shards)
        return self._dealt(inputs, batch) if together else inputs

    def _whole_inputs(self, batch: Batch, step: int) -> Inputs:
        inputs = Inputs(
            pixels_BSSC=torch.from_numpy(batch.pixels_BSSC),
            tokens_BL=torch.from_numpy(batch.tokens_BL),
            positives_BB=torch.from_numpy(batch.positives_BB),
            boxes_B5=self._boxes(batch, step),
            side=image_side(step, self.config, self.model.shape),
            lengths=self._lengths(batch.lengths_B, batch.tokens_BL.shape[1]),
            image_features=_as_tensor(batch.image_features),
            text_features=_as_tensor(batch.text_features),
            teacher_image=_as_tensor(batch.teacher_image),
            teacher_text=_as_tensor(batch.teacher_text),
            words_BV=_as_tensor(batch.words_BV),
            phrase_tokens_BL=_as_tensor(batch.phrase_tokens_BL),
            phrase_positives_BB=_as_tensor(batch.phrase_positives_BB),
            phrase_features=_as_tensor(batch.phrase_features),
        )
        dropped = self._dropout.draw(len(inputs), step)
        if inputs.phrase_tokens_BL is not None:
            dropped |= self._dropout.draw_for_phrases(len(inputs), step)
        return replace(inputs, **dropped)

    @property
    def _shards(self) -> int:
        """How many parts of a batch go through the towers by themselves."""
        return self.config.shards or self.ranks.count

    def _dealt(self, inputs: Inputs, batch: Batch) -> Inputs:
        """A batch in the order of its shards. All draws were made for the batch before."""
        dealt, lengths_B, longest = (
            batch.dealt(self._shards),
            batch.lengths_B,
            inputs.tokens_BL.shape[1],
        )
        lengths = [
            self._lengths(None if lengths_B is None else lengths_B[rows], longest) for rows in dealt
        ]
        ordered = replace(inputs, own_shards=batch.own_shards)
        if len(dealt) > 1:
            ordered = ordered.in_order(torch.from_numpy(np.concatenate(dealt)))
        return replace(
            ordered, lengths=(), shards=tuple(map(len, dealt)), shard_lengths=tuple(lengths)
        )

    def set_learning_rate(self, lr: float) -> None:
        """A number, or written into a tensor that a recorded graph reads. Each group has its share of it."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * group["share"])
            else:
                group["lr"] = lr * group["share"]

    def update(self, inputs: Inputs, watch: Stopwatch) -> Tensor:
        """Gradients, clipping and the optimiser. Reads nothing back, so that it can be recorded as a graph."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.rounded:
            self.rounded.refresh()
        if inputs.shards:
            losses = take_by_shards(self, inputs, watch)
        else:
            losses = (
                self._in_micro_batches(inputs, watch)
                if self.is_cut(inputs)
                else self._whole(inputs, watch)
            )
        with watch.phase("optimizer"):
            grad_norm, part_norms = self._gradient_norms()
            scalars = self._scalars(losses, grad_norm)
            self._optimize(grad_norm)
            self.model.hold_temperature()
        return torch.cat([scalars, part_norms])

    def _scalars(self, losses: Losses, grad_norm: Tensor) -> Tensor:
        """The metrics of an update as one tensor, made before the weights change."""
        scale, bias = self.model.logit_scale.detach(), self.model.logit_bias
        bias = torch.zeros_like(scale) if bias is None else bias.detach()
        phrases = torch.zeros_like(bias) if losses.phrases is None else losses.phrases.detach()
        return torch.stack(
            (
                losses.captions.detach(),
                *losses.accuracies,
                scale,
                grad_norm,
                losses.teacher,
                bias,
                phrases,
                losses.words,
            )
        )

    @torch.no_grad()
    def embed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Embeddings of images and captions as the step computes them, but without a graph."""
        if self.rounded:
            self.rounded.refresh()
        inputs = self.inputs(batch, self.config.steps).on(self.device)
        image_BE, text_BE, *_ = self.encode(inputs, Stopwatch(self.device.synchronise, on=False))
        return image_BE, text_BE

    def rehearse(self, batch: Batch, pairs: int) -> None:
        """Take the first pairs through both towers and back, to see what that costs. The weights stay as they are."""
        inputs = self._whole_inputs(batch, max(1, self.config.steps))
        lengths = inputs.lengths if pairs >= len(inputs) else ()
        inputs = inputs.each(lambda tensor: tensor[:pairs]).on(self.device)
        if self.rounded:
            self.rounded.refresh()
        embeddings = self.encode(
            replace(inputs, lengths=lengths), Stopwatch(self.device.synchronise, on=False)
        )
        torch.autograd.backward(
            embeddings, [torch.ones_like(embedding) for embedding in embeddings]
        )
        if self.rounded:
            self.rounded.hand_over()
        self.optimizer.zero_grad(set_to_none=True)

    def reader(self, metrics: Tensor) -> Callable[[], StepMetrics]:
        """Start to bring the metrics to the CPU; the function returned waits for them."""
        read = self.device.read_later(metrics)
        return lambda: self._step_metrics(read())

    def encode(self, inputs: Inputs, watch: Stopwatch) -> tuple[Tensor, ...]:
        """Embeddings of images, which stay uint8 until here, of captions, and of phrases where there are some."""
        with watch.phase("preprocess"):
            pixels_BCSS = self._view_images(inputs) if inputs.image_features is None else None
        with watch.phase("forward"), self._dropout.applied(inputs.tensors()):
            pairs = self._towers(
                lambda: self._encode_image(inputs, pixels_BCSS), lambda: self._encode_text(inputs)
            )
        phrases = inputs.of_phrases()
        if phrases is None:
            return pairs
        with watch.phase("forward"), self._dropout.applied(phrases.tensors()):
            return (*pairs, self._encode_text(phrases))

    def _encode_image(self, inputs: Inputs, pixels_BCSS: Tensor | None) -> Tensor:
        if pixels_BCSS is not None:
            return self.worker.encode_image(pixels_BCSS)
        assert inputs.image_features is not None
        return self.worker.finish_image(inputs.image_features, self.boundaries["image"])

    def _encode_text(self, inputs: Inputs) -> Tensor:
        """Embeddings of captions. They come sorted by length, so a chunk of them needs little padding."""
        if inputs.text_features is not None:
            return self.worker.finish_text(
                inputs.text_features, inputs.tokens_BL, self.boundaries["text"]
            )
        if not inputs.lengths:
            return self.worker.encode_text(inputs.tokens_BL)
        chunks = zip(inputs.tokens_BL.chunk(len(inputs.lengths)), inputs.lengths, strict=True)
        text = self.worker.text
        if isinstance(
            text, PretrainedTower
        ):  # its head takes all rows at once, as what it leaves out was drawn
            features_BF = torch.cat(
                [text.begin(chunk[:, :length], text.depth) for chunk, length in chunks]
            )
            return self.worker.finish_text(features_BF, inputs.tokens_BL, text.depth)
        return torch.cat([self.worker.encode_text(chunk[:, :length]) for chunk, length in chunks])

    def _lengths(self, lengths_B: np.ndarray | None, longest: int) -> tuple[int, ...]:
        """On the CPU captions that are computed at once are cut in chunks; elsewhere more launches would cost more, and
        a compiler wants few shapes."""
        config = self.config
        whole = not self.device.is_cpu or config.micro_batch or "compiled" in config.compile
        if whole or lengths_B is None or len(lengths_B) < 2 * TEXT_CHUNKS * LEAST_CHUNK:
            return ()
        found = [int(chunk.max()) for chunk in torch.from_numpy(lengths_B).chunk(TEXT_CHUNKS)]
        return tuple(min(longest, -(-length // LENGTH_STEP) * LENGTH_STEP) for length in found)

    def _view_images(self, inputs: Inputs) -> Tensor:
        """The images as the tower sees them; made on the CPU where the device would get them wrong."""
        device, shape = self.device, self.model.shape
        dtype, whole = (
            DTYPES[self.config.dtype],
            inputs.boxes_B5 is None and inputs.side == inputs.pixels_BSSC.shape[1],
        )
        ours = (
            whole and self.config.linear == "triton" and not shape.image_from
        )  # foreign networks round by themselves
        if ours and has_triton(device.torch, dtype):
            from lapclip.model import triton_kernels

            statistics = mean_and_std(shape.pixel_mean, shape.pixel_std, 1, device.torch)
            return triton_kernels.normalise(inputs.pixels_BSSC, *statistics, dtype)
        if device.trusted("crops"):
            return view(normalise(inputs.pixels_BSSC, shape), inputs.boxes_B5, inputs.side)
        there = inputs.each(Tensor.cpu)
        return view(normalise(there.pixels_BSSC, shape), there.boxes_B5, there.side).to(
            device.torch
        )

    def loss(
        self, inputs: Inputs, image_BE: Tensor, text_BE: Tensor, phrase_BE: Tensor | None = None
    ) -> Losses:
        """The loss in its parts."""
        scale, bias, judge = self.model.logit_scale.exp(), self.model.logit_bias, self._contrastive
        smoothing = self.config.label_smoothing
        loss, logits_BB = contrastive_loss(
            image_BE, text_BE, scale, inputs.positives_BB, bias, judge, smoothing
        )
        taught = words = torch.zeros_like(loss)
        phrases = None
        if phrase_BE is not None and inputs.phrase_positives_BB is not None:
            positives_BB = inputs.phrase_positives_BB
            phrases, _ = contrastive_loss(
                image_BE, phrase_BE, scale, positives_BB, bias, judge, smoothing
            )
        if inputs.teacher_image is not None and inputs.teacher_text is not None:
            taught = distillation_loss(image_BE, text_BE, inputs.teacher_image, inputs.teacher_text)
            loss = (1 - self.config.teacher_weight) * loss + self.config.teacher_weight * taught
        learnt = (
            loss
            if phrases is None
            else (1 - self.config.phrases) * loss + self.config.phrases * phrases
        )
        if inputs.words_BV is not None and self.model.word_embedding is not None:
            words_VE = self.model.word_embedding
            words = word_loss(image_BE, words_VE, inputs.words_BV) + word_loss(
                text_BE, words_VE, inputs.words_BV
            )
            learnt = learnt + self.config.word_weight * words
        accuracies = batch_accuracy(logits_BB, inputs.positives_BB)
        return Losses(learnt, loss, taught.detach(), phrases, words.detach(), accuracies)

    def loss_of_rows(
        self, inputs: Inputs, rows: slice, image_BE: Tensor, text_BE: Tensor
    ) -> Losses:
        """What some rows of a batch add to its loss, in its parts."""
        scale, bias = self.model.logit_scale.exp(), self.model.logit_bias
        judge, smoothing = self._contrastive, self.config.label_smoothing
        positives_BB = inputs.positives_BB
        loss, *both = contrastive_loss_of_rows(
            image_BE, text_BE, rows, scale, positives_BB, bias, judge, smoothing
        )
        none = torch.zeros_like(loss.detach())
        return Losses(loss, loss, none, None, none, accuracy_of_rows(*both))

    def _whole(self, inputs: Inputs, watch: Stopwatch) -> Losses:
        """Losses and gradients of a batch that fits in memory."""
        losses = self.take_loss(inputs, self.encode(inputs, watch), watch)
        with watch.phase("backward"):
            if self.rounded:
                self.rounded.hand_over()
        return losses

    def _in_micro_batches(self, inputs: Inputs, watch: Stopwatch) -> Losses:
        """The same in less memory: gradient caching (Gao et al. 2021, arXiv 2101.06983).

        The embeddings of the whole batch are computed without a graph; the loss over all pairs gives the gradient of
        each embedding; then the towers run again, a micro-batch at a time, and carry those gradients to the weights.
        """
        with torch.no_grad():
            encoded = [
                self.encode(micro_batch, watch) for micro_batch in self.micro_batches(inputs)
            ]
        embeddings = [torch.cat(side).requires_grad_() for side in zip(*encoded, strict=True)]
        losses = self.take_loss(inputs, embeddings, watch)
        self.carry(inputs, gradients_of(embeddings), watch)
        return losses

    def take_loss(self, inputs: Inputs, embeddings: Sequence[Tensor], watch: Stopwatch) -> Losses:
        """The loss of embeddings, and its gradients as far as it reaches: to the towers, or to embeddings that are
        leaves."""
        with watch.phase("forward"):
            losses = self.loss(inputs, *embeddings)
        with watch.phase("backward"):
            self.scaled(losses.learnt).backward()
        return losses

    def carry(
        self,
        inputs: Inputs,
        gradients: Sequence[Tensor],
        watch: Stopwatch,
        around_last: AbstractContextManager[None] | None = None,
    ) -> None:
        """Carry the gradients of embeddings to the weights, a micro-batch at a time. `around_last` is entered for the
        last backward pass, and takes over its gradients itself, those of the rounded copy too
        (`sharded_update.handing_on`)."""
        micro_batches = list(self.micro_batches(inputs))
        by_micro_batch = zip(
            *(gradient.split(self.config.micro_batch) for gradient in gradients), strict=True
        )
        for at, (micro_batch, its_gradients) in enumerate(
            zip(micro_batches, by_micro_batch, strict=True), 1
        ):
            its_embeddings = self.encode(micro_batch, watch)
            around = around_last if at == len(micro_batches) else None
            with watch.phase("backward"), around or nullcontext():
                torch.autograd.backward(its_embeddings, its_gradients)
                if self.rounded and around is None:
                    self.rounded.hand_over()

    def is_cut(self, inputs: Inputs) -> bool:
        """Whether a batch is too large for memory, so that only micro-batches of it have a graph at once."""
        return 0 < self.config.micro_batch < len(inputs)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as the backward pass takes it: larger in float16, whose small numbers are coarse."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    def micro_batches(self, inputs: Inputs) -> Iterator[Inputs]:
        """Slices of a micro-batch each. What was drawn for the batch, such as crops, is sliced with it."""
        size = self.config.micro_batch
        for at in range(0, len(inputs), size):
            yield inputs.each(lambda tensor, at=at: tensor[at : at + size])

    def _step_metrics(self, values: list[float]) -> StepMetrics:
        return StepMetrics(*values[:9], part_norms=dict(zip(self.parts, values[9:], strict=True)))

    def _gradient_norms(self) -> tuple[Tensor, Tensor]:
        """Return the norm of all gradients, and of each part of the model."""
        norms = torch.stack(torch._foreach_norm(gradients_of(self._parameters)))  # pyright: ignore[reportPrivateImportUsage]
        squares = (norms if self.loss_scale is None else norms / self.loss_scale.scale) ** 2
        part_norms = (
            torch.zeros(len(self.parts), device=squares.device)
            .index_add_(0, self._part_index, squares)
            .sqrt()
        )
        return squares.sum().sqrt(), part_norms

    def _optimize(self, grad_norm: Tensor) -> None:
        """Update the weights. Shorten gradients that are too long; skip an update that overflowed in float16."""
        self.touched = True
        divisor = overflowed = None
        if self.config.clip_norm:
            divisor = (grad_norm / self.config.clip_norm).clamp(min=1.0)
        if self.loss_scale is not None:
            scale = self.loss_scale.scale.clone()
            divisor = scale if divisor is None else divisor * scale
            overflowed = ~grad_norm.isfinite()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        apply_gradients(self.optimizer, gradients, self.device, divisor, overflowed)
        if self.loss_scale is not None and overflowed is not None:
            self.loss_scale.update(overflowed)

    def _boxes(self, batch: Batch, step: int) -> Tensor | None:
        """The box of each image that is seen this step; None is all of it."""
        if batch.boxes_B5 is not None:
            return torch.from_numpy(batch.boxes_B5)
        if batch.image_features is not None:
            return None
        crop, flip, aspects_B = self.config.crop, self.config.flip, batch.aspects_B
        if crop == 1 and not flip and aspects_B is None:
            return None
        share = self.model.shape.crop_share
        if aspects_B is None:
            aspects_B, share = np.ones(len(batch.sided_B)), 1.0  # drawn as the model is to see them
        draw = generator(self.config.seed, "boxes", step)
        return draw_boxes(batch.sided_B, aspects_B, crop, flip, draw, middle=share)


def gradients_of(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of tensors that all have one."""
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(found) == len(leaves), "what learns has a gradient"
    return found


def _as_tensor(array: np.ndarray | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)
