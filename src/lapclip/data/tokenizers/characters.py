"""One token a character: for few captions, or for a small alphabet that is known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lapclip.data.tokenizers.tokenizer import Tokenizer


class CharacterTokenizer(Tokenizer):
    """One token per character, lower-cased. Characters that were not learnt share one unknown token."""

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet
        self.start, self.unknown, self.end = len(alphabet), len(alphabet) + 1, len(alphabet) + 2
        self.padding = self.start
        self._ids = {character: index for index, character in enumerate(alphabet)}

    @classmethod
    def learn(cls, captions: Iterable[str]) -> CharacterTokenizer:
        """The alphabet of some captions."""
        return cls("".join(sorted({character for caption in captions for character in caption.lower()})))

    def encode(self, caption: str, context: int) -> list[int]:
        body = [self._ids.get(character, self.unknown) for character in caption.lower()[: context - 2]]
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
