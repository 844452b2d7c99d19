"""From the bytes of a picture file to an upright picture in RGB, with what was noticed about it."""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import Image, ImageOps, UnidentifiedImageError

from lapclip.errors import DataError, first_line

HUGE, TINY = 50_000_000, 8
PIXEL_LIMIT = 178_000_000
MARKS = {
    "animated": "only the first frame is used",
    "cmyk": "printing colours are converted to sRGB",
    "grey": "grey is written as RGB",
    "huge": "decoded one at a time, because of the memory",
    "rotated": "turned upright, as its EXIF orientation says",
    "sixteen_bit": "scaled to 8 bits a colour",
    "tiny": "enlarged; little can be seen on it",
    "transparent": "laid on white",
}
"""What can be noticed about a picture, and what is done with it."""
ORIENTATION = 0x0112


@dataclass(frozen=True)
class Decoded:
    """An upright picture in RGB, its size before it was shrunk, and what was noticed: keys of `MARKS`."""

    image: Image.Image
    width: int
    height: int
    marks: frozenset[str]


def decode(data: bytes, short_side: int | None = None) -> Decoded:
    """The picture in the bytes of a file. Raises DataError, with the reason alone, where there is none."""
    marks: set[str] = set()
    try:
        image = Image.open(io.BytesIO(data))
        width, height = image.size
        if width * height > PIXEL_LIMIT:
            raise DataError(f"it has {width:,} x {height:,} pixels")
        if short_side:
            image.draft(None, (short_side, short_side))  # type: ignore[arg-type]
        if getattr(image, "is_animated", False):
            marks.add("animated")
        image.load()
        if image.getexif().get(ORIENTATION, 1) in range(2, 9):
            marks.add("rotated")
            image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I") or image.mode == "F":
            marks.add("sixteen_bit")
            image = image.convert("I").point(lambda value: value / 257).convert("L")
        if image.mode == "CMYK":
            marks.add("cmyk")
        if image.mode in ("1", "L", "LA"):
            marks.add("grey")
        if image.has_transparency_data:
            marks.add("transparent")
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
    except DataError:
        raise
    except (UnidentifiedImageError, Image.DecompressionBombError):
        raise DataError("it is not a picture that can be read") from None
    except Exception as error:  # readers raise whatever their parsing stumbles on
        what = "it ends early" if "truncated" in str(error) else f"it is damaged ({first_line(error)})"
        raise DataError(what) from None
    if min(width, height) < TINY:
        marks.add("tiny")
    if width * height > HUGE:
        marks.add("huge")
    return Decoded(image, width, height, frozenset(marks))
