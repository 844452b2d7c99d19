"""The dialects that clients speak, one file each. A dialect registers its paths, its routes and its form of an error.

A new dialect is one file here that makes a `Dialect` at its end, and its name in `load_dialects`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from starlette.responses import Response
from starlette.types import Scope

from lapclip.serving.items import Item
from lapclip.serving.refusals import Refusal, TooLarge
from lapclip.text import to_json

if TYPE_CHECKING:
    from fastapi import APIRouter

    from lapclip.serving.service import Service

LONGEST_LIST = 2048
"""Items of a list that is read at all, as many as OpenAI takes. What is admitted may be less: see `InTurns`."""
REFUSED = "lapclip.refused"
"""Where the scope of a request holds the code of its refusal, for the metrics."""
_DIALECTS: list[Dialect] = []


@dataclass(frozen=True)
class Dialect:
    """How one kind of client asks and hears of errors."""

    name: str
    paths: tuple[str, ...]
    """Its paths are these, and what lies below them."""
    routes: Callable[[Service], APIRouter]
    error: Callable[[Refusal], dict[str, Any]]
    """A refusal in its own form."""

    def __post_init__(self) -> None:
        _DIALECTS.append(self)


def load_dialects() -> list[Dialect]:
    """All dialects, registered by their files."""
    for name in ("own", "openai", "immich"):
        importlib.import_module(f"lapclip.serving.dialects.{name}")
    return _DIALECTS


def answer_refusal(scope: Scope, refusal: Refusal) -> Response:
    """A refusal in the form of the dialect whose path was asked."""
    path, scope[REFUSED] = scope["path"], refusal.code
    found = [
        (len(begin), each.error)
        for each in _DIALECTS
        for begin in each.paths
        if path == begin or path.startswith(begin.rstrip("/") + "/")
    ]
    error = max(found, key=lambda each: each[0])[1] if found else plain_error  # the closest
    headers = {}
    if refusal.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(refusal.retry_after)))
    if (
        refusal.status == 409
    ):  # it will be another model the next time too; clients of OpenAI's kind would ask again
        headers["X-Should-Retry"] = "false"
    return json_answer(error(refusal), refusal.status, headers)


def plain_error(refusal: Refusal) -> dict[str, Any]:
    """Our own form of an error."""
    found: dict[str, Any] = {"code": refusal.code, "message": refusal.reason}
    if refusal.position is not None:
        found["position"] = refusal.position
    if refusal.field is not None:
        found["field"] = refusal.field
    return {"error": found}


def json_answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON, with arrays of numpy written as they are."""
    try:
        written = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:  # half a character, as in names of files that are no text
        written = to_json(content).encode()
    return Response(written, status, headers, "application/json")


TURNS = 8
"""A list may be so many times as long as what is admitted at once: 2,048 items, as OpenAI takes, by default."""


class InTurns:
    """One request to one model: several lists, or one that is longer than is admitted at once, taken in turns.

        with InTurns(service, demand) as asked:
            images = await asked.embed("images", images)
            sentences = await asked.embed("labels", sentences, each=5)

    All vectors are of one model, and all turns end by one deadline. Each turn finds its own room in the queue, so a
    long list holds nobody up.
    """

    def __init__(self, service: Service, demand: str | None) -> None:
        self._service, self.model = service, service.model
        service.check_demand(demand, self.model)
        self._deadline = service.deadline()

    def __enter__(self) -> InTurns:
        self.model.hold()  # else it might be retired between two turns
        return self

    def __exit__(self, *_: object) -> None:
        self.model.release()

    def check_count(self, field: str, count: int, each: int = 1) -> None:
        """Refuse a list that is too long."""
        most = self._service.limits.items * TURNS
        if count > most:
            of = "" if each == 1 else f" ({count // each:,} with {each:,} sentences each)"
            raise TooLarge(
                f"{field} has {count:,} items{of}; at most {most:,} are taken.", field=field
            )

    async def embed(self, field: str, items: Sequence[Item], each: int = 1) -> np.ndarray:
        """The vectors of one list. A refusal names its field; positions count what was sent, `each` items for one."""
        self.check_count(field, len(items), each)
        step, parts = self._service.limits.items, []
        for at in range(0, len(items), step):
            try:
                answer = await self._service.embed(
                    items[at : at + step], deadline=self._deadline, model=self.model
                )
            except Refusal as refusal:
                if refusal.position is not None:
                    refusal.position, refusal.field = (at + refusal.position) // each, field
                raise
            parts.append(answer.vectors)
        return np.concatenate(parts) if parts else np.zeros((0, self.model.dimension), np.float32)
