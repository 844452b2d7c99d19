"""What a model has seen, and how well it finds things on images it has not seen: sentences for a person."""

from __future__ import annotations

from typing import Any

from lapclip.data.sources import find_source
from lapclip.runs.event_log import read_events
from lapclip.runs.folder import Run
from lapclip.which_model import PRETRAINED, WhichModel


def model_notes(which: WhichModel) -> list[str]:
    """What is known of a model, for a person who is about to trust it."""
    run = which.made_by
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
            f"{which.name} has seen {count} of lapclip's own drawn scenes and not one photo: "
            "it cannot find things in photos, and the order of its answers means little.",
            f"For photos: {PRETRAINED}.",
        ]
    else:
        start = _start(run)
        notes = [f"{which.name} learnt from {count} in {source}{start}."]
    if metrics is None:
        return [*notes, "It was never scored on images it has not seen: lapclip eval says how well it does."]
    first, tenth, candidates = metrics.get("t2i_r1"), metrics.get("t2i_r10"), metrics.get("candidates")
    if first is None or tenth is None or not candidates:
        return notes
    what = "scenes" if drawn else "images"
    return [
        *notes,
        f"Among {candidates:,} {what} it was not trained on, a caption finds its own first in {first:.0%} of cases "
        f"and among the first ten in {tenth:.0%} (chance {min(1, 10 / candidates):.1%})."
        + ("" if drawn else " Images of another kind may do worse."),
    ]


def _start(run: Run) -> str:
    """What it began with, where that had seen more than the run itself."""
    saved = run.read_settings()
    towers = [str(saved.get("model", {}).get(key) or "") for key in ("image_from", "text_from")]
    began = str(saved.get("train", {}).get("start") or "")
    if any(towers):
        return f", on top of towers trained before on more ({' and '.join(tower for tower in towers if tower)})"
    return f", after what {began} had seen" if began else ", and from nothing else"


def _history(run: Run) -> tuple[int | None, dict[str, Any] | None]:
    """How many images a run learnt from, and its last metrics on those held out; None where it does not say."""
    images, metrics = None, None
    for event in read_events(run.events):
        if event["type"] == "started":
            images = (event.get("pairs") or {}).get("train", images)
        elif event["type"] in ("evaluation", "finished") and event.get("evaluation"):
            metrics = event["evaluation"]
    return images, metrics
