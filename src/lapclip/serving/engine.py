"""What computes the vectors of a served model: torch or ONNX Runtime, and the batches that pay off there."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lapclip.embedder import Encoder, OnnxEmbedder
from lapclip.machine.choose_device import use_threads
from lapclip.measure.timing import MIN_SPEEDUP, Timer

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LONGEST_BATCH = 0.5
"""Seconds that a batch may take: nobody else is served meanwhile."""
TEXT_LENGTH = 16
"""Tokens of the captions that are timed."""
ROUNDS = 3

_own = threading.local()


@dataclass(frozen=True)
class BatchTimes:
    """Seconds of one batch by its size, for one tower."""

    seconds: Mapping[int, float]

    @property
    def largest(self) -> int:
        """The smallest batch that is as fast a row as any, within noise; 1 where joining requests gains nothing."""
        allowed = {
            size: spent / size
            for size, spent in self.seconds.items()
            if size == 1 or spent <= LONGEST_BATCH
        }
        best = min(allowed.values())
        return min(size for size, each in allowed.items() if each <= best * MIN_SPEEDUP)

    @property
    def seconds_per_row(self) -> float:
        return self.seconds[self.largest] / self.largest


@dataclass
class Engine:
    """An opened model that computes one batch at a time."""

    name: str
    """torch-float32, torch-bfloat16, torch-float16, onnx-float32 or onnx-int8."""
    encoder: Encoder
    threads: int
    device: str = "cpu"
    times: dict[str, BatchTimes] = field(default_factory=dict)
    """By tower, as measured here."""
    reasons: list[str] = field(default_factory=list)
    """Why this engine, these threads and these batches, as sentences."""
    fingerprint: str = ""
    """Which space its vectors are from; found out where it is not given, which reads all weights."""

    def __post_init__(self) -> None:
        self.fingerprint = self.fingerprint or served_fingerprint(self.encoder)

    @property
    def is_exact(self) -> bool:
        """Whether it computes in float32 throughout."""
        return self.name.endswith("float32")

    def embed(self, tower: str, rows: np.ndarray) -> np.ndarray:
        if getattr(_own, "threads", None) != self.threads:
            use_threads(self.threads)
            _own.threads = self.threads
        return (
            self.encoder.embed_pixels(rows) if tower == "image" else self.encoder.embed_tokens(rows)
        )

    def largest_batch(self, tower: str) -> int:
        return self.times[tower].largest

    def seconds_per_row(self, tower: str) -> float:
        return self.times[tower].seconds_per_row

    def measure(self) -> None:
        """Time batches of both towers, from one row on until a batch takes too long or a larger one gains nothing."""
        for tower in ("image", "text"):
            seconds: dict[int, float] = {}
            for size in BATCHES:
                seconds[size] = self._time(tower, size)
                each = {done: spent / done for done, spent in seconds.items()}
                if seconds[size] > LONGEST_BATCH or (
                    size >= 4 and each[size] > each[size // 2] / MIN_SPEEDUP > 0
                ):
                    break
            self.times[tower] = BatchTimes(seconds)

    def _time(self, tower: str, size: int) -> float:
        """Return the seconds of one batch: the best run, because whatever disturbs makes it slower."""
        rows = self.rows(tower, size)
        timer = Timer(rounds=ROUNDS, max_seconds=4 * LONGEST_BATCH)
        return min(timer.time_one(lambda: self.embed(tower, rows)).seconds)

    def rows(self, tower: str, size: int) -> np.ndarray:
        """Pixels or tokens to time it with."""
        generator = np.random.default_rng(0)
        if tower == "image":
            side = self.encoder.view.side
            return generator.integers(0, 256, (size, side, side, 3), np.uint8)
        tokenizer = self.encoder.tokenizer
        length = self.encoder.context if tokenizer.fills else min(TEXT_LENGTH, self.encoder.context)
        rows = generator.integers(
            0, max(1, min(tokenizer.start, tokenizer.end)), (size, length), np.int64
        )
        rows[:, 0], rows[:, -1] = tokenizer.start, tokenizer.end
        return rows


def served_fingerprint(encoder: Encoder) -> str:
    """Which space the vectors are from. A float32 export gives the vectors of the model that it was made from, and
    bears its fingerprint; an int8 one has its own."""
    if (
        isinstance(encoder, OnnxEmbedder)
        and encoder.about["format"] == "onnx"
        and len(encoder.made_from) == 16
    ):
        return encoder.made_from
    return encoder.fingerprint()
