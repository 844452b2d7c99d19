"""Dropout in the heads of pretrained towers. Masks are drawn for a whole batch, so that
micro-batches see the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.model.clip import CLIP
from lapclip.model.pretrained_towers import Dropping, Head, PretrainedTower
from lapclip.seeding import derived_seed
from lapclip.training.objectives.base import Pass


class HeadDropout:
    """Dropout for the heads of a model's pretrained towers. Does nothing for other towers."""

    def __init__(self, model: CLIP, config: TrainConfig) -> None:
        towers = {"image": model.image, "text": model.text}
        self._config = config
        self._heads: dict[str, Head] = {
            name: tower.head for name, tower in towers.items() if isinstance(tower, PretrainedTower)
        }

    def draw(self, rows: int, step: int, passes: Sequence[Pass]) -> dict[str, Tensor]:
        """Draw the masks of a batch for each pass through a tower, by name. True keeps a value."""
        masks = self._draw_masks("image", "image", rows, step, "dropout")
        masks |= self._draw_masks("text", "text", rows, step, "dropout")
        for other in passes:
            purpose = f"{other.name} dropout"
            masks |= self._draw_masks(other.tower, other.name, rows, step, purpose)
        return masks

    @contextmanager
    def applied(self, masks: Mapping[str, Tensor], passes: Mapping[str, str]) -> Iterator[None]:
        """Apply masks while towers compute. `passes` names the pass of each tower."""
        heads = {tower: head for tower, head in self._heads.items() if tower in passes}
        for tower, head in heads.items():
            head.dropping = {}
            for layer, rate in self._rates(tower).items():
                mask = masks[_mask_name(passes[tower], layer)]
                head.dropping[layer] = Dropping(rate, mask)
        try:
            yield
        finally:
            for head in heads.values():
                head.dropping = {}

    def _draw_masks(
        self, tower: str, pass_name: str, rows: int, step: int, purpose: str
    ) -> dict[str, Tensor]:
        if tower not in self._heads:
            return {}
        tower_number = list(self._heads).index(tower)
        step_seed = derived_seed(self._config.seed, purpose, step)
        seed = derived_seed(step_seed, "head", tower_number)
        features, hidden = self._heads[tower].hidden_in.shape
        widths = {"features": features, "hidden": hidden}
        masks = {}
        for layer, rate in self._rates(tower).items():
            draw = torch.Generator().manual_seed(derived_seed(seed, layer))
            values = torch.rand(rows, widths[layer], generator=draw)
            masks[_mask_name(pass_name, layer)] = values >= rate
        return masks

    def _rates(self, tower: str) -> dict[str, float]:
        """Return the dropout rate of each layer of a tower's head that has dropout."""
        feature_rate = self._config.feature_dropout if tower == "image" else 0.0
        rates = {"features": feature_rate, "hidden": self._config.head_dropout}
        return {layer: rate for layer, rate in rates.items() if rate}


def _mask_name(pass_name: str, layer: str) -> str:
    return f"{pass_name}_{layer}_mask"
