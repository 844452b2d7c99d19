"""The terms of the loss. Each is one file, which a setting of `train` switches on.

The setting names its objective in `config.py`: `setting(0.0, objective="phrases.PhraseObjective")`.
An objective is active if its setting is neither 0 nor empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from itertools import chain
from typing import TypeVar

import numpy as np
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.data.batches import BatchPlan, DrawnRows, Slicing
from lapclip.model.clip import CLIP
from lapclip.training.inputs import POSITIVES, Inputs
from lapclip.training.loss_rows import Columns
from lapclip.training.objectives.base import LossRows, Objective, Pass, TruePairs

Value = TypeVar("Value")


@dataclass(frozen=True)
class Loss:
    """The loss of some rows of a batch."""

    total: Tensor
    """The loss that is minimized: all terms with their weights."""
    metrics: dict[str, Tensor]
    """Scalars by name. "loss" leaves out terms that cannot be compared with guessing."""


class Objectives:
    """The active objectives of a configuration."""

    def __init__(self, config: TrainConfig, **prepared: object) -> None:
        """`prepared` are arguments of objectives that need data of their own, by the name of their
        setting."""
        self._by_setting: dict[str, Objective] = {}
        for setting in fields(TrainConfig):
            path = setting.metadata["objective"]
            if path and getattr(config, setting.name):
                module, _, name = path.partition(".")
                kind = getattr(import_module(f"{__name__}.{module}"), name)
                arguments = [prepared[setting.name]] if setting.name in prepared else []
                self._by_setting[setting.name] = kind(config, *arguments)

    def __iter__(self) -> Iterator[Objective]:
        return iter(self._by_setting.values())

    @property
    def slicing(self) -> dict[str, Slicing]:
        """How each extra of a batch is sliced."""
        return merge(objective.extras for objective in self)

    @property
    def passes(self) -> list[Pass]:
        """All passes through the towers beside those of images and captions."""
        return list(chain.from_iterable(objective.passes for objective in self))

    @property
    def metrics(self) -> dict[str, str]:
        """What each further metric is, by name."""
        return merge(objective.metrics for objective in self)

    def check(self) -> None:
        """Raise ConfigError for settings that a term cannot work with."""
        for objective in self:
            objective.check()

    def start(self, model: CLIP, *, is_new: bool) -> None:
        """Give the model what the terms need at the start."""
        for objective in self:
            objective.start(model, is_new=is_new)

    def why_unused(self, plan: BatchPlan) -> dict[str, str]:
        """Return why objectives are not used with this data, by the name of their setting."""
        reasons = {
            f"train.{name}": each.why_unused(plan) for name, each in self._by_setting.items()
        }
        return {name: reason for name, reason in reasons.items() if reason}

    def arrays(self, plan: BatchPlan, drawn: DrawnRows) -> dict[str, np.ndarray]:
        """Return all extras of a batch."""
        return merge(objective.arrays(plan, drawn) for objective in self)

    def texts(self, plan: BatchPlan) -> dict[str, Sequence[np.ndarray]]:
        """Return all further texts for the text tower as tokens, by the name of their pass."""
        texts = merge(objective.texts(plan) for objective in self)
        return {name: tokens for name, tokens in texts.items() if len(tokens)}

    def in_batch(self, inputs: Inputs) -> list[Objective]:
        """Return the objectives whose terms a batch has."""
        return [objective for objective in self if objective.is_in(inputs.extras)]

    def loss(
        self,
        model: CLIP,
        inputs: Inputs,
        embeddings: Mapping[str, Tensor],
        own: slice | None = None,
        columns: Columns | None = None,
    ) -> Loss:
        """Compute the loss from the embeddings of all pairs; with `own` only what these rows add to
        it.

        With `columns` the rows of other ranks come from there. In a ring the embeddings are those of
        own rows alone.
        """
        rows = loss_rows(model, inputs, embeddings, own, columns)
        terms = [(objective, objective.term(rows)) for objective in self.in_batch(inputs)]
        # Weighed with the recorded ones first, but computed in the order of the settings: sums of
        # gradients depend on it.
        terms.sort(key=lambda pair: not pair[0].is_recorded)
        (_, contrastive), *others = terms
        total = recorded = contrastive.loss
        metrics = dict(contrastive.metrics)
        for objective, term in others:
            metrics |= term.metrics
            weight = objective.weight
            if objective.is_share:
                total = (1 - weight) * total + weight * term.loss
            else:
                total = total + weight * term.loss
            if objective.is_recorded:
                if weight < 1:
                    metrics["contrastive_loss"] = recorded.detach()
                recorded = total
        return Loss(total, {"loss": recorded.detach(), **metrics})


def loss_rows(
    model: CLIP,
    inputs: Inputs,
    embeddings: Mapping[str, Tensor],
    own: slice | None,
    columns: Columns | None = None,
) -> LossRows:
    """Return what terms are computed from. Without `own` all rows are this process's."""
    pairs, extras, own_embeddings = {}, {}, embeddings
    if own is not None and not (columns and columns.is_ring):
        own_embeddings = {name: rows_BE[own] for name, rows_BE in embeddings.items()}
    for name, tensor in {POSITIVES: inputs.positives_BB, **inputs.extras}.items():
        match inputs.slicing_of(name):
            case _ if name == POSITIVES and inputs.row_counts:
                pairs[name] = TruePairs(tensor, tensor)  # own rows of a symmetric matrix
            case Slicing.ROWS_AND_COLUMNS if own is None:
                pairs[name] = TruePairs(tensor, tensor.T)
            case Slicing.ROWS_AND_COLUMNS:
                pairs[name] = TruePairs(tensor[own], tensor.T[own])
            case Slicing.ROWS if own is not None:
                extras[name] = tensor[own]
            case _:
                extras[name] = tensor
    return LossRows(model, own_embeddings, embeddings, pairs, extras, len(inputs), columns)


def merge(mappings: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """Return one dictionary of all entries."""
    merged: dict[str, Value] = {}
    for mapping in mappings:
        merged.update(mapping)
    return merged
