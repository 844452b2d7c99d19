from __future__ import annotations

import io
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from lapclip.data import decode as decoding
from lapclip.data.decode import MAX_PIXELS, Decoded, decode, read_header
from lapclip.errors import DataError
from tests.conftest import examples

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::RuntimeWarning"
)  # pytest undoes our filters


def noise(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def smooth(width: int, height: int) -> Image.Image:
    """Colours that survive JPEG: red grows to the right, green downwards."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(
        np.stack([across, down, np.full_like(across, 90)], axis=2).astype(np.uint8)
    )


def saved(image: Image.Image, form: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def difference(one: Image.Image, other: Image.Image) -> float:
    return float(np.abs(np.asarray(one).astype(float) - np.asarray(other).astype(float)).mean())


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[decoding.ORIENTATION_TAG] = orientation
    return exif


# What a viewer does to what is stored, by orientation (EXIF 2.32, section 4.6.4).
SHOWN = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a[::-1].transpose(1, 0, 2),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: a[:, ::-1].transpose(1, 0, 2),
}


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", SHOWN)
def test_every_orientation_is_shown_upright(orientation: int, form: str) -> None:
    stored = noise(12, 9)
    decoded = decode(saved(Image.fromarray(stored), form, exif=oriented(orientation)))
    expected = SHOWN[orientation](stored)
    assert np.array_equal(np.asarray(decoded.image), expected)
    assert (decoded.width, decoded.height) == (expected.shape[1], expected.shape[0])


def test_orientation_profile_printing_colours_and_draft_work_together() -> None:
    data = saved(
        smooth(400, 300).convert("CMYK"),
        "JPEG",
        quality=95,
        exif=oriented(6),
        icc_profile=b"damaged",
    )
    decoded = decode(data, short_side=70)
    assert decoded.image.size == (75, 100)
    assert (decoded.width, decoded.height) == (300, 400)
    whole = Image.fromarray(np.ascontiguousarray(SHOWN[6](np.asarray(smooth(100, 75)))))
    assert difference(decoded.image, whole) < 4


@pytest.mark.parametrize(
    ("short_side", "expected"), [(None, 300), (300, 300), (151, 300), (150, 150), (37, 38), (5, 38)]
)
def test_a_draft_is_the_smallest_that_is_large_enough(
    short_side: int | None, expected: int
) -> None:
    decoded = decode(saved(smooth(400, 300), "JPEG"), short_side)
    assert min(decoded.image.size) == expected
    assert difference(decoded.image, smooth(*decoded.image.size)) < 4


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    grey = np.array([[0, 257, 32896, 65535]], dtype=np.uint16).repeat(8, axis=0)
    for form in ("PNG", "TIFF"):
        decoded = decode(saved(Image.fromarray(grey), form))
        assert np.asarray(decoded.image)[0, :, 1].tolist() == [0, 1, 128, 255]


def test_sixteen_bits_a_colour_are_scaled() -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    pixels = b"".join(b"\0" + struct.pack(">3H", 65535, 32896, 0) * 8 for _ in range(8))
    header = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    decoded = decode(b"\x89PNG\r\n\x1a\n" + body)
    assert decoded.image.getpixel((3, 3)) == (255, 128, 0)


def test_transparency_lies_on_white() -> None:
    half = Image.new("RGBA", (9, 9), (200, 0, 0, 128))
    assert decode(saved(half, "PNG")).image.getpixel((4, 4)) == pytest.approx(
        (227, 127, 127), abs=1
    )
    grey = decode(saved(Image.new("LA", (9, 9), (0, 0)), "PNG"))
    assert grey.image.getpixel((0, 0)) == (255, 255, 255)
    opaque = decode(saved(Image.new("RGBA", (9, 9), (200, 0, 0, 255)), "PNG"))
    assert opaque.image.getpixel((0, 0)) == (200, 0, 0)
    palette = Image.new("P", (9, 9), 1)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((0, 0), 0)
    for form in ("PNG", "GIF"):
        decoded = decode(saved(palette, form, transparency=0))
        assert decoded.image.getpixel((0, 0)) == (255, 255, 255)
        assert decoded.image.getpixel((5, 5)) == (40, 50, 60)


def swapped_profile() -> bytes:
    """sRGB with its red and green light changed over, under another name."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for one, other in (
        (b"rXYZ", b"gXYZ"),
        ("sRGB".encode("utf-16-be"), "gRsB".encode("utf-16-be")),
    ):
        profile = profile.replace(one, b"\1\2\3\4" * (len(one) // 4)).replace(other, one)
        profile = profile.replace(b"\1\2\3\4" * (len(one) // 4), other)
    return profile


def test_an_embedded_profile_is_converted_to_srgb() -> None:
    red = Image.new("RGB", (16, 16), (255, 0, 0))
    decoded = decode(saved(red, "PNG", icc_profile=swapped_profile()))
    assert decoded.image.getpixel((3, 3)) == pytest.approx((0, 255, 0), abs=3)
    plain = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    same = decode(saved(red, "PNG", icc_profile=plain))
    assert same.image.getpixel((3, 3)) == (255, 0, 0)


def test_colors_of_a_deferred_profile_are_the_same_in_the_end() -> None:
    data = saved(smooth(64, 48), "PNG", icc_profile=swapped_profile())
    now, later = decode(data), decode(data, defer_profile=True)
    assert difference(later.image, smooth(64, 48)) == 0
    assert np.array_equal(later.finish(np.asarray(later.image)), np.asarray(now.image))
    damaged = decode(saved(smooth(64, 48), "PNG", icc_profile=b"damaged"), defer_profile=True)
    assert np.array_equal(damaged.finish(np.asarray(damaged.image)), np.asarray(smooth(64, 48)))
    clear = Image.new("RGBA", (9, 9), (255, 0, 0, 128))
    one, other = (
        decode(saved(clear, "PNG", icc_profile=swapped_profile()), defer_profile=late)
        for late in (False, True)
    )
    assert np.array_equal(other.finish(np.asarray(other.image)), np.asarray(one.image))


def test_a_profile_keeps_transparency_and_palettes() -> None:
    clear = Image.new("RGBA", (9, 9), (255, 0, 0, 0))
    clear.putpixel((4, 4), (255, 0, 0, 255))
    decoded = decode(saved(clear, "PNG", icc_profile=swapped_profile()))
    assert decoded.image.getpixel((4, 4)) == pytest.approx((0, 255, 0), abs=3)
    assert decoded.image.getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("RGB", (9, 9), (255, 0, 0)).convert("P")
    assert decode(saved(palette, "PNG", icc_profile=swapped_profile())).image.getpixel(
        (4, 4)
    ) == pytest.approx((0, 255, 0), abs=3)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_profile_of_no_use_is_ignored(mode: str) -> None:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    for profile in (lab, b"not a profile"):
        decoded = decode(saved(Image.new(mode, (9, 9), "white"), "PNG", icc_profile=profile))
        assert decoded.image.getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation_shows_its_first_frame(form: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "green")]
    decoded = decode(
        saved(
            frames[0],
            form,
            save_all=True,
            append_images=frames[1:],
            **({"lossless": True} if form == "WEBP" else {}),
        )
    )
    assert decoded.image.getpixel((8, 8)) == (255, 0, 0)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("short_side", [None, 40])
@pytest.mark.parametrize("filled", [False, True])
def test_a_photo_that_ends_early_is_an_error(
    progressive: bool, short_side: int | None, filled: bool
) -> None:
    preview = saved(smooth(16, 16), "JPEG")  # inside the EXIF block, with an end of its own
    data = saved(Image.fromarray(noise(200, 160)), "JPEG", progressive=progressive, comment=preview)
    assert decode(data, short_side).image.mode == "RGB"
    for cut in (2, 50, len(data) // 2):
        with pytest.raises(DataError, match="it ends early"):
            decode(data[:-cut] + bytes(cut if filled else 0), short_side)


@pytest.mark.parametrize("form", ["PNG", "GIF", "WEBP", "TIFF", "BMP"])
def test_other_forms_that_end_early_are_errors(form: str) -> None:
    data = saved(Image.fromarray(noise(60, 40)), form)
    with pytest.raises(DataError):
        decode(data[: len(data) * 2 // 3])


def test_what_follows_the_end_of_a_photo_does_not_matter() -> None:
    """Phones append a film whose bytes may read_header like the start of a scan."""
    data = saved(smooth(64, 48), "JPEG") + b"film \xff\xda more film"
    assert difference(decode(data).image, smooth(64, 48)) < 4


def test_tiny_images_are_used() -> None:
    decoded = decode(saved(Image.new("RGB", (1, 30), "blue"), "PNG"))
    assert decoded.image.size == (1, 30)


def test_programs_are_never_started_for_an_image() -> None:
    with pytest.raises(DataError, match="not an image of a known form"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    with pytest.raises(DataError, match="it is empty"):
        decode(b"")


def test_heic_is_read_with_the_extra() -> None:
    pytest.importorskip("pillow_heif", reason="the extra heic is not installed")
    read_header(saved(smooth(8, 8), "PNG"))  # registers the reader, and with it the writer
    decoded = decode(saved(smooth(64, 48), "HEIF", quality=95))
    assert decoded.image.size == (64, 48)
    assert difference(decoded.image, smooth(64, 48)) < 8


def test_without_the_extra_heic_names_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "available_formats", lambda: ("JPEG", "PNG"))
    with pytest.raises(DataError, match=r"pillow-heif") as caught:
        decode(b"\0\0\0\x18ftypheic" + bytes(40))
    assert "[heic]" in caught.value.hint


FORMS = {
    "jpeg": saved(smooth(40, 30), "JPEG", exif=oriented(6), icc_profile=swapped_profile()),
    "progressive": saved(smooth(40, 30), "JPEG", progressive=True),
    "cmyk": saved(smooth(40, 30).convert("CMYK"), "JPEG"),
    "png": saved(smooth(40, 30), "PNG", exif=oriented(3), icc_profile=swapped_profile()),
    "palette": saved(smooth(40, 30).convert("P"), "PNG", transparency=3),
    "apng": saved(smooth(20, 9), "PNG", save_all=True, append_images=[smooth(20, 9)]),
    "gif": saved(smooth(20, 9), "GIF", save_all=True, append_images=[Image.new("RGB", (20, 9))]),
    "webp": saved(smooth(40, 30), "WEBP"),
    "tiff": saved(smooth(40, 30), "TIFF", compression="tiff_lzw", exif=oriented(5)),
    "lab": saved(Image.new("LAB", (9, 9)), "TIFF"),
    "float": saved(Image.new("F", (9, 9), 0.5), "TIFF"),
    "bmp": saved(smooth(20, 9), "BMP"),
    "ppm": saved(smooth(20, 9), "PPM"),
    "tga": saved(smooth(20, 9), "TGA"),
    "jpeg2000": saved(smooth(40, 30), "JPEG2000"),
    "avif": saved(smooth(40, 30), "AVIF"),
}


def image_or_reason(data: bytes, short_side: int | None) -> Decoded | str:
    try:
        return decode(data, short_side)
    except DataError as error:
        return error.message


@settings(max_examples=examples(500))
@given(
    st.sampled_from(sorted(FORMS)),
    st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=4)), max_size=6),
    st.floats(0, 1.2),
    st.sampled_from([None, 9]),
)
def test_damaged_bytes_give_an_image_or_a_reason(
    form: str, changes: list[tuple[float, bytes]], length: float, short_side: int | None
) -> None:
    data = bytearray(FORMS[form])
    for place, new in changes:
        at = int(place * len(data))
        data[at : at + len(new)] = new
    decoded = image_or_reason(bytes(data[: int(length * len(data))]), short_side)
    if isinstance(decoded, str):
        assert decoded
        return
    assert decoded.image.mode == "RGB"
    assert np.asarray(decoded.image).shape == (*decoded.image.size[::-1], 3)
    assert decoded.width * decoded.height <= MAX_PIXELS


@settings(max_examples=examples(100))
@given(
    st.sampled_from(
        [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\0\0\0\0WEBP", b"II*\0"]
    ),
    st.binary(),
)
def test_any_bytes_give_an_image_or_a_reason(start: bytes, rest: bytes) -> None:
    decoded = image_or_reason(start + rest, None)
    assert decoded if isinstance(decoded, str) else decoded.image.mode == "RGB"


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_every_value_of_sixteen_bits_is_scaled_as_in_exact_arithmetic(mode: str) -> None:
    values = np.arange(65536, dtype="<u2" if mode == "I;16" else ">u2").reshape(256, 256)
    image = Image.frombytes(mode, (256, 256), values.tobytes())
    expected = np.rint(values.astype(np.float64) * (255 / 65535))
    assert np.array_equal(np.asarray(decoding.to_rgb(image, None))[..., 0], expected)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_the_largest_value_of_a_mode_is_white(mode: str) -> None:
    white = 65_535 if mode == "I" else 1.0
    ramp = np.linspace(0, white, 64).astype(np.int32 if mode == "I" else np.float32)
    decoded = decode(saved(Image.fromarray(ramp[None].repeat(9, axis=0)), "TIFF"))
    assert decoded.image.size == (64, 9)
    assert np.array_equal(np.asarray(decoded.image)[0, :, 1], np.rint(ramp * (255 / white)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.5, 1.5])
def test_values_out_of_range_are_refused(value: float) -> None:
    drawn = np.zeros((9, 9), np.float32)
    drawn[4, 4] = value
    with pytest.raises(DataError, match=r"its values are from .* not from 0 to 1"):
        decode(saved(Image.fromarray(drawn), "TIFF"))


def test_too_little_memory_is_no_fault_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments, **more):
        raise MemoryError

    data = saved(smooth(20, 20), "PNG")
    for name in ("to_upright_rgb", "Image.open"):
        with monkeypatch.context() as patch:
            patch.setattr(f"lapclip.data.decode.{name}", full)
            with pytest.raises(decoding.TemporaryFault, match="too little memory"):
                decode(data)


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG that says how large it is, and holds one byte."""
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0")), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in chunks:
        data += struct.pack(">I", len(body)) + kind + body
        data += struct.pack(">I", zlib.crc32(kind + body))
    return data


@pytest.mark.parametrize(
    ("width", "height", "refusal"),
    [
        (9_000, 9_000, "ends early|damaged"),
        (10_000, 10_000, "more than 89 million pixels: 10,000 x 10,000"),
        (20_000, 10_000, "more than 89 million pixels"),
        (2**31 - 1, 1, "more than 89 million pixels"),
        (0, 5, "not an image"),
    ],
)
def test_one_limit_of_pixels_holds_for_every_file(width: int, height: int, refusal: str) -> None:
    with pytest.raises(DataError, match=refusal):
        decode(png_that_claims(width, height))


def avif_that_claims(width: int, height: int, image: Image.Image) -> bytes:
    """An AVIF whose header names another size than its frame has."""
    data = bytearray(saved(image, "AVIF"))
    at = data.index(b"ispe") + 8
    data[at : at + 8] = struct.pack(">II", width, height)
    return bytes(data)


def test_large_images_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "LARGE_PIXELS", 300 * 200)
    at_once, counts = [], []
    real = decoding.decode_pixels

    def slow(header: decoding.Header, defer_profile: bool) -> Decoded:
        at_once.append(1)
        counts.append(len(at_once))
        time.sleep(0.005)
        at_once.pop()
        return real(header, defer_profile)

    monkeypatch.setattr(decoding, "decode_pixels", slow)
    cases = [
        (saved(smooth(300, 201), "PNG"), None, 1),
        (saved(smooth(300, 201), "JPEG"), None, 1),
        (saved(smooth(300, 201), "JPEG", progressive=True), 50, 1),  # holds all coefficients
        (saved(smooth(300, 201), "JPEG"), 50, 4),  # decoded at a quarter of its size
        (avif_that_claims(64, 64, smooth(300, 200)), None, 1),
        (saved(smooth(300, 200), "PNG"), None, 4),
    ]
    for data, short_side, expected in cases:
        counts.clear()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _, d=data, s=short_side: decode(d, s), range(8)))
        assert max(counts) <= expected
        assert expected == 1 or max(counts) > 1


@pytest.mark.parametrize(("form", "options"), [("JPEG", {"quality": 90}), ("PNG", {}), ("BMP", {})])
def test_the_pixels_of_an_ordinary_photo_are_those_of_pillow(form: str, options: dict) -> None:
    data = saved(smooth(123, 77), form, **options)
    plain = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(np.asarray(decode(data).image), plain)


def scans(count: int) -> bytes:
    """A progressive JPEG that repeats its last scan, so that the image stays what it is."""
    data = saved(smooth(16, 16), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * count + b"\xff\xd9"


def test_a_photo_of_a_thousand_scans_is_refused_before_they_are_decoded() -> None:
    with pytest.raises(DataError, match=r"1,0\d\d scans, more than 100"):
        decode(scans(1000))
    filled = b"\xff\xfe\x00\x04\xff\xd9"  # an end that is none, inside a comment
    with pytest.raises(DataError, match="scans, more than 100"):
        decode(scans(1000).replace(b"\xff\xda", filled + b"\xff\xda"))
    plain = saved(smooth(16, 16), "JPEG", progressive=True)
    many = b"\xff\xda\x00\x08" * 500
    for harmless in (
        plain + many,
        plain[:2] + b"\xff\xfe\x07\xd2" + many + plain[2:],
    ):  # a film, a comment
        assert np.array_equal(np.asarray(decode(harmless).image), np.asarray(decode(plain).image))


def test_a_huge_profile_is_not_used_and_few_are_kept() -> None:
    red = Image.new("RGB", (16, 16), (255, 0, 0))
    huge = swapped_profile() + bytes(decoding.MAX_PROFILE_BYTES)
    for defer_profile in (False, True):
        decoded = decode(saved(red, "TIFF", icc_profile=huge), defer_profile=defer_profile)
        assert decoded.image.getpixel((3, 3)) == (255, 0, 0)
    kept = decoding._cached_transform.cache_info().maxsize
    assert kept is not None
    assert kept * decoding.MAX_PROFILE_BYTES <= 32_000_000
