"""The learning of a run, as plots: loss, accuracy and recall, temperature, gradients."""

from __future__ import annotations

from typing import Any

from lapclip.report.document import Plot, Section, Table
from lapclip.report.plots import axes, error_bars, faint, heat, level, line, marks, table_of
from lapclip.runs.curves import Curve, curve, smoothed
from lapclip.runs.event_log import mapping
from lapclip.runs.view import RunView
from lapclip.text import number, part_name, significant

COLUMNS = 120
"""Columns of a heat map."""


def learning_sections(view: RunView) -> list[Section]:
    """One section, or none before the first step."""
    plots = [_loss(view), _accuracy(view), _temperature(view), _logit_bias(view), _gradients(view)]
    found = [plot for plot in plots if plot]
    return [Section("Learning", [*found])] if found else []


def turning_points(view: RunView) -> list[tuple[float, str]]:
    """Where a run fell back or was resumed, for marking."""
    fell = [(event, f"change {number_}") for number_, event in enumerate(view.summary.fallbacks, 1)]
    went_on = [(event, "resumed") for event in view.summary.resumes]
    return [(step, label) for event, label in [*went_on, *fell] if (step := number(event.get("step"))) is not None]


def _loss(view: RunView) -> Plot | None:
    raw = view.loss
    if not raw:
        return None
    mean = smoothed(raw)
    return Plot(
        "Loss",
        [faint("each step", raw), line("smoothed", mean, "--blue")],
        {**axes("step", "contrastive loss"), **marks(turning_points(view))},
        "A line that still falls at the end says that more time would help; a jump upwards says that the learning rate "
        "is too high.",
        table_of("step", {"loss": raw, "smoothed": mean}),
    )


def _accuracy(view: RunView) -> Plot | None:
    raw, evaluations = view.accuracy, view.summary.evaluations
    recalls = {
        "text to image R@1": view.recall,
        "image to text R@1": view.metric("i2t_r1"),
        "held-out batches": curve(evaluations, lambda e: mapping(e["evaluation"].get("in_batch")).get("accuracy")),
    }
    recalls = {name: points for name, points in recalls.items() if points}
    if not raw and not recalls:
        return None
    mean = smoothed(raw)
    colours = ("--orange", "--purple", "--green")
    traces = [faint("each batch", raw, share=True), line("training batches", mean, "--blue", share=True)] if raw else []
    for (name, points), colour, symbol in zip(recalls.items(), colours, ("circle", "diamond", "square"), strict=False):
        extra: dict[str, Any] = {"mode": "lines+markers", "marker": {"size": 7, "symbol": symbol}}
        if name.startswith("text to image"):
            extra["error_y"] = _errors(view, points)
        traces.append(line(name, points, colour, share=True, **extra))
    x = [point for points in (raw, *recalls.values()) for point in points.x]
    for name, chance, dash in _chances(view):
        traces.append(level(name, [min(x), max(x)], chance, dash=dash))
    return Plot(
        "Accuracy and recall",
        traces,
        {**axes("step", "share found", share=True), **marks(turning_points(view))},
        "Recall and held-out batches are of pairs never trained on: if they follow the training line upwards the model "
        "learns, if that line rises alone it memorises. Whiskers are 95 % intervals; on the chance lines nothing is "
        "learnt.",
        table_of("step", {"training batches": mean, **recalls} if raw else recalls, share=True),
        height=400,
    )


def _temperature(view: RunView) -> Plot | None:
    points = view.temperature
    if not points:
        return None
    scale = Curve(points.x, [1 / value if value else 0.0 for value in points.y])
    return Plot(
        "Temperature",
        [line("temperature", points, "--blue")],
        {**axes("step", "temperature"), **marks(turning_points(view))},
        "The model learns how sharply to compare: falling means surer. It starts at 0.07 and cannot go below 0.01; "
        "its inverse is the logit scale.",
        table_of("step", {"temperature": points, "logit scale": scale}),
        height=260,
    )


def _logit_bias(view: RunView) -> Plot | None:
    """Only the sigmoid loss has one."""
    points = view.logit_bias
    if not points:
        return None
    return Plot(
        "Logit bias",
        [line("logit bias", points, "--blue")],
        {**axes("step", "logit bias"), **marks(turning_points(view))},
        "The model learns how rare true pairs are: it starts far below zero, because most pairs of a batch are wrong.",
        table_of("step", {"logit bias": points}),
        height=260,
    )


def _gradients(view: RunView) -> Plot | None:
    steps, rows = view.summary.gradient_map(COLUMNS)
    parts = view.summary.parts()
    if not steps:
        return None
    names = [part_name(part) for part in parts]
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
    left_out = sum(event.get("grad_norm") is None for event in view.summary.steps)
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


def _errors(view: RunView, points: Curve) -> dict[str, Any]:
    """The intervals of text-to-image R@1 as whiskers."""
    intervals = {event["step"]: mapping(event["evaluation"].get("intervals")) for event in view.summary.evaluations}
    bars = error_bars(points.y, [intervals[int(x)].get("t2i_r1") for x in points.x])
    return {**bars, "thickness": 1, "width": 3}


def _chances(view: RunView) -> list[tuple[str, float, str]]:
    """What guessing would find: in a training batch, and among the held-out candidates."""
    found = []
    if view.summary.batch_size:
        found.append(("chance, batches", 1 / view.summary.batch_size, "dash"))
    last = view.summary.evaluations[-1]["evaluation"] if view.summary.evaluations else {}
    if (chance := number(last.get("chance"))) is not None:
        found.append(("chance, R@1", chance, "dot"))
    return found
