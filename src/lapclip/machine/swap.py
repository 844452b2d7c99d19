"""Whether the system began to swap because of this process.

The allocators of the CPU and of MPS rarely refuse: the system swaps instead, and a step that took a second takes a
minute. So growing swap is looked for.
"""

from __future__ import annotations

import time

from lapclip.machine import facts

EVERY_SECONDS = 5.0
LEAST_BYTES = 1 << 30
LEAST_SHARE = 0.10
"""Swap that grows by less than this share of memory is the system tidying up."""
OWN_SHARE = 0.5
"""The process must have grown by this share of what was swapped; else another program is the cause."""


class SwapWatch:
    """Compares now with the beginning, at most every few seconds. After a find, now is the new beginning."""

    def __init__(self) -> None:
        self._least = max(LEAST_BYTES, LEAST_SHARE * facts.total_bytes())
        self._begin()

    def grown(self) -> int | None:
        """By how many bytes swap has grown with this process, once it is more than the system's tidying up."""
        if time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + EVERY_SECONDS
        swapped = facts.swap_bytes() - self._first_swap
        if swapped < self._least or facts.held_bytes() - self._first_held < OWN_SHARE * swapped:
            return None
        self._begin()
        return swapped

    def _begin(self) -> None:
        self._first_swap, self._first_held = facts.swap_bytes(), facts.held_bytes()
        self._next_look = time.monotonic() + EVERY_SECONDS
