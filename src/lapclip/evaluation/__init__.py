"""Evaluation: how well a model finds images by captions, and captions by images.

Here is what its metrics are called, for those who compute them and those who show them without numpy or torch.
"""

from __future__ import annotations

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
    return [f"Only {found}: chance alone is right in {1 / candidates:.0%} of cases, so these scores say little."]
