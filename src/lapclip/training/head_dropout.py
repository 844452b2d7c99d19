"""What the heads of pretrained networks leave out of a step: drawn for a whole batch, applied while towers compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.model.clip import CLIP
from lapclip.model.pretrained_towers import Dropping, Head, PretrainedTower
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
        for tower in self._heads:
            found |= self._of_tower(tower, rows, derived_seed(self._config.seed, "dropout", step))
        return found

    def draw_for_phrases(self, rows: int, step: int) -> dict[str, Tensor]:
        """The same for phrases, which only the text tower sees."""
        drawn = self._of_tower(
            "text", rows, derived_seed(self._config.seed, "phrase dropout", step)
        )
        return {name.replace("text", "phrase"): mask for name, mask in drawn.items()}

    def _of_tower(self, tower: str, rows: int, seed: int) -> dict[str, Tensor]:
        if tower not in self._heads:
            return {}
        head = self._heads[tower]
        seed = derived_seed(seed, "head", list(self._heads).index(tower))
        widths: dict[str, int] = dict(
            zip(("features", "hidden"), head.hidden_in.shape, strict=True)
        )
        found = {}
        for what, share in self._shares(tower).items():
            draw = torch.Generator().manual_seed(derived_seed(seed, what))
            found[f"{tower}_{what}_mask"] = torch.rand(rows, widths[what], generator=draw) >= share
        return found

    @contextmanager
    def applied(self, drawn: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the heads leave out what was drawn."""
        for tower, head in self._heads.items():
            head.dropping = {
                what: Dropping(share, drawn[f"{tower}_{what}_mask"])
                for what, share in self._shares(tower).items()
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
