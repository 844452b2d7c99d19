"""The caption bank, the correction for hubness, and its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lapclip.evaluation.calibration import Calibration, read_calibration, save_calibration
from lapclip.evaluation.hubness import (
    MAX_BANK_CAPTIONS,
    NEAREST_CAPTIONS,
    SHARES,
    CaptionBank,
    cross_choose,
    draw_bank,
    fit_correction,
    hubness_of,
    own_image_ranks,
    read_bank,
    save_bank,
)

from .embeddings import unit

IMAGES, WIDTH = 120, 32


def hubs(strength: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images, two captions of each, and a bank. All captions have something in common, and some images have much more
    of that than others."""
    draw = np.random.default_rng(seed)
    common = unit(draw.standard_normal((1, WIDTH)))
    own = unit(draw.standard_normal((IMAGES, WIDTH)))
    images = unit(own + strength * draw.exponential(1, (IMAGES, 1)) * common)
    owner = np.repeat(np.arange(IMAGES), 2)
    texts = unit(own[owner] + 0.9 * common + 0.25 * draw.standard_normal((len(owner), WIDTH)))
    bank = unit(unit(draw.standard_normal((600, WIDTH))) + 0.9 * common)
    return images.astype(np.float32), texts.astype(np.float32), owner, bank.astype(np.float32)


def test_hubness_is_the_mean_of_the_best_scores_and_the_same_for_equal_images() -> None:
    images, _, _, bank = hubs(1.0)
    images = np.concatenate([images, images[:50]])
    found = hubness_of(images, bank)
    scores = (
        images.astype(np.float16).astype(np.float64) @ bank.astype(np.float16).astype(np.float64).T
    )
    nearest = np.sort(scores, axis=1)[:, -NEAREST_CAPTIONS:]
    assert np.allclose(found, nearest.mean(axis=1), atol=1e-6)
    assert np.allclose(hubness_of(images, bank[:10]), scores[:, :10].mean(axis=1), atol=1e-6)
    assert np.array_equal(found[IMAGES:], found[:50])
    assert hubness_of(images, bank[:0]).tolist() == [0] * len(images)


def test_ranks_with_each_share_are_those_of_plain_sorting() -> None:
    images, texts, owner, bank = hubs(1.0)
    hubness = hubness_of(images, bank)
    found = own_image_ranks(images, texts, owner, hubness)
    for row, share in enumerate(SHARES):
        order = np.argsort(-(texts @ images.T - np.float32(share) * hubness), axis=1, kind="stable")
        assert np.array_equal(found[row], (order == owner[:, None]).argmax(axis=1) + 1)


def test_a_correction_is_used_where_there_are_hubs_and_gains_on_questions_that_chose_nothing() -> (
    None
):
    images, texts, owner, bank = hubs(0.5)
    found = fit_correction(images, texts, owner, hubness_of(images, bank))
    assert found.used
    assert 0 < found.gain_low < found.gain < found.gain_high
    assert found.recalls["t2i_r1_with"] > found.recalls["t2i_r1"] + 0.05
    assert found.share > 0


def test_no_correction_where_nothing_shows_a_gain() -> None:
    images, texts, owner, _ = hubs(0.0)
    noise = np.random.default_rng(1).uniform(0, 1, IMAGES).astype(np.float32)
    assert not fit_correction(images, texts, owner, noise).used


def test_each_half_is_scored_with_the_share_that_the_other_half_chose() -> None:
    values = np.zeros((len(SHARES), 40))
    values[3] = 0.1
    values[5, 0] = 100  # one query that would choose its own share
    rows = cross_choose(values, np.arange(40))
    assert set(rows.tolist()) == {3, 5}
    assert rows[0] == 3, "a query is not scored with what it chose itself"


def test_a_bank_comes_from_captions_and_is_read_again(tmp_path: Path) -> None:
    things = ["dog", "cat", "horse", "boat", "house"]
    captions = [
        [f"a {things[at % 5]} stands beside tree {at}", "brown dog on a beach"] for at in range(30)
    ]
    bank = draw_bank(captions)
    assert bank == draw_bank(captions)
    assert len(bank.captions) == len(set(bank.captions)) == 31
    save_bank(bank, tmp_path / "questions.json")
    assert read_bank(tmp_path / "questions.json") == bank
    (tmp_path / "questions.json").write_text('{"captions": 3}', encoding="utf-8")
    assert read_bank(tmp_path / "questions.json") is None
    assert read_bank(tmp_path / "none.json") is None


def test_a_large_bank_is_drawn_the_same_way_each_time() -> None:
    captions = [[f"caption number {at}"] for at in range(MAX_BANK_CAPTIONS + 50)]
    assert len(draw_bank(captions).captions) == MAX_BANK_CAPTIONS
    assert draw_bank(captions).captions == draw_bank(captions).captions


def calibration(**changes: Any) -> Calibration:
    draw = np.random.default_rng(0)
    made = Calibration(
        model="model",
        bank=unit(draw.standard_normal((20, WIDTH))).astype(np.float16),
        share=0.5,
        usual_hubness=0.2,
        min_words=4,
        recall_before=0.1,
        recall_after=0.2,
    )
    return replace(made, **changes)


def test_a_calibration_is_kept_and_one_that_is_damaged_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "calibration.safetensors"
    save_calibration(calibration(), path)
    found = read_calibration(path, WIDTH)
    assert found is not None
    assert found.digest == calibration().digest is not None
    made = calibration()
    assert replace(found, bank=made.bank) == made
    assert np.array_equal(found.bank, made.bank)
    assert read_calibration(path, WIDTH + 1) is None
    whole = path.read_bytes()
    (tmp_path / "file").write_text("")
    save_calibration(calibration(), tmp_path / "file" / "x")  # it cannot be written: no error
    other_format = whole.replace(b'format\\": 4', b'format\\": 1')
    assert other_format != whole
    for damaged in (
        whole[:-10],
        whole[:50],
        b"",
        other_format,
        whole.replace(b"min_words", b"min_lines"),
    ):
        path.write_bytes(damaged)
        assert read_calibration(path, WIDTH) is None


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -100.0, 10**400], ids=["nan", "inf", "low", "huge"]
)
@pytest.mark.parametrize("name", ["share", "usual_hubness", "recall_after", "min_words", "bank"])
def test_numbers_that_are_none_are_not_taken(name: str, value: float, tmp_path: Path) -> None:
    """A file may come from elsewhere; a search by it would give nonsense."""
    made, path = calibration(), tmp_path / "calibration.safetensors"
    changes: dict[str, Any] = {name: value}
    if name == "bank":
        changes["bank"] = made.bank * np.float16("nan")
        if value == -100.0:
            changes["bank"] = made.bank[:0]
    save_calibration(replace(made, **changes), path)
    found = read_calibration(path, WIDTH)
    harmless = value == -100.0 and name not in ("share", "bank")
    assert (found is not None) == harmless


def test_only_long_queries_are_corrected() -> None:
    made = calibration()
    assert [made.corrects(text) for text in ("a dog", "a dog runs fast")] == [False, True]
    hubness = np.array([0.2, 0.6, np.nan], np.float32)
    assert made.penalty(hubness) == pytest.approx([0, 0.2, 0])
    unused = calibration(share=0.0)
    assert not unused.corrects("a dog runs fast")
    assert unused.digest is None


def test_words_from_which_on_a_query_is_corrected() -> None:
    captions = [f"{'word ' * count}end" for count in [1] * 5 + [9] * 95]
    assert CaptionBank(captions).min_words == 10
    assert CaptionBank([]).min_words == 0
