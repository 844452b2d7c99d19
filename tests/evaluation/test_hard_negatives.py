from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lapclip.evaluation import hard_negatives as module
from lapclip.evaluation.hard_negatives import (
    KINDS,
    Wording,
    choose_negatives,
    most_confused,
    negatives,
)

from .embeddings import noisy_pairs, unit

ANIMALS, COLOURS, PLACES = (
    ("cat", "dog", "owl", "fox", "hen"),
    ("red", "blue", "green", "grey"),
    ("in the snow", "by night", "at sea"),
)
SCENES = [(animal, colour, place) for animal in ANIMALS for colour in COLOURS for place in PLACES]
CAPTIONS = [
    [f"a {colour} {animal} {place}", f"the {animal}, {colour}, {place}"]
    for animal, colour, place in SCENES
]


def embedded(
    scenes: Sequence[tuple[str, str, str]], parts: Sequence[int], seed: int = 0
) -> np.ndarray:
    """What a model would make of scenes if it saw these parts of them only."""
    draw = np.random.default_rng(seed)
    known = {
        (part, word): draw.normal(size=16)
        for part in range(3)
        for word in (ANIMALS, COLOURS, PLACES)[part]
    }
    rows = np.array(
        [sum((known[part, scene[part]] for part in parts), np.zeros(16)) for scene in scenes]
    )
    return unit(rows + 1e-6 * draw.normal(size=rows.shape))


def test_likeness_is_the_cosine_of_weighted_words() -> None:
    captions = [["a red cat"], ["a red cat", "a red cat"], ["a blue dog"], ["owls"]]
    rows = Wording(captions).rows(range(4))
    like = rows @ rows.T
    np.testing.assert_allclose(np.diag(like), 1, atol=1e-6)
    assert like[0, 1] == pytest.approx(1)
    assert 0 < like[0, 2] < 0.5
    assert like[0, 3] == 0
    weight = {
        word: np.log(5 / (1 + count)) + 1
        for word, count in {"a": 3, "red": 2, "cat": 2, "blue": 1, "dog": 1}.items()
    }
    lengths = [
        np.sqrt(sum(weight[word] ** 2 for word in text.split()))
        for text in ("a red cat", "a blue dog")
    ]
    assert like[0, 2] == pytest.approx(weight["a"] ** 2 / np.prod(lengths))


def test_hard_negatives_share_most_words_and_easy_ones_least() -> None:
    chosen = choose_negatives(CAPTIONS)
    assert chosen is not None
    assert chosen["asked"].tolist() == list(range(60))
    assert (
        chosen["similarity"]["easy"] < chosen["similarity"]["medium"] < chosen["similarity"]["hard"]
    )
    for image, (easy, hard) in enumerate(
        zip(chosen["wrong"]["easy"], chosen["wrong"]["hard"], strict=True)
    ):
        assert image not in {*easy, *hard}
        assert not {*easy} & {*hard}
        alike = [
            sum(a == b for a, b in zip(SCENES[image], SCENES[other], strict=True)) for other in hard
        ]
        unlike = [
            sum(a == b for a, b in zip(SCENES[image], SCENES[other], strict=True)) for other in easy
        ]
        assert len(hard) == len(easy) == 11
        # Nine others differ in one part alone, and all of those are hard.
        assert alike.count(2) == 9
        assert max(unlike) <= 1


def test_a_model_that_sees_the_animal_alone_wins_easily_and_loses_against_hard_ones() -> None:
    owner = np.repeat(np.arange(60), 2)
    whole = embedded(SCENES, (0, 1, 2))
    found = negatives(whole, whole[owner], owner, CAPTIONS)
    assert found is not None
    assert [found[kind]["accuracy"] for kind in KINDS] == [1.0, 1.0, 1.0]
    animal = embedded(SCENES, (0,), seed=1)
    blurred = unit(animal + 1e-3 * np.random.default_rng(5).normal(size=animal.shape))
    found = negatives(blurred, animal[owner], owner, CAPTIONS)
    assert found is not None
    assert found["easy"]["pairwise"] > found["hard"]["pairwise"] + 0.2
    assert found["easy"]["accuracy"] > found["hard"]["accuracy"] + 0.2
    low, high = found["hard"]["intervals"]["accuracy"]
    assert low <= found["hard"]["accuracy"] <= high
    assert found["chance"] == pytest.approx(1 / 12)
    assert found["negatives"] == 11


def test_accuracy_is_that_of_plain_loops() -> None:
    images, texts, owner = noisy_pairs(60, 1.0, 2)
    chosen, found = choose_negatives(CAPTIONS), negatives(images, texts, owner, CAPTIONS)
    assert chosen is not None
    assert found is not None
    for kind in KINDS:
        wins, beaten = [], []
        for text, mine in zip(texts, owner, strict=True):
            each = [
                text @ images[other] < text @ images[mine] for other in chosen["wrong"][kind][mine]
            ]
            wins.append(all(each))
            beaten += each
        assert found[kind]["accuracy"] == pytest.approx(np.mean(wins))
        assert found[kind]["pairwise"] == pytest.approx(np.mean(beaten))


def test_equal_images_tie_and_a_tie_counts_against_the_model() -> None:
    images = np.repeat(unit(np.ones((1, 5))), 60, axis=0)
    found = negatives(images, images, np.arange(60), [[options[0]] for options in CAPTIONS])
    assert found is not None
    assert found["easy"]["pairwise"] == 0.0


def test_images_that_share_a_caption_are_not_wrong_for_each_other() -> None:
    captions = [*CAPTIONS, ["a red cat in the snow"]]
    chosen = choose_negatives(captions)
    assert chosen is not None
    for rows in chosen["wrong"].values():
        assert 60 not in rows[0]
        assert 0 not in rows[60]


@pytest.mark.parametrize(
    ("images", "size"), [(1, None), (3, None), (4, 1), (10, 3), (33, 10), (34, 11)]
)
def test_few_images_have_fewer_negatives_or_none(images: int, size: int | None) -> None:
    chosen = choose_negatives(CAPTIONS[:images])
    assert (None if chosen is None else chosen["wrong"]["hard"].shape[1]) == size


@pytest.mark.parametrize("images", [4, 10, 33, 34, 40, 60])
def test_no_wrong_image_is_of_two_kinds(images: int) -> None:
    chosen = choose_negatives(CAPTIONS[:images])
    assert chosen is not None
    for rows in zip(*chosen["wrong"].values(), strict=True):
        every = np.concatenate(rows)
        assert len(np.unique(every)) == len(every)


def test_one_caption_for_all_leaves_nothing_to_tell_apart() -> None:
    assert choose_negatives([["a photo."]] * 50) is None


def test_large_sets_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ASKED", 10)
    monkeypatch.setattr(module, "MOST_OTHERS", 40)
    images, texts, owner = noisy_pairs(60, 1.0, 2)
    found = negatives(images, texts, owner, CAPTIONS)
    assert found is not None
    assert (found["pictures"], found["captions"]) == (10, 20)
    seen: list[int] = []
    monkeypatch.setattr(
        module, "Wording", lambda captions: seen.append(len(captions)) or Wording(captions)
    )
    captions = [[], *CAPTIONS]  # places among the drawn are not those of images
    chosen = choose_negatives(captions)
    assert chosen is not None
    assert seen == [40]
    for kind in KINDS:
        for image, row in zip(chosen["asked"], chosen["wrong"][kind], strict=True):
            assert captions[image]
            assert image not in row
    like = Wording(captions).rows(range(61))
    means = {kind: np.mean([like[row] @ like[at] for at, row in zip(chosen["asked"], rows, strict=True)])
             for kind, rows in chosen["wrong"].items()}  # fmt: skip
    assert means["easy"] < means["medium"] < means["hard"]


def test_most_confused_are_the_widest_margins_each_image_once() -> None:
    images = np.eye(5)
    texts = unit(
        np.array(
            [
                [1.0, 0, 0, 0, 0],
                [0.9, 0.1, 0, 0, 0],
                [0, 0, 0.2, 1, 0],
                [0, 0, 0, 1.0, 0],
                [0, 0, 0, 0, 1.0],
            ]
        )
    )
    captions = [["a"], ["b"], ["c"], ["d"], ["e"]]
    found = most_confused(images, texts, np.arange(5), captions)
    assert [
        (pair["caption"], pair["own"], pair["preferred"], pair["preferred_caption"])
        for pair in found
    ] == [
        ("b", 1, 0, "a"),
        ("c", 2, 3, "d"),
    ]
    assert (
        found[0]["preferred_score"] - found[0]["own_score"]
        > found[1]["preferred_score"] - found[1]["own_score"]
    )
    captions[0] = ["b"]  # now the preferred image has the caption, too
    assert [pair["own"] for pair in most_confused(images, texts, np.arange(5), captions)] == [2]
