"""Cohere's dialect, asked by its own client.

What is asked and answered: https://docs.cohere.com/reference/embed (types and their ranges, `inputs`, `truncate`), and
https://docs.cohere.com/reference/errors for the form of errors. Bits are packed as vLLM packs them for the same request
(https://docs.vllm.ai/en/latest/api/vllm/entrypoints/pooling/embed/protocol/): the first number in the highest bit.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import cohere
import numpy as np
import pytest
from cohere.core.api_error import ApiError
from cohere.errors import BadRequestError, UnauthorizedError
from PIL import Image

from .conftest import Serving, jpeg, serving


def client(served: Serving, key: str = "none") -> cohere.ClientV2:
    return cohere.ClientV2(key, base_url=served.url, timeout=60, max_retries=0)


def data_uri(data: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


def embed(served: Serving, **asked: Any) -> Any:
    return client(served).embed(**{"model": "mine", "input_type": "search_document", **asked})


def test_texts_images_and_inputs_get_the_vectors_of_the_model(served: Serving) -> None:
    texts = ["a red cat", "two blue snails in the snow"]
    expected_texts = served.encoder.encode_text(texts)
    answer = embed(served, texts=texts, truncate="NONE", output_dimension=served.encoder.embedding)
    assert np.abs(np.array(answer.embeddings.float_) - expected_texts).max() < 1e-5
    assert answer.texts == texts
    images = [jpeg(1), jpeg(2)]
    expected_images = served.encoder.encode_image(
        [Image.open(io.BytesIO(image)) for image in images]
    )
    answer = embed(served, images=[data_uri(image) for image in images], input_type="image")
    assert np.abs(np.array(answer.embeddings.float_) - expected_images).max() < 1e-5
    inputs = [
        {"content": [{"type": "text", "text": texts[1]}]},
        {"content": [{"type": "image_url", "image_url": {"url": data_uri(images[0])}}]},
    ]
    answer = embed(served, inputs=inputs, embedding_types=["float"])
    expected = np.stack([expected_texts[1], expected_images[0]])
    assert np.abs(np.array(answer.embeddings.float_) - expected).max() < 1e-5


def test_types_are_made_of_the_same_vector(served: Serving) -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    found = embed(served, texts=["a red cat", "snow"], embedding_types=types).embeddings
    floats = np.array(found.float_, np.float32)
    assert np.array_equal(
        [np.frombuffer(base64.b64decode(text), "<f4") for text in found.base64], floats
    )
    small = np.array(found.int8)
    assert np.abs(small / 127 - floats).max() <= 0.5 / 127 + 1e-6
    assert np.array_equal(np.array(found.uint8), small + 128)
    bits = np.array(found.ubinary)
    assert bits.shape == (2, -(-floats.shape[1] // 8))
    assert [bit == "1" for bit in f"{bits[0, 0]:08b}"] == [
        bool(value > 0) for value in floats[0, :8]
    ]
    assert np.array_equal(np.array(found.binary), bits - 128)


def test_types_fit_their_ranges_at_the_ends() -> None:
    from lapclip.serving.dialects.cohere import typed

    ends = np.array([[1.0000001, -1.0000001, 0, 0, 0, 0, 0, 0]], np.float32)
    assert typed(ends, "int8").tolist() == [[127, -127, 0, 0, 0, 0, 0, 0]]
    assert typed(ends, "uint8").tolist() == [[255, 1, 128, 128, 128, 128, 128, 128]]
    assert typed(ends, "ubinary").tolist() == [[128]]
    assert typed(ends, "binary").tolist() == [[0]]


def test_the_client_of_the_first_version_is_answered(served: Serving) -> None:
    old = cohere.Client("none", base_url=served.url, timeout=60)
    expected = served.encoder.encode_text(["a red cat"])
    assert (
        np.abs(np.array(old.embed(texts=["a red cat"], model="mine").embeddings) - expected).max()
        < 1e-5
    )
    typed = old.embed(
        texts=["a red cat"], embedding_types=["int8"], input_type="search_query"
    ).embeddings
    assert len(typed.int8[0]) == served.encoder.embedding  # type: ignore[union-attr]


LONG = "a red cat and a blue snail " * 200


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"texts": ["a"], "output_dimension": 7}, "output_dimension"),
        ({"texts": ["a"], "max_tokens": 3}, "max_tokens"),
        ({"texts": ["a"], "truncate": "START"}, "truncate"),
        ({"texts": ["a cat", LONG], "truncate": "NONE"}, "Item 1"),
        ({"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types"),
        ({"texts": ["a"], "input_type": "poem"}, "input_type"),
        ({"texts": ["a"], "images": ["b"]}, "exactly one"),
        ({"texts": []}, "nothing"),
        ({"texts": ["a"], "embedding_types": ["float"] * 7}, "embedding_types"),
        ({}, "exactly one"),
        ({"images": [data_uri(jpeg(1)), data_uri(jpeg(1)[:300])]}, "Item 1"),
        ({"images": ["https://example.com/a.jpg"]}, "--allow-urls"),
        (
            {
                "inputs": [
                    {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
                ]
            },
            "Item 0",
        ),
        ({"inputs": [{"content": [{"type": "video", "video": "a"}]}]}, "inputs.0.content"),
        (
            {"texts": ["a"], "request_options": {"additional_body_parameters": {"dimension": 3}}},
            "dimension",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_in_its_own_form(
    served: Serving, asked: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        embed(served, **asked)
    assert named in caught.value.body["message"]


@pytest.mark.parametrize("path", ["/v1/embed", "/v2/embed"])
def test_half_a_character_is_refused(served: Serving, path: str) -> None:
    refused = served.post(path, {"model": "mine", "input_type": "image", "texts": ["a", "\ud800"]})
    assert refused.status == 400
    assert "texts.1" in refused.json["message"]


def test_a_long_text_is_cut_at_its_end_unless_that_is_refused(served: Serving) -> None:
    assert embed(served, texts=[LONG]).embeddings.float_
    with pytest.raises(BadRequestError):  # also though its vector is in the cache
        embed(served, texts=[LONG], truncate="NONE")


def test_another_model_and_a_wrong_key_are_told_as_cohere_does(
    served: Serving, trained: Any
) -> None:
    assert embed(
        served, texts=["a"], model="embed-v4.0"
    ).embeddings.float_  # one is served, whatever it is called
    with pytest.raises(ApiError) as caught:
        embed(served, texts=["a"], model="0123456789abcdef")
    assert caught.value.status_code == 409
    assert served.encoder.fingerprint() in caught.value.body["message"]
    with serving(trained, key="right") as closed:
        with pytest.raises(UnauthorizedError):
            client(closed, "wrong").embed(model="mine", input_type="image", texts=["a"])
        assert (
            client(closed, "right")
            .embed(model="mine", input_type="image", texts=["a"])
            .embeddings.float_
        )
