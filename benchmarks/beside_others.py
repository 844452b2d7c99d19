"""Training beside other programs: how long OpenMP's threads should spin while they wait for each other.

    python benchmarks/beside_others.py [--spin default 1000 2000 5000 passive] [--rounds 3]
    python benchmarks/beside_others.py --peer         # OpenCLIP's step too (in the peers' environment, Makefile)

Each setting trains `first-run` alone, two at a time, and beside two busy Python loops; settings take turns.
Prints pairs per second of each run in the time that all runs of a load have in common, median over rounds.
`default` is torch's own (300,000 turns of libgomp's waiting loop), `passive` is OMP_WAIT_POLICY=PASSIVE, a number
is GOMP_SPINCOUNT. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BATCH = 128
FIXED = {
    "train.device": "cpu",
    "train.dtype": "float32",
    "train.linear": "torch",
    "train.image_attention": "fused",
    "train.text_attention": "fused",
    "train.compile": "none",
    "train.evaluate_every_epochs": 99,
}
LOADS = ("alone", "two runs", "two busy loops")
BUSY_LOOP = [sys.executable, "-c", "while True: pass"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--spin", nargs="+", default=["default", "500", "1000", "2000", "5000", "10000", "passive"]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--peer", action="store_true", help="OpenCLIP's training step instead of `lapclip train`"
    )
    parser.add_argument("--peer-steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer_steps:
        take_peer_steps(options.peer_steps)
        return
    rates: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if not options.peer:
            step_times(Path(folder), "warm-up", "2000", 1, options)  # draws the scenes once
        for round_number in range(options.rounds):
            for load in LOADS:
                for spin in options.spin:
                    measured = measure(
                        Path(folder),
                        f"{round_number}-{load}-{spin}".replace(" ", "-"),
                        load,
                        spin,
                        options,
                    )
                    rates.setdefault((load, spin), []).extend(measured)
                    print(
                        f"{load}, {spin}: {', '.join(f'{rate:,.0f}' for rate in measured)}",
                        file=sys.stderr,
                        flush=True,
                    )
    print_table(rates, options.spin)
    print(
        json.dumps(
            [
                {"load": load, "spin": spin, "pairs_per_second": seen}
                for (load, spin), seen in rates.items()
            ]
        )
    )


def measure(
    folder: Path, name: str, load: str, spin: str, options: argparse.Namespace
) -> list[float]:
    """Return the pairs per second of each run under a load."""
    with busy_loops(2 if load == "two busy loops" else 0):
        runs = step_times(folder, name, spin, 2 if load == "two runs" else 1, options)
    first, last = max(times[0] for times in runs), min(times[-1] for times in runs)
    rates = []
    for times in runs:
        common = [moment for moment in times if first <= moment <= last]
        rates.append(BATCH * (len(common) - 1) / (common[-1] - common[0]))
    return rates


def step_times(
    folder: Path, name: str, spin: str, count: int, options: argparse.Namespace
) -> list[list[float]]:
    """Return when each step of each of `count` simultaneous runs ended."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    if spin == "passive":
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    else:
        environment["GOMP_SPINCOUNT"] = "300000" if spin == "default" else spin
    processes = []
    for number in range(count):
        if options.peer:
            command = [sys.executable, __file__, "--peer-steps", str(options.steps)]
        else:
            command = [
                sys.executable,
                "-m",
                "lapclip",
                "train",
                "--name",
                f"{name}-{number}",
                "--json",
            ]
            for key, value in {**FIXED, "train.steps": options.steps}.items():
                command += ["--set", f"{key}={value}"]
        processes.append(
            subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"A run of {name} failed.")
    if options.peer:
        return [json.loads(output) for output in outputs]
    return [event_times(folder / "runs" / f"{name}-{number}") for number in range(count)]


def event_times(run: Path) -> list[float]:
    """Return the times of a run's steps, without the first ten, which are slower."""
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    return [event["time"] for event in events if event["type"] == "step" and event["step"] > 10]


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep `count` other processes busy."""
    processes = [subprocess.Popen(BUSY_LOOP) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def take_peer_steps(steps: int) -> None:
    """Take steps of OpenCLIP's trainer on the model of `first-run`, and print when each ended."""
    import torch
    from openclip import PeerStep
    from steps import CPU_ROWS, peers_inputs, random_batch

    from lapclip.model.clip import CLIP
    from lapclip.model.shapes import SHAPES

    row = next(row for row in CPU_ROWS if row.name == "mini-float32-128")
    device = torch.device("cpu")
    pixels, padded = peers_inputs(row, random_batch(row), device)
    step = PeerStep(CLIP(SHAPES[row.model]), "float32", device)
    times = []
    for _ in range(steps):
        step(pixels, padded).item()
        times.append(time.time())
    print(json.dumps(times[10:]))


def print_table(rates: dict[tuple[str, str], list[float]], spins: list[str]) -> None:
    """Print the median and the range of each load and setting as Markdown."""
    print(f"| load | {' | '.join(spins)} |")
    print(f"|---|{'---|' * len(spins)}")
    for load in LOADS:
        cells = []
        for spin in spins:
            seen = rates[load, spin]
            cells.append(f"{statistics.median(seen):,.0f} ({min(seen):,.0f} to {max(seen):,.0f})")
        print(f"| {load} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
