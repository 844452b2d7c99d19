"""The question bank, what is taken from scores for hubness, and what scores tell."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lapclip.evaluation.calibration import (
    FORMAT,
    Calibration,
    keep_calibration,
    read_calibration,
)
from lapclip.evaluation.hubness import (
    CAPTIONS,
    KINDS,
    NEAREST,
    SHARES,
    QuestionBank,
    bank_of,
    choose,
    choose_for_captions,
    closeness,
    own_bank,
    read_bank,
    save_bank,
    t2i_ranks,
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


def test_closeness_is_the_mean_of_the_best_scores_and_the_same_for_equal_images() -> None:
    images, _, _, bank = hubs(1.0)
    images = np.concatenate([images, images[:50]])
    found = closeness(images, {"whole": bank, "short": bank[:10]})
    scores = (
        images.astype(np.float16).astype(np.float64) @ bank.astype(np.float16).astype(np.float64).T
    )
    assert np.allclose(
        found[:, 0], np.sort(scores, axis=1)[:, -NEAREST["whole"] :].mean(axis=1), atol=1e-6
    )
    assert np.allclose(found[:, 1], scores[:, :10].mean(axis=1), atol=1e-6)
    assert np.array_equal(found[IMAGES:], found[:50])
    assert closeness(images, {"whole": bank[:0], "short": bank[:0]}).tolist() == [[0, 0]] * len(
        images
    )


def test_ranks_with_each_share_are_those_of_plain_sorting() -> None:
    images, texts, owner, bank = hubs(1.0)
    close = closeness(images, {"whole": bank, "short": bank[:0]})[:, 0]
    found = t2i_ranks(images, texts, owner, close)
    for row, share in enumerate(SHARES):
        order = np.argsort(-(texts @ images.T - np.float32(share) * close), axis=1, kind="stable")
        assert np.array_equal(found[row], (order == owner[:, None]).argmax(axis=1) + 1)


def test_a_correction_is_used_where_there_are_hubs_and_gains_on_questions_that_chose_nothing() -> (
    None
):
    images, texts, owner, bank = hubs(0.5)
    close = closeness(images, {"whole": bank, "short": bank[:0]})[:, 0]
    found = choose_for_captions(images, texts, owner, close)
    assert found["used"]
    assert 0 < found["gain_low"] < found["gain"] < found["gain_high"]
    assert found["t2i_r1_with"] > found["t2i_r1"] + 0.05
    assert found["share"] > 0


def test_no_correction_where_nothing_shows_a_gain() -> None:
    images, texts, owner, _ = hubs(0.0)
    noise = np.random.default_rng(1).uniform(0, 1, IMAGES).astype(np.float32)
    assert not choose_for_captions(images, texts, owner, noise)["used"]


def test_each_half_is_scored_with_the_share_that_the_other_half_chose() -> None:
    value_SQ = np.zeros((len(SHARES), 40))
    found, row_Q = choose(value_SQ, np.arange(40))
    half = row_Q == row_Q[0]
    value_SQ[3] = 0.1
    value_SQ[5, 0] = 100  # one question that would choose its own share
    found, row_Q = choose(value_SQ, np.arange(40))
    assert set(row_Q.tolist()) == {3, 5}
    assert row_Q[0] == 3, "a question is not scored with what it chose itself"
    assert found["share"] == SHARES[5]
    assert half.any()


def test_a_bank_comes_from_captions_and_is_read_again(tmp_path: Path) -> None:
    things = ["dog", "cat", "horse", "boat", "house"]
    captions = [
        [f"a {things[at % 5]} stands beside tree {at}", "brown dog on a beach"] for at in range(30)
    ]
    bank = bank_of(captions)
    assert bank == bank_of(captions)
    assert len(bank.captions) == len(set(bank.captions)) == 31
    assert any("dog" in phrase for phrase in bank.phrases)
    save_bank(bank, tmp_path / "questions.json")
    assert read_bank(tmp_path / "questions.json") == bank
    (tmp_path / "questions.json").write_text('{"captions": 3}', encoding="utf-8")
    assert read_bank(tmp_path / "questions.json") is None
    assert read_bank(tmp_path / "none.json") is None


def test_a_large_bank_is_drawn_the_same_way_each_time() -> None:
    captions = [[f"caption number {at}"] for at in range(CAPTIONS + 50)]
    assert len(bank_of(captions).captions) == CAPTIONS
    assert bank_of(captions).captions == bank_of(captions).captions


def test_the_bank_that_is_shipped_has_whole_sentences_and_phrases() -> None:
    bank = own_bank()
    assert bank == own_bank()
    texts = [*bank.captions, *bank.phrases]
    assert len(set(bank.captions)) == len(bank.captions) >= 2000
    assert len(set(bank.phrases)) == len(bank.phrases) >= 2000
    assert not [text for text in texts if "{" in text or " a a" in text or "  " in text]
    assert "a dog" in bank.phrases or "dog" in bank.phrases
    assert np.median([len(text.split()) for text in bank.phrases]) < bank.short_below


def test_what_was_measured_on_little_does_not_replace_what_was_measured_on_more(
    tmp_path: Path,
) -> None:
    path = tmp_path / "calibration.safetensors"

    def measured(questions: int, *, own_val: bool = False, model: str = "model") -> Calibration:
        made = calibration()
        whole = {**made.facts["hubness"]["whole"], "questions": questions}
        facts = {
            **made.facts,
            "hubness": {**made.facts["hubness"], "whole": whole},
            "own_val": own_val,
        }
        return Calibration(model, made.vectors, facts)

    def kept() -> int:
        found = read_calibration(path, WIDTH)
        assert found
        return found.worth()[1]

    assert keep_calibration(measured(500), path) is None
    before = keep_calibration(measured(20), path)
    assert before is not None
    assert before.worth() == (False, 500)
    assert (
        keep_calibration(measured(100, own_val=True), path) is None
    )  # the run's own, though fewer
    assert keep_calibration(measured(5000), path) is not None
    assert kept() == 100
    assert (
        keep_calibration(measured(20, model="trained on"), path) is None
    )  # of another model nothing is left
    assert kept() == 20
    (tmp_path / "file").write_text("")
    assert (
        keep_calibration(measured(20), tmp_path / "file" / "x") is None
    )  # cannot be written, and nobody minds


def calibration(*, used: bool = True) -> Calibration:
    draw = np.random.default_rng(0)
    vectors = {name: unit(draw.standard_normal((20, WIDTH))).astype(np.float16) for name in KINDS}
    one = {
        "share": 0.5,
        "used": used,
        "usual": 0.2,
        "t2i_r1": 0.1,
        "t2i_r1_with": 0.2,
        "map": 0.1,
        "map_with": 0.2,
    }
    facts = {
        "format": FORMAT,
        "hubness": {"short_below": 4, **dict.fromkeys(KINDS, one)},
    }
    return Calibration("model", vectors, facts)


def test_a_calibration_is_kept_and_one_that_is_damaged_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "calibration.safetensors"
    keep_calibration(calibration(), path)
    found = read_calibration(path, WIDTH)
    assert found is not None
    assert found.digest == calibration().digest is not None
    assert found.facts == calibration().facts
    assert read_calibration(path, WIDTH + 1) is None
    whole = path.read_bytes()
    other_format = whole.replace(b'format\\": 2', b'format\\": 1')
    assert other_format != whole
    for damaged in (
        whole[:-10],
        whole[:50],
        b"",
        other_format,
        whole.replace(b"short_below", b"other_below"),
    ):
        path.write_bytes(damaged)
        assert read_calibration(path, WIDTH) is None


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -100.0, 10**400], ids=["nan", "inf", "low", "huge"]
)
@pytest.mark.parametrize("name", ["share", "usual", "t2i_r1_with", "short_below", "vectors"])
def test_numbers_that_are_none_are_not_taken(name: str, value: object, tmp_path: Path) -> None:
    """A file may come from elsewhere; a search by it would give nonsense."""
    made, path = calibration(), tmp_path / "calibration.safetensors"
    facts = json.loads(json.dumps(made.facts))
    vectors = dict(made.vectors)
    if name == "vectors":
        vectors["short"] = (
            made.vectors["short"][:0]
            if value == -100.0
            else made.vectors["short"] * np.float16("nan")
        )
    elif name in ("share", "usual", "t2i_r1_with"):
        facts["hubness"]["whole"][name] = value
    else:
        facts["hubness"][name] = value
    keep_calibration(Calibration("model", vectors, facts), path)
    found = read_calibration(path, WIDTH)
    harmless = value == -100.0 and name not in ("share", "vectors")
    assert (found is not None) == harmless


def test_what_is_taken_and_what_is_said_of_a_score() -> None:
    found, close = calibration(), np.array([[0.2, 0.4], [0.6, np.nan]], np.float32)
    assert [found.kind(text) for text in ("a dog", "a dog runs fast")] == ["short", "whole"]
    assert found.less("whole", close) == pytest.approx([0, 0.2])
    assert found.less("short", close) == pytest.approx([0.1, 0])
    assert calibration(used=False).less("whole", close) is None
    assert calibration(used=False).digest is None


def test_words_below_which_a_question_is_short() -> None:
    captions = [f"{'word ' * count}end" for count in [1] * 5 + [9] * 95]
    assert QuestionBank(captions, [], "").short_below == 10
    assert QuestionBank([], [], "").short_below == 0
