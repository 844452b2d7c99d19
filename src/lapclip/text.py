"""Numbers, times, paths and foreign text as people read them. What is not known is a dash."""

from __future__ import annotations

import json
import math
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

UNKNOWN = "-"


def number(value: Any) -> float | None:
    """The value if it is a finite number: a run may record none, and JSON may hold NaN, or more digits than a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def percent(value: Any, digits: int = 1) -> str:
    """A share, as a percentage."""
    found = number(value)
    return UNKNOWN if found is None else f"{found:.{digits}%}"


def significant(value: Any, digits: int = 3) -> str:
    """A number with a few digits that matter."""
    found = number(value)
    if found is None:
        return UNKNOWN
    if found and not 1e-4 <= abs(found) < 1e6:
        return f"{found:.{digits - 1}e}"
    return f"{found:,.0f}" if abs(found) >= 10**digits else f"{found:.{digits}g}"


def count(value: Any) -> str:
    """A whole number, or a large one, with its thousands apart."""
    found = number(value)
    return UNKNOWN if found is None else f"{found:,.0f}"


def counted(count: float, name: str) -> str:
    """So many things: 1 step, 2 steps, 0.5 minutes."""
    digits = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{digits} {name}{'s' * (count != 1)}"


def size(value: Any) -> str:
    """Bytes, as gigabytes, megabytes or, where that would be less than one, kilobytes."""
    found = number(value)
    if found is None:
        return UNKNOWN
    if 0 < found < 1e6:
        return f"{found / 1e3:.0f} kB"
    return (
        f"{found / 1e9:.{2 if found < 1e10 else 1}f} GB"
        if found >= 1e9
        else f"{found / 1e6:.0f} MB"
    )


def gigabytes(value: int | None) -> str:
    """Bytes as gigabytes, whatever their size."""
    return "unknown" if value is None else f"{value / 1e9:.1f} GB"


def parameters(value: Any) -> str:
    """A model's size: 1.3 M, 76.7 M, 1.0 B."""
    found = number(value)
    if found is None:
        return UNKNOWN
    return (
        f"{found / 1e9:.1f} B"
        if found >= 1e9
        else f"{found / 1e6:.1f} M"
        if found >= 1e5
        else count(found)
    )


def times(ratio: float) -> str:
    """How much faster: "a tie" or "1.4 times"."""
    return "a tie" if ratio < 1.05 else f"{significant(ratio, 2)} times"


def interval(low_high: Any) -> str:
    """A 95 % interval of a share; nothing where there is none."""
    match low_high:
        case [low, high] if number(low) is not None and number(high) is not None:
            return f"{low:.1%} to {high:.1%}"
    return ""


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


def short_duration(seconds: Any) -> str:
    """Seconds in one unit, where there is little room: 45 s, 4 min, 2 h."""
    found = number(seconds)
    if found is None:
        return UNKNOWN
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if found >= 2 * unit:
            return f"{found / unit:.0f} {name}"
    return f"{found:.0f} s"


def duration_range(low: float, high: float) -> str:
    """A range of seconds, no finer than it is sure: 3 to 5 min. Nothing where both ends look alike."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if high >= 2 * unit:
            digits = 0 if high / unit >= 10 or unit == 1 else 1
            ends = f"{low / unit:.{digits}f}", f"{high / unit:.{digits}f}"
            return f"{ends[0]} to {ends[1]} {name}" if ends[0] != ends[1] else ""
    return ""


def moment(seconds: Any) -> str:
    """A time since 1970 as date, hours and minutes here."""
    found = number(seconds)
    try:
        return (
            UNKNOWN if found is None else datetime.fromtimestamp(found).strftime("%Y-%m-%d %H:%M")
        )
    except (OverflowError, OSError, ValueError):  # a clock that was set to nonsense
        return UNKNOWN


def milliseconds(value: Any) -> str:
    """Milliseconds, as seconds where there are many."""
    found = number(value)
    if found is None:
        return UNKNOWN
    return f"{significant(found / 1000)} s" if found >= 1000 else f"{significant(found)} ms"


def part_name(name: str) -> str:
    """A part of the model as a person says it: image.3 is block 4 of the image tower."""
    tower, dot, block = name.partition(".")
    if not dot or tower not in ("image", "text"):
        return name
    return f"{tower} block {int(block) + 1}" if block.isdigit() else f"{tower} {block}"


def metric_title(name: str) -> str:
    """Return the name of a metric in words: teacher_loss is "Teacher loss"."""
    return one_line(name[:40]).replace("_", " ").capitalize()


def printable(text: object) -> str:
    """Foreign text on one line, without anything that would steer a terminal: what cannot be printed is escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(text))


def without_controls(text: object) -> str:
    """Foreign text for a page, where joined emoji and wide spaces may stay: only control characters are escaped."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: printable(found[0]), str(text))


def printable_lines(text: object) -> str:
    """The same of text that may have several lines: only their ends stay as they are."""
    return "\n".join(map(printable, str(text).splitlines()))


def one_line(text: object) -> str:
    """Foreign prose, such as a caption, on one line: white space of any kind becomes one space."""
    return printable(" ".join(str(text).split()))


def to_json(values: Any, *, compact: bool = False) -> str:
    """Return valid JSON: NaN and infinity, which Python would write as such, become null.

    Arrays and numbers of numpy are written as plain ones.
    """
    separators = (",", ":") if compact else None
    try:
        return json.dumps(values, allow_nan=False, separators=separators)
    except (TypeError, ValueError):
        return json.dumps(_plain(values), allow_nan=False, separators=separators)


def _plain(values: Any) -> Any:
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, dict):
        return {key: _plain(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_plain(value) for value in values]
    if isinstance(values, float) and not math.isfinite(values):
        return None
    return values


def path_from_here(path: str | os.PathLike) -> str:
    """A path as it can be typed in the current folder."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
