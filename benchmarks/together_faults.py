"""Runs of several hosts that lose ranks, agents, hosts and links at random moments; the row faults of together.py.

Hosts run `torchrun` with a c10d rendezvous on the first of them. Whoever is killed is started again with the same line
after a while, or stays away; so is an agent that gave up by itself, as a person would type its line again. A run is
judged when it ends: by its losses and weights against those of one undisturbed process, and by its longest silence,
the time without an event of the run and without a word of lapclip on any stderr. What torch's own log says does not
count, because it does not say what is waited for.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from together_runs import (
    EXACT,
    RUN,
    TINY,
    Result,
    alone,
    every_loss,
    losses,
    run_of,
    started,
    to_end,
    train,
    weights,
    words_of,
)

from lapclip.runs.events import read_events
from tests.hosts import ELASTIC, Hosts

STEPS = 300
SETTINGS = [
    *EXACT, *TINY, "train.shards=4", f"train.steps={STEPS}", "train.checkpoint_every_seconds=1",
    "train.evaluate_every_epochs=40",
]  # fmt: skip
KINDS = ("rank", "agent", "host", "host without a word", "link")
FAULTS_A_RUN = 5
SILENCE = 120.0
"""Seconds without progress and without a word that nothing may take."""
GIVEN_UP = 300.0
"""Seconds of silence after which a run is lost."""
LONGEST = 1800.0
"""Seconds that a run may take in all."""
AGAIN = 2.0
"""Seconds after which the line of an agent that gave up is typed again."""
TORCH_LOG = re.compile(r"^\[?[IWEF]\d{4} \d\d:\d\d:\d\d|^\[rank\d+\]:\[[IWEF]")
"""How torch's own log, and torchrun's, begin a line."""


@dataclass(frozen=True)
class Fault:
    """Something that happens some steps after the run last went on, or some seconds after the fault before."""

    kind: str
    share: float
    """From 0 to 1: which of the hosts that are there."""
    steps: int | None
    """None where it does not wait for the run to go on, so that it comes while ranks start."""
    seconds: float
    away: float | None
    """Seconds until what was lost is back; None where it stays away. The first host always comes back."""

    @property
    def back(self) -> float:
        """Seconds until a link, or the first host, is back."""
        return 10.0 if self.away is None else self.away


def plan(seed: int, number: int) -> tuple[int, list[Fault]]:
    """How many hosts a run has, and its faults: the same for the same numbers."""
    chance = Random(f"together {seed} {number}")
    faults = []
    for _ in range(FAULTS_A_RUN):
        kind = chance.choice(KINDS)
        early = chance.random() < 0.25
        away = chance.uniform(5, 40) if kind == "link" else chance.uniform(0, 20)
        stays = kind not in ("rank", "link") and chance.random() < 0.25
        steps = None if early else chance.randint(3, STEPS // (2 * FAULTS_A_RUN))
        seconds = chance.uniform(0, 15) if early else chance.uniform(0, 1)
        faults.append(Fault(kind, chance.random(), steps, seconds, None if stays else away))
    return 2 + number % 2, faults


class Words:
    """What hosts say on stderr, read as it comes."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> list[str]:
        """Whole lines that are not torch's log."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._read)
            found, _, _ = file.read().rpartition(b"\n")
        if found:
            self._read += len(found) + 1
        lines = found.decode(errors="replace").splitlines()
        return [line for line in lines if line.strip() and not TORCH_LOG.match(line)]


class DisturbedRun:
    """A run on several hosts, to which faults happen until it ends."""

    def __init__(self, hosts: Hosts, number: int, faults: list[Fault]) -> None:
        self.hosts, self.number, self.faults = hosts, number, list(faults)
        self.happened: list[str] = []
        self.silence = 0.0
        self.gave_up = 0
        """How often an agent ended by itself, and its line was typed again."""
        self._agents: dict[int, subprocess.Popen[str]] = {}
        now = time.monotonic()
        self._due = dict.fromkeys(range(hosts.count), now)
        """When the line of a host is to be started."""
        self._down: dict[int, float] = {}
        """When a link that is down comes up again."""
        self._words = [Words(words_of(hosts, host)) for host in range(hosts.count)]
        self._began = self._last_sign = self._last_fault = now
        self._size = -1
        self._step = self._step_before = 0
        """The newest step, and the newest when the last fault came."""
        self.finished = False

    def to_end(self) -> None:
        """Go on until the run is finished and its processes have ended, or nothing happens any more."""
        while not self._is_over():
            now = time.monotonic()
            self._bring_back(now)
            self._look(now)
            self._follow_agents(now)
            if self.faults and not self.finished and self._is_time(self.faults[0], now):
                self._happen(self.faults.pop(0), now)
            time.sleep(0.05)

    def _is_over(self) -> bool:
        now = time.monotonic()
        if now - self._last_sign > GIVEN_UP or now - self._began > LONGEST:
            return True
        return self.finished and not self._agents

    def _bring_back(self, now: float) -> None:
        for host in [host for host, when in self._down.items() if when <= now]:
            del self._down[host]
            self.hosts.bring_up(host)
        for host in [
            host for host, when in self._due.items() if when <= now and host not in self._down
        ]:
            del self._due[host]
            if not self.finished:
                line = self.hosts.elastic_torchrun(host, train(SETTINGS), f"{RUN}-{self.number}")
                self._agents |= started(self.hosts, {host: line}, variables=ELASTIC)

    def _look(self, now: float) -> None:
        """Note signs of life."""
        path = run_of(self.hosts) / "events.jsonl"
        size = path.stat().st_size if path.exists() else -1
        said = [line for words in self._words for line in words.new()]
        if size != self._size:
            self._size = size
            found = list(read_events(path))
            self._step = max(
                (event["step"] for event in found if event["type"] == "step"), default=0
            )
            self.finished = any(event["type"] == "finished" for event in found)
        elif not said:
            self.silence = max(self.silence, now - self._last_sign)
            return
        self._last_sign = now

    def _follow_agents(self, now: float) -> None:
        for host, agent in list(self._agents.items()):
            if agent.poll() is not None:
                del self._agents[host]
                if agent.returncode and not self.finished:
                    self.gave_up += 1
                    self._due[host] = now + AGAIN

    def _is_time(self, fault: Fault, now: float) -> bool:
        if not self._step:  # before the first step there is nothing that can be lost
            return False
        if fault.steps is not None and self._step < self._step_before + fault.steps:
            return False
        return now - self._last_fault >= fault.seconds

    def _happen(self, fault: Fault, now: float) -> None:
        there = sorted(self._agents.keys() - self._down.keys())
        if not there:
            self.faults.insert(0, fault)  # nobody is there to be lost; later
            return
        host = there[int(fault.share * len(there))]
        away = fault.back if host == 0 or fault.kind == "link" else fault.away
        self._last_fault, self._step_before = now, self._step
        if fault.kind == "rank":
            killed = self._kill_rank(host)
            what = "a rank is killed" if killed else "there is no rank to be killed"
        elif fault.kind == "agent":
            self._agents.pop(host).kill()
            what = "the agent is killed"
        elif fault.kind == "link":
            self.hosts.take_down(host)
            self._down[host] = now + fault.back
            what = "the link is down"
        else:
            silently = fault.kind == "host without a word"
            self.hosts.kill(host, silently=silently)
            del self._agents[host]
            if silently:
                self._down[host] = now + (GIVEN_UP + LONGEST if away is None else away)
            what = "the host dies" + (" without a word" if silently else "")
        back = ""
        if fault.kind != "rank":
            back = ", and stays away" if away is None else f", back after {away:.0f} s"
        if fault.kind not in ("rank", "link") and away is not None:
            self._due[host] = now + away
        self.happened.append(
            f"run {self.number}, step {self._step}: {self.hosts.name(host)}, {what}{back}"
        )
        print(self.happened[-1], flush=True)

    def _kill_rank(self, host: int) -> bool:
        """Kill one process of a host that torchrun started."""
        for process in self.hosts.processes(host):
            with suppress(OSError):  # it may have ended meanwhile
                line = Path("/proc", str(process), "cmdline").read_bytes().split(b"\0")
                if b"lapclip" in line and b"torch.distributed.run" not in line:
                    os.kill(process, signal.SIGKILL)
                    return True
        return False


def disturb(faults: int, seed: int, case: int | None, keep: Path | None) -> Iterator[Result]:
    """So many faults, or all of one run again. Without any, one run is undisturbed."""
    with Hosts(1) as hosts:
        to_end(hosts, {0: alone(train(SETTINGS))})
        expected = losses(run_of(hosts)), weights(run_of(hosts))
    made = lost = differing = hanging = gave_up = 0
    longest, first = 0.0, case or 0
    number = first
    while number == first or made < faults:
        count, planned = plan(seed, number)
        planned = planned if case is not None else planned[: max(0, faults - made)]
        with Hosts(count) as hosts:
            run = DisturbedRun(hosts, number, planned)
            run.to_end()
            found = losses(run_of(hosts)), weights(run_of(hosts))
            # Also of steps that were computed again: a wrong loss that the next fault undid is wrong all the same.
            wrong = sum(expected[0].get(step) != loss for step, loss in every_loss(run_of(hosts)))
            unfinished = not run.finished or found[0].keys() != expected[0].keys()
            other = run.finished and found[1] != expected[1]
            if keep and (unfinished or wrong or other or run.silence > SILENCE):
                kept = keep / f"seed-{seed}-run-{number}"
                shutil.copytree(
                    hosts.folder(0).parent,
                    kept,
                    ignore=shutil.ignore_patterns("cache", "checkpoints"),
                )
        made += len(run.happened)
        lost, differing, hanging = (
            lost + unfinished,
            differing + wrong + other,
            hanging + (run.silence > SILENCE),
        )
        gave_up, longest = gave_up + run.gave_up, max(longest, run.silence)
        print(
            f"run {number}, {count} hosts: {len(run.happened)} faults, {'lost' if unfinished else 'finished'}, "
            f"{wrong} differing losses, weights {'OTHER' if other else 'equal' if run.finished else 'missing'}, "
            f"longest silence {run.silence:.0f} s, {run.gave_up} agents started again that gave up",
            flush=True,
        )
        number += 1
        if case is not None:
            break
        if not run.happened and unfinished:
            print("a run without a fault was lost; the others would be, too", file=sys.stderr)
            break
    said = f"{lost} lost, {differing} differing, {hanging} silent for over {SILENCE:.0f} s (longest {longest:.0f} s); "
    said += f"{gave_up} agents gave up, and their line was typed again"
    facts = {
        "runs": number - first,
        "faults": made,
        "longest_silence": longest,
        "agents_that_gave_up": gave_up,
    }
    met = not (lost or differing or hanging)
    yield Result(
        f"{made} faults in {facts['runs']} runs of 2 and 3 hosts", said, "0, 0 and 0", met, facts
    )
