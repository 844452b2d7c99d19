"""Does a request exist that breaks a page, makes it grow, or gets what it should not? Both pages, generated requests.

    .venv/bin/python benchmarks/hostile_requests.py [--requests 20000] [--seed 0]

Each request is made by hypothesis from what addresses and headers consist of, and from what they must not; it goes to
the page of `watch` and to that of `search`, with their token and without it. Most are given to the application as the
server gives them; a tenth goes over sockets to the real commands, bytes damaged on the way. No answer may be a 5xx,
none may hold the canary that lies in files beside what is served, no memory may grow. Needs hypothesis (the extra
`test`); takes about a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import psutil
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lapclip.searching.library import Library, open_library
from lapclip.searching.web import Application as SearchPage
from lapclip.watch import web as watch_app
from lapclip.web.security import Guard, door_for

CANARY = "a canary 5b1f0c"
BLOCK = 250
"""Generated requests at a time: what hypothesis remembers of them is forgotten after each block."""
PAGES = 2
WAYS = 2
"""With the token, and without it."""
SOCKET_SHARE = 0.1
MOST_GROWTH = 40e6
"""Bytes that a process may grow from the end of the first quarter to the end."""
UNCHECKED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
HIDDEN = "private"
"""A folder that --exclude leaves out."""
SETTINGS = [
    "model.name=tiny",
    "data.train_pairs=64",
    "train.batch_size=16",
    "train.steps=12",
    "train.device=cpu",
]


HOSTS = [b"127.0.0.1:8765", b"localhost", b"[::1]:9000"]
PORTS = (8765, 80, 9000)
ADDRESSES = ["/", "/runs", "/runs/mine", "/runs/mine/events", "/runs/later/events", "/runs/mine/pictures/17.png",
             "/search", "/asked", "/asked/x", "/page.js", "/plotly.js", "/base.css", "/icon.svg",
             "/runs/mine/pictures/" + "9" * 5000 + ".png",
             *(f"/images/{n}{form}" for n in (*range(14), 2**63, "9" * 5000)
               for form in ("", "/small", "/whole"))]  # fmt: skip
PARTS = ["runs", "mine", ".hidden", "events", "pictures", "17.png", "18.png", "images", "1", "-1", "1e3", "small",
         "whole", "asked", "search", "page.html", "app.py", "secret.txt", "notes.txt", "run.toml", "log.txt",
         "events.jsonl", "photos", "hidden.png", "pictures.db", "static", "*", ";", "@", "[", "{file}", "", ".", "..",
         "%2e%2e", "..%2f..", "%5c..%5c", "%00", "%ff%fe", "%ed%a0%80", "%F0%9F%98%80", HIDDEN, "9" * 20, "9" * 5000,
         "a" * 999]  # fmt: skip
VALUES = [
    "",
    "a red cat -snow",
    "-",
    '-"',
    '"',
    "a" * 1001,
    "9" * 16,
    "9" * 5000,
    "٣",
    "\0",
    "../../secret.txt",
    "%",
    "nan",
]
ODD = [
    b"",
    b"[",
    b"9" * 5000,
    b'"',
    b"-",
    b"\xff\xfe",
    b";=;,",
    b"evil.example",
    b"127.0.0.1:x",
    b"[::1",
    b"a@b:1",
]
HEADERS = {
    "origin": [
        b"http://[",
        b"null",
        b"http://[::1",
        b"https://\xff",
        b"http://evil.example",
        b"http://127.0.0.1:8765",
    ],
    "range": [
        b"bytes=" + b"9" * 5000 + b"-",
        b"bytes=0-0,1-1",
        b"bytes=-",
        b"bytes=5-1",
        b"lines=1-2",
    ],
    "sec-fetch-site": [b"cross-site", b"same-site", b"same-origin", b"none"],
    "sec-fetch-mode": [b"navigate", b"cors", b"no-cors"],
}
OTHER_HEADERS = [
    "cookie",
    "if-none-match",
    "last-event-id",
    "accept",
    "content-type",
    "if-range",
    "upgrade",
    "expect",
    "transfer-encoding",
    "host",
]
INSERTED = [
    *(
        b"",
        b"\0",
        b"\r\n",
        b"\r\n\r\n",
        b"\n",
        b" ",
        b"\xff",
        b": ",
        b"a" * 70_000,
        b"x: y\r\n" * 3000,
    ),
    *(
        b"transfer-encoding: chunked\r\n",
        b"content-length: 5\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\n",
    ),
]


class Request(NamedTuple):
    """As it comes over the wire, but for the token."""

    method: str
    target: str
    headers: tuple[tuple[str, bytes], ...]
    body: bytes
    token_in_cookie: bool

    def with_token(self, token: str) -> Request:
        if self.token_in_cookie:
            cookies = "; ".join(f"lapclip_{port}={token}" for port in PORTS)
            return self._replace(headers=(*self.headers, ("cookie", cookies.encode())))
        return self._replace(
            target=f"{self.target}{'&' if '?' in self.target else '?'}token={token}"
        )

    def raw(self) -> bytes:
        head = f"{self.method} {self.target} HTTP/1.1\r\n".encode("latin-1")
        lines = (name.encode() + b": " + value + b"\r\n" for name, value in self.headers)
        sized = f"content-length: {len(self.body)}\r\nconnection: close\r\n\r\n".encode()
        return head + b"".join(lines) + sized + self.body


def hostile() -> st.SearchStrategy[Request]:
    """Requests that are almost right, in all their parts."""
    parts = st.sampled_from([*PARTS, quote(os.path.abspath("secret.txt"), safe="")])
    paths = st.one_of(
        *(st.sampled_from(ADDRESSES) for _ in range(4)),
        st.lists(parts, max_size=6).map(lambda found: "/" + "/".join(found)),
        st.tuples(st.sampled_from(ADDRESSES), parts).map("/".join),
        st.text(max_size=20).map(lambda text: "/" + _quoted(text)),
    )
    values = st.one_of(
        st.sampled_from(VALUES), st.text(max_size=12), st.integers(-3, 300).map(str)
    ).map(_quoted)
    pairs = st.tuples(
        st.sampled_from(["words", "like", "image", "page", "after", "token", "v", ""]), values
    )
    queries = st.lists(pairs, max_size=4).map(
        lambda found: "?" * bool(found) + "&".join(map("=".join, found))
    )
    odd = st.one_of(st.sampled_from(ODD), st.binary(max_size=30))
    # Most by a name that is known, or nothing behind the door would be reached.
    hosts = st.sampled_from(HOSTS * 30 + ODD)
    header = st.one_of(
        *(st.tuples(st.just(name), st.sampled_from(values)) for name, values in HEADERS.items()),
        st.tuples(st.sampled_from([*HEADERS, *OTHER_HEADERS]), odd),
    )
    image = _png()
    bodies = st.sampled_from(
        [b"", image, image[:50], image[:16] + b"\xff" * 8 + image[24:], b"no image"]
    )
    return st.builds(
        lambda method, path, query, host, headers, body, in_cookie: Request(
            method, path + query, (("host", host), *headers), body, in_cookie
        ),
        st.sampled_from(
            ["GET"] * 8 + ["HEAD", "POST", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "get"]
        ),
        paths,
        queries,
        hosts,
        st.one_of(*(st.just([]) for _ in range(2)), st.lists(header, max_size=3)),
        bodies,
        st.booleans(),
    )


class Damage(NamedTuple):
    """What happens to the bytes of a request on its way: some are taken out at a place, others put in."""

    place: float
    taken: int
    put: bytes

    def of(self, raw: bytes) -> bytes:
        at = int(self.place * len(raw))
        return raw[:at] + self.put + raw[at + self.taken :]


DAMAGES = st.builds(
    Damage,
    st.floats(0, 1),
    st.sampled_from([0, 0, 1, 2, 100, 10**6]),
    st.one_of(st.sampled_from(INSERTED), st.binary(max_size=3)),
)


@dataclass
class Findings:
    """What was answered, and what should not have been."""

    canaries: list[bytes]
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def judge(
        self, kind: str, request: object, status: int | None, answer: bytes, *, token: bool
    ) -> None:
        self.statuses[f"{kind} {'with' if token else 'without'} token: {status or 'closed'}"] += 1
        if status is not None and status >= 500:
            self.wrong.append(f"{kind}: status {status} for {request!r:.600}")
        if not token and status is not None and status < 400:
            self.wrong.append(f"{kind}: status {status} without the token for {request!r:.600}")
        if any(canary in answer for canary in self.canaries):
            self.wrong.append(f"{kind}: what lies outside was sent for {request!r:.600}")


async def ask(app: Any, request: Request) -> tuple[int, bytes]:
    """The answer of an application, given the request as the server would give it."""
    target, _, query = request.target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(target),
        "raw_path": target.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(name.encode(), value) for name, value in request.headers],
        "server": ("127.0.0.1", 8765),
        "client": None,
    }
    bodies = [{"type": "http.request", "body": request.body, "more_body": False}]
    status, parts = 0, list[bytes]()

    async def receive() -> dict[str, Any]:
        if bodies:
            return bodies.pop()
        await asyncio.Event().wait()  # whoever asks stays
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            parts.extend(name + b": " + value for name, value in message["headers"])
        else:
            parts.append(message.get("body", b""))

    await asyncio.wait_for(app(scope, receive, send), 60)
    return status, b"\n".join(parts)


async def exchange(port: int, raw: bytes, patience: float = 0.3) -> tuple[int | None, bytes]:
    """What comes back over a socket: the highest status and all bytes; None where the connection was just closed."""
    answer = b""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw)
        while chunk := await asyncio.wait_for(
            reader.read(1 << 16), patience if not answer else 2 * patience
        ):
            answer += chunk
    except (TimeoutError, ConnectionError):  # half a request: nobody owes an answer
        pass
    else:
        writer.close()
    statuses = [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]
    return max(statuses, default=None), answer


def by_application(
    runner: asyncio.Runner,
    apps: dict[str, tuple[Any, str]],
    examples: int,
    found: Findings,
    start: int,
) -> None:
    """Give `examples` requests to each application, with its token and without it; always in the same loop."""

    async def both(request: Request) -> None:
        for kind, (app, token) in apps.items():
            for sent, known in ((request, False), (request.with_token(token), True)):
                try:
                    status, answer = await ask(app, sent)
                except Exception as error:
                    found.wrong.append(f"{kind}: {type(error).__name__}: {error} for {sent!r:.600}")
                else:
                    found.judge(kind, sent, status, answer, token=known)

    _each(hostile(), examples, start, lambda request: runner.run(both(request)))


def by_socket(
    servers: dict[str, tuple[int, str]], examples: int, found: Findings, start: int
) -> None:
    """Send `examples` damaged requests to each server, with its token and without it."""
    sent: list[tuple[str, int, bytes, bool]] = []

    def note(drawn: tuple[Request, Damage]) -> None:
        request, damage = drawn
        for kind, (port, token) in servers.items():
            sent.append((kind, port, damage.of(request.raw()), False))
            sent.append((kind, port, damage.of(request.with_token(token).raw()), True))

    async def all_of_them() -> None:
        turn = asyncio.Semaphore(16)

        async def one(kind: str, port: int, raw: bytes, token: bool) -> None:
            async with turn:
                found.judge(f"{kind} by socket", raw, *await exchange(port, raw), token=token)

        await asyncio.gather(*(one(*each) for each in sent))

    _each(st.tuples(hostile(), DAMAGES), examples, start, note)
    asyncio.run(all_of_them())


def _each(
    strategy: st.SearchStrategy[Any], examples: int, start: int, work: Callable[[Any], None]
) -> None:
    """Work on so many examples, and on no example twice for being wrong: what is wrong is noted."""

    @seed(start)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=UNCHECKED,
    )
    @given(strategy)
    def run(example: Any) -> None:
        work(example)

    run()


def make_places(base: Path) -> list[bytes]:
    """Photos and a run in `base`, with canaries beside and among them; what must never be sent."""
    photos, run = base / "photos", base / "runs" / "mine"
    for folder in (
        photos / HIDDEN,
        photos / ".hidden",
        run / "pictures",
        base / "runs" / ".hidden",
    ):
        folder.mkdir(parents=True)
    for number in range(8):
        (photos / f"image {number}.png").write_bytes(_png(number))
    marked = PngInfo()
    marked.add_text("canary", CANARY)
    for path in (photos / HIDDEN / "hidden.png", photos / ".hidden" / "hidden.png"):
        Image.new("RGB", (48, 48), "red").save(path, pnginfo=marked)
    for path in (
        base / "secret.txt",
        photos / "notes.txt",
        run / "log.txt",
        base / "runs" / ".hidden" / "run.toml",
    ):
        path.write_text(f"# {CANARY}\n")
    (run / "run.toml").write_text(f"[run]\nformat = 1\nrecipe = 'first-run'\n# {CANARY}\n")
    (run / "pictures" / "17.png").write_bytes(_png())
    if sys.platform != "win32":
        (run / "pictures" / "18.png").symlink_to(base / "secret.txt")
    events = [
        {"type": "started", "steps": 2},
        *({"type": "step", "step": step, "loss": 1.0} for step in (1, 2)),
    ]
    lines = [
        {"v": 1, "time": 1.79e9, **event} for event in (*events, {"type": "finished", "step": 2})
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [CANARY.encode(), b"hidden.png", str(base).encode()]


def applications(library: Library) -> dict[str, tuple[Any, str]]:
    """Both pages behind their doors, with their tokens; in the current folder."""
    watch_app.PATIENCE = 0.01  # a stream for a run that is not there would wait for it
    pages = {
        "watch": watch_app.Application([]).routed(),
        "search": SearchPage(library, exclude=[HIDDEN]).routed(),
    }
    doors = {kind: door_for("127.0.0.1", "lapclip", loopback=True) for kind in pages}
    return {kind: (Guard(page, doors[kind]), doors[kind].token) for kind, page in pages.items()}


@contextmanager
def commands(base: Path, model: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """The real commands, each of which has said its address."""
    flags = {
        "watch": ["watch"],
        "search": ["search", "photos", "--model", str(model), "--exclude", HIDDEN],
    }
    started = {}
    with ExitStack() as stack:
        for kind, words in flags.items():
            errors = stack.enter_context(open(base / f"{kind}.txt", "w"))
            command = [sys.executable, "-m", "lapclip", *words, "--web", "--port", "0", "--json"]
            process = subprocess.Popen(
                command, cwd=base, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            started[kind] = stack.enter_context(process)
            stack.callback(process.kill)
        yield started


def _quoted(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"))


def _png(number: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (number * 30, 90, 200)).save(file, "PNG")
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began, examples = time.monotonic(), options.requests // (PAGES * WAYS)
    with tempfile.TemporaryDirectory() as place:
        base = Path(place).resolve()
        os.chdir(base)
        os.environ["LAPCLIP_DATA"], os.environ["LAPCLIP_CACHE"] = (
            str(base / "data"),
            str(base / "cache"),
        )
        from lapclip.commands.train import train
        from lapclip.runs.folder import TrainRequest

        train(TrainRequest("first-run", tuple(SETTINGS)), name="model")
        model = (base / "runs" / "model").rename(base / "model")
        found = Findings(make_places(base))
        library = open_library(base / "photos", str(model))
        hidden = next(hit for hit in library.newest(99) if hit.path.name == "hidden.png")
        entry = library.entry(hidden.number)
        assert entry
        found.canaries.append(entry.digest.encode())
        apps = applications(library)
        with commands(base, model) as processes, asyncio.Runner() as runner:
            urls = {
                kind: urlsplit(json.loads(each.stdout.readline())["url"])
                for kind, each in processes.items()
                if each.stdout
            }
            servers = {
                kind: (url.port or 0, url.query.removeprefix("token="))
                for kind, url in urls.items()
            }
            measured = {
                "this process": psutil.Process(),
                **{k: psutil.Process(p.pid) for k, p in processes.items()},
            }
            sizes: list[dict[str, int]] = []
            for block, first in enumerate(range(0, examples, BLOCK)):
                count = min(BLOCK, examples - first)
                over_sockets = round(SOCKET_SHARE * count)
                by_application(runner, apps, count - over_sockets, found, options.seed + 2 * block)
                by_socket(servers, over_sockets, found, options.seed + 2 * block + 1)
                gc.collect()
                sizes.append(
                    {kind: process.memory_info().rss for kind, process in measured.items()}
                )
                print(
                    f"{sum(found.statuses.values()):,} requests, {len(found.wrong)} wrong",
                    file=sys.stderr,
                )
            for kind, (port, token) in servers.items():
                last = Request("GET", "/", (("host", b"localhost"),), b"", True).with_token(token)
                status, _ = asyncio.run(exchange(port, last.raw(), 10))
                if status != 200:
                    found.wrong.append(f"{kind}: does not answer at the end: {status}")
        found.wrong += [
            f"{kind}: a traceback"
            for kind in servers
            if "Traceback" in (base / f"{kind}.txt").read_text()
        ]
        library.close()
    quarter = sizes[len(sizes) // 4]
    for line, count in sorted(found.statuses.items()):
        print(f"{count:7,}  {line}")
    for kind, now in sizes[-1].items():
        grown = now - quarter[kind]
        print(f"{kind}: {now / 1e6:.0f} MB, {grown / 1e6:+.1f} MB since the first quarter")
        if grown > MOST_GROWTH:
            found.wrong.append(f"{kind} grew by {grown / 1e6:.0f} MB")
    total, wrong = sum(found.statuses.values()), found.wrong
    bad = sum(count for line, count in found.statuses.items() if re.search(r": 5\d\d$", line))
    print(
        f"{total:,} requests, {bad} answers of 5xx, {len(wrong)} wrong, {time.monotonic() - began:.0f} s"
    )
    for line in wrong[:20]:
        print(line)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
