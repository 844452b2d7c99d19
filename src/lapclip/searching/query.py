"""What a question means: "beach -people" asks for beaches, and less for people; and which images may answer."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np

from lapclip.errors import SearchError

SHARE = 0.5
"""How much of what is not wanted is taken away; chosen by benchmarks/search_minus.py."""
AGES = {"d": 1, "w": 7, "m": 30, "y": 365}
"""Days."""
_MINUS = re.compile(r'(?:^|(?<=\s))-(?:"([^"]+)"|([^\s"-]\S*))')
_AGE = re.compile(r"(\d{1,6})\s*([dwmy])")


class Query(NamedTuple):
    """What is wanted, and what is not."""

    wanted: str
    unwanted: tuple[str, ...]


def parse(query: str) -> Query:
    """What a question asks for. A word after a dash is not wanted; several words stand in quotation marks."""
    unwanted = tuple(first or second for first, second in _MINUS.findall(query))
    wanted = " ".join(_MINUS.sub(" ", query).split())
    if not wanted and not unwanted:
        raise SearchError("There is nothing to look for.", hint='lapclip search FOLDER "a red bicycle"')
    return Query(wanted, unwanted)


def check_question(query: str | None, like: os.PathLike | None, limit: int) -> None:
    """Refuse what cannot be answered before anything is loaded."""
    if limit < 1:
        raise SearchError(f"--limit {limit} shows nothing.", hint="--limit 10")
    if query is not None and like is not None:
        raise SearchError("Either words or --like IMAGE, not both.", hint="leave one of them out")
    if like is not None and not os.path.isfile(like):
        raise SearchError(f"There is no image {like}.", hint="--like PATH of an image")
    if query is not None:
        parse(query)


def vector_of(query: Query, encode_text: Callable[[Sequence[str]], np.ndarray]) -> np.ndarray:
    """Where to look: the wanted text less a share of the unwanted, of unit length."""
    texts = [text for text in (query.wanted, *query.unwanted) if text]
    vectors = np.asarray(encode_text(texts), dtype=np.float32)
    if not query.unwanted:
        return vectors[0]
    total = vectors[0] if query.wanted else np.zeros_like(vectors[0])
    total = total - SHARE * vectors[1 if query.wanted else 0 :].mean(axis=0)
    return total / max(float(np.linalg.norm(total)), 1e-12)


def parse_since(text: str, now: float | None = None) -> float:
    """A day such as 2024-05-01, a month, a year, or an age such as 30d, 2w, 6m, 1y, as seconds."""
    if age := _AGE.fullmatch(text.strip().lower()):
        return (time.time() if now is None else now) - int(age[1]) * AGES[age[2]] * 86_400
    for form in ("%Y-%m-%d", "%Y-%m", "%Y"):
        try:
            return datetime.strptime(text.strip(), form).timestamp()
        except (ValueError, OverflowError, OSError):
            continue
    raise SearchError(f"{text} is no date and no age.", hint="--since 2024-05-01, or --since 30d")


def excluded(path: str, globs: Sequence[str]) -> bool:
    """Whether a path inside the folder, or one of the folders it is in, is left out by a glob. Case does not count."""
    parts = path.replace("\\", "/").lower().split("/")
    heads = ["/".join(parts[: at + 1]) for at in range(len(parts))]
    wanted = [glob.replace("\\", "/").lower().strip("/") for glob in globs]
    return any(fnmatchcase(name, glob) for glob in wanted for name in (*heads, *parts))
