"""How well do models answer: whole captions, short questions, with and without the correction for hubness?

    python benchmarks/answers.py --data flickr8k                       # every row, each with its goal
    python benchmarks/answers.py heads last_blocks --data flickr8k     # some
    python benchmarks/answers.py hubness --data flickr8k --model lora  # of another run
    python benchmarks/answers.py --list

Scores are of the split val. Rows that need a trained model take runs/NAME where it is (heads, last-blocks, photos), and
train it where it is not: about 10, 20 and 25 minutes on two cores. Beside other programs two threads take up to ten
times as long, so times count on a quiet machine only. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.commands.evaluate import evaluate
from lapclip.commands.evaluation_data import (
    EvaluationRequest,
    choose_data,
    find_model,
    open_data,
)
from lapclip.embedder import load
from lapclip.runs.events import read_events

HERE = Path(__file__).parent
BEFORE = 0.171
"""Mean average precision of single words of the recipe heads before it learnt from phrases, on the same photos."""
Row = Callable[[argparse.Namespace], dict[str, Any]]
ROWS: dict[str, Row] = {}


def row(function: Row) -> Row:
    ROWS[function.__name__] = function
    return function


@row
def heads(wanted: argparse.Namespace) -> dict[str, Any]:
    """The recipe heads: text to image R@1 without and with the correction."""
    return captions_found(wanted, "heads", (0.235, 0.255), 10, ["--recipe", "heads"])


@row
def last_blocks(wanted: argparse.Namespace) -> dict[str, Any]:
    """The recipe last-blocks after heads, with the time of both."""
    trained(wanted, "heads", ["--recipe", "heads"])
    return captions_found(
        wanted,
        "last-blocks",
        (0.265, 0.29),
        40,
        ["--recipe", "last-blocks", "--from", "heads"],
        after="heads",
    )


@row
def single_words(wanted: argparse.Namespace) -> dict[str, Any]:
    """Short questions to heads, against the recipe before."""
    trained(wanted, "heads", ["--recipe", "heads"])
    found = evaluated("heads")["short_questions"]["map"]
    more = found / BEFORE
    tell(
        f"single words, heads: mAP {found:.3f}, {more:.2f}x of {BEFORE} before",
        more >= 1.35,
        "1.35x",
    )
    return {"map": found, "ratio": more}


@row
def photos(wanted: argparse.Namespace) -> dict[str, Any]:
    """The recipe photos, from scratch: text to image R@10."""
    seconds = trained(wanted, "photos", ["--recipe", "photos"])
    found = finished("photos")["t2i_r10"]
    in_time = seconds is None or seconds <= 25 * 60
    tell(
        f"photos: T2I R@10 {found:.1%} in {minutes(seconds)}",
        found >= 0.28 and in_time,
        "28 % in 25 min",
    )
    return {"t2i_r10": found, "seconds": seconds}


@row
def first_run(wanted: argparse.Namespace) -> dict[str, Any]:
    """How long the default recipe takes to 60 % R@1: the median of three seeds."""
    found = json_of("time_to_recall.py")
    middle = found["median_seconds"]["recipe"]
    tell(f"first-run: 60 % after {middle:.0f} s", middle <= 45, "45 s")
    return found


@row
def probe(wanted: argparse.Namespace) -> dict[str, Any]:
    """How long `lapclip probe` takes for the installed towers, of these at most two of each kind."""
    began = time.monotonic()
    found = command(
        "probe", wanted.data, "--json", "--towers", wanted.towers, "--texts", wanted.texts
    )
    seconds = time.monotonic() - began
    for pair in found["pairs"]:
        print(
            f"  {pair['image']} and {pair['text']}: {pair['t2i_r1']:.1%}, trained {pair['predicted']['t2i_r1']:.1%}"
        )
    tell(
        f"probe: {len(found['pairs'])} pairs in {seconds:.0f} s", seconds <= 90, "90 s for 2 and 2"
    )
    return {"pairs": found["pairs"], "seconds": seconds}


@row
def hubness(wanted: argparse.Namespace) -> dict[str, Any]:
    """Text to image without and with the hubness correction. Each half of the images is scored with the share that the
    other half chose."""
    found = evaluated(wanted.model)["hubness"]
    for name in ("t2i_r1", "t2i_r5", "t2i_r10"):
        print(f"{name:<8} without {found[name]:.1%}, with {found[f'{name}_with']:.1%}")
    interval = f"{found['gain_low']:.4f} to {found['gain_high']:.4f}"
    print(
        f"share {found['share']}, gain of the mean reciprocal rank {found['gain']:.4f} ({interval}), {found['used']=}"
    )
    return found


@row
def library_size(wanted: argparse.Namespace) -> dict[str, Any]:
    """How often a caption finds its image first among fewer images: the same ranks, others left out at random."""
    request = EvaluationRequest(wanted.model, split="val", device="cpu")
    model = find_model(request)
    embedder = load(model.path, "cpu")
    config, _ = choose_data(model, request)
    images, texts, owner = embedder.encode_pairs(
        open_data(config, embedder.view, "val", "", None).pairs
    )
    scores = texts @ images.T
    better = (scores >= np.take_along_axis(scores, owner[:, None], 1)).sum(axis=1) - 1
    found = {}
    for count in (10, 30, 100, 300, 1000):
        if count <= len(images):
            # None of the better ones is among the others that are drawn.
            drawn = np.arange(count - 1)
            share = np.prod(
                np.clip(
                    (len(images) - 1 - better[:, None] - drawn) / (len(images) - 1 - drawn), 0, 1
                ),
                1,
            )
            found[count] = float(share.mean())
            print(
                f"among {count:>5,} images a caption finds its own first in {found[count]:.0%} of cases",
                flush=True,
            )
    return found


def captions_found(
    wanted: argparse.Namespace,
    name: str,
    goals: tuple[float, float],
    most: int,
    arguments: list[str],
    after: str | None = None,
) -> dict[str, Any]:
    """R@1 of captions without and with the correction, and minutes."""
    seconds = trained(wanted, name, arguments)
    if after and seconds is not None:
        before = seconds_of(after)
        seconds = None if before is None else seconds + before
    found = evaluated(name)["hubness"]
    without, corrected = found["t2i_r1"], found["t2i_r1_with"]
    met = (
        without >= goals[0] and corrected >= goals[1] and (seconds is None or seconds <= 60 * most)
    )
    what = f"{name}: T2I R@1 {without:.1%}, corrected {corrected:.1%}, in {minutes(seconds)}"
    tell(what, met, f"{goals[0]:.1%} / {goals[1]:.1%} in {most} min")
    return {"t2i_r1": without, "t2i_r1_with": corrected, "seconds": seconds}


def trained(wanted: argparse.Namespace, name: str, arguments: list[str]) -> float | None:
    """Train a run that is not there; the seconds that took, all included, where this command took them."""
    if not (Path("runs") / name / "events.jsonl").exists():
        began = time.monotonic()
        command("train", wanted.data, *arguments, "--name", name, "--json")
        (Path("runs") / name / "answers.json").write_text(
            json.dumps({"seconds": time.monotonic() - began})
        )
    return seconds_of(name)


def seconds_of(name: str) -> float | None:
    path = Path("runs") / name / "answers.json"
    return json.loads(path.read_text())["seconds"] if path.exists() else None


def finished(name: str) -> dict[str, Any]:
    """The scores of a run's end."""
    events = read_events(Path("runs") / name / "events.jsonl")
    return next(event for event in events if event["type"] == "finished")["evaluation"]


@cache
def evaluated(model: str) -> dict[str, Any]:
    """What `lapclip eval` finds; once for all rows."""
    with tempfile.TemporaryDirectory() as folder:
        return evaluate(EvaluationRequest(model, split="val", device="cpu", out=Path(folder)))


def command(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "lapclip", *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def json_of(*script: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / script[0]), *script[1:]],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    print(done.stdout.rstrip().rpartition("\n")[0])
    return json.loads(done.stdout.strip().splitlines()[-1])


def minutes(seconds: float | None) -> str:
    return (
        "a time that is not known: the run was there"
        if seconds is None
        else f"{seconds / 60:.1f} min"
    )


def tell(what: str, met: bool, goal: object) -> None:
    print(f"{what}; goal {goal}: {'met' if met else 'MISSED'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", help="which rows; all without")
    parser.add_argument("--list", action="store_true")
    parser.add_argument(
        "--data", default="flickr8k", help="photos with captions and the splits train and val"
    )
    parser.add_argument("--model", default="heads", help="of the row hubness")
    parser.add_argument(
        "--towers", default="efficientnet-lite0", help="of the row probe: names, by commas"
    )
    parser.add_argument("--texts", default="minilm-l6")
    wanted = parser.parse_args()
    if wanted.list:
        print(
            "\n".join(
                f"{name:<16} {(function.__doc__ or '').splitlines()[0]}"
                for name, function in ROWS.items()
            )
        )
        return
    print(json.dumps({name: ROWS[name](wanted) for name in wanted.rows or ROWS}))


if __name__ == "__main__":
    main()
