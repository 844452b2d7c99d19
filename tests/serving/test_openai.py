"""OpenAI's dialect, asked by its own package, and by requests as the documentation of those who extended it has them.

- OpenAI: https://platform.openai.com/docs/api-reference/embeddings
- infinity: `modality`, as its page at /docs says of POST /embeddings (infinity_emb 0.0.78, infinity_server.py)
- Jina: lists of objects, `embedding_type`, `task`, `normalized` (https://api.jina.ai/openapi.json)
- LangChain: token ids, unless `check_embedding_ctx_length` is False, and up to 1,000 texts at once
  (https://reference.langchain.com/python/langchain-openai/embeddings/base/OpenAIEmbeddings)
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import openai
import pytest
from openai.types.create_embedding_response import CreateEmbeddingResponse
from PIL import Image

from lapclip.serving.dialects import TURNS

from .conftest import Reply, Serving, jpeg

TEXTS = ["a red cat", "two blue snails in the snow"]
PHOTO = jpeg(1)
RAW = base64.b64encode(PHOTO).decode()
URI = f"data:image/jpeg;base64,{RAW}"


@pytest.fixture(scope="module")
def client(served: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected(served: Serving) -> np.ndarray:
    """The vectors of both texts and of the photo."""
    image = served.encoder.encode_image([Image.open(io.BytesIO(PHOTO))])
    return np.concatenate([served.encoder.encode_text(TEXTS), image])


def vectors(answer: CreateEmbeddingResponse | Reply) -> np.ndarray:
    if isinstance(answer, Reply):
        assert answer.status == 200, answer.body
        return np.array([one["embedding"] for one in answer.json["data"]], np.float32)
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return np.array([one.embedding for one in answer.data], np.float32)


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.shape == expected.shape and float(np.abs(found - expected).max()) < 1e-5


def ask(served: Serving, **content: Any) -> Reply:
    return served.post("/v1/embeddings", {"model": "any", **content})


def test_the_openai_package_gets_the_vectors_of_the_model(
    client: openai.OpenAI, expected: np.ndarray
) -> None:
    one = client.embeddings.create(model="mine", input=TEXTS[0])
    assert close(vectors(one), expected[:1])
    for form in ("float", "base64"):
        several = client.embeddings.create(
            model="mine", input=[*TEXTS, URI], encoding_format=form, user="me"
        )
        if form == "base64":
            decoded = [
                np.frombuffer(base64.b64decode(str(each.embedding)), "<f4") for each in several.data
            ]
            assert close(np.stack(decoded), expected)
        else:
            assert close(vectors(several), expected)
    assert several.model == "mine"


def test_usage_counts_the_tokens_that_the_model_reads(
    client: openai.OpenAI, served: Serving
) -> None:
    tokenizer, context = served.encoder.tokenizer, served.encoder.context
    texts = [*TEXTS, "very " * 500]
    for _ in range(2):  # then from the cache
        usage = client.embeddings.create(model="mine", input=[*texts, URI]).usage
        assert (
            usage.prompt_tokens
            == usage.total_tokens
            == sum(len(tokenizer.encode(text, context)) for text in texts)
        )


def test_the_openai_package_lists_the_model(client: openai.OpenAI, served: Serving) -> None:
    (only,) = client.models.list().data
    assert only.id == "mine"
    assert only.created > 1.6e9
    assert client.models.retrieve("mine").model_dump()["dimension"] == served.encoder.embedding
    assert client.models.retrieve(served.encoder.fingerprint()).id == "mine"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("text-embedding-3-small")
    assert refused.value.code == "model_not_found"


def test_any_name_is_answered_but_another_fingerprint_is_not(
    client: openai.OpenAI, served: Serving
) -> None:
    own, other = served.encoder.fingerprint(), "0123456789abcdef"
    for name in ("text-embedding-3-small", own):
        answer = client.embeddings.with_raw_response.create(model=name, input="a cat")
        assert answer.parse().model == "mine"
        assert answer.headers["X-Lapclip-Model"] == own
    patient = client.with_options(max_retries=2)
    for name, demand in ((other, own), ("mine", other)):
        with pytest.raises(openai.ConflictError) as refused:
            patient.embeddings.create(
                model=name, input="a cat", extra_headers={"X-Lapclip-Model": demand}
            )
        assert refused.value.code == "wrong_model"
        assert refused.value.response.headers["X-Should-Retry"] == "false"
    assert served.get("/v1/models", **{"X-Lapclip-Model": other}).status == 409


def test_modality_says_what_strings_are(
    client: openai.OpenAI, served: Serving, expected: np.ndarray
) -> None:
    for image in (URI, RAW):
        answer = client.embeddings.create(
            model="mine", input=[image], extra_body={"modality": "image"}
        )
        assert close(vectors(answer), expected[2:])
    texts = client.embeddings.create(model="mine", input=[*TEXTS], extra_body={"modality": "text"})
    assert close(vectors(texts), expected[:2])
    beginning = URI[:100]
    about = client.embeddings.create(model="mine", input=beginning, extra_body={"modality": "text"})
    assert close(vectors(about), served.encoder.encode_text([beginning]))


def test_lists_of_texts_and_images_as_jina_has_them(served: Serving, expected: np.ndarray) -> None:
    given = [{"text": TEXTS[0]}, TEXTS[1], {"image": RAW}]
    options = {"task": "retrieval.query", "normalized": True, "embedding_type": "float"}
    assert close(vectors(ask(served, input=given, **options)), expected)
    assert close(vectors(ask(served, input=[{"image": URI}])), expected[2:])


def test_token_ids_are_refused_with_the_setting_that_stops_them(client: openai.OpenAI) -> None:
    for tokens in ([[9906, 1917], [64]], [9906, 1917]):
        with pytest.raises(
            openai.BadRequestError, match="check_embedding_ctx_length=False"
        ) as refused:
            client.embeddings.create(model="mine", input=tokens)
        assert refused.value.param == "input"


def test_only_the_dimension_of_the_model_is_given(client: openai.OpenAI, served: Serving) -> None:
    own = served.encoder.embedding
    for dimensions in (own, 0):  # infinity's client sends 0
        assert (
            len(
                client.embeddings.create(model="mine", input="a", dimensions=dimensions)
                .data[0]
                .embedding
            )
            == own
        )
    with pytest.raises(openai.BadRequestError, match=f"dimensions={own}") as refused:
        client.embeddings.create(model="mine", input="a", dimensions=own // 2)
    assert (refused.value.param, refused.value.code) == ("dimensions", "unsupported")


@pytest.mark.parametrize(
    ("param", "content"),
    [
        ("dimension", {"input": "a", "dimension": 8}),
        ("encoding_format", {"input": "a", "encoding_format": "int8"}),
        ("embedding_type", {"input": "a", "embedding_type": "int8"}),
        ("modality", {"input": "a", "modality": "audio"}),
        ("normalized", {"input": "a", "normalized": False}),
        ("model", {"input": "a", "model": 3}),
        ("input", {}),
        ("input", {"input": []}),
        ("input", {"input": 3}),
        ("input", {"input": None}),
        ("input[0]", {"input": [[]]}),
        ("input[1]", {"input": ["a", "\ud800"]}),
        ("input[1]", {"input": ["a", None]}),
        ("input[1]", {"input": ["a", {"txt": "a"}]}),
        ("input[1]", {"input": ["a", {"text": "a", "image": RAW}]}),
        ("input[1]", {"input": ["a", {"image": RAW[:400]}]}),
        ("input[0]", {"input": ["https://example.org/a.jpg"], "modality": "image"}),
    ],
)
def test_what_cannot_be_had_is_refused_in_openais_form(
    served: Serving, param: str, content: dict[str, Any]
) -> None:
    refused = ask(served, **content)
    assert refused.status == 400
    error = refused.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "token" not in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert len(error["message"]) < 200


def test_a_request_that_is_no_object_hears_what_to_send(served: Serving) -> None:
    for body in (b"[]", b'{"input": "a"', b""):
        refused = served.post("/v1/embeddings", body)
        assert refused.status == 400
        assert "JSON" in refused.json["error"]["message"]
    form = served.post(
        "/v1/embeddings", b'{"input": "a"}', **{"Content-Type": "application/x-www-form-urlencoded"}
    )
    assert "application/json" in form.json["error"]["message"]


def test_long_lists_are_taken_in_turns(client: openai.OpenAI, served: Serving) -> None:
    at_once = served.service.limits.items
    texts = [f"{TEXTS[0]} {number % 40}" for number in range(at_once + 10)]
    found = vectors(client.embeddings.create(model="mine", input=texts))
    assert close(found[-10:], served.encoder.encode_text(texts[-10:]))
    bad = ask(served, input=[*texts, {"image": "AAAA"}])
    assert bad.json["error"]["param"] == f"input[{len(texts)}]"
    assert ask(served, input=["a"] * (at_once * TURNS + 1)).status == 413


def test_a_full_queue_is_a_rate_limit(client: openai.OpenAI, served: Serving) -> None:
    service = served.service
    service._items, service._waiting_seconds = 1000, 100.0
    try:
        with pytest.raises(openai.RateLimitError) as refused:
            client.embeddings.create(model="mine", input="a text that nobody asked before")
    finally:
        service._items, service._waiting_seconds = 0, 0.0
    assert refused.value.code == "rate_limit_exceeded"
    assert int(refused.value.response.headers["Retry-After"]) >= 1


def test_examples_of_the_schema_are_answered(served: Serving) -> None:
    schemas = served.get("/openapi.json").json["components"]["schemas"]
    for example in schemas["EmbeddingsRequest"]["examples"]:
        assert served.post("/v1/embeddings", example).status == 200
    for field, facts in schemas["EmbeddingsRequest"]["properties"].items():
        assert facts.get("description"), field
