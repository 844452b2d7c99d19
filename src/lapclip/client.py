"""A served model, asked as if it were loaded here. No torch is needed.

    model = lapclip.connect("http://127.0.0.1:8871")
    images = model.encode_image(["cat.jpg", "dog.jpg"])
    captions = model.encode_text(["a cat", "a dog"])

All vectors of one client are of one model: if the server has taken another one since, it is an error, and
`lapclip.connect` again goes on with the new one.
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lapclip import http
from lapclip.errors import ConfigError, DataError, RunError
from lapclip.paths import read_bytes
from lapclip.progress import Progress
from lapclip.progress_bar import counted

if TYPE_CHECKING:
    from PIL import Image

    from lapclip.data.any_image import ManyImages, OneImage

BATCH = 32
"""Images or captions of one request."""
BATCH_BYTES = 30_000_000
"""Bytes of base64 after which a request takes no more: the server takes 64 MB."""
LARGEST_IMAGE = 20_000_000
"""Bytes of an image file that the server takes."""
PATIENCE = 60.0
"""Seconds for which a busy server is asked again."""
SECONDS = 120.0
"""Seconds in which an answer has to come."""


def connect(url: str, key: str | None = None, fingerprint: str | None = None) -> Client:
    """A model that `lapclip serve` has at an address, asked as if it were loaded here. No torch is needed.

    Parameters
    ----------
    url
        The address, such as `http://127.0.0.1:8871`.
    key
        The server's API key, where it wants one.
    fingerprint
        The model that it has to be: with another one nothing is answered.
    """
    return Client(url, key, fingerprint)


class Client:
    """The calls of a loaded model, over HTTP. Threads need one each."""

    def __init__(self, url: str, key: str | None = None, fingerprint: str | None = None) -> None:
        address = http.server_url(url)
        if address is None:
            raise ConfigError(
                f"{url} is no address of a server.", hint='lapclip.connect("http://127.0.0.1:8871")'
            )
        key = (key or "").strip()  # a key that was read from a file ends in a line break
        if not re.fullmatch("[ -~]*", key):
            raise ConfigError(
                "The API key has characters that no key of a server has.",
                hint="the key as it was given",
            )
        path = address.path.rstrip("/").removesuffix("/v1")
        self._session = http.Session(address, path, SECONDS)
        self._key, self._url = key, url
        about = self._ask("GET", "/ready", None, fingerprint)
        try:
            self.name, self._fingerprint = str(about["model"]), str(about["fingerprint"])
            self.embedding = int(about["dimension"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise _no_server(url) from None
        if fingerprint:  # not every server, nor every proxy, heeds the header
            self._check_model(self._fingerprint, fingerprint)

    def fingerprint(self) -> str:
        """The model that all vectors of this client are of."""
        return self._fingerprint

    def encode_image(
        self, images: OneImage | ManyImages, *, progress: bool | Progress = False
    ) -> np.ndarray:
        """A unit-length row for each image, or one vector for a single image, in any form that a loaded model takes."""
        from lapclip.data.any_image import as_list, is_one_image

        with counted(progress, "embedding images") as bar:
            rows = self._encode(
                as_list(images),
                lambda image: {"image": base64.b64encode(_bytes_of(image)).decode()},
                bar,
            )
        return rows[0] if is_one_image(images) else rows

    def encode_text(
        self, captions: str | Sequence[str], progress: bool | Progress | None = None
    ) -> np.ndarray:
        """A unit-length row for each caption, or one vector for a single caption."""
        given = [captions] if isinstance(captions, str) else captions
        with counted(progress, "embedding captions") as bar:
            rows = self._encode(given, lambda caption: {"text": caption}, bar)
        return rows[0] if isinstance(captions, str) else rows

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.name} at {self._url}, gives vectors of {self.embedding} numbers>"

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(
        self,
        given: Sequence[Any],
        item: Callable[[Any], dict[str, str]],
        progress: Progress | None = None,
    ) -> np.ndarray:
        batches, done = [], 0
        for items in _batches(map(item, given)):
            answer = self._ask("POST", "/embed", {"items": items}, self._fingerprint, first=done)
            batches.append(self._vectors(answer, len(items)))
            done += len(items)
            if progress:
                progress(done, len(given))
        return np.concatenate(batches) if batches else np.zeros((0, self.embedding), np.float32)

    def _vectors(self, answer: Any, count: int) -> np.ndarray:
        """The vectors of an answer, if they are those that were asked for."""
        try:
            made_by, vectors = str(answer["model"]), np.asarray(answer["embeddings"], np.float32)
        except (KeyError, TypeError, ValueError):
            raise _no_server(self._url) from None
        self._check_model(made_by, self._fingerprint)
        if vectors.shape != (count, self.embedding) or not np.isfinite(vectors).all():
            raise RunError(
                f"{self._url} did not send a vector of {self.embedding} numbers for each item."
            )
        return vectors

    def _check_model(self, found: str, needed: str) -> None:
        if found != needed:
            raise RunError(
                f"{self._url} has model {found}, not {needed}: their vectors do not compare."
            )

    def _ask(
        self, method: str, path: str, body: Any, fingerprint: str | None, first: int = 0
    ) -> Any:
        """An answer as JSON. A server that is busy is asked again, as it says."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        if fingerprint:
            headers["X-Lapclip-Model"] = fingerprint
        sent = None if body is None else json.dumps(body).encode()
        until = time.monotonic() + PATIENCE
        while True:
            try:
                answer = self._session.request(method, path, sent, headers)
            except http.RequestFailed as error:
                raise RunError(
                    f"{self._url} does not answer: {error}.", hint="lapclip serve"
                ) from None
            if answer.status == 200:
                return _parsed(answer.content, self._url)
            if answer.status in (429, 503) and time.monotonic() < until:
                time.sleep(_pause(answer.headers.get("Retry-After")))
                continue
            raise _as_error(answer.status, answer.content, self._url, first)


def _batches(items: Iterator[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    """Items for one request after the other. The next one is made when it is needed: images are large."""
    batch: list[dict[str, str]] = []
    size = 0
    for item in items:
        more = sum(map(len, item.values()))
        if batch and (len(batch) == BATCH or size + more > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += more
    if batch:
        yield batch


def _bytes_of(image: Any) -> bytes:
    """A file that the server sees as `load(...).encode_image` sees the image: of a path or of bytes the file itself."""
    named = image
    if not isinstance(image, (str, os.PathLike)):
        from lapclip.data.any_image import as_image

        image = as_image(image)
        if not isinstance(image, bytes):
            return _as_file(image)
        named = "A file in memory"
    try:
        data = image if isinstance(image, bytes) else read_bytes(image)
    except FileNotFoundError:
        raise DataError(f"No such image: {image}.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{image} cannot be read: {error}.") from None
    if len(data) > LARGEST_IMAGE:
        raise DataError(
            f"{named} has more than the {LARGEST_IMAGE // 10**6} MB that a server takes.",
            hint="PIL.Image.open(PATH) in place of the path, which sends its pixels",
        )
    return data


def _as_file(image: Image.Image) -> bytes:
    """An open image as a PNG. Where that is too large a JPEG, whose vectors differ a little."""
    from lapclip.data.decode import as_file  # here: files are sent without Pillow

    for form in (
        {"format": "PNG", "compress_level": 1},
        {"format": "JPEG", "quality": 95, "subsampling": 0},
    ):
        content = as_file(image, **form)
        if len(content) <= LARGEST_IMAGE:
            return content
    width, height = image.size
    raise DataError(
        f"An image of {width:,} x {height:,} pixels has more than the {LARGEST_IMAGE // 10**6} MB that a server takes.",
        hint="a smaller one: image.resize((WIDTH, HEIGHT))",
    )


def _pause(retry_after: str | None) -> float:
    """Seconds to wait. A proxy may name a date, for which a second has to do."""
    seconds = retry_after or ""
    return min(10.0, float(seconds)) if re.fullmatch(r"\d{1,9}", seconds, re.ASCII) else 1.0


def _parsed(content: bytes, url: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise _no_server(url) from None


def _no_server(url: str) -> RunError:
    return RunError(f"{url} is no lapclip server.", hint="lapclip serve")


def _as_error(status: int, content: bytes, url: str, first: int) -> Exception:
    """What the server says is wrong, with the position in the whole list."""
    try:
        error = json.loads(content)["error"]
        message, position = str(error["message"]), error.get("position")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return RunError(f"{url} answers {status}.", hint="lapclip serve")
    if isinstance(position, int):
        return DataError(f"Item {first + position}: {message.removeprefix(f'Item {position}: ')}")
    return RunError(f"{url}: {message}")
