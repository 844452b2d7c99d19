"""How well do models answer: whole captions, short questions, with and without the correction for hubness?

    python benchmarks/answers.py hubness --model runs/heads
    python benchmarks/answers.py verdict --model runs/heads
    python benchmarks/answers.py short_questions --model runs/heads
    python benchmarks/answers.py --list

One function a row. Each prints its figures and one JSON line. Figures are of the split val, or of --split.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from lapclip.commands.evaluate import EvaluationRequest, evaluate

ROWS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {}


def row(function: Callable[[argparse.Namespace], dict[str, Any]]) -> Callable[[argparse.Namespace], dict[str, Any]]:
    ROWS[function.__name__] = function
    return function


def evaluated(wanted: argparse.Namespace) -> dict[str, Any]:
    """What `lapclip eval` finds; once for all rows."""
    return _evaluated(wanted.model, wanted.on, wanted.split, wanted.out)


@cache
def _evaluated(model: str | None, on: str | None, split: str | None, out: Path | None) -> dict[str, Any]:
    return evaluate(EvaluationRequest(model, on, split, device="cpu", out=out))


@row
def hubness(wanted: argparse.Namespace) -> dict[str, Any]:
    """Text to image and short questions without and with the correction; each half of the questions is scored with the
    share that the other half chose."""
    found = evaluated(wanted)["hubness"]
    whole, short = found["whole"], found.get("short")
    for name in ("t2i_r1", "t2i_r5", "t2i_r10"):
        print(f"whole captions, {name:<8} without {whole[name]:.1%}, with {whole[f'{name}_with']:.1%}")
    interval = f"{whole['gain_low']:.4f} to {whole['gain_high']:.4f}"
    print(
        f"  share {whole['share']}, gain of the mean reciprocal rank {whole['gain']:.4f} ({interval}), {whole['used']=}"
    )
    if short:
        print(f"short questions, mAP of words without {short['map']:.4f}, with {short['map_with']:.4f}")
        interval = f"{short['gain_low']:.4f} to {short['gain_high']:.4f}"
        print(
            f"  share {short['share']}, gain over words and phrases {short['gain']:.4f} ({interval}), {short['used']=}"
        )
    return found


@row
def verdict(wanted: argparse.Namespace) -> dict[str, Any]:
    """Whether scores tell that nothing fits: questions to a library with their right images and without them."""
    result = evaluated(wanted)
    for kind, found in result["verdict"].items():
        area = f"AUROC {found['auroc']:.3f} ({found['auroc_low']:.3f} to {found['auroc_high']:.3f})"
        told = f"{found['detected']:.1%} ({found['detected_low']:.1%} to {found['detected_high']:.1%})"
        print(
            f"{kind}: {area}, told {told} at {found['false_alarms']:.1%} false alarms, {found['questions']} questions"
        )
        for word, share in result["fits"][kind]["first_five"].items():
            print(f"  {word:<10} {share['share']:.1%} of the first five answers, right {share['right']}")
    return {"verdict": result["verdict"], "fits": result["fits"]}


@row
def short_questions(wanted: argparse.Namespace) -> dict[str, Any]:
    """Words and phrases of held-out captions: mean average precision beside chance and matching the words alone."""
    found = evaluated(wanted)["short_questions"]
    for name, kind in (("words", found), ("phrases", found["phrases"])):
        sure = f"{kind['map_low']:.3f} to {kind['map_high']:.3f}, over questions"
        beside = (
            f"chance {kind['chance']:.3f}, words alone {kind['words_alone']:.3f} (model there {kind['map_others']:.3f})"
        )
        first = f"first five right {kind['first_five']:.1%}"
        print(f"{kind['questions']} {name}: mAP {kind['map']:.3f} ({sure}), {beside}, {first}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="which rows; all without")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--model", default=None)
    parser.add_argument("--on", default=None, help="other data than the run's own")
    parser.add_argument("--split", default=None)
    parser.add_argument("--out", type=Path, default=None)
    wanted = parser.parse_args()
    if wanted.list:
        print("\n".join(f"{name:<12} {(function.__doc__ or '').splitlines()[0]}" for name, function in ROWS.items()))
        return
    print(json.dumps({name: ROWS[name](wanted) for name in wanted.rows or ROWS}))


if __name__ == "__main__":
    main()
