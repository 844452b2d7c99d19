from __future__ import annotations

import csv
import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lapclip.config import DataConfig
from lapclip.data import loading, packed_store
from lapclip.data.batches import BatchPlan
from lapclip.data.dataset import DataSet, SelectedPixels, save_seen
from lapclip.data.loading import (
    StreamedPixels,
    checked_indexes,
    list_data,
    load_data,
    load_to_score,
)
from lapclip.data.pixels import as_view, middle_square
from lapclip.data.sources import read_table
from lapclip.data.table import ImageInTar
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.errors import DataError
from lapclip.paths import cache_folder

from ..small_runs import write_tars
from .check.made import scene
from .test_packed_store import draw

SIDE = 16


def config_of(folder: Path | str, **settings) -> DataConfig:
    """The data in a folder, of which two images are enough."""
    return DataConfig(source=str(folder), min_pairs=2, **settings)


def write(folder: Path, splits: Sequence[str]) -> DataConfig:
    """Images with two captions each in a folder with a captions.csv."""
    for at in range(len(splits)):
        if not (folder / f"{at:02}.jpg").exists():
            draw(folder / f"{at:02}.jpg", at, (40 + at, 30))
    with open(folder / "captions.csv", "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["filepath", "caption", "split"])
        for at, split in enumerate(splits):
            for view in ("near", "far"):
                lines.writerow([f"{at:02}.jpg", f"thing {at} {view}", split])
    return config_of(folder)


SPLITS = ["train"] * 9 + ["val"] * 3 + ["test"] * 2 + ["train"]


@pytest.fixture
def photos(tmp_path: Path, empty_cache: Path) -> Path:
    return tmp_path / "photos"


def test_each_split_has_its_images_captions_and_names(photos: Path) -> None:
    data = load_data(write(photos, SPLITS), SIDE)
    assert {split: len(pairs) for split, pairs in data.splits.items()} == {
        "train": 10,
        "val": 3,
        "test": 2,
    }
    for split, pairs in data.splits.items():
        assert [SPLITS[int(name[:2])] for name in pairs.names] == [split] * len(pairs)
        for name, captions in zip(pairs.names, pairs.captions, strict=True):
            assert tuple(captions) == (f"thing {int(name[:2])} near", f"thing {int(name[:2])} far")
    for split in (
        "val",
        "test",
    ):  # what the model is scored on is what encode_image makes of the files
        pairs = data.splits[split]
        expected = np.stack([middle_square(photos / name, SIDE) for name in pairs.names])
        assert np.array_equal(pairs.pixels[:], expected)
        assert pairs.aspects is None
    assert data.train.pixels.shape == (10, 24, 24, 3)
    assert data.train.aspects is not None
    assert data.train.aspects.tolist() == pytest.approx(
        [(40 + int(name[:2])) / 30 for name in data.train.names]
    )
    assert not data.train.sequential


def test_streaming_gives_the_same_data(photos: Path) -> None:
    config = write(photos, SPLITS)
    plain = load_data(config, SIDE)
    streamed = load_data(config_of(config.source, stream="always"), SIDE)
    assert isinstance(streamed.train.pixels, StreamedPixels)
    assert streamed.train.sequential
    assert streamed.fingerprint == plain.fingerprint
    assert np.array_equal(streamed.train.pixels[:], plain.train.pixels[:])
    assert list(streamed.train.names) == list(plain.train.names)
    assert np.array_equal(streamed.held_out.pixels[:], plain.held_out.pixels[:])


def files_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by the name of its tar file with each image that is read from one."""
    read, names = ImageInTar.read, []
    monkeypatch.setattr(
        ImageInTar, "read", lambda image: names.append(image.path.name) or read(image)
    )
    return names


def test_a_rank_reads_the_images_of_its_own_rows_alone(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(str(write_tars(photos, files=8, each=6)), stream="always")
    train = load_data(config, SIDE).train
    assert isinstance(train.pixels, StreamedPixels)
    assert train.files is not None
    assert train.files.tolist() == [file for file in range(8) for _ in range(6)]
    assert [train.select([at]).files for at in (5, 6)] == [[0], [1]]
    captions = [caption for options in train.captions for caption in options]
    plan = BatchPlan(train, CharacterTokenizer.learn(captions), 40, 10, 0)
    read = files_read(monkeypatch)
    whole = plan.batch(1)
    assert len(read) == 10
    rows = [7, 3]
    parts = []
    for rank in range(2):
        read.clear()
        parts.append(plan.for_rank(rows, rank).batch(1))
        assert len(read) == rows[rank]
    together = np.concatenate([part.pixels_BSSC for part in parts])
    assert sorted(map(bytes, together)) == sorted(map(bytes, whole.pixels_BSSC))


def test_images_that_another_computer_has_checked_are_read_and_not_decoded(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(write_tars(photos, files=2, each=6, held_out=3))
    config, view = DataConfig(source=source, stream="always"), as_view(SIDE)
    first = load_data(config, SIDE)
    known = {
        path.relative_to(cache_folder()): path.read_bytes()
        for path in checked_indexes(config, view)
    }
    assert len(known) == 2
    for path in photos.iterdir():  # as a copy of the files has them
        os.utime(path, ns=(1, 1))
    monkeypatch.setenv("LAPCLIP_CACHE", str(tmp_path / "other"))
    for path, lines in known.items():
        (cache_folder() / path).parent.mkdir(parents=True)
        (cache_folder() / path).write_bytes(lines)
    decode, decoded = packed_store.decode, []
    monkeypatch.setattr(
        packed_store,
        "decode",
        lambda *given, **options: decoded.append(1) or decode(*given, **options),
    )
    read = files_read(monkeypatch)
    assert load_data(config, SIDE).fingerprint == first.fingerprint
    assert len(decoded) == 3  # held-out images are packed by each
    assert read.count("photos-train-00001.tar") == 12  # in small, and whole
    assert (
        checked_indexes(DataConfig(source=source, stream="never"), view)
        == checked_indexes(config, view)[:1]
    )
    assert checked_indexes(DataConfig(), view) == []


def disk_with(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that the system says are free."""
    free, real = [0], shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=free[0]))
    return free


def test_data_too_large_for_the_disk_is_streamed_and_said(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(photos, SPLITS)
    both = 10 * 24 * 24 * 3 + 5 * SIDE * SIDE * 3  # those to learn from and those to be scored on
    free = disk_with(monkeypatch)
    free[0] = 2 * both - 2
    data = load_data(config, SIDE)
    assert data.train.sequential
    assert any("decoded each time" in note and "half of" in note for note in data.notes)
    shutil.rmtree(cache_folder())
    free[0] = 2 * both
    assert not load_data(config, SIDE).train.sequential


def test_the_fingerprint_follows_what_is_learnt(photos: Path, tmp_path: Path) -> None:
    config = write(photos, SPLITS)
    first = load_data(config, SIDE).fingerprint
    assert load_data(config, SIDE).fingerprint == first
    photos.rename(tmp_path / "moved")
    assert load_data(config_of(tmp_path / "moved"), SIDE).fingerprint == first
    draw(tmp_path / "moved" / "04.jpg", 77)
    changed = load_data(config_of(tmp_path / "moved"), SIDE).fingerprint
    other = load_data(write(tmp_path / "moved", ["val", *SPLITS[1:]]), SIDE).fingerprint
    assert len({first, changed, other}) == 3


def test_broken_images_are_left_out_with_their_captions_and_named(photos: Path) -> None:
    config = write(photos, SPLITS)
    for at in (2, 10):
        (photos / f"{at:02}.jpg").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"2 of 15 images.*5%.*02\.jpg") as caught:
        load_data(config, SIDE)
    assert "data.broken_share=0.14" in caught.value.hint
    data = load_data(config_of(config.source, broken_share=0.2), SIDE)
    warning, form = data.notes  # in this order: a start shows the first of many notes
    assert warning.startswith("left out 2: 2 because ")
    assert "(02.jpg, 10.jpg)" in warning
    assert form.startswith("captions.csv")
    assert "02.jpg" not in data.train.names
    assert data.held_out.names == ["09.jpg", "11.jpg"]
    assert data.held_out.captions[1] == ("thing 11 near", "thing 11 far")
    assert np.array_equal(data.held_out.pixels[1], middle_square(photos / "11.jpg", SIDE))


def test_a_training_image_that_is_also_held_out_is_not_trained_on(photos: Path) -> None:
    config = write(photos, SPLITS)
    (photos / "03.jpg").write_bytes((photos / "10.jpg").read_bytes())
    for stream in ("never", "always"):
        data = load_data(config_of(config.source, stream=stream), SIDE)
        assert "03.jpg" not in data.train.names
        assert len(data.train) == 9
        assert data.train.aspects is not None
        assert len(data.train.pixels) == len(data.train.aspects) == 9
        assert "10.jpg" in data.held_out.names
        assert any("left out of training 1" in note and "03.jpg" in note for note in data.notes)
    packed = load_data(config, SIDE).train
    assert isinstance(packed.pixels, SelectedPixels)


def test_a_split_that_is_needed_must_be_there(photos: Path) -> None:
    with pytest.raises(DataError, match=r"nothing to train on.*val"):
        load_data(write(photos, ["val"] * 4), SIDE)
    config = write(photos, ["train"] * 4 + ["val"])
    (photos / "04.jpg").write_bytes(b"broken")
    with pytest.raises(DataError, match="No image of the split val can be used"):
        load_data(config_of(config.source, broken_share=1.0), SIDE)


def test_images_and_rows_are_judged_apart(photos: Path) -> None:
    config = write(photos, SPLITS)
    (photos / "02.jpg").write_bytes(b"broken")  # 1 of 15 images, but two of 30 captions
    limit = config_of(config.source, broken_share=0.06)
    with pytest.raises(DataError, match="1 of 15 images cannot be used"):
        load_data(limit, SIDE)
    with open(photos / "captions.csv", "a", encoding="utf-8") as file:
        file.write("gone.jpg,one,train\ngone.jpg,two,train\n")
    at_most = config_of(config.source, broken_share=0.07)
    assert len(load_data(at_most, SIDE).train) == 9  # 2 of 32 rows, and 1 of 15 images
    with open(photos / "captions.csv", "a", encoding="utf-8") as file:
        file.write("gone.jpg,three,train\n")
    with pytest.raises(DataError, match="3 of 33 rows cannot be used"):
        load_data(at_most, SIDE)


def test_what_the_table_leaves_out_is_not_set_against_one_split(photos: Path) -> None:
    config = write(photos, ["train"] * 20 + ["val"])
    with open(photos / "captions.csv", "a", encoding="utf-8") as file:
        file.write("gone.jpg,one,train\ngone.jpg,two,train\n")
    pairs, notes = load_to_score(config, read_table(config), [20], SIDE)
    assert len(pairs) == 1
    assert any(
        note.startswith("left out 2: 2 because ") and "(captions.csv line" in note for note in notes
    )


def test_a_split_without_a_usable_image_is_left_out_and_said(photos: Path) -> None:
    config = write(photos, SPLITS)
    for at in (12, 13):
        (photos / f"{at}.jpg").write_bytes(b"broken")
    data = load_data(config_of(config.source, broken_share=0.2), SIDE)
    assert list(data.splits) == ["train", "val"]
    assert data.final[0] == "val"
    assert any("no image of the split test can be used" in note for note in data.notes)


def test_odd_names_of_images_are_said_in_plain_characters(photos: Path) -> None:
    config = write(photos, SPLITS)
    odd = "a\x1b[31m\udcff.jpg"
    try:
        (photos / odd).write_bytes((photos / "10.jpg").read_bytes())
    except (OSError, UnicodeError):
        pytest.skip("such names cannot be made here")
    rows = [
        {"file_name": f"{at:02}.jpg", "text": f"thing {at}", "split": split}
        for at, split in enumerate(SPLITS)
    ]
    rows.append({"file_name": odd, "text": "a copy", "split": "train"})
    (photos / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = load_data(config, SIDE)
    assert any("a\\x1b[31m\\udcff.jpg" in note for note in data.notes)
    assert all(note.isprintable() for note in data.notes)


def test_images_to_score_are_those_that_encode_image_sees(photos: Path) -> None:
    config = write(photos, ["train"] * 3 + ["val"] * 2)
    table = read_table(config)
    pairs, notes = load_to_score(config, table, [0, 4], SIDE)
    assert [Path(name).name for name in pairs.names] == ["00.jpg", "04.jpg"]
    for row, name in enumerate(pairs.names):
        np.testing.assert_array_equal(pairs.pixels[row], middle_square(photos / name, SIDE))
    assert notes == [table.how]


def test_packing_is_told_by_its_name(photos: Path) -> None:
    told: list[tuple[int, int, str]] = []
    load_data(
        write(photos, SPLITS),
        SIDE,
        lambda done, total, what="", /: told.append((done, total, what)),
    )
    assert told[-1] == (10, 10, "packing")
    assert {what for *_, what in told} == {"checking", "packing"}


def twins(folder: Path, count: int = 60) -> DataConfig:
    """Images of which each has a second copy with the same pixels and another text in its file."""
    folder.mkdir()
    for at in range(count):
        for which in "ab":
            text = PngInfo()
            text.add_text("Comment", f"copy {which}")
            scene(at, (32, 24)).save(folder / f"{at:02}{which}.png", pnginfo=text)
            (folder / f"{at:02}{which}.txt").write_text(f"thing {at} {which}")
    return config_of(folder)


def sides(data: DataSet) -> dict[str, set[str]]:
    """The splits of each image, whatever its copy is called."""
    found: dict[str, set[str]] = {}
    for split, pairs in data.splits.items():
        for name in pairs.names:
            found.setdefault(name[:2], set()).add(split)
    return found


def test_copies_whose_files_differ_are_on_one_side_and_that_is_said(photos: Path) -> None:
    config = twins(photos)
    data = load_data(config, SIDE)
    assert sum(map(len, data.splits.values())) == 120
    assert {len(own) for own in sides(data).values()} == {1}
    assert set(data.splits) == {"train", "val", "test"}
    assert any("120 of 120 images have a copy" in note for note in data.notes)
    assert "content" in data.how_split
    assert "120 of 120" in data.how_split
    by_name = load_data(replace(config, split_rule="name"), SIDE)
    assert (
        sum(len(own) > 1 for own in sides(by_name).values()) > 10
    )  # as it was, and as old runs keep it
    listed = list_data(config, SIDE)
    assert Counter(listed.splits) == {split: len(pairs) for split, pairs in data.splits.items()}


def test_splits_by_content_stay_when_images_are_renamed_added_or_seen_by_another_model(
    photos: Path,
) -> None:
    config = twins(photos, 30)
    before = sides(load_data(config, SIDE))
    for at in range(30, 40):
        scene(at, (32, 24)).save(photos / f"{at}.png")
        (photos / f"{at}.txt").write_text(f"thing {at}")
    for path in list(photos.glob("0*")):
        path.rename(path.with_name(f"{path.stem} renamed{path.suffix}"))
    after = sides(load_data(config, 2 * SIDE))
    assert {name: after[name] for name in before} == before


def test_near_copies_are_on_one_side_too(photos: Path) -> None:
    photos.mkdir()
    for at in range(20):
        scene(at, (160, 120)).save(photos / f"{at:02}a.jpg", quality=95)
        scene(at, (160, 120)).resize((80, 60)).save(photos / f"{at:02}b.jpg", quality=70)
        for which in "ab":
            (photos / f"{at:02}{which}.txt").write_text(f"thing {at}")
    found = sides(load_data(config_of(photos), SIDE))
    assert {len(own) for own in found.values()} == {1}


def test_copies_in_splits_that_the_data_brings_are_said_and_stay(photos: Path) -> None:
    config = write(photos, SPLITS)
    Image.open(photos / "10.jpg").save(photos / "03.jpg", quality=100, comment=b"another")
    data = load_data(config, SIDE)
    assert {split: len(pairs) for split, pairs in data.splits.items()} == {
        "train": 10,
        "val": 3,
        "test": 2,
    }
    assert any("03.jpg (train) = 10.jpg (val)" in note for note in data.notes)


def test_images_that_all_show_the_same_cannot_be_split(photos: Path) -> None:
    with pytest.raises(DataError, match="All 2 images show the same") as caught:
        load_data(twins(photos, 1), SIDE)
    assert "data.split_rule=name" in caught.value.hint


def test_too_many_unusable_rows_are_counted_by_reason_before_any_image_is_read(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(photos, ["train"] * 40 + ["val"] * 5)
    with open(photos / "captions.csv", "a", encoding="utf-8") as file:
        file.write("01.jpg,,train\n" * 4 + "gone.jpg,one,train\n" * 3)
    with monkeypatch.context() as patch:
        patch.setattr(loading, "pack", None)  # nothing is decoded
        with pytest.raises(
            DataError, match=r"7 of 97 rows.*4 because the caption is empty.*3 because"
        ) as caught:
            load_data(config, SIDE)
    assert "data.broken_share=0.08 " in caught.value.hint
    assert any(
        "left out 7: 4 because" in note
        for note in load_data(replace(config, broken_share=0.08), SIDE).notes
    )


@pytest.mark.real_data
def test_flickr8k_loads_and_its_scores_stay_honest(
    real_data: Path, empty_cache: Path, tmp_path: Path
) -> None:
    """The first images of each split; all 7,000 take seconds more."""
    lines = (real_data / "flickr8k" / "captions.csv").read_text(encoding="utf-8").splitlines()
    chosen = [lines[0]]
    for split in ("train", "val"):
        chosen += [line for line in lines[1:] if line.endswith(split)][:500]
    source = tmp_path / "captions.csv"
    names = {line.split(",")[0] for line in chosen[1:]}
    for name in names:
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((real_data / "flickr8k" / name).read_bytes())
    source.write_text("\n".join(chosen) + "\n", encoding="utf-8")
    data = load_data(DataConfig(source=str(source)), 112)
    assert len(data.train) == len(data.held_out) == 100
    assert all(len(captions) == 5 for captions in data.held_out.captions)
    expected = middle_square(tmp_path / data.held_out.names[7], 112)
    assert np.array_equal(data.held_out.pixels[7], expected)


def test_copies_that_were_left_out_of_training_are_no_change(
    tmp_path: Path, empty_cache: Path
) -> None:
    config, seen = (
        write(tmp_path, ["train"] * 20 + ["val"] * 4 + ["test"] * 6),
        tmp_path / "seen.npy",
    )
    for at in range(6):
        shutil.copyfile(tmp_path / f"{at:02}.jpg", tmp_path / f"{24 + at}.jpg")
    learnt = load_data(config, SIDE).train.identities
    assert learnt is not None
    assert len(learnt) == 14
    for known, changed in ((learnt, False), (learnt[:7], True)):
        save_seen(known, seen)
        assert list_data(config, SIDE).has_changed_since(seen, SIDE) is changed
