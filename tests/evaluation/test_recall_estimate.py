from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from lapclip.cli.eval import recall_table
from lapclip.evaluation import recall_estimate as module
from lapclip.evaluation.ranks import ranks
from lapclip.evaluation.recall_estimate import (
    RATINGS,
    RecallEstimate,
    design_effect,
    estimate_recall,
)
from lapclip.evaluation.retrieval import retrieval

from .embeddings import noisy_pairs

GOOD = Path(__file__).parents[2] / "docs" / "good.md"


def estimate_of(
    images: np.ndarray, texts: np.ndarray, owner: np.ndarray, chosen: np.ndarray
) -> RecallEstimate:
    """Estimate from the chosen images with their captions."""
    chosen = np.sort(chosen)
    rows = np.flatnonzero(np.isin(owner, chosen))
    new_owner = np.searchsorted(chosen, owner[rows])
    caption_ranks = ranks(images[chosen], texts[rows], new_owner)[0]
    estimate = estimate_recall(caption_ranks, new_owner, len(chosen))
    assert estimate
    return estimate


def test_among_1000_candidates_it_is_the_measured_recall() -> None:
    scores = retrieval(*noisy_pairs(1000, 1.0, 2), among_1000=True)
    estimate = scores["r1_among_1000"]
    assert estimate["measured"]
    assert estimate["recall"] == pytest.approx(scores["t2i_r1"])
    assert estimate["interval"] == pytest.approx(scores["intervals"]["t2i_r1"])


def test_among_more_candidates_it_is_the_mean_over_all_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REFERENCE_CANDIDATES", 4)
    images, texts, owner = noisy_pairs(8, 1.0)
    hits = []
    for chosen in itertools.combinations(range(8), 4):
        rows = np.array(chosen)
        hits.append(retrieval(images[rows], texts[rows], np.arange(4))["t2i_r1"])
    estimate = estimate_recall(ranks(images, texts, owner)[0], owner, 8)
    assert estimate
    assert estimate.measured
    assert estimate.recall == pytest.approx(np.mean(hits))


@pytest.mark.parametrize(
    ("noise", "width", "expected"), [(0.5, 24, 0.08), (0.3, 24, 0.38), (0.3, 64, 0.48)]
)
def test_the_predicted_interval_holds_the_recall_among_1000(
    noise: float, width: int, expected: float
) -> None:
    images, texts, owner = noisy_pairs(1000, noise, 3, width=width)
    truth = retrieval(images, texts, owner)["t2i_r1"]
    assert truth == pytest.approx(expected, abs=0.01)
    draw = np.random.default_rng(0)
    for candidates in (26, 100, 300):
        held = 0
        for _ in range(20):
            estimate = estimate_of(images, texts, owner, draw.permutation(1000)[:candidates])
            assert not estimate.measured
            low, high = estimate.interval
            assert low < estimate.recall < high
            held += low <= truth <= high
        assert held >= 16, (candidates, truth)


def test_more_candidates_narrow_the_interval() -> None:
    pairs = noisy_pairs(1000, 1.0, 2, width=24)
    widths = []
    for candidates in (26, 100, 300, 900):
        low, high = estimate_of(*pairs, np.arange(candidates)).interval
        widths.append(high - low)
    assert widths == sorted(widths, reverse=True)


def test_repeated_captions_are_no_more_information() -> None:
    owner = np.arange(60)
    caption_ranks = np.random.default_rng(0).geometric(0.3, 60)
    once = estimate_recall(caption_ranks, owner, 60)
    five_times = estimate_recall(np.repeat(caption_ranks, 5), np.repeat(owner, 5), 60)
    assert once
    assert five_times
    assert five_times.interval == pytest.approx(once.interval)


def test_the_design_effect_lies_between_one_and_the_group_size() -> None:
    draw = np.random.default_rng(0)
    groups = np.repeat(np.arange(2000), 4)
    assert design_effect(draw.normal(size=8000), groups) == pytest.approx(1, abs=0.1)
    assert design_effect(draw.normal(size=2000)[groups], groups) == pytest.approx(4, abs=0.01)
    assert design_effect(np.ones(8000), groups) == 4


def test_a_perfect_result_is_not_certain_and_a_guess_is_chance() -> None:
    perfect = estimate_recall(np.ones(100, dtype=int), np.repeat(np.arange(20), 5), 20)
    assert perfect
    assert perfect.interval[0] < 0.7
    assert perfect.interval[1] > 0.99
    guess = estimate_recall(np.arange(500) % 100 + 1, np.repeat(np.arange(100), 5), 100)
    assert guess
    assert guess.rating == "chance"


def test_a_handful_of_candidates_says_nothing() -> None:
    assert estimate_recall(np.ones(4, dtype=int), np.arange(4), 4) is None


@pytest.mark.parametrize(
    ("low", "high", "rating"),
    [
        (0.22, 0.28, "good"),
        (0.03, 0.16, "weak to fair"),
        (0.04, 0.3, "weak to good"),
        (0.5, 1.0, "strong"),
        (0.0, 0.001, "chance"),
    ],
)
def test_an_interval_over_two_words_gets_both(low: float, high: float, rating: str) -> None:
    assert RecallEstimate((low + high) / 2, (low, high), measured=True).rating == rating


def test_the_page_lists_the_words_and_where_they_begin() -> None:
    rows = re.findall(r"^\| (\w+) \| (?:below|from) ([\d.]+) % \|", GOOD.read_text("utf-8"), re.M)
    words = list(RATINGS)
    assert [word for word, _ in rows] == words
    starts = [100 * RATINGS[word] for word in words[1:]]
    assert [float(value) for _, value in rows] == pytest.approx([starts[0], *starts])


def test_the_table_says_what_it_comes_to_among_1000() -> None:
    few = recall_table(retrieval(*noisy_pairs(50, 1.0, 2), among_1000=True))
    (line,) = [line for line in few if "among 1,000" in line]
    assert re.search(r"among 1,000 +\d+\.\d% +\d+\.\d% to \d+\.\d%, predicted: \[bold]\w+", line)
    many = recall_table(retrieval(*noisy_pairs(1000, 1.0), among_1000=True))
    assert any("among 1,000" in line and ", measured: " in line for line in many)
    assert not any(
        "among" in line for line in recall_table(retrieval(*noisy_pairs(3, 1.0), among_1000=True))
    )
