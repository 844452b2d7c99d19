"""What an objective is: a term of the loss, the arrays that it adds to a batch, and its metrics.

Shapes: B pairs of a batch, R of them this process's own, E embedding, L tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.data.batches import BatchPlan, DrawnRows, Slicing
from lapclip.model.clip import CLIP
from lapclip.training.loss_rows import Columns


@dataclass(frozen=True)
class Pass:
    """Another pass of a batch through a tower. The term finds its embeddings under the name.

    A pass through the text tower reads the extra NAME_tokens_BL and, if the tower's frozen features
    are cached, NAME_features. A pass through the image tower sees new crops: the step draws
    NAME_boxes_B5.
    """

    name: str
    tower: str

    @property
    def source(self) -> str:
        """The extra that the tower sees."""
        return f"{self.name}_boxes_B5" if self.tower == "image" else f"{self.name}_tokens_BL"

    @property
    def features(self) -> str:
        """The extra that takes the place of the frozen part of the text tower."""
        return f"{self.name}_features"


@dataclass(frozen=True)
class TruePairs:
    """Which of this process's rows belong to which rows of the whole batch."""

    by_image_RB: Tensor
    """Own images (rows) with all texts (columns)."""
    by_text_RB: Tensor
    """Own texts (rows) with all images (columns)."""


@dataclass(frozen=True)
class LossRows:
    """What the terms of the loss are computed from. In one process its own rows are all rows."""

    model: CLIP
    own: Mapping[str, Tensor]
    """This process's embeddings of each pass, (R, E). The main passes are "image" and "text"."""
    gathered: Mapping[str, Tensor]
    """The embeddings of the whole batch, (B, E), of each pass."""
    pairs: Mapping[str, TruePairs]
    """"positives_BB", and the extras that are sliced by rows and columns."""
    extras: Mapping[str, Tensor]
    """This process's rows of all other extras."""
    size: int
    """Pairs of the whole batch."""
    columns: Columns | None = None
    """Where the rows of other ranks come from. None for a single process."""

    @property
    def is_whole(self) -> bool:
        """Whether this process's rows are all rows."""
        return self.own is self.gathered


@dataclass(frozen=True)
class Term:
    """What this process's rows add to a term of the loss, with the metrics to report.

    Summed over all processes, terms and means over rows are those of the whole batch.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


class Objective(ABC):
    """A term of the loss."""

    extras: ClassVar[Mapping[str, Slicing]] = {}
    """The arrays that it adds to a batch, by name, and how each is sliced."""
    passes: ClassVar[Sequence[Pass]] = ()
    """Its own passes through the towers."""
    metrics: ClassVar[Mapping[str, str]] = {}
    """What each of its further metrics is, by name."""
    is_recorded: ClassVar[bool] = False
    """Whether the term is part of the loss that is recorded, or only of the one that is
    minimized."""
    is_share: ClassVar[bool] = False
    """Whether the weight is a share of the loss, which the terms before it give up."""

    weight: float = 1.0
    """Weight of the term in the loss that is minimized."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @abstractmethod
    def term(self, rows: LossRows) -> Term:
        """Compute the term."""

    def is_in(self, extras: Mapping[str, object]) -> bool:
        """Return whether a batch has what the term needs."""
        needed = [*self.extras, *(each.source for each in self.passes)]
        return all(name in extras for name in needed)

    def check(self) -> None:
        """Raise ConfigError for settings that the term cannot work with."""
        return

    def arrays(self, plan: BatchPlan, drawn: DrawnRows) -> dict[str, np.ndarray]:
        """Return the extras of a batch. Without them the batch goes without this term."""
        return {}

    def texts(self, plan: BatchPlan) -> dict[str, Sequence[np.ndarray]]:
        """Return further texts for the text tower as tokens, by the name of their pass."""
        return {}

    def why_unused(self, plan: BatchPlan) -> str | None:
        """Return why no batch of this data can have the term. None if some can."""
        return None

    def start(self, model: CLIP, *, is_new: bool) -> None:
        """Give the model what the term needs at the start.

        `is_new` is False for a model that has been trained before.
        """
        return
