"""Ctrl-C in the first moments of a command: how often does it end quietly, with status 130?

    .venv/bin/python benchmarks/interrupted_starts.py --tries 40

Each try starts a command in an empty folder, sends SIGINT after a random time of up to 1.5 s, and looks at the exit
status and at what was said. Python itself begins in the first hundredth of a second, when nothing of ours runs yet.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

COMMANDS = {
    "train": ["train", "--set", "model.name=tiny"],
    "search": ["search", "photos", "a cat"],
    "eval": ["eval", "nope"],
    "machine": ["machine"],
    "--help": ["--help"],
}
NOISE = ("Traceback", "A fault in lapclip", "Fatal", "terminate called")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tries", type=int, default=40)
    options.add_argument("--seconds", type=float, default=1.5)
    options.add_argument("--seed", type=int, default=18)
    given = options.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell may have it ignored for what it starts with &
    chance = random.Random(given.seed)
    for name, arguments in COMMANDS.items():
        ends: collections.Counter[str] = collections.Counter()
        for _ in range(given.tries):
            seconds = chance.uniform(0, given.seconds)
            end, said = interrupted(arguments, seconds)
            ends[end] += 1
            if end not in ("over", "130, quiet", "130, a word"):
                print(f"  {name} after {seconds:.3f} s: {end}: {said.strip()[-200:]!r}")
        print(f"{name}: {dict(sorted(ends.items()))}", flush=True)


def interrupted(arguments: list[str], seconds: float) -> tuple[str, str]:
    """How a command ends that is interrupted after so many seconds, and what it says."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "photos").mkdir()
        environment = {**os.environ, "LAPCLIP_CACHE": str(Path(folder, "cache"))}
        process = subprocess.Popen(
            [sys.executable, "-m", "lapclip", *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            process.communicate(timeout=seconds)
            return "over", ""
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=120)
    how = (
        "noise"
        if any(word in said for word in NOISE)
        else "a word"
        if "Interrupted" in said
        else "quiet"
    )
    return f"{process.returncode}, {how}", said


if __name__ == "__main__":
    main()
