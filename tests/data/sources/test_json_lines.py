"""JSON lines with an object an image, as Hugging Face's imagefolder has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lapclip.errors import DataError
from tests.data.sources.made import found, make_images, read, skipped, splits


def lines(folder: Path, *records: object, name: str = "metadata.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    text = "\n".join(
        record if isinstance(record, str) else json.dumps(record) for record in records
    )
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_imagefolder(tmp_path: Path) -> None:
    make_images(tmp_path, "a.png", "sub/b.png")
    table = read(
        lines(
            tmp_path,
            {"file_name": "a.png", "text": "a dog"},
            {"file_name": "sub/b.png", "text": "a cat"},
        )
    )
    assert found(table) == {"a.png": ("a dog",), "sub/b.png": ("a cat",)}
    assert 'column "file_name" holds 2 file names: images; column "text": captions' in table.how


def test_other_keys_and_lists_of_captions(tmp_path: Path) -> None:
    make_images(tmp_path, "a.png", "b.png")
    records = [
        {"img": "a.png", "n": 1, "sentences": ["a dog", "the dog", "a dog"], "split": "validation"},
        {"img": "b.png", "n": 2, "sentences": [{"raw": "a cat"}], "split": "train"},
    ]
    table = read(lines(tmp_path, *records))
    assert found(table) == {"a.png": ("a dog", "the dog"), "b.png": ("a cat",)}
    assert table.repeated == 1
    assert splits(table) == {"a.png": "val", "b.png": "train"}
    chosen = read(
        tmp_path / "metadata.jsonl",
        picture_column="img",
        caption_column="sentences",
        split_column="",
    )
    assert splits(chosen) == {"a.png": "", "b.png": ""}


def test_metadata_in_folders_of_splits(tmp_path: Path) -> None:
    for folder, name in (("train", "a.png"), ("validation", "a.png"), ("test", "c.png")):
        make_images(tmp_path / folder, name)
        lines(tmp_path / folder, {"file_name": name, "text": "a dog"})
    table = read(tmp_path)
    assert splits(table) == {
        "test/c.png": "test",
        "train/a.png": "train",
        "validation/a.png": "val",
    }


def test_metadata_in_other_folders(tmp_path: Path) -> None:
    for folder in ("dogs", "cats"):
        make_images(tmp_path / folder, "a.png")
        lines(tmp_path / folder, {"file_name": "a.png", "text": folder})
    assert found(read(tmp_path)) == {"cats/a.png": ("cats",), "dogs/a.png": ("dogs",)}


def test_metadata_as_csv(tmp_path: Path) -> None:
    make_images(tmp_path, "train/a.png", "test/b.png")
    (tmp_path / "train" / "metadata.csv").write_text("file_name,text\na.png,a dog\n")
    (tmp_path / "test" / "metadata.csv").write_text("file_name,text\nb.png,a cat\n")
    assert splits(read(tmp_path)) == {"test/b.png": "test", "train/a.png": "train"}


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    make_images(tmp_path, "a.png")
    good = {"file_name": "a.png", "text": "a dog"}
    bad = ["{", "[]", '"text"', {"file_name": 1.5, "text": "x"}, {"file_name": "a.png", "text": []},
           {"file_name": "a.png"}, {"file_name": "../a.png", "text": "x"}, {"text": "x"}, "9" * 5000]  # fmt: skip
    table = read(lines(tmp_path, good, *bad))
    assert found(table) == {"a.png": ("a dog",)}
    assert list(skipped(table)) == [f"metadata.jsonl line {number}" for number in range(2, 11)]


def test_a_list_of_objects_and_captions_by_name(tmp_path: Path) -> None:
    make_images(tmp_path, "a.png", "b.png")
    listed = [
        {"image": "a.png", "caption": "a dog"},
        {"image": "b.png", "caption": ["a cat", "the cat"]},
        7,
    ]
    (tmp_path / "all.json").write_text(json.dumps(listed))
    expected = {"a.png": ("a dog",), "b.png": ("a cat", "the cat")}
    assert found(read(tmp_path)) == expected
    assert skipped(read(tmp_path)) == {"all.json entry 3": "not a JSON object"}
    (tmp_path / "all.json").write_text(
        json.dumps({"a.png": "a dog", "b.png": ["a cat", "the cat"]})
    )
    assert found(read(tmp_path)) == expected
    (tmp_path / "all.json").write_text("\n".join(json.dumps(item) for item in listed))
    assert found(read(tmp_path)) == expected


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "3", '{"a": 1}', "[1, 2]", "[" * 100_000, "{'a': 1}"]
)
def test_json_that_holds_no_captions_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError) as caught:
        read(tmp_path / "x.json")
    assert len(str(caught.value).splitlines()) <= 3
