"""From the bytes of any image file to an upright image in RGB, safely: what is odd about it is mended and noted.

Files come from anywhere. So only readers of image formats are asked (Pillow's for PostScript would start a program),
the size is checked before memory is taken, and a file that ends early is an error, not an image that is half grey.
"""

from __future__ import annotations

import io
import math
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageCms

from lapclip.data.av1_sizes import av1_sizes
from lapclip.data.copies import SCAN, jpeg_segments
from lapclip.errors import DataError, first_line
from lapclip.suggest import install

DECODING_VERSION = 2
"""Part of the key of packed stores: raise it with every change that decodes some image to other pixels."""
PIXEL_LIMIT = 178_000_000
"""Pixels of the largest image that is decoded; what takes more memory than `MOST_MEMORY` is refused before."""
MOST_MEMORY = 480_000_000
"""Bytes that one image may take while it is read, its file among them, and all that are read at once in threads. A
small file can claim any size."""
MOST_WHOLE = 32_000_000
"""Pixels above which an image is halved, or more, right after it is decoded: whatever follows copies it."""
HUGE, TINY = 50_000_000, 8
"""Pixels from which on an image is called huge, and the side below which it is called tiny."""
DECODER_BYTES = {"WEBP": 18, "AVIF": 12, "HEIF": 11, "JPEG2000": 19}
"""Bytes a pixel that a format's decoder takes at most, the decoded image among them (measured)."""

MOST_SCANS = 100
"""Scans of a JPEG that is decoded: real ones have about ten, and each takes the time of the whole image."""
MOST_PROFILE = 4_000_000
"""Bytes of a colour profile that is used. Those of cameras and screens have a few thousand, those of printers a million
or two."""

STRIP = 2_000_000
"""Pixels of an image that are brought to RGB at a time."""
HIGHEST = 0.999
"""The share of an image's values that is not clipped, where nothing says how large they may be."""
USUAL_TOPS = (1, 255, 1023, 4095, 16383, 65535)
"""What white is in images of 1, 8, 10, 12, 14 and 16 bits. Cameras and scanners keep 12 bits in 16."""
MOST_LIGHT = 16.0
"""White of a floating-point image may be anything up to this, as in photos of high dynamic range; above it, the values
are those of whole numbers."""

NO_MEMORY = "there was too little memory for it"

MARKS = {
    "animated": "only the first frame is used",
    "cmyk": "printing colours are converted to sRGB",
    "grey": "grey is written as RGB",
    "huge": "decoded few at a time and at a fraction of their size, because of the memory",
    "profile": "colours are converted from the embedded profile to sRGB",
    "profile_ignored": "the embedded colour profile is damaged, huge or of another kind of image, and is not used",
    "rotated": "turned upright, as its EXIF orientation says",
    "sixteen_bit": "scaled to 8 bits a colour; grey ones by the bits, or the range, that their values use",
    "tiny": "enlarged; little can be seen on it",
    "transparent": "laid on white",
}
"""What can be noticed about an image, and what is done with it."""

FORMATS = (
    "JPEG",
    "PNG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
    "PPM",
    "AVIF",
    "HEIF",
    "JPEG2000",
    "TGA",
    "ICO",
)
"""Readers that are asked, the usual ones first."""
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image upright, by its EXIF orientation."""

PROFILE_FAULTS = (ImageCms.PyCMSError, OSError, ValueError, TypeError)

# Our limit is checked on every header, and a damaged EXIF block is no news to the user.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", module=r"PIL\.")

_SCAN_MARKER = re.compile(rb"\xff([\x02-\xcf\xd8-\xfe])")
"""A marker of a JPEG that does not belong to the data of a scan, as stuffed bytes and restarts do."""


class Room:
    """Memory that threads share while they decode: first come, first served, each when there is enough for it."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0
        self._first = threading.Lock()
        self._changed = threading.Condition()

    @contextmanager
    def take(self, needed: int) -> Iterator[None]:
        needed = min(needed, self.most)
        with self._first, self._changed:
            self._changed.wait_for(lambda: self.taken + needed <= self.most)
            self.taken += needed
        try:
            yield
        finally:
            with self._changed:
                self.taken -= needed
                self._changed.notify()


_room = Room(MOST_MEMORY)


class MayPass(DataError):
    """A fault of this moment or this computer, not of the file: nobody should remember it."""


@dataclass(frozen=True)
class Header:
    """An image whose size is known and allowed, and which is not decoded yet."""

    image: Image.Image
    data: bytes

    def turn(self, short_side: int | None = None) -> AbstractContextManager:
        """Held while an image is decoded, to that short side at least, and resized: large ones wait for each other, so
        that memory suffices."""
        try:
            needed = _memory(self.image, self.data, short_side)
        except Exception:  # decoding says what is wrong with it
            needed = MOST_MEMORY
        return _room.take(needed)


@dataclass(frozen=True)
class Decoded:
    """An upright image in RGB, the size it has in the file, and what was noticed: keys of `MARKS`."""

    image: Image.Image
    width: int
    height: int
    marks: frozenset[str]
    transform: ImageCms.ImageCmsTransform | None = None
    """What turns its colours into sRGB, where that was put off."""

    def finish(self, square: np.ndarray) -> np.ndarray:
        """Colours that were put off, for what was made of the image since."""
        if self.transform is None:
            return square
        return np.asarray(ImageCms.applyTransform(Image.fromarray(square), self.transform))


def read_header(data: bytes) -> Header:
    """The header of an image. Raises DataError, with the reason alone, where it is none or too large."""
    try:
        image = Image.open(io.BytesIO(data), formats=_formats())
    except Image.DecompressionBombError:
        raise DataError(f"it has more than {PIXEL_LIMIT // 10**6} megapixels") from None
    except Image.UnidentifiedImageError:
        raise _unknown(data) from None
    except MemoryError:
        raise MayPass(NO_MEMORY) from None
    except Exception as error:  # readers raise whatever their parsing stumbles on
        raise DataError(f"its header is damaged ({first_line(error)})") from None
    if image.width * image.height > PIXEL_LIMIT:  # also for what is only inspected
        raise DataError(
            f"it has {image.width:,} x {image.height:,} pixels, more than {PIXEL_LIMIT // 10**6} million"
        )
    if min(image.size) < 1:
        raise DataError("it has no pixels")
    return Header(image, data)


def decode(
    source: bytes | Header, short_side: int | None = None, *, put_off: bool = False
) -> Decoded:
    """The image in the bytes of a file. Raises DataError, with the reason alone, where there is none.

    With `short_side` a JPEG may come out smaller, by a power of two, while its short side stays at least that: its
    decoder can skip what would be averaged away, which saves most of the time of a photo of 12 megapixels.
    With `put_off` a colour profile may be left to `Decoded.finish`, because small images are converted sooner.
    """
    header = source if isinstance(source, Header) else read_header(source)
    image, marks = header.image, set()
    width, height = image.size
    try:
        _check_memory(image, header.data, short_side)
        if image.format in ("JPEG", "MPO"):
            _check_scans(header.data)
            _draft(image, short_side)
        deep = _is_deep(image)
        orientation = _orientation(
            image
        )  # asked now: a TIFF is turned while it is loaded, and then forgets it
        if image.format in ("GIF", "WEBP", "PNG", "AVIF") and getattr(image, "is_animated", False):
            marks.add("animated")
        image.load()
        if image.format in ("JPEG", "MPO") and _ends_early(header.data):
            raise DataError("it ends early")
        if orientation in TURNS:
            marks.add("rotated")
            if orientation >= 5 and image.format != "TIFF":
                width, height = height, width
        if deep:
            marks.add("sixteen_bit")
        transform = _transform_later(image) if put_off else None
        upright_image, more = upright(image, convert=transform is None)
        if upright_image is not image:
            image.close()  # its memory is needed for what follows, and the header may be kept
        if transform is not None:
            marks.add("profile")
    except DataError:
        raise
    except MemoryError:
        raise MayPass(NO_MEMORY) from None
    except Exception as error:  # readers raise whatever their parsing stumbles on
        what = (
            "it ends early" if "truncated" in str(error) else f"it is damaged ({first_line(error)})"
        )
        raise DataError(what) from None
    if min(width, height) < TINY:
        marks.add("tiny")
    if width * height > HUGE:
        marks.add("huge")
    return Decoded(upright_image, width, height, frozenset(marks | more), transform)


def as_decoded(image: Image.Image) -> Decoded:
    """An open image, as `decode` gives it with its colours put off."""
    if 0 in image.size:
        raise DataError("it has no pixels")
    image = image.copy()  # a copy is loaded, and a TIFF is turned while that is done
    transform = _transform_later(image)
    upright_image, marks = upright(image, convert=transform is None)
    return Decoded(upright_image, *upright_image.size, frozenset(marks), transform)


def as_file(image: Image.Image, **form: Any) -> bytes:
    """An open image as the file that it could be, upright and in RGB; `form` is as Pillow's `save` takes it."""
    try:
        decoded = as_decoded(image)
    except DataError as error:
        raise DataError(f"An image cannot be used: {error.message}.") from None
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"An image cannot be used: {first_line(error)}.") from None
    profile = (
        image.info.get("icc_profile") if decoded.transform else None
    )  # colours that are still to be converted
    file = io.BytesIO()
    decoded.image.save(file, icc_profile=profile, exif=b"", **form)  # it is upright
    return file.getvalue()


def upright(image: Image.Image, *, convert: bool = True) -> tuple[Image.Image, set[str]]:
    """A loaded image in RGB and sRGB, on white, turned as its orientation says; and what was noticed.

    In strips, because each step makes a copy, and halved or more where it is too large for what follows.
    """
    turn = TURNS.get(_orientation(image))
    marks: set[str] = set() if turn is None else {"rotated"}
    profile = image.info.get("icc_profile") if convert else None
    levels = _levels(image) if image.mode.startswith(("I", "F")) else None
    factor = math.ceil((image.width * image.height / MOST_WHOLE) ** 0.5)
    if factor == 1 and (image.mode == "RGB" and not profile and "transparency" not in image.info):
        return (image if turn is None else image.transpose(turn)), marks
    finished = Image.new("RGB", (-(-image.width // factor), -(-image.height // factor)))
    for top, strip in _strips(image, factor):
        strip, more = _in_rgb(strip, profile, levels)
        marks |= more
        finished.paste(strip.reduce(factor) if factor > 1 else strip, (0, top // factor))
    return (finished if turn is None else finished.transpose(turn)), marks


def _strips(image: Image.Image, factor: int = 1) -> Iterator[tuple[int, Image.Image]]:
    """Strips of an image with the row they begin at, which is a multiple of the factor."""
    rows = max(1, STRIP // image.width // factor) * factor
    for top in range(0, image.height, rows):
        whole = rows >= image.height
        yield (
            top,
            image if whole else image.crop((0, top, image.width, min(top + rows, image.height))),
        )


def _in_rgb(
    image: Image.Image, profile: bytes | None, levels: Levels | None
) -> tuple[Image.Image, set[str]]:
    """A strip in RGB and sRGB, on white, and what was noticed."""
    marks: set[str] = set()
    if levels is not None:
        image = _eight_bits(image, levels)
    alpha = _alpha(image)
    if alpha is not None:
        marks.add("transparent")
    if image.mode not in ("RGB", "L", "CMYK", "LAB"):
        # Through RGBA, because palettes with transparency are converted to RGB with a guess of their own.
        grey = image.mode in ("1", "LA", "La")
        image = image.convert("L") if grey else image.convert("RGBA").convert("RGB")
    marks.update({"L": {"grey"}, "CMYK": {"cmyk"}}.get(image.mode, set()))
    if profile or image.mode == "LAB":
        image, more = _to_srgb(image, profile)
        marks.update(more)
    if image.mode != "RGB":
        image = image.convert("RGB")
    if alpha is not None:
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=alpha)
        image = white
    return image, marks


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged EXIF: the image is shown as it lies, as browsers do
        return 1


def _is_deep(image: Image.Image) -> bool:
    """Whether the file holds more than 8 bits a colour; known from how it is about to be unpacked."""
    if image.mode.startswith(("I", "F")):
        return True
    unpacked = [tile[3] for tile in getattr(image, "tile", [])[:1]]
    return any(
        ";16" in str(form if isinstance(form, str) else form[0]) for form in unpacked if form
    )


Levels = tuple[float, float]
"""The values that become black and white."""


def _levels(image: Image.Image) -> Levels:
    """The levels of a grey image of 16 bits and more, by the bits that its values use: nothing says how large they may
    be. A few highlights do not count, or they would leave the rest black; they become white."""
    if image.mode not in ("I", "F"):
        counts = sum(
            np.bincount(_values(strip).ravel(), minlength=65536) for _, strip in _strips(image)
        )
        low, high = (
            0.0,
            float(np.searchsorted(np.cumsum(counts), HIGHEST * image.width * image.height)),
        )
    else:
        step, some = 1 + image.width * image.height // STRIP, []
        for _, strip in _strips(image):
            values = _values(strip).ravel()
            if not np.isfinite(values).all():
                raise DataError("it holds values that are not numbers")
            some.append(values[::step].copy())
        low, high = np.quantile(
            np.concatenate(some).astype(np.float64), (1 - HIGHEST, HIGHEST)
        ).tolist()
    low = min(0.0, low)
    span = high - low
    if image.mode == "F" and 1 < span <= MOST_LIGHT:
        return low, high
    return low, low + next((top for top in USUAL_TOPS if span <= top), span)


def _values(image: Image.Image) -> np.ndarray:
    values = np.asarray(image)
    return (
        values if image.mode in ("I", "F") else values.astype(np.uint16)
    )  # whatever the order of their bytes


def _eight_bits(image: Image.Image, levels: Levels) -> Image.Image:
    """A grey strip of 16 bits and more as 8 bits: scaled, where Pillow's conversion would clip."""
    low, high = levels
    scaled = (_values(image).astype(np.float64) - low) * (255 / (high - low))
    return Image.fromarray(np.rint(np.clip(scaled, 0, 255)).astype(np.uint8))


def _alpha(image: Image.Image) -> Image.Image | None:
    """How opaque each pixel is; None where all of them are."""
    if image.mode not in ("LA", "La", "PA", "RGBA", "RGBa") and "transparency" not in image.info:
        return None
    alpha = image.convert("RGBA").getchannel("A")
    return alpha if alpha.getextrema()[0] != 255 else None


def _transform_later(image: Image.Image) -> ImageCms.ImageCmsTransform | None:
    """What an embedded profile asks for, where it can wait: not where colours are mixed with white or not RGB yet."""
    profile = image.info.get("icc_profile")
    if not profile or image.mode != "RGB" or "transparency" in image.info:
        return None
    try:
        return _transform(profile, "RGB")
    except PROFILE_FAULTS:
        return None


def _to_srgb(image: Image.Image, profile: bytes | None) -> tuple[Image.Image, set[str]]:
    try:
        transform = _transform(profile, image.mode)
        if transform is None:
            return image, set()
        converted = ImageCms.applyTransform(image, transform)
        assert converted is not None
        return converted, {"profile"}
    except PROFILE_FAULTS:
        if image.mode == "LAB":  # its numbers are no colours without one
            return _to_srgb(image, None) if profile else (image, set())
        return image, {"profile_ignored"}


def _transform(profile: bytes | None, mode: str) -> ImageCms.ImageCmsTransform | None:
    """From a profile to sRGB; None where it is sRGB already."""
    if profile is not None and len(profile) > MOST_PROFILE:
        raise ValueError("a colour profile that is too large")
    return _kept_transform(profile, mode)


@lru_cache(maxsize=8)
def _kept_transform(profile: bytes | None, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Kept, because a camera writes the same into each photo, and large images are converted in strips. Few, because
    their profiles are kept too."""
    if profile is None:
        source = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB"))
    else:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if mode == "RGB" and "srgb" in ImageCms.getProfileDescription(source).lower():
            return None
    return ImageCms.buildTransform(source, _srgb(), mode, "RGB")


@cache
def _srgb() -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


def _ends_early(data: bytes) -> bool:
    """Whether a JPEG has no end after its beginning: cut off and filled with zeros, its decoder would make up the rest.

    The segments before the first scan are stepped over, because a small preview inside them has an end of its own.
    """
    return not data.endswith(b"\xff\xd9") and data.find(b"\xff\xd9", _first_scan(data) or 2) < 0


def _first_scan(data: bytes) -> int | None:
    """Where the first scan of a JPEG begins; None where that cannot be told."""
    return next((begin for marker, begin, _ in jpeg_segments(data) if marker == SCAN), None)


def _check_scans(data: bytes) -> None:
    """Raise DataError where a JPEG has more scans than any real one: a small file of empty ones takes minutes."""
    at, scans = _first_scan(data) or 2, 0
    if data.count(b"\xff\xda", at) <= MOST_SCANS:
        return
    while (found := _SCAN_MARKER.search(data, at)) and found[
        1
    ] != b"\xd9":  # what follows its end is another file
        scans += found[1] == b"\xda"
        at = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")
    if scans > MOST_SCANS:
        raise DataError(f"it has {scans:,} scans, more than {MOST_SCANS}")


def _draft(image: Image.Image, short_side: int | None) -> None:
    """Let a JPEG be decoded at a fraction of its size, while its short side stays at least that and, where it is too
    large for memory, in any case."""
    size = _draft_size(image, short_side)
    if min(size) > 0 and size != image.size:
        image.draft(None, size)  # type: ignore[arg-type]  # no change of mode


def _draft_size(image: Image.Image, short_side: int | None) -> tuple[int, int]:
    """What a JPEG should be decoded to, at least."""
    width, height = image.size
    halved = 2 ** math.ceil(math.log2(max(1.0, width * height / MOST_WHOLE)) / 2)
    asked = (short_side or width, short_side or height)
    return min(asked[0], width // halved), min(asked[1], height // halved)


def _check_memory(image: Image.Image, data: bytes, short_side: int | None) -> None:
    """Raise DataError where decoding would take more memory than an image may."""
    needed = _memory(image, data, short_side)
    if needed > MOST_MEMORY:
        width, height = _stored_size(image, data)
        raise DataError(
            f"decoding its {width:,} x {height:,} pixels would take {needed / 1e6:,.0f} MB of memory, more than "
            f"{MOST_MEMORY // 10**6}"
        )


def _memory(image: Image.Image, data: bytes, short_side: int | None) -> int:
    """Bytes that decoding takes, from what the headers say, before anything of it is done."""
    width, height = _stored_size(image, data)
    stored = pixels = width * height
    if image.format in ("JPEG", "MPO"):
        wanted = _draft_size(image, short_side)
        fraction = min(width // wanted[0], height // wanted[1]) if min(wanted) > 0 else 1
        pixels //= next(scale for scale in (8, 4, 2, 1) if scale <= fraction) ** 2
    raster = 1 if image.mode in ("1", "L", "P") else 2 if image.mode.startswith("I;16") else 4
    # Another byte a pixel for the smaller copy that is made of a large one; both, of others, at four bytes.
    needed = len(data) + pixels * DECODER_BYTES.get(
        image.format or "", raster + (4 if pixels <= MOST_WHOLE else 1)
    )
    if image.format in ("JPEG", "MPO"):
        needed += _coefficients(image, data, stored)
    if image.format == "TIFF":
        needed += len(data) + _largest_strip(image)
    return needed


def _stored_size(image: Image.Image, data: bytes) -> tuple[int, int]:
    """The width and height that are decoded, where a container may say less."""
    if image.format == "ICO":
        inside = image.ico  # type: ignore[attr-defined]
        return inside.frame(inside.getentryindex(image.size)).size
    if image.format == "AVIF":
        sizes = av1_sizes(data)
        if not sizes:
            raise DataError("nothing in it says how large its frames are")
        return max(image.size, *sizes, key=math.prod)
    return image.size


def _coefficients(image: Image.Image, data: bytes, stored: int) -> int:
    """Bytes that a JPEG's decoder keeps of the whole image, where that comes in several scans."""
    layers = image.layer  # type: ignore[attr-defined]
    scan = _first_scan(data)
    if "progressive" not in image.info and scan is not None and data[scan + 4] >= len(layers):
        return 0
    largest = max(across for _, across, _, _ in layers) * max(down for _, _, down, _ in layers)
    return 2 * stored * sum(across * down for _, across, down, _ in layers) // largest


def _largest_strip(image: Image.Image) -> int:
    """Bytes of a strip or tile of a TIFF, which its decoder holds at once; all of it where it does not say."""
    tags = image.tag_v2  # type: ignore[attr-defined]
    rows, across = min(tags.get(278) or image.height, image.height), image.width
    if 322 in tags and 323 in tags:
        across, rows = tags[322], tags[323]
    bits = tags.get(258) or (8,)
    return across * rows * max(1, sum(bits)) // 8


@cache
def _formats() -> tuple[str, ...]:
    """The readers there are here. That for HEIC comes with an extra."""
    Image.init()
    try:
        import pillow_heif  # pyright: ignore[reportMissingImports]

        pillow_heif.register_heif_opener()
    except ImportError:
        pass
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _unknown(data: bytes) -> DataError:
    if not data:
        return DataError("it is empty")
    if data[4:8] == b"ftyp" and data[8:12] in HEIC_BRANDS and "HEIF" not in _formats():
        return MayPass("HEIC needs the package pillow-heif", hint=install("heic"))
    return DataError("it is not an image of a known form")
