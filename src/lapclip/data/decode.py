"""Decode the bytes of any image file to an upright image in RGB.

Files come from anywhere. So only Pillow's readers of image formats are used (its reader of PostScript would start a
program), the number of pixels is limited before any of them is decoded, and a file that ends early is an error instead
of an image that is half gray.
"""

from __future__ import annotations

import io
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageCms

from lapclip.data.copies import SCAN, jpeg_segments
from lapclip.errors import DataError, first_line
from lapclip.machine.facts import logical_cores
from lapclip.suggest import install

DECODING_VERSION = 3
"""Part of the key of packed stores: raise it with every change that decodes some image to other pixels."""

MAX_PIXELS = 89_478_485  # Pillow's own limit for images from strangers
LARGE_PIXELS = 25_000_000  # larger images are decoded one at a time, because together they could fill the memory
MAX_SCANS = 100  # of a JPEG: real ones have about ten
MAX_PROFILE_BYTES = 4_000_000  # cameras write a few thousand bytes, printers up to two million
NO_MEMORY = "there was too little memory for it"


# Readers in the order in which they are tried. Not ICO: its header may claim a smaller image than it holds.
FORMATS = (
    "JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "HEIF", "JPEG2000", "TGA",
)  # fmt: skip
JPEG_FORMATS = ("JPEG", "MPO")
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")

ORIENTATION_TAG = 0x0112
# The operation that makes an image upright, by its EXIF orientation. Those from 5 on swap width and height.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

PROFILE_FAULTS = (ImageCms.PyCMSError, OSError, ValueError, TypeError)

# `read_header` checks the size itself, and users need not know about a damaged EXIF block.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", module=r"PIL\.")

# Any marker of a JPEG that cannot be part of the compressed pixels, where only stuffed bytes and restarts occur.
_SEGMENT_MARKER = re.compile(rb"\xff([\x02-\xcf\xd8-\xfe])")
START_OF_SCAN = b"\xda"
END_OF_IMAGE = b"\xd9"
_large_image_lock = threading.Lock()


class TemporaryFault(DataError):
    """A fault of this computer at this moment, not of the file: it must not be remembered."""


@dataclass(frozen=True)
class Header:
    """An image of an allowed size that is not decoded yet."""

    image: Image.Image
    data: bytes
    width: int
    height: int


@dataclass(frozen=True)
class Decoded:
    """An upright image in RGB."""

    image: Image.Image
    width: int
    """Width of the image in the file, which may have been decoded at a fraction of its size."""
    height: int
    transform: ImageCms.ImageCmsTransform | None = None
    """Conversion to sRGB that is still to be done. None if the image is in sRGB already."""

    def finish(self, square: np.ndarray) -> np.ndarray:
        """Convert a part of the image, made in the meantime, to sRGB."""
        if self.transform is None:
            return square
        return np.asarray(ImageCms.applyTransform(Image.fromarray(square), self.transform))


@cache
def decoding_threads() -> ThreadPoolExecutor:
    """Return the threads that all readers of data sets share."""
    return ThreadPoolExecutor(logical_cores(), thread_name_prefix="lapclip-decoding")


def read_header(data: bytes) -> Header:
    """Read the header of an image file. Raises DataError with the reason if it is no image or too large."""
    too_large = f"it has more than {MAX_PIXELS // 10**6} million pixels"
    try:
        image = Image.open(io.BytesIO(data), formats=available_formats())
    except Image.DecompressionBombError:
        raise DataError(too_large) from None
    except Image.UnidentifiedImageError:
        raise unknown_format(data) from None
    except MemoryError:
        raise TemporaryFault(NO_MEMORY) from None
    except Exception as error:  # a damaged file can raise anything in Pillow
        raise DataError(f"its header is damaged ({first_line(error)})") from None
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataError(f"{too_large}: {width:,} x {height:,}")
    if width < 1 or height < 1:
        raise DataError("it has no pixels")
    return Header(image, data, width, height)


def decode(
    source: bytes | Header, short_side: int | None = None, *, defer_profile: bool = False
) -> Decoded:
    """Decode an image file. Raises DataError with the reason if that fails.

    With `short_side`, a JPEG may be decoded at a half, a quarter or an eighth of its size, as long as its short side
    stays at least that. The decoder skips what would be averaged away, which saves most of the time for large photos.
    With `defer_profile`, an embedded color profile may be left to `Decoded.finish`: small images convert faster.
    """
    header = source if isinstance(source, Header) else read_header(source)
    image = header.image
    try:
        if image.format in JPEG_FORMATS:
            check_scan_count(header.data)
            if short_side is not None and short_side < min(image.size):
                image.draft(None, (short_side, short_side))  # type: ignore[arg-type]  # keeps the mode
        if not is_large(header):
            return decode_pixels(header, defer_profile)
        with _large_image_lock:
            return decode_pixels(header, defer_profile)
    except DataError:
        raise
    except MemoryError:
        raise TemporaryFault(NO_MEMORY) from None
    except Exception as error:  # a damaged file can raise anything in Pillow
        if "truncated" in str(error):
            raise DataError("it ends early") from None
        raise DataError(f"it is damaged ({first_line(error)})") from None


def is_large(header: Header) -> bool:
    """Return whether decoding an image takes so much memory that others should wait."""
    if header.image.format == "AVIF":  # its frame may be larger than the header says
        return True
    pixels = header.image.width * header.image.height  # a fraction of the header's, for some JPEGs
    if "progressive" in header.image.info:  # all coefficients are held, whatever the fraction
        pixels = header.width * header.height
    return pixels > LARGE_PIXELS


def decode_pixels(header: Header, defer_profile: bool) -> Decoded:
    """Decode the pixels of an image. Raises whatever Pillow raises."""
    image, width, height = header.image, header.width, header.height
    if read_orientation(image) >= 5 and image.format != "TIFF":  # which has its size upright
        width, height = height, width
    image.load()
    if image.format in JPEG_FORMATS and ends_early(header.data):
        raise DataError("it ends early")
    transform = find_deferrable_transform(image) if defer_profile else None
    rgb = to_upright_rgb(image, convert_profile=transform is None)
    if rgb is not image:
        image.close()  # frees its memory even if the caller keeps the header
    return Decoded(rgb, width, height, transform)


def decode_open_image(image: Image.Image) -> Decoded:
    """Return an open image upright and in RGB, with its color profile deferred."""
    if 0 in image.size:
        raise DataError("it has no pixels")
    image = image.copy()  # loads the pixels, and turns a TIFF
    transform = find_deferrable_transform(image)
    rgb = to_upright_rgb(image, convert_profile=transform is None)
    return Decoded(rgb, *rgb.size, transform)


def as_file(image: Image.Image, **options: Any) -> bytes:
    """Return an open image as the bytes of a file, upright and in RGB. The options are those of Pillow's `save`."""
    try:
        decoded = decode_open_image(image)
    except DataError as error:
        raise DataError(f"An image cannot be used: {error.message}.") from None
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"An image cannot be used: {first_line(error)}.") from None
    profile = None
    if decoded.transform is not None:
        profile = image.info.get("icc_profile")
    file = io.BytesIO()
    decoded.image.save(file, icc_profile=profile, exif=b"", **options)
    return file.getvalue()


# -- colors and orientation --------------------------------------------------------------------------------------------


def to_upright_rgb(image: Image.Image, *, convert_profile: bool = True) -> Image.Image:
    """Convert a loaded image to sRGB on a white background, and turn it upright."""
    turn = TURNS.get(read_orientation(image))
    rgb = to_rgb(image, image.info.get("icc_profile") if convert_profile else None)
    return rgb if turn is None else rgb.transpose(turn)


def to_rgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert an image of any color mode to sRGB on a white background."""
    if image.mode.startswith(("I", "F")):
        image = to_eight_bits(image)
    alpha = find_alpha(image)
    if image.mode in ("1", "LA", "La"):
        image = image.convert("L")
    elif image.mode not in ("RGB", "L", "CMYK", "LAB"):
        # Pillow converts a palette with transparency to RGB by guessing, but to RGBA correctly.
        image = image.convert("RGBA").convert("RGB")

    if profile or image.mode == "LAB":
        image = apply_profile(image, profile)
    if image.mode != "RGB":
        image = image.convert("RGB")
    if alpha is not None:
        image.paste("white", mask=ImageChops.invert(alpha))
    return image


def read_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an image: 1, upright, if it has none."""
    try:
        return int(image.getexif().get(ORIENTATION_TAG, 1))
    except Exception:  # with a damaged EXIF block, browsers show the image as it is stored
        return 1


def to_eight_bits(image: Image.Image) -> Image.Image:
    """Scale a gray image to 8 bits: 65,535 is white, or 1 if its values are floating-point numbers.

    Pillow's own conversion would clip all values above 255. Raises DataError if a value is out of range.
    """
    values = np.asarray(image)
    white = 1.0 if image.mode == "F" else 65_535.0
    low, high = float(values.min()), float(values.max())
    if not 0 <= low <= high <= white:  # also if a value is not a number
        raise DataError(f"its values are from {low:g} to {high:g}, not from 0 to {white:g}")
    scaled = values.astype(np.float32)
    scaled *= np.float32(255 / white)
    np.rint(scaled, out=scaled)
    return Image.fromarray(scaled.astype(np.uint8))


def find_alpha(image: Image.Image) -> Image.Image | None:
    """Return the opacity of each pixel. None if all are opaque."""
    has_alpha = image.mode in ("LA", "La", "PA", "RGBA", "RGBa")
    if not has_alpha and "transparency" not in image.info:
        return None
    alpha = image.convert("RGBA").getchannel("A")
    lowest, _ = alpha.getextrema()
    return None if lowest == 255 else alpha


def apply_profile(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert an image from its color profile to sRGB. A profile that cannot be used is ignored."""
    try:
        transform = make_transform(profile, image.mode)
        if transform is None:
            return image
        converted = ImageCms.applyTransform(image, transform)
        assert converted is not None
        return converted
    except PROFILE_FAULTS:
        if image.mode == "LAB" and profile:  # its values mean nothing in RGB
            return apply_profile(image, None)
        return image


def find_deferrable_transform(image: Image.Image) -> ImageCms.ImageCmsTransform | None:
    """Return the conversion to sRGB if it can wait until the image is small.

    None if there is nothing to convert, or if colors must be converted first: before they are mixed with a white
    background, or to RGB.
    """
    profile = image.info.get("icc_profile")
    if not profile or image.mode != "RGB" or "transparency" in image.info:
        return None
    try:
        return make_transform(profile, "RGB")
    except PROFILE_FAULTS:
        return None


def make_transform(profile: bytes | None, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the conversion from a color profile to sRGB. None if the profile is sRGB itself."""
    if profile is not None and len(profile) > MAX_PROFILE_BYTES:
        raise ValueError("the color profile is too large")
    return _cached_transform(profile, mode)


@lru_cache(
    maxsize=8
)  # few, because the cache holds the profiles; a camera writes the same one into each photo
def _cached_transform(profile: bytes | None, mode: str) -> ImageCms.ImageCmsTransform | None:
    if profile is None:
        source = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB"))
    else:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if mode == "RGB" and "srgb" in ImageCms.getProfileDescription(source).lower():
            return None
    return ImageCms.buildTransform(source, _srgb_profile(), mode, "RGB")


@cache
def _srgb_profile() -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


# -- JPEG files --------------------------------------------------------------------------------------------------------


def ends_early(data: bytes) -> bool:
    """Return whether a JPEG has no end marker after its first scan.

    Its decoder would make up the rest. Segments before the first scan do not count, because a small preview in them
    has an end marker of its own.
    """
    return not data.endswith(b"\xff\xd9") and data.find(b"\xff\xd9", find_first_scan(data)) < 0


def find_first_scan(data: bytes) -> int:
    """Return the position of a JPEG's first scan, or of its first segment if no scan is found."""
    for marker, begin, _ in jpeg_segments(data):
        if marker == SCAN:
            return begin
    return 2


def check_scan_count(data: bytes) -> None:
    """Raise DataError if a JPEG has more scans than any real one.

    Each scan takes as long as decoding the whole image, so a small file of empty scans would take minutes.
    """
    first_scan = find_first_scan(data)
    # Counting bytes is fast, and settles it for nearly all files: a JPEG cannot have more scans than this.
    if data.count(b"\xff" + START_OF_SCAN, first_scan) <= MAX_SCANS:
        return
    scan_count = count_scans(data, first_scan)
    if scan_count > MAX_SCANS:
        raise DataError(f"it has {scan_count:,} scans, more than {MAX_SCANS}")


def count_scans(data: bytes, position: int) -> int:
    """Count the scans of a JPEG from a position on, segment by segment."""
    scan_count = 0
    match = _SEGMENT_MARKER.search(data, position)
    while match is not None and match[1] != END_OF_IMAGE:
        if match[1] == START_OF_SCAN:
            scan_count += 1
        # A marker is followed by the length of its segment, whose bytes may look like markers.
        segment_length = int.from_bytes(data[match.end() : match.end() + 2], "big")
        match = _SEGMENT_MARKER.search(data, match.end() + segment_length)
    return scan_count


# -- formats -----------------------------------------------------------------------------------------------------------


@cache
def available_formats() -> tuple[str, ...]:
    """Return the formats that can be read here. HEIC needs an extra."""
    Image.init()
    try:
        import pillow_heif  # pyright: ignore[reportMissingImports]

        pillow_heif.register_heif_opener()
    except ImportError:
        pass
    return tuple(name for name in FORMATS if name in Image.OPEN)


def unknown_format(data: bytes) -> DataError:
    """Return the error for a file that no reader knows."""
    if not data:
        return DataError("it is empty")
    is_heic = data[4:8] == b"ftyp" and data[8:12] in HEIC_BRANDS
    if is_heic and "HEIF" not in available_formats():
        return TemporaryFault("HEIC needs the package pillow-heif", hint=install("heic"))
    return DataError("it is not an image of a known form")
