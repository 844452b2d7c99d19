"""One run as numbers for the charts: few enough points for a screen, few enough digits for the way to the browser.

With it, whether the run learns, in a sentence, and what it answered to its probe captions at each evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from lapclip.runs.curves import Curve, curve, samples, smoothed, thinned, windows
from lapclip.runs.events import mapping
from lapclip.runs.messages import stopped_by
from lapclip.runs.summary import Summary
from lapclip.runs.trend import Trend, validation
from lapclip.runs.view import RunView
from lapclip.text import metric_title, number, part_name

POINTS = 600
COLUMNS = 80
"""Of a heat map."""
MOST_EVALUATIONS = 400
MOST_PROBES = 60
MOST_ANSWERS = 40
FALLEN = 0.98
"""A loss below this share of its first value has fallen."""


def snapshot(row: dict[str, Any], view: RunView) -> dict[str, Any]:
    """All that the page draws of a run. `row` is its line in the list of runs."""
    summary = view.summary
    return {
        **row,
        "about": _about(view),
        "ending": {
            name: summary.ending.get(name)
            for name in ("type", "time", "error", "reason")
            if summary.ending
        },
        "elapsed": summary.training_seconds,
        "pairs_per_second": summary.pairs_per_second,
        "stopped": f"Stopped{stopped_by(summary.ending)}"
        if summary.ending.get("type") == "stopped"
        else None,
        "learning": verdict(view, over=not row["working"]),
        "forecast": asdict(view.time_left) if view.time_left else None,
        "findings": [asdict(finding) for finding in view.findings],
        "scores": {
            name: number(summary.scores.get(name))
            for name in ("t2i_r1", "t2i_r5", "i2t_r1", "i2t_r5", "chance")
        },
        "curves": _curves(view),
        "metrics": [_metric(view, name, meaning) for name, meaning in view.metrics.items()],
        "evaluations": [_evaluation(event) for event in summary.evaluations[-MOST_EVALUATIONS:]],
        "gradients": _gradients(view),
        "phases": {name: _short(seconds) for name, seconds in summary.phases().items()},
        "machines": view.machines.to_dict() if view.machines else None,
        "memory": _memory(view),
        "cores": _cores(view),
        "energy": _energy(view),
        "marks": _marks(view),
        "looked": probe_answers(summary),
    }


def _about(view: RunView) -> dict[str, Any]:
    summary, started = view.summary, view.summary.started
    return {
        "model": summary.setting("model", "name"),
        "parameters": number(started.get("parameters")),
        "batch_size": summary.batch_size or None,
        "chance_loss": summary.chance_loss,
        "dtype": summary.setting("train", "dtype"),
        "devices": sorted(set(view.devices.values())),
        "chip": mapping(started.get("machine")).get("chip"),
        "notes": [str(note) for note in started["notes"]]
        if isinstance(started.get("notes"), list)
        else [],
    }


def _curves(view: RunView) -> dict[str, dict[str, list[float]]]:
    summary = view.summary
    return {
        "loss": _points(view.loss),
        "loss_smoothed": _points(smoothed(view.loss)),
        "accuracy": _points(view.accuracy),
        "accuracy_smoothed": _points(smoothed(view.accuracy)),
        "temperature": _points(view.temperature),
        "gradient_norm": _points(view.gradient),
        "learning_rate": _points(view.learning_rate),
        "speed": _points(summary.speed()),
        # Which step was made after how many seconds of work, to compare runs by time.
        "seconds": _points(windows(curve(summary.steps, lambda event: event["elapsed"]), most=200)),
    }


def _metric(view: RunView, name: str, meaning: str) -> dict[str, Any]:
    return {
        "title": metric_title(name),
        "meaning": meaning,
        "points": _points(view.step_curve(name)),
    }


def _evaluation(event: dict[str, Any]) -> dict[str, Any]:
    values, names = (
        event["evaluation"],
        ("t2i_r1", "t2i_r5", "t2i_r10", "i2t_r1", "i2t_r5", "i2t_r10", "chance"),
    )
    intervals, batch = mapping(values.get("intervals")), mapping(values.get("in_batch"))
    return {
        "step": event["step"],
        "epoch": number(event.get("epoch")),
        "elapsed": _short(event["elapsed"]),
        "split": event.get("split"),
        "best": bool(event.get("best")),
        "candidates": number(values.get("candidates")),
        **{name: _short(number(values.get(name))) for name in names},
        "interval": intervals.get("t2i_r1"),
        "in_batch": number(batch.get("accuracy")),
    }


def _gradients(view: RunView) -> dict[str, Any]:
    steps, rows = view.summary.gradient_map(COLUMNS)
    parts = view.summary.parts()
    values = [[_short(value) for value in row] for row in rows]
    return {
        "x": steps,
        "parts": parts,
        "names": [part_name(part) for part in parts],
        "values": values,
    }


def _memory(view: RunView) -> dict[str, Any]:
    events = view.summary.memory
    return {
        "now": _points(curve(events, lambda event: event.get("process_bytes"))),
        "peak": _points(curve(events, lambda event: event.get("peak_bytes"))),
        "machine": view.machine_memory,
    }


def _cores(view: RunView) -> dict[str, Any]:
    steps, rows = view.core_map(COLUMNS)
    return {"x": steps, "values": [[_short(value) for value in row] for row in rows]}


def _energy(view: RunView) -> dict[str, Any]:
    return {
        "joules": view.joules,
        "at_least": view.joules_at_least,
        "watts": _points(view.power),
        "celsius": _points(
            curve(view.summary.sensors, lambda event: event.get("celsius"), x="elapsed")
        ),
        "reason": view.energy_reason,
    }


def _marks(view: RunView) -> list[dict[str, Any]]:
    """Where a run went on after an end, or with other settings."""
    kinds = ((view.summary.resumes, "resumed"), (view.summary.fallbacks, "settings changed"))
    return [
        {"step": step, "text": text}
        for events, text in kinds
        for event in events
        if (step := number(event.get("step"))) is not None
    ]


def _points(points: Curve) -> dict[str, list[float]]:
    points = thinned(points, POINTS)
    return {"x": _shortened(points.x), "y": _shortened(points.y)}


def _shortened(values: Iterable[float]) -> list[float]:
    return [short for value in values if (short := _short(value)) is not None]


def _short(value: float | None) -> float | None:
    """Five digits: a screen shows no more. Whole numbers stay whole."""
    return value if value is None or isinstance(value, int) else float(f"{value:.5g}")


def verdict(view: RunView, *, over: bool) -> dict[str, str]:
    """The answer to "is it learning", and what it rests on: held-out pairs where there are any, else the loss."""
    if view.summary.evaluations:
        return _by_recall(view, over)
    loss = smoothed(view.loss, share=0.1)
    if len(loss) < 3:
        return {"answer": "Too early to say", "detail": "It has only just begun."}
    first, last = loss.y[0], loss.y[-1]
    if last < FALLEN * first:
        return {
            "answer": "Yes, so far",
            "detail": f"The loss fell from {first:.2f} to {last:.2f}. Not yet tested.",
        }
    return {
        "answer": "Not yet",
        "detail": f"The loss was {first:.2f} and is {last:.2f}. Not yet tested.",
    }


def probe_answers(summary: Summary) -> list[dict[str, Any]]:
    """The answers at each evaluation; of very many evaluations some."""
    found = []
    for event in summary.probes:
        if isinstance(event.get("answers"), list):
            answers = [
                known for answer in event["answers"][:MOST_ANSWERS] if (known := _answer(answer))
            ]
            found.append(
                {
                    "step": int(event["step"]),
                    "epoch": number(event.get("epoch")),
                    "answers": answers,
                }
            )
    return [found[at] for at in samples(len(found), MOST_PROBES)]


def _by_recall(view: RunView, over: bool) -> dict[str, str]:
    kept, summary = view.best_evaluation, view.summary
    recall = number(kept["evaluation"].get("t2i_r1")) if kept else None
    if kept is None or recall is None:
        return {"answer": "Not known", "detail": "Its evaluations have no recall."}
    chance = number(kept["evaluation"].get("chance"))
    found = f"The model of step {kept['step']:,} finds the right image for {_share(recall)} of new captions (val)"
    against = f"; guessing finds {_share(chance)}." if chance else "."
    if chance and not _above(summary, chance):
        return {"answer": "Not yet", "detail": f"{found}{against} That may still be luck."}
    return {"answer": _answer_of(view, over), "detail": f"{found}{against} {view.trend}".strip()}


def _answer_of(view: RunView, over: bool) -> str:
    held_out = validation(view.summary)
    trend = held_out.trend if held_out else Trend.UNKNOWN
    if trend is Trend.FALLING:
        return f"Until step {held_out.kept['step']:,}" if held_out else ""
    if over:
        return "It has learned"
    return "It has leveled off" if trend is Trend.LEVEL else "Yes"


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
        if isinstance(found, dict)
        and (image := number(found.get("picture"))) is not None
        and image >= 0
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
