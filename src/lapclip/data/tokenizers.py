"""Captions to tokens and back: a token a character, a BPE learnt from the captions, CLIP's own BPE, SigLIP's pieces, or
the tokenizer of a pretrained text tower; and which of them a run uses.

A tokenizer has a start and an end token. The end has the highest id, as in CLIP, so that the text tower finds it; what
follows it is padding, which cannot reach it.

Byte pair encoding is done as CLIP does it: with CLIP's own published merges, or with merges learnt from the captions.
Captions are cleaned as CLIP cleans them: mended by ftfy, HTML entities unescaped, one space between words, lower case.
The steps and the pattern of words are those of https://github.com/openai/CLIP, clip/simple_tokenizer.py. `regex` finds
the words, as there: the regular expressions inside the tokenizers package know an older Unicode and cut 17,481
characters differently.
Words are bytes first, so that no text is unknown: 256 tokens for bytes inside a word and 256 for a word's last byte.
Each merge adds one token; start and end come last.
"""

from __future__ import annotations

import base64
import gzip
import html
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import regex

from lapclip.config import AUTO, DataConfig
from lapclip.data.caption_cleaning import CLEANING
from lapclip.errors import DataError, first_line
from lapclip.paths import read_json, write_atomic
from lapclip.suggest import install

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Reader

LENGTH_STEP = 8
"""Batches are padded to a multiple of this, so that few shapes occur: compilers and MPS memory want them to repeat."""


class Tokenizer(Protocol):
    """Captions to tokens and back."""

    start: int
    end: int
    padding: int
    fills = False
    """Whether a caption is filled with padding to the full context, because the model looks at it."""

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return self.end + 1

    def encode(self, caption: str, context: int) -> list[int]:
        """Start, the caption's tokens, end; cut to `context` tokens with the end kept. One that `fills` has as many."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The caption of the tokens up to the end, as far as they tell."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """What `tokenizer_from_dict` needs to make the same tokenizer again."""
        ...

    def length(self, caption: str) -> int:
        """The tokens of a caption that is neither cut nor filled, start and end included."""
        return len(self.encode(caption, sys.maxsize))

    def encode_all(self, captions: Iterable[str], context: int) -> list[np.ndarray]:
        """Every caption by itself, unpadded: for captions that are drawn again and again."""
        return [np.array(self.encode(caption, context), dtype=np.int32) for caption in captions]

    def batch(self, captions: Iterable[str], context: int) -> np.ndarray:
        """Captions as rows, trimmed to the longest of them, rounded up to a multiple of 8, at most `context`."""
        return pad([self.encode(caption, context) for caption in captions], context, self.padding)


def padded_length(longest: int, context: int) -> int:
    """The length that rows are padded to where the longest has so many tokens."""
    return min(context, -(-longest // LENGTH_STEP) * LENGTH_STEP)


def pad(rows: Sequence[Sequence[int] | np.ndarray], context: int, padding: int) -> np.ndarray:
    """Rows of one length: the longest one's, rounded up so that shapes repeat, at most `context`."""
    length = padded_length(max(len(row) for row in rows), context)
    padded = np.full((len(rows), length), padding, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


class CharacterTokenizer(Tokenizer):
    """One token per character, lower-cased: for few captions, or a small alphabet that is known.
    Characters that were not learnt share one unknown token."""

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet
        self.start, self.unknown, self.end = len(alphabet), len(alphabet) + 1, len(alphabet) + 2
        self.padding = self.start
        self._ids = {character: index for index, character in enumerate(alphabet)}

    @classmethod
    def learn(cls, captions: Iterable[str]) -> CharacterTokenizer:
        """The alphabet of some captions."""
        return cls(
            "".join(sorted({character for caption in captions for character in caption.lower()}))
        )

    def encode(self, caption: str, context: int) -> list[int]:
        body = [
            self._ids.get(character, self.unknown) for character in caption.lower()[: context - 2]
        ]
        return [self.start, *body, self.end]

    def decode(self, tokens: Iterable[int]) -> str:
        """The caption of the tokens up to the end; unknown characters come back as a question mark."""
        characters = []
        for token in tokens:
            if token == self.end:
                break
            if token != self.start:
                characters.append(self.alphabet[token] if token < len(self.alphabet) else "?")
        return "".join(characters)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "characters", "alphabet": self.alphabet}


class PretrainedTokenizer(Tokenizer):
    """Tokens as a pretrained tower knows them, from its tokenizer.json. Unlike in our own, the end need not have
    the highest id."""

    def __init__(self, description: dict[str, Any], padding: int) -> None:
        self._description = {**description, "truncation": None, "padding": None}
        self.padding = padding
        self._reader = self._read(self._description)
        marks = self._reader.encode("").ids or [padding]
        self.start, self.end = marks[0], marks[-1]

    @staticmethod
    def _read(description: dict[str, Any]) -> Reader:
        # Else the package starts a thread a core and warns when the process is forked later.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer as Reader

        try:
            return Reader.from_str(json.dumps(description))
        except (
            BaseException
        ) as error:  # the package raises nothing more precise, and where it panics, no Exception
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise DataError(f"The tokenizer is damaged: {first_line(error)}.") from None
            raise

    @property
    def vocabulary(self) -> int:
        return self._reader.get_vocab_size()

    def encode(self, caption: str, context: int) -> list[int]:
        return self._cut(self._reader.encode(caption).ids, context)

    def decode(self, tokens: Iterable[int]) -> str:
        return self._reader.decode(list(tokens), skip_special_tokens=True)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "foreign", "description": self._description, "padding": self.padding}

    def _cut(self, tokens: list[int], context: int) -> list[int]:
        """At most `context` tokens, the last one kept. No caption is empty: something has to be pooled."""
        tokens = tokens or [self.end]
        return tokens if len(tokens) <= context else [*tokens[: context - 1], tokens[-1]]


class SiglipTokenizer(PretrainedTokenizer):
    """A SigLIP's tokenizer, from its tokenizer.json. Captions are cleaned, end with an end token and
    are filled to the full context: the text tower learned to look at the padding."""

    fills = True

    def __init__(self, description: dict[str, Any], padding: int, cleaning: str) -> None:
        self.cleaning, self._clean = cleaning, CLEANING[cleaning]
        super().__init__(description, padding)

    def encode(self, caption: str, context: int) -> list[int]:
        tokens = self._cut(self._ids(caption), context)
        return tokens + [self.padding] * (context - len(tokens))

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the caption of the tokens up to the end."""
        return super().decode(self._before_end(tokens)).strip()

    def length(self, caption: str) -> int:
        return len(self._ids(caption))

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "kind": "siglip", "cleaning": self.cleaning}

    def _ids(self, caption: str) -> list[int]:
        return self._reader.encode(self._cleaned(caption)).ids

    def _cleaned(self, caption: str) -> str:
        return self._clean(caption.encode("utf-8", "replace").decode("utf-8"))  # no lone surrogates

    def _before_end(self, tokens: Iterable[int]) -> list[int]:
        marks = (self.end, self.padding)
        return list(itertools.takewhile(lambda token: token not in marks, tokens))


class SentencePieceTokenizer(SiglipTokenizer):
    """The first SigLIP's tokenizer, from its spiece.model, through the package sentencepiece."""

    def __init__(self, pieces: bytes, cleaning: str) -> None:
        self.pieces = pieces
        self.cleaning, self._clean = cleaning, CLEANING[cleaning]
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise DataError(
                "This tokenizer needs the package sentencepiece.", hint=install("towers")
            ) from None
        try:
            self._processor = SentencePieceProcessor(model_proto=pieces or b"damaged")
        except RuntimeError:
            raise DataError("it is no file of SentencePiece.") from None
        self._unknown = self._processor.unk_id()
        self.start = self.end = self.padding = self._processor.piece_to_id("</s>")
        if self.end == self._unknown:
            raise DataError("it has no piece for the end of a caption.")
        # Multilingual vocabularies end with pieces that T5 reserved; their weights lack them.
        count = self._processor.get_piece_size()
        while count and "<extra_id_" in self._processor.id_to_piece(count - 1):
            count -= 1
        self._count = count

    @property
    def vocabulary(self) -> int:
        return self._count

    def decode(self, tokens: Iterable[int]) -> str:
        return self._processor.decode(self._before_end(tokens)).strip()

    def to_dict(self) -> dict[str, Any]:
        pieces = base64.b64encode(self.pieces).decode("ascii")
        return {"kind": "sentencepiece", "pieces": pieces, "cleaning": self.cleaning}

    def _ids(self, caption: str) -> list[int]:
        tokens = self._processor.encode(self._cleaned(caption))
        known = [token if token < self._count else self._unknown for token in tokens]
        return [*known, self.end]


CLIP_MERGES = Path(__file__).with_name("clip_merges.txt.gz")
WORD_END = "</w>"
LEAST = 2 * 256 + 2
"""Tokens before the first merge."""
REMEMBERED = 200_000
"""Words whose tokens are cached: captions use the same words again and again."""
MOST_OF_A_WORD = 16
"""Tokens of a word that is cached. What has more is no word, and might take as much memory as ten thousand."""

START, END = "<start_of_text>", "<end_of_text>"
_WORD = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
WORDS = regex.compile(_WORD, regex.IGNORECASE)
WORDS_AND_MARKS = regex.compile(f"{START}|{END}|{_WORD}", regex.IGNORECASE)
"""CLIP's own: the names of its start and end tokens, written in a caption, become those tokens."""

# Printable ASCII without an ampersand. Nothing in it is a control character, a broken encoding, a ligature, a curled
# quote or an HTML entity, so that ftfy and unescaping, which are slow, have nothing to change.
_PLAIN = re.compile(r"[ -%'-~]*")


def clean(caption: str) -> str:
    """A caption as CLIP reads it."""
    if not _PLAIN.fullmatch(caption):
        import ftfy  # here, because most captions do not need it

        caption = html.unescape(html.unescape(ftfy.fix_text(caption)))
    return " ".join(caption.split()).lower()


class BytePairTokenizer(Tokenizer):
    """CLIP's BPE where `own` is set, else one with the merges given."""

    padding = 0

    def __init__(self, merges: Sequence[tuple[str, str]], *, own: bool = False) -> None:
        from tokenizers.models import BPE

        self.merges, self.own = merges, own
        letters = list(byte_letters().values())
        ids: dict[str, int] = {}
        for symbol in (
            *letters,
            *(letter + WORD_END for letter in letters),
            *(a + b for a, b in merges),
        ):
            ids.setdefault(symbol, len(ids))  # two merges may make the same token
        self.start, self.end = len(ids), len(ids) + 1
        self.tokens = list(ids)
        self._bpe = BPE(
            vocab=ids, merges=list(merges), end_of_word_suffix=WORD_END, cache_capacity=0
        )
        self._pattern = WORDS_AND_MARKS if own else WORDS
        self._marks = {START: (self.start,), END: (self.end,)} if own else {}
        self._known: dict[str, tuple[int, ...]] = dict(self._marks)

    def encode(self, caption: str, context: int) -> list[int]:
        tokens = [self.start]
        for word in self._pattern.findall(clean(caption)):
            tokens += self._known.get(word) or self._word(word)
            if len(tokens) >= context:
                break
        return [*tokens[: context - 1], self.end]

    def decode(self, tokens: Iterable[int]) -> str:
        text = []
        for symbol in tokens:
            if symbol == self.end:
                break
            if symbol != self.start:
                text.append(self.tokens[symbol].replace(WORD_END, " "))
        return (
            b"".join(letter_bytes()[letter] for letter in "".join(text))
            .decode("utf-8", "replace")
            .strip()
        )

    def to_dict(self) -> dict[str, Any]:
        return (
            {"kind": "clip"}
            if self.own
            else {"kind": "bpe", "merges": [" ".join(merge) for merge in self.merges]}
        )

    def _word(self, word: str) -> tuple[int, ...]:
        found = tuple(token.id for token in self._bpe.tokenize(spelt(word)))
        if len(found) > MOST_OF_A_WORD:
            return found
        if len(self._known) >= REMEMBERED:
            self._known = dict(self._marks)
        self._known[word] = found
        return found


@cache
def byte_letters() -> dict[int, str]:
    """A visible letter for each byte, as GPT-2 and CLIP order them: printable ones first, standing for themselves."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + at) for at, byte in enumerate(others)
    }


@cache
def letter_bytes() -> dict[str, bytes]:
    """The byte of each letter, and a space for a space: that is where decoded words end."""
    return {letter: bytes([byte]) for byte, letter in byte_letters().items()} | {" ": b" "}


def spelt(word: str) -> str:
    """The bytes of a word as letters."""
    letters = byte_letters()
    return "".join([letters[byte] for byte in word.encode("utf-8")])


@cache
def clip_tokenizer() -> BytePairTokenizer:
    """CLIP's own: 49,408 tokens, the same ids as OpenAI's and OpenCLIP's."""
    _, *lines = gzip.decompress(CLIP_MERGES.read_bytes()).decode("utf-8").splitlines()
    return BytePairTokenizer([(first, second) for first, second in map(str.split, lines)], own=True)


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
        return (
            learnt,
            f"asked for: a BPE of {learnt.vocabulary:,} tokens learnt from {len(captions):,} captions",
        )
    characters = (
        CharacterTokenizer.learn(captions) if alphabet is None else CharacterTokenizer(alphabet)
    )
    if config.tokenizer == "characters":
        return characters, f"asked for: {len(characters.alphabet)} characters"
    assert config.tokenizer == AUTO
    if alphabet is not None:
        return characters, f"the captions are written with {len(alphabet)} characters"
    different = len(set(captions))
    cut = sum(len(caption) > context - 2 for caption in captions) / max(1, len(captions))
    if different < FEW and cut <= CUT:
        return (
            characters,
            f"characters: {different:,} different captions are too few to learn words from",
        )
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
    # Of pairs that are equally common the one with the lower numbers is merged first, and letters that end a word would
    # be numbered in the random order of a hash table: so they are named beforehand.
    ends = sorted({word[-1] + WORD_END for word in spelling})
    learner = Learner(BPE(end_of_word_suffix=WORD_END))
    learner.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = BpeTrainer(
        vocab_size=len(letters) + len(ends) + size - LEAST,
        special_tokens=[*sorted(letters), *ends],
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
        case {"kind": "bpe", "merges": list(merges)} if all(
            str(merge).count(" ") == 1 for merge in merges
        ):
            return BytePairTokenizer([(first, second) for first, second in map(str.split, merges)])
        case {"kind": "clip"}:
            return clip_tokenizer()
        case {"kind": "foreign", "description": dict(description), "padding": int(padding)}:
            return PretrainedTokenizer(description, padding)
        case {
            "kind": "siglip",
            "description": dict(description),
            "padding": int(padding),
            "cleaning": str(cleaning),
        } if cleaning in CLEANING:
            return SiglipTokenizer(description, padding, cleaning)
        case {
            "kind": "sentencepiece",
            "pieces": str(pieces),
            "cleaning": str(cleaning),
        } if cleaning in CLEANING:
            return SentencePieceTokenizer(base64.b64decode(pieces), cleaning)
    raise DataError(f"The saved tokenizer of kind {saved.get('kind')!r} is not known or not whole.")


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
        raise DataError(
            f"The tokenizer in {path} cannot be read: {error}.", hint="lapclip train"
        ) from None
