"""Tokenizers on disk: with a model in its config.json, and with a run, so that it goes on with the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lapclip.data.tokenizers.bpe import BytePairTokenizer, clip_tokenizer
from lapclip.data.tokenizers.characters import CharacterTokenizer
from lapclip.data.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from lapclip.data.tokenizers.tokenizer import Tokenizer
from lapclip.errors import DataError
from lapclip.paths import write_atomic


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
        raise DataError(f"Cannot write {path}: {error.strerror or error}.") from error


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer in a file, or None where there is no such file."""
    try:
        return tokenizer_from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise DataError(f"The tokenizer in {path} cannot be read: {error}.", hint="lapclip train") from None
