"""`/search`: the images of a folder, found by the served model.

An index belongs to the model that made it. When the served model is replaced, the index and its own model go on to
answer, exactly as before, while the images are embedded again in the background; then both are replaced at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from lapclip.errors import LapclipError, SearchError, first_line
from lapclip.progress import Progress, Status
from lapclip.searching.library import Answer, Library, library_of
from lapclip.searching.query import parse, parse_since
from lapclip.searching.search_model import SearchModel
from lapclip.serving.dialects import json_answer
from lapclip.serving.dialects.own import Demand, Strict
from lapclip.serving.items import Item, Text, image_from_text
from lapclip.serving.refusals import Refusal, Unavailable, Unknown
from lapclip.serving.service import ServedModel, Service
from lapclip.which_model import WhichModel

RESCAN_SECONDS = 60.0
"""Seconds between two looks for new and changed images."""
MOST = 1000
"""Images of one answer."""
LARGEST_NUMBER = 2**63 - 1


class SearchRequest(Strict):
    """Exactly one of query, image and like."""

    query: str | None = Field(None, description="Words; `-word` is not wanted.", max_length=1000)
    image: str | None = Field(None, description="An image: base64 of a file, or a data URI.")
    like: int | None = Field(
        None, description="The number of an image in the index.", ge=0, le=LARGEST_NUMBER
    )
    limit: int = Field(10, ge=1, le=MOST)
    offset: int = Field(0, ge=0, le=LARGEST_NUMBER)
    since: str | None = Field(
        None, description="A date such as 2024-05-01, or an age such as 30d.", max_length=40
    )
    exclude: list[Annotated[str, Field(max_length=200)]] = Field(
        default_factory=list, description="Globs of paths that are left out.", max_length=20
    )


class FolderSearch:
    """A folder's index with the model that made it, kept up to date."""

    def __init__(
        self,
        folder: Path,
        service: Service,
        which: WhichModel,
        progress: Progress | None = None,
        waiting: Status | None = None,
    ) -> None:
        self._folder, self._service, self._which = folder.absolute(), service, which
        model = service.hold_model()
        self._search_model: SearchModel | None = None
        self._current = self._library(model, progress, waiting), model
        self._wake, self._closing = threading.Event(), False
        service.listeners.append(self._wake.set)
        self._thread = threading.Thread(target=self._keep_up, name="lapclip-index", daemon=True)
        self._thread.start()

    @property
    def current(self) -> tuple[Library, ServedModel]:
        """The index that answers now, and the model that made it."""
        return self._current

    async def find(
        self, request: SearchRequest, demand: str | None
    ) -> tuple[Answer, Library, ServedModel]:
        """The images that fit, and how to read them. The question goes through the queue of the model that made the
        index."""
        library, model = self._current
        self._service.check_demand(demand, model)
        if sum(given is not None for given in (request.query, request.image, request.like)) != 1:
            raise Refusal("Give exactly one of query, image and like.")
        since = parse_since(request.since) if request.since else None
        span = request.limit, request.offset, since, tuple(request.exclude)
        if request.like is not None:
            if await self._from_index(library.entry, request.like) is None:
                raise Unknown(f"There is no image {request.like} in the index.")
            return Answer(await self._from_index(library.like, request.like, *span)), library, model
        if request.image is not None:
            items: list[Item] = [image_from_text(request.image, position=0)]
            question = (await self._service.embed(items, model=model)).vectors[0]
            return Answer(await self._from_index(library.near, question, *span)), library, model
        query = parse(request.query or "")
        items = [Text(text) for text in (query.wanted, *query.unwanted) if text]
        vectors = (await self._service.embed(items, model=model)).vectors
        return (
            await self._from_index(library.ask, query, *span, lambda texts: vectors),
            library,
            model,
        )

    async def _from_index(self, ask: Callable[..., Any], *given: Any) -> Any:
        """In a thread, because files are read. What is wrong with them is not the caller's fault, who is not told where
        they lie."""
        try:
            return await asyncio.to_thread(ask, *given)
        except SearchError as error:
            self._service.notes["index"] = (
                f"The index of the folder cannot be read: {first_line(error)}"
            )
            raise Unavailable(
                "The index of the folder cannot be read at the moment.", retry_after=10
            ) from None

    def close(self) -> None:
        """End the thread that keeps the index up to date."""
        self._closing = True
        self._wake.set()

    def _library(
        self, model: ServedModel, progress: Progress | None = None, waiting: Status | None = None
    ) -> Library:
        if self._search_model is None or self._search_model.model is not model.encoder:
            self._search_model = SearchModel(
                self._which, model.encoder
            )  # its fingerprint takes all weights to make
        return library_of(self._folder, self._search_model, progress, waiting)

    def _keep_up(self) -> None:
        """In a thread: look for new images now and then, and embed all again when the model was replaced."""
        while not self._closing:
            self._wake.wait(RESCAN_SECONDS)
            self._wake.clear()
            if self._closing:
                return
            target, (_, before) = self._service.hold_model(), self._current
            try:
                self._current = self._library(target), target
            except Exception as error:  # whatever it is: what is there goes on to answer, and the next turn tries again
                target.release()
                self._service.notes["index"] = (
                    f"The index of the folder is not up to date: {first_line(error)}"
                )
                continue
            before.release()
            self._service.notes.pop("index", None)
            if target is not self._service.model:  # replaced once more in the meantime
                self._wake.set()


def search_routes(search: FolderSearch) -> APIRouter:
    router = APIRouter(tags=["lapclip"])

    @router.post(
        "/search",
        summary="The images of the served folder that fit words or an image, the nearest first",
    )
    async def find(request: SearchRequest, demand: Demand = None) -> Response:
        try:
            answer, library, model = await search.find(request, demand)
        except LapclipError as error:
            raise error if isinstance(error, Refusal) else Refusal(error.message) from None
        results: list[dict[str, Any]] = [
            {
                "path": hit.path.relative_to(library.folder).as_posix(),
                "score": hit.score,
                "number": hit.number,
            }
            for hit in answer.hits
        ]
        content = {
            "results": results,
            "correction": answer.correction,
            "indexed": library.count,
            "model": model.fingerprint,
        }
        return json_answer(content, headers={"X-Lapclip-Model": model.fingerprint})

    return router
