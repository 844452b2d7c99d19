"""Claims that the notes' own figures, or counting, decide: the same on every machine."""

from __future__ import annotations

import numpy as np

from lapclip.claims.bench import Bench, parameters
from lapclip.claims.judge import Finding, judged
from lapclip.evaluation.retrieval import batch_accuracy
from lapclip.model.shapes import SHAPES
from lapclip.seeding import generator

BATTERY_WH = 58.2
"""A 13-inch MacBook Pro with an M1 (the technical specifications by Apple: 58.2-watt-hour battery)."""
M1_CORES = (4, 4)
"""Performance and efficiency cores of an M1 (the same page)."""


def parameter_count(bench: Bench) -> Finding:
    """Claim 19: the architecture as it is written, and the one that has that many."""
    return count_verdict(parameters(SHAPES["seed-as-written"]), parameters(SHAPES["seed"]))


def count_verdict(written: int, other: int) -> Finding:
    return judged(
        abs(written / 76.7e6 - 1) < 0.005,
        f"{written:,} as written",
        f"counted in the built model; 512 wide and 12 deep in both towers has {other:,}",
    )


def chance(bench: Bench) -> Finding:
    """Claim 20: the score of embeddings that know nothing, in batches of the published run's size."""
    return chance_verdict(random_accuracy(bench.batch), bench.batch)


def random_accuracy(size: int, pairs: int = 1200) -> float:
    """Accuracy of random unit vectors in batches of `size`."""
    draw = generator(0, "chance")
    image, text = (draw.normal(size=(pairs, 32)).astype(np.float32) for _ in range(2))
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (image, text)]
    return batch_accuracy(unit[0], unit[1], size, repeats=20)["accuracy"]


def chance_verdict(accuracy: float, size: int) -> Finding:
    return judged(
        abs(accuracy - 0.06) < 0.01,
        f"{accuracy:.1%} for random vectors in batches of {size}",
        f"1/{size} is {1 / size:.1%}; 1/16 belongs to batches of 16",
    )


def loss_slope(bench: Bench) -> Finding:
    """Claim 27: the slopes the notes state against the losses the notes list."""
    return slope_verdict(first=3.25, fifth=2.75, early=0.25, later=0.12)


def slope_verdict(first: float, fifth: float, early: float, later: float) -> Finding:
    """Two epochs at the early slope and two at the later one lead from epoch 1 to epoch 5."""
    needed, listed = 2 * early + 2 * later, first - fifth
    return judged(
        abs(needed - listed) < 0.1 * listed,
        f"{listed / 4:.3f} an epoch from epoch 1 to 5, by the notes' own table",
        f"the stated slopes mean a fall of {needed:.2f} from epoch 1 to 5; the table says {listed:.2f}",
    )


def battery(bench: Bench) -> Finding:
    """Claim 28."""
    return battery_verdict(watts=35.0, hours=0.65, capacity=BATTERY_WH)


def battery_verdict(watts: float, hours: float, capacity: float) -> Finding:
    share = watts * hours / capacity
    return judged(
        abs(share - 0.15) < 0.03,
        f"{share:.0%} ({watts * hours:.1f} of {capacity:g} Wh)",
        "the notes' own watts and hours against the battery of that machine",
    )


def performance_cores(bench: Bench) -> Finding:
    """Claim 29."""
    return cores_verdict(*M1_CORES)


def cores_verdict(performance: int, efficiency: int) -> Finding:
    return judged(
        performance == 8,
        f"{performance} performance and {efficiency} efficiency cores",
        "the maker's figures, and the notes' own table of cores",
    )
