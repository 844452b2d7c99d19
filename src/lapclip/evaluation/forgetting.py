"""How a model's scores change on the way from its start to its end: one metric for each data set, how sure it is,
how sure its change is, and which of the models in between to take.

The metric of pairs is the mean of the six recalls, of classes the mean over them: a model that always says the largest
class knows nothing, and top-1 would not see it. A change is drawn from the same images before
and after, so it is surer than two intervals beside each other look.

The models in between are (1 - alpha) start + alpha end, in every tensor, the temperature too (WiSE-FT, Wortsman et al.
2022, arXiv 2109.01903). What is equal in both is computed once for all of them: images and captions go up to the first
block that differs, and from there on once for each alpha.

Shapes: N images, M captions, E embedding, C classes, r draws, K metrics, A alphas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lapclip.data.dataset import Pixels
from lapclip.data.pixels import normalise
from lapclip.embedder import Embedder
from lapclip.errors import RunError
from lapclip.evaluation import RANKS, WAYS
from lapclip.evaluation.intervals import percentiles, resamples, share_interval
from lapclip.evaluation.ranks import ranks
from lapclip.evaluation.retrieval import retrieval_of
from lapclip.evaluation.zeroshot import class_answers, draw_mean_per_class, zeroshot_of
from lapclip.model.freezing import EMBEDDING, HEAD, first_block, parts_of
from lapclip.model.pretrained_towers import PretrainedTower
from lapclip.progress import Progress

RECALLS = [f"{way}_r{rank}" for way in WAYS for rank in RANKS]
MEAN_RECALL, MEAN_PER_CLASS = "mean recall", "zero-shot, mean of classes"


@dataclass(frozen=True)
class Scored:
    """A data set at one alpha."""

    value: float
    chance: float
    images: int
    """How many were asked about."""
    drawn_r: np.ndarray
    """The value with the images drawn again, by the same draws at each alpha."""
    scores: dict[str, Any]
    known: bool
    """Whether it is clearly above chance: what a model does not know it cannot forget."""

    @property
    def interval(self) -> list[float]:
        return share_interval(self.drawn_r, self.value, self.images)


def score_pairs(image_NE: np.ndarray, text_ME: np.ndarray, image_M: np.ndarray) -> Scored:
    """Recall both ways, and the mean of it."""
    t2i_M, i2t_N = ranks(image_NE, text_ME, image_M)
    scores = retrieval_of(t2i_M, i2t_N, image_M)
    captions_N = np.bincount(image_M, minlength=len(image_NE)).astype(float)
    asked_N = (captions_N > 0).astype(float)
    hits = [np.bincount(image_M, weights=t2i_M <= rank, minlength=len(image_NE)) for rank in RANKS]
    hits += [(i2t_N <= rank) * asked_N for rank in RANKS]
    hits_KN, counts_KN = (
        np.stack(hits),
        np.stack([captions_N] * len(RANKS) + [asked_N] * len(RANKS)),
    )
    drawn_r = np.concatenate([
        ((weights_rN @ hits_KN.T) / np.maximum(weights_rN @ counts_KN.T, 1e-12)).mean(axis=1)
        for weights_rN in resamples(len(image_NE))
    ])  # fmt: skip
    value, chance = (
        float(np.mean([found[name] for name in RECALLS])) for found in (scores, scores["chances"])
    )
    asked = int(asked_N.sum())
    return Scored(
        value, chance, asked, drawn_r, scores, share_interval(drawn_r, value, asked)[0] > chance
    )


def score_classes(
    image_NE: np.ndarray, class_CE: np.ndarray, label_N: np.ndarray, classes: Sequence[str]
) -> Scored:
    """Zero-shot classification."""
    answers = class_answers(image_NE, class_CE, label_N)
    found = zeroshot_of(answers, label_N, classes)
    scores = {
        name: value for name, value in found.items() if name not in ("per_class", "confusion")
    }
    right_N = (answers.rank_N == 1).astype(float)
    value, chance = scores["mean_per_class"], scores["chance"]["mean_per_class"]
    known = scores["intervals"]["mean_per_class"][0] > chance
    return Scored(value, chance, len(label_N), draw_mean_per_class(right_N, label_N), scores, known)


def curve_of(alphas: Sequence[float], scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """The metric over alpha with its interval, and its change since the start with its own."""
    first = scored[0]
    return [
        {
            "alpha": alpha,
            "value": one.value,
            "interval": one.interval,
            "change": one.value - first.value,
            "change_interval": percentiles(one.drawn_r - first.drawn_r),
        }
        for alpha, one in zip(alphas, scored, strict=True)
    ]


MOST_LOST = 0.1
"""Share of the start's score that a check may lose."""


class Recommendation(NamedTuple):
    alpha: float
    why: str


def recommend(new: dict[str, Any], checks: Sequence[dict[str, Any]]) -> Recommendation:
    """The alpha to take, from the curves of the new data and of the checks.

    Of the alphas above 0 that lose at most a tenth of what the start had on every check that decides, the one with the
    best metric on the new data, among equals the smallest. Where none loses so little, the one that loses least. Where
    the start has a better metric on the new data than that one, the start.
    """
    start, *others = new["curve"]
    deciding = [check for check in checks if check["decides"]]
    lost = {point["alpha"]: max([lost_share(check, at) for check in deciding], default=0.0)
            for at, point in enumerate(others, 1)}  # fmt: skip
    close = [point for point in others if lost[point["alpha"]] <= MOST_LOST]
    if close:
        best = max(close, key=lambda point: point["value"])
        why = "the best on the new data of those that lose at most 10 % on every check"
        if not deciding:
            why = "the best on the new data; no check decides, because the start was not clearly above chance on any"
            why = why if checks else "the best on the new data; there is no check"
    else:
        best = min(others, key=lambda point: lost[point["alpha"]])
        why = f"every alpha loses more than 10 % on some check; this one loses least, {lost[best['alpha']]:.0%}"
    if best["value"] < start["value"]:
        return Recommendation(
            start["alpha"], "the start itself is better on the new data than what could be kept"
        )
    return Recommendation(best["alpha"], why)


def lost_share(check: dict[str, Any], at: int) -> float:
    """How much of the start's score a check has lost at one of its points; below 0 where it gained."""
    before, after = check["curve"][0]["value"], check["curve"][at]["value"]
    return (before - after) / before if before else 0.0


def point_at(found: dict[str, Any], alpha: float) -> dict[str, Any]:
    """The point of a curve at an alpha."""
    return next(point for point in found["curve"] if point["alpha"] == alpha)


def summary(new: dict[str, Any], checks: Sequence[dict[str, Any]], alpha: float) -> str:
    """One sentence, or two, for a person."""
    deciding = [check for check in checks if check["decides"]]
    end = new["curve"][-1]["alpha"]
    parts = [_change(new, end), *(_change(check, end) for check in deciding)]
    text = f"Fine-tuning {_joined(parts)}."
    if alpha == end:
        return f"{text} Its end is also what is recommended."
    if alpha == new["curve"][0]["alpha"]:
        return f"{text} Recommended is the start, as it was."
    parts = [_change(new, alpha), *(_change(check, alpha) for check in deciding)]
    return f"{text} At alpha {alpha:g}, which is recommended, it {_joined(parts)}."


def _change(found: dict[str, Any], alpha: float) -> str:
    """What happened to one metric: in points, beside what it was."""
    before, point = found["curve"][0], point_at(found, alpha)
    change, (low, high) = point["change"], point["change_interval"]
    noise = "" if low > 0 or high < 0 else ", which may be noise" if change else ""
    points = f"{abs(change) * 100:.1f}"
    from_to = f"{before['value']:.1%} to {point['value']:.1%}{noise}"
    if points == "0.0":
        return f"kept {before['value']:.1%} on {found['name']}"
    return f"{'gained' if change > 0 else 'lost'} {points} points on {found['name']} ({from_to})"


def _joined(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


HELD = 4
"""Batches that are in memory at once between their two parts: values are changed once for so many."""


class Blend:
    """A model that can take all values between its start and its end. `embedder` has those of the last alpha."""

    def __init__(self, start: Embedder, end: Embedder) -> None:
        """`end` becomes the embedder whose values change."""
        check_same_form(start, end)
        firsts, lasts = start.model.state_dict(), end.model.state_dict()
        self.embedder = end
        self._ends = {
            name: (firsts[name], last.clone())
            for name, last in lasts.items()
            if not torch.equal(firsts[name], last)
        }
        self.blocks = {tower: self._block(tower) for tower in ("image", "text")}
        """The block of each tower up to which both are equal; 0 where nothing that costs time is."""

    def differs(self, tower: str) -> bool:
        """Whether anything of a tower is not equal in both."""
        return any(name.startswith(f"{tower}.") for name in self._ends)

    @torch.no_grad()
    def mix(self, alpha: float, tower: str = "") -> None:
        """Give the model the values at an alpha, or one tower alone. At 0 and 1 they are those of the start and of the
        end to the last bit."""
        state = self.embedder.model.state_dict()
        for name, (first, last) in self._ends.items():
            if name.startswith(tower):
                whole = last if alpha else first  # numbers that count something are not mixed
                state[name].copy_(
                    torch.lerp(first, last, alpha) if first.is_floating_point() else whole
                )

    def repeated_parameters(self) -> int:
        """How many numbers are computed with once for each alpha."""
        parts = parts_of(self.embedder.model)
        total = 0
        for name, parameter in self.embedder.model.named_parameters():
            tower, _, part = parts[name].partition(".")
            if part and self.differs(tower) and _block(part) >= self.blocks[tower]:
                total += parameter.numel()
        return total

    def encode_pixels(
        self, pixels_NSSC: Pixels, alphas: Sequence[float], progress: Progress
    ) -> np.ndarray:
        """Embeddings of images at each alpha, (A, N, E)."""
        embedder, block = self.embedder, self.blocks["image"]
        model = embedder.model

        def begun() -> Iterator[Tensor]:
            for at in range(0, len(pixels_NSSC), embedder.batch):
                pixels = torch.from_numpy(np.array(pixels_NSSC[at : at + embedder.batch])).to(
                    embedder.device.torch
                )
                pixels = normalise(pixels, model.shape)
                yield model.image.begin(pixels, block) if block else pixels

        def finished(held: Tensor) -> Tensor:
            return model.finish_image(held, block) if block else model.encode_image(held)

        return self._encode("image", begun(), finished, len(pixels_NSSC), alphas, progress)

    def encode_text(
        self, captions: Sequence[str], alphas: Sequence[float], progress: Progress
    ) -> np.ndarray:
        """Embeddings of captions at each alpha, (A, N, E)."""
        embedder, block = self.embedder, self.blocks["text"]
        model = embedder.model

        def begun() -> Iterator[tuple[Tensor, Tensor]]:
            for at in range(0, len(captions), embedder.batch):
                tokens_BL = embedder.tokenizer.batch(
                    captions[at : at + embedder.batch], model.shape.context
                )
                tokens = torch.from_numpy(tokens_BL).to(embedder.device.torch)
                yield tokens, model.text.begin(tokens, block) if block else tokens

        def finished(held: tuple[Tensor, Tensor]) -> Tensor:
            return (
                model.finish_text(held[1], held[0], block) if block else model.encode_text(held[0])
            )

        return self._encode("text", begun(), finished, len(captions), alphas, progress)

    @torch.inference_mode()
    def _encode(
        self,
        tower: str,
        begun: Iterator[Any],
        finished: Callable[[Any], Tensor],
        count: int,
        alphas: Sequence[float],
        progress: Progress,
    ) -> np.ndarray:
        """Go through all batches once, some at a time, and end them once for each alpha."""
        own = list(alphas) if self.differs(tower) else [1.0]  # one is enough where all are equal
        found_ANE = np.zeros(
            (len(own), count, self.embedder.model.shape.embedding), dtype=np.float32
        )
        first = 0
        while held := list(islice(begun, HELD)):
            size = 0
            for number, alpha in enumerate(own):
                self.mix(alpha, tower)
                rows_NE = np.concatenate([finished(batch).cpu().numpy() for batch in held])
                size = len(rows_NE)
                found_ANE[number, first : first + size] = rows_NE
                progress(first * len(own) + (number + 1) * size, count * len(own))
            first += size
        return np.broadcast_to(found_ANE, (len(alphas), *found_ANE.shape[1:]))

    def _block(self, tower: str) -> int:
        module = getattr(self.embedder.model, tower)
        block = first_block(self.embedder.model, tower, self._ends)
        whole = (
            isinstance(module, PretrainedTower)
            and block < module.depth
            and not module.divides(block)
        )
        return 0 if whole else block


def check_same_form(start: Embedder, end: Embedder) -> None:
    """Raise RunError where two models have no values in between."""
    firsts, lasts = start.model.state_dict(), end.model.state_dict()
    for name in sorted(firsts.keys() | lasts.keys()):
        shapes = [tuple(state[name].shape) if name in state else None for state in (firsts, lasts)]
        if shapes[0] != shapes[1]:
            shown = [
                f"has shape {shape}" if shape is not None else "is missing" for shape in shapes
            ]
            raise RunError(
                f"Start and end of the run cannot be mixed: {name} {shown[0]} in the start, {shown[1]} in the end."
            )
    if start.tokenizer.to_dict() != end.tokenizer.to_dict():
        raise RunError(
            "Start and end of the run cannot be mixed: they read captions with different tokenizers."
        )


def _block(part: str) -> float:
    """The number of a block; the embedding is before all of them, the head behind."""
    if part == HEAD:
        return math.inf
    return 0 if part == EMBEDDING else int(part)
