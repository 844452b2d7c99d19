"""What is released: one version, bounds that agree, and packages that work without the clone."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import lapclip

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_version_is_the_one_of_the_changelog_and_of_the_citation() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changelog, flags=re.MULTILINE)
    cited = re.search(
        r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert newest is not None
    assert cited is not None
    assert newest[1] == cited[1] == lapclip.__version__


def test_what_several_extras_need_has_the_same_bound_in_all(project: dict[str, Any]) -> None:
    """Only what the tests install is tried at its lowest release."""
    bounds: dict[str, set[str]] = {}
    for requirement in [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]:
        bare = requirement.partition(";")[0].strip()
        name = re.split(r"[<>=\[]", bare)[0].lower().replace("_", "-")
        if name not in ("torch", "numpy"):  # torch by system; numpy also has a ceiling, for Core ML
            bounds.setdefault(name, set()).add(bare)
    assert {name: found for name, found in bounds.items() if len(found) > 1} == {}


def test_every_dependency_has_a_lower_bound_or_a_release(project: dict[str, Any]) -> None:
    every = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    assert [each for each in every if not re.search(r">=|==|numpy<", each)] == []


def test_the_platform_page_names_the_checks_there_are() -> None:
    page = (ROOT / "docs" / "platforms.md").read_text(encoding="utf-8")
    script = (ROOT / "dev" / "platform_check.py").read_text(encoding="utf-8")
    there = set(re.findall(r'^    Check\("([^"]+)"', script, flags=re.MULTILINE))
    named = {
        name
        for row in re.findall(r"^\|.*\| ([^|]+) \|$", page, flags=re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row)
    }
    assert named <= there
    assert there - named <= {
        "after training",
        "web pages",
        "compare",
    }  # of which nothing is known to differ


@pytest.mark.slow
def test_packages_work_without_the_clone(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "fresh_install.py"), "torch==2.13.0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "the wheel and the sdist work"
