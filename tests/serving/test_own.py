"""`/similarity` and `/classify`: cosines and shares of the served model, and how they came about."""

from __future__ import annotations

import base64
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lapclip.embedder import Embedder, Encoder, Logits, open_exported
from lapclip.prompts import TEMPLATES, class_embeddings
from lapclip.serving import app
from lapclip.serving.dialects import TURNS, json_answer

from .conftest import Serving, jpeg

PHOTOS = [jpeg(seed) for seed in (1, 2)]
RAW = [base64.b64encode(photo).decode() for photo in PHOTOS]
LABELS = ["red cat", "blue snail", "green tree"]


@pytest.fixture(scope="module")
def photos(served: Serving) -> np.ndarray:
    return served.encoder.encode_image([Image.open(io.BytesIO(photo)) for photo in PHOTOS])


def test_similarity_is_the_cosine_of_each_with_each(served: Serving, photos: np.ndarray) -> None:
    texts = served.encoder.encode_text(LABELS)
    given = [{"text": label} for label in LABELS]
    answer = served.post("/similarity", {"items": given, "others": [{"image": raw} for raw in RAW]})
    assert np.abs(np.array(answer.json["similarity"]) - texts @ photos.T).max() < 1e-5
    assert answer.json["model"] == answer.headers["X-Lapclip-Model"] == served.encoder.fingerprint()
    among = served.post("/similarity", {"items": given})
    assert np.abs(np.array(among.json["similarity"]) - texts @ texts.T).max() < 1e-5


def test_classify_gives_the_shares_that_the_model_learnt_to_give(
    served: Serving, photos: np.ndarray
) -> None:
    assert isinstance(served.encoder, Embedder)
    scale = math.exp(served.encoder.model.logit_scale.item())
    for templates in (None, ["a {}", "the {} there"]):
        asked = {"images": RAW, "labels": LABELS, **({"templates": templates} if templates else {})}
        answer = served.post("/classify", asked).json
        classes = class_embeddings(served.encoder.encode_text, LABELS, templates or TEMPLATES)
        logits = np.exp(scale * (photos @ classes.T))
        found = np.array(
            [[each["shares"][label] for label in LABELS] for each in answer["results"]]
        )
        assert np.abs(found - logits / logits.sum(axis=1, keepdims=True)).max() < 1e-4
        assert [each["label"] for each in answer["results"]] == [
            LABELS[at] for at in logits.argmax(axis=1)
        ]
        how = answer["shares"]
        assert (how["method"], how["scale_from"]) == ("softmax", "model")
        assert how["scale"] == pytest.approx(scale)


@pytest.mark.parametrize(
    ("learnt", "method", "source"),
    [(Logits(10.0, -5.0), "sigmoid", "model"), (None, "softmax", "assumed")],
)
def test_shares_say_how_they_were_made(
    served: Serving,
    photos: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    learnt: Logits | None,
    method: str,
    source: str,
) -> None:
    monkeypatch.setattr(served.encoder, "logits", lambda: learnt)
    answer = served.post(
        "/classify", {"images": RAW[:1], "labels": LABELS, "templates": ["{}"]}
    ).json
    how, (found,) = answer["shares"], answer["results"]
    assert (how["method"], how["scale_from"]) == (method, source)
    cosines = photos[0] @ served.encoder.encode_text(LABELS).T
    if learnt:
        shares = 1 / (1 + np.exp(-(10 * cosines - 5)))
        assert np.abs(np.array(list(found["shares"].values())) - shares).max() < 1e-4
    else:
        assert how["scale"] == 100
        assert sum(found["shares"].values()) == pytest.approx(1)


def test_the_learnt_scale_is_known_of_runs_and_of_exports(served: Serving, exported: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = open_exported(exported / "exported" / "onnx")
    assert model.logits() == Logits(model.about["logit_scale"], None)
    assert Encoder.logits(served.encoder) is None


@pytest.mark.parametrize(
    ("path", "content", "field", "position"),
    [
        (
            "/similarity",
            {"items": [{"text": "a"}], "others": [{"text": "b"}, {"image": RAW[0][:400]}]},
            "others",
            1,
        ),
        ("/similarity", {"items": [{"text": "a"}, {}]}, "items", 1),
        ("/similarity", {"items": [{"text": "a"}], "others": []}, "others", None),
        ("/similarity", {"items": [{"text": "a"}], "other": []}, "other", None),
        ("/similarity", {"items": [3]}, "items.0", None),
        ("/classify", {"images": [RAW[0], "AAAA"], "labels": LABELS}, "images", 1),
        ("/classify", {"images": RAW, "labels": [*LABELS, LABELS[0]]}, "labels", 3),
        ("/classify", {"images": RAW, "labels": LABELS[:1]}, "labels", None),
        ("/classify", {"images": RAW, "labels": ["a", "\ud800"]}, "labels.1", None),
        (
            "/classify",
            {"images": RAW, "labels": LABELS, "templates": ["a {}", "a photo"]},
            "templates",
            1,
        ),
        ("/classify", {"images": RAW, "labels": LABELS, "templates": ["{}" * 9]}, "templates", 0),
        (
            "/classify",
            {"images": RAW, "labels": LABELS, "templates": ["{}"] * 257},
            "templates",
            None,
        ),
        ("/embed", {"items": [{"text": "a \ud800"}]}, "items.0.text", None),
        ("/classify", {"images": RAW}, "labels", None),
    ],
)
def test_what_cannot_be_answered_is_named(
    served: Serving, path: str, content: dict, field: str, position: int | None
) -> None:
    refused = served.post(path, content)
    assert refused.status == 400
    error = refused.json["error"]
    assert (error["field"], error.get("position")) == (field, position)


def test_more_labels_than_are_admitted_at_once(served: Serving) -> None:
    most = served.service.limits.items * TURNS
    labels = [f"number {number}" for number in range(most)]
    assert (
        served.post(
            "/classify", {"images": RAW, "labels": labels, "templates": ["{}", "a {}"]}
        ).status
        == 413
    )
    several = {
        "images": RAW,
        "labels": labels[: served.service.limits.items // 2 + 1],
        "templates": ["{}", "a {}"],
    }
    assert len(served.post("/classify", several).json["results"][0]["shares"]) == len(
        several["labels"]
    )
    assert served.service.model.callers == 0


def test_answers_that_are_far_longer_than_what_is_asked(served: Serving) -> None:
    items = [{"text": f"number {number % 3}"} for number in range(1001)]
    refused = served.post("/similarity", {"items": items})
    assert (refused.status, refused.json["error"]["code"]) == (413, "too_large")
    assert (
        len(served.post("/similarity", {"items": items, "others": items[:3]}).json["similarity"])
        == 1001
    )
    long = {"images": RAW[:1] * 20, "labels": [f"{number}".ljust(1000) for number in range(1000)]}
    assert served.post("/classify", {**long, "templates": ["{}"]}).status == 413


@pytest.mark.parametrize(
    ("path", "field", "content"),
    [
        (
            "/classify",
            "labels",
            {"images": RAW, "labels": [f"label {number}" for number in range(20_000)]},
        ),
        ("/classify", "images", {"images": [3] * 2049, "labels": LABELS}),
        ("/embed", "items", {"items": [3] * 2049}),
        ("/similarity", "others", {"items": [{"text": "a"}], "others": [3] * 2049}),
    ],
)
def test_long_lists_are_refused_before_they_are_read(
    served: Serving, path: str, field: str, content: dict[str, Any]
) -> None:
    refused = served.post(path, content)
    assert refused.status == 413
    assert f"{field} has {len(content[field]):,} items" in str(refused.json)


def test_names_that_are_no_text_can_be_answered() -> None:
    answer = json_answer({"path": "caf\udce9.jpg", "vectors": np.ones((1, 2), np.float32)})
    assert json.loads(bytes(answer.body)) == {"path": "caf\udce9.jpg", "vectors": [[1, 1]]}


def test_another_model_compares_nothing(served: Serving) -> None:
    demand = {"X-Lapclip-Model": "0123456789abcdef"}
    assert served.post("/similarity", {"items": [{"text": "a"}]}, **demand).status == 409
    assert served.post("/classify", {"images": RAW, "labels": LABELS}, **demand).status == 409


def test_examples_of_the_schema_are_answered(served: Serving) -> None:
    schemas = served.get("/openapi.json").json["components"]["schemas"]
    for path, name in {
        "/embed": "EmbedRequest",
        "/similarity": "SimilarityRequest",
        "/classify": "ClassifyRequest",
    }.items():
        example = {
            field: facts["examples"][0] for field, facts in schemas[name]["properties"].items()
        }
        assert served.post(path, example).status == 200


WRONG = [{}] * 1000
MANY_ERRORS: dict[str, tuple[str, Any]] = {
    "fields": ("/embed", dict.fromkeys(map(str, range(100_000)))),
    "fields of items": ("/embed", {"items": [dict.fromkeys(map(str, range(60)))] * 2000}),
}


@pytest.mark.parametrize("path_and_body", MANY_ERRORS.values(), ids=MANY_ERRORS)
def test_of_very_many_errors_few_are_collected(
    served: Serving, monkeypatch: pytest.MonkeyPatch, path_and_body: tuple[str, Any]
) -> None:
    counts, first = [], app._as_refusal
    monkeypatch.setattr(
        app, "_as_refusal", lambda error: counts.append(len(error.errors())) or first(error)
    )
    assert served.post(*path_and_body).status in (400, 413)
    assert sum(counts) <= 64
