"""How long does a question to a million images take, and how much memory?

    python benchmarks/search_million.py [--images 1000000] [--width 512] [--rounds 7]

Synthetic vectors in a real index; the whole of `Library.find` but the text tower, without and with the correction for
hubness, and ways to compute the products, interleaved in one run. Medians, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import torch

from lapclip.data.find_images import Stamp
from lapclip.evaluation.calibration import Calibration
from lapclip.searching.index import Entry, Index
from lapclip.searching.library import Library
from lapclip.searching.query import nearest, rough_scores
from lapclip.searching.update_index import Before, IndexUpdate

BLOCK = 16384
CORRECTED = "whole question, hubness corrected"


@torch.inference_mode()
def torch_blocks(vectors: np.ndarray, question: np.ndarray) -> np.ndarray:
    """float16 to float32 in a block of memory that is used again."""
    wide = torch.empty(BLOCK, vectors.shape[1])
    asked, parts = torch.from_numpy(question), []
    for at in range(0, len(vectors), BLOCK):
        part = torch.from_numpy(vectors[at : at + BLOCK])
        parts.append(torch.mv(wide[: len(part)].copy_(part), asked))
    return torch.cat(parts).numpy()


WAYS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "torch, float16 as it lies": rough_scores,
    "torch, float32 blocks": torch_blocks,
}


def make_index(place: Path, images: int, width: int) -> Index:
    """Random unit vectors, a block at a time as an indexer writes them."""
    index, numbers = Index(place), np.random.default_rng(0)
    index.open()
    index.begin("synthetic", width)
    for first in range(0, images, 50_000):
        count = min(50_000, images - first)
        vectors = numbers.standard_normal((count, width), dtype=np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        rows = index.append(vectors)
        index.put(Entry(0, path_of(row), 1, 1, f"{row:032x}", None, 1, 1, row) for row in rows)
        print(f"\rmaking {first + count:,} of {images:,}", end="", flush=True)
    print()
    return index


def calibrated(width: int) -> Calibration:
    """Return a calibration that subtracts half of the hubness from every query."""
    return Calibration(
        model="synthetic",
        bank=np.ones((1000, width), np.float16),
        share=0.5,
        usual_hubness=0.5,
        min_words=1,
        recall_before=0.2,
        recall_after=0.3,
    )


def own_memory() -> int:
    """Bytes that are not pages of mapped files."""
    told = psutil.Process().memory_info()
    return told.rss - getattr(told, "shared", 0)


class Peak:
    """The most of it while something goes on, looked at every 5 ms."""

    def __enter__(self) -> Peak:
        self.before = self.most = own_memory()
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look)
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._looking.join()

    @property
    def bytes(self) -> int:
        return self.most - self.before

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.most = max(self.most, own_memory())


def compare(index: Index, images: int) -> None:
    """What each command does first: see that nothing in the folder has changed. Walking it comes on top."""
    there = Before(index, ((path_of(row), Stamp(1, 1)) for row in range(images)))
    assert not there.note_gone(lambda path: False)
    assert there.count_to_read() == 0


def path_of(row: int) -> str:
    return f"{row // 1000:05}/{row:08}.jpg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    wanted = parser.parse_args()
    draws = np.random.default_rng(1)

    def question() -> np.ndarray:
        vector = draws.standard_normal(wanted.width).astype(np.float32)
        return vector / np.linalg.norm(vector)

    with tempfile.TemporaryDirectory() as folder:
        index = make_index(Path(folder), wanted.images, wanted.width)
        encoder = cast(
            Any,
            SimpleNamespace(
                identity="synthetic", encode_text=lambda texts: question()[None], calibration=None
            ),
        )
        began = time.perf_counter()
        with Peak() as comparing:
            compare(index, wanted.images)
        compared = time.perf_counter() - began
        began = time.perf_counter()
        with Peak() as opening:
            library = Library(Path(folder), index, encoder, IndexUpdate())
        opened = time.perf_counter() - began
        vectors = index.vectors()
        calibration = calibrated(wanted.width)
        hubness = draws.uniform(0, 1, wanted.images).astype(np.float32)
        numbers, _ = index.without_hubness(calibration.digest or "")
        index.save_hubness(numbers, hubness)
        less = calibration.penalty(hubness)
        other = cast(Any, SimpleNamespace(**vars(encoder) | {"calibration": calibration}))
        corrected = Library(Path(folder), index, other, IndexUpdate())
        asking = 0
        seconds: dict[str, list[float]] = {
            name: [] for name in ["whole question", CORRECTED, *WAYS]
        }
        for round_ in range(wanted.rounds + 1):  # the first one brings the file into memory
            began = time.perf_counter()
            with Peak() as looking:
                hits = library.find("anything", 20)
            took = {"whole question": time.perf_counter() - began}
            asking = max(asking, looking.most - opening.before)
            assert len(hits) == 20
            began = time.perf_counter()
            corrected.find("anything", 20)
            took[CORRECTED] = time.perf_counter() - began
            asked = question()
            exact = torch_blocks(vectors, asked)
            for name, way in WAYS.items():
                began = time.perf_counter()
                scores = way(vectors, asked)
                took[name] = time.perf_counter() - began
                assert np.abs(scores - exact).max() < 2e-3, name
            places, _ = nearest(
                vectors, np.arange(len(vectors)), np.arange(len(vectors)), asked, 20
            )
            assert set(places) == set(np.argsort(-exact)[:20])
            places, _ = nearest(
                vectors, np.arange(len(vectors)), np.arange(len(vectors)), asked, 20, less
            )
            assert set(places) == set(np.argsort(less - exact)[:20])
            if round_:
                for name, value in took.items():
                    seconds[name].append(value)
        found = {name: round(median(values) * 1000, 1) for name, values in seconds.items()}
        for name, value in found.items():
            print(f"{name:<36}{value:>8.1f} ms  (slowest {max(seconds[name]) * 1000:.1f})")
        print(f"comparing with the folder {compared:.1f} s, {comparing.bytes / 1e6:.0f} MB at most")
        print(f"opening {opened:.1f} s, {opening.bytes / 1e6:.0f} MB at most")
        print(
            f"memory beside the mapped file, from before opening: {asking / 1e6:.0f} MB at most in a question"
        )
        library.close()
        memory = {
            "compared_s": compared,
            "opened_s": opened,
            "bytes": {"comparing": comparing.bytes, "opening": opening.bytes, "asking": asking},
        }
        facts = {
            "torch": torch.__version__,
            "numpy": np.__version__,
            "threads": torch.get_num_threads(),
        }
        print(json.dumps({**vars(wanted), "ms": found, **memory, **facts}))


if __name__ == "__main__":
    main()
