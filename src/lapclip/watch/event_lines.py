"""An event as one line, where there is no terminal to draw on."""

from __future__ import annotations

from typing import Any

from lapclip.text import duration, number, one_line, percent, significant
from lapclip.watch.event_notices import text_of
from lapclip.watch.run_view import Look


def line(event: dict[str, Any], look: Look) -> str:
    """What a person wants to know of it; nothing of a step, which come by the thousand."""
    name, step = one_line(look.name), number(event.get("step"))
    at = f"{name}: step {step:,.0f}" if step is not None else f"{name}:"
    scores = event.get("evaluation")
    if event["type"] == "evaluation" and isinstance(scores, dict):
        parts = [
            at,
            f"epoch {significant(event.get('epoch'), 6)}",
            f"loss {significant(look.loss.y[-1])}" if look.loss else "",
            _recall(scores),
            "best" if event.get("best") else "",
            f"{duration(look.time_left.seconds)} left" if look.time_left else "",
        ]
        return "  ".join(filter(None, parts))
    if event["type"] == "finished" and isinstance(scores, dict):
        return f"{at}  finished  {_recall(scores)}"
    text = text_of(event) if event["type"] != "started" else "started"
    return f"{at}  {one_line(text)}" if text else ""


def _recall(scores: dict[str, Any]) -> str:
    return f"R@1 text to image {percent(scores.get('t2i_r1'))}, image to text {percent(scores.get('i2t_r1'))}"
