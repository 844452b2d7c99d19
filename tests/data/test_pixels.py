from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lapclip.data.pixels import MEAN, STD, PixelStore, fit_picture, normalise, open_picture
from lapclip.errors import DataError


def gradient(width: int, height: int) -> Image.Image:
    across = np.linspace(0, 255, width)[None, :, None] * np.ones((height, 1, 3))
    return Image.fromarray(across.astype(np.uint8))


def test_a_picture_of_the_right_size_is_left_alone() -> None:
    picture = gradient(32, 32)
    assert np.array_equal(fit_picture(picture, 32), np.asarray(picture))


@pytest.mark.parametrize("size", [(90, 30), (30, 90), (200, 201), (5, 7), (1, 1)])
def test_any_picture_becomes_its_middle_square(size: tuple[int, int]) -> None:
    fitted = fit_picture(gradient(*size), 32)
    assert fitted.shape == (32, 32, 3)
    assert fitted.dtype == np.uint8


def test_the_middle_is_kept() -> None:
    fitted = fit_picture(gradient(96, 32), 32)
    assert 80 < fitted[:, 0].mean() < 90  # a third of the way from 0 to 255
    assert 165 < fitted[:, -1].mean() < 175


def test_resizing_agrees_with_pillow() -> None:
    picture = gradient(128, 128)
    ours = fit_picture(picture, 64).astype(int)
    pillows = np.asarray(picture.resize((64, 64), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(ours - pillows).max() <= 1


def test_normalise_is_clips() -> None:
    pixels = torch.randint(0, 256, (2, 4, 4, 3), dtype=torch.uint8)
    expected = (pixels.double() / 255 - torch.tensor(MEAN).double()) / torch.tensor(STD).double()
    torch.testing.assert_close(normalise(pixels).double(), expected.permute(0, 3, 1, 2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "I;16", "1", "LA"])
def test_every_mode_of_picture_is_read_as_rgb(mode: str, tmp_path: Path) -> None:
    path = tmp_path / ("picture.tif" if mode in ("CMYK", "I;16") else "picture.png")
    Image.new(mode, (8, 8)).save(path)
    assert open_picture(path).image.mode == "RGB"


def test_a_sideways_photo_is_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6  # taken with the camera on its side
    gradient(20, 10).save(tmp_path / "photo.jpg", exif=exif)
    assert open_picture(tmp_path / "photo.jpg").image.size == (10, 20)


def test_a_missing_or_broken_picture_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"No such picture: .*none\.png"):
        open_picture(tmp_path / "none.png")
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"broken\.png cannot be read"):
        open_picture(tmp_path / "broken.png")


def test_a_store_is_whole_or_not_there(tmp_path: Path) -> None:
    store = PixelStore(tmp_path / "store")
    assert store.read() is None

    def failing():
        yield np.zeros((4, 4, 3), np.uint8)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        store.write(failing(), (2, 4, 4, 3), ["a", "b"])
    assert store.read() is None
    assert list(tmp_path.iterdir()) == []
    store.write([np.full((4, 4, 3), value, np.uint8) for value in (1, 2)], (2, 4, 4, 3), ["a", "b"])
    pixels, table, digest = store.read() or (None, None, None)
    assert pixels is not None
    assert pixels[:, 0, 0, 0].tolist() == [1, 2]
    assert table == ["a", "b"]
    other = PixelStore(tmp_path / "other")
    other.write([np.full((4, 4, 3), value, np.uint8) for value in (1, 3)], (2, 4, 4, 3), ["a", "b"])
    assert digest != (other.read() or (None, None, None))[2]


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="LAPCLIP_CACHE"):
        PixelStore(tmp_path / "file" / "store").write([], (0, 4, 4, 3), [])


@pytest.mark.parametrize("form", ["TIFF", "PNG", "JPEG"])
def test_a_picture_that_is_open_is_turned_once(form: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "a.picture"
    Image.linear_gradient("L").resize((40, 20)).convert("RGB").save(path, form, exif=exif)
    with Image.open(path) as image:
        found = np.asarray(open_picture(image).image)
    assert np.array_equal(found, np.asarray(open_picture(path).image))
    assert found.shape == (40, 20, 3)
