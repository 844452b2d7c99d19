"""Which pairs, in which order: a function of the seed and the step alone, so that a resumed run sees the same batches.

Shapes: B batch, L tokens, S picture side, C colour channels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lapclip.data.augment import names_sides
from lapclip.data.pairs import Pairs
from lapclip.data.tokenizers import Tokenizer, pad
from lapclip.errors import DataError
from lapclip.randomness import generator

WINDOW = 4096
"""Rows that are shuffled among each other where reading neighbours together is faster."""
BLOCK = 256
"""Rows that stay neighbours there until then."""


@dataclass(frozen=True)
class Batch:
    """Pictures, captions and which of them belong together. Sorted by the length of the captions."""

    pixels_BSSC: np.ndarray
    tokens_BL: np.ndarray
    positives_BB: np.ndarray
    sided_B: np.ndarray
    """Where the caption names left or right, so that the picture must not be flipped."""
    aspects_B: np.ndarray | None = None
    """Width to height of each picture before it was squeezed into a square; None where the squares were cut out."""


@dataclass(frozen=True)
class EncodedCaptions:
    """All captions of a split as symbols, encoded once."""

    symbols: list[np.ndarray]
    """Of each caption, one picture's after the other's."""
    first_N: np.ndarray
    """Where the captions of each picture begin, and where the last one's end."""
    same: np.ndarray
    """A number for each caption; captions that are equal as the model sees them have the same."""
    sided: np.ndarray
    """Whether each caption names a side."""


class BatchPlan:
    """Each epoch visits every picture once in a new order, with one of its captions drawn at random.

    Two equal captions do not meet in a batch where that can be avoided: another caption of the picture is taken, or the
    picture changes places with one of a later batch. A last batch that would not be full is left out.
    """

    def __init__(
        self,
        pairs: Pairs,
        tokenizer: Tokenizer,
        context: int,
        batch_size: int,
        seed: int,
        word_dropout: float = 0.0,
    ) -> None:
        if batch_size > len(pairs):
            raise DataError(
                f"train.batch_size {batch_size} is more than the {len(pairs)} training pictures.",
                hint=f"--set train.batch_size={len(pairs)}",
            )
        self.pairs, self.batch_size, self.seed, self.word_dropout = pairs, batch_size, seed, word_dropout
        self.tokenizer, self.context = tokenizer, context
        self.steps_per_epoch = len(pairs) // batch_size
        self._planned: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def epoch(self, step: int) -> int:
        """The epoch of a step; both count from 1."""
        return (step - 1) // self.steps_per_epoch + 1

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 1."""
        rows_N, captions_N = self._epoch(self.epoch(step))
        first = (step - 1) % self.steps_per_epoch * self.batch_size
        rows, captions = rows_N[first : first + self.batch_size], captions_N[first : first + self.batch_size]
        symbols = self._shortened([self._encoded.symbols[caption] for caption in captions], step)
        # The order within a batch changes nothing but the speed: short captions together need less padding.
        sorted_B = np.argsort([len(caption) for caption in symbols], kind="stable")
        rows, captions = rows[sorted_B], captions[sorted_B]
        return Batch(
            pixels_BSSC=np.ascontiguousarray(self.pairs.pixels[rows]),
            tokens_BL=pad([symbols[at] for at in sorted_B], self.context, self.tokenizer.padding),
            positives_BB=self._positives(rows, captions),
            sided_B=self._encoded.sided[captions],
            aspects_B=None if self.pairs.aspects is None else self.pairs.aspects[rows],
        )

    def _positives(self, rows: np.ndarray, captions: np.ndarray) -> np.ndarray:
        """Which pictures and captions belong together: those with equal captions, and those whose pictures are copies."""
        same_B = self._encoded.same[captions]
        positives_BB = same_B[:, None] == same_B[None, :]
        if self.pairs.identities is not None:
            copies_B = self.pairs.identities[rows]
            positives_BB |= copies_B[:, None] == copies_B[None, :]
        return positives_BB

    @cached_property
    def _encoded(self) -> EncodedCaptions:
        captions = [caption for options in self.pairs.captions for caption in options]
        symbols = self.tokenizer.encode_all(captions, self.context)
        numbers: dict[bytes, int] = {}
        same = [numbers.setdefault(caption.tobytes(), len(numbers)) for caption in symbols]
        counts = [len(options) for options in self.pairs.captions]
        if 0 in counts:
            raise DataError(
                f"The training picture {counts.index(0) + 1} has no caption.", hint="lapclip data check DATA"
            )
        return EncodedCaptions(
            symbols, np.cumsum([0, *counts]), np.array(same), np.array([names_sides(caption) for caption in captions])
        )

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of an epoch in order, and the caption of each."""
        planned = self._planned  # read once: another thread may be at the next epoch
        if epoch not in planned:
            rows_N = self._order(epoch)
            first_N, same = self._encoded.first_N, self._encoded.same
            counts_N = np.diff(first_N)[rows_N]
            draws_N = generator(self.seed, "captions", epoch).random(len(rows_N))
            captions_N = first_N[rows_N] + (draws_N * counts_N).astype(np.int64)
            for first in range(0, self.steps_per_epoch * self.batch_size, self.batch_size):
                self._part_equals(rows_N, captions_N, same, first, first + self.batch_size)
            last = dict(list(planned.items())[-1:])
            planned = self._planned = {**last, epoch: (rows_N, captions_N)}
        return planned[epoch]

    def _order(self, epoch: int) -> np.ndarray:
        draw, count = generator(self.seed, "order", epoch), len(self.pairs)
        if not self.pairs.sequential:
            return draw.permutation(count)
        # Blocks in a new order, then each row put off by a random number of places: a buffer that is drawn from.
        block_N = draw.permutation(-(-count // BLOCK))[np.arange(count) // BLOCK]
        return np.argsort(block_N * BLOCK + np.arange(count) % BLOCK + draw.random(count) * WINDOW, kind="stable")

    def _part_equals(self, rows_N: np.ndarray, captions_N: np.ndarray, same: np.ndarray, first: int, last: int) -> None:
        """Change the captions of one batch, in place, so that no two are equal, and its pictures where that must be."""
        inside = same[captions_N[first:last]]
        if len(np.unique(inside)) == len(inside):
            return
        used: set[int] = set()
        for at in range(first, last):
            for other in (at, *range(last, min(len(rows_N), last + self.batch_size))):
                caption = self._unused(rows_N[other], captions_N[other], same, used)
                if caption is not None:
                    for places in (rows_N, captions_N):
                        places[[at, other]] = places[[other, at]]
                    captions_N[at] = caption
                    break
            used.add(int(same[captions_N[at]]))

    def _unused(self, row: int, drawn: int, same: np.ndarray, used: set[int]) -> int | None:
        """A caption of a picture that the batch does not have yet: the one drawn, or the next one after it."""
        first, last = self._encoded.first_N[row], self._encoded.first_N[row + 1]
        turned = [*range(drawn, last), *range(first, drawn)]
        return next((caption for caption in turned if int(same[caption]) not in used), None)

    def _shortened(self, captions: list[np.ndarray], step: int) -> list[np.ndarray]:
        """Captions with some of their symbols left out at random: never the first and the last, and never all."""
        if not self.word_dropout:
            return captions
        draw = generator(self.seed, "words", step)
        found = []
        for symbols in captions:
            kept = draw.random(len(symbols)) >= self.word_dropout
            kept[[0, -1]] = True
            found.append(symbols[kept] if kept.sum() > 2 else symbols)
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
