"""What the rows of serving.py are measured with: photos and bodies, raw connections, servers on a core of their own.

Connections are kept alive and spoken to without an HTTP library, because such a library would cost more than some of
what is measured. Linux only: processes are tied to cores by `taskset`.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import psutil
from PIL import Image

from lapclip.data.scenes import captions, split_scenes
from lapclip.data.scenes.drawing import draw

ENGINE_CORE, LOAD_CORE = 0, 1
SIDE, QUALITY, NOISE = 500, 90, 24
"""Photos: the long side in pixels, the quality of their JPEG, and the noise that gives drawn ones a photo's bytes."""
COMMENT = 12
"""Bytes of a JPEG's comment, a multiple of 3: then in base64 too only these change."""
PATIENCE = 60.0
"""Seconds after which a caller calls it no answer."""
NO_ANSWER = 0
"""The status of a request whose connection was refused, reset, closed early, or silent for too long."""


# Photos, captions and bodies


class Photo:
    """A JPEG that can be made unique without encoding it again."""

    def __init__(self, jpeg: bytes) -> None:
        self._start = jpeg[:2] + b"\xff\xfe" + (COMMENT + 2).to_bytes(2, "big")
        self._rest = jpeg[2:]
        self._start64, self._rest64 = base64.b64encode(self._start), base64.b64encode(self._rest)

    def unique(self, number: int) -> bytes:
        """The file with a number in its comment."""
        return self._start + b"%0*d" % (COMMENT, number) + self._rest

    def unique64(self, number: int) -> bytes:
        """The same in base64."""
        return self._start64 + base64.b64encode(b"%0*d" % (COMMENT, number)) + self._rest64


def photos(folder: Path | None, count: int) -> list[Photo]:
    """Photos of 500 px: those of a folder, or drawn ones."""
    if folder is None:
        return [
            Photo(_jpeg(_noisy(draw(scene, SIDE, seed), seed)))
            for seed, scene in enumerate(_scenes(count))
        ]
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise SystemExit(f"There are no JPEG files in {folder}.")
    found = []
    for path in paths[:count]:
        image = Image.open(path).convert("RGB")
        image.thumbnail((SIDE, SIDE))
        found.append(Photo(_jpeg(image)))
    return found


def texts(count: int) -> list[str]:
    """Captions, all different."""
    random = Random(0)
    return [
        f"{captions(scene, 1, random)[0]} {number}" for number, scene in enumerate(_scenes(count))
    ]


def _scenes(count: int) -> list[Any]:
    return list(itertools.islice(itertools.cycle(split_scenes(count, 0)["train"]), count))


def _noisy(pixels: np.ndarray, seed: int) -> Image.Image:
    noise = np.random.default_rng(seed).normal(0, NOISE, pixels.shape)
    return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8)).crop(
        (0, 0, SIDE, SIDE * 3 // 4)
    )


def _jpeg(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


class Request(NamedTuple):
    """A request as it goes over the wire, and which vectors it should get."""

    data: bytes
    expected: tuple[tuple[str, int], ...] = ()
    """Of each item: "image" or "text", and which."""


class Requests:
    """Requests over some photos and captions, by number: equal numbers give equal requests, and no two others do."""

    def __init__(self, photos: list[Photo], texts: list[str]) -> None:
        self.photos, self.texts = photos, texts

    def image(self, number: int) -> Request:
        """One photo as a data URI."""
        at = number % len(self.photos)
        body = (
            b'{"model":"x","modality":"image","encoding_format":"base64","input":["%s"]}'
            % self._uri(at, number)
        )
        return Request(post("/v1/embeddings", body), (("image", at),))

    def text(self, number: int) -> Request:
        """One caption."""
        at = number % len(self.texts)
        return Request(post("/v1/embeddings", self._captions([at], "base64")), (("text", at),))

    def mixed(self, number: int) -> Request:
        """Every kind in turn: photos, captions, lists, both together; vectors as numbers and as base64."""
        kind, at = number % 6, number * 7919
        image, text = at % len(self.photos), at % len(self.texts)
        if kind == 0:
            return self.image(at)
        if kind == 1:
            return Request(
                post("/v1/embeddings", self._captions([text], "float")), (("text", text),)
            )
        if kind == 2:
            several = [(at + step) % len(self.texts) for step in range(3)]
            return Request(
                post("/v1/embeddings", self._captions(several, "base64")),
                tuple(("text", t) for t in several),
            )
        if kind == 3:
            items = b'{"items":[{"text":%s},{"image":"%s"}]}' % (
                json.dumps(self.texts[text]).encode(),
                self.photos[image].unique64(number),
            )
            return Request(post("/embed", items), (("text", text), ("image", image)))
        return self.text(at)

    def half(self, number: int) -> Request:
        """Photos and captions in turn."""
        return self.image(number // 2) if number % 2 else self.text(number // 2)

    def poisoned(self, number: int) -> Request:
        """What no server can embed, each kind in turn; the last has a good neighbour in its own request."""
        whole = self.photos[number % len(self.photos)].unique(number)
        uris = [whole[: len(whole) // 2], png_bomb(), b"not an image at all", b""]
        bodies = [
            *(
                _json({"model": "x", "modality": "image", "input": [data_uri(data)]})
                for data in uris
            ),
            _json({"model": "x", "modality": "image", "input": ["data:image/jpeg;base64,%%%%"]}),
            _json({"model": "x", "input": [number, {"text": 1}]}),
            b'{"model":"x","input":["a cat"',
        ]
        kind = number % (len(bodies) + 1)
        if kind < len(bodies):
            return Request(post("/v1/embeddings", bodies[kind]))
        image = base64.b64encode(whole[:2000]).decode()
        return Request(post("/embed", _json({"items": [{"text": "a cat"}, {"image": image}]})))

    def _uri(self, at: int, number: int) -> bytes:
        return b"data:image/jpeg;base64," + self.photos[at].unique64(number)

    def _captions(self, which: list[int], form: str) -> bytes:
        return _json(
            {"model": "x", "input": [self.texts[at] for at in which], "encoding_format": form}
        )


def post(path: str, body: bytes) -> bytes:
    """A request as bytes."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def data_uri(data: bytes) -> str:
    """Bytes as the data URI of a JPEG."""
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


def png_bomb() -> bytes:
    """A few kilobytes that say they are 1.6 gigapixels."""
    image = io.BytesIO()
    Image.new("1", (8, 8)).save(image, "PNG")
    header = image.getvalue()
    return header[:16] + (40_000).to_bytes(4, "big") * 2 + header[24:]


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()


def vectors(body: bytes) -> np.ndarray:
    """The rows of an answer, of either dialect."""
    answer = json.loads(body)
    if "embeddings" in answer:
        return np.array(answer["embeddings"], dtype=np.float32)
    rows = [row["embedding"] for row in sorted(answer["data"], key=lambda row: row["index"])]
    return np.stack([
        np.frombuffer(base64.b64decode(row), np.float32) if isinstance(row, str) else np.array(row, np.float32)
        for row in rows
    ])  # fmt: skip


# Connections and load


class Answer(NamedTuple):
    """What came back, when it was asked for and when it came."""

    status: int
    head: bytes
    body: bytes
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def header(self, name: str) -> str:
        found = re.search(rb"\r\n" + name.encode() + rb": *([^\r]*)", self.head, re.IGNORECASE)
        return found[1].decode() if found else ""


class Wire(asyncio.Protocol):
    """One open connection. asyncio's own streams forget an answer that came just before the connection was reset."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.is_open, self._got = True, b""
        self._answer: asyncio.Future[tuple[int, bytes, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def ask(self, data: bytes) -> asyncio.Future[tuple[int, bytes, bytes]]:
        self._got, self._answer = b"", asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, end, body = self._got.partition(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
        if (
            end
            and self._answer
            and not self._answer.done()
            and length
            and len(body) >= int(length[1])
        ):
            self._answer.set_result((int(head[9:12]), head, body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._answer and not self._answer.done():
            self._answer.set_exception(
                exc or EOFError(f"closed after {len(self._got)} bytes of an answer")
            )


class Connection:
    """A caller's connection: kept alive, opened when it is needed, and again where the server closed it meanwhile."""

    def __init__(self, port: int) -> None:
        self.port, self.used = port, 0.0
        self._wire: Wire | None = None

    async def ask(self, data: bytes) -> Answer:
        began = time.perf_counter()
        again = bool(self._wire and self._wire.is_open)
        try:
            async with asyncio.timeout(PATIENCE):
                if not self._wire or not self._wire.is_open:
                    loop = asyncio.get_running_loop()
                    _, self._wire = await loop.create_connection(Wire, "127.0.0.1", self.port)
                status, head, body = await self._wire.ask(data)
            if b"connection: close" in head.lower():
                self.close()
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            where = "a used connection" if again else "a new connection"
            status, head, body = NO_ANSWER, b"", f"{error!r} on {where}".encode()
        self.used = time.perf_counter()
        return Answer(status, head, body, began, self.used)

    def close(self) -> None:
        if self._wire:
            self._wire.transport.close()
        self._wire = None


Check = Callable[[Request, Answer], str]
"""Says what is wrong with an answer; empty where nothing is."""


def must_be_200(request: Request, answer: Answer) -> str:
    """Every answer is to be one."""
    return (
        ""
        if answer.status == 200
        else f"{answer.status}: {answer.body[:200].decode(errors='replace')}"
    )


@dataclass
class Load:
    """What a load was answered."""

    times: list[tuple[int, float, float]] = field(default_factory=list)
    """Status, beginning and end of each."""
    faults: Counter[str] = field(default_factory=Counter)

    def note(self, request: Request, answer: Answer, check: Check) -> None:
        self.times.append((answer.status, answer.began, answer.ended))
        fault = check(request, answer)
        if fault:
            self.faults[fault] += 1

    @property
    def statuses(self) -> dict[int, int]:
        return dict(sorted(Counter(status for status, _, _ in self.times).items()))

    @property
    def latencies(self) -> list[float]:
        """Seconds of those that were answered with 200."""
        return [ended - began for status, began, ended in self.times if status == 200]

    @property
    def rate(self) -> float:
        """Answers of 200 a second, from the first request to the last answer."""
        if not self.times:
            return 0.0
        span = max(ended for _, _, ended in self.times) - min(began for _, began, _ in self.times)
        return self.statuses.get(200, 0) / span


async def closed_loop(
    port: int,
    make: Callable[[int], Request],
    concurrency: int,
    *,
    seconds: float = float("inf"),
    count: float = float("inf"),
    check: Check = must_be_200,
    until: asyncio.Event | None = None,
) -> Load:
    """So many callers, each asking again once it was answered, until time, a count or an event ends it."""
    load, numbers = Load(), itertools.count(next(_unused))
    first = next(numbers)
    ends = time.perf_counter() + seconds

    async def caller() -> None:
        connection = Connection(port)
        while time.perf_counter() < ends and not (until and until.is_set()):
            number = next(numbers)
            if number - first > count:
                break
            request = make(number)
            load.note(request, await connection.ask(request.data), check)
        connection.close()

    await asyncio.gather(*(caller() for _ in range(concurrency)))
    return load


async def open_loop(
    port: int,
    make: Callable[[int], Request],
    rate: float,
    seconds: float,
    check: Check = must_be_200,
) -> Load:
    """Requests at a fixed rate, whether or not the earlier ones were answered, as from many callers who do not wait
    for each other. Connections that are free are used again."""
    load, free, asked, first = Load(), [], set(), next(_unused)
    began = time.perf_counter()

    async def ask(request: Request) -> None:
        while (
            free and time.perf_counter() - free[-1].used > 2
        ):  # the server may be about to close it
            free.pop().close()
        connection = free.pop() if free else Connection(port)
        load.note(request, await connection.ask(request.data), check)
        free.append(connection)

    for at in range(round(rate * seconds)):
        wait = began + at / rate - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        elif at % 16 == 0:
            await asyncio.sleep(0)  # late: others have to come to read their answers all the same
        task = asyncio.create_task(ask(make(first + at)))
        asked.add(task)
        task.add_done_callback(asked.discard)
    while asked:
        await asyncio.wait(asked)
    for connection in free:
        connection.close()
    return load


_unused = itertools.count(0, 1_000_000)
"""First numbers of loads, so that no two send the same bytes."""


# Servers


@dataclass
class Server:
    """A server that runs as a process of its own."""

    port: int
    process: subprocess.Popen
    log: Path
    seconds_to_ready: float = 0.0

    @property
    def memory(self) -> int:
        """Bytes that it and its children hold."""
        own = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in [own, *own.children(recursive=True)])

    def get(self, path: str) -> tuple[int, str]:
        """The status and body of an address; 0 where nobody answers."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}{path}", timeout=10
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except OSError:
            return NO_ANSWER, ""

    def metric(self, pattern: str) -> float | None:
        """The sum of the metrics whose names fit."""
        found = re.findall(
            rf"^{pattern}(?:\{{.*\}})? (\S+)$", self.get("/metrics")[1], re.MULTILINE
        )
        return sum(map(float, found)) if found else None


@contextmanager
def running(
    command: Sequence[str | Path], port: int, folder: Path, *, core: int | None = ENGINE_CORE, ready: str = "/ready",
    environment: dict[str, str] | None = None,
) -> Iterator[Server]:  # fmt: skip
    """A server, from its start to its end; ready when it is yielded. Without a core it may use them all."""
    cores = f"0-{(os.cpu_count() or 1) - 1}" if core is None else str(core)
    threads = {"OMP_NUM_THREADS": "1"} if core is not None else {}
    log = folder / f"server-{port}.log"
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", cores, *map(str, command)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **threads, **(environment or {})},
        )
    server = Server(port, process, log)
    try:
        while server.get(ready)[0] != 200:
            if process.poll() is not None or time.perf_counter() - began > 300:
                raise SystemExit(
                    f"{' '.join(map(str, command))}: not ready.\n{log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(0.02)
        server.seconds_to_ready = time.perf_counter() - began
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def lapclip_serve(model: Path, port: int, *options: str) -> list[str]:
    """The command, with caches off."""
    return [
        sys.executable,
        "-m",
        "lapclip",
        "serve",
        str(model),
        "--port",
        str(port),
        "--cache",
        "0",
        "--json",
        *options,
    ]


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


async def watched_memory(
    server: Server, until: asyncio.Event, every: float = 0.5
) -> list[tuple[float, int]]:
    """Moments, and the bytes that a server held at each."""
    found = []
    while not until.is_set():
        found.append((time.perf_counter(), server.memory))
        try:
            await asyncio.wait_for(until.wait(), every)
        except TimeoutError:
            pass
    return found


def spread(rates: Sequence[float]) -> float:
    """The range of some numbers as a share of their median."""
    return (max(rates) - min(rates)) / statistics.median(rates)
