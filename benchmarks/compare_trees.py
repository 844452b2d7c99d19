"""This tree against another one on this machine, in turns. `dev/compare_with.sh COMMIT` sets both up and calls this.

Each tree has its own environment in `.venv`, its own cache and its own working folder. `steps` calls each tree's own
`benchmarks/versions.py`; `losses` compares the losses of ten steps bit by bit, with kernels, threads and precision
fixed; `recall` trains `heads` on Flickr8k and scores val; `make` times `make train`, `make test` and
`lapclip --help`; `sizes` weighs the wheel and what `pip install` of it adds beside torch.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

THIS = Path(__file__).parent.parent
PARTS = ("steps", "losses", "recall", "make", "sizes")
FIXED = {
    "train.device": "cpu",
    "train.dtype": "float32",
    "train.threads": 2,
    "train.linear": "torch",
    "train.image_attention": "fused",
    "train.text_attention": "fused",
    "train.compile": "none",
    "train.steps": 10,
}
FEW_PHOTOS = 60  # of each split, for the losses of `photos` and `heads`
HELP_ROUNDS = 7
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")


@dataclass(frozen=True)
class Tree:
    """A checkout with its environment, and a folder in which its commands run."""

    name: str
    path: Path
    work: Path

    @property
    def python(self) -> Path:
        return self.path / ".venv" / "bin" / "python"

    def run(self, *command: str | Path, cwd: Path | None = None, may_fail: bool = False) -> str:
        """Run a command with this tree's environment and cache, and return what it printed."""
        environment = {
            **os.environ,
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(self.work / "cache"),
            "XDG_DATA_HOME": str(self.work / "data"),
        }
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd or self.work,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode and not may_fail:
            sys.exit(
                f"{self.name}: {' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr[-2000:]}"
            )
        return done.stdout

    def train(self, *arguments: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Train a run and return what `--json` printed."""
        command = [self.python, "-m", "lapclip", "train", *arguments, "--name", name, "--json"]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        return json.loads(self.run(*command))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="a checkout with its environment in .venv")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--data", type=Path, default=flickr8k(), help="the folder that benchmarks/flickr8k.py makes"
    )
    parser.add_argument(
        "--out", type=Path, help="also write the figures into this file; parts in it are replaced"
    )
    options = parser.parse_args()
    figures: dict[str, Any] = {"trees": {}, "machine": machine()}
    if options.out and options.out.exists():
        figures = json.loads(options.out.read_text(encoding="utf-8"))
    measures: dict[str, Callable[[list[Tree], Path | None], Any]] = {
        "steps": compare_steps,
        "losses": compare_losses,
        "recall": compare_recall,
        "make": compare_make,
        "sizes": compare_sizes,
    }
    with tempfile.TemporaryDirectory() as folder:
        trees = []
        for name, path in (("before", options.other.resolve()), ("now", THIS)):
            work = Path(folder) / name
            work.mkdir()
            trees.append(Tree(name, path, work))
            commit = subprocess.run(
                ["git", "rev-parse", "--short", "HEAD"], cwd=path, stdout=subprocess.PIPE, text=True
            )
            figures["trees"][name] = commit.stdout.strip()
        for part in options.only:
            print(f"## {part}", flush=True)
            figures[part] = {
                "command": f"dev/compare_with.sh {figures['trees']['before']} --only {part}",
                "figures": measures[part](trees, options.data),
            }
            print(json.dumps(figures[part]["figures"], indent=1), flush=True)
            if options.out:
                options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def flickr8k() -> Path | None:
    folder = os.environ.get("LAPCLIP_TEST_DATA")
    return Path(folder) / "flickr8k" if folder else None


def machine() -> dict[str, Any]:
    """Return what figures depend on."""
    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")), model
        )
    return {"processor": model, "cores": os.cpu_count(), "python": platform.python_version()}


def compare_steps(trees: list[Tree], _: Path | None) -> list[str]:
    """Time the rows of benchmarks/steps.py with each tree's own code."""
    before, now = trees
    output = now.run(now.python, THIS / "benchmarks" / "versions.py", before.path / "src")
    return output.splitlines()


def compare_losses(trees: list[Tree], data: Path | None) -> dict[str, Any]:
    """Compare ten losses of each recipe bit by bit."""
    found: dict[str, Any] = {}
    for recipe in ("first-run", "photos", "heads"):
        arguments = ["--recipe", recipe]
        if recipe != "first-run":
            if data is None:
                print(f"{recipe}: left out, because --data names no photos")
                continue
            arguments.insert(0, "few-photos.csv")
        losses = {}
        for tree in trees:
            if data is not None:
                write_few_photos(data, tree.work / "few-photos.csv")
            tree.train(*arguments, name=recipe, settings={**FIXED, "train.batch_size": 16})
            losses[tree.name] = step_losses(tree.work / "runs" / recipe)
        found[recipe] = {"equal": losses["before"] == losses["now"], **losses}
    return found


def write_few_photos(data: Path, path: Path) -> None:
    """Write a table with the first photos of train and of val, and copy them beside it."""
    (path.parent / "images").mkdir(exist_ok=True)
    rows = list(csv.DictReader((data / "captions.csv").open(encoding="utf-8", newline="")))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["filepath", "caption", "split"])
        writer.writeheader()
        for split in ("train", "val"):
            photos = list(dict.fromkeys(row["filepath"] for row in rows if row["split"] == split))[
                :FEW_PHOTOS
            ]
            writer.writerows(row for row in rows if row["filepath"] in photos)
            for photo in photos:
                shutil.copy(data / photo, path.parent / photo)


def step_losses(run: Path) -> list[float]:
    events = [
        json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [event["loss"] for event in events if event["type"] == "step"]


def compare_recall(trees: list[Tree], data: Path | None) -> dict[str, Any]:
    """Train `heads` on all of Flickr8k with empty caches and score val."""
    if data is None:
        return {"left out": "--data names no photos"}
    found = {}
    for tree in trees:
        started = time.monotonic()
        tree.train(str(data.resolve()), "--recipe", "heads", name="heads-all", settings={})
        seconds = time.monotonic() - started
        scores = json.loads(tree.run(tree.python, "-m", "lapclip", "eval", "heads-all", "--json"))[
            "evaluation"
        ]
        kept = ("candidates", "t2i_r1", "t2i_r10", "i2t_r1", "i2t_r10")
        found[tree.name] = {"seconds": round(seconds, 1), **{name: scores[name] for name in kept}}
    return found


def compare_make(trees: list[Tree], _: Path | None) -> dict[str, Any]:
    """Time `make train` and `make test` once, and `lapclip --help` several times."""
    found: dict[str, Any] = {}
    for target in ("train", "test"):
        found[f"make {target}"] = {}
        for tree in trees:
            started = time.monotonic()
            output = tree.run("make", target, cwd=tree.path, may_fail=target == "test")
            seconds = round(time.monotonic() - started, 1)
            result = next((line for line in output.splitlines() if " passed" in line), "")
            found[f"make {target}"][tree.name] = {"seconds": seconds, "result": result}
    times: dict[str, list[float]] = {tree.name: [] for tree in trees}
    for _round in range(HELP_ROUNDS):
        for tree in trees:
            started = time.monotonic()
            tree.run(tree.python.with_name("lapclip"), "--help")
            times[tree.name].append(time.monotonic() - started)
    found["lapclip --help, seconds"] = {
        name: round(statistics.median(each), 3) for name, each in times.items()
    }
    return found


def compare_sizes(trees: list[Tree], _: Path | None) -> dict[str, Any]:
    """Weigh the wheel, and what installing it adds to an environment that has torch."""
    found = {}
    for tree in trees:
        tree.run(tree.python, *PIP, "install", "build")
        dist = tree.work / "dist"
        tree.run(tree.python, "-m", "build", "--wheel", "--outdir", dist, tree.path)
        (wheel,) = dist.glob("*.whl")
        environment = tree.work / "installed"
        tree.run(tree.python, "-m", "venv", environment)
        tree.run(environment / "bin" / "python", *PIP, "install", "torch==2.13.0")
        before = packages(tree, environment), folder_bytes(environment)
        tree.run(environment / "bin" / "python", *PIP, "install", wheel)
        after = packages(tree, environment), folder_bytes(environment)
        found[tree.name] = {
            "wheel_bytes": wheel.stat().st_size,
            "installed_bytes": after[1] - before[1],
            "packages": sorted(after[0] - before[0]),
        }
        shutil.rmtree(environment)
    return found


def packages(tree: Tree, environment: Path) -> set[str]:
    listing = tree.run(environment / "bin" / "python", "-m", "pip", "list", "--format", "freeze")
    return set(listing.split())


def folder_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
