"""Cohere's `/v2/embed`, and `/v1/embed` for clients of its first version.

Types of embeddings, all of them made of the same vector of unit length, and by the same rule for every request, so that
what was asked for today compares with what was stored before:

- `float`, and `base64`: the numbers, or their bytes as little-endian float32.
- `int8`: 127 times each number, rounded: no number is off by more than 1/254, and dot products and cosines can be used.
- `uint8`: the same plus 128.
- `ubinary`: one bit for each number, 1 where it is positive, the first in the highest bit; eight of them are a byte.
- `binary`: the same less 128, as a signed byte.

`input_type` changes nothing: CLIP embeds a query as it embeds a document.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal, get_args

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from lapclip.serving.dialects import LONGEST_LIST, Dialect, check_model_name, json_answer, packed
from lapclip.serving.dialects.own import Demand, Strict, Unicode
from lapclip.serving.items import Item, Text, image_from_text
from lapclip.serving.refusals import BadItem, Refusal, Unsupported
from lapclip.serving.service import Answer, Service

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
InputType = Literal["search_document", "search_query", "classification", "clustering", "image"]


class TextPart(Strict):
    type: Literal["text"]
    text: Unicode


class ImageUrl(Strict):
    url: str = Field(description="A data URI.")


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class Input(Strict):
    """One text or one image: CLIP has no vector for both together."""

    content: list[Annotated[TextPart | ImagePart, Field(discriminator="type")]] = Field(
        min_length=1, max_length=LONGEST_LIST, fail_fast=True
    )


class CohereRequest(Strict):
    """What both versions have."""

    texts: list[Unicode] | None = Field(None, max_length=LONGEST_LIST)
    images: list[str] | None = Field(None, description="Data URIs.", max_length=LONGEST_LIST)
    embedding_types: list[EmbeddingType] | None = Field(
        None, max_length=len(get_args(EmbeddingType))
    )
    truncate: Literal["NONE", "START", "END"] = Field("END", description="END or NONE.")

    def lists(self) -> dict[str, list[Any] | None]:
        return {"texts": self.texts, "images": self.images}

    def items(self) -> list[Item]:
        """What is to be embedded."""
        given = {name: found for name, found in self.lists().items() if found is not None}
        if len(given) != 1:
            raise BadItem(f"Give exactly one of {', '.join(self.lists())}.")
        if self.truncate == "START":
            raise Unsupported(
                "truncate: texts can be cut at the end alone (END), or not (NONE).",
                field="truncate",
            )
        ((kind, found),) = given.items()
        return [self._item(kind, each, position) for position, each in enumerate(found)]

    def _item(self, kind: str, given: Any, position: int) -> Item:
        if kind == "texts":
            return Text(given, whole=self.truncate == "NONE")
        if kind == "images":
            return image_from_text(given, position=position)
        if len(given.content) != 1:
            raise BadItem(
                "an input can have one text or one image, not several parts.", position=position
            )
        part = given.content[0]
        if isinstance(part, TextPart):
            return self._item("texts", part.text, position)
        return self._item("images", part.image_url.url, position)


class EmbedV1(CohereRequest):
    """Texts or images, as Cohere's first version has them."""

    model: str | None = Field(
        None, description="Any name; a fingerprint has to be that of the served model."
    )
    input_type: InputType | None = Field(
        None, description="Changes nothing: CLIP embeds all of them alike."
    )


class EmbedV2(CohereRequest):
    """Texts, images, or inputs that are one of them each."""

    model: str = Field(description="Any name; a fingerprint has to be that of the served model.")
    input_type: InputType = Field(description="Changes nothing: CLIP embeds all of them alike.")
    inputs: list[Input] | None = Field(None, max_length=LONGEST_LIST, fail_fast=True)
    output_dimension: int | None = Field(
        None, description="The dimension of the model, and no other."
    )
    max_tokens: int | None = Field(None, description="Not supported.")
    priority: int | None = Field(
        None, description="Changes nothing: requests are answered in their order."
    )

    def lists(self) -> dict[str, list[Any] | None]:
        return {**super().lists(), "inputs": self.inputs}


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["Cohere"])

    async def embed(request: EmbedV1 | EmbedV2, demand: str | None) -> Answer:
        named = check_model_name(service, service.model, request.model)
        return await service.embed(
            request.items(), demand=demand or named
        )  # asked again once images are fetched

    def answer(request: CohereRequest, made: Answer, version: str) -> Response:
        content = {
            "id": str(uuid.uuid4()),
            "response_type": "embeddings_by_type",
            "embeddings": {
                kind: typed(made.vectors, kind) for kind in request.embedding_types or ["float"]
            },
            "texts": request.texts or [],
            "meta": {"api_version": {"version": version}},
        }
        if version == "1" and not request.embedding_types:
            content |= {"response_type": "embeddings_floats", "embeddings": made.vectors}
        return json_answer(content, headers={"X-Lapclip-Model": made.fingerprint})

    @router.post("/v2/embed", summary="Embeddings, as Cohere's API gives them")
    async def embed_v2(request: EmbedV2, demand: Demand = None) -> Response:
        dimension = service.model.dimension
        if request.output_dimension not in (None, dimension):
            raise Unsupported(
                f"output_dimension: this model has {dimension} dimensions.",
                field="output_dimension",
            )
        if request.max_tokens is not None:
            raise Unsupported(
                "max_tokens: the model's own length is used.",
                field="max_tokens",
                hint="truncate='NONE'",
            )
        return answer(request, await embed(request, demand), "2")

    @router.post("/v1/embed", summary="Embeddings, as the first version of Cohere's API gives them")
    async def embed_v1(request: EmbedV1, demand: Demand = None) -> Response:
        return answer(request, await embed(request, demand), "1")

    return router


def typed(vectors: np.ndarray, kind: EmbeddingType) -> Any:
    """Vectors of unit length as one of Cohere's types; the beginning of this file says how."""
    if kind in ("int8", "uint8"):
        rounded = np.rint(127 * vectors.clip(-1, 1)).astype(np.int16)
        return rounded.astype(np.int8) if kind == "int8" else (rounded + 128).astype(np.uint8)
    return packed(vectors, kind)


def error(refusal: Refusal) -> dict[str, Any]:
    """Cohere's form: https://docs.cohere.com/reference/errors."""
    return {"id": str(uuid.uuid4()), "message": refusal.reason}


Dialect("cohere", ("/v1/embed", "/v2/embed"), routes, error)
