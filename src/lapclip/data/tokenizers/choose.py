"""Which tokenizer to use: one that fits the captions, a BPE learnt from them, or one that was saved."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lapclip.config import AUTO, DataConfig
from lapclip.data.tokenizers.bpe import (
    LEAST,
    WORD_END,
    WORDS,
    BytePairTokenizer,
    byte_letters,
    clean,
    clip_tokenizer,
    spelt,
)
from lapclip.data.tokenizers.tokenizer import CharacterTokenizer, PretrainedTokenizer, Tokenizer
from lapclip.errors import DataError
from lapclip.paths import read_json, write_atomic

FEW = 500
"""Different captions below which words are too rare to be learnt as tokens."""
OFTEN = 5
"""A word earns a token of its own where it occurs this often: each token has a vector to learn."""
CUT = 0.1
"""The share of captions that may be cut before characters are too short a way to write them."""
STEP = 64
"""Sizes are rounded up to a multiple of this, which products of matrices like."""
LETTERS_AT_ONCE = 1_000_000


def choose_tokenizer(
    config: DataConfig, captions: Sequence[str], alphabet: str | None, context: int
) -> tuple[Tokenizer, str]:
    """The tokenizer for these training captions, and why it is that one.

    `alphabet` is the source's own, where it has one; `context` is the longest caption the model reads.
    """
    if config.tokenizer == "clip":
        return clip_tokenizer(), "asked for: CLIP's own 49,408 tokens"
    if config.tokenizer == "bpe":
        learnt = learn_bpe(count_words(captions), config.vocabulary)
        return learnt, f"asked for: a BPE of {learnt.vocabulary:,} tokens learnt from {len(captions):,} captions"
    characters = CharacterTokenizer.learn(captions) if alphabet is None else CharacterTokenizer(alphabet)
    if config.tokenizer == "characters":
        return characters, f"asked for: {len(characters.alphabet)} characters"
    assert config.tokenizer == AUTO
    if alphabet is not None:
        return characters, f"the captions are written with {len(alphabet)} characters"
    different = len(set(captions))
    cut = sum(len(caption) > context - 2 for caption in captions) / max(1, len(captions))
    if different < FEW and cut <= CUT:
        return characters, f"characters: {different:,} different captions are too few to learn words from"
    words = count_words(captions)
    frequent = sum(count >= OFTEN for count in words.values())
    size = min(config.vocabulary, -(-(LEAST + frequent) // STEP) * STEP)
    learnt = learn_bpe(words, size)
    why = f"{frequent:,} words occur {OFTEN} times or more in {len(captions):,} captions"
    if different < FEW:
        why = f"characters would cut {cut:.0%} of the captions at {context} tokens; {why}"
    return learnt, f"a BPE of {learnt.vocabulary:,} tokens: {why}"


def count_words(captions: Iterable[str]) -> Counter[str]:
    """How often each word occurs, as the tokenizer will see it."""
    return Counter(word for caption in captions for word in WORDS.findall(clean(caption)))


def learn_bpe(words: Counter[str], size: int) -> BytePairTokenizer:
    """A BPE of at most `size` tokens. The same words give the same tokens."""
    if not words or size <= LEAST:
        return BytePairTokenizer([])
    from tokenizers import Tokenizer as Learner
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.trainers import BpeTrainer

    # Else the package starts a thread a core and warns when the process is forked later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    letters = list(byte_letters().values())
    spelling = {spelt(word): count for word, count in sorted(words.items())}
    ends = len({word[-1] for word in spelling})
    learner = Learner(BPE(end_of_word_suffix=WORD_END))
    learner.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = BpeTrainer(
        vocab_size=len(letters) + ends + size - LEAST,
        initial_alphabet=letters,
        end_of_word_suffix=WORD_END,
        show_progress=False,
    )
    learner.train_from_iterator(_repeated(spelling), trainer)
    merges = json.loads(learner.to_str())["model"]["merges"]
    return BytePairTokenizer([(first, second) for first, second in merges])


def _repeated(spelling: dict[str, int]) -> Iterator[str]:
    """Each word as often as it occurs, in chunks that fit in memory."""
    for word, count in spelling.items():
        most = max(1, LETTERS_AT_ONCE // len(word))
        while count > 0:
            yield f"{word} " * min(count, most)
            count -= most


def tokenizer_from_dict(saved: dict[str, Any]) -> Tokenizer:
    """The tokenizer that was saved with `to_dict`."""
    match saved:
        case {"kind": "characters", "alphabet": str(alphabet)}:
            return CharacterTokenizer(alphabet)
        case {"kind": "bpe", "merges": list(merges)} if all(str(merge).count(" ") == 1 for merge in merges):
            return BytePairTokenizer([(first, second) for first, second in map(str.split, merges)])
        case {"kind": "clip"}:
            return clip_tokenizer()
        case {"kind": "foreign", "description": dict(description), "padding": int(padding)}:
            return PretrainedTokenizer(description, padding)
        case {"kind": "characters" | "bpe" | "foreign" as kind}:
            raise DataError(f"The saved tokenizer of kind {kind!r} is not whole.")
    raise DataError(f"Unknown kind of tokenizer: {saved.get('kind')!r}.", hint="a newer release of lapclip")


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write it as JSON, whole or not at all."""
    try:
        write_atomic(path, json.dumps(tokenizer.to_dict()))
    except OSError as error:
        raise DataError(
            f"Cannot write {path}: {error.strerror or error}.",
            hint="free some disk space; a run goes on with lapclip resume",
        ) from error


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer in a file, or None where there is no such file."""
    try:
        return tokenizer_from_dict(read_json(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise DataError(f"The tokenizer in {path} cannot be read: {error}.", hint="lapclip train") from None
