"""What the heads of pretrained networks leave out: drawn for a whole batch, applied while towers
compute."""

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
    """Draws what is kept, and gives it to the heads of pretrained networks, if a model has some."""

    def __init__(self, model: CLIP, config: TrainConfig) -> None:
        towers = {"image": model.image, "text": model.text}
        self._config = config
        self._heads: dict[str, Head] = {
            name: tower.head for name, tower in towers.items() if isinstance(tower, PretrainedTower)
        }

    def draw(self, rows: int, step: int, passes: Sequence[Pass]) -> dict[str, Tensor]:
        """Draw what is kept of so many rows in each pass through a tower, by the names that
        `applied` reads."""
        masks = self._masks("image", "image", rows, step, "dropout")
        masks |= self._masks("text", "text", rows, step, "dropout")
        for other in passes:
            masks |= self._masks(other.tower, other.name, rows, step, f"{other.name} dropout")
        return masks

    @contextmanager
    def applied(self, masks: Mapping[str, Tensor], passes: Mapping[str, str]) -> Iterator[None]:
        """Let the head of each tower leave out what was drawn for a pass: `passes` has its name by
        tower."""
        heads = {tower: head for tower, head in self._heads.items() if tower in passes}
        for tower, head in heads.items():
            head.dropping = {
                layer: Dropping(share, masks[f"{passes[tower]}_{layer}_mask"])
                for layer, share in self._shares(tower).items()
            }
        try:
            yield
        finally:
            for head in heads.values():
                head.dropping = {}

    def _masks(
        self, tower: str, name: str, rows: int, step: int, purpose: str
    ) -> dict[str, Tensor]:
        if tower not in self._heads:
            return {}
        seed = derived_seed(self._config.seed, purpose, step)
        seed = derived_seed(seed, "head", list(self._heads).index(tower))
        features, hidden = self._heads[tower].hidden_in.shape
        widths = {"features": features, "hidden": hidden}
        masks = {}
        for layer, share in self._shares(tower).items():
            draw = torch.Generator().manual_seed(derived_seed(seed, layer))
            masks[f"{name}_{layer}_mask"] = torch.rand(rows, widths[layer], generator=draw) >= share
        return masks

    def _shares(self, tower: str) -> dict[str, float]:
        """Return the share that a tower's head leaves out of each layer, where it is not 0."""
        of_features = self._config.feature_dropout if tower == "image" else 0.0
        shares = {"features": of_features, "hidden": self._config.head_dropout}
        return {layer: share for layer, share in shares.items() if share}
