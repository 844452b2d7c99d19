"""Figures as a person reads them, in reports and while watching alike. A figure that is not known is a dash."""

from __future__ import annotations

from typing import Any

from lapclip.runs.curves import number

UNKNOWN = "-"


def percent(value: Any, digits: int = 1) -> str:
    """A share, as a percentage."""
    found = number(value)
    return UNKNOWN if found is None else f"{found:.{digits}%}"


def figure(value: Any, digits: int = 3) -> str:
    """A number with a few digits that matter."""
    found = number(value)
    if found is None:
        return UNKNOWN
    if found and not 1e-4 <= abs(found) < 1e6:
        return f"{found:.{digits - 1}e}"
    return f"{found:,.0f}" if abs(found) >= 10**digits else f"{found:.{digits}g}"


def size(value: Any) -> str:
    """Bytes, as gigabytes or megabytes."""
    found = number(value)
    if found is None:
        return UNKNOWN
    return f"{found / 1e9:.{2 if found < 1e10 else 1}f} GB" if found >= 1e9 else f"{found / 1e6:.0f} MB"


def counted(count: float, name: str) -> str:
    """So many things: 1 step, 2 steps, 0.5 minutes."""
    figures = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{figures} {name}{'s' * (count != 1)}"


def duration(seconds: Any) -> str:
    """Seconds as a person says them: 4.2 s, 45 s, 4 min 12 s, 2 h 5 min, 3 d 4 h."""
    found = number(seconds)
    if found is None:
        return UNKNOWN
    if 0 < found < 9.95:
        return f"{found:.1f} s"
    minutes, rest = divmod(round(found), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    for large, name, small, other in (
        (days, "d", hours, "h"),
        (hours, "h", minutes, "min"),
        (minutes, "min", rest, "s"),
    ):
        if large:
            return f"{large} {name} {small} {other}" if small else f"{large} {name}"
    return f"{rest} s"
