"""What two frozen networks know of each other, without any training: linear maps from the features of both into one
space, by ridge regression or by canonical correlation analysis (CCA), each in closed form; how well these find held-out
pairs; and whether images and captions belong together at all.

Features are normed row by row first, as the heads do it, so that CCA's maps are also values a head can start with.

Shapes: N images, M captions, P pairs of them, F image features, G text features, E embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lapclip.evaluation import RANKS
from lapclip.evaluation.intervals import mean_intervals
from lapclip.evaluation.ranks import ranks
from lapclip.seeding import generator

SHRINK, WIDTH, POWER = 1.0, 512, 1.0


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
    rows = torch.from_numpy(np.array(features, dtype=np.float32))  # a copy: cached ones are read-only
    return F.layer_norm(rows, rows.shape[1:])


def fit_cca(
    image_PF: Tensor, text_PG: Tensor, shrink: float = SHRINK, width: int = WIDTH, power: float = POWER
) -> LinearMaps:
    """Canonical correlation analysis: the directions in which pairs agree most, whatever the scale of the features.

    Each covariance is shrunk towards a multiple of the identity, by `shrink` times its mean eigenvalue (Vinod, 1976).
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

    def __init__(self, rows_PF: Tensor, shrink: float) -> None:
        count, features = rows_PF.shape
        self.mean = rows_PF.mean(0)
        centred_PF = rows_PF - self.mean
        self._basis_Fr = None
        if count < features:
            values, vectors = torch.linalg.eigh(centred_PF @ centred_PF.T)
            keep = values > values[-1] * 1e-6  # the mean takes one direction away
            self._basis_Fr = centred_PF.T @ (vectors[:, keep] * values[keep].rsqrt())
            centred_PF = vectors[:, keep] * values[keep].sqrt()
        covariance = centred_PF.T @ centred_PF / count
        covariance.diagonal().add_(shrink * covariance.trace() / features)
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


def fit_ridge(image_PF: Tensor, text_PG: Tensor, shrink: float = SHRINK) -> LinearMaps:
    """Ridge regression of image features on text features: a caption's embedding is the image that it lets expect."""
    text = _Whitened(text_PG, shrink)
    mean = image_PF.mean(0)
    weights_GF = text.back(text.rows_Pr.T @ (image_PF - mean) / len(image_PF))
    return LinearMaps(mean, torch.eye(image_PF.shape[1]), text.mean, weights_GF)


# -- how well pairs are found that the maps have not seen --------------------------------------------------------------

FOLDS = 5


class Ranks(NamedTuple):
    """Ranks of pairs that the maps have not seen, each among the pairs of its fold."""

    t2i_M: np.ndarray
    i2t_N: np.ndarray
    owner_M: np.ndarray
    candidates: int
    """In the smallest fold."""

    def recall(self) -> dict[str, float]:
        """Recall both ways, each with its interval as `_low` and `_high`. Images are what is drawn again."""
        ways = {"t2i": (self.t2i_M, self.owner_M), "i2t": (self.i2t_N, np.arange(len(self.i2t_N)))}
        names = [(f"{way}_r{rank}", way, rank) for way in ways for rank in RANKS]
        hits = [np.bincount(ways[way][1], ways[way][0] <= rank, len(self.i2t_N)) for _, way, rank in names]
        counts = [np.bincount(ways[way][1], minlength=len(self.i2t_N)).astype(float) for _, way, _ in names]
        found = {}
        intervals = mean_intervals(np.stack(hits), np.stack(counts))
        for (name, _, _), own, count, (low, high) in zip(names, hits, counts, intervals, strict=True):
            found |= {name: float(own.sum() / count.sum()), f"{name}_low": low, f"{name}_high": high}
        return found


def cross_validate(fit: Callable[[Tensor, Tensor], LinearMaps], image_NF: Tensor, text_MG: Tensor, owner_M: np.ndarray,
                   folds: int = FOLDS) -> Ranks:  # fmt: skip
    """Fit to the pairs of all folds but one, and rank that one's; each fold in turn. Folds divide the images."""
    fold_N = generator(0, "folds").permutation(len(image_NF)) % folds
    t2i_M, i2t_N = np.zeros(len(text_MG), dtype=np.int64), np.zeros(len(image_NF), dtype=np.int64)
    for fold in range(folds):
        seen_M = fold_N[owner_M] != fold
        maps = fit(image_NF[owner_M[seen_M]], text_MG[seen_M])
        images, captions = np.flatnonzero(fold_N == fold), np.flatnonzero(~seen_M)
        own = np.searchsorted(images, owner_M[captions])
        t2i_M[captions], i2t_N[images] = ranks(maps.images(image_NF[images]), maps.texts(text_MG[captions]), own)
    return Ranks(t2i_M, i2t_N, owner_M, int(np.bincount(fold_N).min()))


METHODS: dict[str, Callable[[Tensor, Tensor], LinearMaps]] = {
    "cca": fit_cca,
    "ridge": fit_ridge,
}


def probe_pairs(image_NF: Tensor, text_MG: Tensor, owner_M: np.ndarray) -> dict[str, Any]:
    """How well closed forms bring two networks together: recall of the better one, and of each."""
    found = {name: cross_validate(fit, image_NF, text_MG, owner_M) for name, fit in METHODS.items()}
    recalls = {name: ranks.recall() for name, ranks in found.items()}
    best = max(recalls, key=lambda name: recalls[name]["t2i_r1"])
    return {
        **recalls[best],
        "method": best,
        "methods": recalls,
        "candidates": found[best].candidates,
        "chance": 1 / found[best].candidates,
    }


# -- whether images and captions belong together -----------------------------------------------------------------------

SHUFFLES = 400


class Relation(NamedTuple):
    """How much more alike captions of images are that look alike, in standard deviations of what shuffled ones
    give (the Hilbert-Schmidt independence criterion, Gretton et al., 2005), and the share of those giving as much."""

    z: float
    p: float


def relation(image_NF: Tensor, text_NG: Tensor, shrink: float = 1.0) -> Relation:
    """Whether the rows of two tables of features have anything to do with each other."""
    image_NN, text_NN = _kernel(image_NF, shrink), _kernel(text_NG, shrink)
    draw = generator(0, "relation")
    found = float((image_NN * text_NN).sum())
    orders = [torch.from_numpy(draw.permutation(len(image_NN))) for _ in range(SHUFFLES)]
    shuffled = np.array([float((image_NN * text_NN[order][:, order]).sum()) for order in orders])
    return Relation(
        float((found - shuffled.mean()) / max(shuffled.std(), 1e-12)),
        float((1 + (shuffled >= found).sum()) / (1 + SHUFFLES)),
    )


def _kernel(rows_NF: Tensor, shrink: float) -> Tensor:
    """How alike each two rows are, nothing for a row and itself."""
    white_Nr = _Whitened(rows_NF, shrink).rows_Pr
    kernel_NN = white_Nr @ white_Nr.T
    kernel_NN.fill_diagonal_(0)
    return kernel_NN


class Belonging(NamedTuple):
    """Whether captions belong to their images, as far as two frozen networks can tell."""

    own: Relation
    """Of images and their captions."""
    moved: int
    """Rows by which the captions seem to have moved down the table: 1, -1, or 0 where they have not."""
    moved_z: float
    """How much the captions have to do with the images that they would have moved from."""

    @property
    def unrelated(self) -> bool:
        """Whether the captions cannot be told from shuffled ones."""
        return not self.moved and self.own.p > SURE

    def to_dict(self) -> dict[str, float | int | bool]:
        return {"z": self.own.z, "p": self.own.p, "unrelated": self.unrelated,
                "moved": self.moved, "moved_z": self.moved_z}  # fmt: skip


SURE = 0.01
MUCH = 4.0
"""Standard deviations by which neighbours must be related more than what stands in one row."""


def belonging(image_NF: Tensor, first_NG: Tensor, last_NG: Tensor, run_N: np.ndarray) -> Belonging:
    """Judge images by the first and the last caption of each, in the order of the table; rows of one run are neighbours
    there. Where an image has five captions and all move by a row, one of the five is another image's: the first or the
    last."""
    own = relation(image_NF, (first_NG + last_NG) / 2)
    best = (0.0, 0)
    for by, captions_NG in ((1, first_NG), (-1, last_NG)):
        # Captions that moved down by one are those of the image before.
        here = np.arange(1, len(run_N)) if by == 1 else np.arange(len(run_N) - 1)
        here = torch.from_numpy(here[run_N[here] == run_N[here - by]])
        if len(here) > 2:
            stays, moves = (relation(image_NF[rows], captions_NG[here]).z for rows in (here, here - by))
            best = max(best, (moves if moves > MUCH and moves > stays + MUCH else 0.0, by))
    return Belonging(own, best[1] if best[0] else 0, best[0])
