"""Several lists of one request, or a list longer than is admitted at once: taken in turns.

asked = InTurns(service, demand)
with asked:
    images = await asked.embed("images", images)
    sentences = await asked.embed("labels", sentences, each=5)

All vectors are of one model, and all turns end by one deadline. Each turn finds its own room in the queue, so a long
list holds nobody up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from lapclip.serving.items import Item
from lapclip.serving.refusals import Refusal, TooLarge
from lapclip.serving.service import Service

TURNS = 8
"""A list may be so many times as long as what is admitted at once: 2,048 items, as OpenAI takes, by default."""


class InTurns:
    """One request to one model."""

    def __init__(self, service: Service, demand: str | None) -> None:
        self._service, self.model = service, service.model
        service.check_demand(demand, self.model)
        self._deadline = time.monotonic() + service.limits.deadline

    def __enter__(self) -> InTurns:
        self.model.callers += 1  # else it might be retired between two turns
        return self

    def __exit__(self, *_: object) -> None:
        self.model.callers -= 1

    async def embed(self, field: str, items: Sequence[Item], each: int = 1) -> np.ndarray:
        """The vectors of one list. A refusal names its field; positions count what was sent, `each` items for one."""
        step = self._service.limits.items
        if len(items) > step * TURNS:
            of = "" if each == 1 else f" ({len(items) // each:,} with {each:,} sentences each)"
            raise TooLarge(f"{field} has {len(items):,} items{of}; at most {step * TURNS:,} are taken.", field=field)
        parts = []
        for at in range(0, len(items), step):
            try:
                answer = await self._service.embed(items[at : at + step], deadline=self._deadline, model=self.model)
            except Refusal as refusal:
                if refusal.position is not None:
                    refusal.position, refusal.field = (at + refusal.position) // each, field
                raise
            parts.append(answer.vectors)
        return np.concatenate(parts) if parts else np.zeros((0, self.model.dimension), np.float32)
