"""Where each tower of a run ran."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def places_so_far(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where each tower ran, and from which step on: one entry, and one more for each move to another device."""
    places: list[dict[str, Any]] = []
    for event in events:
        devices = event.get("devices")
        if not isinstance(devices, dict):
            continue
        if event["type"] == "started":
            places = [{"step": 1, **devices}]
        elif event["type"] == "fell_back":
            now = {"step": event["step"] + 1, **devices}
            places = [place for place in places if place["step"] < now["step"]]  # what came later was done again
            if not places or places[-1] | {"step": 0} != now | {"step": 0}:
                places.append(now)
    return places
