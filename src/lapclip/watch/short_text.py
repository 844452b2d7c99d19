"""What the terminal says in little room."""

from __future__ import annotations

from typing import Any

from lapclip.runs.curves import number
from lapclip.runs.forecast import Forecast
from lapclip.runs.number_text import UNKNOWN


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
