"""The learning of a run, as plots: loss, accuracy and recall, temperature, gradients."""

from __future__ import annotations

from typing import Any

from lapclip.report.document import Plot, Section, Table
from lapclip.report.plots import axes, faint, heat, level, line, marks, table_of
from lapclip.runs.curves import Curve, curve, smoothed
from lapclip.runs.summary import Summary
from lapclip.text import number, significant

COLUMNS = 120
"""Columns of a heat map."""


def learning(summary: Summary) -> list[Section]:
    """One section, or none before the first step."""
    plots = [_loss(summary), _accuracy(summary), _temperature(summary), _gradients(summary)]
    found = [plot for plot in plots if plot]
    return [Section("Learning", [*found])] if found else []


def turning_points(summary: Summary) -> list[tuple[float, str]]:
    """Where a run fell back or was resumed, for marking."""
    fell = [(event, f"change {number_}") for number_, event in enumerate(summary.fallbacks, 1)]
    went_on = [(event, "resumed") for event in summary.resumes]
    return [(step, word) for event, word in [*went_on, *fell] if (step := number(event.get("step"))) is not None]


def _loss(summary: Summary) -> Plot | None:
    raw = curve(summary.steps, lambda event: event.get("loss"))
    if not raw:
        return None
    mean = smoothed(raw)
    return Plot(
        "Loss",
        [faint("each step", raw), line("smoothed", mean, "--blue")],
        {**axes("step", "contrastive loss"), **marks(turning_points(summary))},
        "A line that still falls at the end says that more time would help; a jump upwards says that the learning rate "
        "is too high.",
        table_of("step", {"loss": raw, "smoothed": mean}),
    )


def _accuracy(summary: Summary) -> Plot | None:
    raw = curve(summary.steps, _batch_accuracy)
    recalls = {
        "text to image R@1": curve(summary.evaluations, lambda event: event["evaluation"].get("t2i_r1")),
        "image to text R@1": curve(summary.evaluations, lambda event: event["evaluation"].get("i2t_r1")),
        "held-out batches": curve(summary.evaluations, _held_out_in_batches),
    }
    recalls = {name: points for name, points in recalls.items() if points}
    if not raw and not recalls:
        return None
    mean = smoothed(raw)
    colours = ("--orange", "--purple", "--green")
    traces = [faint("each batch", raw, share=True), line("training batches", mean, "--blue", share=True)] if raw else []
    for (name, points), colour, token in zip(recalls.items(), colours, ("circle", "diamond", "square"), strict=False):
        extra: dict[str, Any] = {"mode": "lines+markers", "marker": {"size": 7, "symbol": token}}
        if name.startswith("text to image"):
            extra["error_y"] = _errors(summary, points)
        traces.append(line(name, points, colour, share=True, **extra))
    x = [point for points in (raw, *recalls.values()) for point in points.x]
    for name, chance, dash in _chances(summary):
        traces.append(level(name, [min(x), max(x)], chance, dash=dash))
    return Plot(
        "Accuracy and recall",
        traces,
        {**axes("step", "share found", share=True), **marks(turning_points(summary))},
        "Recall and held-out batches are of pairs never trained on: if they follow the training line upwards the model "
        "learns, if that line rises alone it memorises. Whiskers are 95 % intervals; on the chance lines nothing is "
        "learnt.",
        table_of("step", {"training batches": mean, **recalls} if raw else recalls, share=True),
        height=400,
    )


def _temperature(summary: Summary) -> Plot | None:
    points = curve(summary.steps, lambda event: event.get("temperature"))
    if not points:
        return None
    scale = Curve(points.x, [1 / value if value else 0.0 for value in points.y])
    return Plot(
        "Temperature",
        [line("temperature", points, "--blue")],
        {**axes("step", "temperature"), **marks(turning_points(summary))},
        "The model learns how sharply to compare: falling means surer. It starts at 0.07 and cannot go below 0.01; "
        "its inverse is the logit scale.",
        table_of("step", {"temperature": points, "logit scale": scale}),
        height=260,
    )


def _gradients(summary: Summary) -> Plot | None:
    steps, rows = summary.gradient_map(COLUMNS)
    parts = summary.parts()
    if not steps:
        return None
    names = [_part_name(part) for part in parts]
    traces, layout = heat(steps, names, rows)
    known = [[value for value in row if value is not None] for row in rows]
    table = Table(
        ["part", "first", "last", "highest"],
        [
            [n, significant(r[0]), significant(r[-1]), significant(max(r))]
            for n, r in zip(names, known, strict=True)
            if r
        ],
    )
    left_out = sum(event.get("grad_norm") is None for event in summary.steps)
    overflow = f" Updates that overflowed in float16 and were left out: {left_out:,}." if left_out else ""
    return Plot(
        "Gradient norms",
        traces,
        {"xaxis": axes("step", "")["xaxis"], **layout},
        "Each row is a part of the model, from its input at the top to its head. Even rows are healthy; a dark row "
        f"hardly learns, and a bright column is a step that shook the model.{overflow}",
        table,
        height=110 + 20 * len(parts),
    )


def _batch_accuracy(event: dict[str, Any]) -> float | None:
    ways = [number(event.get(name)) for name in ("t2i_accuracy", "i2t_accuracy")]
    found = [way for way in ways if way is not None]
    return sum(found) / len(found) if found else None


def _held_out_in_batches(event: dict[str, Any]) -> float | None:
    batch = event["evaluation"].get("in_batch")
    return batch.get("accuracy") if isinstance(batch, dict) else None


def _errors(summary: Summary, points: Curve) -> dict[str, Any]:
    """The intervals of text-to-image R@1 as whiskers."""
    by_step = {event["step"]: event["evaluation"].get("intervals") for event in summary.evaluations}
    ends = []
    for x, y in zip(points.x, points.y, strict=True):
        found = by_step.get(int(x))
        match found.get("t2i_r1") if isinstance(found, dict) else None:
            case [low, high] if number(low) is not None and number(high) is not None:
                ends.append((high - y, y - low))
            case _:
                ends.append((0.0, 0.0))
    up, down = ([end[side] for end in ends] for side in (0, 1))
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1, "width": 3}


def _chances(summary: Summary) -> list[tuple[str, float, str]]:
    """What guessing would find: in a training batch, and among the held-out candidates."""
    found = []
    if summary.batch_size:
        found.append(("chance, batches", 1 / summary.batch_size, "dash"))
    last = summary.evaluations[-1]["evaluation"] if summary.evaluations else {}
    if (chance := number(last.get("chance"))) is not None:
        found.append(("chance, R@1", chance, "dot"))
    return found


def _part_name(part: str) -> str:
    """image.3 as a person says it."""
    tower, dot, place = part.partition(".")
    if not dot or tower not in ("image", "text"):
        return part
    return f"{tower} block {int(place) + 1}" if place.isdigit() else f"{tower} {place}"
