"""The honest sentences: what a model has seen, and how well it finds things on images it has not seen."""

from __future__ import annotations

from typing import Any

from lapclip.data.loading import SCENES
from lapclip.runs.event_log import read_events
from lapclip.runs.folder import Run
from lapclip.which_model import PRETRAINED, WhichModel


def sentences(subject: WhichModel) -> list[str]:
    """What is known of a model, for a person who is about to trust it."""
    run = subject.made_by
    if run is None:
        return [
            f"{subject.name} comes from elsewhere: lapclip does not know what it has seen, nor how well it does here. "
            "lapclip eval MODEL DATA measures it on images with captions."
        ]
    source, (images, scores) = run.data_source(), history(run)
    count = "pictures" if images is None else f"{images:,} images"
    if source == SCENES:
        said = [
            f"{subject.name} has seen {count} of lapclip's own drawn scenes and not one photo: "
            "it cannot find things in photos, and the order of its answers means little.",
            f"For photos: {PRETRAINED}.",
        ]
    else:
        start = _start(run)
        said = [f"{subject.name} learnt from {count} in {source}{start}."]
    if scores is None:
        return [*said, "It was never scored on images it has not seen: lapclip eval says how well it does."]
    first, tenth, candidates = scores.get("t2i_r1"), scores.get("t2i_r10"), scores.get("candidates")
    if first is None or tenth is None or not candidates:
        return said
    what = "scenes" if source == SCENES else "pictures"
    return [
        *said,
        f"Among {candidates:,} {what} it was not trained on, a caption finds its own first in {first:.0%} of cases "
        f"and among the first ten in {tenth:.0%} (chance {min(1, 10 / candidates):.1%})."
        + ("" if source == SCENES else " Images of another kind may do worse."),
    ]


def _start(run: Run) -> str:
    """What it began with, where that had seen more than the run itself."""
    saved = run.read_settings()
    towers = [str(saved.get("model", {}).get(key) or "") for key in ("image_from", "text_from")]
    began = str(saved.get("train", {}).get("start") or "")
    if any(towers):
        return f", on top of towers trained before on more ({' and '.join(tower for tower in towers if tower)})"
    return f", after what {began} had seen" if began else ", and from nothing else"


def history(run: Run) -> tuple[int | None, dict[str, Any] | None]:
    """How many images a run learnt from, and its last scores on those held out; None where it does not say."""
    images, scores = None, None
    for event in read_events(run.events):
        if event["type"] == "started":
            images = (event.get("pairs") or {}).get("train", images)
        elif event["type"] in ("evaluation", "finished") and event.get("evaluation"):
            scores = event["evaluation"]
    return images, scores
