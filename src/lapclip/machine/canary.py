"""Short checks that a device computes what it should, because accelerators have been silently wrong.

Each check computes an operation of training on the device, forward and backward, and compares it with the formula
written out in float64 on the CPU, from the same rounded numbers. It takes a few seconds, once for each release of torch
and of the system; what was found is remembered. `machine/devices.py` decides what follows from it.

Why, on MPS alone: attention wrong for permuted inputs (pytorch issues 163597, 181133), `is_causal` that leaks later
tokens in half precision (195910), a fused Adam that ignores found_inf (186360).
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lapclip.errors import first_line
from lapclip.machine.canary_operations import Answer, Place, checks
from lapclip.machine.measurement_cache import Notebook

NOTEBOOK = Notebook("canary.json")
VERSION = 1
"""Rises when the checks change, so that they are made again."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""How far a result may be from the formula, relative to its norm. Rounding alone stays below half of it."""


@dataclass(frozen=True)
class Result:
    """How one check ended."""

    name: str
    """The operation, the precision, and `gradients` where they were computed too."""
    ok: bool
    error: float | None
    """Distance from what is right, relative to its norm; None where there is no number."""
    tolerance: float
    note: str = ""
    """The error of an operation that does not run there."""

    @property
    def operation(self) -> str:
        return self.name.split(",")[0]

    @property
    def precision(self) -> str:
        return self.name.split(", ")[1]

    def sentence(self) -> str:
        """The result in words."""
        if self.note:
            return f"{self.name}: does not run ({self.note})"
        off = "no number" if self.error is None else f"off by {self.error:.1e}"
        return f"{self.name}: {off}, tolerance {self.tolerance:.0e}"


def examine(place: Place) -> list[Result]:
    """Every check on one device, in every precision it has."""
    return [_judged(name, dtype, check) for dtype in TOLERANCE for name, check in checks(place, dtype)]


def consult(place: Place, label: str) -> list[Result]:
    """What is known of a device with this torch and this system; examined now where nothing is."""
    key = f"{place.type} {label}, torch {torch.__version__}, {platform.platform()}, checks {VERSION}"
    with suppress(TypeError):  # another release wrote other fields, or nothing is known
        return [Result(**known) for known in NOTEBOOK.read(key)]
    results = examine(place)
    NOTEBOOK.write(key, [asdict(result) for result in results])
    return results


def _judged(name: str, dtype: torch.dtype, check: Callable[[], Answer]) -> Result:
    tolerance = TOLERANCE[dtype]
    try:
        got, right = check()
        error = max(_distance(one, other) for one, other in zip(got, right, strict=True))
    except Exception as fault:  # a library's own error: the device cannot do it
        return Result(name, False, None, tolerance, first_line(fault))
    return Result(name, error <= tolerance, error if math.isfinite(error) else None, tolerance)


def _distance(got: Tensor, right: Tensor) -> float:
    """Relative to the norm; infinite where something is not a number."""
    distance = ((got.detach().cpu().double() - right).norm() / right.norm().clamp(min=1e-12)).item()
    return distance if math.isfinite(distance) else math.inf
