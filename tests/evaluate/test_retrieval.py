from __future__ import annotations

import numpy as np
import pytest

from lapclip.evaluate import retrieval as module
from lapclip.evaluate.retrieval import (
    batch_accuracy,
    bootstrap_interval,
    caption_ranks,
    picture_ranks,
    retrieval,
    similarities,
)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def noisy_pairs(count: int, noise: float, captions_each: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    images = unit(draw.normal(size=(count, 16)))
    owner = np.repeat(np.arange(count), captions_each)
    return images, unit(images[owner] + noise * draw.normal(size=(len(owner), 16))), owner


def test_perfect_embeddings_find_everything() -> None:
    scores = retrieval(*noisy_pairs(30, 0.0, 5))
    assert [scores[f"{way}_r{rank}"] for way in ("t2i", "i2t") for rank in (1, 5, 10)] == [1.0] * 6
    assert scores["candidates"] == 30
    assert scores["captions"] == 150
    assert scores["chance"] == pytest.approx(1 / 30)


def test_a_collapsed_model_finds_nothing() -> None:
    same = np.ones((20, 4)) / 2
    scores = retrieval(same, same, np.arange(20))
    assert scores["t2i_r10"] == scores["i2t_r10"] == 0.0


def test_similarities_are_those_of_the_whole_matrix() -> None:
    images, texts, owner = noisy_pairs(23, 0.7, 3)
    all_pairs = images @ texts.T
    two_pictures = (images @ images.T)[~np.eye(23, dtype=bool)]
    two_captions = (texts @ texts.T)[~np.eye(69, dtype=bool)]
    found = similarities(images.astype(np.float32), texts.astype(np.float32), owner)
    assert found == pytest.approx(
        {
            "own": np.mean([all_pairs[mine, caption] for caption, mine in enumerate(owner)]),
            "mean": all_pairs.mean(),
            "spread": all_pairs.std(),
            "pictures": two_pictures.mean(),
            "captions": two_captions.mean(),
        },
        abs=1e-6,
    )
    same = np.ones((20, 4)) / 2
    assert similarities(same, same, np.arange(20)) == {
        "own": 1.0, "mean": 1.0, "spread": 0.0, "pictures": 1.0, "captions": 1.0
    }  # fmt: skip
    assert retrieval(images, texts, owner)["similarities"].keys() == found.keys()


def test_recall_agrees_with_sorting_every_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    images, texts, owner = noisy_pairs(57, 1.5, 3)
    scores = texts @ images.T
    t2i = [list(np.argsort(-row)).index(mine) for row, mine in zip(scores, owner, strict=True)]
    i2t = [
        min(rank for rank, caption in enumerate(np.argsort(-column)) if owner[caption] == picture)
        for picture, column in enumerate(scores.T)
    ]
    for block in (1024, 10):
        monkeypatch.setattr(module, "BLOCK", block)
        result = retrieval(images, texts, owner)
        for rank in (1, 5, 10):
            assert result[f"t2i_r{rank}"] == pytest.approx(np.mean(np.array(t2i) < rank))
            assert result[f"i2t_r{rank}"] == pytest.approx(np.mean(np.array(i2t) < rank))


def test_other_captions_of_the_same_picture_are_not_mistakes() -> None:
    images = np.eye(2)
    texts = unit(np.array([[1.0, 0.1], [1.0, 0.2], [0.0, 1.0]]))
    owner = np.array([0, 0, 1])
    assert picture_ranks(images, texts, owner).tolist() == [0, 0]
    assert caption_ranks(images, texts, owner).tolist() == [0, 0, 0]


def test_interval_holds_the_true_rate_and_narrows_with_more_pairs() -> None:
    draw = np.random.default_rng(1)
    few, many = (draw.random(count) < 0.3 for count in (50, 5000))
    low, high = bootstrap_interval(many.astype(float), np.ones(5000))
    assert low < 0.3 < high
    few_low, few_high = bootstrap_interval(few.astype(float), np.ones(50))
    assert high - low < (few_high - few_low) / 5


def test_accuracy_in_batches_of_random_embeddings_is_chance() -> None:
    draw = np.random.default_rng(0)
    images, texts = unit(draw.normal(size=(240, 8))), unit(draw.normal(size=(240, 8)))
    result = batch_accuracy(images, texts, 12)
    assert result["interval"][0] < 1 / 12 < result["interval"][1]
    assert result["chance"] == pytest.approx(1 / 12)


def test_accuracy_in_batches_of_one_partition_is_plain_accuracy() -> None:
    images, texts, _ = noisy_pairs(24, 1.0)
    scores = texts @ images.T
    right = ((scores.argmax(1) == np.arange(24)).mean() + (scores.argmax(0) == np.arange(24)).mean()) / 2
    assert batch_accuracy(images, texts, 24, repeats=3)["accuracy"] == pytest.approx(right)
