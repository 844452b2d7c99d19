"""Hubness: some images are close to every question, and stand among the answers where they do not belong.

How close an image is to questions in general, the mean of its best scores among a question bank, says how much of a
hub it is. A share of that is taken from its score (nearest-neighbour normalisation). The order of answers changes
by one subtraction an image. How much is taken is chosen for each kind of question on held-out pairs, and
nothing is taken where they show no gain.

Shapes: N images, E embedding, M captions, B texts of a bank, Q questions, S shares, K kinds of question.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lapclip.evaluation import QUESTIONS, RANKS
from lapclip.evaluation.intervals import percentiles, resamples
from lapclip.seeding import generator

NEAREST = {"whole": 16, "short": 3000}
"""For each kind of question: how many of the best scores among the bank are averaged. Hubs of whole captions are near
to some of them, hubs of short questions to all."""
KINDS = tuple(QUESTIONS)
SHARES = np.round(np.arange(0, 1.01, 0.1), 1)
"""Shares that are tried."""
MOST = 5000
"""Held-out images, and questions, that the choice looks at."""
BLOCK = 2048
"""Images at a time."""


def closeness(image_NE: np.ndarray, bank: dict[str, np.ndarray]) -> np.ndarray:
    """How close each image is to questions of each kind, N by K; 0 where the bank has none of a kind.

    Rows are taken as float16, as an index keeps them, and multiplied in float64: such products and their sums are
    exact, so that equal images get equal numbers wherever they stand.
    """
    import torch

    found_NK = np.zeros((len(image_NE), len(KINDS)), np.float32)
    with torch.inference_mode():
        for column, kind in enumerate(KINDS):
            bank_BE = torch.from_numpy(bank[kind].astype(np.float16)).double()
            if not len(bank_BE):
                continue
            nearest = min(NEAREST[kind], len(bank_BE))
            for at in range(0, len(image_NE), BLOCK):
                rows_bE = torch.from_numpy(np.array(image_NE[at : at + BLOCK], np.float16)).double()
                best_bk = torch.topk(rows_bE @ bank_BE.T, nearest, dim=1).values
                found_NK[at : at + BLOCK, column] = best_bk.mean(dim=1).numpy()
    return found_NK


def t2i_ranks(image_NE: np.ndarray, text_ME: np.ndarray, image_M: np.ndarray, close_N: np.ndarray) -> np.ndarray:
    """The rank of each caption's own image, S by M: with each of the shares taken from the scores. Ties count against
    the model."""
    ranks_SM = np.zeros((len(SHARES), len(text_ME)), np.int64)
    for at in range(0, len(text_ME), BLOCK):
        scores_bN, own_b = text_ME[at : at + BLOCK] @ image_NE.T, image_M[at : at + BLOCK]
        for row, share in enumerate(SHARES):
            left_bN = scores_bN - np.float32(share) * close_N
            own_b1 = np.take_along_axis(left_bN, own_b[:, None], 1)
            ranks_SM[row, at : at + BLOCK] = (left_bN >= own_b1).sum(axis=1)
    return ranks_SM


def choose_for_captions(
    image_NE: np.ndarray, text_ME: np.ndarray, image_M: np.ndarray, close_N: np.ndarray
) -> dict[str, Any]:
    """The share for whole captions, by the mean reciprocal rank of each one's own image; recall without and with."""
    rows = generator(0, "held-out questions").permutation(len(text_ME))[:MOST]
    kept = np.unique(np.concatenate([image_M[rows], np.arange(len(image_NE))[:MOST]]))
    image_Q = np.searchsorted(kept, image_M[rows])
    ranks_SQ = t2i_ranks(image_NE[kept], text_ME[rows], image_Q, close_N[kept])
    found, row_Q = choose(1 / ranks_SQ, image_Q)
    with_Q = np.take_along_axis(ranks_SQ, row_Q[None], 0)[0]
    for rank in RANKS:
        found[f"t2i_r{rank}"] = float((ranks_SQ[0] <= rank).mean())
        found[f"t2i_r{rank}_with"] = float((with_Q <= rank).mean())
    return found


def choose_for_questions(precision_SQ: np.ndarray, words: int) -> dict[str, Any]:
    """The share for short questions, by the average precision of each with each share. Its mean without and with is
    that of the first questions, which are single words."""
    found, row_Q = choose(precision_SQ, np.arange(precision_SQ.shape[1]))
    with_Q = np.take_along_axis(precision_SQ, row_Q[None], 0)[0]
    return {**found, "map": float(precision_SQ[0, :words].mean()), "map_with": float(with_Q[:words].mean())}


def choose(value_SQ: np.ndarray, group_Q: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """The share with the highest mean value, what it gains, and the row of the share that each question is scored with.

    The groups are halved: each half is scored with the share that the other half chose, so that the gain is one on
    questions that chose nothing. The share in use is the one that all of them choose, and it is used where the gain is
    surely above 0.
    """
    groups, group_Q = np.unique(group_Q, return_inverse=True)
    half_Q = np.isin(group_Q, generator(0, "halves").permutation(len(groups))[: len(groups) // 2])
    row_Q = np.zeros(len(group_Q), np.int64)
    for half in (half_Q, ~half_Q):
        if half.any() and (~half).any():
            row_Q[half] = value_SQ[:, ~half].mean(axis=1).argmax()
    gain_Q = np.take_along_axis(value_SQ, row_Q[None], 0)[0] - value_SQ[0]
    gains = np.bincount(group_Q, weights=gain_Q, minlength=len(groups))
    counts = np.bincount(group_Q, minlength=len(groups)).astype(float)
    drawn = np.concatenate([(weights @ gains) / (weights @ counts) for weights in resamples(len(groups))])
    low, high = percentiles(drawn)
    row = int(value_SQ.mean(axis=1).argmax())
    return {
        "questions": len(group_Q),
        "share": float(SHARES[row]),
        "gain": float(gain_Q.mean()),
        "gain_low": low,
        "gain_high": high,
        "used": bool(low > 0 and row > 0),
    }, row_Q
