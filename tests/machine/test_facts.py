"""Facts about this machine."""

from __future__ import annotations

from pathlib import Path

from lapclip.machine import facts


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def test_facts_are_there() -> None:
    found = facts.machine_facts()
    assert found["chip"]
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 2**28
