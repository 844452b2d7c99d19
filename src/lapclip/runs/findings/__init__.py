"""What is wrong with a run, in plain words: functions of its events, each with the evidence and a next step.

A finding needs enough evidence, and numbers that are not there find nothing. Every threshold is a named constant with
its reason beside it, in the file of its family: the run's state, gradients, learning with its data, speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from lapclip.runs.findings import gradients, learning_findings, run_state, speed
from lapclip.runs.findings.checks import (
    SEVERITIES,
    Check,
    Finding,
    Found,
    Surroundings,
    Verdict,
    surroundings_of,
)
from lapclip.runs.summary import Summary
from lapclip.text import printable_lines

__all__ = [
    "CHECKS",
    "Examination",
    "Finding",
    "Surroundings",
    "examine",
    "findings",
    "surroundings_of",
]

FAMILIES = (run_state, gradients, learning_findings, speed)
CHECKS: tuple[Check, ...] = tuple(check for family in FAMILIES for check in family.CHECKS)


@dataclass(frozen=True)
class Examination:
    """What was found, the gravest first, and the ids of what there was enough to check for."""

    findings: list[Finding]
    checked: list[str]


def findings(summary: Summary, around: Surroundings = Surroundings()) -> list[Finding]:
    """What is wrong, the gravest first. `around` adds what events cannot tell, such as other runs at work."""
    return examine(summary, around).findings


def examine(summary: Summary, around: Surroundings = Surroundings()) -> Examination:
    """Make every check."""
    found, checked = [], []
    for check in CHECKS:
        verdict = check.examine(summary, around)
        if verdict is not Verdict.UNKNOWN:
            checked.append(check.id)
        if isinstance(verdict, Found):
            severity = verdict.severity or check.severity
            # Evidence may repeat what an event says, which may be foreign text, such as a file's name in an error.
            evidence, step = printable_lines(verdict.evidence), printable_lines(verdict.next)
            found.append(Finding(check.id, severity, check.title, evidence, step))
    return Examination(
        sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)), checked
    )
