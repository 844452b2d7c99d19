"""Small real data for tests of the sources: images made here, and a reading that checks its account."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image

from lapclip.config import DataConfig
from lapclip.data.sources import read_table
from lapclip.data.table import Table


def image_bytes(shade: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (shade % 256, 80, 120)).save(file, "PNG")
    return file.getvalue()


def make_images(folder: Path, *names: str) -> Path:
    """Make images of these names below a folder."""
    for shade, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_bytes(shade))
    return folder


def read(source: Path | str, **settings: Any) -> Table:
    """The table of a source; every image can be read, has a name of its own, and no record is lost."""
    table = read_table(DataConfig(source=str(source), **settings))
    check_account(table)
    for row in table.rows:
        assert row.image.read()
        assert row.image.stamp() == row.image.stamp()
    return table


def check_account(table: Table) -> None:
    """What the table promises of itself."""
    assert table.records == captions_in(table) + table.repeated + len(table.skipped)
    assert len({row.image.name for row in table.rows}) == len(table.rows) > 0
    for row in table.rows:
        assert row.captions
        assert len(set(row.captions)) == len(row.captions)
        assert all(caption == caption.strip() != "" for caption in row.captions)
        assert row.split in ("", "train", "val", "test")
    assert all(skipped.where.isprintable() and skipped.why for skipped in table.skipped)
    assert table.how
    assert "\n" not in table.how


def captions_in(table: Table) -> int:
    return sum(len(row.captions) for row in table.rows)


def found(table: Table) -> dict[str, tuple[str, ...]]:
    return {row.image.name: row.captions for row in table.rows}


def splits(table: Table) -> dict[str, str]:
    return {row.image.name: row.split for row in table.rows}


def skipped(table: Table) -> dict[str, str]:
    return {skipped.where: skipped.why for skipped in table.skipped}
