"""Whether a run learns: the panels of training and of held-out recall."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lapclip.text import UNKNOWN, number, one_line, part_name, percent, significant
from lapclip.watch.canvas import LABEL, Paper, drawn_curve, rows_of, section
from lapclip.watch.run_view import Look


def learning(look: Look, paper: Paper) -> RenderableType | None:
    """Loss, accuracy, temperature and gradients with their curves."""
    if not look.summary.steps:
        return None
    rows = rows_of()
    curves = (
        ("loss", look.loss, "blue", paper.tall, significant),
        ("accuracy", look.accuracy, "green", paper.tall, percent),
        ("temperature", look.temperature, "magenta", 1, significant),
        ("gradient", look.gradient, "yellow", 1, significant),
    )
    for name, points, colour, tall, words in curves:
        drawn = drawn_curve(points, paper.inside - LABEL - 9, tall, colour, paper)
        latest = words(points.y[-1]) if points else UNKNOWN
        line = Table.grid(padding=(0, 1))
        line.add_column(width=8, no_wrap=True)
        line.add_column(no_wrap=True)
        line.add_row(Text(latest, style="bold"), drawn)
        rows.add_row(name, line)
    if parts := look.gradient_parts:
        rows.add_row("  largest", _named(parts[0]))
        if len(parts) > 1:
            rows.add_row("  smallest", _named(parts[-1]))
    return section("Learning, in training batches" if paper.inside > 40 else "Learning", rows, paper)


def recall(look: Look, paper: Paper) -> RenderableType | None:
    """Held-out recall at each evaluation, the best marked; of a finished run, its scores."""
    summary = look.summary
    if not summary.evaluations and not summary.ending.get("evaluation"):
        if not summary.steps:
            return None
        return section("Held-out recall", Text("not evaluated yet", style="dim"), paper)
    points = look.recall
    parts: list[RenderableType] = []
    if len(points) > 1:
        drawn = drawn_curve(points, paper.inside - LABEL - 9, paper.tall, "cyan", paper)
        rows = rows_of()
        line = Table.grid(padding=(0, 1))
        line.add_column(width=8, no_wrap=True)
        line.add_column(no_wrap=True)
        line.add_row(Text(percent(points.y[-1]), style="bold"), drawn)
        rows.add_row("R@1" if look.working else "validation", line)
        parts.append(rows)
    parts.append(_scores(look) if summary.ending.get("type") == "finished" else _evaluations(look, paper))
    return section("Held-out recall", Group(*parts), paper)


def _named(item: tuple[str, float]) -> Text:
    return Text.assemble((f"{significant(item[1]):<8} ", ""), (part_name(one_line(item[0])), "dim"), no_wrap=True)


def _evaluations(look: Look, paper: Paper) -> Table:
    """The latest evaluations, the newest first; the best is always among them."""
    events, most = look.summary.evaluations, 2 + paper.tall
    shown = events[-most:]
    best = look.best_evaluation
    if best is not None and best not in shown:
        shown = [best, *shown[1:]]
    tight = paper.inside < 44
    grid = _table(("epoch", "to image" if tight else "text to image", "to text" if tight else "image to text", ""))
    for event in reversed(shown):
        scores = event["evaluation"]
        style = "bold green" if event is best else ""
        mark = "best" if event is best else ""
        epoch = number(event.get("epoch"))
        row = (
            UNKNOWN if epoch is None else f"{epoch:.0f}",
            percent(scores.get("t2i_r1")),
            percent(scores.get("i2t_r1")),
        )
        grid.add_row(*row, mark, style=style)
    if (chance := number(events[-1]["evaluation"].get("chance"))) is not None:
        grid.add_row("chance", percent(chance), percent(chance), "", style="dim")
    return grid


def _scores(look: Look) -> Group:
    scores = look.summary.scores
    grid = _table((one_line(scores.get("split") or ""), "R@1", "R@5", "R@10"))
    for way, name in (("t2i", "text to image"), ("i2t", "image to text")):
        grid.add_row(name, *(percent(scores.get(f"{way}_r{rank}")) for rank in (1, 5, 10)), style="bold")
    if (chance := number(scores.get("chance"))) is not None:
        grid.add_row("chance", *(percent(min(1.0, rank * chance)) for rank in (1, 5, 10)), style="dim")
    sure = ""
    intervals = scores.get("intervals")
    match intervals.get("t2i_r1") if isinstance(intervals, dict) else None:
        case [low, high] if number(low) is not None and number(high) is not None:
            sure = f", text to image R@1 {percent(low)} to {percent(high)}"
    said = f"{significant(scores.get('candidates'), 6)} candidates{sure} (95 %)" if sure else ""
    return Group(grid, *([Text(said, style="dim")] if said else []))


def _table(titles: Sequence[str]) -> Table:
    """Columns of figures under short titles."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for at, title in enumerate(titles):
        table.add_column(title, justify="left" if at == 0 or not title else "right", no_wrap=True)
    return table
