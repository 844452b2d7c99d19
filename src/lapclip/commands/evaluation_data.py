"""Data to evaluate on: which images of which data set, and whether the model learned from them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lapclip.config import AUTO, DataConfig, Layer, build_config, parse_settings
from lapclip.data.dataset import Pairs, count_seen
from lapclip.data.loading import Listing, list_data
from lapclip.data.pixels import View
from lapclip.data.sources import find_source
from lapclip.data.splits import TRAIN
from lapclip.embedder import Encoder
from lapclip.errors import ConfigError, DataError, RunError, nearest
from lapclip.evaluation.mean_score import MeanScore, score_classes, score_pairs
from lapclip.evaluation.retrieval import linear_baseline
from lapclip.model.shapes import SHAPES
from lapclip.progress import DataProgress, Progress
from lapclip.prompts import TEMPLATES, class_embeddings, read_templates
from lapclip.suggest import command
from lapclip.which_model import NotAModel, WhichModel, which_model

ALL = "all"
DECIDE_SPLITS = ("seed", "split_rule", "split_column", "train_pairs", "held_out")
"""Settings that decide which images are for training. For the run's own data they are fixed."""
CHANGED_FILES = (
    "The images are not those that the run began with (added, or saved again), so it may have "
    "learned from some of these: this is no test of it."
)


@dataclass(frozen=True)
class EvaluationRequest:
    """Options of `lapclip eval`."""

    model: str | None = None
    data: str | None = None
    split: str | None = None
    device: str = AUTO
    out: Path | None = None
    settings: Sequence[str] = ()
    before: str | None = None
    """Model to compare with."""
    check: Sequence[str] = ()
    """Other data to compare both models on."""
    blend: bool = False
    """Whether to write the best model between both."""


@dataclass(frozen=True)
class EvaluationData:
    """Images to score."""

    split: str
    why: str
    pairs: Pairs
    classes: Sequence[str]
    notes: list[str]
    for_training: int | None
    """Number of them in the run's training split. None for other data."""
    linear_baseline: float | None = None
    changed: bool = False
    """Whether the run's own data has changed, so that it may have learned from any of these."""
    training_captions: Sequence[Sequence[str]] = ()
    """Captions of the run's own training split."""


@dataclass(frozen=True)
class Vectors:
    """Unit-length vectors of the images of a data set, and of its captions or classes."""

    images: np.ndarray
    texts: np.ndarray
    image_of_text: np.ndarray | None
    """Image of each caption. None for classes."""

    def mean_score(self, pairs: Pairs) -> MeanScore:
        if self.image_of_text is not None:
            return score_pairs(self.images, self.texts, self.image_of_text)
        assert pairs.labels is not None
        return score_classes(self.images, self.texts, pairs.labels)


@dataclass(frozen=True)
class ChosenData:
    """A data set to evaluate on, and how to read it again for another split or another model."""

    config: DataConfig
    view: View
    """How the model sees images."""
    templates: Sequence[str]
    """Sentences for the names of classes."""
    opened: EvaluationData
    fingerprint: str | None
    """Fingerprint of the data that the run learned from. None for other data."""
    seen: Path | None
    """File that lists the images that the run learned from."""

    def with_split(self, split: str, progress: DataProgress | None = None) -> ChosenData:
        """Open another split."""
        if split == self.opened.split:
            return self
        opened = open_data(self.config, self.view, split, self.fingerprint, progress, self.seen)
        return replace(self, opened=opened)

    def encode(self, embedder: Encoder, progress: Progress | None = None) -> Vectors:
        """Embed the images and the captions or classes.

        Images are read again for a model that sees them in another way.
        """
        opened = self.opened
        if embedder.view != self.view:
            opened = open_data(
                self.config, embedder.view, opened.split, self.fingerprint, None, self.seen
            )
        return encode(embedder, opened.pairs, opened.classes, self.templates, progress)

    def mean_score(self, embedder: Encoder, progress: Progress | None = None) -> MeanScore:
        """Score a model by mean recall, or by the mean recall of the classes."""
        return self.encode(embedder, progress).mean_score(self.opened.pairs)


def encode(
    embedder: Encoder,
    pairs: Pairs,
    classes: Sequence[str],
    templates: Sequence[str],
    progress: Progress | None = None,
) -> Vectors:
    """Embed images and captions, or images and classes. Raise RunError for non-finite vectors."""
    image_of_text = None
    if pairs.labels is not None and classes:
        images = embedder.encode_pixels(pairs.pixels, progress)
        texts = class_embeddings(embedder.encode_text, classes, templates)
    elif any(pairs.captions):
        images, texts, image_of_text = embedder.encode_pairs(pairs, progress)
    else:
        raise DataError("None of the images has a caption.", hint="lapclip data check DATA")
    if not (np.isfinite(images).all() and np.isfinite(texts).all()):
        raise RunError(
            "The model gives embeddings that are not numbers: its training broke down.",
            hint="lapclip doctor",
        )
    return Vectors(images, texts, image_of_text)


def find_model(request: EvaluationRequest) -> WhichModel:
    """Return the requested model. If a single argument names no model, suggest it as the data."""
    try:
        return which_model(request.model)
    except NotAModel as error:
        if request.data is not None:
            raise
        raise RunError(
            f"{error.message} To evaluate on it, name the model first.",
            hint=command("eval", "RUN", request.model),
        ) from None


def choose_data(model: WhichModel, request: EvaluationRequest) -> tuple[DataConfig, bool]:
    """Return the data to score on, and whether it is what the run learned from."""
    trained = model.config.data if model.config else None
    asked = parse_settings(list(request.settings))
    if request.data is None and trained is None:
        raise DataError(
            f"{model.path} is a model without a run: name the data.",
            hint=command("eval", model.path, "DATA"),
        )
    source = request.data if request.data is not None else trained.source if trained else ""
    own = trained is not None and _same(source, trained.source)
    _check_settings(asked, own=own)
    if own and trained is not None:
        first = Layer("the run", {"data": vars(trained)})
    else:
        # Of the run only the seed: columns and folders of other data are looked for anew.
        first = Layer(
            "the run", {"data": {"source": source, "seed": trained.seed if trained else 0}}
        )
    return build_config([first, asked], SHAPES).data, own


def count_trained_on(model: WhichModel, opened: EvaluationData) -> int | None:
    """Return how many of the images the model learned from, by their bytes. None if not known."""
    run = model.made_by
    seen = count_seen(opened.pairs.identities, run.seen) if run else None
    if seen is None and model.config and opened.for_training is None:
        # Drawn scenes are no files. A run that learned from scenes has seen no files, and no
        # other run has seen these scenes.
        drawn = find_source(model.config.data.source).is_drawn, opened.pairs.identities is None
        return 0 if any(drawn) else None
    if opened.changed:
        return seen or None
    return opened.for_training if seen is None else seen


def open_data(
    config: DataConfig,
    view: View,
    asked: str | None,
    fingerprint: str | None,
    progress: DataProgress | None,
    seen: Path | None = None,
) -> EvaluationData:
    """Load the images to score.

    `fingerprint` is that of the data that the run began with: "" if not known, None for data that
    it did not learn from. Such data has only the splits that it names itself. `seen` is the file
    that lists the images that the run learned from.
    """
    listing, own = list_data(config, view, progress), fingerprint is not None
    classes, splits = listing.table.classes, listing.splits if own else listing.named_splits(ALL)
    split, why = choose_split(
        list(dict.fromkeys(splits)), asked, learnt_from=own, classes=bool(classes)
    )
    chosen = [at for at, each in enumerate(splits) if split in (ALL, each)]
    pairs, notes = listing.load(chosen, view, progress)
    if not len(pairs):
        raise DataError(f"The split {split} has no images that can be read.", hint=f"--split {ALL}")
    of_training = min(
        len(pairs), sum(splits[at] == TRAIN for at in chosen)
    )  # at the most: some may be broken
    for_training = of_training if own else None
    if listing.drawn is None:
        changed = seen is not None and listing.has_changed_since(seen, view, progress)
        notes = [*[CHANGED_FILES] * changed, *notes]
        captions = training_captions_of(listing) if own and not changed else ()
        return EvaluationData(
            split, why, pairs, classes, notes, for_training, None, changed, captions
        )
    if fingerprint not in (None, "", listing.drawn.fingerprint):
        notes = ["The data is not what the run began with: it is scored as it is now."]
    baseline, captions = (
        linear_baseline(listing.drawn.train, pairs),
        training_captions_of(listing) if own else (),
    )
    return EvaluationData(
        split, why, pairs, classes, notes, for_training, baseline, training_captions=captions
    )


def choose_split(
    splits: Sequence[str], asked: str | None, *, learnt_from: bool, classes: bool = False
) -> tuple[str, str]:
    """Return the split to score, and the reason."""
    if asked is not None:
        if asked not in (ALL, *splits):
            raise DataError(
                f"The data has no split {asked}. {nearest(asked, splits)}", hint=f"--split {ALL}"
            )
        return asked, "asked for"
    if classes and not learnt_from:
        return ALL, "classes: all images count"
    if "test" in splits:
        return "test", "it chose nothing"
    if "val" in splits:
        return "val", "there is no test split" + (
            "; val chose the checkpoint" if learnt_from else ""
        )
    return ALL, "it has no splits of its own" if ALL in splits else "it has no test or val split"


def choose_templates(config: DataConfig, *, own: bool) -> list[str]:
    """Return the prompts of the run or of --set, else the default templates."""
    if own or config.prompts != DataConfig().prompts:
        return read_templates(config.prompts)
    return list(TEMPLATES)


def training_captions_of(listing: Listing) -> Sequence[Sequence[str]]:
    if listing.drawn is not None:
        return listing.drawn.train.captions
    return [
        row.captions
        for row, split in zip(listing.table.rows, listing.splits, strict=True)
        if split == TRAIN
    ]


def _same(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _check_settings(asked: Layer, *, own: bool) -> None:
    """Refuse settings by which training images would be scored as if they were held out."""
    given = asked.values.get("data", {})
    if "source" in given:
        raise ConfigError(
            "The data to score on is not a setting.", hint=command("eval", "RUN", given["source"])
        )
    fixed = [name for name in DECIDE_SPLITS if own and name in given]
    if fixed:
        raise ConfigError(
            f"data.{fixed[0]} decides which images the run learned from, so it stays as it was.",
            hint=f"leave out --set data.{fixed[0]}; --split NAME chooses among the splits",
        )


def note_on_training(trained_on: int | None, pictures: int) -> list[str]:
    if not trained_on:
        return []
    return [
        f"The model was trained on {trained_on:,} of these {pictures:,} images: this is no test of it."
    ]
