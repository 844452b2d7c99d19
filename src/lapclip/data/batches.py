"""Which pairs, in which order: a function of the seed and the step alone, so that a resumed run sees the same batches.

Shapes: B batch, L tokens, S image side, C colour channels.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from lapclip.data.dataset import Pairs
from lapclip.data.pixels import draw_views, names_sides
from lapclip.data.ragged import Ragged
from lapclip.data.tokenizers import Tokenizer, padded_length
from lapclip.errors import DataError
from lapclip.seeding import generator

WINDOW = 4096
"""Rows that are shuffled among each other where reading neighbours together is faster."""
BLOCK = 256
"""Rows that stay neighbours there until then."""
PARTNERS = 4
"""Images that one with a caption that its batch has already may be swapped with."""


class Slicing(Enum):
    """How an array of a batch is cut when the batch is divided."""

    ROWS = "rows"
    OWN_ROWS = "own rows"
    """By rows. A rank has only those of its own pairs."""
    ROWS_AND_COLUMNS = "rows and columns"
    WHOLE = "not at all"


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
    """The pairs of a batch."""

    step: int
    rows: np.ndarray
    """Numbers of the images."""
    captions: np.ndarray
    """Numbers of the captions."""
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
    """What frozen parts of the towers make of the training pairs; None where a tower has none that is worth caching."""

    def of_images(self, rows: np.ndarray, views: np.ndarray) -> np.ndarray | None: ...

    def of_captions(self, captions: np.ndarray, length: int) -> np.ndarray | None:
        """Of captions by their number in the split, padded to a length."""
        ...

    def of_texts(self, name: str, numbers: np.ndarray, length: int) -> np.ndarray | None:
        """Of further texts by their number in `BatchPlan.texts`, padded to a length."""
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

    tokens: Ragged
    """Of each caption, one image's captions after the other's."""
    first_N: np.ndarray
    """Where the captions of each image begin, and where the last one's end."""
    same: np.ndarray
    """A number for each caption; captions that are equal as the model sees them have the same."""
    sided: np.ndarray
    """Whether each caption names a side."""
    allowed: np.ndarray
    """How often a batch may have each of them: once, or more where more images than batches have no other."""


@dataclass(frozen=True)
class Sections:
    """Data that is read in sequence, as one run of rows for each shard of a batch: who computes a shard reads the files
    of its section and no others. Other data, and a batch that is one shard, have one section."""

    batch_size: int
    batches: int
    """Of an epoch."""
    first: Sequence[int]
    """Where each section begins, and where the last one ends."""

    @classmethod
    def of(cls, pairs: Pairs, batch_size: int, shards: int) -> Sections:
        """Sections of about equal length. They end where a file ends, if that leaves each of them enough rows for all
        batches of an epoch; else a file is divided, so that an epoch leaves out no more rows than without sections."""
        count, batches = len(pairs), len(pairs) // batch_size
        sections = min(shards, batch_size) if pairs.sequential and shards > 1 else 1
        needed = [_rows_before(number, batches, batch_size, sections) for number in range(sections)]
        ends_of_files = (
            np.arange(0) if pairs.files is None else np.flatnonzero(np.diff(pairs.files)) + 1
        )
        first = [0]
        for number in range(1, sections):
            least, most = first[-1] + needed[number - 1], count - sum(needed[number:])
            even = min(max(count * number // sections, least), most)
            near = ends_of_files[(ends_of_files >= least) & (ends_of_files <= most)]
            first.append(int(near[np.abs(near - even).argmin()]) if len(near) else even)
        return cls(batch_size, batches, [*first, count])

    def __len__(self) -> int:
        return len(self.first) - 1

    def rows_before(self, section: int, batch: int) -> int:
        """How many rows of a section the batches of an epoch have before one, which counts from 0."""
        return _rows_before(section, batch, self.batch_size, len(self))

    def sizes(self, batch: int) -> list[int]:
        """How many rows of each section a batch has."""
        return [
            self.rows_before(at, batch + 1) - self.rows_before(at, batch) for at in range(len(self))
        ]

    def numbers(self, batch: int) -> np.ndarray:
        """The section of each row of a batch."""
        return np.repeat(np.arange(len(self)), self.sizes(batch))

    def arrange(self, orders: Sequence[np.ndarray]) -> np.ndarray:
        """The rows of an epoch from those of each section in their order: batch after batch, in each of them section
        after section, then what is left over."""
        if len(self) == 1:
            return orders[0]
        batch_N = [
            self._batch_of(section, np.arange(len(order))) for section, order in enumerate(orders)
        ]
        return np.concatenate(orders)[np.argsort(np.concatenate(batch_N), kind="stable")]

    def count_after(self, section: int, batch: int) -> int:
        """How many rows of a section come after a batch, those left over included."""
        return self.first[section + 1] - self.first[section] - self.rows_before(section, batch + 1)

    def index_after(self, section: int, batch: int, number: int) -> int:
        """Where `arrange` puts one of these rows."""
        row = self.rows_before(section, batch + 1) + number
        found = int(self._batch_of(section, row))
        if found < self.batches:
            before = sum(self.sizes(found)[:section])
        else:
            before = self.first[section] - sum(self.rows_before(at, found) for at in range(section))
        return found * self.batch_size + before + row - self.rows_before(section, found)

    def _batch_of(self, section: int, row: Any) -> Any:
        """The batch that has a row of a section, by its number there; those left over come after the last batch."""
        return np.minimum(
            -(-((row + 1) * len(self) - section) // self.batch_size) - 1, self.batches
        )


def _rows_before(section: int, batch: int, batch_size: int, sections: int) -> int:
    # Over all sections these add up to the rows of all batches before, and what does not divide evenly goes round.
    return (batch * batch_size + section) // sections


class BatchPlan:
    """Each epoch visits every image once in a new order, with one of its captions drawn at random.

    Two equal captions do not meet in a batch where that can be avoided: another caption of the image is taken, or the
    image is swapped with one of a later batch, and of its section. A last batch that would not be full is left out.
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
        *,
        shards: int = 1,
    ) -> None:
        if batch_size > len(pairs):
            raise DataError(
                f"train.batch_size {batch_size} is more than the {len(pairs)} training images.",
                hint=f"--set train.batch_size={len(pairs)}" if len(pairs) > 1 else "more images",
            )
        self.pairs, self.batch_size, self.seed, self.symbol_dropout = (
            pairs,
            batch_size,
            seed,
            symbol_dropout,
        )
        self.tokenizer, self.context = tokenizer, context
        self._views, self._extras = views, extras
        self._frozen: FrozenFeatures | None = None
        self.steps_per_epoch = len(pairs) // batch_size
        self._sections = Sections.of(pairs, batch_size, shards)
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
        """The epoch of a step; both count from 1."""
        return (step - 1) // self.steps_per_epoch + 1

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 1."""
        rows_N, captions_N = self._epoch(self.epoch(step))
        number = (step - 1) % self.steps_per_epoch
        first = number * self.batch_size
        rows, captions = (
            rows_N[first : first + self.batch_size],
            captions_N[first : first + self.batch_size],
        )
        tokens_BL, lengths_B = self._shortened(*self.padded(self.encoded.tokens, captions), step)
        # The order within a batch changes nothing but the speed: short captions together need less padding.
        sorted_B = np.argsort(lengths_B, kind="stable")
        rows, captions, lengths_B = rows[sorted_B], captions[sorted_B], lengths_B[sorted_B]
        tokens_BL = tokens_BL[sorted_B, : padded_length(lengths_B[-1], self.context)]
        views_B = self._turns(rows, self.epoch(step))
        loaded = slice(None) if self._ranks is None else self._ranks.own
        image = self._frozen.of_images(rows[loaded], views_B[loaded]) if self._frozen else None
        drawn = DrawnRows(step, rows, captions, loaded)
        return Batch(
            pixels_BSSC=np.ascontiguousarray(
                self.pairs.pixels[rows[loaded] if image is None else rows[:0]]
            ),
            tokens_BL=tokens_BL,
            positives_BB=self._positives(rows, captions),
            sided_B=self.encoded.sided[captions],
            aspects_B=None if self.pairs.aspects is None else self.pairs.aspects[rows],
            lengths_B=lengths_B,
            boxes_B5=None
            if self._views is None or image is not None
            else self.boxes[views_B, rows],
            image_features=image,
            text_features=self._frozen.of_captions(captions[loaded], tokens_BL.shape[1])
            if self._frozen
            else None,
            extras=self._extras.arrays(self, drawn) if self._extras else {},
            ranks=self._ranks,
        )

    @cached_property
    def boxes(self) -> np.ndarray:
        """The views of every image, (views, N, 5): boxes as `data/pixels.py` has them."""
        assert self._views is not None
        # An image is not flipped if any of its captions names a side.
        sided_N = np.logical_or.reduceat(self.encoded.sided, self.encoded.first_N[:-1])
        views, aspects_N, middle = self._views, self.pairs.aspects, self._views.middle
        if aspects_N is None:
            aspects_N, middle = np.ones(len(self.pairs)), 1.0  # drawn as the model is to see them
        return draw_views(
            sided_N, aspects_N, views.crop, views.flip, views.count, self.seed, middle
        )

    @property
    def captions(self) -> Sequence[np.ndarray]:
        """Every caption as tokens, one image's after the other's."""
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

    def _turns(self, rows: np.ndarray, epoch: int) -> np.ndarray:
        """Which view of some images an epoch uses: each in its turn, and not the same one for all images."""
        count = self._views.count if self._views else 1
        return (self._first_turns[rows] + epoch) % count

    @cached_property
    def _first_turns(self) -> np.ndarray:
        """The view of each image that comes first."""
        count = self._views.count if self._views else 1
        return generator(self.seed, "turns").integers(0, count, len(self.pairs))

    def _positives(self, rows: np.ndarray, captions: np.ndarray) -> np.ndarray:
        """Which images and captions belong together: with equal captions, of copies of an image, of one class."""
        return equal_pairs(self.encoded.same[captions], *self.groups(rows))

    def groups(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return what images that belong together have in common."""
        return [
            group[rows] for group in (self.pairs.identities, self.pairs.labels) if group is not None
        ]

    @cached_property
    def encoded(self) -> EncodedCaptions:
        captions = [caption for options in self.pairs.captions for caption in options]
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
        alone_N = np.maximum.reduceat(same, first_N[:-1]) == np.minimum.reduceat(same, first_N[:-1])
        only = np.bincount(same[first_N[:-1][alone_N]], minlength=len(numbers))
        allowed = np.maximum(1, -(-only // self.steps_per_epoch))
        sided = np.array([names_sides(caption) for caption in captions])
        return EncodedCaptions(Ragged.of(tokens), first_N, same, sided, allowed)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of an epoch in order, and the caption of each."""
        planned = self._planned  # read once: another thread may be at the next epoch
        if epoch not in planned:
            rows_N = self._order(epoch)
            first_N = self.encoded.first_N
            counts_N = np.diff(first_N)[rows_N]
            draws_N = generator(self.seed, "captions", epoch).random(len(rows_N))
            captions_N = first_N[rows_N] + (draws_N * counts_N).astype(np.int64)
            draw = generator(self.seed, "partners", epoch)
            for batch in range(self.steps_per_epoch):
                self._separate_duplicate_captions(rows_N, captions_N, batch, draw)
            last = dict(list(planned.items())[-1:])
            planned = self._planned = {**last, epoch: (rows_N, captions_N)}
        return planned[epoch]

    def _order(self, epoch: int) -> np.ndarray:
        draw, count = generator(self.seed, "order", epoch), len(self.pairs)
        if not self.pairs.sequential:
            return draw.permutation(count)
        # All sections are drawn, whichever of them this process reads, so that all processes have the same order.
        spans = pairwise(self._sections.first)
        return self._sections.arrange(
            [first + _by_blocks(last - first, draw) for first, last in spans]
        )

    def _separate_duplicate_captions(
        self, rows_N: np.ndarray, captions_N: np.ndarray, batch: int, draw: np.random.Generator
    ) -> None:
        """Change the captions of one batch, in place, so that none is there more often than it must, and its images
        where that must be: they are swapped with one of their section that is drawn from the rest of the epoch, or stay
        after a few tries."""
        first, same, sections = batch * self.batch_size, self.encoded.same, self._sections
        last = first + self.batch_size
        inside, counts = np.unique(same[captions_N[first:last]], return_counts=True)
        if (counts <= self.encoded.allowed[inside]).all():
            return
        used: Counter[int] = Counter()
        for at, section in enumerate(sections.numbers(batch).tolist(), start=first):
            caption = self._unused(rows_N[at], captions_N[at], used)
            later = sections.count_after(section, batch)
            tries = iter(draw.integers(0, later, PARTNERS).tolist() if later else ())
            other = at
            while caption is None and (number := next(tries, None)) is not None:
                other = sections.index_after(section, batch, number)
                caption = self._unused(rows_N[other], captions_N[other], used)
            if caption is not None:
                for swapped_N in (rows_N, captions_N):
                    swapped_N[[at, other]] = swapped_N[[other, at]]
                captions_N[at] = caption
            used[int(same[captions_N[at]])] += 1

    def _unused(self, row: Any, drawn: Any, used: Counter[int]) -> int | None:
        """A caption of an image that the batch may still have: the one drawn, or the next one after it."""
        same, allowed = self.encoded.same, self.encoded.allowed
        first, last = self.encoded.first_N[row], self.encoded.first_N[row + 1]
        turned = (*range(drawn, last), *range(first, drawn))
        return next(
            (caption for caption in turned if used[int(same[caption])] < allowed[same[caption]]),
            None,
        )

    def padded(self, texts: Ragged, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of some texts as rows of one length, and how many each has."""
        lengths_B = texts.lengths(chosen)
        return self._filled(
            texts.joined(chosen), lengths_B, padded_length(lengths_B.max(), self.context)
        ), lengths_B

    def _filled(self, tokens: np.ndarray, lengths_B: np.ndarray, length: int) -> np.ndarray:
        """Rows of a length from their tokens, one row's after the other's."""
        tokens_BL = np.full((len(lengths_B), length), self.tokenizer.padding, dtype=np.int64)
        tokens_BL[np.arange(length) < lengths_B[:, None]] = tokens
        return tokens_BL

    def _shortened(
        self, tokens_BL: np.ndarray, lengths_B: np.ndarray, step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Captions with some of their tokens left out at random: never the first and the last, and never all. Those
        that are filled keep their end, and are filled again."""
        if not self.symbol_dropout:
            return tokens_BL, lengths_B
        length = tokens_BL.shape[1]
        there_BL = np.arange(length) < lengths_B[:, None]
        keep_mask = np.zeros(tokens_BL.shape, dtype=bool)
        keep_mask[there_BL] = (
            generator(self.seed, "words", step).random(lengths_B.sum()) >= self.symbol_dropout
        )
        keep_mask[:, 0] = True
        keep_mask[np.arange(len(lengths_B)), lengths_B - 1] = True
        if self.tokenizer.fills:
            ends_B = np.argmax(tokens_BL == self.tokenizer.end, axis=1)
            keep_mask |= there_BL & (np.arange(length) >= ends_B[:, None])
            return self._filled(tokens_BL[keep_mask], keep_mask.sum(1), length), lengths_B
        nothing_B = keep_mask.sum(1) <= 2  # but the first and the last
        keep_mask[nothing_B] = there_BL[nothing_B]
        lengths_B = keep_mask.sum(1)
        return self._filled(tokens_BL[keep_mask], lengths_B, length), lengths_B


def _by_blocks(count: int, draw: np.random.Generator) -> np.ndarray:
    """An order of rows in which neighbours stay close."""
    # Blocks in a new order, then each row put off by a random number of rows: a buffer that is drawn from. What would
    # come after the end comes first, so that the first and the last batches are as mixed as the others.
    block_N = draw.permutation(-(-count // BLOCK))[np.arange(count) // BLOCK]
    late_N = block_N * BLOCK + np.arange(count) % BLOCK + draw.random(count) * WINDOW
    return np.argsort(late_N % count, kind="stable")


def equal_pairs(*groups_B: np.ndarray) -> np.ndarray:
    """Return which rows are of one group with which, in any of the groupings. (B, B)"""
    return np.any([group_B[:, None] == group_B[None, :] for group_B in groups_B], axis=0)


def prefetch(plan: BatchPlan, first: int, last: int, threads: int = 1) -> Generator[Batch]:
    """The batches of steps first to last, in order, prepared by threads while the model works on earlier ones."""
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
        pool.shutdown(
            cancel_futures=True
        )  # whoever stops early does not wait for batches that nobody has begun
