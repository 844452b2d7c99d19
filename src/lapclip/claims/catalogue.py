"""What a claim is, what is found about it, and where the claims are kept."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "cannot be measured here"
CLAIMS = Path(__file__).parent / "claims.toml"


@dataclass(frozen=True)
class Claim:
    """Something published, with its figure."""

    number: int
    claim: str
    published: str
    kind: str
    """`machine`, `accelerator`, `run` or `arithmetic`: what it takes to measure it."""


@dataclass(frozen=True)
class Finding:
    """The figure here, what it says of the claim, and why."""

    here: str | None
    verdict: str
    reason: str

    def __post_init__(self) -> None:
        assert (self.here is None) == (self.verdict == UNKNOWN), "a figure exactly where there is a verdict"


def judged(true: bool, here: str, reason: str) -> Finding:
    """A claim that was measured."""
    return Finding(here, HOLDS if true else FAILS, reason)


def unknown(reason: str) -> Finding:
    """A claim that this machine cannot measure."""
    return Finding(None, UNKNOWN, reason)


def all_claims() -> list[Claim]:
    """The published claims, by number."""
    return [Claim(**values) for values in tomllib.loads(CLAIMS.read_text(encoding="utf-8"))["claims"]]


def row(claim: Claim, finding: Finding) -> dict[str, Any]:
    """A claim with its finding, as JSON has it."""
    return {"number": claim.number, "claim": claim.claim, "published": claim.published, **asdict(finding)}
