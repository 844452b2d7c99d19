"""Does the wheel work where nothing else is installed? It is built, installed into a new environment and used there.

    python benchmarks/fresh_install.py [REQUIREMENT ...]

Requirements, such as torch==2.13.0, are installed beside it. Needs the package registry. Everything lies in a temporary
folder, away from the sources, so that what is used is what the wheel holds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
TRAIN = (
    "--set",
    "model.name=tiny",
    "--set",
    "data.train_pairs=64",
    "--set",
    "train.batch_size=16",
    "--set",
    "train.steps=12",
)
COMMANDS = (
    ("--help",),
    ("machine",),
    ("train", "--name", "small", *TRAIN),
    ("runs",),
    ("eval", "small"),
    ("report", "small"),
    ("export", "small", "--to", "openclip"),
    ("search", "photos", "a red cat", "--model", "small"),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        run(sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", str(here / "wheel"), str(ROOT), cwd=here)
        (wheel,) = (here / "wheel").glob("*.whl")
        print(f"built {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
        venv.create(here / "venv", with_pip=True)
        programs = here / "venv" / ("Scripts" if os.name == "nt" else "bin")
        run(str(programs / "python"), *PIP, "install", *sys.argv[1:], str(wheel), cwd=here)
        (here / "photos").mkdir()
        draw = "from PIL import Image; Image.new('RGB', (64, 64), 'red').save('photos/a.png')"
        run(str(programs / "python"), "-c", draw, cwd=here)
        for arguments in COMMANDS:
            run(str(programs / "lapclip"), *arguments, cwd=here)
            print(f"lapclip {' '.join(arguments[:2])}: works", flush=True)


def run(*command: str, cwd: Path) -> None:
    """One command, without what this environment has; what it says is shown where it fails."""
    private = {"LAPCLIP_CACHE": str(cwd / "cache"), "LAPCLIP_DATA": str(cwd / "data")}
    environment = {**os.environ, **private}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
