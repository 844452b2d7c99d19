"""Immich's dialect, asked as Immich's server asks (there is no client to install).

Its files in https://github.com/immich-app/immich: `server/src/repositories/machine-learning.repository.ts` (`/ping`,
and `/predict` with the form of `getFormData`), `machine-learning/immich_ml/main.py` (what its own server answers), and
`machine-learning/immich_ml/models/transforms.py` (`serialize_np_array`: a vector is a string in the answer).
"""

from __future__ import annotations

import asyncio
import io
import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from lapclip.errors import ConfigError
from lapclip.serving.dialects import immich
from lapclip.serving.gate import Gate
from lapclip.web.security import door_for

from .conftest import Reply, Serving, jpeg, serving

BOUNDARY = "----formdata-undici-012345678901"
VISUAL = {"clip": {"visual": {"modelName": "ViT-B-32__openai"}}}
TEXTUAL = {
    "clip": {"textual": {"modelName": "nllb-clip-base-siglip__v1", "options": {"language": "de"}}}
}
FACES = {
    "facial-recognition": {
        "detection": {"modelName": "buffalo_l", "options": {"minScore": 0.7}},
        "recognition": {"modelName": "buffalo_l"},
    }
}
FOUND = {
    "facial-recognition": [{"score": 0.9, "embedding": "[1]"}],
    "imageHeight": 60,
    "imageWidth": 80,
}


def form(entries: Any, **fields: bytes) -> bytes:
    """A form as Node writes it."""
    parts = [
        b'name="entries"\r\n\r\n'
        + (entries if isinstance(entries, bytes) else json.dumps(entries).encode())
    ]
    for name, content in fields.items():
        file = (
            b'; filename="blob"\r\nContent-Type: application/octet-stream'
            if name == "image"
            else b""
        )
        parts.append(b'name="' + name.encode() + b'"' + file + b"\r\n\r\n" + content)
    begin = f"--{BOUNDARY}\r\nContent-Disposition: form-data; ".encode()
    return b"".join(begin + part + b"\r\n" for part in parts) + f"--{BOUNDARY}--\r\n".encode()


def predict(
    served: Serving, body: bytes, kind: str = f"multipart/form-data; boundary={BOUNDARY}"
) -> Reply:
    return served.post("/predict", body, **{"Content-Type": kind})


class Upstream(ThreadingHTTPServer):
    """Immich's own server, as far as the tests need it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.asked: list[tuple[str, str, bytes]] = []
        self.answer: tuple[int, bytes] | str = 200, json.dumps(FOUND).encode()
        self.kind = "application/json"
        self.left = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answering(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        upstream = cast(Upstream, self.server)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        upstream.asked.append((self.path, self.headers["Content-Type"], body))
        if isinstance(upstream.answer, str):
            if upstream.answer == "slow":
                self.wfile.write(b"HTTP/1.0 200 OK\r\n")
            self.rfile.read()  # until the caller has gone
            upstream.left.set()
            return
        status, content = upstream.answer
        self.send_response(status)
        self.send_header("Content-Type", upstream.kind)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def passing(trained: Path) -> Iterator[tuple[Serving, Upstream]]:
    """A server that passes faces on, and the one that gets them."""
    upstream = Upstream()
    threading.Thread(target=upstream.serve_forever, args=(0.02,), daemon=True).start()
    with serving(trained, immich_upstream=upstream.url) as found:
        yield found, upstream
    upstream.shutdown()
    upstream.server_close()


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    if "passing" in request.fixturenames:
        upstream = request.getfixturevalue("passing")[1]
        upstream.asked.clear()
        upstream.left.clear()
        upstream.answer, upstream.kind = (200, json.dumps(FOUND).encode()), "application/json"


def test_ping_answers_pong(served: Serving) -> None:
    answer = served.get("/ping")
    assert (answer.status, answer.body) == (200, b"pong")


def test_images_and_texts_get_their_vectors_as_strings(served: Serving) -> None:
    image = jpeg(1, 90, 70)
    answer = predict(served, form(VISUAL, image=image))
    assert answer.status == 200
    assert (answer.json["imageWidth"], answer.json["imageHeight"]) == (90, 70)
    expected = served.encoder.encode_image([Image.open(io.BytesIO(image))])[0]
    assert np.abs(np.array(json.loads(answer.json["clip"])) - expected).max() < 1e-5
    assert answer.headers["X-Lapclip-Model"] == served.encoder.fingerprint()
    answer = predict(served, form(TEXTUAL, text="ein Käfer im Schnee".encode()))
    expected = served.encoder.encode_text(["ein Käfer im Schnee"])[0]
    assert list(answer.json) == ["clip"]
    assert np.abs(np.array(json.loads(answer.json["clip"])) - expected).max() < 1e-5


def test_a_large_image_is_never_written_to_disk(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a temporary file")

    for name in ("SpooledTemporaryFile", "TemporaryFile", "NamedTemporaryFile", "mkstemp"):
        monkeypatch.setattr(tempfile, name, refuse)
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (800, 800, 3), np.uint8)).save(
        file, "BMP"
    )
    assert len(file.getvalue()) > 1_900_000
    assert predict(served, form(VISUAL, image=file.getvalue())).status == 200


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (form(b"{", image=b"a"), 400, "entries"),
        (form([], image=b"a"), 400, "entries"),
        (form({}, image=b"a"), 400, "entries"),
        (form({"clip": []}, image=b"a"), 400, "entries.clip"),
        (form({"clip": {}}, image=b"a"), 400, "visual"),
        (form({"clip": {"visual": {}}}, image=b"a"), 400, "modelName"),
        (form({"clip": {"visual": {"modelName": "a", "size": 3}}}, image=b"a"), 400, "size"),
        (
            form(
                {"clip": {"visual": {"modelName": "a"}, "textual": {"modelName": "a"}}}, image=b"a"
            ),
            400,
            "either",
        ),
        (form(VISUAL), 400, "image"),
        (form(VISUAL, text=b"a"), 400, "image"),
        (form(TEXTUAL, text=b"\xff"), 400, "UTF-8"),
        (form(VISUAL, image=jpeg(1)[:300]), 400, "image"),
        (form(VISUAL, image=b"a", assetId=b"3"), 400, "field"),
        (form(VISUAL, image=b"a").replace(b"--" + BOUNDARY.encode() + b"--", b""), 400, "early"),
        (form(VISUAL, image=b"a").replace(b'name="image"', b'name="entries"'), 400, "twice"),
        (form(b" " * 70_000, image=b"a"), 413, "entries"),
        (form(TEXTUAL, text=b"a" * 90_000), 413, "text"),
        (form(TEXTUAL, text=b"a" * 30_000), 400, "20,000"),
        (b"", 400, "early"),
        (form(FACES, image=b"a"), 400, "--immich-upstream"),
        (form({**FACES, **VISUAL}, image=jpeg(1)), 400, "--immich-upstream"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_its_own_form(
    served: Serving, body: bytes, status: int, named: str
) -> None:
    answer = predict(served, body)
    assert answer.status == status
    assert named in answer.json["detail"]


def test_only_forms_are_taken(served: Serving) -> None:
    for kind in (
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=" + 300 * "a",
    ):
        assert predict(served, form(VISUAL, image=jpeg(1)), kind).status == 400


def test_faces_are_passed_on_as_they_came(passing: tuple[Serving, Upstream]) -> None:
    served, upstream = passing
    body = form(FACES, image=jpeg(1))
    answer = predict(served, body)
    assert (answer.status, answer.json) == (200, FOUND)
    assert upstream.asked == [("/predict", f"multipart/form-data; boundary={BOUNDARY}", body)]
    upstream.answer = 500, b'{"detail":"no memory"}'
    answer = predict(served, form({"ocr": {}}, image=b"a"))
    assert (answer.status, answer.json) == (500, {"detail": "no memory"})
    assert predict(served, form(VISUAL, image=jpeg(1))).status == 200
    assert len(upstream.asked) == 2


def test_letters_beyond_ascii_in_the_type_of_a_form_are_passed_on(
    passing: tuple[Serving, Upstream],
) -> None:
    served, upstream = passing
    kind = f"multipart/form-data; boundary={BOUNDARY}; name=\xe9"
    assert predict(served, form(FACES, image=b"a"), kind).status == 200
    ((_, passed_on, _),) = upstream.asked
    assert passed_on == kind


def test_of_a_mixed_request_the_embedding_is_made_here_and_the_rest_there(
    passing: tuple[Serving, Upstream],
) -> None:
    served, upstream = passing
    answer = predict(served, form({**VISUAL, **FACES}, image=jpeg(1)))
    assert answer.json["facial-recognition"] == FOUND["facial-recognition"]
    assert answer.json["clip"] == predict(served, form(VISUAL, image=jpeg(1))).json["clip"]
    ((_, kind, body),) = upstream.asked
    fields = immich.read_form(kind, body)
    assert json.loads(fields["entries"]) == FACES
    assert fields["image"] == jpeg(1)
    for bad in ((500, b"{}"), (200, b"no")):
        upstream.answer = bad
        assert predict(served, form({**VISUAL, **FACES}, image=jpeg(1))).status == 502


def test_an_upstream_that_is_slow_or_endless_or_gone_is_not_waited_for(
    passing: tuple[Serving, Upstream], trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, upstream = passing
    monkeypatch.setattr(immich, "SECONDS", 0.2)
    for way in ("slow", "silent"):
        upstream.answer = way
        assert predict(served, form(FACES, image=b"a")).status == 502
    assert upstream.left.wait(5)
    monkeypatch.setattr(immich, "SECONDS", 10)
    monkeypatch.setattr(immich, "MOST_ANSWER", 100_000)
    upstream.answer = 200, b" " * 200_000
    assert predict(served, form(FACES, image=b"a")).status == 502
    with serving(trained, immich_upstream=f"http://127.0.0.1:{free_port()}/behind/") as alone:
        answer = predict(alone, form(FACES, image=b"a"))
        assert answer.status == 502
        assert "--immich-upstream" in answer.json["detail"]


@pytest.mark.parametrize(
    ("status", "kind", "passed"),
    [
        (524, "application/json", 502),
        (999, "application/json", 502),
        (199, "application/json", 502),
        (422, "application/json", 422),
        (200, "application/json;\r\n charset=utf-8", 200),
        (200, "application/json; name=\N{LATIN SMALL LETTER E WITH ACUTE}", 200),
        (200, "application/json; name=\xe6\x97\xa5", 200),  # a character of UTF-8 in three bytes
        (200, "a\0b", 502),  # no header may have such
    ],
)
def test_odd_answers_of_an_upstream_are_answers_too(
    passing: tuple[Serving, Upstream], status: int, kind: str, passed: int
) -> None:
    served, upstream = passing
    upstream.answer, upstream.kind = (status, b"{}"), kind
    assert predict(served, form(FACES, image=b"a")).status == passed


def test_a_caller_who_goes_away_frees_the_upstream(
    passing: tuple[Serving, Upstream],
) -> None:
    served, upstream = passing
    upstream.answer = "silent"
    address, body = urlsplit(served.url), form(FACES, image=b"a")
    head = f"POST /predict HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection((address.hostname, address.port)) as caller:
        caller.sendall(
            f"{head}Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n".encode() + body
        )
        while not upstream.asked:
            threading.Event().wait(0.01)
        assert not upstream.left.is_set()
    assert upstream.left.wait(5)


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize(
    "url", ["immich:3003", "ftp://immich", "http://", "http://a:b@immich", "http://immich:x", "/"]
)
def test_an_upstream_has_to_be_an_address(served: Serving, url: str) -> None:
    with pytest.raises(ConfigError, match="no address"):
        immich.Upstream(url)


@pytest.mark.parametrize(("open_paths", "expected"), [((), 401), (immich.OPEN, 400)])
def test_immich_has_no_key_and_needs_none_where_that_was_allowed(
    served: Serving, open_paths: tuple[str, ...], expected: int
) -> None:
    door = door_for("127.0.0.1", "lapclip serve", loopback=True, token=False)
    gate = Gate(served.app, served.service, door, "key", open_paths)
    statuses: list[int | None] = []
    given: list[bool] = []

    async def receive() -> Any:
        if given:
            await asyncio.Event().wait()  # the caller stays, and says no more
        given.append(True)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    for path in ("/predict", "/v1/embeddings"):
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(b"host", b"127.0.0.1")],
        }
        scope |= {"query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1"}
        statuses.clear()
        given.clear()
        asyncio.run(asyncio.wait_for(gate(cast(Any, scope), receive, send), 5))
        assert statuses[0] == (expected if path == "/predict" else 401)


def test_a_form_of_very_many_parts_is_not_read_to_its_end(served: Serving) -> None:
    answer = predict(
        served, f"--{BOUNDARY}\r\n\r\n\r\n".encode() * 10_000 + f"--{BOUNDARY}--\r\n".encode()
    )
    assert answer.status == 400
    assert "parts" in answer.json["detail"]
