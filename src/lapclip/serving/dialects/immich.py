"""The machine-learning server of Immich: `/ping` and `/predict`, so that one's own model finds photos there.

Immich sends a form: `entries` says what is wanted, `image` or `text` holds of what. Embeddings (`clip`) are computed
here with the model that is served, under whatever name it is asked for: Immich's settings take published names alone,
and its database the dimension that goes with the name. So one chooses there a name whose dimension is the model's own
(512 as ViT-B-32__openai, 768 as ViT-L-14__openai, 1024 as RN50__openai), and has all photos embedded again whenever
another model is served. Faces and text recognition are asked at the same address; they are passed on to Immich's own
server (`--immich-upstream`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lapclip import http
from lapclip.data.decode import read_header
from lapclip.errors import ConfigError
from lapclip.serving.dialects import Dialect, json_answer
from lapclip.serving.dialects.own import Demand, Strict
from lapclip.serving.items import LARGEST_IMAGE, LONGEST_TEXT, ImageFile, Text
from lapclip.serving.refusals import BadItem, BadUpstream, Refusal, TooLarge, TooMany, Unsupported
from lapclip.serving.service import Service

# What callers send wrongly is answered; the package would also write it to stderr.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)

OPEN = ("/ping", "/predict")
"""Paths that are open without a key under `--immich`: Immich cannot send one."""
SECONDS = 120.0
"""For what is passed on: Immich's server may have to load its models first."""
AT_ONCE, MOST_WAITING = 8, 64
"""Requests that are passed on at the same time, and those that may wait for it besides."""
STATUSES = frozenset(status.value for status in HTTPStatus if status >= 200)
"""Of answers that can be passed on: servers between may send others, such as 524, which have no name."""
MOST_ANSWER = 16_000_000
"""Bytes of an answer to what was passed on."""
FIELDS = {"entries": 64_000, "image": LARGEST_IMAGE, "text": 4 * LONGEST_TEXT}
"""Fields of the form, and the bytes they may have."""
MOST_PARTS = 8
"""Parts of the form that are read: each takes its time, and a body has room for millions."""


class Options(Strict):
    language: str | None = None
    """Of a search. Changes nothing: the model knows the languages that it was trained on."""


class Entry(Strict):
    modelName: str
    options: Options | None = None


class Clip(Strict):
    """One of these, as the request has an image or a text."""

    visual: Entry | None = None
    textual: Entry | None = None


class Upstream:
    """Immich's own machine-learning server."""

    def __init__(self, url: str) -> None:
        address = http.server_url(url)
        if address is None or address.userinfo or address.query or address.fragment:
            raise ConfigError(
                f"{url} is no address of a server.",
                hint="--immich-upstream http://immich-machine-learning:3003",
            )
        self._url = address.copy_with(path=address.path.rstrip("/") + "/predict")
        self._name = f"The server of --immich-upstream ({address.netloc.decode()})"
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0

    async def predict(self, content_type: str, body: bytes) -> Response:
        """Return its answer to a form."""
        if self._waiting >= AT_ONCE + MOST_WAITING:
            raise TooMany("Too many requests wait for Immich's own server.", retry_after=5)
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        self._waiting += 1
        try:
            async with asyncio.timeout(SECONDS), self._slots:
                answer = await http.post(self._url, body, headers, max_bytes=MOST_ANSWER)
        except TimeoutError:
            raise BadUpstream(
                f"{self._name} did not answer within {SECONDS:.0f} seconds."
            ) from None
        except http.RequestFailed:
            raise BadUpstream(f"{self._name} did not answer.", hint="whether it runs") from None
        finally:
            self._waiting -= 1
        if answer.status not in STATUSES:
            raise BadUpstream(f"{self._name} answered with status {answer.status}.")
        kind = answer.headers.get("Content-Type", "")
        kind = " ".join(kind.split())  # it may be written in several lines
        media_type = kind if kind.isascii() and kind.isprintable() else ""
        return Response(answer.content, answer.status, media_type=media_type or None)


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["Immich"])

    @router.get("/ping", summary="Whether the server is there")
    async def ping() -> Response:
        return PlainTextResponse("pong")

    @router.post(
        "/predict",
        summary="What Immich asks of its machine-learning server",
    )
    async def predict(request: Request, demand: Demand = None) -> Response:
        content_type, body = request.headers.get("content-type", ""), await request.body()
        form = await asyncio.to_thread(read_form, content_type, body)
        entries = _entries(form)
        others = {task: types for task, types in entries.items() if task != "clip"}
        upstream: Upstream | None = request.app.state.immich_upstream
        if others and upstream is None:
            raise Unsupported(
                f"This server has no model for {', '.join(sorted(others))[:100]}.",
                hint="Immich's own server for it, with lapclip serve --immich-upstream http://immich-machine-learning:3003",
            )
        if "clip" not in entries:
            assert upstream is not None
            return await upstream.predict(content_type, body)
        found, fingerprint = await _clip(service, entries["clip"], form, demand)
        if others:
            assert upstream is not None
            answer = await upstream.predict(*write_form({**form, "entries": orjson.dumps(others)}))
            found = {**found, **_merged(answer), "clip": found["clip"]}
        return json_answer(found, headers={"X-Lapclip-Model": fingerprint})

    return router


def _entries(form: dict[str, bytes]) -> dict[str, Any]:
    """What is wanted: tasks, and in each the models by type."""
    try:
        entries = orjson.loads(form.get("entries", b""))
    except orjson.JSONDecodeError:
        entries = None
    if not entries or not isinstance(entries, dict):
        raise Refusal("entries: it is no JSON object with a task.", field="entries")
    return entries


async def _clip(
    service: Service, asked: Any, form: dict[str, bytes], demand: str | None
) -> tuple[dict[str, Any], str]:
    """The embedding of the image or the text, written as Immich's server writes it, and the model's fingerprint."""
    try:
        clip = Clip.model_validate(asked)
    except ValidationError as error:
        raise RequestValidationError(
            [
                {**each, "loc": ("entries", "clip", *each["loc"])}
                for each in error.errors(include_input=False)
            ]
        ) from None
    kind = "image" if clip.visual else "text"
    if (clip.visual is None) == (clip.textual is None):
        raise Refusal("entries.clip: ask for either visual or textual.", field="entries")
    if kind not in form:
        raise Refusal(f"{kind}: it is missing.", field=kind)
    if kind == "text":
        answer = await service.embed([Text(_text(form["text"]))], demand=demand)
        size = {}
    else:
        answer = await service.embed([ImageFile(form["image"])], demand=demand)
        width, height = await asyncio.to_thread(lambda: read_header(form["image"]).image.size)
        size = {"imageHeight": height, "imageWidth": width}
    written = orjson.dumps(answer.vectors[0], option=orjson.OPT_SERIALIZE_NUMPY).decode()
    return {"clip": written, **size}, answer.fingerprint


def _text(field: bytes) -> str:
    try:
        return field.decode()
    except UnicodeDecodeError:
        raise BadItem("text: it is not in UTF-8.", field="text") from None


def _merged(answer: Response) -> dict[str, Any]:
    """The answer of Immich's own server to the rest of a request."""
    try:
        found = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        found = None
    if answer.status_code != 200 or not isinstance(found, dict):
        raise BadUpstream(
            f"The server of --immich-upstream answered with status {answer.status_code}."
        )
    return found


def read_form(content_type: str, body: bytes) -> dict[str, bytes]:
    """The fields of a form, in memory. Raises where there are others than Immich sends, or more of them."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise Refusal("The request is no form (multipart/form-data).")
    form: dict[str, list[bytes]] = {}
    header: list[bytes] = [b"", b""]
    field: list[bytes] = []
    parts = 0

    def part_begins() -> None:
        nonlocal field, parts
        field, parts = [], parts + 1
        if parts > MOST_PARTS:
            raise Refusal(f"The form has more than {MOST_PARTS} parts.", hint=", ".join(FIELDS))

    def header_ends() -> None:
        if header[0].lower() == b"content-disposition":
            name = parse_options_header(header[1])[1].get(b"name", b"").decode("utf-8", "replace")
            if name not in FIELDS or name in form:
                raise Refusal(
                    "The form has a field that is unknown, or one of them twice.",
                    hint=", ".join(FIELDS),
                )
            form[name] = field
        header[:] = [b"", b""]

    def header_grows(index: int) -> Any:
        def grow(data: bytes, begin: int, end: int) -> None:
            header[index] += data[begin:end]

        return grow

    def part_grows(data: bytes, begin: int, end: int) -> None:
        field.append(data[begin:end])

    ended: list[bool] = []
    callbacks: Any = {
        "on_part_begin": part_begins,
        "on_header_field": header_grows(0),
        "on_header_value": header_grows(1),
        "on_header_end": header_ends,
        "on_part_data": part_grows,
        "on_end": lambda: ended.append(True),
    }
    try:
        parser = MultipartParser(options[b"boundary"], callbacks)
        parser.write(body)
        parser.finalize()
    except FormParserError:
        ended.clear()
    if not ended:
        raise Refusal("The form is damaged, or ends early.")
    fields = {name: b"".join(pieces) for name, pieces in form.items()}
    for name, content in fields.items():
        if len(content) > FIELDS[name]:
            raise TooLarge(f"{name}: it has more than {FIELDS[name]:,} bytes.", field=name)
    return fields


def write_form(fields: dict[str, bytes]) -> tuple[str, bytes]:
    """The content type and the body of a form."""
    boundary = secrets.token_hex(16)
    parts = []
    for name, content in fields.items():
        file = (
            '; filename="image"\r\nContent-Type: application/octet-stream'
            if name == "image"
            else ""
        )
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
        parts += [head.encode(), content, b"\r\n"]
    return f"multipart/form-data; boundary={boundary}", b"".join(
        [*parts, f"--{boundary}--\r\n".encode()]
    )


def error(refusal: Refusal) -> dict[str, Any]:
    """As FastAPI writes errors, which Immich's own server is made with."""
    return {"detail": refusal.reason}


Dialect("immich", ("/ping", "/predict"), routes, error)
