"""OpenAI's `/v1/embeddings` and `/v1/models`, and what other servers added to them so that images fit in.

- infinity: `modality` says what the strings of `input` are.
- Jina: `input` is a list of `{"text": ...}` and `{"image": ...}`; `embedding_type` packs signs into bytes.
- vLLM: `messages` in place of `input`, with one text or one image; a CLIP has no vector of both together.

One model is served, so any `model` is taken for it, and the answer says its real name. A `model` that is a fingerprint
(16 hexadecimal digits) is a demand, as the header X-Lapclip-Model is.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError
from starlette.responses import Response

from lapclip.embedder import Encoder
from lapclip.serving.dialects import (
    LONGEST_LIST,
    Dialect,
    InTurns,
    json_answer,
    packed,
)
from lapclip.serving.dialects.own import TINY_IMAGE, Demand, GivenItem, Strict, Unicode, is_unicode
from lapclip.serving.items import Item, Text, image_from_text, is_image_text
from lapclip.serving.refusals import BadItem, Fault, Refusal, TooLarge, Unknown, Unsupported
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


class MessageImage(Strict):
    """An image of a message."""

    url: str = Field(description="A data URI.", examples=[TINY_IMAGE])
    detail: str | None = Field(None, description="Accepted; the model has one size.")


class Part(Strict):
    """A text or an image of a message."""

    type: Literal["text", "image_url"]
    text: Unicode | None = None
    image_url: MessageImage | None = None

    def item(self) -> Item:
        if self.type == "text" and self.text is not None and self.image_url is None:
            return Text(self.text)
        if self.type == "image_url" and self.image_url is not None and self.text is None:
            return image_from_text(self.image_url.url)
        raise BadItem(f"a part of type {self.type} has {self.type} and nothing else.")


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(Strict):
    """A message, as in a chat."""

    role: str
    content: Annotated[
        list[Part],
        Field(max_length=LONGEST_LIST, fail_fast=True),
        BeforeValidator(_as_parts, json_schema_input_type=str | list[Part]),
    ]


class EmbeddingsRequest(Strict):
    """Texts and images to embed: `input` or `messages`."""

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
                {
                    "model": "mine",
                    "messages": [
                        {
                            "role": "user",
                            "content": [{"type": "image_url", "image_url": {"url": TINY_IMAGE}}],
                        }
                    ],
                },
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
    messages: list[Message] | None = Field(
        None,
        description="In place of input, as vLLM has it: one text or one image, for one vector.",
        max_length=LONGEST_LIST,
        fail_fast=True,
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
    embedding_type: Literal["float", "base64", "binary", "ubinary"] | None = Field(
        None,
        description="As Jina has it, and before encoding_format, which some clients always send. "
        "binary and ubinary: the signs of eight numbers in a byte, from -128 or from 0 on.",
    )
    task: str | None = Field(
        None, description="Jina's; accepted, a CLIP has one vector for all tasks."
    )
    normalized: Literal[True] | None = Field(
        None, description="Jina's; vectors always have unit length."
    )
    truncate: Literal[True] | None = Field(
        None, description="Jina's; long texts are always cut to the context."
    )
    late_chunking: Literal[False] | None = Field(None, description="Jina's.")
    add_special_tokens: bool | None = Field(
        None, description="vLLM's; accepted, the tokenizer decides that."
    )
    continue_final_message: Literal[False] | None = Field(None, description="vLLM's.")

    def items(self) -> list[Item]:
        """What is to be embedded."""
        if (self.input is None) == (self.messages is None):
            raise BadItem("give either input or messages.", field="input")
        if self.messages is not None:
            return [_one_item(self.messages)]
        if not self.input:
            raise BadItem("There is nothing to embed.", field="input")
        return [self._item(given, position) for position, given in enumerate(self.input or [])]

    def _item(self, given: str | GivenItem, position: int) -> Item:
        if isinstance(given, GivenItem):
            return given.item(position)
        is_image = is_image_text(given) if self.modality is None else self.modality == "image"
        return image_from_text(given, position=position) if is_image else Text(given)

    @contextmanager
    def naming_fields(self) -> Iterator[None]:
        """Refusals of an item name the field that it was in. Messages are one item, whose position says nothing."""
        try:
            yield
        except Refusal as refusal:
            if self.messages is not None and isinstance(refusal, (BadItem, TooLarge, Fault)):
                refusal.field, refusal.position = "messages", None
            raise


class EmbeddingObject(BaseModel):
    """The vector of one item."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens that the model read: those of texts. Images have none."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(BaseModel):
    """In the order that was asked."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str = Field(description="The name under which the model is served.")
    usage: Usage


class ModelFacts(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int = Field(description="Since when it is served, in seconds since 1970.")
    owned_by: str
    fingerprint: str
    dimension: int
    context: int = Field(
        description="Tokens of a text that the model reads; what is longer is cut."
    )


class ModelList(BaseModel):
    """The models that are served: one."""

    object: Literal["list"]
    data: list[ModelFacts]


class OpenAIErrorFacts(BaseModel):
    """Why there is no answer."""

    message: str
    type: str = Field(examples=["invalid_request_error"])
    param: str | None = Field(examples=["input[1]"])
    code: str = Field(examples=["invalid_input"])


class OpenAIError(BaseModel):
    """Why there is no answer, in OpenAI's form."""

    error: OpenAIErrorFacts


def routes(service: Service) -> APIRouter:
    router = APIRouter(
        tags=["OpenAI"], responses={"default": {"model": OpenAIError, "description": "Refused"}}
    )

    @router.post(
        "/v1/embeddings",
        summary="Vectors, as OpenAI, infinity, Jina and vLLM are asked for them",
        response_model=EmbeddingsAnswer,
    )
    async def embeddings(request: EmbeddingsRequest, demand: Demand = None) -> Response:
        with InTurns(service, demand) as asked, request.naming_fields():
            _check_model(service, asked.model, request)
            items = request.items()
            vectors = await asked.embed("input", items)
            used = await _count_tokens(items, asked.model.encoder)
        written = packed(vectors, request.embedding_type or request.encoding_format or "float")
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

    @router.get("/v1/models", summary="The served model, as a list", response_model=ModelList)
    async def models(demand: Demand = None) -> Response:
        service.check_demand(demand)
        return json_answer({"object": "list", "data": [_facts(service.model)]})

    @router.get("/v1/models/{name:path}", summary="The served model", response_model=ModelFacts)
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


def _one_item(messages: Sequence[Message]) -> Item:
    """The text or the image of some messages. Empty texts beside an image are passed over, as vLLM does."""
    parts = [part for message in messages for part in message.content]
    if any(part.type == "image_url" for part in parts):
        parts = [part for part in parts if part.text != ""]
    if len(parts) != 1:
        raise BadItem(
            f"messages hold {len(parts)} texts and images. They get one vector, and a CLIP has no joint one.",
            field="messages",
            hint="one text or one image a request, or a list as input",
        )
    return parts[0].item()


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
