"""How captions are cleaned before SigLIP's tokenizers cut them into pieces."""

from __future__ import annotations

import html
import string
from collections.abc import Callable

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def canonical(caption: str) -> str:
    """Clean as the first SigLIP does: lower case, no ASCII punctuation, one space between words."""
    return " ".join(caption.lower().translate(_PUNCTUATION).split())


def mended(caption: str) -> str:
    """Clean as OpenCLIP does: ftfy, unescaped HTML entities, one space between words."""
    import ftfy  # here, because only models of OpenCLIP's need it

    return " ".join(html.unescape(html.unescape(ftfy.fix_text(caption))).split())


def mended_canonical(caption: str) -> str:
    """Clean as OpenCLIP does for SigLIP.

    An underscore becomes a space, and punctuation goes before lower case, which decides on the last sigma.
    """
    text = mended(caption).replace("_", " ")
    return " ".join(text.translate(_PUNCTUATION).lower().split())


CLEANING: dict[str, Callable[[str], str]] = {
    "": str,
    "canonical": canonical,
    "mended": mended,
    "mended-lower": lambda caption: mended(caption).lower(),
    "mended-canonical": mended_canonical,
}
"""Ways to clean, by the name in a saved tokenizer."""
