"""What should "beach -people" do: take a share of the unwanted away, or leave out images that score high for it?

    python benchmarks/search_minus.py MODEL DATA [--images 1000]

DATA is a folder with captions.csv (filepath, caption, split), of which the split val is taken. For pairs of common
words that often come together, "a WORD -OTHER" is right where some caption of an image has the word and none has the
other. Mean average precision over all pairs of words for each way of asking, and one JSON line.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections import Counter, defaultdict
from itertools import permutations
from pathlib import Path

import numpy as np

from lapclip.embedder import load

COMMON, TOGETHER = 40, 15
"""Words that are tried, and images that have to have both, and the first alone."""
STOP = set(
    re.findall(
        r"\w+",
        "the and with are for from that his her their its two three one while another other into some out who has "
        "wearing large small very standing through near over down front behind next being around",
    )
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    wanted = parser.parse_args()
    words: dict[str, set[str]] = defaultdict(set)
    with open(wanted.data / "captions.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["split"] == "val" and (row["filepath"] in words or len(words) < wanted.images):
                words[row["filepath"]] |= (
                    set(re.findall(r"[a-z]{3,}", row["caption"].lower())) - STOP
                )
    counts = Counter(word for found in words.values() for word in found)
    common = [word for word, _ in counts.most_common(COMMON)]
    has = {word: np.array([word in found for found in words.values()]) for word in common}
    pairs = [
        (word, other)
        for word, other in permutations(common, 2)
        if (has[word] & has[other]).sum() >= TOGETHER
        and (has[word] & ~has[other]).sum() >= TOGETHER
    ]
    embedder = load(wanted.model)
    images = embedder.encode_image([wanted.data / path for path in words])
    texts = dict(zip(common, embedder.encode_text([f"a {word}" for word in common]), strict=True))
    ways = {"without the minus": lambda own, other: own}
    for share in (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0):
        ways[f"less {share} of the other"] = lambda own, other, share=share: own - share * other
    for part in (0.02, 0.05, 0.1, 0.2, 0.3):
        ways[f"without the {part:.0%} highest of the other"] = lambda own, other, part=part: (
            np.where(other >= np.quantile(other, 1 - part), own - 10, own)
        )
    scores = {
        name: float(np.mean([
            average_precision(way(images @ texts[word], images @ texts[other]), has[word] & ~has[other])
            for word, other in pairs
        ]))
        for name, way in ways.items()
    }  # fmt: skip
    for name, score in scores.items():
        print(f"{name:<40}{score:.4f}")
    print(
        json.dumps(
            {
                "model": wanted.model,
                "pictures": len(images),
                "pairs": len(pairs),
                "precision": scores,
            }
        )
    )


def average_precision(scores: np.ndarray, right: np.ndarray) -> float:
    hits = right[np.argsort(-scores, kind="stable")]
    return float((np.cumsum(hits) / np.arange(1, len(hits) + 1))[hits].mean())


if __name__ == "__main__":
    main()
