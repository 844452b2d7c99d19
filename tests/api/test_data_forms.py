"""Each form of data that Python code may have becomes the same table."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lapclip.api.arguments import asked_settings
from lapclip.config import DataConfig
from lapclip.data import in_memory
from lapclip.data.find_images import ImageFinder
from lapclip.data.in_memory import write_data
from lapclip.data.sources import read_table
from lapclip.data.table import ImageFile, Table
from lapclip.errors import DataError

COUNT = 6
PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, 12, 20, 3), dtype=np.uint8)
IMAGES = [Image.fromarray(pixels) for pixels in PIXELS]
CAPTIONS = [f"thing number {at}" for at in range(COUNT)]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    (tmp_path / "photos").mkdir()
    found = [tmp_path / "photos" / f"{at}.png" for at in range(COUNT)]
    for path, image in zip(found, IMAGES, strict=True):
        image.save(path)
    return found


def written(data: Any, folder: Path, **settings: Any) -> Table:
    """The table that a run would read."""
    return table_of(
        write_data(
            data, folder / "given", {f"data.{name}": value for name, value in settings.items()}
        )
    )


def table_of(found: dict[str, Any]) -> Table:
    return read_table(
        DataConfig(**{name.removeprefix("data."): value for name, value in found.items()})
    )


def check(table: Table, captions: list[tuple[str, ...]] | None = None) -> None:
    assert not table.skipped
    assert [row.captions for row in table.rows] == (
        captions or [(caption,) for caption in CAPTIONS]
    )
    for row, pixels in zip(table.rows, PIXELS, strict=True):
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(row.image.read()))), pixels)


class OwnDataset(torch.utils.data.Dataset):
    """A map-style data set that does not say where it ends."""

    def __init__(self, item: Callable[[int], Any], count: int = COUNT) -> None:
        self._item, self._count = item, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: int) -> Any:
        return self._item(at)


FORMS: dict[str, Callable[[list[Path]], Any]] = {
    "pairs of paths": lambda paths: [
        (str(path), text) for path, text in zip(paths, CAPTIONS, strict=True)
    ],
    "pairs of PIL images": lambda paths: list(zip(IMAGES, CAPTIONS, strict=True)),
    "pairs of opened files": lambda paths: [
        (Image.open(path), text) for path, text in zip(paths, CAPTIONS, strict=True)
    ],
    "pairs of bytes": lambda paths: [
        (path.read_bytes(), text) for path, text in zip(paths, CAPTIONS, strict=True)
    ],
    "paths and images, mixed": lambda paths: list(
        zip([*paths[:3], *IMAGES[3:]], CAPTIONS, strict=True)
    ),
    "pairs with an array of captions": lambda paths: [
        (path, np.array([text])) for path, text in zip(paths, CAPTIONS, strict=True)
    ],
    "a torch data set of tensors": lambda paths: OwnDataset(
        lambda at: (torch.from_numpy(PIXELS[at]).permute(2, 0, 1) / 255, CAPTIONS[at])
    ),
    "a torch data set of dictionaries": lambda paths: OwnDataset(
        lambda at: {"id": at, "img": PIXELS[at], "title": CAPTIONS[at]}
    ),
    "a dictionary of columns": lambda paths: {"photo": list(PIXELS), "text": CAPTIONS},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_data_becomes_the_same_rows(form: str, paths: list[Path], tmp_path: Path) -> None:
    check(written(FORMS[form](paths), tmp_path))


def test_frames_of_pandas_are_known_by_their_columns(paths: list[Path], tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    named = pandas.DataFrame(
        {"file": [str(path) for path in paths], "caption": CAPTIONS, "stars": range(COUNT)}
    )
    check(written(named, tmp_path))
    several = pandas.DataFrame(
        {"picture": IMAGES, "captions": [[caption, "a thing"] for caption in CAPTIONS]}
    )
    check(written(several, tmp_path), [(caption, "a thing") for caption in CAPTIONS])
    two = pandas.DataFrame(
        {"a": [str(path) for path in paths], "title": CAPTIONS, "text": ["other"] * COUNT}
    )
    check(written(two, tmp_path, caption_column="title"))
    relative = pandas.DataFrame(
        {"name": [f"photos/{path.name}" for path in paths], "caption": CAPTIONS}
    )
    check(written(relative, tmp_path, pictures=str(tmp_path)))
    check(
        written(several, tmp_path, pictures=str(tmp_path)),
        [(caption, "a thing") for caption in CAPTIONS],
    )
    with pytest.raises(DataError, match="equally long"):
        write_data(pandas.concat([named, named[["caption"]]], axis=1), tmp_path / "given")


def test_data_sets_of_hugging_face_keep_their_files_and_splits(
    paths: list[Path], tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra test-slow")
    columns = {"image": [str(path) for path in paths], "text": CAPTIONS}
    data = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    check(written(data, tmp_path))
    decoded = datasets.Dataset.from_dict({"image": IMAGES, "text": CAPTIONS})  # bytes, not paths
    check(written(decoded, tmp_path))
    halves = datasets.DatasetDict(
        {"train": decoded.select(range(3)), "validation": decoded.select(range(3, COUNT))}
    )
    table = written(halves, tmp_path)
    check(table)
    assert [row.split for row in table.rows] == ["train"] * 3 + ["val"] * 3


def test_images_that_are_named_by_paths_are_not_copied(paths: list[Path], tmp_path: Path) -> None:
    data = FORMS["pairs of paths"](paths)
    found = write_data(data, tmp_path / "given")
    assert found["data.pictures"] == str(paths[0].parent)
    assert not [path for path in (tmp_path / "given").rglob("*") if path.suffix == ".png"]
    assert write_data(data, tmp_path / "given") == found
    assert write_data(data[:-1], tmp_path / "given") != found
    assert len(list((tmp_path / "given").iterdir())) == 2


def test_paths_are_relative_to_the_folder_that_is_named(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    below = [f"photos/{path.name}" for path in paths]
    opened = [Image.open(path) for path in below]  # these know where they are
    for images, folder in (
        (below, tmp_path),
        ([*below[:3], *IMAGES[3:]], tmp_path),
        (opened, tmp_path / "elsewhere"),
    ):
        check(
            table_of(
                asked_settings(
                    list(zip(images, CAPTIONS, strict=True)), {"data.pictures": str(folder)}
                )
            )
        )


@pytest.mark.parametrize("form", ["whole name", "field alone"])
def test_settings_say_how_data_in_memory_is_read_however_they_are_named(
    form: str, paths: list[Path], here: Path
) -> None:
    def named(field: str, value: Any) -> dict[str, Any]:
        return {f"data.{field}" if form == "whole name" else field: value}

    right = [str(path) for path in paths]
    frame = {"small": right[::-1], "img": right, "text": CAPTIONS}
    check(table_of(asked_settings(frame, named("picture_column", "img"))))
    below = {"file": [path.name for path in paths], "text": CAPTIONS}
    check(table_of(asked_settings(below, named("pictures", paths[0].parent))))
    check(table_of(asked_settings(below | {"file": right}, named("picture_column", "auto"))))
    with pytest.raises(DataError, match="no column nothing"):
        asked_settings(frame, named("picture_column", "nothing"))


def test_a_path_that_leads_nowhere_is_counted_and_named(paths: list[Path], tmp_path: Path) -> None:
    for data in (
        [*FORMS["pairs of paths"](paths), ("gone.png", "x")],
        [*zip(IMAGES, CAPTIONS, strict=True), ("gone.png", "x")],
        {"image": [*IMAGES, None], "caption": [*CAPTIONS, "x"]},
    ):
        table = written(data, tmp_path, broken_share=0.15)
        assert len(table.rows) == COUNT
        assert "no such image" in table.skipped[0].why


def test_a_full_disk_is_no_missing_image(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, write = paths[0].read_bytes(), Path.write_bytes

    def write_half(path: Path, content: bytes) -> int:
        if content == copied:
            write(path, content[:9])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(DataError, match="No space left"):
        written(FORMS["paths and images, mixed"](paths), tmp_path)
    assert not list((tmp_path / "given").iterdir())


def test_two_processes_that_write_the_same_data_both_have_it(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = in_memory.replace

    def beaten(source: Path, target: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, target)  # the other process was a moment earlier
        replace(source, target)

    monkeypatch.setattr(in_memory, "replace", beaten)
    check(written(FORMS["pairs of PIL images"](paths), tmp_path))
    assert len(list((tmp_path / "given").iterdir())) == 1


@pytest.mark.skipif(
    sys.platform == "win32", reason="Windows leaves out spaces at the end of a name"
)
def test_spaces_around_a_name_are_part_of_it(tmp_path: Path) -> None:
    names = ["one.png", " one.png", "one.png "]
    for name, image in zip(names, IMAGES, strict=False):
        image.save(tmp_path / name, "PNG")
    finder = ImageFinder(tmp_path)
    assert [
        found.path.name for name in names if isinstance(found := finder.find(name), ImageFile)
    ] == names
    assert isinstance(
        found := finder.find("  one.png\t"), ImageFile
    )  # a table may have some of its own
    assert found.path.name == "one.png"


def test_data_that_lost_files_is_whole_again_when_it_is_given_again(tmp_path: Path) -> None:
    pairs = list(zip(IMAGES, CAPTIONS, strict=True))
    folder = Path(write_data(pairs, tmp_path / "given")["data.source"])
    whole = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    first, second, *_ = sorted((folder / "images").iterdir())
    first.unlink()
    second.write_bytes(b"")  # as a crash of the computer leaves it
    (folder / "captions.jsonl").unlink()
    assert write_data(pairs, tmp_path / "given")["data.source"] == str(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == whole
    assert [path.name for path in (tmp_path / "given").iterdir()] == [folder.name]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")
def test_a_path_to_what_is_no_file_is_counted_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe.png")
    for path in (pipe, "/dev/zero", "a\0b.png", "~nobody-of-this-name/a.png"):
        table = written(
            [*zip(IMAGES, CAPTIONS, strict=True), (path, "x")], tmp_path, broken_share=0.5
        )
        assert len(table.rows) == COUNT, path
        assert len(table.skipped) == 1, path


def test_a_later_image_of_a_file_is_that_one_and_not_the_first(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    opened = [Image.open(tmp_path / "a.gif") for _ in frames]
    for at, frame in enumerate(opened):
        frame.seek(at)
    found = write_data([(frame, "x") for frame in opened], tmp_path / "given")
    rows = (Path(found["data.source"]) / "captions.jsonl").read_text().splitlines()
    stored = [
        Image.open(Path(found["data.source"]) / json.loads(row)["image"]).convert("RGB")
        for row in rows
    ]
    assert [image.getpixel((4, 4)) for image in stored] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (iter([]), "is no data"),
        (17, "is no data"),
        ([], "no rows"),
        ([(IMAGES[0], 3)], "Item 0"),
        ([(IMAGES[0], "a", "b")], "Item 0"),
        ([IMAGES[0]], "Item 0"),
        ([(torch.randn(3, 8, 8), "normalised")], "item 0"),
        ({"image": IMAGES, "label": list(range(COUNT))}, "holds captions"),
        ({"a": CAPTIONS, "b": CAPTIONS}, "holds images"),
        ({"image": IMAGES, "text": CAPTIONS[1:]}, "equally long"),
        ({"image": 3, "text": CAPTIONS}, "image is 3, no list"),
        ({"image": "a.jpg", "text": "a cat"}, "image is 'a.jpg', no list"),
        (torch.utils.data.DataLoader(OwnDataset(lambda at: 0)), "is no data"),
        (
            OwnDataset(lambda at: Path("nowhere.png").read_bytes()),
            "Item 0 .*FileNotFoundError",
        ),  # no fault of our disk
        (
            OwnDataset(lambda at: (IMAGES[at], CAPTIONS[at]), COUNT + 1),
            f"Item {COUNT} .*IndexError",
        ),
        (OwnDataset(lambda at: (IMAGES[at], CAPTIONS[at]), -1), "how many rows it has: ValueError"),
        ([(Image.new("RGB", (0, 5)), "x")], "no pixels"),
        ([(torch.zeros(3, 8, 8, device="meta"), "x")], "cannot be read"),
    ],
)
def test_what_is_no_data_is_refused_with_its_place(data: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=why):
        write_data(data, tmp_path / "given")
    assert not list(tmp_path.glob("given/*"))
    assert not list(tmp_path.glob("given/.*"))
