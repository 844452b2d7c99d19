from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lapclip.errors import ConfigError
from lapclip.evaluation import ranks
from lapclip.evaluation.intervals import wilson_interval
from lapclip.evaluation.zeroshot import accuracy, class_answers, zeroshot_of
from lapclip.prompts import TEMPLATES, class_embeddings, read_templates

from .embeddings import unit


def answers(
    count: int, classes: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Images near their class, some of them far from it; classes of different sizes, the last one empty."""
    draw = np.random.default_rng(seed)
    rows = unit(draw.normal(size=(classes, 12)))
    labels = np.minimum(
        draw.integers(classes - 1, size=count), draw.integers(classes - 1, size=count)
    )
    return (
        unit(rows[labels] + 0.6 * draw.normal(size=(count, 12))),
        rows,
        labels,
        [f"class {at}" for at in range(classes)],
    )


def zeroshot(
    images: np.ndarray, classes: np.ndarray, labels: np.ndarray, names: Sequence[str]
) -> dict[str, Any]:
    return zeroshot_of(class_answers(images, classes, labels), labels, names)


def test_scores_are_those_of_sorting_the_classes_for_each_image() -> None:
    images, classes, labels, names = answers(300, 9)
    found = zeroshot(images, classes, labels, names)
    order = [list(np.argsort(-(classes @ image))) for image in images]
    first = np.array([row[0] == label for row, label in zip(order, labels, strict=True)])
    assert 0.2 < first.mean() < 0.9
    assert found["top1"] == pytest.approx(first.mean())
    five = [label in row[:5] for row, label in zip(order, labels, strict=True)]
    assert found["top5"] == pytest.approx(np.mean(five))
    recalls = [first[labels == label].mean() for label in range(8)]
    assert [entry["recall"] for entry in found["per_class"][:8]] == pytest.approx(recalls)
    assert found["per_class"][8] == {
        "name": "class 8",
        "pictures": 0,
        "recall": None,
        "interval": [0.0, 1.0],
    }
    assert found["mean_per_class"] == pytest.approx(np.mean(recalls))
    taken = Counter((int(label), int(row[0])) for row, label in zip(order, labels, strict=True))
    assert found["confusion"] == [[*kind, times] for kind, times in sorted(taken.items())]
    assert accuracy(images, classes, labels) == found["top1"]
    assert found["chance"] == pytest.approx({"top1": 1 / 9, "top5": 5 / 9, "mean_per_class": 1 / 9})
    assert found["largest_class"] == pytest.approx(np.bincount(labels).max() / 300)
    for name in ("top1", "top5", "mean_per_class"):
        low, high = found["intervals"][name]
        assert low < found[name] < high


def test_a_model_that_cannot_tell_classes_apart_scores_nothing() -> None:
    same = np.ones((4, 3)) / 3**0.5
    found = zeroshot(same, same, np.arange(4), list("abcd"))
    assert found["top1"] == 0.0
    assert found["top5"] == 1.0  # of four classes
    assert accuracy(same, same, np.arange(4)) == 0.0


def test_a_tie_is_taken_for_the_other_class_in_the_matrix_too() -> None:
    images, classes, labels, names = answers(90, 6)
    classes[3] = classes[1]
    found = zeroshot(images, classes, labels, names)
    right = {own: times for own, guess, times in found["confusion"] if own == guess}
    for at, entry in enumerate(found["per_class"][:5]):
        assert right.get(at, 0) == pytest.approx(entry["recall"] * entry["pictures"])
    assert 1 not in right
    assert any(own == 1 and guess == 3 for own, guess, _ in found["confusion"])


def test_blocks_of_images_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = zeroshot(*answers(90, 6))
    monkeypatch.setattr(ranks, "BLOCK", 7)
    assert zeroshot(*answers(90, 6)) == whole


def test_all_right_is_not_certain() -> None:
    found = zeroshot(np.eye(4), np.eye(4), np.arange(4), list("abcd"))
    assert found["top1"] == found["mean_per_class"] == 1.0
    for name in ("top1", "top5", "mean_per_class"):
        assert found["intervals"][name] == wilson_interval(4, 4)


def test_a_class_is_the_mean_of_its_sentences_made_unit_length_again() -> None:
    asked: list[str] = []

    def encode(sentences: Sequence[str]) -> np.ndarray:
        asked.extend(sentences)
        return unit(np.array([[len(text), text.count("a"), 1.0] for text in sentences]))

    rows = class_embeddings(encode, ["t-shirt", "rain_coat {x}"], ["a photo of a {}.", "{} {}"])
    assert asked == [
        "a photo of a t-shirt.",
        "t-shirt t-shirt",
        "a photo of a rain coat {x}.",
        "rain coat {x} rain coat {x}",
    ]
    expected = unit(np.stack([encode(asked[:2]).mean(axis=0), encode(asked[2:4]).mean(axis=0)]))
    np.testing.assert_allclose(rows, expected)


def test_templates_are_read_and_those_without_a_place_for_the_class_refused() -> None:
    assert read_templates("a {}. | the {}.|") == ["a {}.", "the {}."]
    assert read_templates("") == list(TEMPLATES)
    assert all("{}" in template for template in TEMPLATES)
    with pytest.raises(ConfigError, match=r"has no \{\} for the class"):
        read_templates("a {}.|a photo")
