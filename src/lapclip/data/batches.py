"""Which pairs, in which order: a function of the seed and the step alone, so that a resumed run sees the same batches.

Shapes: B batch, L tokens, S image side, C colour channels.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from lapclip.data.augment import draw_views, names_sides
from lapclip.data.dataset import Pairs
from lapclip.data.tokenizers import Tokenizer, pad
from lapclip.errors import DataError
from lapclip.seeding import generator

WINDOW = 4096
"""Rows that are shuffled among each other where reading neighbours together is faster."""
BLOCK = 256
"""Rows that stay neighbours there until then."""
OFTEN = 5
"""Images that must have a token before it is predicted from them."""
PARTNERS = 4
"""Images that one with a caption that its batch has already may be swapped with."""


@dataclass(frozen=True)
class Batch:
    """Images, captions and which of them belong together. Sorted by the length of the captions."""

    pixels_BSSC: np.ndarray
    """Empty where features take their place."""
    tokens_BL: np.ndarray
    positives_BB: np.ndarray
    sided_B: np.ndarray
    """Where the caption names left or right, so that the image must not be flipped."""
    aspects_B: np.ndarray | None = None
    """Width to height of each image before it was squeezed into a square; None where the squares were cut out."""
    lengths_B: np.ndarray | None = None
    """Tokens of each caption, those that end it included; None where they are not known."""
    boxes_B5: np.ndarray | None = None
    """The crop of each image, where that was drawn once for all; None leaves it to the step."""
    image_features: np.ndarray | None = None
    """What the frozen part of the image tower makes of the images, where that was computed before."""
    text_features: np.ndarray | None = None
    """The same of captions."""
    teacher_image: np.ndarray | None = None
    """What a teacher makes of the images, unit length; None where there is none."""
    teacher_text: np.ndarray | None = None
    """The same of captions."""
    words_BV: np.ndarray | None = None
    """The tokens of all captions of each image, as shares that add up to one; None where no words are predicted."""


class FrozenFeatures(Protocol):
    """What frozen parts of the towers make of the training pairs; None where a tower has none that is worth caching."""

    def of_images(self, rows: np.ndarray, views: np.ndarray) -> np.ndarray | None: ...

    def of_captions(self, captions: np.ndarray, length: int) -> np.ndarray | None:
        """Of captions by their number in the split, padded to a length."""
        ...


@dataclass(frozen=True)
class Views:
    """Crops and flips of each image that are drawn once and used again and again."""

    count: int
    crop: float = 1.0
    flip: float = 0.0
    middle: float = 1.0
    """The share of the middle square's side that is seen where nothing is cropped."""


@dataclass(frozen=True)
class EncodedCaptions:
    """All captions of a split as tokens, encoded once."""

    tokens: list[np.ndarray]
    """Of each caption, one image's after the other's."""
    first_N: np.ndarray
    """Where the captions of each image begin, and where the last one's end."""
    same: np.ndarray
    """A number for each caption; captions that are equal as the model sees them have the same."""
    sided: np.ndarray
    """Whether each caption names a side."""
    allowed: np.ndarray
    """How often a batch may have each of them: once, or more where more images than batches have no other."""


@dataclass(frozen=True)
class EncodedWords:
    """The tokens that the captions of each image have, each once."""

    tokens: np.ndarray
    """One image's after the other's."""
    first_N: np.ndarray
    """Where those of each image begin, and where the last one's end."""
    weights_V: np.ndarray
    """What each token of the vocabulary counts: more the fewer images have it, nothing where too few have it to learn
    it from, or all."""


class BatchPlan:
    """Each epoch visits every image once in a new order, with one of its captions drawn at random.

    Two equal captions do not meet in a batch where that can be avoided: another caption of the image is taken, or the
    image is swapped with one of a later batch. A last batch that would not be full is left out.
    """

    def __init__(
        self,
        pairs: Pairs,
        tokenizer: Tokenizer,
        context: int,
        batch_size: int,
        seed: int,
        symbol_dropout: float = 0.0,
        views: Views | None = None,
        frozen: FrozenFeatures | None = None,
        teacher: tuple[np.ndarray, np.ndarray] | None = None,
        *,
        words: bool = False,
    ) -> None:
        if batch_size > len(pairs):
            raise DataError(
                f"train.batch_size {batch_size} is more than the {len(pairs)} training images.",
                hint=f"--set train.batch_size={len(pairs)}",
            )
        self.pairs, self.batch_size, self.seed, self.symbol_dropout = pairs, batch_size, seed, symbol_dropout
        self.tokenizer, self.context = tokenizer, context
        self._views, self._frozen, self._with_words = views, frozen, words
        self._teacher = teacher
        """A teacher's embeddings of every image, and of every caption in the order of `captions`."""
        self.steps_per_epoch = len(pairs) // batch_size
        self._planned: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def completed(self, frozen: FrozenFeatures | None, teacher: tuple[np.ndarray, np.ndarray] | None) -> BatchPlan:
        """The same plan with features and teacher embeddings in its batches. Captions are not encoded again."""
        plan = copy.copy(self)
        plan._frozen, plan._teacher = frozen, teacher
        return plan

    def epoch(self, step: int) -> int:
        """The epoch of a step; both count from 1."""
        return (step - 1) // self.steps_per_epoch + 1

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 1."""
        rows_N, captions_N = self._epoch(self.epoch(step))
        first = (step - 1) % self.steps_per_epoch * self.batch_size
        rows, captions = rows_N[first : first + self.batch_size], captions_N[first : first + self.batch_size]
        tokens = self._shortened([self._encoded.tokens[caption] for caption in captions], step)
        # The order within a batch changes nothing but the speed: short captions together need less padding.
        sorted_B = np.argsort([len(caption) for caption in tokens], kind="stable")
        rows, captions = rows[sorted_B], captions[sorted_B]
        tokens_BL = pad([tokens[at] for at in sorted_B], self.context, self.tokenizer.padding)
        views_B = self._turns(self.epoch(step))[rows]
        image = self._frozen.of_images(rows, views_B) if self._frozen else None
        taught_image, taught_text = (
            (self._teacher[0][rows], self._teacher[1][captions]) if self._teacher else (None, None)
        )
        return Batch(
            pixels_BSSC=np.array(self.pairs.pixels[rows if image is None else rows[:0]]),
            tokens_BL=tokens_BL,
            positives_BB=self._positives(rows, captions),
            sided_B=self._encoded.sided[captions],
            aspects_B=None if self.pairs.aspects is None else self.pairs.aspects[rows],
            lengths_B=np.array([len(tokens[at]) for at in sorted_B]),
            boxes_B5=None if self._views is None or image is not None else self.boxes[views_B, rows],
            image_features=image,
            text_features=self._frozen.of_captions(captions, tokens_BL.shape[1]) if self._frozen else None,
            teacher_image=taught_image,
            teacher_text=taught_text,
            words_BV=self._words_of(rows) if self._with_words else None,
        )

    @cached_property
    def boxes(self) -> np.ndarray:
        """The views of every image, (views, N, 5): boxes as `data/augment.py` has them."""
        assert self._views is not None
        # An image is not flipped if any of its captions names a side.
        sided_N = np.logical_or.reduceat(self._encoded.sided, self._encoded.first_N[:-1])
        views, aspects_N, middle = self._views, self.pairs.aspects, self._views.middle
        if aspects_N is None:
            aspects_N, middle = np.ones(len(self.pairs)), 1.0  # drawn as the model is to see them
        return draw_views(sided_N, aspects_N, views.crop, views.flip, views.count, self.seed, middle)

    @property
    def captions(self) -> Sequence[np.ndarray]:
        """Every caption as tokens, one image's after the other's."""
        return self._encoded.tokens

    def _turns(self, epoch: int) -> np.ndarray:
        """Which view of each image an epoch uses: each in its turn, and not the same one for all images."""
        count = self._views.count if self._views else 1
        return (generator(self.seed, "turns").integers(0, count, len(self.pairs)) + epoch) % count

    def _positives(self, rows: np.ndarray, captions: np.ndarray) -> np.ndarray:
        """Which images and captions belong together: with equal captions, of copies of an image, of one class."""
        groups = [self._encoded.same[captions]]
        groups += [group[rows] for group in (self.pairs.identities, self.pairs.labels) if group is not None]
        return np.any([group_B[:, None] == group_B[None, :] for group_B in groups], axis=0)

    @cached_property
    def _encoded(self) -> EncodedCaptions:
        captions = [caption for options in self.pairs.captions for caption in options]
        tokens = self.tokenizer.encode_all(captions, self.context)
        numbers: dict[bytes, int] = {}
        same = np.array([numbers.setdefault(caption.tobytes(), len(numbers)) for caption in tokens])
        counts = [len(options) for options in self.pairs.captions]
        if 0 in counts:
            raise DataError(f"The training image {counts.index(0) + 1} has no caption.", hint="lapclip data check DATA")
        first_N = np.cumsum([0, *counts])
        alone_N = np.maximum.reduceat(same, first_N[:-1]) == np.minimum.reduceat(same, first_N[:-1])
        only = np.bincount(same[first_N[:-1][alone_N]], minlength=len(numbers))
        allowed = np.maximum(1, -(-only // self.steps_per_epoch))
        sided = np.array([names_sides(caption) for caption in captions])
        return EncodedCaptions(tokens, first_N, same, sided, allowed)

    def _words_of(self, rows: np.ndarray) -> np.ndarray:
        """The tokens that the captions of each image have, as shares that add up to one: the rarer, the more. (B, V)"""
        words = self._words
        tokens = [words.tokens[words.first_N[row] : words.first_N[row + 1]] for row in rows]
        at_B = np.repeat(np.arange(len(rows)), [len(some) for some in tokens])
        shares_BV = np.zeros((len(rows), len(words.weights_V)), dtype=np.float32)
        shares_BV[at_B, np.concatenate(tokens)] = words.weights_V[np.concatenate(tokens)]
        return shares_BV / np.maximum(shares_BV.sum(1, keepdims=True), 1e-6)

    @cached_property
    def _words(self) -> EncodedWords:
        first_N, marks = self._encoded.first_N, (self.tokenizer.start, self.tokenizer.end)
        each = [
            np.setdiff1d(np.concatenate(self._encoded.tokens[first:last]), marks) for first, last in pairwise(first_N)
        ]
        counts_V = np.bincount(np.concatenate(each), minlength=self.tokenizer.vocabulary)
        weights_V = np.sqrt(np.log(len(each) / np.maximum(counts_V, 1))) * (counts_V >= OFTEN)
        return EncodedWords(np.concatenate(each), np.cumsum([0, *map(len, each)]), weights_V.astype(np.float32))

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of an epoch in order, and the caption of each."""
        planned = self._planned  # read once: another thread may be at the next epoch
        if epoch not in planned:
            rows_N = self._order(epoch)
            first_N = self._encoded.first_N
            counts_N = np.diff(first_N)[rows_N]
            draws_N = generator(self.seed, "captions", epoch).random(len(rows_N))
            captions_N = first_N[rows_N] + (draws_N * counts_N).astype(np.int64)
            draw = generator(self.seed, "partners", epoch)
            for first in range(0, self.steps_per_epoch * self.batch_size, self.batch_size):
                self._separate_duplicate_captions(rows_N, captions_N, first, draw)
            last = dict(list(planned.items())[-1:])
            planned = self._planned = {**last, epoch: (rows_N, captions_N)}
        return planned[epoch]

    def _order(self, epoch: int) -> np.ndarray:
        draw, count = generator(self.seed, "order", epoch), len(self.pairs)
        if not self.pairs.sequential:
            return draw.permutation(count)
        # Blocks in a new order, then each row put off by a random number of rows: a buffer that is drawn from. What
        # would come after the end comes first, so that the first and the last batches are as mixed as the others.
        block_N = draw.permutation(-(-count // BLOCK))[np.arange(count) // BLOCK]
        late_N = block_N * BLOCK + np.arange(count) % BLOCK + draw.random(count) * WINDOW
        return np.argsort(late_N % count, kind="stable")

    def _separate_duplicate_captions(
        self, rows_N: np.ndarray, captions_N: np.ndarray, first: int, draw: np.random.Generator
    ) -> None:
        """Change the captions of one batch, in place, so that none is there more often than it must, and its images
        where that must be: they are swapped with one drawn from the rest of the epoch, or stay after a few tries."""
        last, same = first + self.batch_size, self._encoded.same
        inside, counts = np.unique(same[captions_N[first:last]], return_counts=True)
        if (counts <= self._encoded.allowed[inside]).all():
            return
        used: Counter[int] = Counter()
        for at in range(first, last):
            caption = self._unused(rows_N[at], captions_N[at], used)
            tries = iter(draw.integers(last, len(rows_N), PARTNERS) if last < len(rows_N) else ())
            other = at
            while caption is None and (other := next(tries, None)) is not None:
                caption = self._unused(rows_N[other], captions_N[other], used)
            if caption is not None:
                for swapped_N in (rows_N, captions_N):
                    swapped_N[[at, other]] = swapped_N[[other, at]]
                captions_N[at] = caption
            used[int(same[captions_N[at]])] += 1

    def _unused(self, row: Any, drawn: Any, used: Counter[int]) -> int | None:
        """A caption of an image that the batch may still have: the one drawn, or the next one after it."""
        same, allowed = self._encoded.same, self._encoded.allowed
        first, last = self._encoded.first_N[row], self._encoded.first_N[row + 1]
        turned = (*range(drawn, last), *range(first, drawn))
        return next((caption for caption in turned if used[int(same[caption])] < allowed[same[caption]]), None)

    def _shortened(self, captions: list[np.ndarray], step: int) -> list[np.ndarray]:
        """Captions with some of their tokens left out at random: never the first and the last, and never all."""
        if not self.symbol_dropout:
            return captions
        draw = generator(self.seed, "words", step)
        found = []
        for tokens in captions:
            keep_mask = draw.random(len(tokens)) >= self.symbol_dropout
            keep_mask[[0, -1]] = True
            found.append(tokens[keep_mask] if keep_mask.sum() > 2 else tokens)
        return found


def prefetch(plan: BatchPlan, first: int, last: int, threads: int = 1) -> Generator[Batch]:
    """The batches of steps first to last, in order, prepared by threads while the model works on earlier ones."""
    ahead = 1 + threads
    with ThreadPoolExecutor(threads, thread_name_prefix="lapclip-batches") as pool:
        waiting: deque[Future[Batch]] = deque()
        for step in range(first, last + 1):
            waiting.append(pool.submit(plan.batch, step))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
