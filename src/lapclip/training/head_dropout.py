"""Dropout in the heads of pretrained networks: drawn once a batch, so that its micro-batches agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.model.clip import CLIP
from lapclip.model.pretrained.pretrained_towers import Dropping, Head, PretrainedTower
from lapclip.seeding import derived_seed


class HeadDropout:
    """Draws what is not dropped, and gives it to the heads of pretrained networks, where a model has some."""

    def __init__(self, model: CLIP, config: TrainConfig) -> None:
        towers = {"image": model.image, "text": model.text}
        self._config = config
        self._heads: dict[str, Head] = {
            name: tower.head for name, tower in towers.items() if isinstance(tower, PretrainedTower)
        }

    def draw(self, rows: int, step: int) -> dict[str, Tensor]:
        """What is not left out of so many rows, by the names that `Inputs` has for it."""
        found = {}
        for at, (tower, head) in enumerate(self._heads.items()):
            seed = derived_seed(derived_seed(self._config.seed, "dropout", step), "head", at)
            widths: dict[str, int] = dict(zip(("features", "hidden"), head.hidden_in.shape, strict=True))
            for what, share in self._shares(tower).items():
                draw = torch.Generator().manual_seed(derived_seed(seed, what))
                found[f"{tower}_{what}_kept"] = torch.rand(rows, widths[what], generator=draw) >= share
        return found

    @contextmanager
    def applied(self, drawn: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the heads leave out what was drawn."""
        for tower, head in self._heads.items():
            head.dropping = {
                what: Dropping(share, drawn[f"{tower}_{what}_kept"]) for what, share in self._shares(tower).items()
            }
        try:
            yield
        finally:
            for head in self._heads.values():
                head.dropping = {}

    def _shares(self, tower: str) -> dict[str, float]:
        """The share that a tower's head leaves out of its features and of its hidden layer, where it is not nothing."""
        of_features = self._config.feature_dropout if tower == "image" else 0.0
        shares = {"features": of_features, "hidden": self._config.head_dropout}
        return {what: share for what, share in shares.items() if share}
