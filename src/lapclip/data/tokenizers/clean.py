"""Captions as CLIP reads them: mended by ftfy, HTML entities unescaped, one space between words, lower case.

The steps and the pattern of words are those of https://github.com/openai/CLIP, clip/simple_tokenizer.py. `regex` finds
the words, as there: the regular expressions inside the tokenizers package know an older Unicode and cut 17,481
characters differently.
"""

from __future__ import annotations

import html
import re

import regex

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
