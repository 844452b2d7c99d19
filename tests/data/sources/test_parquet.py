"""Parquet files with the bytes of images."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lapclip.config import DataConfig
from lapclip.data.sources import parquet as source
from lapclip.data.sources import read_table
from lapclip.data.table import Row
from lapclip.errors import DataError
from tests.data.sources.made import found, image_bytes, make_images, read, splits

pyarrow: Any = pytest.importorskip("pyarrow")
parquet: Any = pytest.importorskip("pyarrow.parquet")


def write(path: Path, columns: dict[str, list], rows: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path, row_group_size=rows)
    return path


def test_hugging_face_structs(tmp_path: Path) -> None:
    images = [{"bytes": image_bytes(shade), "path": f"{shade}.png"} for shade in range(5)]
    captions = [[f"the {n}", f"a {n}"] for n in range(5)]
    table = read(
        write(tmp_path / "a.parquet", {"image": images, "caption": captions, "n": list(range(5))})
    )
    assert [row.captions for row in table.rows] == [(f"the {n}", f"a {n}") for n in range(5)]
    assert [row.image.read() for row in table.rows] == [image_bytes(shade) for shade in range(5)]
    assert list(found(table))[-1] == "a.parquet:5"


def test_plain_bytes_with_splits_and_a_chosen_column(tmp_path: Path) -> None:
    columns = {
        "jpg": [image_bytes(1), image_bytes(2), image_bytes(3)],
        "text": ["a dog", None, "a bird"],
        "title": ["one", "two", "three"],
        "split": ["train", "test", "validation"],
    }
    path = write(tmp_path / "a.parquet", columns)
    table = read(path)
    assert found(table) == {"a.parquet:1": ("a dog",), "a.parquet:3": ("a bird",)}
    assert list(splits(table).values()) == ["train", "val"]
    assert [skipped.where for skipped in table.skipped] == ["a.parquet:2"]
    assert found(read(path, caption_column="title"))["a.parquet:2"] == ("two",)


def test_a_folder_of_files_with_splits_in_their_names(tmp_path: Path) -> None:
    for name in ("train-00000-of-00001", "validation-00000-of-00001"):
        write(tmp_path / "data" / f"{name}.parquet", {"image": [image_bytes()], "text": ["a dog"]})
    assert list(splits(read(tmp_path)).values()) == ["train", "val"]


def test_a_file_that_names_images_instead_of_holding_them(tmp_path: Path) -> None:
    make_images(tmp_path / "images", "a.png", "b.png")
    path = write(
        tmp_path / "list.parquet",
        {"file": ["a.png", "b.png", "c.png"], "text": ["a dog", "a cat", "a cow"]},
    )
    table = read(path)
    assert found(table) == {"images/a.png": ("a dog",), "images/b.png": ("a cat",)}
    assert len(table.skipped) == 1


def test_empty_images_are_errors_when_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet", {"image": [image_bytes(), None], "text": ["a dog", "a cat"]}
    )
    table = read_table(DataConfig(source=str(path)))
    with pytest.raises(OSError, match="no bytes"):
        table.rows[1].image.read()


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"x" * 100 + b"PAR1"])
def test_files_that_are_no_parquet_say_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read(tmp_path / "a.parquet")


def test_threads_read_a_row_group_once_and_a_file_that_changes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        tmp_path / "a.parquet",
        {"image": [image_bytes(n) for n in range(8)], "text": ["a dog"] * 8},
        rows=8,
    )
    table = read_table(DataConfig(source=str(path)))
    read_group, begun, reads = source._read_group, threading.Barrier(8, timeout=60), []

    def counted(*arguments: Any) -> Any:
        reads.append(arguments)
        return read_group(*arguments)

    def read_one(row: Row) -> bytes:
        begun.wait()
        return row.image.read()

    monkeypatch.setattr(source, "_read_group", counted)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read_one, table.rows)) == [image_bytes(n) for n in range(8)]
    assert len(reads) == 1
    write(path, {"image": [image_bytes(n + 100) for n in range(8)], "text": ["a dog"] * 8}, rows=8)
    assert [row.image.read() for row in table.rows] == [image_bytes(n + 100) for n in range(8)]
    assert len(reads) == 2
    path.unlink()
    with pytest.raises(FileNotFoundError):
        table.rows[0].image.read()
