"""Images by their https address, for `lapclip serve --allow-urls`.

`lapclip.http.fetch_public` decides which addresses are fetched. Here are the limits on how many images are fetched at the
same time, and on the bytes that they take.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from lapclip import http
from lapclip.serving.items import LARGEST_IMAGE, ImageAddress, ImageFile, Item, Loaded
from lapclip.serving.refusals import BadItem, Refusal, TooLarge, TooMany, Unavailable

SECONDS = 10.0  # from the start of a fetch to its last byte, lookups and redirects included
MAX_CONCURRENT = 8
MAX_WAITING = 512  # fetches that wait or run; beyond it requests are refused at once
# Stores of files often know no type, and send the second or third.
CONTENT_TYPES = ("image/", "application/octet-stream", "binary/octet-stream")


class Fetcher:
    """Fetches the images of requests, a few at the same time."""

    def __init__(self, request_bytes: int, all_bytes: int) -> None:
        self._tls = http.tls_context()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._waiting = 0
        self._budget = _Budget(request_bytes, all_bytes)

    @asynccontextmanager
    async def fetched(self, items: Sequence[Item], deadline: float) -> AsyncIterator[list[Loaded]]:
        """Yield the items, with images in place of addresses. Their bytes are released at the end of the block.

        Raises a `Refusal` with the position of the first image that could not be fetched, and ends the other fetches.
        """
        count = sum(isinstance(item, ImageAddress) for item in items)
        if self._waiting and self._waiting + count > MAX_WAITING:
            raise TooMany(f"{self._waiting:,} images wait to be fetched.", retry_after=SECONDS / 2)
        share = _Share(self._budget)
        self._waiting += count
        tasks: dict[int, asyncio.Task[ImageFile]] = {}
        for position, item in enumerate(items):
            if isinstance(item, ImageAddress):
                tasks[position] = asyncio.create_task(self._fetch(item.url, share))
        try:
            await self._wait(tasks, deadline)
            self._waiting -= count
            count = 0
            loaded: list[Loaded] = []
            for position, item in enumerate(items):
                if isinstance(item, ImageAddress):
                    loaded.append(tasks[position].result())
                else:
                    loaded.append(item)
            yield loaded
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            self._waiting -= count
            share.release()

    async def _wait(self, tasks: dict[int, asyncio.Task[ImageFile]], deadline: float) -> None:
        """Wait until all images are fetched. Raise the first error, and `Unavailable` at the deadline."""
        await asyncio.wait(
            tasks.values(),
            timeout=max(0.0, deadline - time.monotonic()),
            return_when=asyncio.FIRST_EXCEPTION,
        )
        for position, task in tasks.items():
            if not task.done():
                continue
            error = task.exception()
            if isinstance(error, Refusal) and error.position is None:
                error.position = position
            if error is not None:
                raise error
        if not all(task.done() for task in tasks.values()):
            raise Unavailable("The images were not fetched before the deadline.")

    async def _fetch(self, url: str, share: _Share) -> ImageFile:
        async with self._slots:
            try:
                content = await http.fetch_public(
                    url,
                    self._tls,
                    content_types=CONTENT_TYPES,
                    max_bytes=LARGEST_IMAGE,
                    seconds=SECONDS,
                    on_bytes=share.take,
                )
            except http.AnswerTooLarge as error:
                raise TooLarge(str(error)) from None
            except http.TooManyLookups:
                raise Unavailable("Too many names of hosts are being looked up.") from None
            except http.RequestFailed as error:
                raise BadItem(str(error)) from None
        return ImageFile(content)


class _Budget:
    """Bytes that one request, and all together, may have fetched and still hold."""

    def __init__(self, request_bytes: int, all_bytes: int) -> None:
        self.request_bytes, self.all_bytes, self.taken = request_bytes, all_bytes, 0


class _Share:
    """Bytes of the images of one request."""

    def __init__(self, budget: _Budget) -> None:
        self._budget, self._taken = budget, 0

    def take(self, size: int) -> None:
        budget = self._budget
        if self._taken + size > budget.request_bytes:
            raise TooLarge(
                f"the images of one request may have {budget.request_bytes // 10**6} MB together."
            )
        if budget.taken + size > budget.all_bytes:
            raise Unavailable("Too many bytes are on their way to this server.")
        self._taken += size
        budget.taken += size

    def release(self) -> None:
        self._budget.taken -= self._taken
        self._taken = 0
