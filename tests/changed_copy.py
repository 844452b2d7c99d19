"""A copy of the package with changes, and runs that really train with it: what an addition takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import lapclip
from lapclip.runs.folder import Run

from .conftest import SMALL, set_flags


class ChangedCopy:
    """A copy of the package whose files can be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / "src" / "lapclip"
        self.touched: set[str] = set()
        shutil.copytree(Path(lapclip.__file__).parent, self.package)

    def add(self, name: str, text: str) -> None:
        """Add a file."""
        path = self.package / name
        assert not path.exists()
        path.write_text(text, encoding="utf-8")
        self.touched.add(name)

    def insert(self, name: str, before: str, text: str) -> None:
        """Insert text into a file, before a text that is there once."""
        path = self.package / name
        old = path.read_text(encoding="utf-8")
        assert old.count(before) == 1
        path.write_text(old.replace(before, text + before), encoding="utf-8")
        self.touched.add(name)

    def train(self, *settings: str) -> Run:
        """Train a small run with the changed package."""
        flags = set_flags(*SMALL, *settings)
        start = [sys.executable, "-m", "lapclip", "train", "--name", "new", *flags]
        environment = {**os.environ, "PYTHONPATH": str(self.package.parent)}
        done = subprocess.run(
            start, cwd=self.folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return Run(self.folder / "runs" / "new")
