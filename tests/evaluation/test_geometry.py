from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from lapclip.evaluation.geometry import similarities
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


def test_similarities_need_no_copy_of_all_embeddings() -> None:
    images = np.random.default_rng(0).normal(size=(40_000, 32)).astype(np.float32)
    owner = np.arange(40_000)
    tracemalloc.start()
    similarities(images, images, owner)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < images.nbytes
