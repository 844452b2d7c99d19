"""Which int8 form of a tower is taken: the fastest of those that keep its embeddings, measured on training pairs.

Held-out pairs have no say in it. A tower that then fails the check on them goes back to float32 (`to_onnx.py`), which
is the one thing that they decide.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.embedder import Embedder, OnnxSession
from lapclip.exporting.check import LEAST_COSINE, MOST_LOST, Embedded, cosines, recall_lost, run_tower
from lapclip.machine.timing import WORTH, in_turns

FLOAT = "float32"
AT_ONCE = 32
IN_HAND = 0.1
"""Share of the cosine that may be lost which is left for held-out pairs, since they may lose a little more."""


@dataclass(frozen=True)
class Tried:
    """One form of a tower, and what it was measured at."""

    way: str
    cosine: float
    """Mean over training pairs, to the model's own embeddings."""
    recall_lost: float
    """Of text-to-image R@1 among training pairs, with the other tower as it was."""
    by_chance: float
    """What chance explains of it."""
    ms: float
    """One at a time."""

    @property
    def keeps(self) -> bool:
        least = LEAST_COSINE + IN_HAND * (1 - LEAST_COSINE)
        return self.cosine >= least and self.recall_lost <= MOST_LOST + self.by_chance


def try_ways(
    tower: str, embedder: Embedder, files: dict[str, Path], rows: np.ndarray, truth: Embedded
) -> dict[str, Tried]:
    """Measure every form of a tower on rows of training inputs, whose embeddings by the model itself are known."""
    sessions = {way: OnnxSession(path) for way, path in files.items()}
    runs = {way: lambda session=session: session(rows[:1]) for way, session in sessions.items()}
    spent = in_turns({**runs, "torch": lambda: run_tower(embedder, tower, rows[:1])}, lambda: None, 20, 5.0, 3, 5)
    own = truth.images if tower == "image" else truth.texts
    found = {}
    for way, session in sessions.items():
        after = np.concatenate([session(rows[at : at + AT_ONCE]) for at in range(0, len(rows), AT_ONCE)])
        changed = replace(truth, images=after) if tower == "image" else replace(truth, texts=after)
        found[way] = Tried(way, cosines(own, after)["mean"], *recall_lost(truth, changed), 1000 * spent[way])
    return found


def choose(tower: str, tried: dict[str, Tried]) -> tuple[str, str]:
    """The form to take, and why. float32 is among those tried, and is taken where every other one loses too much."""
    fast = {way: one for way, one in tried.items() if way != FLOAT}
    keeping = [one for one in fast.values() if one.keeps]
    if not keeping:
        best = max(fast.values(), key=lambda one: one.cosine)
        return FLOAT, f"the {tower} tower stays in float32: at best ({best.way}) {_measured(best)}, too much lost"
    quickest = min(keeping, key=lambda one: one.ms)
    # Within the noise of timing the closer one is the better one.
    near = [one for one in keeping if one.ms <= WORTH * quickest.ms]
    chosen = max(near, key=lambda one: one.cosine)
    others = [f"{one.way}: {_measured(one)}" for one in tried.values() if one is not chosen]
    return chosen.way, f"{chosen.way} for the {tower} tower: {_measured(chosen)} ({'; '.join(others)})"


def as_json(tried: dict[str, Tried]) -> list[dict[str, Any]]:
    return [asdict(one) for one in tried.values()]


def _measured(one: Tried) -> str:
    return f"cosine {one.cosine:.4f}, R@1 {0.0 - 100 * one.recall_lost:+.1f} points, {one.ms:.2f} ms"
