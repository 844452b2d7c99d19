"""lapclip's own requests: `/embed`, `/similarity`, `/classify`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from lapclip.serving.dialects import Dialect, json_answer, plain_error
from lapclip.serving.items import Item, Text, image_from_text
from lapclip.serving.refusals import BadItem
from lapclip.serving.service import Service

Demand = Annotated[str | None, Header(alias="X-Lapclip-Model")]
"""The fingerprint that a caller needs: another model answers 409."""


class Strict(BaseModel):
    """A request whose unknown fields are errors: a mistyped option must not pass in silence."""

    model_config = ConfigDict(extra="forbid")


class GivenItem(Strict):
    """A text or an image; exactly one of them."""

    text: str | None = Field(None, description="A text to embed.")
    image: str | None = Field(None, description="An image: base64 of a file, or a data URI.")

    def item(self, position: int) -> Item:
        if (self.text is None) == (self.image is None):
            raise BadItem("give either text or image.", position=position)
        return Text(self.text) if self.text is not None else image_from_text(self.image or "", position=position)


class EmbedRequest(Strict):
    """Texts and images, in any order."""

    items: list[GivenItem] = Field(min_length=1)


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["lapclip"])

    @router.post("/embed", summary="Vectors of texts and images, in the order that was asked")
    async def embed(request: EmbedRequest, demand: Demand = None) -> Response:
        items = [given.item(position) for position, given in enumerate(request.items)]
        answer = await service.embed(items, demand=demand)
        content: dict[str, Any] = {
            "embeddings": answer.vectors,
            "dimension": answer.vectors.shape[1],
            "model": answer.fingerprint,
        }
        return json_answer(content, headers={"X-Lapclip-Model": answer.fingerprint})

    return router


Dialect("own", ("/embed", "/similarity", "/classify", "/search"), routes, plain_error)
