from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lapclip.config import CLIP_MEAN, CLIP_STD
from lapclip.data.pixels import View, fit_image, middle_square, normalise, open_image
from lapclip.errors import DataError
from lapclip.model.shapes import SHAPES

from .test_decode import swapped_profile


def gradient(width: int, height: int) -> Image.Image:
    across = np.linspace(0, 255, width)[None, :, None] * np.ones((height, 1, 3))
    return Image.fromarray(across.astype(np.uint8))


def test_an_image_of_the_right_size_is_left_alone() -> None:
    image = gradient(32, 32)
    assert np.array_equal(fit_image(image, 32), np.asarray(image))


@pytest.mark.parametrize("size", [(90, 30), (30, 90), (200, 201), (5, 7), (1, 1)])
def test_any_image_becomes_its_middle_square(size: tuple[int, int]) -> None:
    fitted = fit_image(gradient(*size), 32)
    assert fitted.shape == (32, 32, 3)
    assert fitted.dtype == np.uint8


def test_the_middle_is_kept() -> None:
    fitted = fit_image(gradient(96, 32), 32)
    assert 80 < fitted[:, 0].mean() < 90  # a third of the way from 0 to 255
    assert 165 < fitted[:, -1].mean() < 175


def test_resizing_agrees_with_pillow() -> None:
    image = gradient(128, 128)
    ours = fit_image(image, 64).astype(int)
    pillows = np.asarray(image.resize((64, 64), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(ours - pillows).max() <= 1


def test_normalise_is_clips() -> None:
    pixels = torch.randint(0, 256, (2, 4, 4, 3), dtype=torch.uint8)
    mean, std = (
        torch.tensor([float(number) for number in text.split()]) for text in (CLIP_MEAN, CLIP_STD)
    )
    expected = (pixels.double() / 255 - mean.double()) / std.double()
    seen = normalise(pixels, SHAPES["tiny"]).double()
    torch.testing.assert_close(seen, expected.permute(0, 3, 1, 2), atol=1e-5, rtol=1e-5)


def test_a_model_has_a_mean_and_a_scale_of_its_own() -> None:
    shape = replace(SHAPES["tiny"], pixel_mean="0.5 0.5 0.5", pixel_std="0.5 0.5 0.25")
    pixels = torch.tensor([0, 255, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    torch.testing.assert_close(normalise(pixels, shape).flatten(), torch.tensor([-1.0, 1.0, 2.0]))


@pytest.mark.parametrize(
    ("width", "height"), [(500, 375), (375, 500), (333, 499), (640, 427), (97, 98)]
)
@pytest.mark.parametrize("share", [1.0, 0.875])
def test_sizes_are_rounded_as_torchvision_does(width: int, height: int, share: float) -> None:
    """Its Resize and CenterCrop, written with Pillow: int() of the long side, round() of the margins."""
    image = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    )
    short = {1.0: 64, 0.875: 73}[share]
    size = (
        (short, int(short * height / width))
        if width < height
        else (int(short * width / height), short)
    )
    left, top = (round((length - 64) / 2) for length in size)
    theirs = np.asarray(image.resize(size, Image.Resampling.BILINEAR))[
        top : top + 64, left : left + 64
    ].astype(int)
    ours = fit_image(image, View(64, "bilinear", crop_share=share)).astype(int)
    assert np.abs(ours - theirs).max() <= 1


def test_a_squashed_image_is_seen_whole() -> None:
    fitted = fit_image(gradient(96, 32), View(32, resize="squash"))
    assert fitted[:, 0].mean() < 10
    assert fitted[:, -1].mean() > 245


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "I;16", "1", "LA"])
def test_every_mode_of_image_is_read_as_rgb(mode: str, tmp_path: Path) -> None:
    path = tmp_path / ("image.tif" if mode in ("CMYK", "I;16") else "image.png")
    Image.new(mode, (8, 8)).save(path)
    assert open_image(path).image.mode == "RGB"


def test_a_sideways_photo_is_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6  # taken with the camera on its side
    gradient(20, 10).save(tmp_path / "photo.jpg", exif=exif)
    assert open_image(tmp_path / "photo.jpg").image.size == (10, 20)


def test_a_missing_or_broken_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"No such image: .*none\.png"):
        open_image(tmp_path / "none.png")
    (tmp_path / "broken.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"broken\.png cannot be read"):
        open_image(tmp_path / "broken.png")


@pytest.mark.parametrize("form", ["TIFF", "PNG", "JPEG"])
def test_an_image_that_is_open_is_turned_once(form: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "a.image"
    Image.linear_gradient("L").resize((40, 20)).convert("RGB").save(path, form, exif=exif)
    with Image.open(path) as image:
        found = np.asarray(open_image(image).image)
    assert np.array_equal(found, np.asarray(open_image(path).image))
    assert found.shape == (40, 20, 3)


def test_a_colour_profile_is_used_or_left_alone_as_the_model_wants(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), (255, 0, 0)).save(
        tmp_path / "image.png", icc_profile=swapped_profile()
    )
    converted = middle_square(tmp_path / "image.png", View(8))
    stored = middle_square(tmp_path / "image.png", View(8, colours="stored"))
    assert (stored == (255, 0, 0)).all()
    assert converted[0, 0, 1] > 200
