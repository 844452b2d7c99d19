"""What was found about a claim: the figure here, the verdict, and the reason."""

from __future__ import annotations

from dataclasses import dataclass

HOLDS = "holds"
FAILS = "does not hold"
UNKNOWN = "cannot be measured here"


class CannotMeasure(Exception):
    """Raised with the reason if this machine cannot measure a claim."""


@dataclass(frozen=True)
class Finding:
    """A verdict on one claim."""

    here: str | None
    """What was measured. None exactly if the verdict is `UNKNOWN`."""
    verdict: str
    reason: str


def judge(holds: bool, here: str, reason: str) -> Finding:
    """Return the finding on a claim that was measured."""
    if holds:
        return Finding(here, HOLDS, reason)
    return Finding(here, FAILS, reason)
