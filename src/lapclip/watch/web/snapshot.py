"""One run as numbers for the charts: few enough points for a screen, few enough digits for the way to the browser."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from lapclip.runs.curves import Curve, curve, smoothed, thinned, windows
from lapclip.runs.event_log import mapping
from lapclip.runs.view import RunView
from lapclip.text import number
from lapclip.watch.web.probe_answers import probe_answers, verdict

POINTS = 600
COLUMNS = 80
"""Of a heat map."""
MOST_EVALUATIONS = 400


def snapshot(row: dict[str, Any], view: RunView) -> dict[str, Any]:
    """All that the page draws of a run. `row` is its line in the list of runs."""
    summary = view.summary
    return {
        **row,
        "about": _about(view),
        "ending": {name: summary.ending.get(name) for name in ("type", "time", "error", "reason") if summary.ending},
        "elapsed": summary.training_seconds,
        "pairs_per_second": summary.pairs_per_second,
        "learning": verdict(view, over=row["state"] not in ("starting", "running")),
        "forecast": asdict(view.time_left) if view.time_left else None,
        "findings": [asdict(finding) for finding in view.findings],
        "scores": {
            name: number(summary.scores.get(name)) for name in ("t2i_r1", "t2i_r5", "i2t_r1", "i2t_r5", "chance")
        },
        "curves": _curves(view),
        "evaluations": [_evaluation(event) for event in summary.evaluations[-MOST_EVALUATIONS:]],
        "gradients": _gradients(view),
        "phases": {name: _short(seconds) for name, seconds in summary.phases().items()},
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
        "notes": [str(note) for note in started.get("notes") or [] if isinstance(started.get("notes"), list)],
    }


def _curves(view: RunView) -> dict[str, dict[str, list[float]]]:
    summary = view.summary
    return {
        "loss": _points(view.loss),
        "loss_smoothed": _points(smoothed(view.loss)),
        "accuracy": _points(view.accuracy),
        "accuracy_smoothed": _points(smoothed(view.accuracy)),
        "temperature": _points(view.temperature),
        **({"logit_bias": _points(view.logit_bias)} if view.logit_bias else {}),
        "gradient_norm": _points(view.gradient),
        "learning_rate": _points(view.learning_rate),
        "speed": _points(summary.speed() if summary.batch_size else Curve([], [])),
        # Which step was made after how many seconds of work, to compare runs by time.
        "seconds": _points(windows(curve(summary.steps, lambda event: event["elapsed"]), most=200)),
    }


def _evaluation(event: dict[str, Any]) -> dict[str, Any]:
    values, names = event["evaluation"], ("t2i_r1", "t2i_r5", "t2i_r10", "i2t_r1", "i2t_r5", "i2t_r10", "chance")
    intervals, batch = mapping(values.get("intervals")), mapping(values.get("in_batch"))
    return {
        "step": event["step"],
        "epoch": number(event.get("epoch")),
        "elapsed": _short(event["elapsed"]),
        "best": bool(event.get("best")),
        "candidates": number(values.get("candidates")),
        **{name: _short(number(values.get(name))) for name in names},
        "interval": intervals.get("t2i_r1"),
        "in_batch": number(batch.get("accuracy")),
    }


def _gradients(view: RunView) -> dict[str, Any]:
    steps, rows = view.summary.gradient_map(COLUMNS)
    return {"x": steps, "parts": view.summary.parts(), "values": [[_short(value) for value in row] for row in rows]}


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
        "watts": _points(view.power),
        "celsius": _points(curve(view.summary.sensors, lambda event: event.get("celsius"), x="elapsed")),
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
