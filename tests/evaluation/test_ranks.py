"""Ranks against naive loops; exactness whatever the blocks."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lapclip.evaluation import ranks as module
from lapclip.evaluation.ranks import best_images, chance_metrics, ranks
from tests.conftest import examples

from .embeddings import noisy_pairs, unit


def naive_ranks(
    images: np.ndarray, texts: np.ndarray, owner: np.ndarray
) -> tuple[list[int], list[int]]:
    """One question at a time, one candidate at a time."""
    t2i, i2t = [], []
    for text, mine in zip(texts, owner, strict=True):
        own = float(text @ images[mine])
        t2i.append(
            1 + sum(not float(text @ image) < own for at, image in enumerate(images) if at != mine)
        )
    for at, image in enumerate(images):
        best = max(
            (float(text @ image) for text, mine in zip(texts, owner, strict=True) if mine == at),
            default=-np.inf,
        )
        wrong = [float(text @ image) for text, mine in zip(texts, owner, strict=True) if mine != at]
        i2t.append(1 + sum(not score < best for score in wrong))
    return t2i, i2t


@settings(max_examples=examples(40))
@given(data=st.data())
def test_ranks_are_those_of_naive_loops_with_ties_and_images_without_captions(
    data: st.DataObject,
) -> None:
    pictures, captions = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 15))
    # Small whole numbers: sums are exact, and ties are common.
    rows = st.lists(st.integers(-2, 2).map(float), min_size=3, max_size=3)
    images = np.array(data.draw(st.lists(rows, min_size=pictures, max_size=pictures)))
    texts = np.array(data.draw(st.lists(rows, min_size=captions, max_size=captions)))
    owner = np.array(
        data.draw(st.lists(st.integers(0, pictures - 1), min_size=captions, max_size=captions))
    )
    block = data.draw(st.integers(1, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        t2i, i2t = ranks(images, texts, owner)
    assert (t2i.tolist(), i2t.tolist()) == naive_ranks(images, texts, owner)


def test_ranks_do_not_depend_on_the_blocks_even_where_candidates_nearly_tie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal and nearly equal rows: their float32 products differ in the last bit from one blocking to the next."""
    draw = np.random.default_rng(0)
    few = unit(draw.normal(size=(7, 96)))
    images = unit(few[draw.integers(7, size=300)] + 1e-7 * draw.normal(size=(300, 96))).astype(
        np.float32
    )
    images[150:] = images[draw.integers(150, size=150)]
    owner = draw.integers(300, size=500)
    texts = unit(images[owner] + 1e-7 * draw.normal(size=(500, 96))).astype(np.float32)
    found = []
    for block in (1024, 64, 7):
        monkeypatch.setattr(module, "BLOCK", block)
        found.append(ranks(images, texts, owner))
    for other in found[1:]:
        np.testing.assert_array_equal(other[0], found[0][0])
        np.testing.assert_array_equal(other[1], found[0][1])
    # An image that is there twice ties with itself: its captions cannot place it first.
    twice = np.array([(images == image).all(axis=1).sum() > 1 for image in images])
    assert twice.any()
    assert (found[0][0][twice[owner]] > 1).all()


def test_products_on_the_grid_are_exact_in_any_order() -> None:
    draw = np.random.default_rng(1)
    one, other = (unit(draw.normal(size=(4, 512))) for _ in range(2))
    one, other = (module.exact(rows, module.grid_scale(rows)) for rows in (one, other))
    for order in (np.arange(512), np.arange(512)[::-1], draw.permutation(512)):
        assert [sum(map(float, a[order] * b[order])) for a, b in zip(one, other, strict=True)] == (
            np.einsum("ne,ne->n", one, other).tolist()
        )


def test_what_is_not_a_number_is_never_found() -> None:
    images, texts, owner = noisy_pairs(6, 0.0)
    images[2] = np.nan
    t2i, i2t = ranks(images, texts, owner)
    assert t2i[2] == 6
    assert i2t[2] == 6
    assert (t2i > 1).all()  # the broken image ties with every right one


def test_memory_is_that_of_a_block_not_of_the_matrix() -> None:
    images, texts, owner = (
        rows.astype(np.float32) if rows.dtype == float else rows for rows in noisy_pairs(8000, 1.0)
    )
    tracemalloc.start()
    ranks(images, texts, owner)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8000 * 8000 * 4 / 4  # the float32 matrix would take 256 MB


@pytest.mark.parametrize("block", [1024, 5])
def test_best_images_are_those_of_a_full_sort(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    images, texts, _ = noisy_pairs(23, 1.0, 2)
    found, scores = best_images(images, texts, 4)
    full = texts @ images.T
    np.testing.assert_array_equal(found, np.argsort(-full, axis=1)[:, :4])
    np.testing.assert_allclose(scores, -np.sort(-full, axis=1)[:, :4], atol=1e-6)


def test_chance_is_that_of_all_orders_counted() -> None:
    """Six candidates in all their orders; questions have one, two and three right answers among them."""
    firsts = []
    for own in (1, 2, 3):
        for order in itertools.permutations(range(6)):
            firsts.append(1 + min(order.index(right) for right in range(own)))
    found = chance_metrics(6, np.array([1, 2, 3]), (1, 5, 10))
    assert found["r1"] == pytest.approx(np.mean(np.array(firsts) <= 1))
    assert found["r5"] == pytest.approx(np.mean(np.array(firsts) <= 5))
    assert found["r10"] == pytest.approx(1.0)
    assert found["mean_reciprocal_rank"] == pytest.approx(np.mean(1 / np.array(firsts)))


def test_chance_of_random_embeddings_is_the_chance_that_is_told() -> None:
    draw = np.random.default_rng(3)
    images, owner = unit(draw.normal(size=(400, 8))), np.repeat(np.arange(400), 5)
    t2i, i2t = ranks(images, unit(draw.normal(size=(2000, 8))), owner)
    for found, told in (
        (t2i, chance_metrics(400, np.ones(1), (10,))),
        (i2t, chance_metrics(2000, np.full(400, 5), (50,))),
    ):
        assert np.mean(1 / found) == pytest.approx(told["mean_reciprocal_rank"], rel=0.2)
    assert (i2t <= 50).mean() == pytest.approx(
        chance_metrics(2000, np.full(400, 5), (50,))["r50"], abs=0.05
    )
