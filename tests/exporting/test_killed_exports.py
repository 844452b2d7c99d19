"""Exports on a full disk, and exports that are killed while they replace an older one."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import lapclip, run_on_full_disk

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows has no such limit and no such signal"
)
KILLED_BETWEEN_RENAMES = """
import os, signal, sys
from lapclip.cli import main
from lapclip.exporting import export_folder

rename = export_folder.replace

def rename_and_die(source, target):
    rename(source, target)
    os.kill(os.getpid(), signal.SIGKILL)

export_folder.replace = rename_and_die
main(sys.argv[1:])
"""


def run_killed(*arguments: str) -> None:
    """Run a command in a process that dies right after its first rename."""
    program = [sys.executable, "-c", KILLED_BETWEEN_RENAMES, *arguments]
    killed = subprocess.run(program, capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def mine(trained: Path, here: Path) -> Path:
    shutil.copytree(trained, here / "runs" / "mine")
    return here


def test_an_export_killed_between_its_renames_keeps_the_older_one(mine: Path) -> None:
    arguments = ("export", "mine", "--to", "openclip")
    assert lapclip(*arguments).returncode == 0
    folder = mine / "runs" / "mine" / "exported"
    before = files_of(folder / "openclip")
    run_killed(*arguments, "--force")
    assert not (folder / "openclip").exists()
    assert lapclip("clean", "leftovers", "--yes").returncode in (0, 2)  # leaves the only copy

    full = run_on_full_disk(50_000, *arguments, "--force")  # the next export writes nothing either
    assert full.returncode == 2, full.stderr
    assert files_of(folder / "openclip") == before
    refused = lapclip(*arguments)
    assert refused.returncode == 2
    assert "holds an earlier export" in refused.stderr
    assert lapclip(*arguments, "--force").returncode == 0
    assert [path.name for path in folder.iterdir()] == ["openclip"]


LIMITS = [*[("huggingface", limit) for limit in (100, 1_000, 10_000)], ("openclip", 100)]


@pytest.mark.parametrize(("to", "limit"), LIMITS)
def test_a_full_disk_is_one_message(to: str, limit: int, mine: Path) -> None:
    full = run_on_full_disk(limit, "export", "mine", "--to", to, "--out", "out")
    assert full.returncode == 2, full.stderr
    assert "Traceback" not in full.stderr
    assert "fault" not in full.stderr
    assert "Cannot write out" in full.stderr
    assert len([line for line in full.stderr.splitlines() if line.startswith("Try: ")]) == 1
    assert sorted(path.name for path in mine.iterdir()) == ["runs"]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "onnx-int8"])
@pytest.mark.parametrize("limit", [100, 1_000, 10_000, 100_000, 400_000])
def test_a_full_disk_is_one_message_of_onnx(to: str, limit: int, mine: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra export")
    pytest.importorskip("onnxscript", reason="needs the extra export")
    test_a_full_disk_is_one_message(to, limit, mine)
