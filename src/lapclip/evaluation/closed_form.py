"""What two frozen networks know of each other, without any training: linear maps from the features of both into one
space by canonical correlation analysis (CCA), in closed form; how well these find held-out pairs; and whether images and
captions belong together at all.

Features are normed row by row first, as the heads do it, so that CCA's maps are also values a head can start with.

Shapes: N images, M captions, P pairs of them, F image features, G text features, E embedding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lapclip.evaluation import RANKS, WAYS
from lapclip.evaluation.intervals import bootstrap_interval
from lapclip.evaluation.ranks import ranks
from lapclip.evaluation.retrieval import retrieval_of
from lapclip.seeding import generator

STRENGTH = 6000.0
"""Rows at which a covariance is shrunk by its whole mean eigenvalue; with fewer, by as much more."""
WIDTH, POWER = 512, 1.0
TINY = 1e-6
"""Keeps rows that are all the same, as equal captions are, from being divided by nothing."""


class LinearMaps(NamedTuple):
    """Two linear maps into one space."""

    image_mean_F: Tensor
    image_FE: Tensor
    text_mean_G: Tensor
    text_GE: Tensor

    def images(self, rows_NF: Tensor) -> np.ndarray:
        """Embeddings of normed features, of unit length."""
        return F.normalize((rows_NF - self.image_mean_F) @ self.image_FE, dim=1).numpy()

    def texts(self, rows_MG: Tensor) -> np.ndarray:
        """Embeddings of normed features, of unit length."""
        return F.normalize((rows_MG - self.text_mean_G) @ self.text_GE, dim=1).numpy()


def normed(features: np.ndarray) -> Tensor:
    """Each row with mean 0 and variance 1, as a head's layer norm gives it at first."""
    rows = torch.from_numpy(
        np.array(features, dtype=np.float32)
    )  # a copy: cached ones are read-only
    return F.layer_norm(rows, rows.shape[1:])


def fit_cca(
    image_PF: Tensor,
    text_PG: Tensor,
    shrink: float | None = None,
    width: int = WIDTH,
    power: float = POWER,
) -> LinearMaps:
    """Canonical correlation analysis: the directions in which pairs agree most, whatever the scale of the features.

    Each covariance is shrunk towards a multiple of the identity, by `shrink` times its mean eigenvalue (Vinod, 1976);
    without it, by what suits so many rows.
    A direction counts by its correlation to a `power` (Gong et al., 2014: those that agree more should say more).
    """
    image, text = _Whitened(image_PF, shrink), _Whitened(text_PG, shrink)
    cross_rr = image.rows_Pr.T @ text.rows_Pr / len(image_PF)
    left, correlations, right = _svd(cross_rr, width)
    scale = correlations.clamp(min=0) ** power
    return LinearMaps(image.mean, image.back(left * scale), text.mean, text.back(right * scale))


class _Whitened:
    """Rows in coordinates in which their shrunk covariance is the identity. With fewer rows than features the
    coordinates are as many as the rows: nothing is lost, and much time gained."""

    def __init__(self, rows_PF: Tensor, shrink: float | None) -> None:
        count, features = rows_PF.shape
        shrink = STRENGTH / count if shrink is None else shrink
        self.mean = rows_PF.mean(0)
        centred_PF = rows_PF - self.mean
        self._basis_Fr = None
        if count < features:
            values, vectors = torch.linalg.eigh(centred_PF @ centred_PF.T)
            keep = values >= values[-1].clamp(min=TINY) * 1e-6  # the mean takes one direction away
            keep[-1] = True  # where all rows are the same
            values = values.clamp(min=TINY)
            self._basis_Fr = centred_PF.T @ (vectors[:, keep] * values[keep].rsqrt())
            centred_PF = vectors[:, keep] * values[keep].sqrt()
        covariance = centred_PF.T @ centred_PF / count
        covariance.diagonal().add_(shrink * covariance.trace() / features + TINY)
        self._root = torch.linalg.cholesky(covariance)
        self.rows_Pr = torch.linalg.solve_triangular(self._root, centred_PF.T, upper=False).T

    def back(self, directions_rE: Tensor) -> Tensor:
        """Directions among the whitened coordinates as a map of features."""
        found = torch.linalg.solve_triangular(self._root.T, directions_rE, upper=True)
        return found if self._basis_Fr is None else self._basis_Fr @ found


def _svd(cross_rs: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first singular vectors and values, by the eigenvectors of the smaller product: several times faster."""
    if cross_rs.shape[0] > cross_rs.shape[1]:
        right, values, left = _svd(cross_rs.T, width)
        return left, values, right
    squares, left = torch.linalg.eigh(cross_rs @ cross_rs.T)
    left = left[:, -width:].flip(1)
    values = squares[-width:].flip(0).clamp(min=1e-12).sqrt()
    return left, values, cross_rs.T @ left / values


# -- how well pairs are found that the maps have not seen --------------------------------------------------------------

FOLDS = 5


class Ranks(NamedTuple):
    """Ranks of pairs that the maps have not seen, each among the pairs of its fold."""

    t2i_M: np.ndarray
    i2t_N: np.ndarray
    owner_M: np.ndarray
    candidates: int
    """In the smallest fold."""

    def expected_first(self, candidates: int) -> float:
        """The share of captions that would find their image first among fewer candidates, drawn at random."""
        better_M, others = self.t2i_M - 1, self.candidates - 1
        better_M = np.minimum(better_M, others)  # a fold may be larger by one
        left = others - (
            candidates - 1
        )  # those that are not drawn; the better ones must all be among them
        steps = np.arange(int(better_M.max(initial=0)))
        survives = np.concatenate(
            [[1.0], np.cumprod(np.maximum(left - steps, 0) / (others - steps))]
        )
        return float(survives[better_M].mean())

    @property
    def fall(self) -> float:
        """What a doubling of the candidates costs, as log odds, by what half of them would give."""
        return _log_odds(self.expected_first(self.candidates // 2)) - _log_odds(
            self.expected_first(self.candidates)
        )

    def beats(self, other: Ranks) -> bool:
        """Whether captions surely find more here, by drawing the same images again for both."""
        gained_M = (self.t2i_M <= 1).astype(float) - (other.t2i_M <= 1)
        counts_N = np.bincount(self.owner_M, minlength=len(self.i2t_N)).astype(float)
        return (
            bootstrap_interval(np.bincount(self.owner_M, gained_M, len(self.i2t_N)), counts_N)[0]
            > 0
        )

    def recall(self) -> dict[str, float]:
        """Return the recalls both ways, each with its 95 % interval as `_low` and `_high`."""
        scores = retrieval_of(self.t2i_M, self.i2t_N, self.owner_M)
        recalls = {}
        for way, rank in itertools.product(WAYS, RANKS):
            name = f"{way}_r{rank}"
            recalls[name] = scores[name]
            recalls[f"{name}_low"], recalls[f"{name}_high"] = scores["intervals"][name]
        return recalls


def mean_captions(text_MG: Tensor, owner_M: np.ndarray, images: int) -> Tensor:
    """The mean of each image's captions: what maps are fitted to, because it says more than one of them."""
    own_M = torch.from_numpy(owner_M)
    counts_N = torch.bincount(own_M, minlength=images).clamp(min=1)
    return torch.zeros(images, text_MG.shape[1]).index_add_(0, own_M, text_MG) / counts_N[:, None]


Fit = Callable[[Tensor, Tensor], LinearMaps]


def cross_validate(
    fit: Fit, image_NF: Tensor, text_MG: Tensor, owner_M: np.ndarray, folds: int = FOLDS
) -> Ranks:
    """Fit to the images of all folds but one, and rank that one's; each fold in turn."""
    fold_N = generator(0, "folds").permutation(len(image_NF)) % folds
    text_NG = mean_captions(text_MG, owner_M, len(image_NF))
    t2i_M, i2t_N = np.zeros(len(text_MG), dtype=np.int64), np.zeros(len(image_NF), dtype=np.int64)
    for fold in range(folds):
        images, captions = np.flatnonzero(fold_N == fold), np.flatnonzero(fold_N[owner_M] == fold)
        maps = fit(image_NF[fold_N != fold], text_NG[fold_N != fold])
        own = np.searchsorted(images, owner_M[captions])
        t2i_M[captions], i2t_N[images] = ranks(
            maps.images(image_NF[images]), maps.texts(text_MG[captions]), own
        )
    return Ranks(t2i_M, i2t_N, owner_M, int(np.bincount(fold_N).min()))


GAIN, DOUBLING, ERROR = 0.19, 0.25, 0.01
"""What trained heads find beyond the closed form, as log odds: where both see as many images, and for each doubling of
these; and the most that a prediction was wrong by. Measured on Flickr8k alone (docs/probe.md)."""


def predict_trained(recall: dict[str, float], fall: float, asked: Asked) -> dict[str, float]:
    """Text-to-image R@1 that trained heads are expected to have, from that of the closed form. `fall` is what each
    doubling of the candidates costs: the mean over several pairs of networks, because one pair's is mostly noise."""
    shift = (
        GAIN
        + DOUBLING * np.log2(asked.images / asked.fitted)
        - fall * np.log2(asked.candidates / asked.among)
    )
    middle, low, high = (
        _share(_log_odds(recall[f"t2i_r1{end}"]) + shift) for end in ("", "_low", "_high")
    )
    return {"t2i_r1": middle, "t2i_r1_low": max(0.0, low - ERROR), "t2i_r1_high": min(1.0, high + ERROR),
            "images": asked.images, "candidates": asked.candidates}  # fmt: skip


class Asked(NamedTuple):
    """What a prediction goes from, and to."""

    fitted: float
    """Images that closed forms were fitted to."""
    among: int
    """Candidates that these were scored among."""
    images: int
    """Images to train on."""
    candidates: int
    """Candidates to be scored among then."""


def _log_odds(share: float) -> float:
    share = min(max(share, 1e-4), 1 - 1e-4)
    return float(np.log(share / (1 - share)))


def _share(log_odds: float) -> float:
    return float(1 / (1 + np.exp(-log_odds)))


# -- whether images and captions belong together -----------------------------------------------------------------------

SHUFFLES = 200
MIN_RELATION_Z = 4.0  # true captions of 50 photos had at least 9.5, shuffled ones at most 2.7


class Relation(NamedTuple):
    """How much more alike captions of images are that look alike, in standard deviations of what shuffled ones
    give (the Hilbert-Schmidt independence criterion, Gretton et al., 2005), and the share of those giving as much."""

    z: float
    p: float

    @property
    def unrelated(self) -> bool:
        """Whether the captions cannot be told from shuffled ones."""
        return self.z < MIN_RELATION_Z


def relation(image_NF: Tensor, text_NG: Tensor) -> Relation:
    """Whether the rows of two tables of features have anything to do with each other."""
    image_NN, text_NN = _alikeness(image_NF), _alikeness(text_NG)
    draw = generator(0, "relation")
    found = float((image_NN * text_NN).sum())
    orders = [torch.from_numpy(draw.permutation(len(image_NN))) for _ in range(SHUFFLES)]
    shuffled = np.array([float((image_NN * text_NN[order][:, order]).sum()) for order in orders])
    z = (found - shuffled.mean()) / max(shuffled.std(), 1e-12)
    return Relation(float(z), float((1 + (shuffled >= found).sum()) / (1 + SHUFFLES)))


def _alikeness(rows_NF: Tensor) -> Tensor:
    """How alike each two rows are, nothing for a row and itself. Plain products of centred rows: on 50 photos whitened
    ones told true captions from shuffled ones by 7 standard deviations, plain ones by 14."""
    centred_NF = rows_NF - rows_NF.mean(0)
    return (centred_NF @ centred_NF.T).fill_diagonal_(0)
