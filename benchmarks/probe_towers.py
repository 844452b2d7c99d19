"""Is `lapclip probe` right, and does `lapclip data check` find captions that do not belong to their images?

    python benchmarks/probe_towers.py towers flickr8k
    python benchmarks/probe_towers.py belonging flickr8k clothing10 scenes

`towers` probes every pair of installed towers, trains heads on each (about 7 minutes a pair on two cores; runs that are
there already are taken: runs/probe-IMAGE-TEXT), and compares. The gain of trained heads over the closed form is
calibrated on all pairs but the one that is predicted. `belonging` takes subsets of data that is right, of 50 to 1,000
images, and shuffles their captions or moves them by a row. Each prints its figures and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapclip.commands.probe import ProbeRequest, Sample, Settings, probe, read_captions, read_images
from lapclip.commands.train import train
from lapclip.data.loading import list_data
from lapclip.data.pixels import View
from lapclip.evaluation.closed_form import belonging
from lapclip.machine.choose_device import choose_device
from lapclip.model.shapes import SHAPES
from lapclip.runs.events import read_events
from lapclip.suggest import set_words
from lapclip.weights.pretrained_networks import taps_of

SIZES, MOST = (50, 100, 300, 1000), 3000


def towers(data: str) -> dict[str, Any]:
    """Predicted and trained recall of every pair."""
    found = probe(ProbeRequest(data))
    pairs = [pair | trained_heads(data, pair["image"], pair["text"]) for pair in found["pairs"]]
    residuals = [
        log_odds(pair["trained"]) - log_odds(pair["predicted"]["t2i_r1"]) for pair in pairs
    ]
    for at, pair in enumerate(pairs):
        others = [value for other, value in enumerate(residuals) if other != at]
        pair["left_out"] = share(
            log_odds(pair["predicted"]["t2i_r1"]) + (sum(others) / len(others) if others else 0.0)
        )
        name = f"{pair['image']} and {pair['text']}"
        ends = f"({pair['trained_low']:.1%} to {pair['trained_high']:.1%})"
        predicted = f"closed form {pair['t2i_r1']:.1%} of {found['candidates']}, predicted {pair['predicted']['t2i_r1']:.1%}"
        print(
            f"{name:<36} {predicted}, "
            f"calibrated on the others {pair['left_out']:.1%}, trained {pair['trained']:.1%} {ends}"
        )
    error = max(abs(pair["left_out"] - pair["trained"]) for pair in pairs)
    apart = [
        (a, b)
        for a, b in combinations(pairs, 2)
        if a["trained_low"] > b["trained_high"] or b["trained_low"] > a["trained_high"]
    ]
    wrong = [
        (a, b) for a, b in apart if (a["t2i_r1"] > b["t2i_r1"]) != (a["trained"] > b["trained"])
    ]
    print(
        f"largest error {100 * error:.1f} points; {len(apart)} differences are sure, {len(wrong)} in the wrong order"
    )
    print(
        f"the probe took {found['seconds']:.0f} s; mean residual (log odds) {sum(residuals) / len(residuals):.3f}"
    )
    return {
        "pairs": pairs,
        "error": error,
        "apart": len(apart),
        "wrong": len(wrong),
        "seconds": found["seconds"],
    }


def trained_heads(data: str, image: str, text: str) -> dict[str, float]:
    """Text-to-image R@1 of heads trained on two towers, with its interval."""
    name = f"probe-{image}-{text}"
    events = Path("runs") / name / "events.jsonl"
    if not events.exists():
        model = {
            "image_from": image,
            "image_taps": taps_of(image),
            "text_from": text,
            "text_taps": taps_of(text),
        }
        settings = set_words({f"model.{key}": value for key, value in model.items()})[1::2]
        # Twice as fast on processors that have it, and the differences are far below what is compared.
        train(
            "heads",
            [f"data.source={json.dumps(data)}", "train.dtype=bfloat16", *settings],
            name=name,
        )
    scores = next(event for event in read_events(events) if event["type"] == "finished")[
        "evaluation"
    ]
    low, high = scores["intervals"]["t2i_r1"]
    return {"trained": scores["t2i_r1"], "trained_low": low, "trained_high": high}


def check_captions(sources: Sequence[str], repeats: int) -> dict[str, Any]:
    """How often right data is accused, and how often shuffled and moved captions are found."""
    result = {}
    for source in sources:
        image_NF, first_NG, last_NG = tables(source)
        for size in [size for size in SIZES if size + 2 <= len(image_NF)]:
            counts = {case: {"unrelated": 0, "moved": 0} for case in cases(first_NG, last_NG, 1, 2)}
            times, least = repeats if size <= 100 else max(10, repeats // 5), math.inf
            for repeat in range(times):
                at = int(np.random.default_rng([size, repeat]).integers(1, len(image_NF) - size))
                for case, (first, last) in cases(first_NG, last_NG, at, size).items():
                    found = belonging(image_NF[at : at + size], first, last, np.zeros(size))
                    counts[case]["unrelated"] += found.unrelated
                    counts[case]["moved"] += found.moved != 0
                    least = min(least, found.own.z) if case == "right" else least
            told = "; ".join(
                f"{case} {each['unrelated']} + {each['moved']}" for case, each in counts.items()
            )
            print(
                f"{source}, {size} images, {times} times (unrelated + moved): {told}; least z {least:.1f}",
                flush=True,
            )
            result[f"{source} {size}"] = {"times": times, "least_z": least, **counts}
    return result


def cases(
    first_NG: Tensor, last_NG: Tensor, at: int, size: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """First and last captions of some images, as they are and as they should not be."""
    here, before, after = (slice(at + by, at + by + size) for by in (0, -1, 1))
    order = torch.from_numpy(np.random.default_rng([at, size]).permutation(size))
    return {
        "right": (first_NG[here], last_NG[here]),
        "shuffled": (first_NG[here][order], last_NG[here][order]),
        "all captions of the image before": (first_NG[before], last_NG[before]),
        "one row down": (
            last_NG[before],
            last_NG[here],
        ),  # the last caption of the image before comes first
        "one row up": (first_NG[here], first_NG[after]),
    }


def tables(source: str) -> tuple[Tensor, Tensor, Tensor]:
    """Images, and the first and the last caption of each, as the two small towers see them."""
    settings, usual = Settings.of(source, []), SHAPES["towers"]
    listing = list_data(settings.config.data, View.of(settings.config.model))
    rows = [at for at, row in enumerate(listing.table.rows) if row.captions][:MOST]
    captions = [
        caption
        for at in rows
        for caption in (listing.table.rows[at].captions[0], listing.table.rows[at].captions[-1])
    ]
    sample = Sample(listing, rows, captions, np.repeat(np.arange(len(rows)), 2), len(rows))
    device, _ = choose_device("auto")
    texts = read_captions(usual.text_from, settings, sample, device).features
    return read_images(usual.image_from, settings, sample, device).features, texts[::2], texts[1::2]


def log_odds(value: float) -> float:
    return math.log(value / (1 - value))


def share(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["towers", "belonging"])
    parser.add_argument("data", nargs="+")
    parser.add_argument("--repeats", type=int, default=100)
    wanted = parser.parse_args()
    print(
        json.dumps(
            towers(wanted.data[0])
            if wanted.what == "towers"
            else check_captions(wanted.data, wanted.repeats)
        )
    )


if __name__ == "__main__":
    main()
