"""The dialects that clients speak, one file each. A dialect registers its paths, its routes and its form of an error.

A new dialect is one file here that makes a `Dialect` at its end, and its name in `load_dialects`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response
from starlette.types import Scope

from lapclip.serving.refusals import Refusal

if TYPE_CHECKING:
    from fastapi import APIRouter

    from lapclip.serving.service import Service

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
    for name in ("own", "openai", "cohere", "immich"):
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
    if refusal.status == 409:  # it will be another model the next time too; clients of OpenAI's kind would ask again
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
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), status, headers, "application/json")
