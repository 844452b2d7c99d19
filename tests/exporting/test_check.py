"""What an export may lose before it fails its check."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lapclip.exporting.check import LEAST_COSINE, Embedded, compare, cosines, recall_lost

COUNT = 200
TRUTH = Embedded(np.eye(COUNT, COUNT + 1), np.eye(COUNT, COUNT + 1), np.arange(COUNT))
"""Each caption finds its own image. The last number is 0 in all of them."""


def turned(rows: np.ndarray, cosine: float) -> np.ndarray:
    """Unit-length rows with that cosine to what they were, in a direction that changes no answer."""
    made = cosine * rows
    made[:, -1] = (1 - cosine**2) ** 0.5
    return made


@pytest.mark.parametrize("tower", ["images", "texts"])
@pytest.mark.parametrize("cosine", [LEAST_COSINE - 0.001, LEAST_COSINE + 0.001])
def test_one_tower_that_is_not_close_is_enough_to_fail(tower: str, cosine: float) -> None:
    found = compare(TRUTH, replace(TRUTH, **{tower: turned(getattr(TRUTH, tower), cosine)}))
    assert found["recall_before"] == found["recall_after"] == 1
    assert found["cosine"][tower.removesuffix("s")]["mean"] == pytest.approx(cosine)
    assert min(close["mean"] for close in found["cosine"].values()) == pytest.approx(cosine)
    assert max(close["mean"] for close in found["cosine"].values()) == pytest.approx(1)
    assert found["passed"] is (cosine > LEAST_COSINE)


@pytest.mark.parametrize(("wrong", "passes"), [(2, True), (3, False)])
def test_more_than_a_point_of_recall_fails_though_both_towers_are_close(
    wrong: int, passes: bool
) -> None:
    images = TRUTH.images.copy()
    second = np.arange(1, 2 * wrong, 2)  # hardly differ from the images before them
    images[second] = 0.999 * images[second - 1] + (1 - 0.999**2) ** 0.5 * images[second]
    before = replace(TRUTH, images=images, texts=images)
    texts = images.copy()
    texts[second] = images[second - 1]
    after = replace(before, texts=texts)
    found = compare(before, after)
    assert min(close["mean"] for close in found["cosine"].values()) > 0.9999
    assert found["recall_before"] == 1
    assert found["recall_after"] == pytest.approx(1 - wrong / COUNT)
    assert found["passed"] is passes
    assert recall_lost(before, after) == pytest.approx((wrong / COUNT, 2 * wrong**0.5 / COUNT))


def test_cosines_do_not_depend_on_length() -> None:
    assert cosines(TRUTH.images, 3 * turned(TRUTH.images, 0.5)) == pytest.approx(
        {"mean": 0.5, "worst": 0.5}
    )
