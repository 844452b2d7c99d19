"""Which images are held out: the data's own splits, or drawn by image, seeded, and stable as data is added."""

from __future__ import annotations

from pathlib import Path

import pytest

from lapclip.data.splits import assign_splits, check_trainable, split_named
from lapclip.data.table import ImageFile, Row
from lapclip.errors import DataError


def rows(count: int, split: str = "", start: int = 0) -> list[Row]:
    return [
        Row(ImageFile(Path(f"{n}.jpg"), f"{n}.jpg"), ("a", "b"), split)
        for n in range(start, start + count)
    ]


def test_without_splits_a_tenth_each_is_held_out_and_stays_so_when_data_is_added() -> None:
    few, many = rows(1000), rows(3000)
    drawn = assign_splits(few, 0)
    assert 70 < drawn.count("val") < 130
    assert 70 < drawn.count("test") < 130
    assert assign_splits(many, 0)[:1000] == drawn
    assert assign_splits(few[::-1], 0) == drawn[::-1]
    assert assign_splits(few, 1) != drawn


def test_the_data_s_own_splits_are_kept() -> None:
    own = [*rows(5, "train"), *rows(3, "val", 5), *rows(2, "test", 8)]
    assert assign_splits(own, 0) == ["train"] * 5 + ["val"] * 3 + ["test"] * 2


def test_val_is_drawn_from_train_where_the_data_has_none() -> None:
    only_train = assign_splits(rows(500, "train"), 0)
    assert set(only_train) == {"train", "val"}
    with_test = assign_splits([*rows(500, "train"), *rows(50, "test", 500)], 0)
    assert with_test[:500] == only_train
    assert with_test[500:] == ["test"] * 50


def test_images_without_split_are_for_training_where_others_have_one() -> None:
    mixed = assign_splits([*rows(300), *rows(20, "val", 300)], 0)
    assert mixed == ["train"] * 300 + ["val"] * 20
    assert set(assign_splits([*rows(300), *rows(20, "test", 300)], 0)[:300]) == {"train", "val"}


def test_nothing_for_training_is_an_error_only_when_training() -> None:
    drawn = assign_splits([*rows(5, "test"), *rows(5, "val", 5)], 0)
    assert drawn == ["test"] * 5 + ["val"] * 5
    with pytest.raises(DataError, match="nothing to train on"):
        check_trainable(drawn)
    with pytest.raises(DataError, match="choose the best model"):
        check_trainable(["train"])
    check_trainable(assign_splits(rows(2), 0))


@pytest.mark.parametrize("count", range(2, 12))
def test_few_images_still_give_both_parts(count: int) -> None:
    for seed in range(20):
        assert {"train", "val"} <= set(assign_splits(rows(count), seed))
        assert {"train", "val"} == set(assign_splits(rows(count, "train"), seed))


def test_no_rows_and_one_row() -> None:
    assert assign_splits([], 0) == []
    assert len(assign_splits(rows(1), 0)) == 1


@pytest.mark.parametrize(
    ("word", "split"),
    [("Training", "train"), ("restval", "train"), (" validation ", "val"), ("dev", "val"), ("valid", "val"),
     ("TEST", "test"), ("testing", "test"), ("unlabeled", None), ("", None)],
)  # fmt: skip
def test_words_for_splits(word: str, split: str | None) -> None:
    assert split_named(word) == split
