"""`lapclip data describe`: a contact sheet of a data set, as an image and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

from lapclip.commands.check_data import list_images, settings_for
from lapclip.data.check.captions import frequent_words
from lapclip.data.decode import decode, read_header
from lapclip.data.sources import find_source
from lapclip.data.table import Row
from lapclip.errors import ConfigError, DataError
from lapclip.progress import Progress
from lapclip.report.contact_sheet import Sheet, Shown, to_image, to_page
from lapclip.suggest import command

SIDE = 320
"""The longest side of an image on the page."""
NAME = "contact-sheet"
WORDS = 40


def describe_data(
    source: str, out: Path | None, count: int, settings: Sequence[str], progress: Progress | None = None
) -> dict[str, Any]:
    """Make the sheet and write it; returns what `--json` prints."""
    if count < 1:
        raise ConfigError(f"--images must be at least 1, not {count}.", hint="--images 48")
    sheet = make_sheet(source, count, settings, progress)
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


def make_sheet(source: str, count: int, settings: Sequence[str], progress: Progress | None = None) -> Sheet:
    """Some of the images, drawn at random but the same ones each time, and statistics of all captions."""
    config, _ = settings_for(source, None, settings)
    listing = list_images(config, progress)
    rows = listing.table.rows
    order = Random(f"contact sheet {config.data.seed}").sample(range(len(rows)), len(rows))
    shown: list[Shown] = []
    for at in order:
        if len(shown) == min(count, len(rows)):
            break
        image = _open(rows[at])
        if image is not None:
            shown.append(Shown(rows[at].image.name, listing.splits[at], rows[at].captions, image))
            if progress:
                progress(len(shown), min(count, len(rows)))
    if not shown:
        raise DataError(f"No image in {source} can be read.", hint=command("data", "check", source))
    captions = [caption for row in rows for caption in row.captions]
    return Sheet(
        title=find_source(source).title_of(config.data),
        how=listing.table.how,
        images=len(rows),
        captions=len(captions),
        splits=dict(Counter(listing.splits)),
        shown=shown,
        lengths=dict(sorted(Counter(len(caption.split()) for caption in captions).items())),
        words=frequent_words(captions, WORDS),
    )


def _open(row: Row) -> Image.Image | None:
    """A small copy of an image; what cannot be read is left to `data check`."""
    try:
        header = read_header(row.image.read())
        with header.turn(SIDE):
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
