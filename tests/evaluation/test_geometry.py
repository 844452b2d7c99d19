from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from lapclip.evaluation import geometry as module
from lapclip.evaluation import ranks
from lapclip.evaluation.geometry import geometry, similarities, similarity_histograms, uniformity
from lapclip.evaluation.retrieval import retrieval

from .embeddings import noisy_pairs


def test_similarities_are_those_of_the_whole_matrix() -> None:
    images, texts, owner = noisy_pairs(23, 0.7, 3)
    all_pairs = images @ texts.T
    two_images = (images @ images.T)[~np.eye(23, dtype=bool)]
    two_captions = (texts @ texts.T)[~np.eye(69, dtype=bool)]
    found = similarities(images.astype(np.float32), texts.astype(np.float32), owner)
    assert found == pytest.approx(
        {
            "own": np.mean([all_pairs[mine, caption] for caption, mine in enumerate(owner)]),
            "mean": all_pairs.mean(),
            "spread": all_pairs.std(),
            "pictures": two_images.mean(),
            "captions": two_captions.mean(),
        },
        abs=1e-6,
    )
    same = np.ones((20, 4)) / 2
    assert similarities(same, same, np.arange(20)) == {
        "own": 1.0, "mean": 1.0, "spread": 0.0, "pictures": 1.0, "captions": 1.0
    }  # fmt: skip
    assert retrieval(images, texts, owner)["similarities"].keys() == found.keys()


def test_geometry_is_that_of_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    images, texts, owner = noisy_pairs(13, 0.7, 2)
    monkeypatch.setattr(ranks, "BLOCK", 5)
    found = geometry(images, texts, owner)
    assert found["modality_gap"] == pytest.approx(
        math.dist(images.mean(axis=0), texts.mean(axis=0))
    )
    distances = [
        math.dist(images[mine], text) ** 2 for mine, text in zip(owner, texts, strict=True)
    ]
    assert found["alignment"] == pytest.approx(np.mean(distances))
    for name, rows in (("pictures", images), ("captions", texts)):
        pairs = [
            math.exp(-2 * math.dist(one, other) ** 2)
            for at, one in enumerate(rows)
            for number, other in enumerate(rows)
            if at != number
        ]
        assert found[f"uniformity_{name}"] == pytest.approx(math.log(np.mean(pairs)))


def test_geometry_of_classes_is_that_of_a_caption_for_each_image() -> None:
    images, rows, _ = noisy_pairs(12, 0.5)
    labels = np.arange(12) % 4
    found = geometry(images, rows[:4], np.arange(12), labels)
    plain = geometry(images, rows[labels], np.arange(12))
    for name in ("modality_gap", "alignment", "uniformity_pictures"):
        assert found[name] == pytest.approx(plain[name])
    assert found["uniformity_captions"] == uniformity(rows[:4])


def test_similarities_need_no_copy_of_all_embeddings() -> None:
    images = np.random.default_rng(0).normal(size=(40_000, 32)).astype(np.float32)
    owner = np.arange(40_000)
    tracemalloc.start()
    similarities(images, images, owner)
    similarity_histograms(images, images, owner)
    geometry_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert geometry_peak < images.nbytes


def test_a_collapsed_model_has_uniformity_zero_and_one_image_has_none() -> None:
    assert uniformity(np.ones((20, 4)) / 2) == pytest.approx(0)
    assert uniformity(np.ones((1, 4)) / 2) == 0.0


def test_uniformity_of_many_is_that_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _, _ = noisy_pairs(2000, 0.0)
    whole = uniformity(rows)
    monkeypatch.setattr(module, "MOST_ROWS", 500)
    assert uniformity(rows) == pytest.approx(whole, abs=0.05)
    assert uniformity(rows) != whole


def test_histograms_are_shares_and_true_pairs_lie_higher() -> None:
    found = similarity_histograms(*noisy_pairs(200, 0.2, 3))
    assert sum(found["own"]) == pytest.approx(1)
    assert sum(found["other"]) == pytest.approx(1)
    middles = (np.array(found["edges"][1:]) + found["edges"][:-1]) / 2
    assert middles @ found["own"] > 0.5 > middles @ found["other"]
    one = similarity_histograms(*noisy_pairs(1, 0.5))
    assert sum(one["own"]) == pytest.approx(1)
