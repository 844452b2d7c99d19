"""A served model for tests: the real application, gate and engine, in a thread of this process."""

from __future__ import annotations

import io
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from PIL import Image

from lapclip.embedder import Encoder, load
from lapclip.serving.app import make_app
from lapclip.serving.engine import BatchTimes, Engine
from lapclip.serving.folder_search import FolderSearch
from lapclip.serving.gate import Gate
from lapclip.serving.metrics import Metrics
from lapclip.serving.service import Limits, ServedModel, Service
from lapclip.web.security import door_for

from ..conftest import wait_until


@dataclass(frozen=True)
class Reply:
    """An answer of the server."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Serving:
    """A running server and what it serves."""

    url: str
    service: Service
    encoder: Encoder
    app: Any
    gate: Gate
    headers: dict[str, str] = field(default_factory=dict)

    def get(self, path: str, **headers: str) -> Reply:
        return self._ask(
            urllib.request.Request(self.url + path, headers={**self.headers, **headers})
        )

    def post(self, path: str, content: Any, **headers: str) -> Reply:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        sent = {"Content-Type": "application/json", **self.headers, **headers}
        return self._ask(urllib.request.Request(self.url + path, data, sent))

    @staticmethod
    def _ask(request: urllib.request.Request) -> Reply:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return Reply(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            return Reply(error.code, error.headers, error.read())


def engine_of(path: Path) -> Engine:
    """An engine with the batches that a fast machine would choose: timing is not what most tests are about."""
    engine = Engine("torch-float32", load(path), 1)
    engine.times = {tower: BatchTimes({1: 0.002, 8: 0.008}) for tower in ("image", "text")}
    return engine


@contextmanager
def serving(
    path: Path,
    limits: Limits | None = None,
    key: str | None = None,
    search: Callable[[Service], FolderSearch] | None = None,
    **options: Any,
) -> Iterator[Serving]:
    """Serve a model on a free port until the end of the block; `options` go to `make_app`."""
    limits = limits or Limits()
    engine = engine_of(path)
    metrics = Metrics()
    service = Service(
        ServedModel("mine", engine, limits.cache_bytes, metrics.batch), limits, metrics
    )
    if search is not None:
        options["search"] = search(service)
    app = make_app(service, **options)
    gate = Gate(
        app, service, door_for("127.0.0.1", "lapclip serve", loopback=True, token=False), key
    )
    server = uvicorn.Server(
        uvicorn.Config(gate, port=0, log_level="error", lifespan="off", ws="none", http="h11")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, every=0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Serving(f"http://127.0.0.1:{port}", service, engine.encoder, app, gate)
    finally:
        server.should_exit = True
        thread.join(10)
        service.close()


@pytest.fixture(scope="module")
def served(trained: Path) -> Iterator[Serving]:
    """The model of the small run, for all tests of a file."""
    with serving(trained) as found:
        yield found


def jpeg(seed: int = 0, width: int = 80, height: int = 60) -> bytes:
    """The bytes of a small JPEG, another one for each seed."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (6, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((width, height)).save(file, "JPEG")
    return file.getvalue()
