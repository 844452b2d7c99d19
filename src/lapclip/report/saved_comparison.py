"""The comparison that `lapclip compare` saves, read with care: parts that are missing or odd are left out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapclip.paths import cache_folder
from lapclip.text import count, number


@dataclass(frozen=True)
class Timed:
    """A cell of the comparison that has a time."""

    contestant: str
    """Who wins or loses: a device; where there is one only, a precision, with its threads if they vary."""
    group: str
    """The same without threads: fits and predictions are of the best."""
    device: str
    dtype: str
    parameters: float
    batch: float
    ms: float


def comparison_file() -> Path:
    """Where `lapclip compare` keeps its result."""
    return cache_folder() / "compare.json"


def read_comparison() -> tuple[dict[str, Any] | None, str | None]:
    """The saved comparison, if there is one, and a warning if it cannot be read."""
    path = comparison_file()
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:
        return None, f"{path} is not readable and is left out: {error}."
    if not isinstance(saved, dict) or not dictionaries(saved.get("cells")):
        return None, f"{path} holds no comparison and is left out. A new one: lapclip compare"
    return saved, None


def timed(saved: dict[str, Any]) -> list[Timed]:
    """The cells that ran. Devices compete; where there is one only, its precisions and thread counts do."""
    raw = [cell for cell in dictionaries(saved.get("cells")) if not cell.get("skipped")]
    alone = len({str(cell.get("device")) for cell in raw}) == 1
    threads = {str(cell.get("threads")) for cell in raw}
    found = []
    for cell in raw:
        numbers = [number(cell.get(name)) for name in ("parameters", "batch", "ms")]
        if any(value is None or value <= 0 for value in numbers):
            continue
        device, dtype = str(cell.get("device")), str(cell.get("dtype"))
        name = dtype if alone else device
        group = name
        if alone and len(threads) > 1:
            name = f"{dtype}, {count(cell.get('threads'))} thread{'' if cell.get('threads') == 1 else 's'}"
        found.append(Timed(name, group, device, dtype, *(value for value in numbers if value is not None)))
    return found


def contestants(cells: list[Timed]) -> list[str]:
    """Everyone who competes, in order."""
    return sorted({cell.contestant for cell in cells})


def fastest(cells: list[Timed]) -> dict[tuple[float, float], float]:
    """The least time at each model size and batch size."""
    best: dict[tuple[float, float], float] = {}
    for cell in cells:
        place = (cell.parameters, cell.batch)
        best[place] = min(cell.ms, best.get(place, cell.ms))
    return best


def dictionary(value: Any) -> dict[str, Any]:
    """The value if it is a dictionary."""
    return value if isinstance(value, dict) else {}


def dictionaries(value: Any) -> list[dict[str, Any]]:
    """The dictionaries of a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
