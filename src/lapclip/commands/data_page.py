"""The page of `lapclip data check --page`: random pairs, and images of each finding."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from lapclip.data.check_data import MAX_EXAMPLES, CheckedData, Example, Finding
from lapclip.data.decode import decode
from lapclip.data.table import Row
from lapclip.errors import DataError
from lapclip.report.document import Block, Gallery, Report, ReportImage, Section, to_html
from lapclip.seeding import generator
from lapclip.text import printable
from lapclip.user_files import write_user_files

OTHER_FILE = "--page with another file"
RANDOM_PAIRS = 24
MAX_EXAMPLE_IMAGES = 4  # of one example, such as a group of copies
MAX_CAPTION_LENGTH = 300  # characters
THUMBNAIL_SIDE = 300  # pixels


def write_page(path: Path, title: str, data: CheckedData, findings: Sequence[Finding]) -> None:
    """Write a page with random pairs and with examples of each finding. Refuses to replace what is not ours."""
    subtitle = f"{len(data.table.rows):,} images. {data.table.how}"
    sections = [Section("Random pairs", [random_pairs(data)])]
    if findings:
        galleries: list[Block] = [finding_gallery(data, finding) for finding in findings]
        sections.append(Section("Findings", galleries))
    report = Report(f"Check of {title}", subtitle, sections=sections)
    write_user_files({path: to_html(report)}, hint=OTHER_FILE)


def random_pairs(data: CheckedData) -> Gallery:
    """Return random images, each with one of its captions. The same data always gives the same pairs."""
    draw = generator(0, "pairs on the page of a data check")
    count = min(RANDOM_PAIRS, len(data.usable))
    images = []
    for index in sorted(draw.choice(len(data.usable), count, replace=False).tolist()):
        row = data.table.rows[data.usable[index]]
        caption = row.captions[draw.integers(len(row.captions))]
        images.append(show_image(row, f"{caption[:MAX_CAPTION_LENGTH]} ({row.image.name})"))
    title = f"{count} of {len(data.usable):,} images"
    return Gallery(title, "Does each caption belong to its image?", [("", images)])


def finding_gallery(data: CheckedData, finding: Finding) -> Gallery:
    """Return the examples of a finding with their images."""
    rows = [example_images(data, example) for example in finding.examples[:MAX_EXAMPLES]]
    return Gallery(f"{finding.count:,} {finding.heading}", finding.advice, rows)


def example_images(data: CheckedData, example: Example) -> tuple[str, list[ReportImage]]:
    """Return the text of an example and its first images."""
    rows = [data.table.rows[index] for index in example.rows[:MAX_EXAMPLE_IMAGES]]
    images = [show_image(row, row.image.name) for row in rows]
    return example.text[:MAX_CAPTION_LENGTH], images


def show_image(row: Row, text: str) -> ReportImage:
    """Return a small JPEG of an image with a text. An image that cannot be read has its text alone."""
    try:
        image = decode(row.image.read(), THUMBNAIL_SIDE).image
    except (DataError, OSError, MemoryError):
        return ReportImage(b"", printable(text))
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return ReportImage(file.getvalue(), printable(text))
