"""benchmarks/flickr8k.py: from the authors' form of Flickr8k to ours."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "flickr8k.py"
LISTED = {"train": ["b.jpg", "a.jpg"], "dev": ["c.jpg"], "test": ["d.jpg"]}
TOKENS = """\
a.jpg#1\tA cat , a dog and "two" birds .
a.jpg#0\tA cat , a dog .
b.jpg#0\tUn café près de l'eau .
2258277193_586949ec62.jpg.1#0\tpeople waiting outside .
c.jpg#0\t=SUM(1)
c.jpg#1\ta , b , c

no image here
c.jpg#2\t
d.jpg#0\tA test .
"""


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A tiny data set in the authors' form. One photo is upright and one is gray."""
    folder = tmp_path / "original"
    (folder / "Flicker8k_Dataset").mkdir(parents=True)
    sizes = {"a.jpg": (500, 375), "b.jpg": (333, 500), "c.jpg": (100, 90), "d.jpg": (300, 300)}
    for number, (name, size) in enumerate(sizes.items()):
        image = Image.linear_gradient("L").rotate(30 * number).resize(size)
        if name != "b.jpg":
            image = image.convert("RGB")
        image.save(folder / "Flicker8k_Dataset" / name, quality=95)
    (folder / "Flickr8k.token.txt").write_text(TOKENS, encoding="utf-8")
    for split, names in LISTED.items():
        text = "\n".join([*names, "", ""])
        (folder / f"Flickr_8k.{split}Images.txt").write_text(text, encoding="utf-8")
    return folder


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8")


def rows(folder: Path) -> list[tuple[str, ...]]:
    with (folder / "captions.csv").open(encoding="utf-8", newline="") as file:
        return [tuple(row) for row in csv.reader(file)]


def test_the_table_has_the_captions_in_order_and_the_splits(original: Path, tmp_path: Path) -> None:
    done = run(original, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "out") == [
        ("filepath", "caption", "split"),
        ("images/a.jpg", "A cat , a dog .", "train"),
        ("images/a.jpg", 'A cat , a dog and "two" birds .', "train"),
        ("images/b.jpg", "Un café près de l'eau .", "train"),
        ("images/c.jpg", "=SUM(1)", "val"),
        ("images/c.jpg", "a , b , c", "val"),
    ]
    assert "train 2, val 1 images" in done.stdout
    assert "captions of 2 images that are in none of these lists" in done.stdout
    assert "2 lines without an image or a caption (line 8, 9)" in done.stdout


def test_images_have_a_short_side_of_128_pixels(original: Path, tmp_path: Path) -> None:
    run(original, "--out", tmp_path / "out")
    sizes = {}
    for path in (tmp_path / "out" / "images").iterdir():
        with Image.open(path) as image:
            sizes[path.name] = (image.size, image.mode)
    assert sizes == {
        "a.jpg": ((170, 128), "RGB"),
        "b.jpg": ((128, 192), "RGB"),
        "c.jpg": ((142, 128), "RGB"),
    }


def test_the_test_split_comes_on_request(original: Path, tmp_path: Path) -> None:
    run(original, "--out", tmp_path / "out", "--test")
    assert rows(tmp_path / "out")[-1] == ("images/d.jpg", "A test .", "test")


def test_lapclip_reads_the_result(original: Path, tmp_path: Path) -> None:
    from lapclip.config import DataConfig
    from lapclip.data.sources import read_table

    run(original, "--out", tmp_path / "out")
    table = read_table(DataConfig(source=str(tmp_path / "out")))
    assert [(row.split, len(row.captions)) for row in table.rows] == [
        ("train", 2),
        ("train", 1),
        ("val", 2),
    ]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("Flicker8k_Dataset/b.jpg", "1 images are listed without a photo, such as b.jpg"),
        ("Flickr8k.token.txt", "Flickr8k.token.txt"),
        ("Flickr_8k.devImages.txt", "Flickr_8k.devImages.txt"),
    ],
)
def test_a_missing_file_is_named_and_nothing_is_written(
    original: Path, tmp_path: Path, missing: str, message: str
) -> None:
    (original / missing).unlink()
    done = run(original, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_left_alone(original: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "captions.csv").write_text("mine")
    done = run(original, "--out", tmp_path / "out")
    assert "is not empty" in done.stderr
    assert (tmp_path / "out" / "captions.csv").read_text() == "mine"


@pytest.mark.real_data
def test_small_copies_are_those_that_our_figures_use(real_data: Path, tmp_path: Path) -> None:
    """Compare pixels: another JPEG library may round otherwise. With Pillow 13 bytes are equal."""
    originals = sorted((real_data / "photos").iterdir())
    folder = tmp_path / "original"
    folder.mkdir()
    (folder / "Flicker8k_Dataset").symlink_to(real_data / "photos")
    tokens = "".join(f"{path.name}#0\tA photo .\n" for path in originals)
    (folder / "Flickr8k.token.txt").write_text(tokens)
    (folder / "Flickr_8k.trainImages.txt").write_text("")
    (folder / "Flickr_8k.devImages.txt").write_text("\n".join(path.name for path in originals))
    done = run(folder, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    for path in originals:
        with Image.open(tmp_path / "out" / "images" / path.name) as image:
            ours = np.asarray(image, dtype=float)
        with Image.open(real_data / "flickr8k" / "images" / path.name) as image:
            reference = np.asarray(image, dtype=float)
        assert ours.shape == reference.shape
        assert np.abs(ours - reference).mean() < 0.5
