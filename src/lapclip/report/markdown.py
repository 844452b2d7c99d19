"""A report as Markdown: the same sections; plots become their figures."""

from __future__ import annotations

import re

from lapclip.report.document import Block, Cell, Gallery, Plot, Report, ReportImage, Sentences, Table

RIGHT = {True: " (right)", False: " (wrong)", None: ""}


def to_markdown(report: Report) -> str:
    """The whole report."""
    lines = [f"# {safe(report.title)}", "", safe(report.subtitle), ""]
    if report.headlines:
        rows: list[list[str | Cell]] = [[line.name, line.value, line.detail] for line in report.headlines]
        lines += [*_table(Table(["", "", ""], rows)), ""]
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
            return [*([f"**{safe(block.folded)}**", ""] if block.folded else []), *_table(block)]
        case Plot():
            return [f"### {safe(block.title)}", "", safe(block.look_for), "", *_table(block.table)]
        case Gallery():
            rows: list[list[str | Cell]] = [
                [text, "; ".join(_image(image) for image in images)] for text, images in block.rows
            ]
            return [f"### {safe(block.title)}", "", safe(block.look_for), "", *_table(Table(["", "images"], rows))]


def _image(image: ReportImage) -> str:
    """An image as text."""
    return f"{image.text}{RIGHT[image.right]}"


def _table(table: Table) -> list[str]:
    head = f"| {' | '.join(safe(column) for column in table.columns)} |"
    rows = (" | ".join(safe(cell.text if isinstance(cell, Cell) else cell) for cell in row) for row in table.rows)
    return [head, "|---" * len(table.columns) + "|", *(f"| {row} |" for row in rows)]
