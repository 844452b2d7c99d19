"""Our own requests, the queue behind them, and what a bad item does to others: nothing."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from .conftest import Serving, jpeg


def test_texts_and_images_get_the_vectors_of_the_model(served: Serving) -> None:
    image = jpeg(1)
    items = [
        {"text": "a red cat"},
        {"image": base64.b64encode(image).decode()},
        {"text": "two blue snails in the snow"},
    ]
    answer = served.post("/embed", {"items": items})
    assert answer.status == 200
    vectors = np.array(answer.json["embeddings"], np.float32)
    texts = served.encoder.encode_text(["a red cat", "two blue snails in the snow"])
    pixels = served.encoder.encode_image([Image.open(io.BytesIO(image))])
    assert np.abs(vectors - np.stack([texts[0], pixels[0], texts[1]])).max() < 1e-5
    assert answer.headers["X-Lapclip-Model"] == answer.json["model"] == served.encoder.fingerprint()


def test_a_bad_item_is_named_and_harms_nobody(served: Serving) -> None:
    good = {"items": [{"text": "a cat"}, {"image": base64.b64encode(jpeg(2)).decode()}]}
    bad = {"items": [{"text": "a cat"}, {"image": base64.b64encode(jpeg(2)[:400]).decode()}]}
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(lambda turn: served.post("/embed", bad if turn % 4 == 0 else good), range(64))
        )
    for turn, answer in enumerate(answers):
        assert answer.status == (400 if turn % 4 == 0 else 200)
        if turn % 4 == 0:
            assert answer.json["error"]["position"] == 1


def test_a_caller_who_needs_another_model_gets_no_vector(served: Serving) -> None:
    asked = {"items": [{"text": "a cat"}]}
    assert (
        served.post("/embed", asked, **{"X-Lapclip-Model": served.encoder.fingerprint()}).status
        == 200
    )
    refused = served.post("/embed", asked, **{"X-Lapclip-Model": "0123456789abcdef"})
    assert refused.status == 409
    assert "embeddings" not in refused.json


def test_ready_means_that_the_vectors_are_right(served: Serving) -> None:
    assert served.get("/ready").status == 200
    model = served.service.model
    golden, model.golden = model.golden, -model.golden
    served.service._ready = None
    try:
        assert served.get("/ready").status == 503
        assert served.get("/health").status == 200
    finally:
        model.golden, served.service._ready = golden, None
    assert served.get("/ready").status == 200


def test_readiness_of_a_model_is_not_told_of_its_successor(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, fingerprint = served.service.ready, served.service.model.fingerprint

    async def replaced_meanwhile() -> None:
        await ready()
        monkeypatch.setattr(served.service.model, "fingerprint", "f" * 16)

    monkeypatch.setattr(served.service, "ready", replaced_meanwhile)
    assert served.get("/ready", **{"X-Lapclip-Model": fingerprint}).status == 409
