from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lapclip.data.scenes.scene import ALPHABET
from lapclip.data.tokenizers import CharacterTokenizer, tokenizer_from_dict
from lapclip.errors import DataError

BUILT_IN = CharacterTokenizer(ALPHABET)


def test_built_in_captions_take_33_tokens_and_the_end_has_the_highest() -> None:
    assert BUILT_IN.vocabulary == 33
    assert BUILT_IN.end == 32


@given(st.text(ALPHABET, max_size=75))
def test_decodes_what_it_encodes(caption: str) -> None:
    assert BUILT_IN.decode(BUILT_IN.encode(caption, 77)) == caption


@given(st.text(max_size=200), st.integers(2, 77))
def test_any_text_becomes_known_tokens_within_the_context(caption: str, context: int) -> None:
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


@pytest.mark.parametrize(("longest", "length"), [(1, 8), (6, 8), (7, 16), (60, 64), (71, 77), (200, 77)])
def test_batches_are_trimmed_to_a_multiple_of_eight_at_most_the_context(longest: int, length: int) -> None:
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
    with pytest.raises(DataError, match="Unknown kind"):
        tokenizer_from_dict({"kind": "runes"})
