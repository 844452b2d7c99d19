"""What scores of retrieval are called, for those who compute them and those who show them."""

from __future__ import annotations

WAYS = {"t2i": "text to image", "i2t": "image to text"}
RANKS = (1, 5, 10)
"""Recall is the share of right answers among the first so many."""
