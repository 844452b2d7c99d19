"""The plots of an evaluation: recall, ranks, similarities, hard negatives, classes."""

from __future__ import annotations

import itertools
from typing import Any

from lapclip.evaluation import RANKS, WAYS
from lapclip.report.document import Plot, Table
from lapclip.report.plots import axes, error_bars, plain
from lapclip.runs.event_log import mapping, mappings
from lapclip.text import UNKNOWN, count, interval, number, percent, significant

COLOURS = {"t2i": "--blue", "i2t": "--orange"}
MOST_CLASSES = 60
"""Classes of a confusion matrix that can still be read."""


def recall_plot(scores: dict[str, Any]) -> Plot | None:
    """Recall both ways with whiskers, beside chance."""
    intervals, chances = mapping(scores.get("intervals")), mapping(scores.get("chances"))
    traces, rows = [], []
    for way, name in WAYS.items():
        values = [number(scores.get(f"{way}_r{rank}")) for rank in RANKS]
        if any(value is None for value in values):
            return None
        whiskers = error_bars(values, [intervals.get(f"{way}_r{rank}") for rank in RANKS])
        traces.append(bars(name, [f"R@{rank}" for rank in RANKS], values, COLOURS[way], error_y=whiskers))
        rows += [
            [f"{name}, R@{rank}", percent(value), interval(intervals.get(f"{way}_r{rank}"))]
            for rank, value in zip(RANKS, values, strict=True)
        ]
    for way, name in WAYS.items():
        values = [number(chances.get(f"{way}_r{rank}")) for rank in RANKS]
        if all(value is not None for value in values):
            traces.append(bars(f"chance, {name}", [f"R@{rank}" for rank in RANKS], values, "--faint"))
            rows += [[f"chance, {name}, R@{rank}", percent(v), ""] for rank, v in zip(RANKS, values, strict=True)]
    return Plot(
        "Recall",
        traces,
        {**axes("", "share found", share=True), "barmode": "group"},
        "How often the right answer is among the first one, five or ten. Whiskers are 95 % intervals: two models "
        "differ for sure only where theirs are far apart. Grey is what shuffled answers would give.",
        Table(["", "share", "95 % interval"], rows),
    )


def rank_plot(evaluation: dict[str, Any], scores: dict[str, Any]) -> Plot | None:
    """Where the right answer comes."""
    histograms = mapping(evaluation.get("histograms"))
    traces, rows = [], []
    for way, name in WAYS.items():
        bins = mappings(histograms.get(f"{way}_ranks"))
        shares = [number(entry.get("share")) for entry in bins]
        if not bins or any(share is None for share in shares):
            continue
        names = [_ranks_text(entry) for entry in bins]
        traces.append(bars(name, names, shares, COLOURS[way]))
        rows += [[f"{name}, rank {rank}", percent(share)] for rank, share in zip(names, shares, strict=True)]
    medians = [f"{name} {significant(scores.get(f'{way}_median_rank'))}" for way, name in WAYS.items()]
    return Plot(
        "Rank of the right answer",
        traces,
        {**axes("", "share of questions", share=True), "barmode": "group"},
        f"Near the left is good. The median rank: {', '.join(medians)}. Bars on the right are questions that the "
        "model cannot answer.",
        Table(["", "share"], rows),
    ) if traces else None  # fmt: skip


def similarity_plot(histograms: dict[str, Any]) -> Plot | None:
    """Similarities of true pairs and of others."""
    found = mapping(histograms.get("similarities"))
    edges, own, other = (_numbers(found.get(name)) for name in ("edges", "own", "other"))
    if not own or len(edges) != len(own) + 1 or len(own) != len(other):
        return None
    middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    traces = [
        bars("true pairs", middles, own, "--blue", opacity=0.7),
        bars("other pairs", middles, other, "--orange", opacity=0.6),
    ]
    rows: list[list[Any]] = [
        [significant(middle), percent(a), percent(b)]
        for middle, a, b in zip(middles, own, other, strict=True)
        if a or b
    ]
    return Plot(
        "Similarities",
        traces,
        {**axes("cosine similarity", "share of pairs", share=True), "barmode": "overlay", "bargap": 0},
        "The further apart the two hills, the better the model tells true pairs from others.",
        Table(["similarity", "true pairs", "other pairs"], rows),
    )


def hard_negatives(found: dict[str, Any]) -> Plot | None:
    """Accuracy against easy, medium and hard wrong images."""
    kinds = [(kind, mapping(found.get(kind))) for kind in ("easy", "medium", "hard")]
    values = [number(entry.get("accuracy")) for _, entry in kinds]
    if any(value is None for value in values):
        return None
    sure = [mapping(entry.get("intervals")).get("accuracy") for _, entry in kinds]
    names, chance = [kind for kind, _ in kinds], number(found.get("chance"))
    traces = [bars("right image wins", names, values, "--blue", error_y=error_bars(values, sure))]
    if chance is not None:
        traces.append(bars("chance", names, [chance] * 3, "--faint"))
    rows: list[list[Any]] = [
        [
            kind,
            percent(entry.get("accuracy")),
            interval(between),
            percent(entry.get("pairwise")),
            significant(entry.get("similarity")),
        ]
        for (kind, entry), between in zip(kinds, sure, strict=True)
    ]
    return Plot(
        "Hard negatives",
        traces,
        {**axes("", "share of captions", share=True), "barmode": "group"},
        f"Each caption chooses between its own image and {count(found.get('negatives'))} wrong ones. Hard ones "
        "have the most similar captions by their words (tf-idf, not this model), medium ones are drawn from the most "
        "similar tenth, easy ones from the less similar half. A model that knows only the topic falls steeply.",
        Table(["wrong images", "beats all", "95 % interval", "beats each", "likeness of captions"], rows),
    )


def per_class(classes: dict[str, Any]) -> Plot | None:
    """Recall of each class."""
    entries = [entry for entry in mappings(classes.get("per_class")) if number(entry.get("recall")) is not None]
    if not entries:
        return None
    ordered = sorted(entries, key=lambda entry: -entry["recall"])
    names, values = [str(entry.get("name")) for entry in ordered], [entry["recall"] for entry in ordered]
    whiskers = error_bars(values, [entry.get("interval") for entry in ordered])
    rows: list[list[Any]] = [
        [name, percent(entry["recall"]), interval(entry.get("interval")), count(entry.get("pictures"))]
        for name, entry in zip(names, ordered, strict=True)
    ]
    return Plot(
        "Recall of each class",
        [bars("recall", names, values, "--blue", error_y=whiskers)],
        {"xaxis": {"type": "category"}, "yaxis": axes("", "share recognised", share=True)["yaxis"]},
        "A class at zero is one whose name the model does not know, or always takes for another.",
        Table(["class", "recall", "95 % interval", "images"], rows),
        height=360,
    )


def confusion(classes: dict[str, Any]) -> Plot | None:
    """What is taken for what; of many classes, those with the most mistakes."""
    entries, cells = mappings(classes.get("per_class")), classes.get("confusion")
    numbers = [_numbers(cell) for cell in cells] if isinstance(cells, list) else []
    if not entries or not numbers or any(len(cell) != 3 or max(cell[:2]) >= len(entries) for cell in numbers):
        return None
    mistakes = [0.0] * len(entries)
    for own, guess, times in numbers:
        if own != guess:
            mistakes[int(own)] += times
            mistakes[int(guess)] += times
    shown = sorted(sorted(range(len(entries)), key=lambda at: -mistakes[at])[:MOST_CLASSES])
    names = [str(entries[at].get("name")) for at in shown]
    times_of = {(int(own), int(guess)): times for own, guess, times in numbers}
    counts = [[times_of.get((own, guess), 0.0) for guess in shown] for own in shown]
    images = [number(entries[at].get("pictures")) or 0.0 for at in shown]
    shares = [[value / max(1, total) for value in row] for row, total in zip(counts, images, strict=True)]
    trace = {
        "type": "heatmap",
        "x": [plain(name) for name in names],
        "y": [plain(name) for name in names],
        "z": shares,
        "text": [[count(value) for value in row] for row in counts],
        "texttemplate": "%{text}" if len(names) <= 20 else "",
        "hovertemplate": "%{y} taken for %{x}: %{text}<extra></extra>",
        "colorscale": "Cividis",
        "zmin": 0,
        "zmax": 1,
        "colorbar": {"thickness": 10, "tickformat": ".0%"},
    }
    rows: list[list[Any]] = [[name, *map(count, row)] for name, row in zip(names, counts, strict=True)]
    some = f" Of {count(len(entries))} classes, the {MOST_CLASSES} that are in the most mistakes."
    return Plot(
        "Confusion matrix",
        [trace],
        {
            "xaxis": {"type": "category", "title": {"text": "taken for"}},
            "yaxis": {"type": "category", "autorange": "reversed", "title": {"text": "class"}},
        },
        "A row is a class; its bright cells are what its images are taken for. A perfect model is a bright diagonal; "
        f"a bright column is a class that swallows others.{some if len(entries) > MOST_CLASSES else ''}",
        Table(["class", *names], rows),
        height=max(320, min(900, 120 + 30 * len(names))),
    )


def bars(name: str, x: list[Any], y: list[Any], colour: str, **extra: Any) -> dict[str, Any]:
    """Bars of shares."""
    return {
        "type": "bar",
        "name": plain(name),
        "x": [plain(value) if isinstance(value, str) else value for value in x],
        "y": y,
        "marker": {"color": colour},
        "hovertemplate": f"{plain(name)}, %{{x}}: %{{y:.1%}}<extra></extra>",
        **extra,
    }


def _ranks_text(entry: dict[str, Any]) -> str:
    first, last = entry.get("first"), entry.get("last")
    if number(first) is None or number(last) is None:
        return UNKNOWN
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _numbers(values: Any) -> list[float]:
    """A list of numbers; empty where anything else is in it."""
    found = [number(value) for value in values] if isinstance(values, list) else []
    return [value for value in found if value is not None] if None not in found else []
