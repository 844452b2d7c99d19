"""Other programs that lapclip starts. None comes from the current folder, which may hold anybody's files. No torch."""

from __future__ import annotations

import os
import sys

ENDINGS = (".exe",) if sys.platform == "win32" else ("",)
"""How the file of a program is called, after its name."""


def python(*arguments: str) -> list[str]:
    """The command line of a Python process. Without `-P` it would look for modules in the current folder first, and
    a file there that is called like one of them would run."""
    return [sys.executable, "-P", *arguments]


def program(name: str) -> str | None:
    """The whole path of a program, from the folders that PATH names in full; None where there is none. A bare name
    would be looked for in the current folder too: on Windows always, elsewhere where PATH has a dot."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        for ending in ENDINGS:
            path = os.path.join(folder, name + ending)
            if os.path.isabs(folder) and os.path.isfile(path) and os.access(path, os.X_OK):
                return path
    return None
