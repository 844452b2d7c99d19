"""COCO's captions and Karpathy's splits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lapclip.errors import DataError
from tests.data.sources.made import found, make_images, read, skipped, splits


def coco(folder: Path, split: str, *names: str, **more: Any) -> Path:
    make_images(folder / f"{split}2017", *names)
    (folder / "annotations").mkdir(exist_ok=True)
    content = {
        "info": {},
        "images": [{"id": place, "file_name": name} for place, name in enumerate(names)],
        "annotations": [
            {"id": 10 * place + n, "image_id": place, "caption": f"{word} {name}"}
            for place, name in enumerate(names)
            for n, word in enumerate(("the", "a"))
        ],
    }
    for key, extra in more.items():
        content[key] += extra
    path = folder / "annotations" / f"captions_{split}2017.json"
    path.write_text(json.dumps(content))
    return path


def test_coco_as_a_folder_and_as_a_file(tmp_path: Path) -> None:
    file = coco(tmp_path, "train", "1.jpg", "2.jpg")
    coco(tmp_path, "val", "3.jpg")
    (tmp_path / "annotations" / "instances_train2017.json").write_text("{}")
    table = read(tmp_path)
    assert found(table)["train2017/1.jpg"] == ("the 1.jpg", "a 1.jpg")
    assert splits(table) == {
        "train2017/1.jpg": "train",
        "train2017/2.jpg": "train",
        "val2017/3.jpg": "val",
    }
    assert found(read(file)) == {
        name: found(table)[name] for name in ("train2017/1.jpg", "train2017/2.jpg")
    }
    elsewhere = read(file, pictures=str(tmp_path / "train2017"))
    assert set(found(elsewhere)) == {"1.jpg", "2.jpg"}


def test_coco_names_what_it_leaves_out(tmp_path: Path) -> None:
    images = [
        {"id": 7, "file_name": "gone.jpg"},
        {"id": 1, "file_name": "1.jpg"},
        {"file_name": "x.jpg"},
        None,
    ]
    annotations = [{"image_id": 99, "caption": "x"}, {"image_id": 0}, 5, {"image_id": 7, "caption": "x"},
                   {"image_id": [], "caption": "x"}, {"image_id": True, "caption": "x"}]  # fmt: skip
    table = read(coco(tmp_path, "train", "1.jpg", images=images, annotations=annotations))
    assert list(found(table)) == ["train2017/1.jpg"]
    assert (
        table.records == 2 + 2 + 6 + 1
    )  # good captions, bad images, bad annotations, an image without caption
    assert skipped(table)["captions_train2017.json annotation 6"] == "there is no such image"
    assert skipped(table)["captions_train2017.json 1.jpg"] == "no caption"


def test_boxes_are_not_captions(tmp_path: Path) -> None:
    path = tmp_path / "instances_val2017.json"
    path.write_text(
        json.dumps(
            {"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [{"bbox": [1, 2, 3, 4]}]}
        )
    )
    with pytest.raises(DataError, match="without captions"):
        read(path)


def karpathy(folder: Path, images: list, name: str = "dataset_flickr8k.json") -> Path:
    (folder / name).write_text(json.dumps({"dataset": "flickr8k", "images": images}))
    return folder


def test_karpathy(tmp_path: Path) -> None:
    make_images(tmp_path / "Flicker8k_Dataset", "a.jpg", "b.jpg", "c.jpg")
    images = [
        {
            "filename": f"{name}.jpg",
            "split": split,
            "sentences": [{"raw": f"a {name}", "tokens": []}, {"raw": f"the {name}"}],
        }
        for name, split in (("a", "train"), ("b", "restval"), ("c", "test"))
    ]
    table = read(
        karpathy(
            tmp_path,
            [*images, {"filename": "a.jpg", "sentences": []}, {"sentences": [{"raw": "x"}]}, 3],
        )
    )
    assert found(table)["Flicker8k_Dataset/b.jpg"] == ("a b", "the b")
    assert list(splits(table).values()) == ["train", "train", "test"]
    assert len(table.skipped) == 3


def test_karpathy_for_coco_has_folders(tmp_path: Path) -> None:
    make_images(tmp_path, "val2014/a.jpg", "train2014/b.jpg")
    images = [
        {"filename": "a.jpg", "filepath": "val2014", "split": "val", "sentences": [{"raw": "one"}]},
        {
            "filename": "b.jpg",
            "filepath": "train2014",
            "split": "train",
            "sentences": [{"raw": "two"}],
        },
    ]
    table = read(karpathy(tmp_path, images, "dataset_coco.json"))
    assert splits(table) == {"val2014/a.jpg": "val", "train2014/b.jpg": "train"}
