"""Two hosts of one core each: ours against OpenCLIP's model under DDP, against no exchange, and with unequal hosts.

    sudo .venv/bin/python benchmarks/peers_together.py --peers benchmarks/.venv/bin/python
    sudo .venv/bin/python benchmarks/peers_together.py --only exchange slow_host [--rounds 3] [--steps 6]

A host is a network namespace with a core of its own (`tests/hosts.py`), so the machine has to be quiet. Sides take
turns; each turn starts its processes anew and takes the mean of some steps after the first two; medians are shown.
Float32. OpenCLIP has its gathered loss, and its share of the batch is in memory. Linux and root; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where tests/ is
from lapclip.model.shapes import SHAPES
from tests.hosts import ROOT, Hosts

WARM_UP_STEPS = 2
CAPTION_TOKENS = 24  # of OpenCLIP's captions, which it pads
PATIENCE_SECONDS = 900.0
KERNELS = ("image_attention", "text_attention", "linear")
HALF_CORE = Path("/sys/fs/cgroup/cpu/lapclip-half")


@dataclass(frozen=True)
class Bench:
    """Hosts on which one model is trained in several ways."""

    hosts: Hosts
    model: str
    batch: int
    steps: int
    kernels: Sequence[str] = ()
    has_slow_host: bool = False
    """Whether the second host has half a core."""

    def train(self, batch: int, *settings: str) -> list[str]:
        """Return the arguments of a run that takes nothing but steps."""
        tokenizer = "clip" if SHAPES[self.model].vocabulary > 40_000 else "characters"
        every = [
            f"model.name={self.model}", f"data.tokenizer={tokenizer}", f"train.batch_size={batch}",
            f"data.train_pairs={3 * self.batch}", "train.device=cpu", "train.dtype=float32",
            "train.threads=1", "train.loader_threads=1", "train.compile=none", "train.steps=1000",
            "train.evaluate_every_epochs=1000000", "train.checkpoint_every_seconds=0",
            "train.checkpoint_every_epochs=0", "work.keep_awake=false", *self.kernels, *settings,
        ]  # fmt: skip
        flags = [word for setting in every for word in ("--set", setting)]
        return ["-m", "lapclip", "train", "--recipe", "seed", "--name", "run", *flags]

    def run_together(self, *settings: str) -> tuple[float, list[dict]]:
        """Return the pairs a second of a run on both hosts, and its events."""
        arguments = self.train(self.batch, *settings)
        lines = [self.hosts.torchrun(host, arguments) for host in range(2)]
        events = self._until(lines, [0])[0]
        return self._rate(events, self.batch), events

    def run_alone(self, count: int) -> float:
        """Return the pairs a second of one run, or of two that know nothing of each other and share a batch."""
        batch = self.batch // count
        lines = [[sys.executable, *self.train(batch)] for _ in range(count)]
        found = self._until(lines, range(count))
        return sum(self._rate(events, batch) for events in found)

    def run_peer(self, python: str, count: int) -> float:
        """Return the pairs a second of OpenCLIP on so many hosts."""
        out = self.hosts.folder(0) / "peer.json"
        out.unlink(missing_ok=True)
        script = [str(Path(__file__)), "--as-peer", self.model, str(self.batch), str(out)]
        script += ["--steps", str(self.steps)]
        processes = []
        for host in range(count):
            line = self.hosts.torchrun(host, script, count=count, python=python)
            processes.append(self.hosts.start(host, line, stderr=subprocess.DEVNULL))
        until = time.monotonic() + PATIENCE_SECONDS
        while not out.exists():
            if time.monotonic() > until or any(process.poll() for process in processes):
                raise SystemExit("OpenCLIP's step failed.")
            time.sleep(0.1)
        for host in range(count):
            self.hosts.kill(host)  # gloo sometimes waits forever in its own end
        return self.batch / statistics.mean(json.loads(out.read_text())[WARM_UP_STEPS:])

    def _until(self, lines: Sequence[Sequence[str]], timed: Sequence[int]) -> list[list[dict]]:
        """Run lines on hosts until the timed runs have taken enough steps. Returns the events of these."""
        paths = [self.hosts.folder(host) / "runs" / "run" / "events.jsonl" for host in timed]
        processes = []
        for host, line in enumerate(lines):
            with (self.hosts.folder(host) / "stderr.txt").open("w") as stderr:
                processes.append(self.hosts.start(host, line, stderr=stderr))
            if self.has_slow_host and host == 1:
                (HALF_CORE / "cgroup.procs").write_text(str(processes[1].pid))
        until = time.monotonic() + PATIENCE_SECONDS
        try:
            while True:
                found = [read_events(path) for path in paths]
                if min(map(len, map(steps_of, found))) >= WARM_UP_STEPS + self.steps:
                    return found
                if time.monotonic() > until or any(process.poll() for process in processes):
                    said = (self.hosts.folder(0) / "stderr.txt").read_text()[-600:]
                    raise SystemExit(f"A run has ended or stands still: {said}")
                time.sleep(0.1)
        finally:
            for host in range(len(lines)):
                self.hosts.kill(host)
                shutil.rmtree(self.hosts.folder(host) / "runs", ignore_errors=True)

    def _rate(self, events: list[dict], batch: int) -> float:
        times = [event["time"] for event in steps_of(events)][WARM_UP_STEPS - 1 :]
        return batch * self.steps / (times[self.steps] - times[0])


def read_events(path: Path) -> list[dict]:
    """Return the events in the whole lines of a file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def steps_of(events: list[dict]) -> list[dict]:
    return [event for event in events if event["type"] == "step"]


def compare(name: str, sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Time sides in turns, print the medians, and return them."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, measure in sides.items():
            rates[side].append(measure())
            print(f"  {name}, {side}: {rates[side][-1]:.2f} pairs/s", file=sys.stderr, flush=True)
    medians = {side: statistics.median(seen) for side, seen in rates.items()}
    print(f"{name}: " + ", ".join(f"{side} {rate:.2f} pairs/s" for side, rate in medians.items()))
    print(json.dumps({name: rates}), flush=True)
    return medians


@contextmanager
def bench(model: str, batch: int, options: argparse.Namespace) -> Iterator[Bench]:
    """Return hosts, with the kernels that a run alone chooses by timing."""
    with Hosts(2) as hosts:
        plain = Bench(hosts, model, batch, options.steps)
        line = [sys.executable, *plain.train(batch)]
        started = Bench(hosts, model, batch, 0)._until([line], [0])[0][0]
        chosen = started["config"]["train"]
        kernels = [f"train.{kernel}={chosen[kernel]}" for kernel in KERNELS]
        yield Bench(hosts, model, batch, options.steps, kernels)


def ddp(options: argparse.Namespace) -> None:
    """Ours against OpenCLIP, on two hosts and on one core."""
    python = str(options.peers.absolute())
    for model, batch in (("seed", 24), ("vit-b-32", 64)):
        with bench(model, batch, options) as both:
            sides = {
                "ours": lambda both=both: both.run_together()[0],
                "OpenCLIP": lambda both=both: both.run_peer(python, 2),
                "ours on one core": lambda both=both: both.run_alone(1),
                "OpenCLIP on one core": lambda both=both: both.run_peer(python, 1),
            }
            rate = compare(f"{model} {batch}", sides, options.rounds)
        ratio = rate["ours"] / rate["OpenCLIP"]
        alone = rate["ours on one core"] / rate["OpenCLIP on one core"]
        print(f"{model} {batch}: {ratio:.2f}x OpenCLIP; on one core {alone:.2f}x", flush=True)


def exchange(options: argparse.Namespace) -> None:
    """`seed` 24 on two hosts against two runs of `seed` 12 at the same time that exchange nothing."""
    with bench("seed", 24, options) as both:
        sides = {
            "nothing": lambda: both.run_alone(2),
            "float32": lambda: both.run_together()[0],
            "bfloat16": lambda: both.run_together("train.exchange=bfloat16")[0],
        }
        rate = compare("seed 24, exchange", sides, options.rounds)
    for side in ("float32", "bfloat16"):
        print(f"{side}: {rate[side] / rate['nothing']:.2f} of the pairs", flush=True)


def slow_host(options: argparse.Namespace) -> None:
    """One host has half a core (cgroups, version 1): the rows that the run suggests against equal rows."""
    HALF_CORE.mkdir(exist_ok=True)
    (HALF_CORE / "cpu.cfs_quota_us").write_text("50000")
    (HALF_CORE / "cpu.cfs_period_us").write_text("100000")
    with bench("seed", 24, options) as both:
        both = replace(both, steps=max(options.steps, 10), has_slow_host=True)
        _, events = both.run_together()
        advice = [event["advice"] for event in events if event["type"] == "ranks"][-1]
        suggested = re.search(r"train\.rows=[\d,]+", advice)
        print(f"the run says: {advice}")
        if suggested is None:
            raise SystemExit("The run suggests no other rows.")
        sides = {
            "equal rows": lambda: both.run_together()[0],
            suggested[0]: lambda: both.run_together(suggested[0])[0],
        }
        rate = compare("seed 24, half a core", sides, options.rounds)
    print(f"{suggested[0]}: {rate[suggested[0]] / rate['equal rows']:.2f}x", flush=True)


def be_peer(model: str, batch: int, out: Path, steps: int) -> None:
    """Take OpenCLIP's steps as one of the ranks of torchrun, in the peers' environment."""
    import torch
    import torch.distributed as dist
    from openclip import PeerStep, open_clip
    from torch.nn.parallel import DistributedDataParallel

    from lapclip.model.clip import CLIP

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    shape, rows = SHAPES[model], batch // count
    step = PeerStep(CLIP(shape), "float32", torch.device("cpu"))
    if count > 1:
        step.model = DistributedDataParallel(step.plain)
        step.loss = open_clip.ClipLoss(
            local_loss=True, gather_with_grad=True, rank=rank, world_size=count
        )
    pixels = torch.randn(rows, 3, shape.image_size, shape.image_size)
    tokens = torch.zeros(rows, shape.context, dtype=torch.long)
    tokens[:, :CAPTION_TOKENS] = torch.randint(1, shape.vocabulary - 2, (rows, CAPTION_TOKENS))
    tokens[:, CAPTION_TOKENS - 1] = shape.vocabulary - 1  # the end of the caption
    seconds = []
    for _ in range(WARM_UP_STEPS + steps):
        began = time.perf_counter()
        step(pixels, tokens).item()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        out.with_suffix(".part").write_text(json.dumps(seconds))
        out.with_suffix(".part").rename(out)


ROWS = {"ddp": ddp, "exchange": exchange, "slow_host": slow_host}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=ROOT / "benchmarks/.venv/bin/python")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--as-peer", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_peer:
        model, batch, out = options.as_peer
        be_peer(model, int(batch), Path(out), options.steps)
        return
    for name in options.only:
        ROWS[name](options)


if __name__ == "__main__":
    main()
