"""Is anything lost, whatever happens to a run? Many short real runs under random faults, beside undisturbed ones.

    .venv/bin/python benchmarks/chaos.py --faults 300 --jobs 8 --out chaos.json --page docs/chaos.md
    .venv/bin/python benchmarks/chaos.py --case 17                # one case again, with all that it does
    .venv/bin/python benchmarks/chaos.py --table chaos.json --page docs/chaos.md

A case is a function of --seed and its number: which run it is, which faults come, and at which moments. What a process
has done by such a moment depends on the machine. What counts as a failure: docs/chaos.md. Linux; the kinds of fault
that another system lacks are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar

RUN, PHRASE = "mine", "a red wall"
STEPS = 120
LIMIT = 60.0
"""Seconds in which every process must do what is expected of it."""
TRIES = 8
"""Undisturbed `resume` that a run may take to be finished after its last fault."""
ALBUM, PHOTOS = 1000, 60
COMMON = [
    "train.batch_size=16", f"train.steps={STEPS}", "train.dtype=float32", "train.device=cpu", "train.threads=1",
    "train.image_attention=fused", "train.text_attention=fused", "train.linear=torch", "train.evaluate_every_epochs=10",
    "train.checkpoint_every_seconds=0.2", "work.polite=true", "work.keep_awake=false",
]  # fmt: skip
SCENES = ["model.name=tiny", "data.train_pairs=64"]
VARIANTS = {
    "scenes": SCENES,
    "sigmoid": [*SCENES, "train.loss=sigmoid", "train.micro_batch=8"],
    "photos": ["model.name=tiny", "data.source={photos}", "train.crop=0.5", "train.flip=0.5",
               "train.symbol_dropout=0.1"],
    "frozen": ["data.source={photos}", "train.start={base}", "train.image_blocks=0", "train.text_blocks=0",
               "train.views=2", "train.crop=0.7"],
}  # fmt: skip
"""The runs that are disturbed; `base` is one that is finished."""
FORMATS = ("openclip", "huggingface")
KINDS = {
    "kill": "SIGKILL",
    "terminate": "SIGTERM",
    "interrupt": "SIGINT (Ctrl-C)",
    "freeze": "SIGSTOP for seconds, then SIGCONT",
    "full-disk": "a disk that is full for a while",
    "flip": "a flipped byte in the newest checkpoint",
    "truncate": "a truncated file in the newest checkpoint",
    "rubbish": "rubbish at the end of events.jsonl",
    "clock": "a clock that jumps",
    "two-resumes": "two `resume` at once",
    "stop": "`stop` at an odd moment",
    "polite": "a polite pause",
    "polite-kill": "SIGKILL in a polite pause",
    "index-kill": "an index killed while indexing",
    "index-full-disk": "a full disk while indexing",
    "export-kill": "an export killed while writing",
    "export-full-disk": "a full disk while exporting",
}
RUN_KINDS = [kind for kind in KINDS if not kind.startswith(("index", "export"))]
BAR = ("lost", "differing", "tracebacks", "unadvised", "left_behind")
"""What a failure is called; there may be none."""
RUBBISH = [
    b'{"v":1,"type":"step","step":3,"lo',
    b"\x00" * 4096,
    b"\xff\xfe\x80 not text\n",
    b"not json\n\n\n[]\nnull\n17\n",
    b'{"type": 5}\n{"type":"step"}\n{"v":1,"type":"fell_back"}\n{"v":1,"type":"checkpoint","step":"x"}\n',
    b"[" * 100_000 + b"\n",
    b'{"v":1,"type":"evaluation","step":NaN,"evaluation":7}\n{"v":1,"type":"started","config":[]',
]  # fmt: skip
JUMPS = [-3.0, 3.0, -3600.0, 3600.0, -86_400.0, 400 * 86_400.0, -30 * 365 * 86_400.0]


@dataclass(frozen=True)
class Fault:
    """Something that happens at a moment: some seconds after the process began, or after it did some more steps."""

    kind: str
    seconds: float
    """Since the process began; after `steps`, where those count."""
    steps: int | None
    share: float
    """From 0 to 1: what else the kind needs to know, such as how long it lasts, or which byte."""


@dataclass(frozen=True)
class Plan:
    """What happens in a case."""

    number: int
    scenario: str
    """A variant of a run, or `index`, or `export`."""
    own_cache: bool
    """Whether its data is made anew, so that this can be disturbed, too."""
    faults: list[Fault]


def plan_case(seed: int, number: int, kinds: list[str]) -> Plan:
    """The case of that number."""
    chance = Random(f"chaos {seed} {number}")
    weights = {"index": 2, "export": 2} | dict.fromkeys(VARIANTS, 4)
    suitable = {
        scenario: [
            kind
            for kind in kinds
            if (kind in RUN_KINDS if scenario in VARIANTS else kind.startswith(scenario))
        ]
        for scenario in weights
    }
    open_to = [scenario for scenario in weights if suitable[scenario]]
    scenario = chance.choices(open_to, [weights[scenario] for scenario in open_to])[0]
    own = suitable[scenario]
    count = chance.randint(3, 6)
    faults = []
    for _ in range(count):
        early = chance.random() < 0.3
        faults.append(
            Fault(
                kind=chance.choice(own),
                seconds=chance.uniform(0, 4) if early else chance.uniform(0, 0.3),
                steps=None if early else chance.randint(1, 2 * STEPS // (count + 1)),
                share=chance.random(),
            )
        )
    return Plan(number, scenario, chance.random() < 0.3, faults)


@dataclass
class Outcome:
    """What a case found."""

    number: int
    scenario: str
    faults: list[str] = field(default_factory=list)
    """The kinds that were applied: a run may be finished before all of them."""
    failures: list[dict[str, str]] = field(default_factory=list)
    """Of each what it is called in the table, the kind of fault it came after, and what was seen."""
    differing: int = 0
    looks: int = 0
    seconds: float = 0.0
    log: list[str] = field(default_factory=list)


class Child:
    """A process of lapclip, in a folder, and what it says."""

    alive: ClassVar[set[Child]] = set()

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.command, self.began = command, time.monotonic()
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._said = b""
        # Read all the while: a pipe that is full would stop it. A file would fill up with the disk.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        Child.alive.add(self)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said += line

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def wait(self, seconds: float = LIMIT) -> bool:
        """Whether it ends in time."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.ended

    def finish(self) -> tuple[int, str]:
        """End it if it has not, and say how it ended and what it said."""
        if not self.ended:
            self.signal(signal.SIGCONT)
            self.process.kill()
        status = self.process.wait()
        self._reader.join(5)
        Child.alive.discard(self)
        return status, self._said.decode(errors="replace")


@dataclass(frozen=True)
class Bench:
    """What all cases share: the command, the undisturbed runs, and files to work with."""

    folder: Path
    command: list[str]

    @property
    def base(self) -> Path:
        """A finished run."""
        return self.reference("scenes") / "runs" / RUN

    @property
    def photos(self) -> Path:
        return self.folder / "photos"

    @property
    def album(self) -> Path:
        return self.folder / "album"

    def reference(self, scenario: str) -> Path:
        return self.folder / "undisturbed" / scenario

    def settings(self, variant: str) -> list[str]:
        chosen = [*VARIANTS[variant], *COMMON]
        return [
            word
            for one in chosen
            for word in ("--set", one.format(photos=self.photos, base=self.base))
        ]

    def environment(self, folder: Path, own_cache: bool = False) -> dict[str, str]:
        signals = folder / "signals"
        signals.mkdir(parents=True, exist_ok=True)
        hooks = str(Path(__file__).with_name("chaos_hooks"))
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([hooks, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "LAPCLIP_CACHE": str((folder if own_cache else self.folder) / "cache"),
            "LAPCLIP_DATA": str(folder / "data"),
            "CHAOS_SIGNALS": str(signals),
        }

    def search(self) -> list[str]:
        return ["search", str(self.album), PHRASE, "--model", str(self.base), "--device", "cpu",
                "--limit", str(2 * ALBUM), "--json"]  # fmt: skip

    def export(self, to: str, out: str = "out") -> list[str]:
        return ["export", str(self.base), "--to", to, "--out", out]

    def prepare(self, jobs: int) -> None:
        """Draw the photos and do undisturbed what is going to be disturbed."""
        draw_images(self.photos, PHOTOS, captions=True)
        draw_images(self.album, ALBUM, captions=False)
        (self.album / "broken.jpg").write_bytes(b"\xff\xd8 no image")
        self._undisturbed(
            "scenes", "train", "--name", RUN, *self.settings("scenes")
        )  # the others start from it
        work: list[Callable[[], None]] = [
            partial(self._undisturbed, variant, "train", "--name", RUN, *self.settings(variant))
            for variant in VARIANTS if variant != "scenes"
        ]  # fmt: skip
        work.append(partial(self._undisturbed, "index", *self.search()))
        work += [partial(self._undisturbed, f"export-{to}", *self.export(to)) for to in FORMATS]
        with ThreadPoolExecutor(jobs) as pool:
            for done in [pool.submit(one) for one in work]:
                done.result()

    def _undisturbed(self, scenario: str, *arguments: str) -> None:
        folder = self.reference(scenario)
        child = Child([*self.command, *arguments], folder, self.environment(folder))
        child.wait(5 * LIMIT)
        status, said = child.finish()
        if status:
            sys.exit(f"Undisturbed, {shlex.join(child.command)} ends with status {status}:\n{said}")
        (folder / "said").write_text(said, encoding="utf-8")


def draw_images(folder: Path, count: int, *, captions: bool) -> None:
    """Walls of three colours with stains, each its own."""
    import numpy as np
    from PIL import Image

    folder.mkdir()
    draw = np.random.default_rng(0)
    for at in range(count):
        name, colour = [("red", (200, 30, 30)), ("green", (30, 180, 30)), ("blue", (30, 30, 200))][
            at % 3
        ]
        stains = np.clip(draw.integers(0, 90, (6, 8, 3)) + colour, 0, 255).astype(np.uint8)
        Image.fromarray(stains).resize((480, 360)).save(folder / f"{at:04}.jpg", quality=90)
        if captions:
            words = " ".join(
                ["plain", "old", "wet", "cracked"][int(digit)] for digit in np.base_repr(at, 4)
            )
            (folder / f"{at:04}.txt").write_text(
                f"a {name} wall, {words}\n{words} {name} paint\n", encoding="utf-8"
            )


class Case:
    """One case at work in a folder of its own."""

    def __init__(self, bench: Bench, plan: Plan, folder: Path, talk: Callable[[str], None]) -> None:
        self.bench, self.plan, self.folder, self.talk = bench, plan, folder, talk
        self.run = folder / "runs" / RUN
        self.events = self.run / "events.jsonl"
        self.environment = bench.environment(folder, plan.own_cache)
        self.signals = folder / "signals"
        self.found = Outcome(plan.number, plan.scenario)
        self.began = time.monotonic()

    def work(self) -> Outcome:
        """Do what the plan says, and look at what is left of it."""
        try:
            if self.plan.scenario == "index":
                self.disturb_index()
            elif self.plan.scenario == "export":
                self.disturb_export()
            else:
                self.disturb_run()
        except Hung as hung:
            self.fail("lost", str(hung))
        self.found.seconds = time.monotonic() - self.began
        return self.found

    # -- what cases share --------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self.began:6.2f} s  {text}"
        self.found.log.append(line)
        self.talk(line)

    def fail(self, what: str, text: str) -> None:
        kind = self.found.faults[-1] if self.found.faults else ""
        failure = {"what": what, "kind": kind, "text": text}
        if (
            failure not in self.found.failures
        ):  # the same command may fail in the same way until tries are used up
            self.say(f"FAILURE, {what}: {text}")
            self.found.failures.append(failure)

    def applied(self, kind: str, detail: str = "") -> None:
        self.found.faults.append(kind)
        self.say(f"{kind} {detail}".rstrip())

    def start(self, *arguments: str) -> Child:
        self.say(f"$ lapclip {shlex.join(arguments)[:60]}")
        return Child([*self.bench.command, *arguments], self.folder, self.environment)

    def end(self, child: Child) -> tuple[int, str]:
        """Look at how a process ended, and what it said."""
        status, said = child.finish()
        tail = said.splitlines()[-20:] if status else said.splitlines()[-2:]
        self.say(f"ended with {status}" + "".join(f"\n          | {line[:200]}" for line in tail))
        crashed = status < 0 and -status not in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
        if "Fatal Python error: init_" in said:
            return (
                status,
                said,
            )  # Ctrl-C while Python itself starts, before a line of lapclip has run
        if (
            "Traceback (most recent call last)" in said
            or "A fault in lapclip" in said
            or status == 1
            or crashed
        ):
            self.fail(
                "tracebacks",
                f"{shlex.join(child.command)[-60:]} ended with {status}: {said[-300:]}",
            )
        elif (
            status > 0 and status not in (130, 143) and not re.search(r"Try: |lapclip [a-z]", said)
        ):
            self.fail(
                "unadvised", f"{shlex.join(child.command)[-60:]} ended with {status}: {said[-300:]}"
            )
        return status, said

    def must_end(self, child: Child, after: str) -> None:
        if not child.wait():
            self.end(child)
            raise Hung(
                f"{shlex.join(child.command)[-60:]} did not end within {LIMIT:g} s after {after}"
            )

    def until(self, child: Child, condition: Callable[[], bool], seconds: float = LIMIT) -> bool:
        """Wait for a condition; False where the process ends first, or it takes too long."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if condition():
                return True
            if child.ended:
                return False
            time.sleep(0.01)
        return False

    def await_moment(self, child: Child, fault: Fault, reached: Callable[[], bool]) -> bool:
        """Whether the process lived to see the moment of a fault."""
        if fault.steps is None:
            time.sleep(max(0.0, child.began + fault.seconds - time.monotonic()))
        elif self.until(child, reached):
            time.sleep(fault.seconds)
        return not child.ended

    def fill_disk(self, child: Child, fault: Fault, sizes: list[int], most: float = 2.0) -> None:
        """For a while no file may grow beyond a size: writing fails as it does on a full disk."""
        import resource

        size = sizes[int(fault.share * len(sizes))]
        seconds = 0.3 + most * (fault.share * 7 % 1)
        self.applied(fault.kind, f"beyond {size:,} bytes, for {seconds:.1f} s")
        _limit_files(child.process.pid, size)
        self.until(child, lambda: False, seconds)
        _limit_files(child.process.pid, resource.RLIM_INFINITY)

    # -- runs --------------------------------------------------------------------------------------------------------

    def disturb_run(self) -> None:
        reader = self._start_reader()
        child = self.go_on()
        try:
            for fault in self.plan.faults:
                first = self.newest_step()
                reached = partial(
                    lambda first, steps: self.newest_step() >= first + steps,
                    first,
                    fault.steps or 0,
                )
                if not self.await_moment(child, fault, reached) and self.is_finished():
                    break
                child = self.apply(fault, child)
                if child.ended:
                    self.end(child)
                    if self.is_finished():
                        break
                    child = self.go_on()
            for _ in range(TRIES):
                self.must_end(child, "the last fault")
                self.end(child)
                if self.is_finished():
                    break
                child = self.go_on()
        finally:
            child.finish()
            (self.signals / "over").touch()
            self._end_reader(reader)
        self.compare_run()

    def go_on(self) -> Child:
        """Resume, or begin where there is nothing to resume yet."""
        if (self.run / "run.toml").exists():
            return self.start("resume", RUN)
        return self.start("train", "--name", RUN, *self.bench.settings(self.plan.scenario))

    def apply(self, fault: Fault, child: Child) -> Child:
        """Do something to the process or to its files; gives the process that goes on, perhaps another."""
        match fault.kind:
            case "kill":
                self.applied(fault.kind)
                return self.kill(child)
            case "terminate" | "interrupt":
                self.applied(fault.kind)
                child.signal(signal.SIGTERM if fault.kind == "terminate" else signal.SIGINT)
                self.must_end(child, fault.kind)
            case "freeze":
                self.applied(fault.kind)
                child.signal(signal.SIGSTOP)
                time.sleep(0.5 + 2.5 * fault.share)
                child.signal(signal.SIGCONT)
            case "full-disk":
                known = self.events.stat().st_size + 200 if self.events.exists() else 20_000
                self.fill_disk(child, fault, [0, 4096, known, 100_000])
            case "flip" | "truncate":
                if self.until(child, lambda: len(self.checkpoints()) > 1):
                    child = self.kill(child)
                    if len(self.checkpoints()) > 1:
                        self.damage(fault)
            case "rubbish":
                if self.until(child, self.events.exists):
                    child = self.kill(child)
                    text = RUBBISH[int(fault.share * len(RUBBISH))]
                    self.applied(fault.kind, repr(text[:40]))
                    with open(self.events, "ab") as file:
                        file.write(text)
            case "clock":
                jump = JUMPS[int(fault.share * len(JUMPS))]
                self.applied(fault.kind, f"by {jump:g} s")
                (self.signals / "clock.new").write_text(str(jump), encoding="utf-8")
                os.replace(self.signals / "clock.new", self.signals / "clock")
            case "two-resumes":
                return self.resume_twice(self.kill(child))
            case "stop":
                self.applied(fault.kind)
                stop = self.start("stop", RUN)
                self.must_end(stop, fault.kind)
                if self.end(stop)[0] == 0:
                    self.must_end(child, fault.kind)
            case "polite" | "polite-kill":
                self.pause(fault, child)
        return child

    def kill(self, child: Child) -> Child:
        child.process.kill()
        child.wait()
        return child

    def damage(self, fault: Fault) -> None:
        newest = self.checkpoints()[-1]
        files = sorted(path for path in newest.iterdir() if path.stat().st_size)
        file = files[int(fault.share * len(files))]
        content = bytearray(file.read_bytes())
        at = int(fault.share * 997 % 1 * len(content))
        self.applied(fault.kind, f"byte {at:,} of {newest.name}/{file.name}")
        content[at] ^= 1 << int(fault.share * 31 % 8)
        file.write_bytes(content if fault.kind == "flip" else content[:at])

    def resume_twice(self, killed: Child) -> Child:
        self.end(killed)
        self.applied("two-resumes")
        both = [self.go_on(), self.go_on()]
        if not self.until(both[0], lambda: both[1].ended, LIMIT) and not both[0].ended:
            for child in both:
                self.end(child)
            raise Hung("two processes work on one run")
        loser, winner = both if both[0].ended else reversed(both)
        self.end(loser)
        return winner

    def pause(self, fault: Fault, child: Child) -> None:
        before = self.count_events("paused")
        (self.signals / "hot").touch()
        if self.until(child, lambda: self.count_events("paused") > before, 10):
            self.applied(fault.kind)
            time.sleep(fault.share)
            if fault.kind == "polite-kill":
                self.kill(child)
        (self.signals / "hot").unlink()

    def checkpoints(self) -> list[Path]:
        return sorted((self.run / "checkpoints").glob("step-*"))

    def newest_step(self) -> int:
        """As the end of the events says, whatever else is there."""
        with suppress(OSError), open(self.events, "rb") as file:
            file.seek(max(0, self.events.stat().st_size - 8192))
            return max(
                [0, *map(int, re.findall(rb'"type":"step","time":[^,]*,"step":(\d+)', file.read()))]
            )
        return 0

    def count_events(self, kind: str) -> int:
        with suppress(OSError):
            return self.events.read_bytes().count(b'"type":"%s"' % kind.encode())
        return 0

    def is_finished(self) -> bool:
        return any(event["type"] == "finished" for event in read_events(self.events))

    def compare_run(self) -> None:
        """Every loss, the final metrics and the best model must be those of the undisturbed run."""
        reference = self.bench.reference(self.plan.scenario) / "runs" / RUN
        want, got = list(read_events(reference / "events.jsonl")), list(read_events(self.events))
        losses = {event["step"]: event["loss"] for event in want if event["type"] == "step"}
        found: dict[int, float] = {}
        wrong = set()
        for event in got:
            if event["type"] == "step" and "loss" in event:
                found[event["step"]] = event["loss"]
                wrong |= {event["step"]} if event["loss"] != losses.get(event["step"]) else set()
        if set(found) != set(losses) or not self.is_finished():
            missing = sorted(set(losses) - set(found))
            self.fail(
                "lost", f"not finished, or steps are missing: {len(missing)}, from {missing[:1]}"
            )
            return
        if wrong:
            self.found.differing += len(wrong)
            self.fail("differing", f"{len(wrong)} losses differ, the first at step {min(wrong)}")
        ends = [
            next(event for event in reversed(every) if event["type"] == "finished")
            for every in (want, got)
        ]
        if ends[0]["evaluation"] != ends[1]["evaluation"] or ends[0]["step"] != ends[1]["step"]:
            self.found.differing += 1
            self.fail(
                "differing",
                f"the final metrics differ: {ends[0]['evaluation']} and {ends[1]['evaluation']}",
            )
        for weights in (reference / "model").glob("*.safetensors"):
            if digest(weights) != digest(self.run / "model" / weights.name):
                self.found.differing += 1
                self.fail("differing", f"the weights of the best model differ: {weights.name}")
        if "Traceback" in (self.run / "log.txt").read_text(encoding="utf-8", errors="replace"):
            self.fail("tracebacks", "in log.txt")

    def _start_reader(self) -> Child:
        return Child(
            [sys.executable, str(Path(__file__).resolve()), "--reader"],
            self.folder,
            self.environment,
        )

    def _end_reader(self, reader: Child) -> None:
        if not reader.wait():
            self.fail("lost", "the reader that followed hangs")
        status, said = reader.finish()
        try:
            self.found.looks = json.loads(said.strip().splitlines()[-1])["looks"]
        except (ValueError, LookupError):
            self.fail("tracebacks", f"the reader that followed ended with {status}: {said[-600:]}")

    # -- indexes and exports -----------------------------------------------------------------------------------------

    def disturb_index(self) -> None:
        data = self.folder / "data"
        for fault in self.plan.faults:
            child = self.start(*self.bench.search())
            late = (
                replace(fault, seconds=10 * fault.seconds) if fault.steps else fault
            )  # indexing takes seconds
            if self.await_moment(child, late, lambda: any(data.rglob("pictures.db"))):
                self.disturb_writer(child, fault)
            self.must_end(child, fault.kind)
            self.end(child)
        child = self.start(*self.bench.search())
        self.must_end(child, "the last fault")
        status, said = self.end(child)
        want = index_content((self.bench.reference("index") / "said").read_text(encoding="utf-8"))
        if status or index_content(said) != want:
            self.fail(
                "lost" if status else "differing",
                "the index is not that which was made undisturbed",
            )
            self.found.differing += not status

    def disturb_export(self) -> None:
        to = FORMATS[self.plan.number % len(FORMATS)]
        for fault in self.plan.faults:
            child = self.start(*self.bench.export(to), "--force")
            if self.await_moment(child, fault, lambda: any(self.folder.glob(".out*"))):
                self.disturb_writer(child, fault)
            self.must_end(child, fault.kind)
            self.end(child)
            if (self.folder / "out").exists():
                self.compare_export(to)
        child = self.start(*self.bench.export(to), "--force")
        self.must_end(child, "the last fault")
        if self.end(child)[0]:
            self.fail("lost", "the export cannot be made again")
            return
        self.compare_export(to)
        if left := [path.name for path in self.folder.glob(".out*")]:
            self.fail("left_behind", f"half an export: {', '.join(left)}")

    def disturb_writer(self, child: Child, fault: Fault) -> None:
        if fault.kind.endswith("full-disk"):
            self.fill_disk(child, fault, [0, 4096, 50_000], most=6.0)
            return
        number = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT][
            int(4 * fault.share)
        ]
        self.applied(fault.kind, number.name)
        child.signal(number)

    def compare_export(self, to: str) -> None:
        """Every file must be that of the undisturbed export, but for those that say how fast it was."""
        want, got = ({path.relative_to(folder): digest(path) for path in folder.rglob("*") if path.is_file()}
                     for folder in (self.bench.reference(f"export-{to}") / "out", self.folder / "out"))  # fmt: skip
        timed = {Path("README.md"), Path("lapclip.json")}
        if set(want) != set(got) or any(
            want[name] != got[name] for name in want if name not in timed
        ):
            self.found.differing += 1
            self.fail(
                "differing",
                f"the export is not that which was made undisturbed: {sorted(map(str, got))}",
            )


class Hung(Exception):
    """A process did not do in time what it had to."""


def _limit_files(process: int, size: int) -> None:
    import resource

    with suppress(ProcessLookupError):
        _, most = resource.prlimit(process, resource.RLIMIT_FSIZE)
        resource.prlimit(process, resource.RLIMIT_FSIZE, (size, most))


def index_content(said: str) -> tuple[Any, ...]:
    """Each image with its score, the whole numbers of the index, and what could not be read."""
    try:
        found = json.loads(said.strip().splitlines()[-1])
        every = sorted((Path(one["path"]).name, one["score"]) for one in found["results"])
        return every, found["indexed"], [one["path"] for one in found["unreadable"]]
    except (ValueError, LookupError):
        return ()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a run, whatever else stands between them. Not lapclip's own reader, which is what is tested."""
    with suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("type"), str):
                    yield event


def follow() -> None:
    """The reader: looks at a run all the while, as `lapclip watch` and its page do, until it is told to end."""
    from lapclip.runs.folder import all_runs
    from lapclip.watch.terminal import WatchedRuns

    over, looks = Path(os.environ["CHAOS_SIGNALS"]) / "over", 0
    watching = WatchedRuns([RUN])
    while True:
        last = over.exists()
        watching.refresh()
        for view in watching.views:
            json.dumps(view.to_dict(lambda view: []))
            failed = [finding for finding in view.findings if finding.id == "checks"]
            assert not failed, failed  # a check that raised is caught there
        looks += bool([run.state for run in all_runs()])
        if last:
            break
        time.sleep(0.2)
    print(json.dumps({"looks": looks, "state": watching.runs[0].state}))


def table(result: dict[str, Any]) -> str:
    """What was found by kind of fault, as Markdown."""
    lines = [
        "| fault | faults | runs | lost | differing | tracebacks | refusals without advice | left behind |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, row in [*result["kinds"].items(), ("all", result["all"])]:
        name = KINDS.get(kind, f"**{kind}**")
        counts = (row[name] for name in ("faults", "runs", *BAR))
        lines.append(f"| {name} | {' | '.join(f'{count:,}' for count in counts)} |")
    how = result["how"]
    return "\n".join(
        [
            *lines,
            "",
            f"Seed {how['seed']}, {how['jobs']} at once, in {how['seconds'] / 60:.0f} min, on {how['machine']}; "
            f"a reader looked at the runs {result['looks']:,} times.",
        ]
    )


def write_page(page: Path, result: dict[str, Any]) -> None:
    """Put the table into a page, between its marks."""
    begin, end = "<!-- the table -->", "<!-- the end of the table -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        sys.exit(f"{page} has no {begin} and {end}.")
    page.write_text(
        f"{before}{begin}\n{table(result)}\n{end}{after}", encoding="utf-8", newline="\n"
    )


def sum_up(found: list[Outcome], options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Counts by kind of fault. What is lost or differs counts for each kind that the run met, since any may have been
    the cause; what was said counts for the last one before it."""
    rows: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    every: Counter[str] = Counter(runs=len(found))
    for case in found:
        every["faults"] += len(case.faults)
        every["differing"] += case.differing
        for kind in case.faults:
            rows[kind]["faults"] += 1
        for kind in set(case.faults):
            rows[kind]["runs"] += 1
            rows[kind]["differing"] += case.differing
        for failure in case.failures:
            what = failure["what"]
            every[what] += what != "differing"
            for kind in set(case.faults) if what == "lost" else {failure["kind"]} & set(KINDS):
                rows[kind][what] += what != "differing"
    import importlib.metadata

    names = ("faults", "runs", *BAR)
    return {
        "how": {
            "seed": options.seed,
            "jobs": options.jobs,
            "seconds": seconds,
            "machine": f"{platform.system()} with {os.cpu_count()} cores, Python {platform.python_version()}, "
            f"torch {importlib.metadata.version('torch')}",
        },
        "kinds": {
            kind: {name: row[name] for name in names} for kind, row in rows.items() if row["faults"]
        },
        "all": {name: every[name] for name in names},
        "looks": sum(case.looks for case in found),
        "failures": [
            asdict(case) | {"repeat": repeat(case, options)} for case in found if case.failures
        ],
    }


def repeat(case: Outcome, options: argparse.Namespace) -> str:
    return f"{shlex.join([sys.executable, sys.argv[0]])} --seed {options.seed} --case {case.number}"


def run_cases(bench: Bench, options: argparse.Namespace) -> list[Outcome]:
    """Cases, some at once, until there were as many faults as are wanted."""
    kinds = [
        kind
        for kind in options.kinds
        if hasattr(signal, "SIGSTOP") or kind not in ("freeze", "stop")
    ]
    if not sys.platform.startswith("linux"):  # only there the limits of another process can be set
        kinds = [kind for kind in kinds if "full-disk" not in kind]
    numbers = iter([options.case] if options.case is not None else range(options.first, 10**9))
    talk = print if options.case is not None else lambda _: None
    found: list[Outcome] = []

    def work(number: int) -> Outcome:
        folder = bench.folder / f"case-{number}"
        return Case(bench, plan_case(options.seed, number, kinds), folder, talk).work()

    faults = failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        pending = set()
        while True:
            # Those at work bring about four faults each, so that not many more begin than are needed.
            while len(pending) < options.jobs and faults + 3 * len(pending) < options.faults:
                if (number := next(numbers, None)) is None:
                    break
                pending.add(pool.submit(work, number))
            if not pending:
                return found
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for one in done:
                case = one.result()
                found.append(case)
                faults += len(case.faults)
                failed += bool(case.failures)
                end = (
                    f"FAILED ({', '.join(failure['what'] for failure in case.failures)})"
                    if case.failures
                    else "good"
                )
                print(
                    f"case {case.number}, {case.scenario}: {', '.join(case.faults) or 'no fault'}; {end}, "
                    f"{case.seconds:.0f} s. {faults} of {options.faults} faults, {failed} failed",
                    flush=True,
                )
                if not case.failures and options.keep is None:
                    shutil.rmtree(bench.folder / f"case-{case.number}", ignore_errors=True)


def main() -> None:
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # in a shell's background; what is started would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="cases at once"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="this one alone, with all that it does")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="only these"
    )
    parser.add_argument(
        "--command",
        default=shlex.join([sys.executable, "-m", "lapclip"]),
        help="how lapclip starts",
    )
    parser.add_argument("--out", type=Path, help="write what was found, as JSON")
    parser.add_argument("--page", type=Path, help="put the table into this page")
    parser.add_argument("--table", type=Path, help="run nothing; read what --out wrote")
    parser.add_argument("--keep", type=Path, help="work in this folder, and leave it")
    parser.add_argument("--reader", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        follow()
        return
    if options.table:
        result = json.loads(options.table.read_text(encoding="utf-8"))
    else:
        began = time.monotonic()
        folder = options.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
        folder.mkdir(exist_ok=True)
        bench = Bench(folder.resolve(), shlex.split(options.command))
        try:
            bench.prepare(options.jobs)
            print(
                f"undisturbed runs, an index and exports: {time.monotonic() - began:.0f} s",
                flush=True,
            )
            found = run_cases(bench, options)
        finally:
            for child in list(Child.alive):
                child.finish()
            if options.keep is None:
                shutil.rmtree(folder, ignore_errors=True)
        result = sum_up(
            sorted(found, key=lambda case: case.number), options, time.monotonic() - began
        )
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.page:
        write_page(options.page, result)
    for case in result["failures"]:
        print(f"\ncase {case['number']}, {case['scenario']}; again: {case['repeat']}")
        for failure in case["failures"]:
            print(f"  {failure['what']} after {failure['kind']}: {failure['text']}")
        print("\n".join(f"    {line}" for line in case["log"][-25:]))
    print(f"\n{table(result)}")
    sys.exit(any(result["all"][name] for name in BAR))


if __name__ == "__main__":
    main()
