"""What we start is never taken from the current folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lapclip.machine import facts
from lapclip.machine.facts import output_of, program, python

SOURCE = Path(facts.__file__).parents[1]


@pytest.mark.parametrize(
    "start", [python("-m", "lapclip"), [sys.executable, "-m", "lapclip"]], ids=["ours", "typed"]
)
def test_no_file_of_the_current_folder_runs(here: Path, start: list[str]) -> None:
    (here / "plain.py").write_text("import sys; print(*sys.modules)")
    by_python = subprocess.run(
        [sys.executable, "-m", "plain"], capture_output=True, text=True
    ).stdout.split()
    others = {
        "tomli_w",
        "numpy",
        "torch",
        "cyclopts",
        "rich",
        "psutil",
        "filelock",
        "platformdirs",
        "PIL",
    }
    for name in (sys.stdlib_module_names | others) - set(by_python):
        Path(f"{name}.py").write_text(f"print({name!r}); raise SystemExit(3)")
    done = subprocess.run([*start, "runs", "--json"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, '{"runs": []}\n', "")


def test_one_place_builds_the_command_line_of_python() -> None:
    assert python("-m", "x")[:2] == [sys.executable, "-P"]
    with_executable = [
        path.name for path in SOURCE.rglob("*.py") if "sys.executable" in path.read_text("utf-8")
    ]
    assert sorted(with_executable) == [
        "facts.py",
        "suggest.py",
    ]  # which only names it in hints


def test_a_program_is_never_one_of_the_current_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "bin").mkdir()
    for folder in (here, here / "bin"):
        tool = folder / f"tool{facts.ENDINGS[0]}"
        tool.write_text("#!/bin/sh\necho hello\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([".", "", "bin"]))
    assert program("tool") is None
    assert output_of("tool") is None
    monkeypatch.setenv("PATH", os.pathsep.join([".", str(here / "bin")]))
    assert program("tool") == str(here / "bin" / f"tool{facts.ENDINGS[0]}")
    if sys.platform != "win32":
        assert output_of("tool") == "hello\n"
