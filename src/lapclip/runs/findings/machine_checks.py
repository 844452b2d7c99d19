"""The machine's check list as findings, for where there is no run to look at."""

from __future__ import annotations

from typing import Any

from lapclip.runs.findings.registry import Finding

GRAVE = ("python", "torch")
"""Without these nothing can train."""
STEPS = {
    "python": "a newer Python, for example with uv: uv venv --python 3.12",
    "torch": "pip install --upgrade torch",
    "memory": "close other programs, or train with less at once: lapclip train --set train.micro_batch=32",
    "disk": "free some disk space, or work in another folder",
    "power": "plug the machine in",
    "low-power mode": "switch it off in the system's settings",
    "other load": "close other programs, or wait until they are done",
    "swap": "close other programs",
    "throttling": "free the vents, raise the machine from the table, cool the room",
    "accelerator": "the build of torch for it, from pytorch.org; until then lapclip train uses the CPU",
}
CANARY_STEP = "nothing: what the accelerator gets wrong is not used; a newer torch may do better"


def computer_findings(checks: list[dict[str, Any]]) -> tuple[list[Finding], list[str]]:
    """What of the list is not well, the gravest first, and the ids of what is known. Takes `overview()["checks"]`."""
    known = [check for check in checks if check["ok"] is not None]
    found = [
        Finding(
            id=_id(check["name"]),
            severity="alarm" if check["name"] in GRAVE else "warning",
            title=f"Not ready: {check['name']}",
            evidence=check["text"],
            next=STEPS.get(check["name"], CANARY_STEP),
        )
        for check in known
        if not check["ok"]
    ]
    return sorted(found, key=lambda finding: finding.severity != "alarm"), [_id(check["name"]) for check in known]


def _id(name: str) -> str:
    return f"machine-{name.replace(' ', '-')}"
