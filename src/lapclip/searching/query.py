"""What a question means ("beach -people" asks for beaches, and less for people), which images may answer, and which
of them are nearest.

The search is exact: every vector is compared with the question, and the highest scores come in the same order each
time. The vectors are multiplied as they lie, in float16: a third of the time and no copy, but rounded. So that gives a
short list which is sure to hold the best, because the rounding has a bound, and the list is computed again in float32.

Shapes: N images, E embedding.
"""

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
"""How much of what is not wanted is taken away; chosen on Flickr8k (docs/search.md)."""
AGES = {"d": 1, "w": 7, "m": 30, "y": 365}
"""Days."""
BOUND = 1.1e-3
"""How far a float16 score can be from the true one: half a unit in the last of 11 bits for the score, and as much again
for the question, both of length at most one; what is added up is float32."""
BLOCK = 16384
"""Vectors of a short list that are computed again at a time."""
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
        raise SearchError(
            "There is nothing to look for.", hint='lapclip search FOLDER "a red bicycle"'
        )
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


def nearest(
    vectors: np.ndarray,
    rows_N: np.ndarray,
    numbers_N: np.ndarray,
    question_E: np.ndarray,
    count: int,
    less_N: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Which of the N images are nearest to a question, and their scores: the highest first, and of equal ones the
    lower number. `rows_N` says which of the vectors is whose, in rising order; `less_N` is taken from their scores."""
    question_E = np.ascontiguousarray(question_E, dtype=np.float32)
    count = min(count, len(rows_N))
    if count <= 0:
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    found, rough_N = np.arange(len(rows_N)), None
    if count < len(rows_N):
        rough_N = rough_scores(vectors, question_E)
        if len(rows_N) < len(
            vectors
        ):  # rows are distinct and in order, so that as many as there are is all of them
            rough_N = rough_N[rows_N]
        if less_N is not None:
            rough_N = rough_N - less_N
        last = np.partition(rough_N, len(rough_N) - count)[len(rough_N) - count]
        found = np.flatnonzero(rough_N >= last - 2 * BOUND)
    scores = exact_scores(
        vectors, rows_N[found], question_E, less_N if less_N is None else less_N[found]
    )
    if rough_N is not None and np.abs(rough_N[found] - scores).max() > BOUND:
        # Some processor adds up in float16 after all, so the list is not sure to hold the best.
        found = np.arange(len(rows_N))
        scores = exact_scores(vectors, rows_N, question_E, less_N)
    order = np.lexsort((numbers_N[found], -scores))[:count]
    return found[order], scores[order]


def rough_scores(vectors_NE: np.ndarray, question_E: np.ndarray) -> np.ndarray:
    """The product of a question with each vector, to within `BOUND`."""
    import torch

    with torch.inference_mode():
        return (
            torch.mv(torch.from_numpy(vectors_NE), torch.from_numpy(question_E).half())
            .float()
            .numpy()
        )


def exact_scores(
    vectors: np.ndarray,
    rows_N: np.ndarray,
    question_E: np.ndarray,
    less_N: np.ndarray | None = None,
) -> np.ndarray:
    """The product of a question with some of the vectors, in float32. Row by row, so that equal vectors score equal."""
    parts = [
        (vectors[rows_N[at : at + BLOCK]].astype(np.float32) * question_E).sum(axis=1)
        for at in range(0, len(rows_N), BLOCK)
    ]
    scores_N = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    return scores_N if less_N is None else scores_N - less_N
