"""CCA in closed form, scored on pairs they were not fitted to, and whether captions belong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lapclip.evaluation.closed_form import (
    Asked,
    Ranks,
    cross_validate,
    fit_cca,
    predict_trained,
    relation,
)


def pairs(
    count: int, features: tuple[int, int] = (60, 80), noise: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Two tables that share ten hidden values a row, each seen through a map of its own and with noise."""
    torch.manual_seed(0)
    hidden = torch.randn(count, 10)
    first, second = (
        hidden @ torch.randn(10, width) + noise * torch.randn(count, width) for width in features
    )
    return first, second


@pytest.mark.parametrize("count", [40, 300], ids=["fewer rows than features", "more"])
def test_cca_is_what_its_definition_says(count: int) -> None:
    image, text = pairs(count)
    maps = fit_cca(image, text, shrink=0.3, width=5, power=0)
    x, y = ((part - part.mean(0)).double() for part in (image, text))
    covariances = [part.T @ part / count for part in (x, y)]
    roots = []
    for covariance in covariances:
        values, vectors = torch.linalg.eigh(
            covariance + 0.3 * covariance.diagonal().mean() * torch.eye(len(covariance))
        )
        roots.append(vectors @ torch.diag(values.rsqrt()) @ vectors.T)
    left, _, right = torch.linalg.svd(roots[0] @ (x.T @ y / count) @ roots[1])
    first, second = x @ roots[0] @ left[:, :5], y @ roots[1] @ right[:5].T
    expected = torch.nn.functional.normalize(first) @ torch.nn.functional.normalize(second).T
    assert np.abs(maps.images(image) @ maps.texts(text).T - expected.numpy()).max() < 1e-3


def test_recall_is_that_of_pairs_the_maps_have_not_seen() -> None:
    image, text = pairs(200)
    owner = np.arange(200)
    true = cross_validate(lambda i, t: fit_cca(i, t, 0.1, 10), image, text, owner).recall()
    shuffled = cross_validate(
        lambda i, t: fit_cca(i, t, 0.1, 10), image, text[torch.randperm(200)], owner
    ).recall()
    assert true["t2i_r1"] > 0.9
    assert true["t2i_r1_low"] <= true["t2i_r1"] <= true["t2i_r1_high"]
    assert shuffled["t2i_r1"] < 0.1  # by chance one of 40


@pytest.mark.parametrize("count", [40, 100])
def test_captions_that_are_all_the_same_find_nothing(count: int) -> None:
    image, _ = pairs(count)
    found = cross_validate(fit_cca, image, torch.ones(count, 80), np.arange(count)).recall()
    assert found["t2i_r1"] <= 0.2
    assert relation(image, torch.ones(count, 80)).unrelated


def test_several_captions_of_an_image_are_in_one_fold() -> None:
    image, text = pairs(100)
    owner = np.repeat(np.arange(100), 2)
    found = cross_validate(lambda i, t: fit_cca(i, t, 0.1, 10), image, text[owner], owner)
    assert (len(found.t2i_M), len(found.i2t_N), found.candidates) == (200, 100, 20)
    # Captions of one image are equal here: had one of them been learnt from, nothing would tell folds apart.
    noise = cross_validate(
        lambda i, t: fit_cca(i, t, 0.1, 10), torch.randn(100, 60), text[owner], owner
    ).recall()
    assert noise["t2i_r1"] < 0.2


def test_fewer_candidates_are_what_drawing_some_would_give() -> None:
    ranked = Ranks(np.array([1, 2, 3, 10]), np.ones(4, dtype=int), np.arange(4), 10)
    assert ranked.expected_first(10) == 0.25
    assert ranked.expected_first(1) == 1
    # Of two candidates the other is one of nine: better in none, one, two, all of them.
    assert ranked.expected_first(2) == pytest.approx((1 + 8 / 9 + 7 / 9 + 0) / 4)


def test_prediction_rises_with_images_and_falls_with_candidates() -> None:
    image, text = pairs(200, noise=4)
    found = cross_validate(lambda i, t: fit_cca(i, t, 1.0, 10), image, text, np.arange(200))
    assert found.fall > 0
    few, more, crowded = (
        predict_trained(found.recall(), found.fall, Asked(160, 40, *asked))
        for asked in ((160, 40), (1600, 40), (160, 400))
    )
    assert crowded["t2i_r1"] < few["t2i_r1"] < more["t2i_r1"]
    assert few["t2i_r1_low"] < few["t2i_r1"] < few["t2i_r1_high"]


def test_a_better_one_is_told_from_an_equal_one() -> None:
    image, text = pairs(200)
    owner = np.arange(200)
    good, noisy = (
        cross_validate(fit_cca, image, text + extra, owner)
        for extra in (0.0, 8 * torch.randn(200, 80))
    )
    assert good.beats(noisy)
    assert not noisy.beats(good)
    assert not good.beats(good)


def test_true_and_shuffled_captions_are_told_apart() -> None:
    image, text = pairs(60, noise=2)
    assert not relation(image, text).unrelated
    assert relation(image, text[torch.randperm(60)]).unrelated
    assert relation(image, text.roll(1, 0)).unrelated
