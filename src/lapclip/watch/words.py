"""Figures as a person reads them at a glance. A figure that is not known is a dash."""

from __future__ import annotations

from typing import Any

from lapclip.insight.curves import number
from lapclip.insight.forecast import Forecast

UNKNOWN = "-"


def share(value: Any, digits: int = 1) -> str:
    """A share, as a percentage."""
    found = number(value)
    return UNKNOWN if found is None else f"{found:.{digits}%}"


def figure(value: Any, digits: int = 3) -> str:
    """A number with a few digits that matter."""
    found = number(value)
    if found is None:
        return UNKNOWN
    if found and not 1e-3 <= abs(found) < 1e6:
        return f"{found:.1e}"
    return f"{found:,.0f}" if abs(found) >= 10**digits else f"{found:.{digits}g}"


def size(value: Any) -> str:
    """Bytes, as gigabytes or megabytes."""
    found = number(value)
    if found is None:
        return UNKNOWN
    return f"{found / 1e9:.{2 if found < 1e10 else 1}f} GB" if found >= 1e9 else f"{found / 1e6:.0f} MB"


def duration(seconds: Any) -> str:
    """Seconds as a person says them: 45 s, 4 min 12 s, 2 h 5 min, 3 d 4 h."""
    found = number(seconds)
    if found is None:
        return UNKNOWN
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


def rough(seconds: Any) -> str:
    """The same in one unit, where there is little room."""
    found = number(seconds)
    if found is None:
        return UNKNOWN
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if found >= 2 * unit:
            return f"{found / unit:.0f} {name}"
    return f"{found:.0f} s"


def span(time_left: Forecast) -> str:
    """The range of a forecast, no finer than it is sure: 3 to 5 min. Nothing where both ends look alike."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if time_left.high >= 2 * unit:
            low, high = time_left.low / unit, time_left.high / unit
            digits = 0 if high >= 10 or unit == 1 else 1
            ends = f"{low:.{digits}f}", f"{high:.{digits}f}"
            return f"{ends[0]} to {ends[1]} {name}" if ends[0] != ends[1] else ""
    return ""


def part(name: str) -> str:
    """A part of the model as a person says it: image.3 is block 4 of the image tower."""
    tower, dot, place = name.partition(".")
    if not dot or tower not in ("image", "text"):
        return name
    return f"{tower} block {int(place) + 1}" if place.isdigit() else f"{tower} {place}"


def clean(text: Any) -> str:
    """Text from a file, on one line and without anything that would steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(str(text).split()))
