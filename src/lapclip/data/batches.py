"""The batches of a run: which pairs come in which step.

A batch is a function of the seed and the step alone, so a resumed run sees the same batches.

Shapes: N images of the split, B pairs of a batch, L tokens, S image side, C color channels.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import numpy as np

from lapclip.data.dataset import Pairs
from lapclip.data.pixels import draw_views, names_sides
from lapclip.data.ragged import Ragged
from lapclip.data.tokenizers import Tokenizer, padded_length
from lapclip.errors import DataError
from lapclip.seeding import generator

SWAP_TRIES = 4  # later images that may take the place of one whose caption is in the batch already
WINDOW_ROWS = 4096  # rows of sequential data that are shuffled among each other
BLOCK_ROWS = 256  # rows that stay neighbors until then: reading neighbors together is faster


class Slicing(Enum):
    """How an array of a batch is cut when the batch is divided."""

    ROWS = "rows"
    OWN_ROWS = "own rows"
    """By rows. A rank has only those of its own pairs."""
    ROWS_AND_COLUMNS = "rows and columns"
    WHOLE = "not at all"


@dataclass(frozen=True)
class Batch:
    """Images with a caption each, sorted by the length of the captions."""

    pixels_BSSC: np.ndarray
    """uint8 images. Empty if cached features take their place."""
    tokens_BL: np.ndarray
    positives_BB: np.ndarray
    """Which images (rows) and captions (columns) belong together. It is symmetric. A rank has the
    rows of its own pairs: all of them are 17 GB for 131,072 pairs."""
    sided_B: np.ndarray
    """Whether the caption names left or right, so that the image must not be flipped."""
    aspects_B: np.ndarray | None = None
    """Width to height of each image before it was squeezed into a square. None if the squares were
    cut out."""
    lengths_B: np.ndarray | None = None
    """Tokens of each caption, start and end included. None if unknown."""
    boxes_B5: np.ndarray | None = None
    """The crop of each image, if crops are drawn once per run. None if the step draws them."""
    image_features: np.ndarray | None = None
    """Cached output of the frozen part of the image tower."""
    text_features: np.ndarray | None = None
    """Cached output of the frozen part of the text tower for the captions."""
    extras: dict[str, np.ndarray] = field(default_factory=dict)
    """What objectives add, by name."""
    ranks: RankRows | None = None
    """Which rows each rank takes. None for a process that takes all."""


@dataclass(frozen=True)
class RankRows:
    """Which rows of a batch each of several ranks takes."""

    rows: tuple[np.ndarray, ...]
    """Rows of each rank."""
    rank: int
    """This process."""

    @classmethod
    def deal(cls, counts: Sequence[int], rank: int) -> RankRows:
        """Deal the rows of a batch to ranks that take so many each.

        Rows are sorted by the length of their captions. Each rank takes rows at equal distances, so that all of them
        have short and long captions.
        """
        positions = [(np.arange(count) + 0.5) / count for count in counts]
        ranks = np.repeat(np.arange(len(counts)), counts)
        rank_of_row = ranks[np.argsort(np.concatenate(positions), kind="stable")]
        return cls(tuple(np.flatnonzero(rank_of_row == each) for each in range(len(counts))), rank)

    @property
    def own(self) -> np.ndarray:
        """Rows of this process."""
        return self.rows[self.rank]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many rows each rank takes."""
        return tuple(map(len, self.rows))


@dataclass(frozen=True)
class DrawnRows:
    """The pairs of a batch, as numbers of images and captions in the split."""

    step: int
    rows: np.ndarray
    captions: np.ndarray
    own: slice | np.ndarray
    """The rows of the batch whose pixels and features this process reads."""


class BatchExtras(Protocol):
    """What adds arrays to each batch: the objectives."""

    def arrays(self, plan: BatchPlan, drawn: DrawnRows) -> dict[str, np.ndarray]:
        """Return arrays for a batch by name."""
        ...

    def texts(self, plan: BatchPlan) -> dict[str, Sequence[np.ndarray]]:
        """Return all further texts that go through the text tower, as tokens by name."""
        ...

    def why_unused(self, plan: BatchPlan) -> dict[str, str]:
        """Return why no batch can have some of the arrays, by the name of a setting."""
        ...


class FrozenFeatures(Protocol):
    """Cached output of the frozen part of each tower. None for a tower without a cache."""

    def of_images(self, rows: np.ndarray, views: np.ndarray) -> np.ndarray | None:
        """Return features of images, each in one of its views."""
        ...

    def of_captions(self, captions: np.ndarray, length: int) -> np.ndarray | None:
        """Return features of captions, padded to a length."""
        ...

    def of_texts(self, name: str, numbers: np.ndarray, length: int) -> np.ndarray | None:
        """Return features of some of `BatchPlan.texts`, padded to a length."""
        ...


@dataclass(frozen=True)
class Views:
    """Crops and flips of each image that are drawn once and used in turn."""

    count: int
    crop: float = 1.0
    flip: float = 0.0
    middle: float = 1.0
    """Share of the middle square's side that is seen of an image that is not cropped."""


@dataclass(frozen=True)
class EncodedCaptions:
    """All captions of the split, image after image."""

    tokens: Ragged
    first_N: np.ndarray
    """Number of the first caption of each image, and the number of captions."""
    same: np.ndarray
    """A number for each caption. Captions with equal tokens have the same number."""
    sided: np.ndarray
    """Whether each caption names left or right."""
    allowed: np.ndarray
    """How often a batch may have each of the numbers in `same`: once, or more often if more images
    than batches have no other caption."""


class BatchPlan:
    """The batches of all steps. An epoch visits every image once, with one of its captions.

    Equal captions are kept out of one batch if possible: another caption of the image is taken, or
    the image is swapped with a later one. A last batch that would not be full is left out.
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
        extras: BatchExtras | None = None,
    ) -> None:
        if batch_size > len(pairs):
            raise DataError(
                f"train.batch_size {batch_size} is more than the {len(pairs)} training images.",
                hint=f"--set train.batch_size={len(pairs)}" if len(pairs) > 1 else "more images",
            )
        self.pairs, self.tokenizer, self.context = pairs, tokenizer, context
        self.batch_size, self.seed, self.symbol_dropout = batch_size, seed, symbol_dropout
        self._views, self._extras = views, extras
        self._frozen: FrozenFeatures | None = None
        self.steps_per_epoch = len(pairs) // batch_size
        self._ranks: RankRows | None = None
        self._planned: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def with_features(self, frozen: FrozenFeatures | None) -> BatchPlan:
        """Return the same plan with features in its batches. Captions are not encoded again."""
        plan = copy.copy(self)
        plan._frozen = frozen
        return plan

    def for_rank(self, counts: Sequence[int], rank: int) -> BatchPlan:
        """Return the same plan for one of several ranks that take so many rows each.

        Its batches have the pixels and features of this rank's rows alone, and everything else of all rows.
        """
        plan = copy.copy(self)
        plan._ranks = RankRows.deal(counts, rank)
        return plan

    def epoch(self, step: int) -> int:
        """Return the epoch of a step. Both count from 1."""
        return (step - 1) // self.steps_per_epoch + 1

    def batch(self, step: int) -> Batch:
        """Return the batch of a step. Steps count from 1."""
        epoch = self.epoch(step)
        all_rows, all_captions = self._epoch(epoch)
        number = (step - 1) % self.steps_per_epoch
        here = slice(number * self.batch_size, (number + 1) * self.batch_size)
        rows, captions = all_rows[here], all_captions[here]
        tokens_BL, lengths_B = self._drop_tokens(*self.padded(self.encoded.tokens, captions), step)
        # Sorted by length for speed: chunks of short captions need less padding.
        order = np.argsort(lengths_B, kind="stable")
        rows, captions, lengths_B = rows[order], captions[order], lengths_B[order]
        tokens_BL = tokens_BL[order, : padded_length(lengths_B[-1], self.context)]
        own = slice(None) if self._ranks is None else self._ranks.own
        views, own_pixels, boxes_B5 = self._views_of(rows, epoch), rows[own], None
        image_features = text_features = None
        if self._frozen:
            image_features = self._frozen.of_images(rows[own], views[own])
            text_features = self._frozen.of_captions(captions[own], tokens_BL.shape[1])
        if image_features is not None:
            own_pixels = rows[:0]
        elif self._views:
            boxes_B5 = self.boxes[views, rows]
        drawn = DrawnRows(step, rows, captions, own)
        return Batch(
            pixels_BSSC=np.ascontiguousarray(self.pairs.pixels[own_pixels]),
            tokens_BL=tokens_BL,
            positives_BB=equal_pairs(self.encoded.same[captions], *self.groups(rows), rows=own),
            sided_B=self.encoded.sided[captions],
            aspects_B=None if self.pairs.aspects is None else self.pairs.aspects[rows],
            lengths_B=lengths_B,
            boxes_B5=boxes_B5,
            image_features=image_features,
            text_features=text_features,
            extras=self._extras.arrays(self, drawn) if self._extras else {},
            ranks=self._ranks,
        )

    @cached_property
    def boxes(self) -> np.ndarray:
        """The boxes (`data/pixels.py`) of all views of every image, (views, N, 5)."""
        assert self._views is not None
        # An image is not flipped if any of its captions names a side.
        sided_N = np.logical_or.reduceat(self.encoded.sided, self.encoded.first_N[:-1])
        views, aspects_N, middle = self._views, self.pairs.aspects, self._views.middle
        if aspects_N is None:
            # The squares are as the model sees them.
            aspects_N, middle = np.ones(len(self.pairs)), 1.0
        return draw_views(
            sided_N, aspects_N, views.crop, views.flip, views.count, self.seed, middle
        )

    @property
    def captions(self) -> Sequence[np.ndarray]:
        """The tokens of every caption, image after image."""
        return self.encoded.tokens

    @property
    def texts(self) -> dict[str, Sequence[np.ndarray]]:
        """All further texts that go through the text tower, as tokens by name."""
        return self._extras.texts(self) if self._extras else {}

    @property
    def why_unused(self) -> dict[str, str]:
        """Why objectives are not used with this data, by the name of their setting."""
        return self._extras.why_unused(self) if self._extras else {}

    def frozen_texts(self, name: str, numbers: np.ndarray, length: int) -> np.ndarray | None:
        """Return features of further texts. None if they are not cached."""
        return self._frozen.of_texts(name, numbers, length) if self._frozen else None

    def _views_of(self, rows: np.ndarray, epoch: int) -> np.ndarray:
        """Return the view of each image in an epoch: one after the other, from another start for
        each image."""
        count = self._views.count if self._views else 1
        return (self._first_views[rows] + epoch) % count

    @cached_property
    def _first_views(self) -> np.ndarray:
        count = self._views.count if self._views else 1
        return generator(self.seed, "turns").integers(0, count, len(self.pairs))

    def groups(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return numbers that equal images, and images of one class, have in common."""
        known = (self.pairs.identities, self.pairs.labels)
        return [group[rows] for group in known if group is not None]

    @cached_property
    def encoded(self) -> EncodedCaptions:
        """All captions as tokens."""
        captions = list(chain.from_iterable(self.pairs.captions))
        tokens = self.tokenizer.encode_all(captions, self.context)
        numbers: dict[bytes, int] = {}
        same = np.array([numbers.setdefault(caption.tobytes(), len(numbers)) for caption in tokens])
        counts = [len(options) for options in self.pairs.captions]
        if 0 in counts:
            raise DataError(
                f"The training image {counts.index(0) + 1} has no caption.",
                hint="lapclip data check DATA",
            )
        first_N = np.cumsum([0, *counts])
        starts = first_N[:-1]
        has_one_N = np.maximum.reduceat(same, starts) == np.minimum.reduceat(same, starts)
        images_without_other = np.bincount(same[starts[has_one_N]], minlength=len(numbers))
        allowed = np.maximum(1, -(-images_without_other // self.steps_per_epoch))
        sided = np.array([names_sides(caption) for caption in captions])
        return EncodedCaptions(Ragged.of(tokens), first_N, same, sided, allowed)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of an epoch in order, and the caption of each."""
        planned = self._planned  # read once: another thread may be at the next epoch
        if epoch not in planned:
            rows, first = self._order(epoch), self.encoded.first_N
            counts = np.diff(first)[rows]
            draws = generator(self.seed, "captions", epoch).random(len(rows))
            captions = first[rows] + (draws * counts).astype(np.int64)
            draw = generator(self.seed, "partners", epoch)
            for number in range(self.steps_per_epoch):
                self._separate_equal_captions(rows, captions, number, draw)
            last = dict(list(planned.items())[-1:])
            planned = self._planned = {**last, epoch: (rows, captions)}
        return planned[epoch]

    def _order(self, epoch: int) -> np.ndarray:
        """Draw the order of the images in an epoch."""
        draw = generator(self.seed, "order", epoch)
        if self.pairs.sequential:
            return _shuffle_nearby(len(self.pairs), draw)
        return draw.permutation(len(self.pairs))

    def _separate_equal_captions(
        self, rows: np.ndarray, captions: np.ndarray, number: int, draw: np.random.Generator
    ) -> None:
        """Change one batch of an epoch, in place, so that no caption is in it more often than
        allowed.

        An image without another caption is swapped with one of a later batch. It stays if a few
        tries fail.
        """
        same, first = self.encoded.same, number * self.batch_size
        next_batch = first + self.batch_size
        later = len(rows) - next_batch
        inside, counts = np.unique(
            same[captions[first : first + self.batch_size]], return_counts=True
        )
        if (counts <= self.encoded.allowed[inside]).all():
            return
        used: Counter[int] = Counter()
        for at in range(first, next_batch):
            swaps = draw.integers(0, later, SWAP_TRIES) + next_batch if later else []
            for other in [at, *swaps]:
                caption = self._unused_caption(rows[other], captions[other], used)
                if caption is not None:
                    rows[[at, other]] = rows[[other, at]]
                    captions[[at, other]] = captions[[other, at]]
                    captions[at] = caption
                    break
            used[int(same[captions[at]])] += 1

    def _unused_caption(self, row: Any, drawn: Any, used: Counter[int]) -> int | None:
        """Return a caption of an image that the batch may still have: the drawn one, or the next
        after it."""
        same, allowed = self.encoded.same, self.encoded.allowed
        first, last = self.encoded.first_N[row], self.encoded.first_N[row + 1]
        for caption in (*range(drawn, last), *range(first, drawn)):
            if used[int(same[caption])] < allowed[same[caption]]:
                return caption
        return None

    def padded(self, texts: Ragged, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of some texts as rows of one length, and how many each has."""
        lengths_B = texts.lengths(chosen)
        length = padded_length(lengths_B.max(), self.context)
        return self._as_rows(texts.joined(chosen), lengths_B, length), lengths_B

    def _as_rows(self, tokens: np.ndarray, lengths_B: np.ndarray, length: int) -> np.ndarray:
        """Return the tokens of several texts as padded rows."""
        tokens_BL = np.full((len(lengths_B), length), self.tokenizer.padding, dtype=np.int64)
        tokens_BL[np.arange(length) < lengths_B[:, None]] = tokens
        return tokens_BL

    def _drop_tokens(
        self, tokens_BL: np.ndarray, lengths_B: np.ndarray, step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Leave out some tokens of captions at random (`train.symbol_dropout`).

        Never the first and the last token, and never all between them. Captions of a tokenizer that
        fills the context keep their end, and are filled again.
        """
        if not self.symbol_dropout:
            return tokens_BL, lengths_B
        length = tokens_BL.shape[1]
        is_token_BL = np.arange(length) < lengths_B[:, None]
        draws = generator(self.seed, "words", step).random(lengths_B.sum())
        keep_mask = np.zeros(tokens_BL.shape, dtype=bool)
        keep_mask[is_token_BL] = draws >= self.symbol_dropout
        keep_mask[:, 0] = True
        keep_mask[np.arange(len(lengths_B)), lengths_B - 1] = True
        if self.tokenizer.fills:
            ends_B = np.argmax(tokens_BL == self.tokenizer.end, axis=1)
            keep_mask |= is_token_BL & (np.arange(length) >= ends_B[:, None])
            return self._as_rows(tokens_BL[keep_mask], keep_mask.sum(1), length), lengths_B
        is_emptied_B = keep_mask.sum(1) <= 2
        keep_mask[is_emptied_B] = is_token_BL[is_emptied_B]
        lengths_B = keep_mask.sum(1)
        return self._as_rows(tokens_BL[keep_mask], lengths_B, length), lengths_B


def equal_pairs(*groups_B: np.ndarray, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
    """Return which of some rows are of one group with which of all, in any of the groupings."""
    return np.any([group_B[rows, None] == group_B[None, :] for group_B in groups_B], axis=0)


def prefetch(plan: BatchPlan, first: int, last: int, threads: int = 1) -> Generator[Batch]:
    """Yield the batches of the steps first to last. Threads prepare them while the model works on
    earlier ones."""
    ahead = 1 + threads
    pool = ThreadPoolExecutor(threads, thread_name_prefix="lapclip-batches")
    try:
        waiting: deque[Future[Batch]] = deque()
        for step in range(first, last + 1):
            waiting.append(pool.submit(plan.batch, step))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)  # a caller that stops early does not wait for the rest


def _shuffle_nearby(count: int, draw: np.random.Generator) -> np.ndarray:
    """Draw an order of rows in which neighbors stay close."""
    # Blocks in a new order, then each row delayed by a random number of rows: a buffer that is
    # drawn from. Rows that would come after the end come first, so the first and last batches are
    # as mixed as the others.
    row = np.arange(count)
    block = draw.permutation(-(-count // BLOCK_ROWS))[row // BLOCK_ROWS]
    delayed = block * BLOCK_ROWS + row % BLOCK_ROWS + draw.random(count) * WINDOW_ROWS
    return np.argsort(delayed % count, kind="stable")
