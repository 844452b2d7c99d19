"""Our training step in two versions of the code, in turns: what a change gains on one machine, whatever else drifts.

    git worktree add /tmp/before HEAD~1
    python benchmarks/versions.py /tmp/before/src                                    # CPU rows, against src/ beside it
    python benchmarks/versions.py /tmp/before/src --device cuda --rows seed-bfloat16-256
    python benchmarks/versions.py /tmp/before/src --set compile=graph                # settings of the section train

Each version has a process of its own, both are ready before the first turn, and one rests while the other steps. Rows
and batches are those of `benchmarks/steps.py`; forms of kernels are chosen by each version for itself, unless they are
set, and are named in what is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

OWN = Path(__file__).parent.parent / "src"
CHOSEN = ("linear", "image_attention", "text_attention", "compile")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("before", type=Path, help="the folder src of another version")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--rows", nargs="*", default=[], help="parts of row names, such as seed-bfloat16"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the section train"
    )
    parser.add_argument("--steps-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps_of:
        take_steps(
            options.steps_of, options.device, dict(setting.split("=", 1) for setting in options.set)
        )
        return
    if not (options.before / "lapclip").is_dir():
        parser.error(f"there is no lapclip in {options.before}")
    names = [
        name
        for name in row_names(options.device)
        if not options.rows or any(p in name for p in options.rows)
    ]
    if not names:
        parser.error(f"no such row; there are {', '.join(row_names(options.device))}")
    for name in names:
        compare(name, options)


def row_names(device: str) -> list[str]:
    from steps import ACCELERATOR_ROWS, CPU_ROWS

    return [row.name for row in (CPU_ROWS if device == "cpu" else ACCELERATOR_ROWS)]


def compare(name: str, options: argparse.Namespace) -> None:
    """Time both versions of a row and say how it went."""
    versions = {"before": options.before, "now": OWN}
    processes = {version: start(name, source, options) for version, source in versions.items()}
    chosen = {version: json.loads(answer(process)) for version, process in processes.items()}
    times: dict[str, list[float]] = {version: [] for version in versions}
    for _ in range(options.rounds):
        for version, process in processes.items():
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            times[version].append(float(answer(process)))
    for process in processes.values():
        process.communicate()
    before, now = (statistics.median(times[version]) for version in versions)
    spreads = " and ".join(
        f"{(max(seen) - min(seen)) / statistics.median(seen):.0%}" for seen in times.values()
    )
    print(
        f"{name}, {options.device}: {before * 1e3:.2f} ms before, {now * 1e3:.2f} ms now, {before / now:.3f}x "
        f"(median of {options.rounds} in turns, spreads {spreads})",
        flush=True,
    )
    for version in versions:
        print(
            f"  {version}: {', '.join(f'{setting} {value}' for setting, value in chosen[version].items())}"
        )


def start(name: str, source: Path, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Start the tree's own copy of this file, which takes a step whenever a line comes in."""
    more = os.environ.get("PYTHONPATH", "")
    settings = ["--set", *options.set] if options.set else []
    tree = source.resolve().parent
    python = tree / ".venv" / "bin" / "python"
    return subprocess.Popen(
        [
            str(python if python.exists() else sys.executable),
            str(tree / "benchmarks" / "versions.py"),
            str(source),
            "--device",
            options.device,
            "--steps-of",
            name,
            *settings,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(source), more])},
    )


def answer(process: subprocess.Popen[str]) -> str:
    """The next line that a process says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit("A version ended early; what it said stands above.")
    return line


def take_steps(name: str, device_name: str, settings: dict[str, str]) -> None:
    """Say which forms were chosen, then take a turn for each line that comes, and say the seconds of a step."""
    from steps import ACCELERATOR_ROWS, CPU_ROWS, our_step, random_batch, sending, take_turn

    from lapclip.machine.choose_device import choose_device, default_threads, prepare_device
    from lapclip.measure.phases import Stopwatch

    device, _ = choose_device(device_name)
    prepare_device(device, default_threads())
    row = next(row for row in (*CPU_ROWS, *ACCELERATOR_ROWS) if row.name == name)
    step, off = our_step(row, device, **settings), Stopwatch(device.synchronise, on=False)
    take = sending(step, random_batch(row), off)
    for _ in range(3 if device.is_cpu else 8):
        take()()
    config = getattr(step, "step", step).config  # the old tree wraps a recorded step
    print(json.dumps({setting: getattr(config, setting) for setting in CHOSEN}), flush=True)
    for _ in sys.stdin:
        print(take_turn(take, device), flush=True)


if __name__ == "__main__":
    main()
