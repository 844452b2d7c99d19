"""Evaluation: how well a model finds images by captions, and captions by images.

Here is what its metrics are called, for those who compute them and those who show them without numpy or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WAYS = {"t2i": "text to image", "i2t": "image to text"}
RANKS = (1, 5, 10)
"""Recall is the share of right answers among the first so many."""
ENOUGH_FOR_TEN = 40
"""Candidates from which on the first ten are a share small enough to tell a model from a guess."""
FEW = 20
"""Candidates below which a score says little."""


def note_on_chance(scores: dict[str, Any]) -> list[str]:
    """A warning where a model cannot be told from a guess: intervals that reach down to chance, or stay below it. Of
    classes, one that beats chance may still be right less often than one that always says the largest class."""
    rank = 10 if scores.get("candidates", 0) >= ENOUGH_FOR_TEN else 1
    pairs = {f"{name} R@{rank}": f"{way}_r{rank}" for way, name in WAYS.items()}
    chances = scores["chance"] if "top1" in scores else scores["chances"]
    found = []
    for name, metric in ({"top-1": "top1"} if "top1" in scores else pairs).items():
        (low, high), chance = scores["intervals"][metric], chances[metric]
        if low > chance:
            return _note_on_largest_class(scores)
        how = "is below" if high < chance else "reaches down to"
        found.append(
            f"{name} {scores[metric]:.1%} ({low:.1%} to {high:.1%}) {how} chance, {chance:.1%}"
        )
    return [f"This cannot be told from guessing: {'; '.join(found)}."]


def _note_on_largest_class(scores: dict[str, Any]) -> list[str]:
    """A warning where top-1 is not surely above the share of the largest class. Classes of equal size say nothing new:
    there that share is chance."""
    largest = scores.get("largest_class", 0.0)
    if "top1" not in scores or (low := scores["intervals"]["top1"][0]) > largest:
        return []
    high = scores["intervals"]["top1"][1]
    how = "is below" if high < largest else "reaches down to"
    return [
        f"This is no better than always naming the largest class: top-1 {scores['top1']:.1%} ({low:.1%} to {high:.1%}) "
        f"{how} its share, {largest:.1%}."
    ]


def note_on_few(candidates: int) -> list[str]:
    """A warning where there are so few candidates that chance or a single image decides the scores."""
    if candidates >= FEW:
        return []
    found = "1 image" if candidates == 1 else f"{candidates} images"
    # The lower end of Wilson's interval where all are right (intervals.py, which takes numpy).
    least = candidates / (candidates + 1.96**2)
    return [
        f"Only {found} held out: chance alone is right in {1 / candidates:.0%} of cases, so these scores say little; "
        f"all {candidates} right means {least:.0%} to 100% (95 % interval)."
    ]


def note_on_held_out(images: Mapping[str, int]) -> list[str]:
    """Return a warning if a run has too few held-out images for its scores to mean much."""
    few = []
    for split in ("val", "test"):
        if 0 < images.get(split, FEW) < FEW:
            few.append(f"{split} {images[split]}")
    return [f"few held-out images ({', '.join(few)}): scores on them say little"] if few else []
