"""Ctrl-C and SIGTERM at odd moments."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys
from lapclip.cli import interrupts
sys.path.insert(0, sys.argv[1])
interrupts.install()
number = getattr(signal, sys.argv[2])
if sys.argv[3] == "before":
    os.kill(os.getpid(), number)
try:
    with interrupts.in_command():
        if sys.argv[3] == "importing":
            import interrupted
        os.kill(os.getpid(), number)
except KeyboardInterrupt:
    print("told")
    sys.exit(interrupts.exit_status())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals to send to oneself")
@pytest.mark.parametrize(
    ("number", "when", "said"),
    [
        ("SIGINT", "before", ""),
        ("SIGINT", "importing", ""),
        ("SIGINT", "in", "told\n"),
        ("SIGTERM", "in", "told\n"),
    ],
)
def test_an_interrupt_is_an_exception_only_where_a_command_works(
    tmp_path: Path, number: str, when: str, said: str
) -> None:
    half = f"import os, signal\ntry:\n    os.kill(os.getpid(), signal.{number})\nexcept BaseException:\n    print('half')"
    (tmp_path / "interrupted.py").write_text(half)
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path), number, when]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (128 + getattr(signal, number), said, "")
