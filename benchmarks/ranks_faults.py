"""Runs of 2 to 4 ranks under torchrun to which faults happen: are they back, and are their losses right?

    sudo .venv/bin/python benchmarks/ranks_faults.py [--runs 6] [--first 0]

Each rank is a host (`tests/hosts.py`). Four faults happen to each run, one after the other, each some seconds after the
run is back: a rank is killed, stopped for 30 s or for 150 s, the disk of the run is full for 20 s, or a link is cut for
20 s. All losses must be equal to the bit to those of as many ranks without a fault. About eight minutes a run. Linux
and root; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from peers_together import read_events, steps_of

from tests.hosts import ELASTIC, TORCHRUN, Hosts

STEPS = 1500
TIMEOUT_SECONDS = 90
FAULTS_PER_RUN = 4
PAUSE_SECONDS = 4.0
SETTLING_STEPS = 5  # may still be written after a fault
BACK_SECONDS = 120.0  # after the end of a fault
LOST_SECONDS = 600.0
DISK_BYTES = 1 << 28
PORT = 29400
KINDS = {"kill": 0.0, "stop 30 s": 30.0, "stop 150 s": 150.0, "disk full": 20.0, "link cut": 20.0}
REASON = re.compile(r"Rank \d+ on \S+ ended: .|Ended without a message, |Did not answer, ")
SETTINGS = {
    "model.name": "tiny", "data.train_pairs": 64, "data.tokenizer": "characters",
    "train.batch_size": 16, "train.steps": STEPS, "train.evaluate_every_epochs": 10_000,
    "train.checkpoint_every_seconds": 2, "train.timeout_seconds": TIMEOUT_SECONDS,
    "train.device": "cpu", "train.dtype": "float32", "train.threads": 1, "train.loader_threads": 1,
    "train.compile": "none", "train.image_attention": "fused", "train.text_attention": "fused",
    "train.linear": "torch", "work.keep_awake": "false",
}  # fmt: skip
TRAIN = ["-m", "lapclip", "train", "--name", "run"]
for setting, value in SETTINGS.items():
    TRAIN += ["--set", f"{setting}={value}"]


class Run:
    """A run on several hosts, one rank each."""

    def __init__(self, hosts: Hosts, name: str) -> None:
        self.hosts = hosts
        self.events = hosts.folder(0) / "runs" / "run" / "events.jsonl"
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", hosts.folder(0)]
        subprocess.run(mount, check=True)
        self.agents = [self._start(host, name) for host in range(hosts.count)]

    def _start(self, host: int, name: str) -> subprocess.Popen[str]:
        line = [
            sys.executable, *TORCHRUN, f"--nnodes={self.hosts.count}", "--nproc-per-node=1",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={self.hosts.address(0)}:{PORT}",
            f"--rdzv-id={name}", f"--local-addr={self.hosts.address(host)}", "--max-restarts=8",
            f"--rdzv-conf=is_host={int(host == 0)},last_call_timeout=10,keep_alive_max_attempt=12",
        ]  # fmt: skip
        with (self.hosts.folder(host) / "stderr.txt").open("w") as stderr:
            return self.hosts.start(host, [*line, *TRAIN], variables=ELASTIC, stderr=stderr)

    def close(self) -> None:
        for host in range(self.hosts.count):
            self.hosts.kill(host)
        subprocess.run(["umount", "--lazy", self.hosts.folder(0)], check=True)

    def losses(self) -> list[tuple[int, float]]:
        """Return the losses of all steps, those that were computed again among them."""
        return [(event["step"], event["loss"]) for event in steps_of(read_events(self.events))]

    def step(self) -> int:
        return max((event["step"] for event in steps_of(read_events(self.events))), default=0)

    def restarts(self) -> list[dict]:
        return [event for event in read_events(self.events) if event["type"] == "resumed"]

    def unexplained(self) -> int:
        """Return how many restarts have no reason."""
        return sum(not any(map(REASON.match, event["notes"])) for event in self.restarts())

    def is_over(self) -> bool:
        return all(agent.poll() is not None for agent in self.agents)

    def wait_for_step(self, after: int) -> float:
        """Return the seconds until a step after this one, or until the run is over or lost."""
        began = time.monotonic()
        while self.step() <= after and not self.is_over():
            if time.monotonic() - began > LOST_SECONDS:
                break
            time.sleep(0.2)
        return time.monotonic() - began

    def disturb(self, kind: str, host: int) -> None:
        """Let a fault happen to a host, and return at its end."""
        if kind == "disk full":
            filler = self.hosts.folder(0) / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            time.sleep(KINDS[kind])
            filler.unlink()
        elif kind == "link cut":
            self.hosts.take_down(host)
            time.sleep(KINDS[kind])
            self.hosts.bring_up(host)
        else:
            rank = self._rank_process(host)
            os.kill(rank, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            time.sleep(KINDS[kind])
            with suppress(ProcessLookupError):  # torchrun may have killed it meanwhile
                os.kill(rank, signal.SIGCONT)

    def _rank_process(self, host: int) -> int:
        """Return the process that trains on a host: not torchrun's agent."""
        for process in self.hosts.processes(host):
            line = Path("/proc", str(process), "cmdline").read_bytes().split(b"\0")
            if b"lapclip" in line and b"torch.distributed.run" not in line:
                return process
        raise ProcessLookupError(f"no rank on host {host}")


@contextmanager
def run_on(count: int, name: str) -> Iterator[Run]:
    """Start a run on so many hosts."""
    with Hosts(count) as hosts:
        run = Run(hosts, name)
        try:
            yield run
        finally:
            run.close()


def undisturbed(count: int) -> dict[int, float]:
    """Return the losses of a run to which nothing happens."""
    with run_on(count, "undisturbed") as run:
        run.wait_for_step(STEPS)
        return dict(run.losses())


def disturbed(number: int, count: int, losses: dict[int, float]) -> dict[str, Any]:
    """Disturb one run, and return what became of it."""
    longest, noticed, faults = 0.0, 0, 0
    with run_on(count, f"run-{number}") as run:
        run.wait_for_step(0)
        for index in range(FAULTS_PER_RUN):
            time.sleep(PAUSE_SECONDS)
            if run.is_over():
                break
            kind = list(KINDS)[(number + index) % len(KINDS)]
            restarts = len(run.restarts())
            run.disturb(kind, (number + index) % count)
            faults += 1
            seconds = run.wait_for_step(run.step() + SETTLING_STEPS)
            longest = max(longest, seconds)
            if kind == "stop 30 s":
                noticed += len(run.restarts()) - restarts
            said = f"{kind}: back after {seconds:.0f} s, {len(run.restarts())} restarts"
            print(f"  run {number}, {count} ranks, {said}", flush=True)
        run.wait_for_step(STEPS)
        wrong = [step for step, loss in run.losses() if losses.get(step) != loss]
        found = {
            "faults": faults,
            "longest_seconds": longest,
            "finished": any(event["type"] == "finished" for event in read_events(run.events)),
            "wrong_losses": len(wrong),
            "restarts": len(run.restarts()),
            "noticed_short_stops": noticed,
            "unexplained": run.unexplained(),
        }
    print(f"run {number}: {found}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    expected: dict[int, dict[int, float]] = {}
    runs = []
    for number in range(options.first, options.first + options.runs):
        count = 2 + number % 3
        if count not in expected:
            expected[count] = undisturbed(count)
        runs.append(disturbed(number, count, expected[count]))
    lost = sum(not run["finished"] for run in runs)
    wrong = sum(run["wrong_losses"] for run in runs)
    noticed = sum(run["noticed_short_stops"] for run in runs)
    longest = max(run["longest_seconds"] for run in runs)
    unexplained = sum(run["unexplained"] for run in runs)
    print(f"{len(runs)} runs: {lost} lost, {wrong} wrong losses")
    print(f"back after at most {longest:.0f} s (goal {BACK_SECONDS:.0f} s)")
    print(f"{unexplained} stops without a reason, {noticed} restarts after stops of 30 s")
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
