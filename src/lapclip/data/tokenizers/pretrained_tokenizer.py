"""The tokenizer of a pretrained text tower, as its tokenizer.json describes it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from lapclip.data.tokenizers.tokenizer import Tokenizer


class PretrainedTokenizer(Tokenizer):
    """Tokens as the pretrained tower knows them. Unlike in our own, the end need not have the highest id."""

    def __init__(self, description: dict[str, Any], padding: int) -> None:
        # Else the package starts a thread a core and warns when the process is forked later.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer as Reader

        self._description = {**description, "truncation": None, "padding": None}
        self._reader = Reader.from_str(json.dumps(self._description))
        self.padding = padding
        marks = self._reader.encode("").ids or [padding]
        self.start, self.end = marks[0], marks[-1]

    @property
    def vocabulary(self) -> int:
        return self._reader.get_vocab_size()

    def encode(self, caption: str, context: int) -> list[int]:
        return self._cut(self._reader.encode(caption).ids, context)

    def encode_all(self, captions: Iterable[str], context: int) -> list[np.ndarray]:
        encoded = self._reader.encode_batch(list(captions))
        return [np.array(self._cut(one.ids, context), dtype=np.int32) for one in encoded]

    def decode(self, tokens: Iterable[int]) -> str:
        return self._reader.decode(list(tokens), skip_special_tokens=True)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "foreign", "description": self._description, "padding": self.padding}

    def _cut(self, tokens: list[int], context: int) -> list[int]:
        """At most `context` tokens, the last one kept. No caption is empty: something has to be pooled."""
        tokens = tokens or [self.end]
        return tokens if len(tokens) <= context else [*tokens[: context - 1], tokens[-1]]
