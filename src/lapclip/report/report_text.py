"""What only reports say: intervals, counts, sizes of models, and how much faster."""

from __future__ import annotations

from typing import Any

from lapclip.runs.curves import number
from lapclip.runs.number_text import UNKNOWN, figure


def interval(low_high: Any) -> str:
    """A 95 % interval of a share; nothing where there is none."""
    match low_high:
        case [low, high] if number(low) is not None and number(high) is not None:
            return f"{low:.1%} to {high:.1%}"
    return ""


def count(value: Any) -> str:
    """A whole number, or a large one, with its thousands apart."""
    found = number(value)
    return UNKNOWN if found is None else f"{found:,.0f}"


def milliseconds(value: Any) -> str:
    """Milliseconds, as seconds where there are many."""
    found = number(value)
    if found is None:
        return UNKNOWN
    return f"{figure(found / 1000)} s" if found >= 1000 else f"{figure(found)} ms"


def parameters(value: Any) -> str:
    """A model's size: 1.3 M, 76.7 M, 1.0 B."""
    found = number(value)
    if found is None:
        return UNKNOWN
    return f"{found / 1e9:.1f} B" if found >= 1e9 else f"{found / 1e6:.1f} M" if found >= 1e5 else count(found)


def times(ratio: float) -> str:
    """How much faster, in words."""
    return "a tie" if ratio < 1.05 else f"{figure(ratio, 2)} times"
