"""What the rows of together.py share: commands of lapclip on hosts, and what their runs' folders say afterwards."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where tests/ is
from lapclip.runs.events import read_events
from tests.hosts import Hosts

RUN = "run"
PLAIN = [
    "train.device=cpu", "train.threads=1", "train.loader_threads=1", "train.compile=none", "work.keep_awake=false",
]  # fmt: skip
EXACT = [
    *PLAIN, "train.dtype=float32",
    # Kernels are else chosen by timing, and runs that are compared bit for bit might get others.
    "train.image_attention=fused", "train.text_attention=fused", "train.linear=torch",
]  # fmt: skip
TINY = [
    "model.name=tiny",
    "data.train_pairs=64",
    "train.batch_size=16",
    "data.tokenizer=characters",
]
PATIENCE = 900.0
"""Seconds without anything new in a run's folder after which a row gives up."""
LONGEST = 3600.0
"""Seconds after which a row gives up on a run that it lets go to its end."""
SKIPPED = 2
"""Steps at the beginning that are not timed: they warm up."""


@dataclass(frozen=True)
class Result:
    """A line of a row."""

    what: str
    found: str
    goal: str = ""
    met: bool | None = None
    """Nothing where there is no goal, or nothing was measured."""
    facts: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        verdict = {True: ": met", False: ": MISSED", None: ""}[self.met]
        return f"{self.what}: {self.found}" + (f"; goal {self.goal}{verdict}" if self.goal else "")


class Ended(RuntimeError):
    """A command that ended before it had done what a row waits for."""


def flags(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def train(settings: Sequence[str], recipe: str = "first-run", name: str = RUN) -> list[str]:
    """What follows the name of an interpreter, or torchrun and its options."""
    return ["-m", "lapclip", "train", "--recipe", recipe, "--name", name, *flags(settings)]


def alone(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, *arguments]


def together(
    hosts: Hosts, arguments: Sequence[str], count: int | None = None, python: str = sys.executable
) -> dict[int, list[str]]:
    """The lines for the first hosts, or for all."""
    return {
        host: hosts.torchrun(host, arguments, count=count, python=python)
        for host in range(count or hosts.count)
    }


def run_of(hosts: Hosts, host: int = 0, name: str = RUN) -> Path:
    return hosts.folder(host) / "runs" / name


def started(
    hosts: Hosts, lines: Mapping[int, Sequence[str]], **options: Any
) -> dict[int, subprocess.Popen[str]]:
    """Start a line on each host. What they say on stderr goes to a file in the host's folder."""
    found = {}
    for host, line in lines.items():
        with open(words_of(hosts, host), "a", encoding="utf-8") as said:
            found[host] = hosts.start(host, line, stderr=said, **options)
    return found


def words_of(hosts: Hosts, host: int) -> Path:
    return hosts.folder(host) / "stderr.txt"


def to_end(hosts: Hosts, lines: Mapping[int, Sequence[str]]) -> None:
    """Run lines on hosts until all have ended."""
    processes = started(hosts, lines)
    try:
        for process in processes.values():
            process.wait(LONGEST)
    except subprocess.TimeoutExpired:
        raise Ended(f"no end after {LONGEST:.0f} s") from None
    for host, process in processes.items():
        if process.returncode:
            raise Ended(
                f"{hosts.name(host)} ended with {process.returncode}: {last_words(words_of(hosts, host))}"
            )


def until(
    hosts: Hosts,
    lines: Mapping[int, Sequence[str]],
    runs: Sequence[Path],
    enough: Callable[[list[dict]], bool],
) -> list[list[dict]]:
    """Run lines on hosts until the events of all these runs are enough, then end all processes there."""
    processes = started(hosts, lines)
    try:
        return [await_events(run, enough, list(processes.values())) for run in runs]
    except Ended as error:
        said = "; ".join(last_words(words_of(hosts, host)) for host in lines)
        raise Ended(f"{error}: {said}") from None
    finally:
        for host in lines:
            hosts.kill(host)


def await_events(
    run: Path, enough: Callable[[list[dict]], bool], processes: Sequence[subprocess.Popen[str]]
) -> list[dict]:
    """Wait for events of a run while its processes work."""
    size, changed = -1, time.monotonic()
    path = run / "events.jsonl"
    while time.monotonic() - changed < PATIENCE:
        ended = [process for process in processes if process.poll() is not None]
        grown = path.stat().st_size if path.exists() else -1
        if grown != size:
            size, changed = grown, time.monotonic()
            events = list(read_events(path))
            if enough(events):
                return events
        if ended:
            raise Ended(f"a process ended with {ended[0].returncode}")
        time.sleep(0.05)
    raise Ended(f"nothing new for {PATIENCE:.0f} s")


def last_words(path: Path) -> str:
    """What a program said before it ended: its last error, where torchrun has added a summary of its own."""
    said = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    errors = [
        line
        for line in said
        if re.match(r"[\w.]*(Error|Exception)\b", line) and "ChildFailedError" not in line
    ]
    return " ".join(errors[-1:] or said[-3:])[:600]


def steps_of(events: Sequence[dict]) -> list[dict]:
    return [event for event in events if event["type"] == "step"]


def seconds_a_step(events: Sequence[dict], count: int) -> float:
    """The mean of so many steps, after the first ones."""
    times = [event["time"] for event in steps_of(events)][SKIPPED - 1 :]
    return (times[count] - times[0]) / count


def losses(run: Path) -> dict[int, float]:
    """The last loss of each step: after a fault some steps are computed again."""
    return {
        event["step"]: event["loss"] for event in steps_of(list(read_events(run / "events.jsonl")))
    }


def every_loss(run: Path) -> list[tuple[int, float]]:
    """All losses that a run has written, those of steps that were computed again among them."""
    return [
        (event["step"], event["loss"])
        for event in steps_of(list(read_events(run / "events.jsonl")))
    ]


def weights(run: Path) -> str:
    """A digest of the finished model; empty where there is none."""
    path = run / "model" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def settings_of(run: Path) -> dict[str, Any]:
    return tomllib.loads((run / "run.toml").read_text(encoding="utf-8"))
