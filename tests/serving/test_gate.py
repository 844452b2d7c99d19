"""Who may ask, how much, how slowly; and that a full queue answers at once."""

from __future__ import annotations

import base64
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lapclip.serving import service
from lapclip.serving.items import ImageFile, Text
from lapclip.serving.service import Limits

from ..conftest import wait_until
from .conftest import Serving, jpeg, serving

KEY = "0123456789abcdef-secret"
ASKED = {"items": [{"text": "a cat"}]}


@pytest.fixture(scope="module")
def guarded(trained: Path) -> Iterator[Serving]:
    """With a key and small limits."""
    limits = Limits(
        deadline=60,
        items=3,
        body_bytes=20_000,
        all_body_bytes=30_000,
        body_seconds=2.0,
        cache_bytes=0,
    )
    with serving(trained, limits, key=KEY) as found:
        yield found


def test_a_key_is_asked_for_everything_but_probes(guarded: Serving) -> None:
    assert guarded.post("/embed", ASKED).status == 401
    assert guarded.get("/metrics").status == 401
    assert guarded.post("/embed", ASKED, Authorization="Bearer wrong").status == 401
    assert guarded.post("/embed", ASKED, Authorization=f"Bearer {KEY}").status == 200
    assert guarded.post("/embed", ASKED, **{"X-API-Key": KEY}).status == 200
    assert guarded.get("/health").status == 200
    assert guarded.get("/ready").status == 200
    assert KEY.encode() not in guarded.post("/embed", ASKED, Authorization=f"Bearer {KEY}x").body


def test_pages_of_other_sites_get_nothing(served: Serving) -> None:
    assert served.post("/embed", ASKED, Host="evil.example").status == 403
    assert served.post("/embed", ASKED, Origin="http://evil.example").status == 403


def test_limits_are_refused_with_the_reason(guarded: Serving) -> None:
    key = {"X-API-Key": KEY}
    assert guarded.post("/embed", {"items": [{"text": "a"}] * 4}, **key).status == 413
    assert guarded.post("/embed", {"items": [{"text": "a" * 25_000}]}, **key).status == 413
    assert guarded.post("/embed", ASKED, **key).status == 200


def test_a_slow_sender_is_cut_off(guarded: Serving) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        head = f"POST /embed HTTP/1.1\r\nHost: {host}\r\nX-API-Key: {KEY}\r\nContent-Length: 1000\r\n\r\n"
        raw.sendall(head.encode() + b'{"items"')
        began = time.monotonic()
        assert b"408" in raw.recv(100)
        assert time.monotonic() - began < 30
    assert guarded.post("/embed", ASKED, **{"X-API-Key": KEY}).status == 200


def test_all_requests_together_have_a_limit(guarded: Serving) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
    head = f"POST /embed HTTP/1.1\r\nHost: {host}\r\nX-API-Key: {KEY}\r\nContent-Length: 18000\r\n\r\n".encode()
    with socket.create_connection((host, int(port)), timeout=60) as first:
        first.sendall(head)
        time.sleep(0.1)
        assert (
            guarded.post("/embed", ASKED, **{"X-API-Key": KEY}).status == 200
        )  # what is only announced takes no room
        first.sendall(b" " * 17_000)
        wait_until(lambda: guarded.gate.bytes >= 17_000)
        with socket.create_connection((host, int(port)), timeout=60) as second:
            second.sendall(head + b" " * 17_000)
            answer = second.recv(1000)
    assert b"503" in answer.split(b"\r\n")[0]
    assert b"retry-after" in answer.lower()


def held_engine(found: Serving) -> threading.Event:
    """Makes the engine wait until the event is set."""
    hold, embed = threading.Event(), found.service.model.engine.embed

    def slow(tower: str, rows: object) -> object:
        hold.wait(60)
        return embed(tower, rows)  # type: ignore[arg-type]

    found.service.model.engine.embed = slow  # type: ignore[method-assign]
    return hold


def test_a_full_queue_refuses_at_once_and_recovers(trained: Path) -> None:
    with serving(trained, Limits(queue_seconds=0.05, queue_requests=0, cache_bytes=0)) as found:
        hold = held_engine(found)
        items = [{"image": base64.b64encode(jpeg(seed)).decode()} for seed in range(10)]
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(found.post, "/embed", {"items": items}) for _ in range(8)]
            while not any(
                answer.done() for answer in answers
            ):  # one that was refused, as nothing is answered yet
                time.sleep(0.01)
            refused = found.post("/embed", {"items": items})
            hold.set()
            statuses = sorted(answer.result().status for answer in answers)
        assert refused.status == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert statuses[0] == 200
        assert set(statuses) <= {200, 429}
        assert found.post("/embed", {"items": items}).status == 200
        assert found.service.load == (0, 0.0)


def test_a_few_requests_may_always_wait(trained: Path) -> None:
    with serving(trained, Limits(queue_seconds=0.0, queue_requests=4, cache_bytes=0)) as found:
        hold = held_engine(found)
        with ThreadPoolExecutor(4) as pool:
            answers = [
                pool.submit(found.post, "/embed", {"items": [{"text": "a"}, {"text": "b"}]})
                for _ in range(4)
            ]
            while found.service.load[0] < 8:
                time.sleep(0.01)
            assert found.post("/embed", {"items": [{"text": "c"}]}).status == 429
            hold.set()
            assert [answer.result().status for answer in answers] == [200] * 4


def test_a_caller_who_goes_away_costs_nothing_more(trained: Path) -> None:
    with serving(trained, Limits(cache_bytes=0)) as found:
        hold, embed, computed = threading.Event(), found.service.model.engine.embed, []

        def slow(tower: str, rows: object) -> object:
            hold.wait(60)
            computed.append(len(rows))  # type: ignore[arg-type]
            return embed(tower, rows)  # type: ignore[arg-type]

        found.service.model.engine.embed = slow  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(found.post, "/embed", ASKED)  # it occupies the engine
            time.sleep(0.2)
            host, port = found.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as raw:
                body = b'{"items": [{"text": "one"}, {"text": "two"}]}'
                raw.sendall(
                    f"POST /embed HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n".encode()
                )
                raw.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
                wait_until(lambda: found.service.load[0] == 3)
            wait_until(lambda: found.service.load[0] == 1)
            hold.set()
            assert first.result().status == 200
        assert found.post("/embed", ASKED).status == 200
        assert computed == [1, 1]


@pytest.mark.parametrize(
    ("kind", "callers", "item"),
    [
        pytest.param(ImageFile, 8, {"image": base64.b64encode(jpeg(1)).decode()}, id="images"),
        pytest.param(Text, 4, {"text": "slow"}, id="texts"),
    ],
)
def test_texts_and_probes_do_not_wait_behind_items_that_take_long(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[ImageFile] | type[Text],
    callers: int,
    item: dict[str, str],
) -> None:
    hold, row = threading.Event(), kind.row

    def slow(self: ImageFile | Text, encoder: Any) -> Any:
        is_jpeg = isinstance(self, ImageFile) and self.data.startswith(b"\xff\xd8")
        if is_jpeg or (isinstance(self, Text) and self.text == "slow"):  # neither is golden
            hold.wait(60)
        return row(self, encoder)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(kind, "row", slow)
    with serving(trained, Limits(cache_bytes=0)) as found, ThreadPoolExecutor(callers) as pool:
        waiting = [pool.submit(found.post, "/embed", {"items": [item]}) for _ in range(callers)]
        time.sleep(0.2)
        began = time.monotonic()
        if kind is ImageFile:
            assert found.post("/embed", ASKED).status == 200
        assert found.get("/ready").status == 200
        assert time.monotonic() - began < 30
        hold.set()
        assert {each.result().status for each in waiting} == {200}


def test_images_that_take_long_to_decode_fill_the_queue(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ImageFile.row

    def slow(self: ImageFile, encoder: object) -> object:
        time.sleep(0.1)
        return row(self, encoder)  # type: ignore[arg-type]

    monkeypatch.setattr(ImageFile, "row", slow)
    monkeypatch.setattr(service, "logical_cores", lambda: 2)  # on many cores nothing would wait
    with (
        serving(trained, Limits(cache_bytes=0, queue_seconds=0.15, queue_requests=0)) as found,
        ThreadPoolExecutor(16) as pool,
    ):
        image = {"items": [{"image": base64.b64encode(jpeg(1)).decode()}]}
        for _ in range(6):  # what they cost becomes known
            assert found.post("/embed", image).status == 200
        answers = [pool.submit(found.post, "/embed", image) for _ in range(32)]
        assert {answer.result().status for answer in answers} == {200, 429}


def test_what_was_accepted_is_answered_while_the_server_ends(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = served.service.embed

    async def end_meanwhile(*arguments: object, **options: object) -> object:
        served.service.draining = True
        return await embed(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(served.service, "embed", end_meanwhile)
    try:
        asked = {"images": [base64.b64encode(jpeg(3)).decode()], "labels": ["a cat", "a dog"]}
        assert served.post("/classify", asked).status == 200  # several turns
        refused = served.post("/embed", ASKED)
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        assert served.get("/health").status == 200
        assert served.get("/ready").status == 503
    finally:
        served.service.draining = False


def test_a_fault_of_ours_is_one_line_without_what_was_sent(
    served: Serving, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a secret cat")

    monkeypatch.setattr(served.service, "embed", broken)
    answer = served.post("/embed", {"items": [{"text": "a secret cat"}]})
    assert answer.status == 500
    assert b"secret" not in answer.body
    time.sleep(0.1)
    said = capfd.readouterr().err
    assert "ZeroDivisionError" in said
    assert "secret" not in said
    assert len(said.splitlines()) == 1


def test_a_data_uri_without_end_blocks_nobody(served: Serving) -> None:
    began = time.monotonic()
    assert served.post("/embed", {"items": [{"image": "data:" + "a" * 10_000_000}]}).status == 400
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("path", ["/health", "/embed"])
def test_requests_that_need_no_body_may_not_have_one(guarded: Serving, path: str) -> None:
    request = urllib.request.Request(
        guarded.url + path,
        b" " * 15_000,
        {"X-API-Key": KEY},
        method="GET" if path == "/embed" else "POST",
    )
    assert guarded._ask(request).status == 413


@pytest.mark.parametrize(
    "kind", ["application/json", "application/JSON", "Application/Vnd.Any+Json"]
)
def test_json_of_very_many_elements_is_refused_before_it_is_read(
    served: Serving, kind: str
) -> None:
    began = time.monotonic()
    body = b'{"items":[' + b"{}," * 2_000_000 + b"{}]}"
    answer = served.post("/embed", body, **{"Content-Type": kind})
    assert answer.status == 413
    assert "elements" in answer.json["error"]["message"]
    assert time.monotonic() - began < 30
