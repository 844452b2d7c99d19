"""Claims that are decided by counting, or by the notes' own figures."""

from __future__ import annotations

import numpy as np

from lapclip.evaluation.retrieval import batch_accuracy
from lapclip.model.shapes import SHAPES
from lapclip.seeding import generator
from lapclip.tuning.claims.bench import Bench
from lapclip.tuning.claims.finding import Finding, judge
from lapclip.tuning.model_size import count_parameters

# The technical specifications by Apple of a 13-inch MacBook Pro with an M1.
BATTERY_WATT_HOURS = 58.2
PERFORMANCE_CORES = 4
EFFICIENCY_CORES = 4
# The notes on the published run.
WATTS = 35.0
HOURS = 0.65
LOSS_AT_EPOCH_1 = 3.25
LOSS_AT_EPOCH_5 = 2.75
EARLY_LOSS_SLOPE = 0.25  # per epoch, up to epoch 3
LATE_LOSS_SLOPE = 0.12


def count_written_parameters(bench: Bench) -> int:
    """Return the parameters of the architecture as the notes describe it."""
    return count_parameters(SHAPES["seed-as-written"])


def judge_parameters(count: int) -> Finding:
    real_count = count_parameters(SHAPES["seed"])
    return judge(
        abs(count / 76.7e6 - 1) < 0.005,
        f"{count:,} as written",
        f"counted in the built model; 512 wide and 12 deep in both towers has {real_count:,}",
    )


def measure_chance(bench: Bench, pairs: int = 1200) -> tuple[float, int]:
    """Return the accuracy of random unit vectors, and the size of the batches."""
    draw = generator(0, "chance")
    images = draw.normal(size=(pairs, 32)).astype(np.float32)
    texts = draw.normal(size=(pairs, 32)).astype(np.float32)
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    texts /= np.linalg.norm(texts, axis=1, keepdims=True)
    return batch_accuracy(images, texts, bench.batch, repeats=20)["accuracy"], bench.batch


def judge_chance(measured: tuple[float, int]) -> Finding:
    accuracy, batch = measured
    return judge(
        abs(accuracy - 0.06) < 0.01,
        f"{accuracy:.1%} for random vectors in batches of {batch}",
        f"1/{batch} is {1 / batch:.1%}; 1/16 belongs to batches of 16",
    )


def compute_loss_falls(bench: Bench) -> tuple[float, float]:
    """Return how far the loss falls from epoch 1 to 5, by the listed losses and by the slopes."""
    return LOSS_AT_EPOCH_1 - LOSS_AT_EPOCH_5, 2 * EARLY_LOSS_SLOPE + 2 * LATE_LOSS_SLOPE


def judge_loss_slope(falls: tuple[float, float]) -> Finding:
    listed, by_slopes = falls
    return judge(
        abs(by_slopes - listed) < 0.1 * listed,
        f"{listed / 4:.3f} an epoch from epoch 1 to 5, by the notes' own table",
        f"the stated slopes mean a fall of {by_slopes:.2f} from epoch 1 to 5; "
        f"the table says {listed:.2f}",
    )


def compute_watt_hours(bench: Bench) -> float:
    return WATTS * HOURS


def judge_battery(watt_hours: float) -> Finding:
    share = watt_hours / BATTERY_WATT_HOURS
    return judge(
        abs(share - 0.15) < 0.03,
        f"{share:.0%} ({watt_hours:.1f} of {BATTERY_WATT_HOURS:g} Wh)",
        "the notes' own watts and hours against the battery of that machine",
    )


def count_m1_cores(bench: Bench) -> tuple[int, int]:
    return PERFORMANCE_CORES, EFFICIENCY_CORES


def judge_m1_cores(cores: tuple[int, int]) -> Finding:
    performance, efficiency = cores
    return judge(
        performance == 8,
        f"{performance} performance and {efficiency} efficiency cores",
        "the maker's figures, and the notes' own table of cores",
    )
