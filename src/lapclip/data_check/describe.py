"""`lapclip data describe`: a contact sheet of a data set, as an image and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

from lapclip.data.decode import decode, look
from lapclip.data.table import Row
from lapclip.data_check.captions import frequent_words
from lapclip.data_check.check import settings_for
from lapclip.data_check.checked_table import SCENES, open_table
from lapclip.errors import ConfigError, DataError
from lapclip.progress import Progress

SIDE = 320
"""The longest side of an image on the page."""
NAME = "contact-sheet"
WORDS = 40


@dataclass(frozen=True)
class Shown:
    """An image on the sheet."""

    name: str
    split: str
    captions: Sequence[str]
    image: Image.Image


@dataclass(frozen=True)
class Sheet:
    """What a contact sheet shows."""

    title: str
    how: str
    images: int
    captions: int
    splits: dict[str, int]
    shown: list[Shown]
    lengths: dict[int, int]
    """How many captions have so many words."""
    words: list[tuple[str, int]]


def describe(
    source: str, out: Path | None, pictures: int, settings: Sequence[str], progress: Progress | None = None
) -> dict[str, Any]:
    """Make the sheet and write it; returns what `--json` prints."""
    from lapclip.data_check.contact_sheet import to_image
    from lapclip.data_check.page import to_page

    if pictures < 1:
        raise ConfigError(f"--pictures must be at least 1, not {pictures}.", hint="--pictures 48")
    sheet = make_sheet(source, pictures, settings, progress)
    files = _files(out)
    try:
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix.lower() == ".png":
                to_image(sheet).save(file, "PNG")
            else:
                file.write_text(to_page(sheet), encoding="utf-8")
    except OSError as error:
        raise DataError(f"Cannot write the sheet: {error.strerror or error}.", hint="--out FOLDER") from error
    return {
        "images": sheet.images,
        "captions": sheet.captions,
        "splits": sheet.splits,
        "shown": len(sheet.shown),
        "files": [str(file) for file in files],
    }


def make_sheet(source: str, pictures: int, settings: Sequence[str], progress: Progress | None = None) -> Sheet:
    """Some of the images, drawn at random but the same ones each time, and figures on all captions."""
    config, _ = settings_for(source, None, settings)
    surveyed = open_table(config, progress)
    rows = surveyed.table.rows
    order = Random(f"contact sheet {config.data.seed}").sample(range(len(rows)), len(rows))
    shown: list[Shown] = []
    for at in order:
        if len(shown) == min(pictures, len(rows)):
            break
        image = _open(rows[at])
        if image is not None:
            shown.append(Shown(rows[at].image.name, surveyed.splits[at], rows[at].captions, image))
            if progress:
                progress(len(shown), min(pictures, len(rows)))
    if not shown:
        raise DataError(f"No image in {source} can be read.", hint=f"lapclip data check {source}")
    captions = [caption for row in rows for caption in row.captions]
    return Sheet(
        title="The built-in scenes" if source == SCENES else Path(source).resolve().name or source,
        how=surveyed.table.how,
        images=len(rows),
        captions=len(captions),
        splits=dict(Counter(surveyed.splits)),
        shown=shown,
        lengths=dict(sorted(Counter(len(caption.split()) for caption in captions).items())),
        words=frequent_words(captions, WORDS),
    )


def _open(row: Row) -> Image.Image | None:
    """A small copy of an image; what cannot be read is left to `data check`."""
    try:
        header = look(row.image.read())
        with header.turn():
            image = decode(header, SIDE).image
    except (OSError, DataError):
        return None
    image.thumbnail((SIDE, SIDE))
    return image


def _files(out: Path | None) -> list[Path]:
    if out is not None and out.suffix.lower() in (".png", ".html", ".htm"):
        return [out]
    folder = out or Path()
    return [folder / f"{NAME}.png", folder / f"{NAME}.html"]
