"""Whom the server refuses, and what it never serves."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from .made import HOSTILE, Served, ended, learning_run, looked, make_run, server, started

PATHS = [
    "/runs/..",
    "/runs/%2e%2e",
    "/runs/..%2f..%2fsecret",
    "/runs/../secret",
    "/runs/%2e%2e/events",
    "/runs/mine/../../secret",
    "/runs/..%5c..%5csecret/events",
    "/runs//events",
    "/runs/mine/pictures/..%2frun.toml",
    "/runs/mine/pictures/../run.toml",
    "/runs/mine/pictures/a.png",
    "/runs/mine/pictures/-1.png",
    "/runs/mine/pictures/99.png",
    "/runs/mine/pictures/18.png",
    "/runs/mine/run.toml",
    "/runs/mine/events.jsonl",
    "/runs/%00",
    "/runs/mine%00",
    "/secret",
    "/..%2fsecret",
    "/%2e%2e/secret",
    "/server.py",
    "/static/page.js",
    "/page.html",
    "//runs",
    "/runs/",
    "/runs/mine/",
    "/runs/.hidden",
    "/runs/.hidden/events",
    "/runs/%2e%2e%2fsecret/events",
]


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1.evil.example",
        "localhost.evil",
        "",
        "[",
        "192.168.1.7",
    ],
)
def test_other_names_of_this_machine_are_refused(served: Served, host: str) -> None:
    for path in ("/", "/runs", "/plotly.js", "/nothing"):
        answer = served.ask(path, Host=host.format(port=served.port))
        assert answer.status in (400, 403), path
        assert b"<html" not in answer.read()


@pytest.mark.parametrize(
    "host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:9000", "[::1]:{port}", "127.0.0.1"]
)
def test_own_names_are_known_whatever_the_port(served: Served, host: str) -> None:
    # Another port is how a page comes through `ssh -L`.
    assert served.ask("/runs", Host=host.format(port=served.port)).status == 200


def test_other_origins_and_embedding_sites_are_refused(served: Served) -> None:
    own = f"127.0.0.1:{served.port}"
    assert served.ask("/runs", Origin=f"http://{own}").status == 200
    for origin in (
        "http://evil.example",
        "null",
        "http://127.0.0.1:1",
        f"http://localhost:{served.port}",
        "http://[",
    ):
        assert served.ask("/runs", Origin=origin).status == 403, origin
    for site in ("cross-site", "same-site"):
        assert served.ask("/runs", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors").status == 403
        assert served.ask("/runs", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate").status == 403
        assert (
            served.ask("/", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate").status == 200
        )  # a link was followed
    assert served.ask("/runs", Sec_Fetch_Site="same-origin").status == 200


def test_every_answer_carries_the_policy(served: Served) -> None:
    for path in ("/", "/runs", "/page.js", "/plotly.js", "/nothing"):
        headers = served.ask(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers
    assert "unsafe" not in served.ask("/", Host="evil.example").headers["content-security-policy"]


def test_nothing_but_runs_is_served(served: Served) -> None:
    Path("secret").write_text("a secret")
    mine = make_run("mine", [started(1), ended(1)])
    make_run(".hidden", [started(1), ended(1)])
    try:
        (mine.path / "pictures" / "18.png").symlink_to(Path("secret").absolute())
    except OSError:  # Windows lets few users make links
        pass
    assert served.ask("/runs/mine/pictures/17.png").status == 200
    if hasattr(os, "mkfifo"):  # opening it would wait for a writer
        os.mkfifo(mine.path / "pictures" / "19.png")
    for path in (*PATHS, "/runs/mine/pictures/19.png"):
        answer = served.ask(path)
        body = answer.read()
        assert answer.status == 404, path
        assert answer.headers["content-type"].startswith("text/plain")
        assert b"a secret" not in body
        assert b"format" not in body


def test_other_methods_are_refused(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as raw:
        head = f"POST /runs?token={served.token} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}"
        raw.sendall(f"{head}\r\nContent-Length: 0\r\n\r\n".encode())
        assert raw.recv(4096).startswith(b"HTTP/1.1 405")


def test_names_asked_for_reach_the_page_as_text(here: Path) -> None:
    with server(HOSTILE, "runs/mine") as served:
        text = served.ask("/").read().decode()
    assert "<img" not in text
    assert "mine&quot;]" in text


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_token_is_needed_on_this_machine_and_beyond(here: Path, host: str) -> None:
    make_run("mine", [*learning_run(20), looked(20, 1), ended(20)])
    with server(host=host) as served:
        assert len(served.token) >= 32
        for path in (
            "/",
            "/runs",
            "/runs/mine/events",
            "/plotly.js",
            "/?token=",
            "/?token=wrong",
            "/?token=%C3%A4",
        ):
            refused = served.ask(path, Cookie="")
            assert refused.status == 401, path
            assert "set-cookie" not in refused.headers
            assert b"lapclip watch --web" in refused.read()
        for cookie in ("wrong", "", f"{served.token}x", f"{served.token[:-1]}"):
            assert served.ask("/runs", Cookie=f"lapclip_{served.port}={cookie}").status == 401
        assert served.ask("/runs", Cookie=f"lapclip_{served.port + 1}={served.token}").status == 401
        assert served.ask("/runs", Cookie="=;;; \x01").status in (400, 401)
        # With the right token, but by a name that is not this machine's.
        assert served.ask(f"/runs?token={served.token}", Host="evil.example").status == 403
        beyond = served.ask(f"/runs?token={served.token}", Host="192.168.1.7:1").status
        assert beyond == (403 if host == "127.0.0.1" else 200)


def test_token_moves_from_the_address_into_a_cookie(served: Served) -> None:
    entered = served.ask(f"/?token={served.token}", Cookie="")
    assert (entered.status, entered.headers["location"]) == (303, "/")
    cookie, *attributes = entered.headers["set-cookie"].split("; ")
    assert cookie == f"lapclip_{served.port}={served.token}"
    assert {"httponly", "samesite=strict", "path=/"} == {each.lower() for each in attributes}
    assert served.ask("/", Cookie=cookie).status == 200
    # Beside cookies of other servers of this host, whatever those are.
    assert served.ask("/runs", Cookie=f'a[b]={{"c": 1}}; {cookie}; =').status == 200
    assert served.ask(f"/runs?token={served.token}", Cookie="").status == 200  # for scripts
    # By the port that the browser sees, so that a page that comes through `ssh -L` has one of its own.
    tunnelled = served.ask(f"/?token={served.token}", Cookie="", Host="localhost:9000")
    assert tunnelled.headers["set-cookie"].startswith("lapclip_9000=")


def test_each_server_has_another_token(here: Path) -> None:
    with server() as first, server() as second:
        assert first.token != second.token


def test_malformed_requests_are_refused_and_nothing_breaks(served: Served) -> None:
    make_run("other", [started(1), ended(1)])
    for name, value in (
        ("Origin", "http://["),
        ("Origin", "http://[::1"),
        ("Host", "[::1"),
        ("Host", "127.0.0.1:99999999"),
        ("Cookie", "\xff=\xfe; ;=;"),
        ("Range", "bytes=" + "9" * 5000 + "-"),
        ("Range", "bytes=--1,,-"),
        ("If-None-Match", '"' * 999),
        ("Last-Event-ID", "-" * 999),
    ):
        assert served.ask("/page.js", None, **{name: value}).status in (200, 400, 401, 403), (
            name,
            value,
        )
    for path in (
        "/runs/other/pictures/" + "9" * 5000 + ".png",
        "/" + "a" * 20_000,
        "/%ff%fe",
        "/runs/%ed%a0%80/events",
    ):
        assert served.ask(path).status in (404, 414), path[:40]
