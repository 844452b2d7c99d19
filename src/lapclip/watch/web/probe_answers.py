"""Whether a run learns, in a sentence, and what it answered to its probe captions at each evaluation."""

from __future__ import annotations

from typing import Any

from lapclip.runs.curves import Curve, samples, smoothed
from lapclip.runs.event_log import mapping
from lapclip.runs.summary import Summary
from lapclip.runs.view import RunView
from lapclip.text import number

MOST_EVALUATIONS = 60
MOST_ANSWERS = 40
FALLEN = 0.98
"""A loss below this share of its first value has fallen."""


def verdict(view: RunView, *, over: bool) -> dict[str, str]:
    """The answer to "is it learning", and what it rests on: held-out pairs where there are any, else the loss."""
    if view.summary.evaluations:
        return _by_recall(view, over)
    loss = smoothed(view.loss, share=0.1)
    if len(loss) < 3:
        return {"answer": "Too early to say", "detail": "It has only just begun."}
    first, last = loss.y[0], loss.y[-1]
    if last < FALLEN * first:
        return {"answer": "Yes, so far", "detail": f"The loss fell from {first:.2f} to {last:.2f}. Not yet tested."}
    return {"answer": "Not yet", "detail": f"The loss was {first:.2f} and is {last:.2f}. Not yet tested."}


def probe_answers(summary: Summary) -> list[dict[str, Any]]:
    """The answers at each evaluation; of very many evaluations some."""
    found = []
    for event in summary.probes:
        if isinstance(event.get("answers"), list):
            answers = [known for answer in event["answers"][:MOST_ANSWERS] if (known := _answer(answer))]
            found.append({"step": int(event["step"]), "epoch": number(event.get("epoch")), "answers": answers})
    return [found[at] for at in samples(len(found), MOST_EVALUATIONS)]


def _by_recall(view: RunView, over: bool) -> dict[str, str]:
    recall, summary = view.recall, view.summary
    chance = number(summary.evaluations[-1]["evaluation"].get("chance"))
    if not recall:
        return {"answer": "Not known", "detail": "Its evaluations have no recall."}
    best = max(recall.y)
    found = f"It finds the right image for {_share(best)} of new captions"
    against = f"; guessing finds {_share(chance)}." if chance else "."
    if chance and not _above(summary, chance):
        return {"answer": "Not yet", "detail": f"{found}{against} That may still be luck."}
    return {"answer": _trend(recall, over), "detail": f"{found}{against}"}


def _trend(recall: Curve, over: bool) -> str:
    if over:
        return "It has learnt"
    # Three evaluations in a row without a new best: the curve has levelled.
    return "It has levelled off" if len(recall) > 4 and max(recall.y[-3:]) < max(recall.y[:-3]) else "Yes"


def _above(summary: Summary, chance: float) -> bool:
    """Whether the lower end of an R@1's interval lies above chance."""
    for event in summary.evaluations:
        match mapping(event["evaluation"].get("intervals")).get("t2i_r1"):
            case [low, _] if number(low) is not None:
                above = low > chance
            case _:
                above = (number(event["evaluation"].get("t2i_r1")) or 0.0) > 2 * chance
        if above:
            return True
    return False


def _answer(answer: Any) -> dict[str, Any] | None:
    """An answer with all its fields, whatever the file holds."""
    if not isinstance(answer, dict) or not isinstance(answer.get("top"), list):
        return None
    images = [
        {"picture": int(image), "score": number(found.get("score"))}
        for found in answer["top"][:5]
        if isinstance(found, dict) and (image := number(found.get("picture"))) is not None and image >= 0
    ]
    return {
        "caption": str(answer.get("caption", ""))[:300],
        "own": bool(answer.get("own")),
        "right": number(answer.get("right")),
        "rank": number(answer.get("rank")),
        "top": images,
    }


def _share(value: float) -> str:
    return f"{value * 100:.1f} %" if value < 0.1 else f"{value * 100:.0f} %"
