"""lapclip's own requests: `/embed`, `/similarity`, `/classify`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from lapclip.embedder import Encoder, Logits
from lapclip.prompts import TEMPLATES, class_embeddings, class_shares, sentences_of
from lapclip.serving.dialects import LONGEST_LIST, Dialect, InTurns, json_answer, plain_error
from lapclip.serving.items import Item, Text, image_from_text
from lapclip.serving.refusals import BadItem, Refusal, TooLarge
from lapclip.serving.service import Service

Demand = Annotated[
    str | None,
    Header(
        alias="X-Lapclip-Model",
        description="The fingerprint of the model that you need: another model answers 409 instead of a vector.",
    ),
]
"""The fingerprint that a caller needs: another model answers 409."""

ASSUMED_SCALE = 100.0
"""Where a model's learnt scale is not known: what CLIP's ended at (a temperature of 0.01)."""

MOST_TEMPLATES, MOST_PLACES = 256, 8
"""Sentences for a label, and how often one of them may hold it: labels are long, and each {} repeats one."""
LARGEST_ANSWER, BYTES_OF_A_NUMBER = 12_000_000, 12
"""Bytes, about: a million similarities. A short request can ask for far more numbers than it has letters."""

TINY_IMAGE = "data:image/gif;base64,R0lGODlhAQABAIAAAP///wAAACH5BAAAAAAALAAAAAABAAEAAAICRAEAOw=="
"""For examples: an image of one pixel."""


MOST_FIELDS = 64
"""Of one object. Each that is unknown costs an error of its own, of which the first is told; so lists in which there
may be many errors are read up to the first (`fail_fast`)."""


class Strict(BaseModel):
    """A request whose unknown fields are errors: a mistyped option must not pass in silence."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_lists(cls, given: Any) -> Any:
        """A list that is too long, or an object of very many fields, is refused before any of it is read."""
        if isinstance(given, dict) and len(given) > MOST_FIELDS:
            raise TooLarge(
                f"An object has {len(given):,} fields; /openapi.json has those that there are."
            )
        for name in cls.model_fields if isinstance(given, dict) else ():
            if isinstance(found := given.get(name), list) and len(found) > LONGEST_LIST:
                raise TooLarge(
                    f"{name} has {len(found):,} items; at most {LONGEST_LIST:,} are taken.",
                    field=name,
                )
        return given


def is_unicode(text: str) -> bool:
    """Whether all of it are whole characters. JSON can name halves (lone surrogates), which no tokenizer takes."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in set(text))


def _unicode(text: str) -> str:
    if not is_unicode(text):
        raise PydanticCustomError("half_character", "it holds half a character (a lone surrogate)")
    return text


Unicode = Annotated[str, AfterValidator(_unicode)]
"""A text that is to be embedded."""


class GivenItem(Strict):
    """A text or an image; exactly one of them."""

    text: Unicode | None = Field(None, description="A text to embed.", examples=["a red bicycle"])
    image: str | None = Field(
        None, description="An image: base64 of a file, or a data URI.", examples=[TINY_IMAGE]
    )

    def item(self, position: int) -> Item:
        if (self.text is None) == (self.image is None):
            raise BadItem("give either text or image.", position=position)
        return (
            Text(self.text)
            if self.text is not None
            else image_from_text(self.image or "", position=position)
        )


EXAMPLE_ITEMS = [{"text": "a red bicycle"}, {"image": TINY_IMAGE}]


class EmbedRequest(Strict):
    """Texts and images, in any order."""

    items: list[GivenItem] = Field(
        min_length=1, max_length=LONGEST_LIST, fail_fast=True, examples=[EXAMPLE_ITEMS]
    )


class EmbedAnswer(BaseModel):
    """A vector of unit length for each item, in the order that was asked."""

    embeddings: list[list[float]]
    dimension: int
    model: str = Field(description="The fingerprint of the model that gave all of them.")


class SimilarityRequest(Strict):
    """Two lists of texts and images. Every item of the first is compared with every item of the second."""

    items: list[GivenItem] = Field(
        min_length=1,
        max_length=LONGEST_LIST,
        fail_fast=True,
        examples=[[{"text": "a red bicycle"}, {"text": "a cat"}]],
    )
    others: list[GivenItem] | None = Field(
        None,
        min_length=1,
        max_length=LONGEST_LIST,
        fail_fast=True,
        description="What they are compared with; without it, each other.",
        examples=[[{"image": TINY_IMAGE}]],
    )


class SimilarityAnswer(BaseModel):
    """Cosines: 1 is the same direction."""

    similarity: list[list[float]] = Field(
        description="A row for each of `items`, a column for each of `others`."
    )
    model: str = Field(description="The fingerprint of the model.")


Label = Annotated[str, Field(min_length=1, max_length=1000)]


class ClassifyRequest(Strict):
    """Images, and what they might show."""

    images: list[str] = Field(
        min_length=1,
        max_length=LONGEST_LIST,
        description="Each in base64, or as a data URI.",
        examples=[[TINY_IMAGE]],
    )
    labels: list[Label] = Field(
        min_length=2,
        max_length=LONGEST_LIST,
        description="What is to be told apart, each once. Underscores are read as spaces.",
        examples=[["cat", "dog", "red bicycle"]],
    )
    templates: list[Label] = Field(
        list(TEMPLATES),
        min_length=1,
        max_length=MOST_TEMPLATES,
        description="Sentences with {} for the label. A label is the mean of its sentences' vectors.",
        examples=[["a photo of a {}."]],
    )


class ClassifiedImage(BaseModel):
    """What one image is taken for."""

    label: str = Field(description="The label with the largest share.")
    shares: dict[str, float]
    similarities: dict[str, float] = Field(description="Cosines, which the shares were made of.")


class HowShares(BaseModel):
    """How similarities became shares."""

    method: Literal["softmax", "sigmoid"] = Field(
        description="softmax: shares sum to 1. sigmoid: each label by itself, for models that learnt so."
    )
    scale: float
    bias: float | None
    scale_from: Literal["model", "assumed"] = Field(
        description="assumed: the model does not say what it learnt."
    )


class ClassifyAnswer(BaseModel):
    """In the order of the images."""

    results: list[ClassifiedImage]
    shares: HowShares
    model: str = Field(description="The fingerprint of the model.")


class ErrorFacts(BaseModel):
    """Why there is no answer."""

    code: str = Field(examples=["invalid_input"])
    message: str = Field(examples=["Item 1: it cannot be read as an image: the file is truncated."])
    field: str | None = Field(None, description="The field at fault.", examples=["items"])
    position: int | None = Field(None, description="The item at fault, from 0.", examples=[1])


class OwnError(BaseModel):
    """Why there is no answer."""

    error: ErrorFacts


def routes(service: Service) -> APIRouter:
    router = APIRouter(
        tags=["lapclip"], responses={"default": {"model": OwnError, "description": "Refused"}}
    )

    @router.post(
        "/embed",
        summary="Vectors of texts and images, in the order that was asked",
        response_model=EmbedAnswer,
    )
    async def embed(request: EmbedRequest, demand: Demand = None) -> Response:
        items = [given.item(position) for position, given in enumerate(request.items)]
        answer = await service.embed(items, demand=demand)
        content: dict[str, Any] = {
            "embeddings": answer.vectors,
            "dimension": answer.vectors.shape[1],
            "model": answer.fingerprint,
        }
        return json_answer(content, headers={"X-Lapclip-Model": answer.fingerprint})

    @router.post(
        "/similarity", summary="How alike texts and images are", response_model=SimilarityAnswer
    )
    async def similarity(request: SimilarityRequest, demand: Demand = None) -> Response:
        _check_answer(
            "items", len(request.items), len(request.others or request.items) * BYTES_OF_A_NUMBER
        )
        given = {"items": request.items} | (
            {} if request.others is None else {"others": request.others}
        )
        lists = {field: read_items(field, each) for field, each in given.items()}
        with InTurns(service, demand) as asked:
            rows = [await asked.embed(field, items) for field, items in lists.items()]
        return _answer(asked, {"similarity": rows[0] @ rows[-1].T})

    @router.post(
        "/classify",
        summary="Which of some labels an image shows, zero-shot",
        response_model=ClassifyAnswer,
    )
    async def classify(request: ClassifyRequest, demand: Demand = None) -> Response:
        labels, templates = request.labels, request.templates
        _check_labels(labels, templates)
        _check_answer(
            "labels",
            len(request.images),
            sum(2 * (BYTES_OF_A_NUMBER + len(each.encode())) for each in labels),
        )
        images = read_items(
            "images", [GivenItem(text=None, image=written) for written in request.images]
        )
        with InTurns(service, demand) as asked:
            asked.check_count("labels", len(labels) * len(templates), each=len(templates))
            sentences = [Text(sentence) for sentence in sentences_of(labels, templates)]
            image_NE = await asked.embed("images", images)
            sentence_SE = await asked.embed("labels", sentences, each=len(templates))
        similarity_NC = image_NE @ class_embeddings(lambda _: sentence_SE, labels, templates).T
        how = _how(asked.model.encoder)
        shares_NC = class_shares(similarity_NC, how["scale"], how["bias"])
        results = [
            {
                "label": labels[shares.argmax()],
                "shares": dict(zip(labels, shares, strict=True)),
                "similarities": dict(zip(labels, similarities, strict=True)),
            }
            for shares, similarities in zip(shares_NC, similarity_NC, strict=True)
        ]
        return _answer(asked, {"results": results, "shares": how})

    return router


def read_items(field: str, given: list[GivenItem]) -> list[Item]:
    """The items of a field; one that cannot be read is named with its field."""
    try:
        return [each.item(position) for position, each in enumerate(given)]
    except Refusal as refusal:
        refusal.field = field
        raise


def _check_labels(labels: list[str], templates: list[str]) -> None:
    seen: set[str] = set()
    for position, label in enumerate(labels):
        if label in seen:
            raise Refusal("this label is there twice.", field="labels", position=position)
        seen.add(label)
    for position, template in enumerate(templates):
        if "{}" not in template:
            raise Refusal(
                "the template has no {} for the label.",
                field="templates",
                position=position,
                hint="a photo of a {}.",
            )
        if template.count("{}") > MOST_PLACES:
            raise Refusal(
                f"the template has {{}} more than {MOST_PLACES} times.",
                field="templates",
                position=position,
            )


def _check_answer(field: str, rows: int, bytes_of_row: int) -> None:
    if rows * bytes_of_row > LARGEST_ANSWER:
        raise TooLarge(
            f"the answer would have about {rows * bytes_of_row / 10**6:,.0f} MB; at most {LARGEST_ANSWER // 10**6} MB "
            "are sent.",
            field=field,
            hint="fewer of them in a request",
        )


def _how(encoder: Encoder) -> dict[str, Any]:
    learnt = encoder.logits()
    scale, bias = learnt or Logits(ASSUMED_SCALE, None)
    return {
        "method": "softmax" if bias is None else "sigmoid",
        "scale": scale,
        "bias": bias,
        "scale_from": "model" if learnt else "assumed",
    }


def _answer(asked: InTurns, content: dict[str, Any]) -> Response:
    fingerprint = asked.model.fingerprint
    return json_answer({**content, "model": fingerprint}, headers={"X-Lapclip-Model": fingerprint})


Dialect("own", ("/embed", "/similarity", "/classify", "/search"), routes, plain_error)
