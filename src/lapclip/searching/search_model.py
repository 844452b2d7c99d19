"""The model that search works with: what runs it, whether it made an index, and what a person should know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from lapclip.data.sources import find_source
from lapclip.embedder import (
    Embedder,
    Encoder,
    load_torch,
    naming_device_flag,
    open_exported,
)
from lapclip.errors import RunError
from lapclip.evaluation.calibration import Calibration, calibration_of
from lapclip.runs.events import mapping, read_events
from lapclip.runs.folder import Run
from lapclip.searching.indexes import KnownIndex
from lapclip.text import number
from lapclip.weights import is_exported
from lapclip.weights.published_models import RECALL_SOURCE, PublishedModel
from lapclip.which_model import (
    WhichModel,
    for_photos,
    newest_on_photos,
    that_made_an_index,
    which_model,
)

CPU_BATCH = 32
"""Images at once where each takes long: progress is seen, and a killed process loses no more than a batch."""


@dataclass
class SearchModel:
    """Turns images and texts into unit-length vectors, and knows which index is its own."""

    which: WhichModel
    model: Encoder
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.identity = self.model.image_fingerprint()
        """What an index says of the model that made it. The text tower may change; vectors of images stay."""
        self.view, self.width = self.model.view, self.model.embedding
        on_cpu = not isinstance(self.model, Embedder) or self.model.device.is_cpu
        self.batch = CPU_BATCH if on_cpu else self.model.batch

    @cached_property
    def calibration(self) -> Calibration | None:
        """Correction for hubness that `lapclip eval` measured. None where it was not measured."""
        return calibration_of(self.which, self.model)

    def encode_pixels(self, pixels_NSSC: np.ndarray, /) -> np.ndarray:
        return self.model.encode_pixels(pixels_NSSC)

    def encode_text(self, captions: Sequence[str], /) -> np.ndarray:
        return self.model.encode_text(captions)


def open_search_model(
    name: str | None, device: str = "auto", known: Sequence[KnownIndex] = ()
) -> SearchModel:
    """Open the named model, else the one that made the index used last, else the newest that learned from images.

    `known` are the indexes of the folder.
    """
    notes: list[str] = []
    which = which_model(name, lambda: _that_made_one(known, notes) or newest_on_photos())
    model = _open(which, device)
    stale = [one for one in known if one.fingerprint and one.reference == which.reference]
    if stale and index_of(model, known) is None:
        removes = stale[0].forget_command(stale[0].fingerprint)
        notes.append(
            f"{which.name} has changed since it made an index of this folder: a new one is made; {removes} removes the "
            "old one."
        )
    model.notes += notes
    return model


def index_of(model: SearchModel, known: Sequence[KnownIndex]) -> KnownIndex | None:
    """Return the index that a model made."""
    return next((one for one in known if one.fingerprint == model.identity), None)


def _that_made_one(known: Sequence[KnownIndex], notes: list[str]) -> WhichModel | None:
    """The model that made the index that was used last; the next one where that model is gone, with a note."""
    for one in known:
        maker = that_made_an_index(one.reference) if one.reference else None
        if maker is not None:
            return maker
        if one.fingerprint is not None:
            notes.append(
                f"An index of this folder was made with {one.name}, which is gone. --model PATH of a copy uses it "
                f"again, and {one.forget_command()} removes it."
            )
    return None


def _open(which: WhichModel, device: str) -> SearchModel:
    if is_exported(which.path):
        model = SearchModel(which, open_exported(which.path))
    else:
        with naming_device_flag():
            model = SearchModel(which, load_torch(which.path, device))
    if not np.isfinite(model.encode_text(["an image"])).all():
        raise RunError(
            f"The model in {which.path} gives no numbers: its training broke down.",
            hint="lapclip doctor",
        )
    return model


def model_notes(which: WhichModel) -> list[str]:
    """What is known of a model, for a person who is about to trust it."""
    run = which.made_by
    if (published := which.published) is not None:
        return _published_notes(published)
    if run is None:
        return [
            f"{which.name} comes from elsewhere: lapclip does not know what it has seen, nor how well it does here. "
            "lapclip eval MODEL DATA measures it on images with captions."
        ]
    source, (images, metrics) = run.data_source(), _history(run)
    count = "images" if images is None else f"{images:,} images"
    drawn = source is not None and find_source(source).is_drawn
    if drawn:
        notes = [
            f"{which.name} was trained on {count} of lapclip's own drawn scenes and on no photos: it finds things in "
            "drawn scenes, not in photos.",
            f"For photos: {for_photos()}.",
        ]
    else:
        start = _start(run)
        notes = [f"{which.name}: trained on {count} of {source}{start}."]
    if metrics is None:
        return [
            *notes,
            "It was never scored on images it has not seen: lapclip eval says how well it does.",
        ]
    first, tenth, candidates = (
        metrics.get("t2i_r1"),
        metrics.get("t2i_r10"),
        metrics.get("candidates"),
    )
    if first is None or tenth is None or not candidates:
        return notes
    what = "scenes" if drawn else "images"
    unseen = f"it was not trained on (split {metrics.get('split') or 'val'})"
    return [
        *notes,
        f"Among {candidates:,} {what} {unseen}, a caption finds its own first in {first:.0%} of cases and "
        f"among the first ten in {tenth:.0%} (chance {min(1, 10 / candidates):.1%})."
        + _short_questions(mapping(metrics.get("short_questions")))
        + ("" if drawn else " Images of another kind may do worse."),
    ]


def reading_notes(model: SearchModel) -> list[str]:
    """Return what the hubness correction gained, if the model has one."""
    if model.calibration is None or not model.calibration.share:
        return []
    return [model.calibration.gain_text()]


def _short_questions(found: dict[str, Any]) -> str:
    """How a single word does, which is what people type; nothing of a run that was not asked."""
    right, chance = number(found.get("first_five")), number(found.get("first_five_chance"))
    if right is None or chance is None:
        return ""
    return f" Asked for a single word, {right:.0%} of its first five answers have it in a caption (chance {chance:.0%})."


def _published_notes(model: PublishedModel) -> list[str]:
    """What others measured of a published model."""
    measured = f"lapclip eval {model.name} DATA measures it on your own images with captions."
    if not model.flickr30k:
        return [f"{model.name} comes from {model.page}. {measured}"]
    first, _, tenth = model.flickr30k[:3]
    return [
        f"{model.name} comes from {model.page}. Among Flickr30k's 1,000 test images, a caption finds its own first in "
        f"{first:.0%} of cases and among the first ten in {tenth:.0%} (published: {RECALL_SOURCE}). {measured}"
    ]


def _start(run: Run) -> str:
    """Return the end of a sentence that says what a run started from."""
    saved = run.read_settings()
    towers = [str(saved.get("model", {}).get(key) or "") for key in ("image_from", "text_from")]
    began = str(saved.get("train", {}).get("start") or "")
    if any(towers):
        return f", starting from {' and '.join(tower for tower in towers if tower)}"
    return f", starting from {began}" if began else ", from scratch"


def _history(run: Run) -> tuple[int | None, dict[str, Any] | None]:
    """How many images a run learnt from, and its last metrics on those held out; None where it does not say."""
    images, metrics = None, None
    for event in read_events(run.events):
        if event["type"] == "started":
            images = (event.get("pairs") or {}).get("train", images)
        elif event["type"] in ("evaluation", "finished") and event.get("evaluation"):
            short = event.get("short_questions")
            metrics = {"split": event.get("split"), **event["evaluation"], "short_questions": short}
    return images, metrics
