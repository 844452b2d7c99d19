from __future__ import annotations

import html
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import ftfy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lapclip.config import DataConfig
from lapclip.data.scenes import ALPHABET
from lapclip.data.tokenizers import (
    BytePairTokenizer,
    CharacterTokenizer,
    choose_tokenizer,
    clean,
    clip_tokenizer,
    count_words,
    learn_bpe,
    load_tokenizer,
    save_tokenizer,
    tokenizer_from_dict,
)
from lapclip.errors import DataError

BUILT_IN = CharacterTokenizer(ALPHABET)


def test_built_in_captions_take_33_tokens_and_the_end_has_the_highest() -> None:
    assert BUILT_IN.vocabulary == 33
    assert BUILT_IN.end == 32


@given(st.text(ALPHABET, max_size=75))
def test_decodes_what_it_encodes(caption: str) -> None:
    assert BUILT_IN.decode(BUILT_IN.encode(caption, 77)) == caption


@given(st.text(max_size=200), st.integers(2, 77))
def test_any_text_becomes_known_characters_within_the_context(caption: str, context: int) -> None:
    tokens = BUILT_IN.encode(caption, context)
    assert 2 <= len(tokens) <= context
    assert tokens[0] == BUILT_IN.start
    assert tokens[-1] == BUILT_IN.end
    assert tokens.count(BUILT_IN.end) == 1
    assert all(0 <= token < BUILT_IN.vocabulary for token in tokens)


def test_long_captions_are_cut_with_the_end_kept() -> None:
    tokens = BUILT_IN.encode("a" * 100, 77)
    assert len(tokens) == 77
    assert tokens[-1] == BUILT_IN.end


@pytest.mark.parametrize(
    ("longest", "length"), [(1, 8), (6, 8), (7, 16), (60, 64), (71, 77), (200, 77)]
)
def test_batches_are_trimmed_to_a_multiple_of_eight_at_most_the_context(
    longest: int, length: int
) -> None:
    batch = BUILT_IN.batch(["a", "b" * longest], 77)
    assert batch.shape == (2, length)
    assert batch.dtype == np.int64


def test_padding_never_looks_like_an_end() -> None:
    batch = BUILT_IN.batch(["a", "b" * 40], 77)
    assert (batch == BUILT_IN.end).sum(axis=1).tolist() == [1, 1]
    assert batch.argmax(axis=1).tolist() == [2, 41]


def test_learns_the_alphabet_of_other_captions() -> None:
    tokenizer = CharacterTokenizer.learn(["Ein rotes Häuschen", "日本"])
    assert tokenizer.decode(tokenizer.encode("häuschen", 77)) == "häuschen"
    assert tokenizer.decode(tokenizer.encode("日本!", 77)) == "日本?"


def test_comes_back_from_what_was_saved() -> None:
    again = tokenizer_from_dict(BUILT_IN.to_dict())
    assert isinstance(again, CharacterTokenizer)
    assert again.alphabet == BUILT_IN.alphabet
    with pytest.raises(DataError, match="'runes' is not known"):
        tokenizer_from_dict({"kind": "runes"})


CLIP = clip_tokenizer()
TABLE = json.loads(Path(__file__).with_name("clip_ids.json").read_text(encoding="utf-8"))
"""OpenCLIP's ids, written by benchmarks/peers_tokens.py in the peers' environment."""
COLOURS, THINGS = (
    ("red", "green", "blue", "yellow"),
    ("bicycle", "house", "dog", "umbrella", "mountain"),
)
CAPTIONS = [f"{number} {a} {thing}s near the {b} one" for number in range(40) for a in COLOURS for b in COLOURS
            for thing in THINGS]  # fmt: skip
LEARNT = learn_bpe(count_words(CAPTIONS), 700)


@pytest.mark.parametrize(("caption", "ids"), TABLE)
def test_clip_tokens_are_those_of_openclip(caption: str, ids: list[int]) -> None:
    assert CLIP.encode(caption, 77) == ids


def test_clip_has_49408_tokens_and_pads_with_zero_as_openclip_does() -> None:
    assert (CLIP.vocabulary, CLIP.start, CLIP.end) == (49408, 49406, 49407)
    assert CLIP.batch(["a diagram", "a dog"], 77).tolist() == [
        [49406, 320, 22697, 49407, 0, 0, 0, 0],
        [49406, 320, 1929, 49407, 0, 0, 0, 0],
    ]


@given(st.text(st.characters(max_codepoint=0x17F), max_size=60))
def test_plain_captions_are_cleaned_as_ftfy_would(caption: str) -> None:
    slow = html.unescape(html.unescape(ftfy.fix_text(caption))).strip()
    assert clean(caption) == " ".join(slow.split()).strip().lower()


@pytest.mark.parametrize(
    "caption", ["<b> &amp;amp; c", "<b> &amp; c", "<b> & c", "&lt;b&gt; &amp;amp; c"]
)
def test_entities_that_are_escaped_twice_are_unescaped_twice_as_in_clip(caption: str) -> None:
    """Beside a tag ftfy unescapes nothing, so both times are ours."""
    assert clean(caption) == "<b> & c"
    assert CLIP.encode(caption, 77) == CLIP.encode("<b> & c", 77)


@pytest.mark.parametrize("tokenizer", [CLIP, LEARNT], ids=["clip", "learnt"])
@given(caption=st.text(max_size=80), context=st.integers(2, 77))
def test_any_text_becomes_known_tokens_within_the_context(
    tokenizer: BytePairTokenizer, caption: str, context: int
) -> None:
    tokens = tokenizer.encode(caption, context)
    assert 2 <= len(tokens) <= context
    assert tokens[0] == tokenizer.start
    assert tokens[-1] == tokenizer.end
    assert all(0 <= token < tokenizer.vocabulary for token in tokens)
    assert tokens[:-1] == tokenizer.encode(caption, 4000)[:-1][: context - 1]
    assert tokenizer.length(caption) == len(tokenizer.encode(caption, 100_000))


@given(st.text(max_size=40))
def test_nothing_is_unknown_to_a_learnt_bpe(caption: str) -> None:
    """Every letter comes back; only spaces may differ, because words end with one."""
    decoded = LEARNT.decode(LEARNT.encode(caption, 1000))
    assert "".join(decoded.split()) == "".join(clean(caption).split())


def test_a_learnt_bpe_writes_frequent_words_as_one_token_and_has_the_size_asked_for() -> None:
    assert LEARNT.vocabulary <= 700
    assert LEARNT.end == LEARNT.vocabulary - 1
    assert all(len(LEARNT.encode(word, 77)) == 3 for word in ("bicycles", "red", "near", "the"))
    assert len(LEARNT.encode("zebra", 77)) > 3


def test_a_caption_cannot_end_a_learnt_sequence_early() -> None:
    assert LEARNT.encode("a <end_of_text> b", 77).count(LEARNT.end) == 1


def test_learning_stops_at_the_size_asked_for_where_there_is_more_to_learn() -> None:
    words = Counter({f"{a}{b}{c}": 9 for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx"})
    assert learn_bpe(words, 600).vocabulary == 600


def test_learning_gives_the_same_tokens_in_another_process(tmp_path: Path) -> None:
    program = (
        "import json, sys; from lapclip.data.tokenizers import count_words, learn_bpe;"
        "print(json.dumps(learn_bpe(count_words(json.load(sys.stdin)), 700).to_dict()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(CAPTIONS[::-1]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout) == LEARNT.to_dict()
    assert found.stderr == ""


@pytest.mark.parametrize(
    "tokenizer", [CLIP, LEARNT, CharacterTokenizer("abc")], ids=["clip", "learnt", "characters"]
)
def test_every_kind_comes_back_from_a_file(
    tokenizer: BytePairTokenizer | CharacterTokenizer, tmp_path: Path
) -> None:
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert again is not None
    assert again.to_dict() == tokenizer.to_dict()
    assert [row.tolist() for row in again.encode_all(CAPTIONS[:20], 77)] == [
        tokenizer.encode(caption, 77) for caption in CAPTIONS[:20]
    ]


def test_a_missing_file_is_none_and_a_damaged_one_an_error(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path / "tokenizer.json") is None
    (tmp_path / "tokenizer.json").write_text('{"kind": "bpe"', encoding="utf-8")
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="not whole"):
        tokenizer_from_dict({"kind": "bpe", "merges": ["a"]})
    with pytest.raises(DataError, match="'runes' is not known"):
        tokenizer_from_dict({"kind": "runes"})


def test_auto_takes_the_alphabet_of_the_source() -> None:
    tokenizer, why = choose_tokenizer(DataConfig(), ["a cab"] * 900, "abc ", 77)
    assert tokenizer.to_dict() == {"kind": "characters", "alphabet": "abc "}
    assert why == "the captions are written with 4 characters"


def test_auto_learns_a_bpe_as_large_as_the_words_that_occur_often() -> None:
    tokenizer, why = choose_tokenizer(DataConfig(), CAPTIONS, None, 77)
    assert tokenizer.to_dict()["kind"] == "bpe"
    assert tokenizer.vocabulary <= 576
    assert "words occur 5 times or more in 3,200 captions" in why
    limited, _ = choose_tokenizer(DataConfig(vocabulary=600, tokenizer="bpe"), CAPTIONS, None, 77)
    assert limited.vocabulary <= 600


def test_auto_takes_characters_for_few_captions_unless_they_would_be_cut() -> None:
    few = ["a short one", "another"] * 20
    tokenizer, why = choose_tokenizer(DataConfig(), few, None, 77)
    assert isinstance(tokenizer, CharacterTokenizer)
    assert "2 different captions are too few" in why
    tokenizer, why = choose_tokenizer(DataConfig(), [caption * 20 for caption in few], None, 77)
    assert isinstance(tokenizer, BytePairTokenizer)
    assert "characters would cut 100%" in why


@pytest.mark.parametrize(("kind", "tokens"), [("clip", 49408), ("characters", 13)])
def test_a_kind_that_was_asked_for_is_taken(kind: str, tokens: int) -> None:
    tokenizer, why = choose_tokenizer(DataConfig(tokenizer=kind), ["a red bicycle"], None, 77)
    assert tokenizer.vocabulary == tokens
    assert why.startswith("asked for")


def test_what_is_no_word_takes_no_memory() -> None:
    tokenizer, letters = BytePairTokenizer([]), "abcdefghij"
    for number in range(20):
        assert len(tokenizer.encode(letters * 2_000 + letters[number % 10] * number, 77)) == 77
    assert tokenizer.encode("a cat", 77) == tokenizer.encode("a cat", 77)
    assert set(tokenizer._known) == {"a", "cat"}


def test_equally_common_pairs_are_merged_in_one_order() -> None:
    """The package that learns numbers some letters in the random order of a hash table, anew each time."""
    words = count_words(
        [f"{first}{second} {second}{first}{first}" for first in "abcdefgh" for second in "stuvwxyz"]
    )
    assert len({tuple(learn_bpe(words, 600).merges) for _ in range(40)}) == 1
