"""Which pairs, in which order: a function of the seed and the step alone, so that a resumed run sees the same batches.

Shapes: B batch, L tokens, S picture side, C colour channels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from lapclip.data.augment import names_sides
from lapclip.data.pairs import Pairs
from lapclip.data.tokenizers import Tokenizer
from lapclip.errors import DataError
from lapclip.randomness import generator


@dataclass(frozen=True)
class Batch:
    """Pictures, captions and which of them belong together."""

    pixels_BSSC: np.ndarray
    tokens_BL: np.ndarray
    positives_BB: np.ndarray
    sided_B: np.ndarray
    """Where the caption names left or right, so that the picture must not be flipped."""


class BatchPlan:
    """Each epoch visits every picture once in a new order; a last batch that would not be full is left out."""

    def __init__(self, pairs: Pairs, tokenizer: Tokenizer, context: int, batch_size: int, seed: int) -> None:
        if batch_size > len(pairs):
            raise DataError(
                f"train.batch_size {batch_size} is more than the {len(pairs)} training pictures.",
                hint=f"--set train.batch_size={len(pairs)}",
            )
        self.pairs, self.batch_size, self.seed = pairs, batch_size, seed
        self.tokenizer, self.context = tokenizer, context
        self.steps_per_epoch = len(pairs) // batch_size
        self._drawn: tuple[int, np.ndarray] | None = None

    def epoch(self, step: int) -> int:
        """The epoch of a step; both count from 1."""
        return (step - 1) // self.steps_per_epoch + 1

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 1."""
        epoch = self.epoch(step)
        order = self._order(epoch)
        first = (step - 1) % self.steps_per_epoch * self.batch_size
        rows = order[first : first + self.batch_size]
        captions = self._captions(rows, step)
        tokens_BL = self.tokenizer.batch(captions, self.context)
        # Captions are compared as the model sees them; each row is a picture of its own, so none shares a picture.
        caption_B = np.unique(tokens_BL, axis=0, return_inverse=True)[1].reshape(-1)
        return Batch(
            pixels_BSSC=np.ascontiguousarray(self.pairs.pixels[rows]),
            tokens_BL=tokens_BL,
            positives_BB=caption_B[:, None] == caption_B[None, :],
            sided_B=np.array([names_sides(caption) for caption in captions]),
        )

    def _order(self, epoch: int) -> np.ndarray:
        drawn = self._drawn  # read once: another thread may be at the next epoch
        if drawn is None or drawn[0] != epoch:
            drawn = self._drawn = (epoch, generator(self.seed, "order", epoch).permutation(len(self.pairs)))
        return drawn[1]

    def _captions(self, rows: np.ndarray, step: int) -> list[str]:
        """One caption a picture, drawn at random; another of its captions where the batch has that one already."""
        draws = generator(self.seed, "captions", step).random(len(rows))
        chosen: dict[str, None] = {}
        captions: list[str] = []
        for row, draw in zip(rows, draws, strict=True):
            options = list(self.pairs.captions[int(row)])
            start = int(draw * len(options))
            turned = [*options[start:], *options[:start]]
            caption = next((option for option in turned if option not in chosen), turned[0])
            chosen[caption] = None
            captions.append(caption)
        return captions


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
