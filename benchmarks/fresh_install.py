"""Do the packages work where nothing else is installed? They are built, installed into a new environment, used there.

    python benchmarks/fresh_install.py [REQUIREMENT ...] [--dist FOLDER]

Requirements, such as torch==2.13.0, are installed first. --dist takes a wheel and an sdist that were built before.
Needs the package registry. Everything lies in a temporary folder, away from the sources, so that what is used is what
the packages hold: with the wheel every command below, then a short run with what the sdist builds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
SHORT = ("model.name=tiny", "data.train_pairs=64", "train.batch_size=16", "train.steps=12")
DRAW = """
from PIL import Image
for name in ("red", "green", "blue"):
    Image.new("RGB", (64, 64), name).save(f"photos/{name}.png")
"""
COMMANDS = (
    ("--help",),
    ("--version",),
    ("machine",),
    ("train", "--minutes", "0.5", "--name", "half-minute"),
    ("runs",),
    ("doctor", "half-minute"),
    ("eval", "half-minute"),
    ("report", "half-minute"),
    ("export", "half-minute", "--to", "openclip"),
    ("search", "photos", "a red cat", "--model", "half-minute"),
)


def main() -> None:
    options = parsed()
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        dist = options.dist.resolve() if options.dist else build(here)
        (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
        for package in (wheel, sdist):
            print(f"{package.name}: {package.stat().st_size / 1e6:.1f} MB", flush=True)
        python = environment(here / "venv")
        lapclip = python.with_name("lapclip" + python.suffix)
        if options.requirement:
            run(python, *PIP, "install", *options.requirement, cwd=here)
        run(python, *PIP, "install", f"{wheel}[serve]", cwd=here)
        (here / "photos").mkdir()
        run(python, "-c", DRAW, cwd=here)
        for arguments in COMMANDS:
            used(lapclip, *arguments, cwd=here)
        serve(lapclip, "half-minute", cwd=here)

        run(python, *PIP, "install", "--force-reinstall", "--no-deps", sdist, cwd=here)
        used(
            lapclip, "train", "--name", "short", *(w for s in SHORT for w in ("--set", s)), cwd=here
        )
        print("the wheel and the sdist work", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Build the packages, install them into a new environment, use them."
    )
    parser.add_argument("requirement", nargs="*", help="installed first, such as torch==2.13.0")
    parser.add_argument(
        "--dist", type=Path, help="a folder with a wheel and an sdist that were built before"
    )
    return parser.parse_args()


def build(here: Path) -> Path:
    """The sdist, and the wheel that is built from it, as those who release do."""
    builder = environment(here / "builder")
    run(builder, *PIP, "install", "build", cwd=here)
    run(builder, "-m", "build", "--outdir", here / "dist", ROOT, cwd=here)
    return here / "dist"


def environment(folder: Path) -> Path:
    """The Python of a new environment."""
    venv.create(folder, with_pip=True)
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def used(lapclip: Path, *arguments: str, cwd: Path) -> None:
    started = time.monotonic()
    run(lapclip, *arguments, cwd=cwd)
    print(f"lapclip {' '.join(arguments)}: {time.monotonic() - started:.1f} s", flush=True)


def serve(lapclip: Path, model: str, cwd: Path) -> None:
    """Start a server, ask it for a vector, and end it."""
    started = time.monotonic()
    command = [str(lapclip), "serve", model, "--json"]
    with subprocess.Popen(
        command, cwd=cwd, env=surroundings(cwd), stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline() or sys.exit("lapclip serve ended"))["url"]
            body = json.dumps({"items": [{"text": "a red cat"}]}).encode()
            request = urllib.request.Request(
                f"{url}/embed", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                found = json.load(answer)
        finally:
            server.terminate()
    print(
        f"lapclip serve {model}: {time.monotonic() - started:.1f} s, answers with {', '.join(found)}",
        flush=True,
    )


def run(*command: str | Path, cwd: Path) -> None:
    """One command; what it says is shown where it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=surroundings(cwd), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def surroundings(here: Path) -> dict[str, str]:
    """Without what this environment has, and with folders that go with the temporary one."""
    private = {
        "LAPCLIP_CACHE": str(here / "cache"),
        "LAPCLIP_DATA": str(here / "data"),
        "PYTHONUTF8": "1",
    }
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **private,
    }


if __name__ == "__main__":
    main()
