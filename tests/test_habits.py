"""The habits of the house: docs that are true, imports that point down."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["commands.md", "settings.md"])
def test_generated_docs_are_fresh(name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == generator().PAGES[name](), "run: make docs"


def test_every_setting_has_a_meaning_in_the_docs() -> None:
    rows = re.findall(r"^\| `(\w+\.\w+)` \| .+ \| (.+) \|$", generator().settings(), flags=re.MULTILINE)
    assert len(rows) > 30
    assert all(meaning.strip() for _, meaning in rows)


def test_imports_point_down() -> None:
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_files_and_targets_that_the_docs_name_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for path in re.findall(r"`((?:src|tests|docs|benchmarks|dev)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for target in re.findall(r"\bmake ([a-z-]+)", text):
        assert target in targets, target


def test_no_source_file_is_longer_than_400_lines() -> None:
    long = {
        path.name: count for path in ROOT.glob("src/**/*.py") if (count := len(path.read_text().splitlines())) > 400
    }
    assert not long
