"""The evaluation of a model on some images: its metrics, and examples to look at.

Shapes: N images, M captions, E embedding, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lapclip.data.dataset import Pairs
from lapclip.evaluation.geometry import similarities
from lapclip.evaluation.hard_negatives import most_confused, negatives
from lapclip.evaluation.ranks import best_images, ranks
from lapclip.evaluation.retrieval import in_batches, retrieval_of
from lapclip.evaluation.zeroshot import class_answers, zeroshot_of

EXAMPLES, TOP = 6, 5


def evaluate_pairs(
    image_NE: np.ndarray,
    text_ME: np.ndarray,
    image_M: np.ndarray,
    pairs: Pairs,
    batch_size: int | None,
) -> dict[str, Any]:
    """Retrieval both ways, hard negatives, and what the model answers to a few captions."""
    t2i_M, i2t_N = ranks(image_NE, text_ME, image_M)
    return {
        "evaluation": {
            **retrieval_of(t2i_M, i2t_N, image_M, among_1000=True),
            "similarities": similarities(image_NE, text_ME, image_M),
            **in_batches(image_NE, text_ME, image_M, batch_size),
        },
        "negatives": negatives(image_NE, text_ME, image_M, pairs.captions),
        "confused": most_confused(image_NE, text_ME, image_M, pairs.captions),
        "examples": examples(image_NE, text_ME, image_M, t2i_M, pairs.captions),
    }


def evaluate_classes(
    image_NE: np.ndarray, class_CE: np.ndarray, label_N: np.ndarray, classes: Sequence[str]
) -> dict[str, Any]:
    """Zero-shot classification, and the images that are most surely taken for another class."""
    answers = class_answers(image_NE, class_CE, label_N)
    mistaken = np.flatnonzero(answers.guess_N != label_N)
    surest_first = mistaken[
        np.argsort(answers.own_N[mistaken] - answers.rival_N[mistaken], kind="stable")
    ]
    shown, seen = [], set()
    for at in surest_first:  # one image for each kind of mistake, so that they differ
        kind = (int(label_N[at]), int(answers.guess_N[at]))
        if kind not in seen and len(shown) < 2 * EXAMPLES:
            seen.add(kind)
            shown.append({
                "picture": int(at), "class": classes[kind[0]], "guess": classes[kind[1]],
                "class_score": float(answers.own_N[at]), "guess_score": float(answers.rival_N[at]),
            })  # fmt: skip
    return {
        "zeroshot": zeroshot_of(answers, label_N, classes),
        "mistaken": shown,
    }


def examples(
    image_NE: np.ndarray,
    text_ME: np.ndarray,
    image_M: np.ndarray,
    t2i_M: np.ndarray,
    captions: Sequence[Sequence[str]],
) -> list[dict[str, Any]]:
    """The first answers to a few captions, spread over the split."""
    texts = [caption for options in captions for caption in options]
    rows = np.unique(np.linspace(0, len(texts) - 1, min(EXAMPLES, len(texts))).round().astype(int))
    found, scores = best_images(image_NE, text_ME[rows], TOP)
    return [
        {
            "caption": texts[row],
            "right": int(image_M[row]),
            "rank": int(t2i_M[row]),
            "top": [
                {"picture": int(at), "score": float(score)}
                for at, score in zip(*answer, strict=True)
            ],
        }
        for row, answer in zip(rows, zip(found, scores, strict=True), strict=True)
    ]
