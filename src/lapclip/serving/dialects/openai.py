"""OpenAI's `/v1/embeddings` and `/v1/models`, with what other servers added for images.

- infinity: `modality` says what the strings of `input` are.
- Jina: `input` is a list of `{"text": ...}` and `{"image": ...}`.

One model is served, so any `model` is taken for it, and the answer says its real name. A `model` that is a fingerprint
(16 hexadecimal digits) is a demand, as the header X-Lapclip-Model is.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import ConfigDict, Field, PlainValidator, ValidationError
from starlette.responses import Response

from lapclip.embedder import Encoder
from lapclip.serving.dialects import (
    Dialect,
    InTurns,
    json_answer,
)
from lapclip.serving.dialects.own import TINY_IMAGE, Demand, GivenItem, Strict, is_unicode
from lapclip.serving.items import Item, Text, image_from_text, is_image_text
from lapclip.serving.refusals import BadItem, Refusal, Unknown, Unsupported
from lapclip.serving.service import ServedModel, Service

FINGERPRINT = re.compile(r"[0-9a-f]{16}")
COUNTED_AT_ONCE = 64
"""Texts whose tokens are counted without a thread."""


def _read_input(given: Any) -> list[str | GivenItem] | None:
    """A string or a list of strings and objects. By hand, because errors of a union name every way to be wrong."""
    if given is None:
        return None
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list):
        raise BadItem("input has to be a string or a list.", field="input")
    return [_read_one(one, position) for position, one in enumerate(given)]


def _read_one(given: Any, position: int) -> str | GivenItem:
    if isinstance(given, str) and is_unicode(given):
        return given
    if isinstance(given, dict):
        try:
            return GivenItem.model_validate(given)
        except ValidationError:
            raise BadItem(
                'an object has to be {"text": "..."} or {"image": "..."}.',
                position=position,
                field="input",
            ) from None
    if _is_token(given) or (isinstance(given, list) and given and all(map(_is_token, given))):
        raise Unsupported(
            "input holds token ids, which mean something else to this model.",
            field="input",
            hint="texts as strings; in LangChain OpenAIEmbeddings(check_embedding_ctx_length=False)",
        )
    raise BadItem(
        "it has to be a string, of whole characters, or an object.",
        position=position,
        field="input",
    )


def _is_token(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


class EmbeddingsRequest(Strict):
    """Texts and images to embed."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"model": "mine", "input": ["a red bicycle", TINY_IMAGE]},
                {
                    "model": "mine",
                    "input": [TINY_IMAGE],
                    "modality": "image",
                    "encoding_format": "base64",
                },
                {"model": "mine", "input": [{"text": "a red bicycle"}, {"image": TINY_IMAGE}]},
            ]
        },
    )

    input: Annotated[
        list[str | GivenItem] | None,
        PlainValidator(_read_input, json_schema_input_type=str | list[str | GivenItem] | None),
    ] = Field(
        None,
        description="A string, or a list of strings and objects. A string that is a data URI of an image is one.",
    )
    model: str | None = Field(
        None,
        description="Any name; a fingerprint (16 hexadecimal digits) has to be that of the served model.",
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: float32 numbers, the least significant byte first."
    )
    dimensions: int | None = Field(None, description="Only the dimension that the model has.")
    user: str | None = Field(None, description="Accepted, and neither used nor kept.")
    modality: Literal["text", "image"] | None = Field(
        None,
        description="What the strings of input are, as infinity has it; images are data URIs or base64.",
    )
    embedding_type: Literal["float", "base64"] | None = Field(
        None, description="Jina's name for encoding_format, which some clients send as well."
    )
    task: str | None = Field(
        None, description="Jina's; accepted, a CLIP has one vector for all tasks."
    )
    normalized: Literal[True] | None = Field(
        None, description="Jina's; vectors always have unit length."
    )

    def items(self) -> list[Item]:
        """What is to be embedded."""
        if not self.input:
            raise BadItem("There is nothing to embed.", field="input")
        return [self._item(given, position) for position, given in enumerate(self.input)]

    def _item(self, given: str | GivenItem, position: int) -> Item:
        if isinstance(given, GivenItem):
            return given.item(position)
        is_image = is_image_text(given) if self.modality is None else self.modality == "image"
        return image_from_text(given, position=position) if is_image else Text(given)


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post(
        "/v1/embeddings", summary="Vectors, as OpenAI, infinity and Jina are asked for them"
    )
    async def embeddings(request: EmbeddingsRequest, demand: Demand = None) -> Response:
        with InTurns(service, demand) as asked:
            _check_model(service, asked.model, request)
            items = request.items()
            vectors = await asked.embed("input", items)
            used = await _count_tokens(items, asked.model.encoder)
        written: Any = vectors
        if "base64" in (request.embedding_type, request.encoding_format):
            written = [
                base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors
            ]
        content = {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": one}
                for index, one in enumerate(written)
            ],
            "model": asked.model.name,
            "usage": {"prompt_tokens": used, "total_tokens": used},
        }
        return json_answer(content, headers={"X-Lapclip-Model": asked.model.fingerprint})

    @router.get("/v1/models", summary="The served model, as a list")
    async def models(demand: Demand = None) -> Response:
        service.check_demand(demand)
        return json_answer({"object": "list", "data": [_facts(service.model)]})

    @router.get("/v1/models/{name:path}", summary="The served model")
    async def model(name: str, demand: Demand = None) -> Response:
        service.check_demand(demand)
        if name not in (service.model.name, service.model.fingerprint):
            refusal = Unknown(f"Only the model {service.model.name} is served here.", field="model")
            refusal.code = "model_not_found"
            raise refusal
        return json_answer(_facts(service.model))

    return router


def _check_model(service: Service, model: ServedModel, request: EmbeddingsRequest) -> None:
    """Refuse a fingerprint and a dimension other than the model's. Any other name stands for the served model."""
    name = request.model
    if name is not None and name != model.name and FINGERPRINT.fullmatch(name):
        service.check_demand(name, model)
    if request.dimensions not in (
        None,
        0,
        model.dimension,
    ):  # infinity's client sends 0 for the model's own
        raise Unsupported(
            f"dimensions: the vectors of this model have {model.dimension} numbers and cannot be cut.",
            field="dimensions",
            hint=f"dimensions={model.dimension}, or leave it out",
        )


async def _count_tokens(items: Sequence[Item], encoder: Encoder) -> int:
    texts = [item for item in items if isinstance(item, Text)]

    def count() -> int:
        return sum(len(text.tokens(encoder)) for text in texts)

    return count() if len(texts) <= COUNTED_AT_ONCE else await asyncio.to_thread(count)


def _facts(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.since),
        "owned_by": "lapclip",
        "fingerprint": model.fingerprint,
        "dimension": model.dimension,
        "context": model.encoder.context,
    }


def error(refusal: Refusal) -> dict[str, Any]:
    """OpenAI's form of an error."""
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    code = refusal.code
    if refusal.status == 429:
        kind, code = "rate_limit_error", "rate_limit_exceeded"
    param = (
        refusal.field
        if refusal.position is None
        else f"{refusal.field or 'input'}[{refusal.position}]"
    )
    return {"error": {"message": refusal.reason, "type": kind, "param": param, "code": code}}


Dialect("openai", ("/v1/embeddings", "/v1/models"), routes, error)
