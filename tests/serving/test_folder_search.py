"""`/search`: the answers of `lapclip search`, also while the model is replaced."""

from __future__ import annotations

import asyncio
import base64
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lapclip.searching.index import DATABASE, index_folder
from lapclip.searching.library import Library, open_library
from lapclip.serving.folder_search import FolderSearch
from lapclip.serving.service import ServedModel
from lapclip.which_model import WhichModel

from ..conftest import wait_until
from .conftest import Serving, engine_of, jpeg, serving


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAPCLIP_DATA", str(tmp_path / "data-directory"))
    folder = tmp_path / "photos"
    folder.mkdir()
    for seed in range(12):
        (folder / f"{seed:02}.jpg").write_bytes(jpeg(seed))
    return folder


@pytest.fixture
def asked(photos: Path, trained: Path) -> Iterator[tuple[Serving, FolderSearch]]:
    made: list[FolderSearch] = []

    def search(service) -> FolderSearch:
        made.append(FolderSearch(photos, service, WhichModel(trained, None, "asked for")))
        return made[0]

    with serving(trained, search=search) as found:
        yield found, made[0]
        made[0].close()


def test_answers_are_those_of_the_search_command(
    asked: tuple[Serving, FolderSearch], photos: Path, trained: Path
) -> None:
    server, _ = asked
    library = open_library(photos, str(trained), device="cpu")
    for question in ("a red cat", "snow -snails"):
        answer = server.post("/search", {"query": question, "limit": 5})
        assert answer.status == 200
        expected = library.find(question, 5)
        assert [each["path"] for each in answer.json["results"]] == [
            hit.path.name for hit in expected
        ]
        assert answer.json["indexed"] == 12
        assert answer.headers["X-Lapclip-Model"] == server.encoder.fingerprint()
    by_image = server.post(
        "/search", {"image": base64.b64encode(jpeg(7)).decode(), "limit": 1}
    ).json["results"]
    assert by_image[0]["path"] == "07.jpg"
    like = server.post("/search", {"like": by_image[0]["number"], "limit": 20}).json["results"]
    assert len(like) == 11
    left = server.post("/search", {"query": "a cat", "limit": 50, "exclude": ["0*"]}).json[
        "results"
    ]
    assert sorted(each["path"] for each in left) == ["10.jpg", "11.jpg"]


@pytest.mark.parametrize(
    "request_body",
    [
        {},
        {"query": "a", "like": 1},
        {"query": "  "},
        {"query": "a", "since": "yesterday"},
        {"query": "a", "limit": 0},
    ],
)
def test_what_cannot_be_answered_is_refused(
    asked: tuple[Serving, FolderSearch], request_body: dict
) -> None:
    assert asked[0].post("/search", request_body).status == 400


def test_the_index_answers_with_its_own_model_until_the_new_one_has_seen_all(
    asked: tuple[Serving, FolderSearch], trained: Path, tmp_path: Path
) -> None:
    server, search = asked
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    before = server.post("/search", {"query": "a red cat"}).json
    engine = engine_of(other)
    with torch.no_grad():
        for parameter in engine.encoder.model.parameters():  # type: ignore[attr-defined]
            parameter.mul_(1.02)
    engine.fingerprint = engine.encoder.fingerprint()
    old, new = server.service.model, ServedModel("mine", engine, 0)
    assert new.fingerprint != old.fingerprint
    server.service.replace(new)
    seen = set()
    deadline = time.monotonic() + 120
    while new.fingerprint not in seen and time.monotonic() < deadline:
        answer = server.post("/search", {"query": "a red cat"}).json
        seen.add(answer["model"])
        if answer["model"] == old.fingerprint:
            assert answer == before
        assert server.post("/embed", {"items": [{"text": "a"}]}).json["model"] == new.fingerprint
    assert new.fingerprint in seen
    assert search.current[1] is new
    assert old.callers == 0
    asyncio.run(server.service.retire(old))
    assert old.batcher.join(5)
    assert server.post("/search", {"query": "a red cat"}).status == 200


def test_new_images_are_found_after_a_while(
    asked: tuple[Serving, FolderSearch], photos: Path
) -> None:
    server, search = asked
    (photos / "late.jpg").write_bytes(jpeg(99))
    search._wake.set()  # instead of a minute
    wait_until(lambda: search.current[0].count == 13)
    found = server.post("/search", {"image": base64.b64encode(jpeg(99)).decode(), "limit": 1}).json[
        "results"
    ]
    assert found[0]["path"] == "late.jpg"


def test_questions_that_leave_out_different_images_do_not_meet(
    asked: tuple[Serving, FolderSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if others replaced what was remembered of a question in the very moment.
    monkeypatch.setattr(
        Library,
        "_left_out",
        property(lambda library: {}, lambda library, found: None),
        raising=False,
    )
    answer = asked[0].post("/search", {"query": "a cat", "limit": 50, "exclude": ["0*"]})
    assert sorted(each["path"] for each in answer.json["results"]) == ["10.jpg", "11.jpg"]


def test_a_damaged_index_is_no_fault_of_the_caller_and_is_made_again(
    asked: tuple[Serving, FolderSearch], photos: Path
) -> None:
    server, search = asked
    (database,) = index_folder(photos).glob(f"*/{DATABASE}")
    database.write_bytes(b"damaged" * 1000)
    for question in ({"query": "a cat"}, {"like": 1}):
        answer = server.post("/search", question)
        assert (answer.status, answer.json["error"]["code"]) == (503, "unavailable")
        assert index_folder(photos).name.encode() not in answer.body
    assert "damaged" in server.service.notes["index"]
    search._wake.set()  # instead of a minute
    wait_until(lambda: not server.service.notes)
    assert server.post("/search", {"query": "a cat"}).status == 200
