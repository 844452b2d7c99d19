"""What the tests of claims share."""

from __future__ import annotations

from typing import Any

from lapclip.model.shapes import SHAPES
from lapclip.tuning.claims.bench import Bench
from lapclip.tuning.step_memory import StepMemory

TINY = SHAPES["tiny"]


def tiny_bench(**changes: Any) -> Bench:
    """Return a bench that measures in moments, without an accelerator."""
    sizes = {
        "shape": TINY,
        "larger_shape": TINY,
        "small_shape": TINY,
        "batches": (8, 12),
        "rounds": 1,
        "copy_bytes": 1 << 20,
        "product_size": 64,
        "accelerator": None,
    }
    return Bench(**{**sizes, **changes})


def memory(**megabytes: int) -> StepMemory:
    """Return the memory of a step as it was published, with these parts changed."""
    parts = {
        "process": 0,
        "parameters": 2_500,
        "gradients": 300,
        "optimizer": 100,
        "activations": 50,
        "rest": 50,
    }
    sizes = {name: size * 10**6 for name, size in (parts | megabytes).items()}
    return StepMemory(peak=sum(sizes.values()), traffic=0, **sizes)
