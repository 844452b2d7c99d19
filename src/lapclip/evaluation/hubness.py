"""Hubness correction: rank down images that are close to every query.

The hubness of an image is its mean similarity to the nearest captions of a bank (nearest-neighbor normalization). A
share of it, chosen on held-out captions, is subtracted from the scores of the image. Short queries, which have fewer
words than nine in ten captions, are not corrected: on held-out words and phrases that gained nothing.

The bank of a run is drawn from the captions that it learns from. It is saved in the run's folder when the run begins,
so that it is there when the data is gone. Models from elsewhere have no bank and no correction.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lapclip.data.phrases import words as words_of
from lapclip.evaluation import RANKS
from lapclip.evaluation.intervals import percentiles, resamples
from lapclip.paths import read_json, write_atomic
from lapclip.seeding import generator

MAX_BANK_CAPTIONS = 3000  # twice as many gained nothing on Flickr8k, and each takes time to embed
NEAREST_CAPTIONS = 16  # chosen on Flickr8k's val photos
SHARES = np.round(np.arange(0, 1.01, 0.1), 1)  # SHARES[0] is 0: no correction
MAX_HELD_OUT = 5000  # held-out images, and captions, that the share is chosen on
BLOCK_ROWS = 2048


@dataclass(frozen=True)
class CaptionBank:
    """Captions that stand for queries in general."""

    captions: list[str]

    @property
    def min_words(self) -> int:
        """Number of words from which on a query counts as a caption: nine in ten captions have as many."""
        counts = sorted(count_words(caption) for caption in self.captions)
        return counts[len(counts) // 10] if counts else 0


def count_words(text: str) -> int:
    """Count words. In scripts without blanks, count characters."""
    return len(words_of(text))


def draw_bank(captions: Iterable[Sequence[str]]) -> CaptionBank:
    """Draw the bank of a run from the captions of its training images. The same captions give the same bank."""
    distinct = list(dict.fromkeys(itertools.chain.from_iterable(captions)))
    if len(distinct) > MAX_BANK_CAPTIONS:
        rows = generator(0, "question bank").permutation(len(distinct))[:MAX_BANK_CAPTIONS]
        distinct = [distinct[row] for row in sorted(rows.tolist())]
    return CaptionBank(distinct)


def save_bank(bank: CaptionBank, path: Path) -> None:
    write_atomic(path, json.dumps({"captions": bank.captions}, ensure_ascii=False))


def read_bank(path: Path) -> CaptionBank | None:
    """Return the saved bank, or None if there is no readable one."""
    try:
        content = read_json(path)
        captions = [str(text) for text in content["captions"][:MAX_BANK_CAPTIONS]]
        return CaptionBank(captions)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def hubness_of(images: np.ndarray, bank: np.ndarray) -> np.ndarray:
    """Return the mean similarity of each image to its nearest captions of the bank. An empty bank gives 0.

    Rounds vectors to float16, as the index stores them, and multiplies in float64. The products are then exact, so
    equal images get equal numbers.
    """
    import torch

    hubness = np.zeros(len(images), np.float32)
    if not len(bank):
        return hubness
    nearest = min(NEAREST_CAPTIONS, len(bank))
    with torch.inference_mode():
        captions = torch.from_numpy(bank.astype(np.float16)).double()
        for first in range(0, len(images), BLOCK_ROWS):
            block = np.array(images[first : first + BLOCK_ROWS], np.float16)
            scores = torch.from_numpy(block).double() @ captions.T
            best = torch.topk(scores, nearest, dim=1).values
            hubness[first : first + BLOCK_ROWS] = best.mean(dim=1).numpy()
    return hubness


@dataclass(frozen=True)
class CorrectionFit:
    """A share of hubness, chosen on held-out captions, and what it gains."""

    questions: int
    """Held-out captions."""
    share: float
    """Share of the hubness to subtract, with the best mean reciprocal rank."""
    used: bool
    """Whether the gain is surely above 0."""
    gain: float
    """Gain of the mean reciprocal rank, on captions that did not choose the share."""
    gain_low: float
    gain_high: float
    recalls: dict[str, float]
    """Text-to-image recall without the correction, as "t2i_r1", and with it, as "t2i_r1_with"."""


def fit_correction(
    images: np.ndarray, texts: np.ndarray, image_of_text: np.ndarray, hubness: np.ndarray
) -> CorrectionFit:
    """Choose the share of hubness with the best mean reciprocal rank of the own image of held-out captions.

    The images are halved. Each half is scored with the share that the other half chose, so the gain is one on captions
    that chose nothing. The share in use is the one that all of them choose.
    """
    rows = generator(0, "held-out questions").permutation(len(texts))[:MAX_HELD_OUT]
    kept = np.unique(np.concatenate([image_of_text[rows], np.arange(len(images))[:MAX_HELD_OUT]]))
    own_image = np.searchsorted(kept, image_of_text[rows])
    ranks = own_image_ranks(images[kept], texts[rows], own_image, hubness[kept])  # share x caption
    chosen = cross_choose(1 / ranks, own_image)
    chosen_ranks = np.take_along_axis(ranks, chosen[None], 0)[0]
    groups, group_of_caption = np.unique(own_image, return_inverse=True)
    gains = np.bincount(group_of_caption, weights=1 / chosen_ranks - 1 / ranks[0])
    counts = np.bincount(group_of_caption).astype(float)
    draws = [(weights @ gains) / (weights @ counts) for weights in resamples(len(groups))]
    low, high = percentiles(np.concatenate(draws))
    best = int((1 / ranks).mean(axis=1).argmax())
    recalls = {}
    for rank in RANKS:
        recalls[f"t2i_r{rank}"] = float((ranks[0] <= rank).mean())
        recalls[f"t2i_r{rank}_with"] = float((chosen_ranks <= rank).mean())
    return CorrectionFit(
        questions=len(rows),
        share=float(SHARES[best]),
        used=bool(low > 0 and best > 0),
        gain=float(gains.sum() / counts.sum()),
        gain_low=low,
        gain_high=high,
        recalls=recalls,
    )


def own_image_ranks(
    images: np.ndarray, texts: np.ndarray, own_image: np.ndarray, hubness: np.ndarray
) -> np.ndarray:
    """Return the rank of the own image of each caption, one row for each of SHARES. Ties count against the model."""
    ranks = np.zeros((len(SHARES), len(texts)), np.int64)
    for first in range(0, len(texts), BLOCK_ROWS):
        block = slice(first, first + BLOCK_ROWS)
        scores = texts[block] @ images.T
        for row, share in enumerate(SHARES):
            corrected = scores - np.float32(share) * hubness
            own = np.take_along_axis(corrected, own_image[block][:, None], 1)
            ranks[row, block] = (corrected >= own).sum(axis=1)
    return ranks


def cross_choose(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the row (share) that each query is scored with: the best one of the other half of the groups.

    `values` has a row for each share and a column for each query.
    """
    distinct, group_of_query = np.unique(groups, return_inverse=True)
    order = generator(0, "halves").permutation(len(distinct))
    in_first_half = np.isin(group_of_query, order[: len(distinct) // 2])
    rows = np.zeros(len(groups), np.int64)
    if in_first_half.any() and not in_first_half.all():
        rows[in_first_half] = values[:, ~in_first_half].mean(axis=1).argmax()
        rows[~in_first_half] = values[:, in_first_half].mean(axis=1).argmax()
    return rows
