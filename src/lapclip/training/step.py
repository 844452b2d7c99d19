"""One training step: a batch in, an updated model and metrics out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.data.batches import Batch
from lapclip.machine.device import DTYPES, Device
from lapclip.machine.transfer import Delivered
from lapclip.measure.phases import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.model.freezing import boundary, parts_of
from lapclip.training.caption_chunks import chunk_lengths, encode_captions
from lapclip.training.distributed import ALONE, Ranks, is_sharded
from lapclip.training.head_dropout import HeadDropout
from lapclip.training.image_views import choose_boxes, draw_crops, view_images
from lapclip.training.inputs import Inputs, Sent
from lapclip.training.loss_rows import Columns
from lapclip.training.objectives import Loss, Objectives, Pass
from lapclip.training.optimizer import apply_gradients
from lapclip.training.precision import LossScale, RoundedCopy
from lapclip.training.schedule import image_side


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of a step. The logit scale and bias are those that the loss was computed with."""

    scalars: dict[str, float]
    """"loss", "grad_norm" and the metrics of the objectives."""
    part_norms: dict[str, float]
    """The gradient norm of each part of the model."""

    @property
    def loss(self) -> float:
        return self.scalars["loss"]

    @property
    def grad_norm(self) -> float:
        return self.scalars["grad_norm"]


@dataclass(frozen=True)
class DeviceMetrics:
    """The metrics of a step before they are read: one tensor, so that reading takes one
    transfer."""

    names: Sequence[str]
    values: Tensor
    """A value for each name, then the gradient norm of each part."""


class TrainStep:
    """The model, its optimizer and the device, ready to take batches."""

    def __init__(
        self, model: CLIP, optimizer: torch.optim.Optimizer, config: TrainConfig, device: Device
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.config, self.device = config, device
        self.objectives = Objectives(config)
        self.ranks: Ranks = ALONE
        """Ranks that share the work. `ALONE` while settings are tried."""
        self.rounded = None
        is_in_parts = any(is_sharded(weight) for weight in model.parameters())
        if config.dtype != "float32" and not is_in_parts:  # FSDP rounds parts as it gathers them
            self.rounded = RoundedCopy(model, DTYPES[config.dtype])
        self.worker = self.rounded.model if self.rounded else model
        """The model that computes: the model itself, or its copy in half precision."""
        self._dropout = HeadDropout(self.worker, config)
        self.loss_scale = LossScale(device.torch) if config.dtype == "float16" else None
        self.touched = False
        """Whether the weights may have changed since the loop last checked."""
        self._transfer = device.transfer()
        self._run_towers = device.side_by_side(at_once="graph" in config.compile)
        self.boundaries = {tower: boundary(model, tower) for tower in ("image", "text")}
        """The first block of each tower that trains: cached features enter there."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = list(trained.values())
        part_of_name = parts_of(model)
        parts = [part_of_name[name] for name in trained]
        self.parts = list(dict.fromkeys(parts))
        numbers = [self.parts.index(part) for part in parts]
        self._part_index = torch.tensor(numbers, device=device.torch)

    def __call__(
        self, batch: Batch | Sent, step: int, lr: float, watch: Stopwatch
    ) -> Callable[[], StepMetrics]:
        """Update the model. Returns a function that reads the metrics.

        Call it after the next step has been launched: reading waits for the device.
        """
        with ExitStack() as transfer:  # the device may reuse the batch's memory when it ends
            with watch.phase("transfer"):
                inputs, _ = transfer.enter_context(self.received(batch, step))
            self.set_learning_rate(lr)
            metrics = self.update(inputs, watch)
        return self.reader(metrics)

    @property
    def sends_ahead(self) -> bool:
        """Whether another thread may `send` a batch while the device works on the one before."""
        return self._transfer.ahead

    def send(self, batch: Batch, step: int) -> Sent:
        """Draw what is random in a step, and start to copy everything it needs to the device."""
        inputs = self.inputs(batch, step)
        on_its_way = self._transfer.send(inputs.tensors())
        return Sent(inputs.with_tensors(on_its_way.tensors), on_its_way)

    @contextmanager
    def received(self, batch: Batch | Sent, step: int) -> Iterator[tuple[Inputs, Delivered]]:
        """Provide the inputs on the device while work on them is launched. Sends the batch if that
        was not done."""
        sent = self.send(batch, step) if isinstance(batch, Batch) else batch
        with sent.on_its_way.received() as delivered:
            yield sent.inputs.with_tensors(delivered.tensors), delivered

    @property
    def others(self) -> dict[str, Tensor]:
        """State that the next step depends on beside the weights and the optimizer."""
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state}

    def inputs(self, batch: Batch, step: int) -> Inputs:
        """Return what a step needs, still on the CPU."""
        inputs = self.whole_inputs(batch, step)
        if batch.ranks is None:
            return inputs
        own_lengths_R = None if batch.lengths_B is None else batch.lengths_B[batch.ranks.own]
        longest = inputs.tokens_BL.shape[1]
        lengths = chunk_lengths(own_lengths_R, longest, self.config, self.device)
        return inputs.of_rank(batch.ranks, lengths)

    def whole_inputs(self, batch: Batch, step: int) -> Inputs:
        """Return what a step of the whole batch needs."""
        config, shape, passes = self.config, self.model.shape, self.objectives.passes
        extras = {name: torch.from_numpy(array) for name, array in batch.extras.items()}
        for other in passes:
            if other.tower == "image" and batch.image_features is None:
                purpose = f"{other.name} boxes"
                extras[other.source] = draw_crops(batch, config, shape, purpose, step)
        seen = [other for other in passes if other.source in extras]
        extras |= self._dropout.draw(len(batch.tokens_BL), step, seen)
        features = batch.image_features, batch.text_features
        image_features, text_features = (
            None if array is None else torch.from_numpy(array) for array in features
        )
        return Inputs(
            pixels_BSSC=torch.from_numpy(batch.pixels_BSSC),
            tokens_BL=torch.from_numpy(batch.tokens_BL),
            positives_BB=torch.from_numpy(batch.positives_BB),
            boxes_B5=choose_boxes(batch, config, shape, step),
            side=image_side(step, config, shape),
            lengths=chunk_lengths(batch.lengths_B, batch.tokens_BL.shape[1], config, self.device),
            image_features=image_features,
            text_features=text_features,
            extras=extras,
            slicing=self.objectives.slicing,
        )

    def set_learning_rate(self, lr: float) -> None:
        """Give each group its share of the rate. A recorded graph reads it from a tensor."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * group["share"])
            else:
                group["lr"] = lr * group["share"]

    def update(self, inputs: Inputs, watch: Stopwatch) -> DeviceMetrics:
        """Compute gradients, clip them and update the weights. Reads nothing back, so that it can
        be recorded."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.rounded:
            self.rounded.refresh()
        if self.is_cut(inputs):
            loss = self._in_micro_batches(inputs, watch)
        else:
            loss = self._whole(inputs, watch)
        metrics = self._sum_over_ranks(loss, watch)
        with watch.phase("optimizer"):
            grad_norm, part_norms = self._gradient_norms()
            # Copied before the weights change: the logit scale is one of the metrics.
            values = torch.cat([metrics, grad_norm[None], part_norms])
            self._optimize(grad_norm)
            self.model.hold_temperature()
        return DeviceMetrics([*loss.metrics, "grad_norm"], values)

    @torch.no_grad()
    def embed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return embeddings of images and captions as the last step would compute them, without a
        graph."""
        if self.rounded:
            self.rounded.refresh()  # half precision reads rounded weights
        last_step = self.config.steps
        inputs = self.inputs(batch, last_step).on(self.device)
        embeddings = self.encode(inputs, self._no_watch())
        return embeddings["image"], embeddings["text"]

    def rehearse(self, batch: Batch, pairs: int) -> None:
        """Take the first pairs through both towers and back, to measure the memory. The weights do
        not change."""
        inputs = self.whole_inputs(batch, max(1, self.config.steps))
        if pairs < len(inputs):
            inputs = replace(inputs.rows(0, pairs), lengths=())
        if self.rounded:
            self.rounded.refresh()
        embeddings = list(self.encode(inputs.on(self.device), self._no_watch()).values())
        torch.autograd.backward(embeddings, [torch.ones_like(rows_BE) for rows_BE in embeddings])
        if self.rounded:
            self.rounded.hand_over()
        self.optimizer.zero_grad(set_to_none=True)

    def reader(self, metrics: DeviceMetrics) -> Callable[[], StepMetrics]:
        """Start to copy the metrics to the CPU. Returns a function that waits for them."""
        read = self.device.read_later(metrics.values)

        def read_metrics() -> StepMetrics:
            values, count = read(), len(metrics.names)
            scalars = dict(zip(metrics.names, values[:count], strict=True))
            return StepMetrics(scalars, dict(zip(self.parts, values[count:], strict=True)))

        return read_metrics

    def encode(self, inputs: Inputs, watch: Stopwatch) -> dict[str, Tensor]:
        """Return the embeddings of each pass: "image", "text" and those of the objectives."""
        with watch.phase("preprocess"):
            pixels = view_images(inputs, self.config, self.model.shape, self.device)
        main = {"image": "image", "text": "text"}
        with watch.phase("forward"), self._dropout.applied(inputs.extras, main):
            image_BE, text_BE = self._run_towers(
                lambda: self._encode_images(inputs, pixels), lambda: self._encode_texts(inputs)
            )
        embeddings = {"image": image_BE, "text": text_BE}
        for other in self.passes(inputs):
            embeddings[other.name] = self._encode_pass(other, inputs.for_pass(other), watch)
        return embeddings

    def passes(self, inputs: Inputs) -> list[Pass]:
        """Return the passes of objectives that a batch has."""
        return [other for other in self.objectives.passes if other.source in inputs.extras]

    def _encode_pass(self, other: Pass, inputs: Inputs, watch: Stopwatch) -> Tensor:
        with watch.phase("preprocess"):
            pixels = None
            if other.tower == "image":
                pixels = view_images(inputs, self.config, self.model.shape, self.device)
        dropped = self._dropout.applied(inputs.extras, {other.tower: other.name})
        with watch.phase("forward"), dropped:
            if other.tower == "image":
                return self._encode_images(inputs, pixels)
            return self._encode_texts(inputs)

    def _encode_images(self, inputs: Inputs, pixels_BCSS: Tensor | None) -> Tensor:
        if inputs.image_features is not None:
            return self.worker.finish_image(inputs.image_features, self.boundaries["image"])
        assert pixels_BCSS is not None
        return self.worker.encode_image(pixels_BCSS)

    def _encode_texts(self, inputs: Inputs) -> Tensor:
        return encode_captions(self.worker, inputs, self.boundaries["text"])

    def _whole(self, inputs: Inputs, watch: Stopwatch) -> Loss:
        """Take the loss and gradients of a batch that fits in memory."""
        loss = self.take_loss(inputs, self.encode(inputs.own_rows(), watch), watch)
        with watch.phase("backward"):
            if self.rounded:
                self.rounded.hand_over()
        return loss

    def _in_micro_batches(self, inputs: Inputs, watch: Stopwatch) -> Loss:
        """Take the same in less memory: gradient caching (Gao et al. 2021, arXiv 2101.06983).

        The embeddings of the whole batch are computed without a graph; the loss over all pairs
        gives the gradient of each embedding; then the towers run again, a micro-batch at a time,
        and carry those gradients to the weights.
        """
        own = inputs.own_rows()
        cuts = self.ranks.cut_micro_batches(len(own), inputs.row_counts, self.config.micro_batch)
        with torch.no_grad():
            encoded = [self.encode(own.rows(cut.start, cut.stop), watch) for cut in cuts]
        embeddings = {
            name: torch.cat([part[name] for part in encoded]).requires_grad_()
            for name in encoded[0]
        }
        loss = self.take_loss(inputs, embeddings, watch)
        gradients = gradients_of(embeddings)
        for cut in cuts:
            self.ranks.will_sum(self.model, is_last=cut is cuts[-1])
            embeddings = self.encode(own.rows(cut.start, cut.stop), watch)
            its_gradients = [gradients[name][cut] for name in embeddings]
            with watch.phase("backward"):
                torch.autograd.backward(list(embeddings.values()), its_gradients)
                if self.rounded:
                    self.rounded.hand_over()
        return loss

    def take_loss(self, inputs: Inputs, embeddings: Mapping[str, Tensor], watch: Stopwatch) -> Loss:
        """Compute the loss and carry its gradients back: to the weights, or to embeddings that are leaves.

        Of several ranks each computes what its own rows add to the loss.
        """
        with watch.phase("forward"):
            columns = None
            if self.ranks.is_distributed:
                columns = Columns(self.ranks, inputs.row_counts, self.config.loss_ring)
                if not columns.is_ring:
                    embeddings = self.ranks.gather(embeddings, inputs.row_counts)
            loss = self.objectives.loss(self.model, inputs, embeddings, inputs.own, columns)
        with watch.phase("backward"):
            self.scaled(loss.total).backward()
        return loss

    def _sum_over_ranks(self, loss: Loss, watch: Stopwatch) -> Tensor:
        """Sum gradients over ranks, and return the metrics of the whole batch."""
        metrics = torch.stack(list(loss.metrics.values()))
        if self.ranks.is_distributed:
            with watch.phase("exchange"):
                self.ranks.sum_gradients(self._parameters, DTYPES[self.config.exchange])
                metrics = self.ranks.sum_metrics(metrics, list(loss.metrics))
        return metrics

    def is_cut(self, inputs: Inputs) -> bool:
        """Return whether a batch is too large for memory, so that only micro-batches of it have a graph at once."""
        rows = max(inputs.row_counts, default=len(inputs))
        return 0 < self.config.micro_batch < rows

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss for the backward pass: larger in float16, which is coarse near 0."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    def _gradient_norms(self) -> tuple[Tensor, Tensor]:
        """Return the norm of all gradients, and of each part of the model."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        assert len(gradients) == len(self._parameters), "what trains has a gradient"
        norms = self.ranks.norms(gradients)
        if self.loss_scale is not None:
            norms = norms / self.loss_scale.scale
        squares = norms**2
        part_squares = torch.zeros(len(self.parts), device=squares.device)
        part_squares.index_add_(0, self._part_index, squares)
        return squares.sum().sqrt(), part_squares.sqrt()

    def _optimize(self, grad_norm: Tensor) -> None:
        """Update the weights. Shorten gradients that are too long; skip an update that overflowed
        in float16."""
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

    def _no_watch(self) -> Stopwatch:
        return Stopwatch(self.device.synchronise, on=False)


def gradients_of(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of embeddings that all have one, by name."""
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert len(gradients) == len(leaves), "every embedding enters the loss"
    return gradients
