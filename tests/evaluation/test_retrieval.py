from __future__ import annotations

import numpy as np
import pytest

from lapclip.evaluation import ranks as module
from lapclip.evaluation import retrieval as retrieval_module
from lapclip.evaluation.ranks import ranks
from lapclip.evaluation.retrieval import batch_accuracy, in_batches, retrieval

from .embeddings import noisy_pairs, unit


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


def test_recall_agrees_with_sorting_every_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    images, texts, owner = noisy_pairs(57, 1.5, 3)
    scores = texts @ images.T
    t2i = [list(np.argsort(-row)).index(mine) for row, mine in zip(scores, owner, strict=True)]
    i2t = [
        min(rank for rank, caption in enumerate(np.argsort(-column)) if owner[caption] == image)
        for image, column in enumerate(scores.T)
    ]
    for block in (1024, 10):
        monkeypatch.setattr(module, "BLOCK", block)
        result = retrieval(images, texts, owner)
        for rank in (1, 5, 10):
            assert result[f"t2i_r{rank}"] == pytest.approx(np.mean(np.array(t2i) < rank))
            assert result[f"i2t_r{rank}"] == pytest.approx(np.mean(np.array(i2t) < rank))
        for way, places in (("t2i", np.array(t2i)), ("i2t", np.array(i2t))):
            assert result[f"{way}_mean_reciprocal_rank"] == pytest.approx(np.mean(1 / (places + 1)))
            for name in ("r1", "r10", "mean_reciprocal_rank"):
                low, high = result["intervals"][f"{way}_{name}"]
                assert low <= result[f"{way}_{name}"] <= high
                assert low < high or name == "r1"


def test_other_captions_of_the_same_image_are_not_mistakes() -> None:
    images = np.eye(2)
    texts = unit(np.array([[1.0, 0.1], [1.0, 0.2], [0.0, 1.0]]))
    owner = np.array([0, 0, 1])
    t2i, i2t = ranks(images, texts, owner)
    assert i2t.tolist() == [1, 1]
    assert t2i.tolist() == [1, 1, 1]


def test_an_image_without_captions_is_a_candidate_but_not_a_question() -> None:
    images = unit(np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]]))
    scores = retrieval(images, np.eye(2), np.array([0, 1]))
    assert scores["candidates"] == 3
    assert scores["i2t_r1"] == 1.0
    assert scores["chances"]["i2t_r1"] == pytest.approx(1 / 2)


def test_chance_of_several_captions_is_not_that_of_one() -> None:
    scores = retrieval(*noisy_pairs(30, 1.0, 5))
    chances = scores["chances"]
    assert [scores["chance"], chances["t2i_r1"]] == pytest.approx([1 / 30, 1 / 30])
    assert chances["t2i_r10"] == pytest.approx(10 / 30)
    assert chances["i2t_r1"] == pytest.approx(5 / 150)
    assert chances["i2t_r5"] == pytest.approx(
        1 - np.prod([(145 - k) / (150 - k) for k in range(5)])
    )
    assert chances["t2i_mean_reciprocal_rank"] == pytest.approx(np.mean(1 / np.arange(1, 31)))


def test_accuracy_in_batches_of_random_embeddings_is_chance() -> None:
    draw = np.random.default_rng(0)
    images, texts = unit(draw.normal(size=(240, 8))), unit(draw.normal(size=(240, 8)))
    result = batch_accuracy(images, texts, 12)
    assert result["interval"][0] < 1 / 12 < result["interval"][1]
    assert result["chance"] == pytest.approx(1 / 12)


def test_accuracy_in_batches_of_one_partition_is_plain_accuracy() -> None:
    images, texts, _ = noisy_pairs(24, 1.0)
    scores = texts @ images.T
    right = (
        (scores.argmax(1) == np.arange(24)).mean() + (scores.argmax(0) == np.arange(24)).mean()
    ) / 2
    assert batch_accuracy(images, texts, 24, repeats=3)["accuracy"] == pytest.approx(right)


def test_accuracy_in_batches_pairs_an_image_with_its_own_caption_where_others_have_none() -> None:
    images = np.eye(6)
    owner = np.array([1, 1, 3, 4])
    found = in_batches(images, images[owner], owner, 3)["in_batch"]
    assert (found["accuracy"], found["size"]) == (1.0, 3)
    assert in_batches(images, images[owner], owner, 4) == {}
    assert in_batches(images, images[owner], owner, None) == {}


def test_batches_are_scored_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    images, texts, _ = noisy_pairs(120, 1.0)
    whole = batch_accuracy(images, texts, 12, repeats=5)
    monkeypatch.setattr(retrieval_module, "BLOCK", 12)
    assert batch_accuracy(images, texts, 12, repeats=5) == whole
