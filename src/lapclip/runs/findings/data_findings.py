"""Whether the pairs can teach, and tell, what they are meant to."""

from __future__ import annotations

import math
from typing import Any

from lapclip.runs.event_log import mapping
from lapclip.runs.findings.checks import Found, Surroundings, Verdict, check, numbers, validated
from lapclip.runs.summary import Summary
from lapclip.text import number

REPEATED = 0.1
"""Share of captions that another image has too. Below it the ceiling is hardly felt."""
MOST_HELD_OUT = 0.25
"""Share of the images in each of val and test that still leaves half for training."""
UNSURE = 0.1
"""Half the width of the 95 % interval of a recall of one half: beyond ten points two models are hard to tell apart."""


@check(
    "duplicate-captions",
    "warning",
    "Many images share a caption",
    f"more than {REPEATED:.0%} of the held-out captions are repeats; a note if only training captions are",
)
def duplicate_captions(summary: Summary, around: Surroundings) -> Found | Verdict:
    counted = {split: mapping(counts) for split, counts in mapping(summary.started.get("captions")).items()}
    shares = {split: share for split, counts in counted.items() if (share := _distinct_share(counts)) is not None}
    if not shares:
        return Verdict.UNKNOWN
    repeated = {split: share for split, share in shares.items() if share < 1 - REPEATED}
    if not repeated:
        return Verdict.CLEAR
    counts_text = [
        f"{split}: {counts['captions']:,} captions, {counts['distinct']:,} of them different"
        for split, counts in counted.items()
        if split in repeated
    ]
    held_out = next((split for split in ("val", "test") if split in repeated), None)
    if held_out is None:
        return Found(
            "; ".join(counts_text),
            "images that share a caption are never told apart in training; captions that say more would teach more",
            severity="note",
        )
    way_back = number(counted[held_out].get("told_apart"))
    ceiling = f"text-to-image R@1 can reach {repeated[held_out]:.1%} at most"
    other = f", image-to-text {way_back:.1%}" if way_back is not None else ""
    now = number(validated(summary).get("t2i_r1")) if held_out == "val" else None
    so_far = f" (now {now:.1%})" if now is not None else ""
    return Found(
        f"{'; '.join(counts_text)}; {ceiling}{so_far}{other}",
        "compare scores with that ceiling, not with 100 %; captions that say what is special of an image raise it",
    )


@check(
    "small-validation",
    "warning",
    "Too few held-out pairs to tell",
    f"the 95 % interval of a recall near one half is wider than {UNSURE:.0%} to either side",
)
def small_validation(summary: Summary, around: Surroundings) -> Found | Verdict:
    count = number(mapping(summary.started.get("pairs")).get("val"))
    if not count:
        return Verdict.UNKNOWN
    margin = 1.96 * math.sqrt(0.25 / count)
    if margin <= UNSURE:
        return Verdict.CLEAR
    match mapping(validated(summary).get("intervals")).get("t2i_r1"):
        case [low, high] if number(low) is not None and number(high) is not None:
            recall = f"; 95 % interval of the best R@1 {low:.1%} to {high:.1%}"
        case _:
            recall = ""
    needed = math.ceil(0.25 * (1.96 / UNSURE) ** 2)
    total = sum(numbers(mapping(summary.started.get("pairs")).values()))
    share = math.ceil(110 * needed / total) / 100 if total else 1.0  # a tenth more: they are drawn by chance
    more = f"gather more images: {needed} held-out ones of {total:,.0f} would leave too few to learn from"
    if share <= MOST_HELD_OUT:
        more = f"hold out {needed} pairs or more, unless the data names its splits: "
        more += around.train(f"data.held_out={share:g}")
    return Found(
        f"{count:,.0f} pairs tell a recall near 50 % to {margin:.0%} only{recall}",
        f"trust no smaller difference between two runs than {2 * margin:.0%}; {more}",
    )


def _distinct_share(counts: dict[str, Any]) -> float | None:
    captions, distinct = number(counts.get("captions")), number(counts.get("distinct"))
    return distinct / captions if captions and distinct is not None else None


CHECKS = (duplicate_captions, small_validation)
