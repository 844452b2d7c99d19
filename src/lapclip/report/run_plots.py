"""The plots and tables of a run: how it learns, and how the machine works."""

from __future__ import annotations

from typing import Any

from lapclip.report.document import Block, Plot, Section, Sentences, Table
from lapclip.report.plots import (
    COLOURS,
    axes,
    error_bars,
    faint,
    heat,
    level,
    line,
    marks,
    plain,
    table_of,
)
from lapclip.runs.curves import Curve, curve, smoothed
from lapclip.runs.events import mapping
from lapclip.runs.view import RunView
from lapclip.text import (
    count,
    duration,
    metric_title,
    number,
    part_name,
    percent,
    significant,
    size,
)

COLUMNS = 120
"""Columns of a heat map."""
WATT_HOUR = 3600.0
PHASES = {
    "load": "--red",
    "preprocess": "--yellow",
    "transfer": "--purple",
    "forward": "--blue",
    "backward": "--orange",
    "optimizer": "--green",
    "exchange": "--sky",
}
"""Colours that differ most where phases touch."""


def learning_sections(view: RunView) -> list[Section]:
    """One section, or none before the first step."""
    temperature = _small_plot(
        "Temperature",
        view.temperature,
        "temperature",
        "The model learns how sharply to compare: falling means surer. It cannot go below 0.01; its inverse is the "
        "logit scale.",
        marks(turning_points(view)),
    )
    metrics = [
        _small_plot(
            metric_title(name),
            view.step_curve(name),
            metric_title(name).lower(),
            meaning,
            marks(turning_points(view)),
        )
        for name, meaning in view.metrics.items()
    ]
    plots = [_loss(view), _accuracy(view), temperature, *metrics, _gradients(view)]
    found = [plot for plot in plots if plot]
    return [Section("Learning", [*found])] if found else []


def turning_points(view: RunView) -> list[tuple[float, str]]:
    """Where a run fell back or was resumed, for marking."""
    fell = [(event, f"change {number_}") for number_, event in enumerate(view.summary.fallbacks, 1)]
    went_on = [(event, "resumed") for event in view.summary.resumes]
    return [
        (step, label)
        for event, label in [*went_on, *fell]
        if (step := number(event.get("step"))) is not None
    ]


def _small_plot(
    title: str,
    points: Curve,
    unit: str,
    explanation: str,
    layout: dict[str, Any] | None = None,
    *,
    x: str = "step",
) -> Plot | None:
    """Return a plot of one curve. None without points."""
    if not points:
        return None
    return Plot(
        title,
        [line(unit, points, "--blue")],
        {**axes(x, unit), **(layout or {})},
        explanation,
        table_of(x, {unit: points}),
        height=260,
    )


def _loss(view: RunView) -> Plot | None:
    raw = view.loss
    if not raw:
        return None
    mean = smoothed(raw)
    return Plot(
        "Loss",
        [faint("each step", raw), line("smoothed", mean, "--blue")],
        {**axes("step", "contrastive loss"), **marks(turning_points(view))},
        f"Lower is better; a jump upwards says that the learning rate is too high. {view.trend}".strip(),
        table_of("step", {"loss": raw, "smoothed": mean}),
    )


def _accuracy(view: RunView) -> Plot | None:
    raw, evaluations = view.accuracy, view.summary.evaluations
    recalls = {
        "text to image R@1": view.recall,
        "image to text R@1": view.metric("i2t_r1"),
        "held-out batches": curve(
            evaluations, lambda e: mapping(e["evaluation"].get("in_batch")).get("accuracy")
        ),
    }
    recalls = {name: points for name, points in recalls.items() if points}
    if not raw and not recalls:
        return None
    mean = smoothed(raw)
    colours = ("--orange", "--purple", "--green")
    traces = (
        [faint("each batch", raw, share=True), line("training batches", mean, "--blue", share=True)]
        if raw
        else []
    )
    for (name, points), colour, symbol in zip(
        recalls.items(), colours, ("circle", "diamond", "square"), strict=False
    ):
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
    overflow = (
        f" Updates that overflowed in float16 and were left out: {left_out:,}." if left_out else ""
    )
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
    intervals = {
        event["step"]: mapping(event["evaluation"].get("intervals"))
        for event in view.summary.evaluations
    }
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


def machine_sections(view: RunView) -> list[Section]:
    """What the machine did, and what it took; sections with nothing in them are left out."""
    speed = _small_plot(
        "Speed",
        view.summary.speed(),
        "pairs/s",
        "Level is good. A sag means heat, a battery, or another program on the same cores.",
        {**axes("step", "pairs/s", from_zero=True), **marks(turning_points(view))},
    )
    at_work = [speed, _phases(view), _memory(view)]
    energy = [*_energy(view), *_heat(view)]
    sections = [
        Section("Several machines", _machines(view)),
        Section("The machine at work", [plot for plot in at_work if plot]),
        Section("Energy and heat", energy),
    ]
    return [section for section in sections if section.blocks]


def _machines(view: RunView) -> list[Block]:
    """Return who takes how many rows, and who waits for whom. Nothing for one machine alone."""
    found = view.machines
    if found is None:
        return []
    rows: list[list[Any]] = [
        [
            f"{rank.name}{' (has the run)' * rank.writer}",
            count(rank.rows),
            percent(rank.share, 0),
            percent(rank.waited, 0),
        ]
        for rank in found.ranks
    ]
    if found.count > len(rows):
        rows.append([f"and {found.count - len(rows):,} more", "", "", ""])
    advice = f"{found.advice}." if found.advice else ""
    sentences = [text for text in (found.waiting, advice) if text]
    columns = ["machine", "rows of a batch", "share", "of its time it waits for others"]
    return [Table(columns, rows), Sentences(sentences)]


def _phases(view: RunView) -> Plot | None:
    phases = view.summary.phases()
    total = sum(phases.values())
    if not total:
        return None
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plain(name),
            "y": ["a step"],
            "x": [seconds * 1000],
            "marker": {"color": colour},
            "text": [f"{plain(name)}<br>{seconds / total:.0%}" if seconds / total > 0.12 else ""],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "insidetextfont": {"color": "--on-colour"},
            "hovertemplate": f"{plain(name)}: %{{x:.4~g}} ms, {seconds / total:.1%}<extra></extra>",
        }
        for at, (name, seconds) in enumerate(phases.items())
        for colour in [PHASES.get(name, COLOURS[at % len(COLOURS)])]
    ]
    rows: list[list[Any]] = [
        [name, significant(s * 1000), percent(s / total)] for name, s in phases.items()
    ]
    layout = {"barmode": "stack", "xaxis": {"title": {"text": "ms"}}, "yaxis": {"visible": False}}
    return Plot(
        "Where the time of a step goes",
        traces,
        layout,
        "Forward and backward should fill the bar. If load or transfer is wide, the processor waits for data.",
        Table(["phase", "ms", "share"], rows),
        height=220,
    )


def _memory(view: RunView) -> Plot | None:
    curves = {
        "now": curve(view.summary.memory, lambda event: _gigabytes(event.get("process_bytes"))),
        "peak": curve(view.summary.memory, lambda event: _gigabytes(event.get("peak_bytes"))),
    }
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return None
    whole = f" The machine has {size(view.machine_memory)}." if view.machine_memory else ""
    styles = {"now": ("--blue", "solid"), "peak": ("--orange", "dash")}
    traces = [
        line(name, points, styles[name][0], unit=" GB", mode="lines+markers" if len(points) < 10 else "lines",
             line={"color": styles[name][0], "width": 2, "dash": styles[name][1]})
        for name, points in curves.items()
    ]  # fmt: skip
    return Plot(
        "Memory",
        traces,
        axes("step", "GB", from_zero=True),
        f"Level after the first steps is good; a line that keeps climbing is a leak.{whole}",
        table_of("step", curves),
        height=260,
    )


def _energy(view: RunView) -> list[Block]:
    """Return the energy used, or why it is not known, and a plot of the power."""
    if not view.summary.sensors:
        return []
    used, reason = view.energy, (view.energy_reason or "").removeprefix("not measurable here: ")
    if not used:
        return [Sentences([f"Energy: not measurable here: {reason or 'no reason was recorded'}."])]
    watt_hours = used.y[-1] / WATT_HOUR
    at_least, at_most = ("at least ", "at most ") if view.joules_at_least else ("", "")
    sentences = [
        f"Energy: {at_least}{significant(used.y[-1])} J, which is {significant(watt_hours)} Wh, in "
        f"{duration(used.x[-1])} of work."
    ]
    if reason:
        sentences.append(f"Not all of it is in this: {reason}.")
    recall = number(view.summary.scores.get("t2i_r1"))
    if recall is not None and watt_hours:
        sentences.append(
            f"Accuracy per watt-hour: {at_most}{significant(recall * 100 / watt_hours)} % points of held-out "
            "text-to-image R@1 per Wh."
        )
    power = _small_plot(
        "Power",
        _minutes(view.power),
        "W",
        "What the measured parts of the machine draw; the screen and the rest are not in it.",
        axes("minutes of work", "W", from_zero=True),
        x="minutes of work",
    )
    return [Sentences(sentences), *([power] if power else [])]


def _heat(view: RunView) -> list[Block]:
    """Return whether heat slowed the machine, the use of swap, and a plot of the heat."""
    sensors = view.summary.sensors
    sentences: list[str] = []
    throttled = [event for event in sensors if event.get("throttled") is True]
    if throttled:
        share = len(throttled) / len(sensors)
        first = duration(throttled[0]["elapsed"])
        sentences.append(
            f"The machine slowed itself down in {share:.0%} of the readings, first after {first}."
        )
    swap = curve(sensors, lambda event: event.get("swap_bytes"))
    if swap and max(swap.y) > 0:
        sentences.append(f"Swap in use: {size(swap.y[0])} at first, at most {size(max(swap.y))}.")
    celsius = _small_plot(
        "Heat of the processor",
        _minutes(curve(sensors, lambda event: event.get("celsius"), x="elapsed")),
        "°C",
        "Level is good; near 100 °C most processors slow down.",
        x="minutes of work",
    )
    blocks: list[Block] = [Sentences(sentences)] if sentences else []
    return [*blocks, celsius] if celsius else blocks


def _minutes(points: Curve) -> Curve:
    return Curve([seconds / 60 for seconds in points.x], points.y)


def _gigabytes(value: Any) -> float | None:
    found = number(value)
    return None if found is None else found / 1e9
