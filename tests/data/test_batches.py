from __future__ import annotations

import hashlib
import itertools
from typing import Any

import numpy as np
import pytest

from lapclip.config import DataConfig, TrainConfig
from lapclip.data.batches import BLOCK_ROWS, WINDOW_ROWS, Batch, BatchPlan, Views, prefetch
from lapclip.data.dataset import Pairs
from lapclip.data.ragged import Ragged
from lapclip.data.sources.built_in import load_scenes
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.errors import DataError
from lapclip.training.frozen_features import CachedFeatures
from lapclip.training.held_out_features import HeldOutFeatures
from lapclip.training.objectives import Objectives
from lapclip.training.objectives.distillation import TeacherVectors
from lapclip.training.objectives.predicted_words import MIN_IMAGES


def plan_of(
    captions: list[list[str]],
    batch_size: int,
    seed: int = 0,
    dropout: float = 0.0,
    **objectives: Any,
) -> BatchPlan:
    """Images that carry their row number in each pixel."""
    rows = np.arange(len(captions), dtype=np.uint8)
    pixels = np.broadcast_to(rows[:, None, None, None], (len(captions), 2, 2, 3))
    pairs, tokenizer = Pairs(pixels, captions), CharacterTokenizer("abcdefgh ")
    extras = Objectives(TrainConfig(seed=seed, **objectives))
    return BatchPlan(pairs, tokenizer, 20, batch_size, seed, dropout, extras=extras)


def rows_of(batch) -> list[int]:
    return batch.pixels_BSSC[:, 0, 0, 0].tolist()


def test_an_epoch_visits_every_image_once_in_a_new_order() -> None:
    plan = plan_of([["a"]] * 12, 4)
    epochs = [
        [row for step in steps for row in rows_of(plan.batch(step))]
        for steps in ((1, 2, 3), (4, 5, 6))
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]
    assert [plan.epoch(step) for step in (1, 3, 4)] == [1, 1, 2]


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    captions = [["a", "b", "c"]] * 9
    one, same, other = plan_of(captions, 3), plan_of(captions, 3), plan_of(captions, 3, seed=1)
    assert np.array_equal(one.batch(7).tokens_BL, same.batch(7).tokens_BL)
    assert rows_of(one.batch(7)) == rows_of(same.batch(7))
    assert [rows_of(one.batch(s)) for s in (1, 2, 3)] != [
        rows_of(other.batch(s)) for s in (1, 2, 3)
    ]


def test_words_to_predict_are_those_of_all_captions_of_an_image_and_rare_ones_count_more() -> None:
    captions = [["a b", "ac"] if row % 2 else ["a", "d"] for row in range(MIN_IMAGES * 2)]
    captions[0] = ["a", "e"]  # too rare to be learnt
    captions[2] = ["a", "b"]
    batch = plan_of(captions, len(captions), word_weight=0.3).batch(1)
    shares = dict(zip(rows_of(batch), batch.extras["words_BV"], strict=True))
    a, b, c, d, e = range(5)
    assert shares[0].sum() == 0
    assert shares[1].sum() == pytest.approx(1)
    assert shares[1][[a, d, e]].tolist() == [0, 0, 0]  # every image has an a, which says nothing
    assert shares[1][c] > shares[1][b] > 0
    assert shares[2][b] == pytest.approx(1)
    assert (shares[1][-3:] == 0).all()  # start, unknown and end
    assert plan_of(captions, 4).batch(1).extras == {}


def test_equal_captions_are_avoided_where_another_caption_exists() -> None:
    plan = plan_of([["a", "b"], ["a", "c"], ["a", "d"]], 3)
    for step in range(1, 20):
        batch = plan.batch(step)
        assert len(np.unique(batch.tokens_BL, axis=0)) == 3
        assert batch.positives_BB.sum() == 3


def test_unavoidable_equal_captions_are_positives_of_each_other() -> None:
    batch = plan_of([["a"], ["a"], ["b"]], 3).batch(1)
    equal = (batch.tokens_BL[:, None, :] == batch.tokens_BL[None, :, :]).all(axis=2)
    assert np.array_equal(batch.positives_BB, equal)
    assert batch.positives_BB.sum() == 5


def test_images_with_the_same_caption_go_into_different_batches_where_they_can() -> None:
    plan = plan_of([["a"], ["a"], ["b"], ["c"], ["d"], ["e"]], 3)
    for epoch in range(30):
        batches = [plan.batch(2 * epoch + step) for step in (1, 2)]
        assert sorted(row for batch in batches for row in rows_of(batch)) == list(range(6))
        assert batches[0].positives_BB.sum() == 3


def test_a_frequent_caption_is_spread_over_the_epoch() -> None:
    """Not pushed to its end, where a batch would be one caption."""
    captions = [["a"] if at % 10 < 3 else ["abcdefgh"[at % 8] * (1 + at % 17)] for at in range(600)]
    plan = plan_of(captions, 30)
    for epoch in range(3):
        counts = [
            int((plan.batch(20 * epoch + step).tokens_BL.argmax(axis=1) == 2).sum())
            for step in range(1, 21)
        ]
        assert max(counts) < 20


def test_copies_and_images_of_one_class_are_positives_of_each_other() -> None:
    pixels = np.zeros((4, 2, 2, 3), np.uint8)
    captions = [("a",), ("ab",), ("abc",), ("abcd",)]
    copies = Pairs(pixels, captions, identities=np.array([7, 7, 8, 9], dtype=np.uint64))
    classes = Pairs(pixels, captions, labels=np.array([0, 1, 1, 0]))
    wanted = {"copies": [[0, 1]], "classes": [[0, 3], [1, 2]]}
    for pairs, together in ((copies, wanted["copies"]), (classes, wanted["classes"])):
        batch = BatchPlan(pairs, CharacterTokenizer("abcd"), 20, 4, seed=0).batch(
            1
        )  # sorted by length: in this order
        expected = np.eye(4, dtype=bool)
        for one, other in together:
            expected[one, other] = expected[other, one] = True
        assert np.array_equal(batch.positives_BB, expected)


def test_everything_about_a_caption_stays_with_it_when_a_batch_is_sorted_by_length() -> None:
    captions = [
        ["abcdefgh", "left of a"],
        ["a", "left"],
        ["abc"],
        ["left a", "ab"],
        ["abcd"],
        ["a left"],
    ]
    texts, owner = zip(
        *[(text, row) for row, own in enumerate(captions) for text in own], strict=True
    )
    rows = np.arange(len(captions))
    pixels = np.broadcast_to(rows.astype(np.uint8)[:, None, None, None], (len(captions), 2, 2, 3))
    teacher = (rows[:, None].astype(np.float32), np.arange(len(texts), dtype=np.float32)[:, None])
    tokenizer = CharacterTokenizer.learn(texts)
    pairs = Pairs(pixels, captions, labels=rows % 2)
    extras = Objectives(TrainConfig(teacher="any"), teacher=TeacherVectors(*teacher))
    plan = BatchPlan(pairs, tokenizer, 20, 5, seed=0, extras=extras)
    for step in range(1, 30):
        batch = plan.batch(step)
        asked = [tokenizer.decode(row) for row in batch.tokens_BL.tolist()]
        assert [texts[int(at)] for at in batch.extras["teacher_text"][:, 0]] == asked
        assert (
            [owner[texts.index(text)] for text in asked]
            == rows_of(batch)
            == batch.extras["teacher_image"][:, 0].tolist()
        )
        assert batch.sided_B.tolist() == ["left" in text for text in asked]
        assert batch.lengths_B is not None
        assert batch.lengths_B.tolist() == [len(text) + 2 for text in asked]


def test_equal_captions_are_positives_wherever_sorting_puts_them() -> None:
    captions = [["abcdefgh"], ["abc"], ["abcdefgh"], ["a"], ["abc"]]
    for seed in range(10):
        batch = plan_of(captions, 5, seed).batch(1)
        equal = (batch.tokens_BL[:, None, :] == batch.tokens_BL[None, :, :]).all(axis=2)
        assert np.array_equal(batch.positives_BB, equal)


def test_short_captions_come_first() -> None:
    batch = plan_of([["abcdefgh"], ["a"], ["abc"], ["ab"]], 4).batch(1)
    assert rows_of(batch) == [1, 3, 2, 0]
    ends = batch.tokens_BL.argmax(axis=1)
    assert ends.tolist() == sorted(ends)


def test_words_are_left_out_at_random_but_never_all() -> None:
    captions = [["abcdefgh"] for _ in range(8)]
    plan, again = plan_of(captions, 8, dropout=0.5), plan_of(captions, 8, dropout=0.5)
    lengths = []
    for step in range(1, 40):
        batch = plan.batch(step)
        assert np.array_equal(batch.tokens_BL, again.batch(step).tokens_BL)
        assert batch.positives_BB.all()  # they are the same caption, whatever was left out
        for row in batch.tokens_BL.tolist():
            text = plan.tokenizer.decode(row)
            assert text
            assert list(text) == sorted(text)  # in order
            lengths.append(len(text))
    assert 3.5 < np.mean(lengths) < 4.6
    assert min(lengths) >= 1


def test_neighbours_that_are_read_together_stay_close_and_are_still_shuffled() -> None:
    count = 60_000
    pairs = Pairs(np.zeros((count, 1, 1, 3), np.uint8), [("a",)] * count, sequential=True)
    plan = BatchPlan(pairs, CharacterTokenizer("a"), 8, 100, seed=0)
    first, second = plan._order(1), plan._order(2)
    assert sorted(first) == list(range(count))
    assert not np.array_equal(first, second)
    blocks = [
        len({row // BLOCK_ROWS for row in first[at : at + 100]}) for at in range(0, count, 5000)
    ]
    assert (
        max(blocks) <= (WINDOW_ROWS + 2 * BLOCK_ROWS) // BLOCK_ROWS + 1
    )  # a batch reads from the window alone
    assert min(blocks) > 8  # and from many places in it


@pytest.mark.parametrize("counts", [(9, 9), (12, 6), (6, 6, 6), (18,)], ids=str)
def test_ranks_read_the_images_of_their_own_rows_and_together_the_batch(
    counts: tuple[int, ...],
) -> None:
    plan = plan_of([["a" * (1 + at % 9)] for at in range(200)], 18)
    for step in (1, 2, 15):
        whole = plan.batch(step)
        batches = [plan.for_rank(counts, rank).batch(step) for rank in range(len(counts))]
        read = []
        for batch, count in zip(batches, counts, strict=True):
            assert batch.ranks is not None
            assert len(batch.pixels_BSSC) == count
            assert rows_of(batch) == [rows_of(whole)[at] for at in batch.ranks.own]
            read += rows_of(batch)
            assert np.array_equal(batch.positives_BB, whole.positives_BB[batch.ranks.own])
            for name in ("tokens_BL", "sided_B", "lengths_B"):  # of all rows
                assert np.array_equal(getattr(batch, name), getattr(whole, name))
        assert sorted(read) == sorted(rows_of(whole))


def test_features_are_read_of_own_rows_alone() -> None:
    captions = [["a cab " + "a" * (at % 4), "a bed"] for at in range(30)]
    plan = plan_of(captions, 9, phrases=0.3)
    images = np.arange(30, dtype=np.float32)[None, :, None]  # one view
    texts = Ragged(np.arange(60, dtype=np.float32)[:, None], None)
    phrases = Ragged(np.arange(len(plan.texts["phrase"]), dtype=np.float32)[:, None], None)
    held_out = HeldOutFeatures(plan.pairs, None, None)
    features = CachedFeatures(images, texts, held_out, [], {"phrase": phrases})
    plan = plan.with_features(features)
    whole, own = plan.batch(2), plan.for_rank([5, 4], 1).batch(2)
    assert own.ranks is not None
    rows = own.ranks.own
    assert len(rows) == 4
    for name in ("image_features", "text_features"):
        assert np.array_equal(getattr(own, name), getattr(whole, name)[rows])
    assert np.array_equal(own.extras["phrase_features"], whole.extras["phrase_features"][rows])
    assert len(own.extras["phrase_tokens_BL"]) == 9


def test_captions_that_are_equal_once_cut_are_positives_of_each_other() -> None:
    batch = plan_of([["a" * 30 + "b"], ["a" * 30 + "c"]], 2).batch(1)
    assert batch.positives_BB.all()


def test_every_caption_of_an_image_is_drawn_in_time() -> None:
    plan = plan_of([["a", "b", "c", "d"]] * 2, 2)
    seen = {tuple(row) for step in range(1, 40) for row in plan.batch(step).tokens_BL.tolist()}
    assert len(seen) == 4


def test_prefetched_batches_are_the_planned_ones_in_order() -> None:
    plan = plan_of([["a", "b"]] * 10, 2)
    fetched = list(prefetch(plan, 3, 9))
    assert len(fetched) == 7
    for step, batch in enumerate(fetched, 3):
        assert np.array_equal(batch.tokens_BL, plan.batch(step).tokens_BL)
        assert rows_of(batch) == rows_of(plan.batch(step))


def test_an_error_while_preparing_a_batch_reaches_the_trainer() -> None:
    with pytest.raises(DataError, match="training image 2 has no caption"):
        list(prefetch(plan_of([["a"], []], 2), 1, 3))  # an image without a caption


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(DataError, match="more than the 3 training images"):
        plan_of([["a"]] * 3, 4)


def test_captions_in_a_built_in_batch_are_trimmed() -> None:
    data = load_scenes(DataConfig(train_pairs=20), 32)
    assert data.alphabet is not None
    batch = BatchPlan(data.train, CharacterTokenizer(data.alphabet), 77, 16, 0).batch(1)
    assert batch.tokens_BL.shape[1] in (48, 56, 64)


PHRASED = [
    ["a bad cab", "a cab"],
    ["a bad bed"],
    ["a bed", "a cab"],
    ["a big bed"],
    ["a cab, a hedge"],
    ["a"],
    ["..."],
]


def test_each_image_has_a_phrase_that_is_true_of_all_that_have_it() -> None:
    plan, plain = plan_of(PHRASED, 7, phrases=0.3), plan_of(PHRASED, 7)
    true = {"a cab": {0, 2, 4}, "a bed": {1, 2, 3}, "a bad": {0, 1}}
    seen = set()
    for step in range(1, 30):
        batch, same = plan.batch(step), plan_of(PHRASED, 7, phrases=0.3).batch(step)
        phrases, positives = batch.extras["phrase_tokens_BL"], batch.extras["phrase_positives_BB"]
        assert np.array_equal(phrases, same.extras["phrase_tokens_BL"])
        assert np.array_equal(batch.tokens_BL, plain.batch(step).tokens_BL)
        rows = rows_of(batch)
        for column, tokens in enumerate(phrases):
            phrase = plan.tokenizer.decode(tokens)
            assert {rows[at] for at in np.flatnonzero(positives[:, column])} == true[phrase]
            assert rows[column] in true[phrase] or rows[column] in (5, 6)
            seen.add(phrase)
    assert seen == set(true)
    assert plain.batch(1).extras == {}
    assert plain.texts == {}


def test_captions_without_phrases_in_common_have_whole_captions_alone() -> None:
    plan = plan_of([["a cab"], ["a bed"]], 2, phrases=0.3)
    assert plan.batch(1).extras == {}
    assert list(plan.why_unused) == ["train.phrases"]


class FilledTokenizer(CharacterTokenizer):
    """Fills every caption to the full context, as SigLIP's tokenizer does."""

    fills = True

    def encode(self, caption: str, context: int) -> list[int]:
        tokens = super().encode(caption, context)
        return tokens + [self.padding] * (context - len(tokens))


def varied_plan(case: str, count: int = 61, batch_size: int = 12) -> BatchPlan:
    """Captions of many lengths, some of them equal, in every form that a batch has."""
    draw = np.random.default_rng(7)
    words = ["a", "left", *("".join(letters) for letters in itertools.permutations("bdeg", 3))]
    captions = [
        [
            " ".join(words[at] for at in draw.integers(0, len(words), draw.integers(1, 7)))
            for _ in range(1 + row % 3)
        ]
        for row in range(count)
    ]
    captions[5] = captions[6] = ["a bad egg"]
    pixels = draw.integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    pairs = Pairs(
        pixels,
        captions,
        aspects=draw.uniform(0.5, 2, count) if case == "views" else None,
        identities=np.arange(count, dtype=np.uint64) // 2 if case == "copies" else None,
    )
    tokenizer = (FilledTokenizer if case == "filled" else CharacterTokenizer)("abcdefgh ")
    images = np.arange(count * 5, dtype=np.float32).reshape(1, count, 5)
    captions_count = sum(len(options) for options in captions)
    vectors = np.arange(captions_count * 2, dtype=np.float32).reshape(-1, 2)
    config = TrainConfig(
        seed=3,
        phrases=0.3 if case in ("phrases", "copies") else 0.0,
        word_weight=0.3 if case == "words" else 0.0,
        teacher="any" if case == "features" else "",
    )
    extras = Objectives(config, teacher=TeacherVectors(images[0], vectors))
    plan = BatchPlan(
        pairs,
        tokenizer,
        24,
        batch_size,
        3,
        0.3 if case in ("dropout", "filled") else 0.0,
        Views(3, 0.5, 0.5) if case == "views" else None,
        extras,
    )
    if case == "features":
        width = sum(len(caption) for caption in plan.captions)
        first = np.cumsum([0, *(len(caption) for caption in plan.captions)])
        text = Ragged(np.arange(2 * width, dtype=np.float32).reshape(width, 2), first)
        held_out = HeldOutFeatures(pairs, None, None)
        return plan.with_features(CachedFeatures(images, text, held_out, []))
    return plan


def digest(batch: Batch) -> str:
    """Of every array of a batch: its type, its shape and its bytes."""
    found = hashlib.sha256()
    for name, value in (vars(batch) | batch.extras).items():
        arrays = value if isinstance(value, tuple) else (value,)
        for array in arrays:
            if isinstance(array, np.ndarray):
                if array.dtype.kind == "f":  # logarithms of processors differ in their last bits
                    array = (array.astype(np.float64) * 1e4).round().astype(np.int64)
                found.update(f"{name} {array.dtype.str} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize(
    ("case", "recorded"),
    [
        ("plain", "e7d41781605c41c7"),
        ("dropout", "be3a82770768af68"),
        ("filled", "45ed65b3d2e33865"),
        ("words", "201ac6cd7acf25f6"),
        ("phrases", "f68b9024bd4b229e"),
        ("copies", "99abd50b85e0bb1e"),
        ("views", "682092b89df4422a"),
        ("features", "f5cb70ca5db14a23"),
    ],
)
def test_batches_are_those_of_the_release_before_they_were_made_without_loops(
    case: str, recorded: str
) -> None:
    plan = varied_plan(case)
    steps = hashlib.sha256("".join(digest(plan.batch(step)) for step in (1, 2, 7, 13)).encode())
    assert steps.hexdigest()[:16] == recorded
