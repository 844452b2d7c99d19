"""Reports, as one self-contained HTML file and as Markdown: which one is meant, its text, and its files. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from lapclip.errors import RunError
from lapclip.report.comparison_report import comparison_report, comparison_sections, read_comparison
from lapclip.report.document import (
    Block,
    Cell,
    Gallery,
    Plot,
    Report,
    ReportImage,
    Sentences,
    Table,
    to_html,
)
from lapclip.report.evaluation_report import evaluation_sections
from lapclip.report.run_report import run_report
from lapclip.runs.folder import RUNS, all_runs, find_run, find_trained_run
from lapclip.runs.view import view_of
from lapclip.text import without_controls
from lapclip.user_files import COMMENT, write_user_files

RIGHT = {True: " (right)", False: " (wrong)", None: ""}


def write_report(name: str | None, out: Path | None) -> tuple[list[Path], list[str]]:
    """Report on a run, the newest with a model if not named, or on a saved comparison where there is no run.

    Returns the files, and warnings for the person who asked.
    """
    saved, warning = read_comparison()
    warnings = [warning] if warning else []
    if name is None and not all_runs():
        if saved is None:
            raise RunError(
                f"There are no runs in {RUNS.absolute()} and no saved comparison.",
                hint="lapclip train",
            )
        # Not report.md: this may be the folder of somebody's own work.
        report, folder, name = comparison_report(saved), out or Path(), "lapclip-comparison"
        return write_user_files(report_files(report, folder, name)), warnings
    run = find_trained_run() if name is None else find_run(name)
    if not run.events.exists() and not run.settings.exists():
        run.read_settings()  # raises an error that says why
    sections = evaluation_sections(run.path)
    sections += comparison_sections(saved) if saved else []
    report = run_report(view_of(run), sections, run.images)
    files = report_files(report, out or run.path, "report")
    return write_user_files(files, replace_any=out is None), warnings


def report_names(folder: Path, name: str) -> list[Path]:
    """Return the paths of a report's page and of its Markdown."""
    return [folder / f"{name}.html", folder / f"{name}.md"]


def report_files(report: Report, folder: Path, name: str) -> dict[Path, str]:
    """Return the texts of a report as a page and as Markdown, by path."""
    texts = (to_html(report), to_markdown(report))
    return {
        path: without_controls(text)
        for path, text in zip(report_names(folder, name), texts, strict=True)
    }


def to_markdown(report: Report) -> str:
    """The whole report."""
    lines = [COMMENT.strip(), "", f"# {safe(report.title)}", "", safe(report.subtitle), ""]
    if report.headlines:
        rows: list[list[str | Cell]] = [
            [line.name, line.value, line.detail] for line in report.headlines
        ]
        lines += [*table_lines(Table(["", "", ""], rows)), ""]
    for section in report.sections:
        lines += [f"## {safe(section.title)}", ""]
        for block in section.blocks:
            lines += [*_block(block), ""]
    return "\n".join(lines).rstrip() + "\n"


def safe(text: object) -> str:
    """Text that stays text: no markup, no links, no line of its own."""
    escaped = re.sub(r"([\\`*\[\]<>|~])|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", str(text))
    return " ".join(escaped.split())


def _block(block: Block) -> list[str]:
    match block:
        case Sentences():
            return [f"- {safe(line)}" for line in block.lines]
        case Table():
            return [
                *([f"**{safe(block.folded)}**", ""] if block.folded else []),
                *table_lines(block),
            ]
        case Plot():
            return [
                f"### {safe(block.title)}",
                "",
                safe(block.explanation),
                "",
                *table_lines(block.table),
            ]
        case Gallery():
            rows: list[list[str | Cell]] = [
                [text, "; ".join(_image(image) for image in images)] for text, images in block.rows
            ]
            return [
                f"### {safe(block.title)}",
                "",
                safe(block.explanation),
                "",
                *table_lines(Table(["", "images"], rows)),
            ]


def _image(image: ReportImage) -> str:
    """An image as text."""
    return f"{image.text}{RIGHT[image.right]}"


def table_lines(table: Table) -> list[str]:
    """A table in Markdown."""
    head = f"| {' | '.join(safe(column) for column in table.columns)} |"
    rows = (
        " | ".join(safe(cell.text if isinstance(cell, Cell) else cell) for cell in row)
        for row in table.rows
    )
    return [head, "|---" * len(table.columns) + "|", *(f"| {row} |" for row in rows)]
