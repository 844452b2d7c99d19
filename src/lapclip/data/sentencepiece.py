"""SentencePiece's files (`spiece.model`) as a tokenizer.json has them, and captions as SigLIP cleans them.

A file is a protocol buffer, described by https://github.com/google/sentencepiece, src/sentencepiece_model.proto; what
is read of it is little, so that neither that package nor protobuf is needed.
"""

from __future__ import annotations

import base64
import html
import re
import string
import struct
from collections.abc import Callable, Iterator
from typing import Any

from lapclip.errors import DataError

SPACE = "▁"
"""What stands for a space inside a piece."""
UNIGRAM = 1
NORMAL, UNKNOWN, CONTROL = 1, 2, 3
"""Kinds of pieces."""
NOT_IN_TEXTS = "\U0010fffd"
"""Stands before names of tokens that no text may have."""
PLAIN = re.compile("[ -~]*")
"""What no map of characters changes."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def canonical(caption: str) -> str:
    """As the first SigLIP reads it: lower case, without ASCII's punctuation, one space between words."""
    return " ".join(caption.lower().translate(_PUNCTUATION).split())


def mended(caption: str) -> str:
    """As OpenCLIP reads any caption: mended by ftfy, HTML entities unescaped, one space between words."""
    import ftfy  # here, because only models of OpenCLIP's need it

    return " ".join(html.unescape(html.unescape(ftfy.fix_text(caption))).split())


PIECES = "pieces"
CLEANING: dict[str, Callable[[str], str]] = {
    "": str,
    PIECES: canonical,
    "canonical": canonical,
    "mended": mended,
    "mended-lower": lambda caption: mended(caption).lower(),
    # Here an underscore becomes a space, and punctuation goes before lower case, which decides on the last sigma.
    "mended-canonical": lambda caption: " ".join(
        mended(caption).replace("_", " ").translate(_PUNCTUATION).lower().split()
    ),
}
"""How captions are cleaned before they are cut into pieces, by the name that a saved tokenizer has for it. With
`pieces` the rest is done as SentencePiece does it (`Normaliser`), else as a tokenizer.json says."""


class Normaliser:
    """What SentencePiece does to a text before it looks for pieces.

    The steps stand in a tokenizer.json too, where the package tokenizers does them letter by letter as people see
    letters, and so drops some accents; here they are done as SentencePiece does them, byte by byte.
    """

    def __init__(self, description: dict[str, Any]) -> None:
        steps = description["normalizer"]["normalizers"]
        maps = [
            base64.b64decode(step["precompiled_charsmap"])
            for step in steps
            if step["type"] == "Precompiled"
        ]
        self._trie: tuple[int, ...] = ()
        self._texts = b""
        if maps:
            (size,) = struct.unpack_from("<I", maps[0])
            self._trie = struct.unpack_from(f"<{size // 4}I", maps[0], 4)
            self._texts = maps[0][4 + size :]
        self._spaces = any(step["type"] == "Replace" for step in steps)
        self._prefix = description["pre_tokenizer"]["prepend_scheme"] == "always"

    def __call__(self, text: str) -> str:
        text = (
            text if not self._trie or PLAIN.fullmatch(text) else self._mapped(text.encode("utf-8"))
        )
        if self._spaces:
            text = " ".join(part for part in text.split(" ") if part)
        return (SPACE * self._prefix + text.replace(" ", SPACE)) if text else ""

    def _mapped(self, data: bytes) -> str:
        """Each longest beginning that the map knows becomes what it says; what it does not know stays."""
        found, at = bytearray(), 0
        while at < len(data):
            length, text = self._longest(data, at)
            if length:
                stop = self._texts.find(b"\0", text)
                found += self._texts[text : stop if stop >= 0 else None]
            else:
                length = 1 + sum(
                    data[at] >= first for first in (0xC0, 0xE0, 0xF0)
                )  # the bytes of one character
                found += data[at : at + length]
            at += length
        return found.decode("utf-8", "replace")

    def _longest(self, data: bytes, at: int) -> tuple[int, int]:
        """How many bytes from there on the map knows, and where what they become stands: a double-array trie."""
        trie, length, text = self._trie, 0, 0
        node = _offset(trie[0])
        for end in range(at, len(data)):
            node ^= data[end]
            if node >= len(trie) or trie[node] & 0x800000FF != data[end]:
                break
            has_text = trie[node] >> 8 & 1
            node ^= _offset(trie[node])
            if has_text:
                length, text = end + 1 - at, trie[node] & 0x7FFFFFFF
        return length, text


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 0x200) >> 6)


def pieces_alone(description: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json that finds pieces in a text that is normalised, and does nothing else: names of tokens such as
    the end's, written in a text, are text."""
    model, special = description["model"], {token["id"] for token in description["added_tokens"]}
    vocabulary = [
        [f"{NOT_IN_TEXTS}{piece}" if at in special else piece, score]
        for at, (piece, score) in enumerate(model["vocab"])
    ]
    nothing = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor"))
    return {**description, **nothing, "added_tokens": [], "model": {**model, "vocab": vocabulary}}


def read_pieces(data: bytes) -> dict[str, Any]:
    """The tokenizer.json of a file of SentencePiece: a unigram model whose captions end with `</s>`."""
    try:
        return _description(data)
    except (ValueError, LookupError, struct.error, AttributeError, TypeError) as error:
        raise DataError(f"it is no file of SentencePiece: {error}") from None


def _description(data: bytes) -> dict[str, Any]:
    pieces, trainer, normaliser = [], b"", b""
    for field, value in _fields(data):
        match field, value:
            case 1, bytes():
                piece = dict(_fields(value))
                pieces.append(
                    (piece[1].decode("utf-8"), _float(piece.get(2, 0)), piece.get(3, NORMAL))
                )
            case 2, bytes():
                trainer = value
            case 3, bytes():
                normaliser = value
    trained, normalised = dict(_fields(trainer)), dict(_fields(normaliser))
    if trained.get(3, UNIGRAM) != UNIGRAM:
        raise ValueError("its pieces were not found by a unigram model")
    kinds = {piece: (at, kind) for at, (piece, _, kind) in enumerate(pieces)}
    unknown = next((at for at, kind in kinds.values() if kind == UNKNOWN), None)
    if unknown is None or "</s>" not in kinds:
        raise ValueError("it has no piece for what is unknown, or none for the end")
    end = kinds["</s>"][0]
    steps: list[dict[str, Any]] = []
    if charsmap := normalised.get(2):
        steps.append(
            {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
        )
    if normalised.get(4, 1):  # remove_extra_whitespaces
        steps += [_replace("^ +| +$", ""), _replace(" {2,}", " ")]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": at, "content": piece, "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for piece, (at, kind) in kinds.items()
            if kind in (UNKNOWN, CONTROL)
        ],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": SPACE,
            "prepend_scheme": "always" if normalised.get(3, 1) else "never",
            "split": False,
        },
        "post_processor": end_with("</s>", end),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "ByteFallback"},
                {
                    "type": "Metaspace",
                    "replacement": SPACE,
                    "prepend_scheme": "always",
                    "split": False,
                },
            ],
        },
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [[piece, score] for piece, score, _ in pieces],
            "byte_fallback": bool(trained.get(35, 0)),
        },
    }


def end_with(name: str, token: int) -> dict[str, Any]:
    """The step of a tokenizer.json that puts an end token behind each caption."""
    parts = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": name, "type_id": 0}}]
    special = {name: {"id": name, "ids": [token], "tokens": [name]}}
    return {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special}


def end_of(description: dict[str, Any]) -> int:
    """The end token that such a step puts there."""
    (special,) = description["post_processor"]["special_tokens"].values()
    return int(special["ids"][0])


def _replace(pattern: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": by}


def _float(bits: Any) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer and their values: whole numbers, or bytes. Later ones win over earlier ones."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        match key & 7:
            case 0:
                value, at = _varint(data, at)
            case 1:
                value, at = struct.unpack_from("<Q", data, at)[0], at + 8
            case 5:
                value, at = struct.unpack_from("<I", data, at)[0], at + 4
            case 2:
                length, at = _varint(data, at)
                value, at = data[at : at + length], at + length
                if len(value) != length:
                    raise ValueError("it ends too early")
            case kind:
                raise ValueError(f"it has a field of the kind {kind}")
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at
        if shift > 63:
            raise ValueError("it has a number that is too long")
