"""What is wrong with a run, in plain words: functions of its events, each with the evidence and a next step.

A finding needs enough evidence, and numbers that are not there find nothing. Every threshold is a named constant with
its reason beside it, in the file of its family: the run's state, gradients, learning with its data, speed.
"""

from __future__ import annotations

from lapclip.runs.findings import gradients, learning_findings, run_state, speed
from lapclip.runs.findings.checks import (
    SEVERITIES,
    Check,
    Finding,
    Surroundings,
    surroundings_of,
)
from lapclip.runs.summary import Summary
from lapclip.text import printable_lines

__all__ = [
    "CHECKS",
    "Finding",
    "Surroundings",
    "findings",
    "surroundings_of",
]

FAMILIES = (run_state, gradients, learning_findings, speed)
CHECKS: tuple[Check, ...] = tuple(check for family in FAMILIES for check in family.CHECKS)


def findings(summary: Summary, around: Surroundings = Surroundings()) -> list[Finding]:
    """Return what is wrong, the gravest first. `around` adds what events cannot tell, such as other runs at work."""
    found = []
    for check in CHECKS:
        problem = check.examine(summary, around)
        if problem:
            severity = problem.severity or check.severity
            # Evidence may repeat what an event says, which may be foreign text, such as a file's name in an error.
            evidence, step = printable_lines(problem.evidence), printable_lines(problem.next)
            found.append(Finding(check.id, severity, check.title, evidence, step))
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
