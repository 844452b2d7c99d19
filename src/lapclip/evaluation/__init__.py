"""Evaluation: how well a model finds images by captions, and captions by images.

Here is what its metrics are called, for those who compute them and those who show them without numpy or torch.
"""

from __future__ import annotations

from collections.abc import Mapping

WAYS = {"t2i": "text to image", "i2t": "image to text"}
RANKS = (1, 5, 10)
"""Recall is the share of right answers among the first so many."""
FEW = 20
"""Candidates below which a score says little."""


def note_on_few(candidates: int) -> list[str]:
    """A warning where there are so few candidates that chance or a single image decides the scores."""
    if candidates >= FEW:
        return []
    found = "1 candidate" if candidates == 1 else f"{candidates} candidates"
    # The lower end of Wilson's interval where all are right (intervals.py, which takes numpy).
    least = candidates / (candidates + 1.96**2)
    return [
        f"Only {found} held out: chance alone is right in {1 / candidates:.0%} of cases, so these scores say little; "
        f"all {candidates} right means {least:.0%} to 100% (95 % interval)."
    ]


def note_on_held_out(images: Mapping[str, int]) -> list[str]:
    """The same before a run, which is scored on `val`, and at its end on `test` where there is one."""
    few = {split: images[split] for split in ("val", "test") if 0 < images.get(split, FEW) < FEW}
    return [f"{split}: {note_on_few(count)[0]}" for split, count in few.items()]
