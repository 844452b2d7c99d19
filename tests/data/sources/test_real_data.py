"""The real photos, where they are: as they lie, and in every other form that can be made from them."""

from __future__ import annotations

import csv
import io
import json
import os
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from lapclip.data.splits import assign_splits
from lapclip.data.table import ImageFile, Row
from tests.data.sources.made import captions_in, check_account, found, read, splits

pytestmark = pytest.mark.real_data


def test_flickr8k_as_it_lies(real_data: Path) -> None:
    from lapclip.config import DataConfig
    from lapclip.data.sources import read_table

    table = read_table(DataConfig(source=str(real_data / "flickr8k")))
    check_account(table)
    assert Counter(assign_splits(table.rows, 0)) == {"train": 6000, "val": 1000}
    assert captions_in(table) + table.repeated == table.records == 35_000
    assert not table.skipped
    assert all(
        part in table.how
        for part in ('"filepath" holds', '"caption": captions', '"split": splits', "by comma")
    )


def test_clothing_as_it_lies(real_data: Path) -> None:
    table = read(real_data / "clothing10")
    assert len(table.rows) == 713
    assert len(table.classes) == 10
    assert "t-shirt" in table.classes


@pytest.fixture(scope="module")
def some(real_data: Path) -> list[Row]:
    table = read(real_data / "flickr8k")
    own = {split: [row for row in table.rows if row.split == split] for split in ("train", "val")}
    return own["train"][:12] + own["val"][:6]


def place(row: Row, path: Path) -> str:
    """Put the photo there, without a copy where the disk allows."""
    assert isinstance(row.image, ImageFile)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(row.image.path, path)
    except OSError:
        path.write_bytes(row.image.read())
    return path.name


def leaf(row: Row) -> str:
    return row.image.name.rpartition("/")[2]


def make_texts(folder: Path, rows: list[Row]) -> None:
    for row in rows:
        place(row, folder / row.split / leaf(row))
        (folder / row.split / leaf(row)).with_suffix(".txt").write_text("\n".join(row.captions))


def make_tokens(folder: Path, rows: list[Row]) -> None:
    lines = [
        f"{place(row, folder / 'photos' / leaf(row))}#{n}\t{c}"
        for row in rows
        for n, c in [(0, row.captions[0])]
    ]
    lines += [
        f"{leaf(row)}#{n}\t{caption}" for row in rows for n, caption in enumerate(row.captions)
    ]
    (folder / "Flickr8k.token.txt").write_text("\n".join(lines))
    for split, name in (("train", "train"), ("val", "dev")):
        listed = [leaf(row) for row in rows if row.split == split]
        (folder / f"Flickr_8k.{name}Images.txt").write_text("\n".join(listed))


def make_semicolons(folder: Path, rows: list[Row]) -> None:
    folder.mkdir()
    with open(folder / "bilder.csv", "w", newline="", encoding="cp1252") as file:
        table = csv.writer(file, delimiter=";")
        table.writerow(["Teil", "Beschreibung", "Bild"])
        for row in rows:
            name = place(row, folder / "Bilder" / leaf(row)) if row.captions else ""
            table.writerows([row.split, caption, name] for caption in row.captions)


def make_imagefolder(folder: Path, rows: list[Row]) -> None:
    for row in rows:
        own = folder / {"train": "train", "val": "validation"}[row.split]
        line = {"file_name": place(row, own / leaf(row)), "captions": list(row.captions)}
        with open(own / "metadata.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def make_coco(folder: Path, rows: list[Row]) -> None:
    (folder / "annotations").mkdir(parents=True)
    for split in ("train", "val"):
        own = [row for row in rows if row.split == split]
        images = [
            {"id": n, "file_name": place(row, folder / f"{split}2017" / leaf(row))}
            for n, row in enumerate(own)
        ]
        annotations = [
            {"image_id": n, "caption": caption}
            for n, row in enumerate(own)
            for caption in row.captions
        ]
        content = json.dumps({"images": images, "annotations": annotations})
        (folder / "annotations" / f"captions_{split}2017.json").write_text(content)


def make_karpathy(folder: Path, rows: list[Row]) -> None:
    images = [
        {
            "filename": place(row, folder / "images" / leaf(row)),
            "split": {"train": "restval", "val": "val"}[row.split],
            "sentences": [{"raw": caption} for caption in row.captions],
        }
        for row in rows
    ]
    (folder / "dataset_flickr8k.json").write_text(json.dumps({"images": images}))


def make_shards(folder: Path, rows: list[Row]) -> None:
    folder.mkdir()
    for split in ("train", "val"):
        with tarfile.open(folder / f"photos-{split}-00000.tar", "w") as shard:
            for row in rows:
                if row.split == split:
                    stem = leaf(row).removesuffix(".jpg")
                    for ending, content in (
                        ("jpg", row.image.read()),
                        ("txt", "\n".join(row.captions).encode()),
                    ):
                        member = tarfile.TarInfo(f"{stem}.{ending}")
                        member.size = len(content)
                        shard.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(
    "make",
    [
        make_texts,
        make_tokens,
        make_semicolons,
        make_imagefolder,
        make_coco,
        make_karpathy,
        make_shards,
    ],
)
def test_every_form_gives_the_same_rows(tmp_path: Path, some: list[Row], make) -> None:
    make(tmp_path / "data", some)
    table = read(tmp_path / "data")
    assert not table.skipped
    by_leaf = {
        name.replace(":", "/").rpartition("/")[2]: captions
        for name, captions in found(table).items()
    }
    assert by_leaf == {leaf(row): row.captions for row in some}
    own = {
        name.replace(":", "/").rpartition("/")[2]: split for name, split in splits(table).items()
    }
    assert own == {leaf(row): row.split for row in some}
