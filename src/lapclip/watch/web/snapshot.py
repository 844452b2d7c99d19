"""One run as figures for the charts: few enough points for a screen, few enough digits for the way to the browser."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from lapclip.runs.curves import Curve, curve, smoothed, thinned, windows
from lapclip.runs.findings import Surroundings, findings
from lapclip.runs.follow import Following
from lapclip.runs.forecast import forecast
from lapclip.runs.summary import Summary
from lapclip.text import number
from lapclip.watch.web.probe_answers import looks, verdict

POINTS = 600
COLUMNS = 80
"""Of a heat map."""
MOST_EVALUATIONS = 400


def snapshot(row: dict[str, Any], following: Following, around: Surroundings) -> dict[str, Any]:
    """All that the page draws of a run. `row` is its line in the list of runs; `around` is what stands around it."""
    summary = following.summary
    return {
        **row,
        "about": _about(summary),
        "ending": {name: summary.ending.get(name) for name in ("type", "time", "error", "reason") if summary.ending},
        "elapsed": summary.training_seconds,
        "pairs_per_second": summary.pairs_per_second,
        "learning": verdict(summary, over=row["state"] not in ("starting", "running")),
        "forecast": _forecast(summary),
        "findings": _findings(summary, around),
        "scores": {
            name: number(summary.scores.get(name)) for name in ("t2i_r1", "t2i_r5", "i2t_r1", "i2t_r5", "chance")
        },
        "curves": _curves(summary),
        "evaluations": [_evaluation(event) for event in summary.evaluations[-MOST_EVALUATIONS:]],
        "gradients": _gradients(summary),
        "phases": {name: _short(seconds) for name, seconds in summary.phases().items()},
        "memory": _memory(summary),
        "cores": _cores(summary),
        "energy": _energy(summary),
        "marks": _marks(summary),
        "looked": looks(following.events),
    }


def _about(summary: Summary) -> dict[str, Any]:
    started, machine = summary.started, summary.started.get("machine")
    place = summary.places[-1] if summary.places else {}
    return {
        "model": summary.setting("model", "name"),
        "parameters": number(started.get("parameters")),
        "batch_size": summary.batch_size or None,
        "dtype": summary.setting("train", "dtype"),
        "devices": sorted({str(device) for tower, device in place.items() if tower != "step"}),
        "chip": machine.get("chip") if isinstance(machine, dict) else None,
        "notes": [str(note) for note in started.get("notes") or [] if isinstance(started.get("notes"), list)],
    }


def _forecast(summary: Summary) -> dict[str, float] | None:
    found = forecast(summary)
    return None if found is None else {"seconds": found.seconds, "low": found.low, "high": found.high}


def _findings(summary: Summary, around: Surroundings) -> list[dict[str, Any]]:
    """What is wrong, in words. That the checks themselves fail is said too: the rest of the page is still true."""
    try:
        return [asdict(each) for each in findings(summary, around)]
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
        return [{"id": "checks", "severity": "note", "title": "The checks failed", "evidence": fault, "next": ""}]


def _curves(summary: Summary) -> dict[str, dict[str, list[float]]]:
    loss = curve(summary.steps, lambda event: event.get("loss"))
    accuracy = curve(summary.steps, _accuracy)
    return {
        "loss": _points(loss),
        "loss_smoothed": _points(smoothed(loss)),
        "accuracy": _points(accuracy),
        "accuracy_smoothed": _points(smoothed(accuracy)),
        "temperature": _points(curve(summary.steps, lambda event: event.get("temperature"))),
        "gradient_norm": _points(curve(summary.steps, lambda event: event.get("grad_norm"))),
        "learning_rate": _points(curve(summary.steps, lambda event: event.get("lr"))),
        "speed": _points(summary.speed() if summary.batch_size else Curve([], [])),
        # Which step was made after how many seconds of work, to compare runs by time.
        "seconds": _points(windows(curve(summary.steps, lambda event: event["elapsed"]), most=200)),
    }


def _accuracy(event: dict[str, Any]) -> float | None:
    ways = [way for name in ("t2i_accuracy", "i2t_accuracy") if (way := number(event.get(name))) is not None]
    return sum(ways) / len(ways) if ways else None


def _evaluation(event: dict[str, Any]) -> dict[str, Any]:
    values, names = event["evaluation"], ("t2i_r1", "t2i_r5", "t2i_r10", "i2t_r1", "i2t_r5", "i2t_r10", "chance")
    intervals, batch = values.get("intervals"), values.get("in_batch")
    return {
        "step": event["step"],
        "epoch": number(event.get("epoch")),
        "elapsed": _short(event["elapsed"]),
        "best": bool(event.get("best")),
        "candidates": number(values.get("candidates")),
        **{name: _short(number(values.get(name))) for name in names},
        "interval": intervals.get("t2i_r1") if isinstance(intervals, dict) else None,
        "in_batch": number(batch.get("accuracy")) if isinstance(batch, dict) else None,
    }


def _gradients(summary: Summary) -> dict[str, Any]:
    steps, rows = summary.gradient_map(COLUMNS)
    return {"x": steps, "parts": summary.parts(), "values": [[_short(value) for value in row] for row in rows]}


def _memory(summary: Summary) -> dict[str, Any]:
    machine = summary.started.get("machine")
    return {
        "now": _points(curve(summary.memory, lambda event: event.get("process_bytes"))),
        "peak": _points(curve(summary.memory, lambda event: event.get("peak_bytes"))),
        "machine": number(machine.get("memory_bytes")) if isinstance(machine, dict) else None,
    }


def _cores(summary: Summary) -> dict[str, Any]:
    events = [event for event in summary.sensors if isinstance(event.get("core_use"), list) and event["core_use"]]
    events = events[:: max(1, -(-len(events) // COLUMNS))]
    count = max((len(event["core_use"]) for event in events), default=0)
    uses = [[_short(number(dict(enumerate(e["core_use"])).get(core))) for e in events] for core in range(count)]
    return {"x": [number(event.get("step")) or 0 for event in events], "values": uses}


def _energy(summary: Summary) -> dict[str, Any]:
    used = summary.joules()
    pairs = itertools.pairwise(zip(used.x, used.y, strict=True))
    watts = [(x, (y - before[1]) / (x - before[0])) for before, (x, y) in pairs if x > before[0]]
    reasons = [str(event["reason"]) for event in summary.sensors if event.get("reason")]
    return {
        "joules": used.y[-1] if used else None,
        "watts": _points(Curve([x for x, _ in watts], [y for _, y in watts])),
        "celsius": _points(curve(summary.sensors, lambda event: event.get("celsius"), x="elapsed")),
        "reason": reasons[-1] if reasons else None,
    }


def _marks(summary: Summary) -> list[dict[str, Any]]:
    """Where a run went on after an end, or with other settings."""
    kinds = ((summary.resumes, "resumed"), (summary.fallbacks, "settings changed"))
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
