"""One update: a batch in, a better model and what there is to know about the update out.

Shapes: B batch, P patches, K patches kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.data.batches import Batch
from lapclip.data.pixels import normalise
from lapclip.loss import batch_accuracy, contrastive_loss
from lapclip.machine.devices import Device
from lapclip.machine.timing import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.randomness import derived_seed


@dataclass(frozen=True)
class Figures:
    """What there is to know about an update. The logit scale is the one the loss was computed with."""

    loss: float
    t2i_accuracy: float
    i2t_accuracy: float
    logit_scale: float
    grad_norm: float
    part_norms: dict[str, float]


class TrainStep:
    """The model, its optimiser and the device, ready to take batches."""

    def __init__(self, model: CLIP, optimizer: torch.optim.Optimizer, config: TrainConfig, device: Device) -> None:
        self.model, self.optimizer, self.config, self.device = model, optimizer, config, device
        names, self._parameters = zip(*model.named_parameters(), strict=True)
        parts = [part_of(name) for name in names]
        self.parts = list(dict.fromkeys(parts))
        self._part_index = torch.tensor([self.parts.index(part) for part in parts], device=device.torch)

    def __call__(self, batch: Batch, step: int, lr: float, watch: Stopwatch) -> Callable[[], Figures]:
        """Update the model. The function returned reads the figures: at once, that would make a device wait."""
        model, place = self.model, self.device.torch
        with watch.phase("transfer"):
            pixels_BSSC, tokens_BL, positives_BB = (
                torch.from_numpy(array).to(place) for array in (batch.pixels_BSSC, batch.tokens_BL, batch.positives_BB)
            )
            kept_BK = self._kept_patches(len(pixels_BSSC), step)
        with watch.phase("preprocess"):
            pixels_BCSS = normalise(pixels_BSSC)
        with watch.phase("forward"):
            with self.device.autocast(self.config.dtype):
                image_BE, text_BE = model.encode_image(pixels_BCSS, kept_BK), model.encode_text(tokens_BL)
            loss, logits_BB = contrastive_loss(image_BE, text_BE, model.logit_scale.exp(), positives_BB)
        with watch.phase("backward"):
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
        with watch.phase("optimizer"):
            grad_norm, part_norms = self._clip_gradients()
            scalars = (loss.detach(), *batch_accuracy(logits_BB, positives_BB), model.logit_scale.detach(), grad_norm)
            read = self.device.read_later(torch.cat([torch.stack(scalars), part_norms]))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            model.hold_temperature()
        return lambda: self._figures(read())

    def _figures(self, values: list[float]) -> Figures:
        return Figures(*values[:5], part_norms=dict(zip(self.parts, values[5:], strict=True)))

    def _clip_gradients(self) -> tuple[Tensor, Tensor]:
        """Shorten the gradients where they are too long; their norm before that, in all and by part."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        squares = torch.stack([gradient.norm() for gradient in gradients]) ** 2
        part_norms = torch.zeros(len(self.parts), device=squares.device).index_add_(0, self._part_index, squares).sqrt()
        grad_norm = squares.sum().sqrt()
        if self.config.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.config.clip_norm, grad_norm)
        return grad_norm, part_norms

    def _kept_patches(self, batch_size: int, step: int) -> Tensor | None:
        """Which patches each picture keeps this step, in order; None keeps all."""
        if not self.config.patch_dropout:
            return None
        patches = self.model.image.patches
        kept = max(1, round(patches * (1 - self.config.patch_dropout)))
        draw = torch.Generator().manual_seed(derived_seed(self.config.seed, "patches", step))
        chosen_BK = torch.rand(batch_size, patches, generator=draw).argsort(dim=1)[:, :kept].sort(dim=1).values
        return chosen_BK.to(self.device.torch)


def part_of(name: str) -> str:
    """The part a parameter belongs to: image.embedding, image.0 to image.head, the same for text, or temperature."""
    tower, _, rest = name.partition(".")
    if not rest:
        return "temperature"
    if rest.startswith("transformer.blocks."):
        return f"{tower}.{rest.split('.')[2]}"
    return f"{tower}.head" if rest.startswith(("ln_post", "ln_final", "projection")) else f"{tower}.embedding"
