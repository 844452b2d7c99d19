"""Folders without a table: a text beside each image, class folders, and what is said of the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lapclip.data.sources.image_folders import readable
from lapclip.errors import DataError
from tests.data.sources.made import found, make_images, read, skipped, splits


def test_a_text_beside_each_image(tmp_path: Path) -> None:
    make_images(tmp_path, "a.png", "b.JPG", "c.png", "sub/d.png", "e.png")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa dog\r\nthe dog\r\n\r\na dog\r\n")
    (tmp_path / "b.txt").write_text("a cat")
    (tmp_path / "c.txt").write_text(" \n")
    (tmp_path / "sub" / "d.txt").write_bytes("un caf\u00e9".encode("cp1252"))
    (tmp_path / "README.txt").write_text("about")
    (tmp_path / ".DS_Store").write_text("x")
    table = read(tmp_path)
    assert found(table) == {
        "a.png": ("a dog", "the dog"),
        "b.JPG": ("a cat",),
        "sub/d.png": ("un café",),
    }
    assert table.repeated == 1
    assert skipped(table) == {
        "c.txt": "the caption is empty",
        "e.png": "no .txt beside it",
        "README.txt": "no image of that name beside it",
    }


def test_texts_in_folders_of_splits(tmp_path: Path) -> None:
    for name in ("train/a", "valid/b"):
        make_images(tmp_path, f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("a dog")
    assert splits(read(tmp_path)) == {"train/a.png": "train", "valid/b.png": "val"}


def test_class_folders(tmp_path: Path) -> None:
    make_images(
        tmp_path, "t-shirt/1.png", "golden_retriever/1.png", "golden_retriever/2.png", "stray.png"
    )
    table = read(tmp_path, prompts="a photo of a {}.|one {}")
    assert list(table.classes) == ["golden retriever", "t-shirt"]
    assert found(table)["t-shirt/1.png"] == ("a photo of a t-shirt.", "one t-shirt")
    assert skipped(table) == {"stray.png": "in no class folder"}
    with pytest.raises(DataError, match=r"data\.prompts"):
        read(tmp_path, prompts="a photo")


def test_class_folders_inside_folders_of_splits(tmp_path: Path) -> None:
    make_images(tmp_path, "train/dog/1.png", "train/cat/1.png", "val/dog/2.png", "test/cat/3.png")
    table = read(tmp_path)
    assert sorted(table.classes) == ["cat", "dog"]
    assert splits(table)["val/dog/2.png"] == "val"
    assert splits(table)["test/cat/3.png"] == "test"
    assert set(splits(read(tmp_path, split_column="")).values()) == {""}


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("t-shirt", "t-shirt"),
        ("golden_retriever", "golden retriever"),
        ("golden-retriever", "golden retriever"),
        ("001.Black_footed_Albatross", "Black footed Albatross"),
        ("GoldenRetriever", "Golden Retriever"),
        ("x-ray_image", "x-ray image"),
        ("vitamin-c", "vitamin-c"),
        ("7", "7"),
        ("1980s", "1980s"),
    ],
)
def test_names_of_classes_become_words(folder: str, name: str) -> None:
    assert readable(folder, numbered=True) == name


def test_a_folder_in_a_folder_is_opened(tmp_path: Path) -> None:
    make_images(tmp_path, "unpacked/dog/1.png", "unpacked/cat/1.png")
    assert set(found(read(tmp_path))) == {"dog/1.png", "cat/1.png"}


def test_the_most_specific_form_is_taken_and_the_others_are_said(tmp_path: Path) -> None:
    make_images(tmp_path, "a.png")
    (tmp_path / "a.txt").write_text("from the text")
    (tmp_path / "captions.csv").write_text("image,caption\na.png,from the table\n")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "from the lines"}')
    table = read(tmp_path)
    assert found(table) == {"a.png": ("from the lines",)}
    assert "not used: captions.csv, text files" in table.how


def test_a_file_that_is_no_table_does_not_hide_the_captions(tmp_path: Path) -> None:
    make_images(tmp_path, "a.png", "b.png")
    (tmp_path / "a.txt").write_text("a dog")
    (tmp_path / "b.txt").write_text("a cat")
    (tmp_path / "dates.csv").write_text("year,month\n2024,3\n2024,4\n")
    (tmp_path / "settings.json").write_text('{"name": "photos", "version": "1"}')
    (tmp_path / "dataset_infos.json").write_text('{"default": {}}')
    (tmp_path / "people.jsonl").write_text('{"id": 1, "name": "Ada", "text": "a few words"}')
    table = read(tmp_path)
    assert found(table) == {"a.png": ("a dog",), "b.png": ("a cat",)}
    assert "not used: dates.csv, dataset_infos.json" in table.how
    (tmp_path / "people.jsonl").unlink()
    (tmp_path / "list.csv").write_text("image,caption\na.png,from the table\n")
    assert found(read(tmp_path)) == {"a.png": ("from the table",)}


def test_links_and_pipes_in_a_folder_are_named(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", "dog/1.png", "cat/1.png")
    make_images(tmp_path, "outside.png")
    try:
        (data / "cat" / "2.png").symlink_to(tmp_path / "outside.png")
        (data / "all").symlink_to(tmp_path, target_is_directory=True)
        (data / "around").symlink_to(data, target_is_directory=True)
        os.mkfifo(data / "dog" / "3.png")
    except (OSError, AttributeError):
        pytest.skip("links or pipes cannot be made here")
    table = read(data)
    assert set(found(table)) == {"dog/1.png", "cat/1.png"}
    assert set(skipped(table)) == {"cat/2.png", "all", "around", "dog/3.png"}
    with pytest.raises(DataError, match="not a plain file"):
        read(data / "dog" / "3.png")


@pytest.mark.parametrize(
    ("names", "source", "said"),
    [
        ([], "", "is empty"),
        (["a.png", "b.png"], "", "which has 2 images"),
        (["images/a.png", "images/b.png"], "", "which has 2 images"),
        (["a.png"], "a.png", "a single image"),
        (["photos.zip"], "", "unzip photos.zip"),
        (["photos.zip"], "photos.zip", "unzip photos.zip"),
        (["shard.tar.gz"], "shard.tar.gz", "gunzip shard.tar.gz"),
        (["notes.docx", "b.docx"], "", "2 .docx"),
        (["model.bin"], "model.bin", "no form of data"),
        (["photos/a.png"], "photoz", "Did you mean"),
        (["a.tar"], "b-*.tar", "No file matches"),
        (
            ["one/captions.csv", "one/a.png", "two/captions.csv", "two/a.png"],
            "",
            "data sets of its own",
        ),
    ],
)
def test_where_there_is_nothing_the_error_helps(
    tmp_path: Path, names: list[str], source: str, said: str
) -> None:
    make_images(tmp_path, *names)
    with pytest.raises(DataError) as caught:
        read(tmp_path / source if source else tmp_path)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_reading_a_table_loads_no_torch(tmp_path: Path) -> None:
    make_images(tmp_path, "dog/1.png", "cat/1.png")
    program = (
        "import sys; from lapclip.config import DataConfig; from lapclip.data.sources import read_table;"
        "read_table(DataConfig(source=sys.argv[1])); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    "source", ["https://example.org/x.tar", "pipe:cat x.tar", "s3://x/y.tar", "", "a\0b"]
)
def test_sources_that_are_no_paths_are_refused(source: str) -> None:
    with pytest.raises(DataError):
        read(source)


def test_a_folder_of_links_that_lead_out_says_so(tmp_path: Path) -> None:
    make_images(tmp_path, "blobs/1", "blobs/2")
    (tmp_path / "snapshot" / "data").mkdir(parents=True)
    try:
        for number in (1, 2):
            (tmp_path / "snapshot" / "data" / f"{number}.parquet").symlink_to(
                tmp_path / "blobs" / str(number)
            )
    except OSError:
        pytest.skip("links cannot be made here")
    with pytest.raises(DataError, match="2 links out of it") as caught:
        read(tmp_path / "snapshot")
    assert "real folder" in caught.value.hint


def test_tables_and_folders_around_the_data_that_are_links_are_named(tmp_path: Path) -> None:
    make_images(tmp_path / "data" / "inner", "a.png")
    (tmp_path / "data" / "inner" / "train.csv").write_text("image,caption\na.png,a dog\n")
    (tmp_path / "val.csv").write_text("image,caption\na.png,a dog\n")
    try:
        (tmp_path / "data" / "inner" / "val.csv").symlink_to(tmp_path / "val.csv")
        (tmp_path / "data" / "more").symlink_to(tmp_path, target_is_directory=True)
    except OSError:
        pytest.skip("links cannot be made here")
    assert set(skipped(read(tmp_path / "data"))) == {"val.csv", "more"}


def test_a_folder_that_is_secretly_a_link_is_not_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Junctions cannot be made everywhere, so the answer of the system is made up."""
    make_images(tmp_path, "dog/1.png", "cat/1.png", "out/1.png", "round/1.png")
    top, real = os.path.realpath(tmp_path), os.path.realpath
    leads = {os.path.join(top, "out"): os.path.dirname(top), os.path.join(top, "round"): top}
    monkeypatch.setattr(
        "os.path.realpath", lambda path, **more: leads.get(os.fspath(path)) or real(path, **more)
    )
    table = read(tmp_path)
    assert set(found(table)) == {"dog/1.png", "cat/1.png"}
    assert skipped(table) == {
        "out": "a link that leads out of the data's folder",
        "round": "a link to a folder",
    }


def test_numbers_of_classes_go_only_where_all_have_one(tmp_path: Path) -> None:
    make_images(tmp_path / "some", "3-wheeler/1.png", "lorry/1.png")
    make_images(tmp_path / "all", "001.Albatross/1.png", "002.Auk/1.png")
    assert list(read(tmp_path / "some").classes) == ["3 wheeler", "lorry"]
    assert list(read(tmp_path / "all").classes) == ["Albatross", "Auk"]
