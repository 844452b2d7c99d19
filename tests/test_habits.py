"""The habits of the house: docs that are true, imports that point down."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages made afresh, as `make docs` makes them: in a process of its own, because help names its caller."""
    folder = tmp_path_factory.mktemp("docs")
    script = str(ROOT / "docs" / "generate.py")
    subprocess.run([sys.executable, script, str(folder)], check=True, capture_output=True)
    return folder


GENERATED = [
    "commands.md",
    "settings.md",
    "events.md",
    "doctor.md",
    "python.md",
    "glossary.md",
    "llms.txt",
]


@pytest.mark.parametrize("name", GENERATED)
def test_generated_docs_are_fresh(name: str, generated: Path) -> None:
    fresh = (generated / name).read_text(encoding="utf-8")
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == fresh, "run: make docs"


def test_no_file_needs_data_that_a_stranger_does_not_have() -> None:
    """Only .ci/run may know a folder outside of the repository. All others take it from an argument."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    folder = "shared" + "/data"
    naming = [
        name
        for name in listed.stdout.split("\0")[:-1]
        if (ROOT / name).is_file() and folder.encode() in (ROOT / name).read_bytes()
    ]
    assert naming == [".ci/run"]


def test_every_setting_has_a_meaning_in_the_docs(generated: Path) -> None:
    text = (generated / "settings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+\.\w+)` \| .+ \| (.+) \|$", text, flags=re.MULTILINE)
    assert len(rows) > 30
    assert all(meaning.strip() for _, meaning in rows)


def test_imports_point_down() -> None:
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_files_and_targets_that_the_docs_name_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for path in re.findall(r"`((?:src|tests|docs|benchmarks|dev|examples)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for target in re.findall(r"\bmake ([a-z-]+)", text):
        assert target in targets, target
