"""`lapclip.connect`: the calls of a loaded model, over HTTP."""

from __future__ import annotations

import base64
import io
import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image, ImageCms

import lapclip
from lapclip import client
from lapclip.errors import ConfigError, RunError
from lapclip.serving.refusals import TooMany
from lapclip.serving.service import Limits

from .conftest import Serving, jpeg, serving


def test_the_same_calls_give_the_same_vectors(served: Serving, tmp_path: Path) -> None:
    paths = [tmp_path / f"{seed}.jpg" for seed in range(40)]  # more than one request holds
    for seed, path in enumerate(paths):
        path.write_bytes(jpeg(seed))
    captions = [f"{number} red cats" for number in range(70)]
    with lapclip.connect(served.url) as model:
        assert np.abs(model.encode_image(paths) - served.encoder.encode_image(paths)).max() < 1e-5
        opened = [Image.open(path) for path in paths[:2]]
        assert (
            np.abs(model.encode_image(opened) - served.encoder.encode_image(paths[:2])).max() < 1e-5
        )
        assert (
            np.abs(model.encode_text(captions) - served.encoder.encode_text(captions)).max() < 1e-5
        )
        assert (
            np.abs(model.encode_image(np.asarray(opened[0])) - model.encode_image(opened[0])).max()
            < 1e-5
        )
        assert np.abs(model.encode_text("a cat") - served.encoder.encode_text("a cat")).max() < 1e-5
        assert model.encode_text([]).shape == (0, model.embedding)
        assert model.fingerprint() == served.encoder.fingerprint()


def test_errors_name_the_item_and_the_server(served: Serving, tmp_path: Path) -> None:
    paths = [tmp_path / f"{seed}.jpg" for seed in range(40)]
    for seed, path in enumerate(paths):
        path.write_bytes(jpeg(seed) if seed != 37 else b"not an image")
    with lapclip.connect(served.url) as model:
        with pytest.raises(lapclip.LapclipError, match="Item 37: "):
            model.encode_image(paths)
        with pytest.raises(lapclip.LapclipError, match="no image"):
            model.encode_image([None])  # pyright: ignore[reportArgumentType]
    with pytest.raises(lapclip.LapclipError, match="does not answer"):
        lapclip.connect("http://127.0.0.1:9")
    with pytest.raises(lapclip.LapclipError, match="0123456789abcdef"):
        lapclip.connect(served.url, fingerprint="0123456789abcdef").encode_text(["a cat"])


def turned(image: Image.Image) -> Image.Image:
    """As a camera that was held upright writes it."""
    file, exif = io.BytesIO(), image.getexif()
    exif[0x0112] = 6
    image.save(file, "JPEG", exif=exif)
    return Image.open(file)


def of_another_profile(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "PNG", icc_profile=swapped_profile())
    return Image.open(file)


def swapped_profile() -> bytes:
    """sRGB whose red and blue are exchanged, which no image comes through unseen."""
    data = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return data.replace(b"rXYZ", b"tXYZ").replace(b"bXYZ", b"rXYZ").replace(b"tXYZ", b"bXYZ")


def test_open_images_are_seen_as_a_loaded_model_sees_them(served: Serving) -> None:
    photo, generator = Image.open(io.BytesIO(jpeg(3))), np.random.default_rng(0)
    noise = generator.random((40, 50))
    images = {
        "turned": turned(photo),
        "profile": of_another_profile(photo),
        "transparent": Image.merge("RGBA", (*photo.split(), photo.convert("L"))),
        "I;16": Image.fromarray((noise * 65535).astype(np.uint16)),
        "F": Image.fromarray(noise.astype(np.float32)),
        "I": Image.fromarray((noise * 255).astype(np.int32)),
        **{mode: photo.convert(mode) for mode in ("CMYK", "LAB", "P", "LA", "HSV", "1")},
    }
    with lapclip.connect(served.url) as model:
        found = np.abs(
            model.encode_image(list(images.values()))
            - served.encoder.encode_image(list(images.values()))
        )
        with pytest.raises(lapclip.LapclipError, match="from nan to nan"):
            model.encode_image([Image.fromarray(np.full((8, 8), np.nan, np.float32))])
    assert {
        name: float(far) for name, far in zip(images, found.max(axis=1), strict=True) if far > 1e-5
    } == {}


def test_images_that_are_large_as_png(
    served: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8))
    noisy.save(tmp_path / "noisy.png")
    with lapclip.connect(served.url) as model:
        monkeypatch.setattr(client, "LARGEST_IMAGE", 30_000)
        assert (model.encode_image([noisy]) * served.encoder.encode_image([noisy])).sum() > 0.99
        with pytest.raises(lapclip.LapclipError, match=r"noisy\.png has more than"):
            model.encode_image([tmp_path / "noisy.png"])
        monkeypatch.setattr(client, "LARGEST_IMAGE", 10_000)
        with pytest.raises(lapclip.LapclipError, match="120 x 90"):
            model.encode_image([noisy])


def test_requests_stay_below_what_a_server_takes(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = [Image.open(io.BytesIO(jpeg(seed))) for seed in range(9)]
    size = len(base64.b64encode(client._bytes_of(photos[0])))
    with (
        serving(trained, Limits(body_bytes=5 * size)) as small,
        lapclip.connect(small.url) as model,
    ):
        monkeypatch.setattr(client, "BATCH_BYTES", 3 * size)
        assert np.abs(model.encode_image(photos) - small.encoder.encode_image(photos)).max() < 1e-5
        # Far more than fits into the buffers on the way: the server answers and closes while it is sent.
        with pytest.raises(lapclip.LapclipError, match=r"[kM]B at most"):
            model.encode_text(["x" * 30_000_000])
        assert len(model.encode_text(["a cat"])) == 1


@pytest.mark.parametrize("key", ["SECRET\nkey", "SECRET\u00e9"])
def test_a_key_that_cannot_be_sent_is_not_printed(served: Serving, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        lapclip.connect(served.url, key=key)
    assert "SECRET" not in str(refused.value)


def test_keys_and_addresses_as_people_write_them(trained: Path) -> None:
    with serving(trained, key="right") as closed:
        assert len(lapclip.connect(closed.url, key="right\n").encode_text(["a cat"])) == 1
        for url in (f"{closed.url}/v1/?token=a#part", closed.url.replace("//", "//name:word@")):
            assert len(lapclip.connect(url, key="right").encode_text(["a cat"])) == 1
    for url in ("http://h:abc", "http://[h", "h:80", "ftp://h"):
        with pytest.raises(ConfigError):
            lapclip.connect(url)


def test_how_long_a_busy_server_is_left_alone() -> None:
    asked = ("3", "600", None, "Wed, 21 Oct 2026 07:28:00 GMT", "-1", "nan")
    assert [client._pause(each) for each in asked] == [3, 10, 1, 1, 1, 1]


def test_a_busy_server_is_asked_again(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    embed, asked = served.service.embed, []

    async def busy_once(*arguments: object, **options: object) -> object:
        asked.append(1)
        if len(asked) == 1:
            raise TooMany("The queue is full.", retry_after=1)
        return await embed(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(served.service, "embed", busy_once)
    with lapclip.connect(served.url) as model:
        assert model.encode_text(["a patient cat"]).shape == (1, model.embedding)
    assert len(asked) == 2


def test_it_needs_no_torch() -> None:
    program = "import sys, lapclip; lapclip.connect; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


class Broken(BaseHTTPRequestHandler):
    """A server that answers as its class says."""

    ready: ClassVar[Any]
    vectors: ClassVar[Any]

    def do_GET(self) -> None:
        self.say(self.ready)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.say(self.vectors)

    def say(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def broken(ready: Any, vectors: Any = None) -> Iterator[str]:
    handler = type("Handler", (Broken,), {"ready": ready, "vectors": vectors})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


READY = {"model": "mine", "fingerprint": "a" * 16, "dimension": 2}


@pytest.mark.parametrize(
    "ready", [{}, [], None, "ready", {**READY, "dimension": None}, {**READY, "dimension": math.inf}]
)
def test_what_is_no_server_of_ours_is_said(ready: Any) -> None:
    with broken(ready) as url, pytest.raises(lapclip.LapclipError, match="no lapclip server"):
        lapclip.connect(url)


def test_a_server_that_does_not_heed_the_fingerprint() -> None:
    with broken(READY) as url:
        with pytest.raises(lapclip.LapclipError, match="do not compare"):
            lapclip.connect(url, fingerprint="b" * 16)
        assert lapclip.connect(url, fingerprint="a" * 16).fingerprint() == "a" * 16


@pytest.mark.parametrize(
    ("vectors", "why"),
    [
        ({"model": "b" * 16, "embeddings": [[1, 0], [0, 1]]}, "do not compare"),
        ({"model": "a" * 16, "embeddings": [[1, 0]]}, "for each item"),
        ({"model": "a" * 16, "embeddings": [[1, 0, 0], [0, 1, 0]]}, "for each item"),
        ({"model": "a" * 16, "embeddings": [[1, 0], [None, 1]]}, "for each item"),
        ({"model": "a" * 16, "embeddings": [[1, 0], [1]]}, "no lapclip server"),
        ({"model": "a" * 16}, "no lapclip server"),
        ([], "no lapclip server"),
    ],
)
def test_vectors_that_were_not_asked_for_are_no_answer(vectors: Any, why: str) -> None:
    asked = ["a cat", "a dog"]
    with (
        broken(READY, vectors) as url,
        lapclip.connect(url) as model,
        pytest.raises(RunError, match=why),
    ):
        model.encode_text(asked)
