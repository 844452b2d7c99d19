"""Several computers against one: is the result the same, how much faster is it, and what happens when one is lost?

    sudo .venv/bin/python benchmarks/together.py                            # every row, each with its goal: some hours
    sudo .venv/bin/python benchmarks/together.py equal resume --quick       # some, only to see that they work
    sudo .venv/bin/python benchmarks/together.py ddp --peers benchmarks/.venv/bin/python
    sudo .venv/bin/python benchmarks/together.py faults --faults 50 --seed 0 --keep failed/
    .venv/bin/python benchmarks/together.py one_rank --device cuda          # no root needed
    .venv/bin/python benchmarks/together.py --list

A host is a network namespace with a core of its own (`tests/hosts.py`), so the machine has to be quiet, and has to have
as many cores as hosts are compared. Sides are measured in turns; each round starts its processes anew, and takes the
mean of some steps from events.jsonl, without the first two; medians of the rounds are shown. Linux; all rows but
one_rank need root and iproute2. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from together_faults import disturb
from together_runs import (
    EXACT,
    PLAIN,
    SKIPPED,
    TINY,
    Ended,
    Result,
    alone,
    await_events,
    losses,
    run_of,
    seconds_a_step,
    settings_of,
    started,
    steps_of,
    to_end,
    together,
    train,
    until,
    weights,
)

from lapclip.data.tokenizers import clip_tokenizer
from lapclip.embedder import Embedder
from lapclip.machine.choose_device import choose_device
from lapclip.machine.facts import source_commit
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.runs.events import read_events
from lapclip.training.checkpoint import save_model
from tests.hosts import ROOT, TORCHRUN, Hosts, missing

Row = Callable[[argparse.Namespace], Iterator[Result]]
ROWS: dict[str, Row] = {}
CAPTION_TOKENS = 24
"""Of the peer's captions. It pads them, so their length changes nothing."""
CHOSEN_KERNELS = ("image_attention", "text_attention", "linear")
LINKS = {"10 Gbit/s": 10e9, "1 Gbit/s": 1e9, "100 Mbit/s": 100e6}
STOPS = 3
"""How often the row resume changes the number of ranks."""


def row(function: Row) -> Row:
    ROWS[function.__name__] = function
    return function


@dataclass(frozen=True)
class Case:
    """A model that is trained, and how much faster two hosts are to be than one."""

    model: str
    batch: int
    goal: float | None
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.model} at {self.batch}, {self.dtype}"

    def settings(self, shards: int) -> list[str]:
        tokenizer = "clip" if SHAPES[self.model].vocabulary > 40_000 else "characters"
        return [
            *PLAIN, f"model.name={self.model}", f"data.tokenizer={tokenizer}", f"train.batch_size={self.batch}",
            f"train.dtype={self.dtype}", f"train.shards={shards}", f"data.train_pairs={max(96, 3 * self.batch)}",
            # Nothing but steps: a run is ended when it has taken enough of them.
            "train.steps=1000", "train.evaluate_every_epochs=1000000", "train.checkpoint_every_seconds=0",
            "train.checkpoint_every_epochs=0",
        ]  # fmt: skip


SPEED = [Case("seed", 24, 1.8), Case("vit-b-32", 64, 1.8), Case("vit-b-32", 32, 1.7)]
QUICK = [Case("tiny", 16, None)]


def cases(wanted: argparse.Namespace) -> list[Case]:
    """The models of the rows that time steps. The goals are those of float32."""
    chosen = QUICK if wanted.quick else SPEED
    named = [case for case in chosen if not wanted.models or case.model in wanted.models]
    return [
        case if dtype == "float32" else replace(case, dtype=dtype, goal=None)
        for case in named
        for dtype in wanted.dtypes
    ]


# The same result


@row
def equal(wanted: argparse.Namespace) -> Iterator[Result]:
    """Losses and final weights of 1, 2 and 4 ranks, to the last bit."""
    steps = 6 if wanted.quick else 24
    same = [*EXACT, "train.shards=4", f"train.steps={steps}"]
    runs = {
        "tiny": (
            "first-run",
            [*same, "model.name=tiny", "data.train_pairs=512", "train.batch_size=64"],
        ),
        "heads": ("heads", [*same, "data.train_pairs=96", "train.batch_size=32"]),
    }
    for name, (recipe, settings) in runs.items():
        if name == "heads" and importlib.util.find_spec("efficientnet_lite_pytorch") is None:
            yield Result(name, "not measured: needs the extra small-towers")
            continue
        found: dict[int, tuple[dict[int, float], str]] = {}
        for count in (1, 2, 4):
            with Hosts(count) as hosts:
                arguments = train(settings, recipe)
                to_end(hosts, {0: alone(arguments)} if count == 1 else together(hosts, arguments))
                found[count] = losses(run_of(hosts)), weights(run_of(hosts))
        identical = all(other == found[1] for other in found.values()) and len(found[1][0]) == steps
        apart = {
            count: max(
                abs(mine.get(step, float("inf")) - loss) for step, loss in found[1][0].items()
            )
            for count, (mine, _) in found.items()
        }
        said = ", ".join(
            f"{count} ranks: losses {f'apart by {apart[count]:.1e}' if apart[count] else 'equal'}, "
            f"weights {'equal' if digest == found[1][1] else 'OTHER'}"
            for count, (_, digest) in found.items()
            if count > 1
        )
        facts = {"apart": apart, "weights": {count: digest for count, (_, digest) in found.items()}}
        yield Result(
            f"{name}, {steps} steps, float32, 4 shards",
            said,
            "identical to one process",
            identical,
            facts,
        )


@row
def resume(wanted: argparse.Namespace) -> Iterator[Result]:
    """A run that goes on with 1, then 2, then 4, then 1 ranks."""
    steps, counts = (120 if wanted.quick else 400), (1, 2, 4, 1)
    settings = [
        *EXACT,
        *TINY,
        "train.shards=4",
        f"train.steps={steps}",
        "train.evaluate_every_epochs=1000",
    ]
    with Hosts(max(counts)) as hosts:
        to_end(hosts, {0: alone(train(settings, name="undisturbed"))})
        reached = []
        for at, count in enumerate(counts):
            arguments = ["-m", "lapclip", "resume", "run"] if at else train(settings)
            lines = {0: alone(arguments)} if count == 1 else together(hosts, arguments, count)
            last = at == len(counts) - 1
            if last:
                to_end(hosts, lines)
            else:
                stop_at(hosts, lines, (at + 1) * steps // len(counts))
            reached.append(max(losses(run_of(hosts))))
        mine, theirs = run_of(hosts), run_of(hosts, name="undisturbed")
        same = losses(mine) == losses(theirs) and weights(mine) == weights(theirs)
        resumed = sum(event["type"] == "resumed" for event in read_events(mine / "events.jsonl"))
    met = same and resumed == STOPS
    said = ", ".join(f"{count} to step {step}" for count, step in zip(counts, reached, strict=True))
    yield Result(
        f"tiny, ranks {said}",
        f"losses and weights {'are' if same else 'ARE NOT'} those of one",
        "those of one rank throughout",
        met,
        {"reached": reached, "resumed": resumed},
    )


def stop_at(hosts: Hosts, lines: dict[int, list[str]], step: int) -> None:
    """Run lines until a step is taken, then ask the run to stop and wait for its end."""
    processes = started(hosts, lines)
    await_events(
        run_of(hosts),
        lambda events: any(event["step"] >= step for event in steps_of(events)),
        list(processes.values()),
    )
    hosts.start(0, alone(["-m", "lapclip", "stop", "run"])).wait(300)
    for process in processes.values():
        process.wait(300)


# Speed


@row
def speed(wanted: argparse.Namespace) -> Iterator[Result]:
    """Two hosts of one core against one core, beside two copies at once, which is the most there can be."""
    for case in cases(wanted):
        with Hosts(2) as hosts:
            kernels = chosen_kernels(hosts, case)
            sides = {"alone": alone_on([0]), "copies": alone_on([0, 1])}
            sides |= {
                f"{shards} shards": shared_by_both(shards)
                for shards in dict.fromkeys([wanted.shards, *wanted.also])
            }
            found = in_turns(hosts, case, kernels, sides, wanted)
        rate = {name: statistics.median(each) for name, each in found.items()}
        for name in list(sides)[1:]:
            ratio = rate[name] / rate["alone"]
            what = {"copies": "two copies at once, the ceiling", "0 shards": "train.shards=0"}.get(
                name, name
            )
            said = f"{ratio:.2f}x: {rate[name]:.2f} against {rate['alone']:.2f} pairs a second"
            spread = (max(found[name]) - min(found[name])) / rate[name]
            goal = case.goal if name == f"{wanted.shards} shards" else None
            facts = {"pairs_a_second": found, "kernels": kernels}
            said += f" (median of {wanted.rounds}, spread {spread:.0%})"
            yield judged(f"{case.name}, {what}", said, ratio, goal, facts)


Side = Callable[[Hosts, Case, list[str]], tuple[dict[int, list[str]], list[int]]]
"""The lines for hosts, and the hosts whose runs are timed."""


def alone_on(chosen: list[int]) -> Side:
    """One process on each of these hosts, which know nothing of each other."""

    def lines(
        hosts: Hosts, case: Case, kernels: list[str]
    ) -> tuple[dict[int, list[str]], list[int]]:
        return {
            host: alone(train([*case.settings(1), *kernels], "seed")) for host in chosen
        }, chosen

    return lines


def shared_by_both(shards: int) -> Side:
    def lines(
        hosts: Hosts, case: Case, kernels: list[str]
    ) -> tuple[dict[int, list[str]], list[int]]:
        return together(hosts, train([*case.settings(shards), *kernels], "seed")), [0]

    return lines


def in_turns(
    hosts: Hosts, case: Case, kernels: list[str], sides: dict[str, Side], wanted: argparse.Namespace
) -> dict[str, list[float]]:
    """Pairs a second of each side, round by round."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(wanted.rounds):
        for name, side in sides.items():
            found[name].append(
                pairs_a_second(hosts, case, *side(hosts, case, kernels), wanted.steps)
            )
            print(
                f"  {case.name}, {name}: {found[name][-1]:.2f} pairs a second",
                file=sys.stderr,
                flush=True,
            )
    return found


def pairs_a_second(
    hosts: Hosts, case: Case, lines: dict[int, list[str]], timed: list[int], steps: int
) -> float:
    runs = [run_of(hosts, host) for host in timed]
    found = until(hosts, lines, runs, lambda events: len(steps_of(events)) >= SKIPPED + steps)
    for run in runs:
        shutil.rmtree(run)
    return sum(case.batch / seconds_a_step(events, steps) for events in found)


def chosen_kernels(hosts: Hosts, case: Case) -> list[str]:
    """What a run alone chooses by timing, for all sides."""
    run = run_of(hosts)
    until(hosts, {0: alone(train(case.settings(1), "seed"))}, [run], lambda events: bool(events))
    chosen = settings_of(run)["train"]
    shutil.rmtree(run)
    return [f"train.{name}={chosen[name]}" for name in CHOSEN_KERNELS]


@row
def ddp(wanted: argparse.Namespace) -> Iterator[Result]:
    """The same two hosts with OpenCLIP's model in DDP and its gathered loss."""
    python = peers_python(wanted.peers)
    if python is None:
        yield Result(
            "OpenCLIP", "not measured: it is not installed; make bench-peers, or --peers PYTHON"
        )
        return
    for case in cases(wanted):
        with Hosts(2) as hosts:
            kernels = chosen_kernels(hosts, case)
            found: dict[str, list[float]] = {"ours": [], "peer": []}
            name = ""
            for _ in range(wanted.rounds):
                lines = shared_by_both(wanted.shards)(hosts, case, kernels)
                found["ours"].append(pairs_a_second(hosts, case, *lines, wanted.steps))
                name, theirs = peer_pairs_a_second(hosts, case, python, wanted.steps)
                found["peer"].append(theirs)
        ours, peer = (statistics.median(found[side]) for side in ("ours", "peer"))
        said = f"{ours / peer:.2f}x {name} in DDP: {ours:.2f} against {peer:.2f} pairs a second"
        said += f" (median of {wanted.rounds})"
        goal = None if case.goal is None else 1.35
        yield judged(
            f"{case.name}, two hosts, {wanted.shards} shards", said, ours / peer, goal, found
        )


def peers_python(asked: Path | None) -> str | None:
    """An interpreter that has OpenCLIP."""
    known = (
        [asked.absolute()]
        if asked
        else [ROOT / "benchmarks" / ".venv" / "bin" / "python", Path(sys.executable)]
    )
    for python in known:
        looks = [
            str(python),
            "-c",
            "import importlib.util as u, sys; sys.exit(u.find_spec('open_clip') is None)",
        ]
        if python.exists() and subprocess.run(looks, check=False).returncode == 0:
            return str(python)
    return None


def peer_pairs_a_second(hosts: Hosts, case: Case, python: str, steps: int) -> tuple[str, float]:
    out = hosts.folder(0) / "peer.json"
    script = [
        str(ROOT / "benchmarks" / "peers_together.py"),
        case.model,
        str(case.batch),
        case.dtype,
    ]
    script += [str(CAPTION_TOKENS), str(SKIPPED + steps), str(out)]
    to_end(hosts, together(hosts, script, python=python))
    found = json.loads(out.read_text())
    return found["peer"], case.batch / statistics.mean(found["seconds"][SKIPPED:])


@row
def features(wanted: argparse.Namespace) -> Iterator[Result]:
    """Features of frozen towers: two hosts against one."""
    model, images = ("tiny", 64) if wanted.quick else (wanted.tower, 1000)
    shape = replace(SHAPES[model], vocabulary=SHAPES["vit-b-32"].vocabulary)
    seconds: dict[str, list[float]] = {"alone": [], "together": []}
    begun: dict[str, list[float]] = {"alone": [], "together": []}
    with tempfile.TemporaryDirectory() as folder, Hosts(2) as hosts:
        start = Path(folder) / "start"
        save_model(Embedder(CLIP(shape).eval(), clip_tokenizer(), choose_device("cpu")[0]), start)
        settings = [
            *PLAIN, "train.dtype=float32", f"train.start={start}", "train.image_blocks=0", "train.text_blocks=0",
            f"data.train_pairs={images}", "data.captions=1", "train.batch_size=16", "train.steps=1000",
            "train.crop=1.0", "train.flip=0.0",  # else images have new crops at each step, and nothing to cache
        ]  # fmt: skip
        arguments = train(settings, "full")
        for _ in range(wanted.rounds):
            for side, lines in {
                "alone": {0: alone(arguments)},
                "together": together(hosts, arguments),
            }.items():
                for host in lines:
                    shutil.rmtree(hosts.folder(host) / "cache", ignore_errors=True)
                typed = time.time()
                (events,) = until(hosts, lines, [run_of(hosts)], lambda events: bool(events))
                seconds[side].append(feature_seconds(events[0]["reasons"]))
                begun[side].append(events[0]["time"] - typed)
                shutil.rmtree(run_of(hosts))
    one, two = (statistics.median(seconds[side]) for side in ("alone", "together"))
    waits = " against ".join(
        f"{statistics.median(begun[side]):.1f} s" for side in ("together", "alone")
    )
    said = f"{one / two:.2f}x: {two:.1f} s against {one:.1f} s, from the command to the run's beginning {waits}"
    said += f" (median of {wanted.rounds})"
    goal, facts = None if wanted.quick else 1.9, {"seconds": seconds, "begun": begun}
    yield judged(f"features of {images:,} images, {model}, two hosts", said, one / two, goal, facts)


UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def feature_seconds(reasons: Mapping[str, str]) -> float:
    """Return how long a run says that computing features took."""
    summary = reasons.get("train.features", "")
    found = re.search(r"computed once in ([^,]+),", summary)
    if found is None:
        raise Ended(f"no features were computed: {summary}")
    return sum(
        float(number) * UNITS[unit]
        for number, unit in re.findall(r"([\d.]+) (s|min|h)\b", found[1])
    )


@row
def one_rank(wanted: argparse.Namespace) -> Iterator[Result]:
    """A single rank whose gradients go through the collective, against the same step without; on CUDA nccl's."""
    devices = (
        ["cpu", *["cuda"] * torch.cuda.is_available()] if wanted.device is None else [wanted.device]
    )
    chosen = {
        "cpu": [("mini", "128", "float32")],
        "cuda": [
            ("seed", "256", "bfloat16"),
            ("vit-b-32", "1024", "bfloat16"),
            ("vit-b-32", "1024", "bfloat16", "compiled"),
            ("vit-b-16", "1024", "bfloat16", "compiled"),
        ],
    }
    script = str(ROOT / "benchmarks" / "together_one_rank.py")
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    for device, case in ((kind, case) for kind in devices for case in chosen[kind]):
        case = ("tiny", "16", "float32") if wanted.quick else case
        line = alone([*TORCHRUN, "--standalone", "--nproc-per-node=1", script, device, *case])
        core = ["taskset", "-c", "0"] if sys.platform == "linux" and device == "cpu" else []
        done = subprocess.run(
            [*core, *line],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Ended(done.stderr[-300:])
        what, lost, said = re.split(
            r": (?=[+-]?[\d.]+%)|%: ", done.stdout.strip().splitlines()[-1].partition("; goal")[0]
        )
        met = None if wanted.quick else float(lost) <= 2
        yield Result(what, f"{lost}%: {said}", "within 2 %", met)


@row
def prediction(wanted: argparse.Namespace) -> Iterator[Result]:
    """Seconds of a step together as they are predicted before a run, and as they were, over links of several speeds."""
    chosen = QUICK if wanted.quick else [Case("mini", 128, None), SPEED[0], SPEED[2]]
    for case in chosen:
        if wanted.models and case.model not in wanted.models:
            continue
        for name, bits in LINKS.items():
            with Hosts(2) as hosts:
                hosts.limit(bits)
                settings = [*case.settings(8), f"train.steps={SKIPPED + 2 * wanted.steps}"]
                to_end(hosts, together(hosts, train(settings, "seed")))
                told = settings_of(run_of(hosts)).get("together", {})
                events = list(read_events(run_of(hosts) / "events.jsonl"))
            yield predicted(
                f"{case.name}, {name}", told, seconds_a_step(events, 2 * wanted.steps - 1)
            )


def predicted(what: str, told: dict[str, Any], seen: float) -> Result:
    """What run.toml says of a run together, and the mean of its steps as its events have it."""
    goal, facts = "within 15 %", {**told, "seen_step_seconds": seen}
    if not {"predicted_step_seconds", "step_seconds"} <= told.keys():
        return Result(
            what, f"not measured: run.toml has no [together]; a step took {seen:.3f} s", facts=facts
        )
    before, true = told["predicted_step_seconds"], told["step_seconds"]
    said = f"{before / true - 1:+.0%}: predicted {before:.3f} s a step, true {true:.3f} s (events: {seen:.3f} s)"
    return Result(what, said, goal, abs(before / true - 1) <= 0.15, facts)


# Machines that are lost


@row
def faults(wanted: argparse.Namespace) -> Iterator[Result]:
    """Ranks, agents, hosts and links that are lost at random, in runs of 2 and 3 hosts."""
    count = min(3, wanted.faults) if wanted.quick else wanted.faults
    yield from disturb(count, wanted.seed, wanted.case, wanted.keep)


def judged(what: str, said: str, ratio: float, goal: float | None, facts: dict[str, Any]) -> Result:
    if goal is None:
        return Result(what, said, facts=facts)
    return Result(what, said, f"{goal:g}x", ratio >= goal, facts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", help="which rows; all without")
    parser.add_argument("--list", action="store_true")
    parser.add_argument(
        "--quick", action="store_true", help="small models and few steps, to see that rows work"
    )
    parser.add_argument("--rounds", type=int, help="3, or 1 with --quick")
    parser.add_argument("--steps", type=int, default=4, help="that are timed in a round")
    parser.add_argument("--shards", type=int, default=2, help="of the rows speed and ddp")
    parser.add_argument(
        "--also",
        type=int,
        nargs="*",
        default=[8, 0],
        help="other numbers of shards for the row speed",
    )
    parser.add_argument(
        "--models", nargs="*", default=[], help="of the rows speed, ddp and prediction: all without"
    )
    parser.add_argument(
        "--dtypes", nargs="*", default=["float32", "bfloat16"], help="of the rows speed and ddp"
    )
    parser.add_argument("--tower", default="vit-b-32", help="of the row features")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="of the row one_rank; all that are there without"
    )
    parser.add_argument("--peers", type=Path, help="Python of the environment that has OpenCLIP")
    parser.add_argument(
        "--faults", type=int, default=50, help="of the row faults; 0 is one run without any"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--case", type=int, help="one run of the row faults again")
    parser.add_argument(
        "--keep", type=Path, help="where the folders of runs that faults did harm to are kept"
    )
    wanted = parser.parse_args()
    wanted.rounds = wanted.rounds or (1 if wanted.quick else 3)
    if wanted.list:
        print(
            "\n".join(
                f"{name:<12} {(function.__doc__ or '').splitlines()[0]}"
                for name, function in ROWS.items()
            )
        )
        return
    rows = wanted.rows or list(ROWS)
    if unknown := [name for name in rows if name not in ROWS]:
        parser.error(f"no row {unknown[0]}; there are {', '.join(ROWS)}")
    if (why := missing()) and rows != ["one_rank"]:
        parser.error(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts are taken apart
    sys.exit(any(result.met is False for result in measure(rows, wanted)))


def measure(rows: Sequence[str], wanted: argparse.Namespace) -> list[Result]:
    """The lines of rows, printed as they come, then all as JSON."""
    found: dict[str, list[Result]] = {}
    for name in rows:
        found[name] = []
        try:
            for result in ROWS[name](wanted):
                found[name].append(result)
                print(f"{name}: {result}", flush=True)
        except Ended as error:
            found[name].append(Result(name, f"ended early: {error}", "an end", False))
            print(f"{name}: {found[name][-1]}", flush=True)
    about = {
        "torch": torch.__version__,
        "commit": source_commit(),
        "cores": os.cpu_count(),
        "time": time.time(),
    }
    lines = {name: [asdict(result) for result in results] for name, results in found.items()}
    print(json.dumps({**about, "rows": lines}, default=str))
    return [result for results in found.values() for result in results]


if __name__ == "__main__":
    main()
