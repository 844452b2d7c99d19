"""The served model and everything a request passes on its way to a vector: admission, cache, preparation, engine.

    service = Service(model, limits)
    answer = await service.embed([Text("a red bicycle"), ImageFile(data)])
    answer.vectors     (2, 512) float32 of unit length, in the order that was asked
    answer.fingerprint  of the model that gave all of them

A request keeps the model that it met on arrival, so a swap (`replace`) mixes no vectors of two models in one answer.
"""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
from PIL import Image

from lapclip.errors import LapclipError
from lapclip.machine.choose_device import use_threads
from lapclip.machine.facts import logical_cores
from lapclip.serving.batching import Batcher, BatchReport, Row
from lapclip.serving.engine import Engine
from lapclip.serving.fetch import Fetcher
from lapclip.serving.items import ImageAddress, ImageFile, Item, Loaded, Text
from lapclip.serving.metrics import Metrics
from lapclip.serving.refusals import (
    BadItem,
    Fault,
    Refusal,
    TooLarge,
    TooMany,
    Unavailable,
    WrongModel,
)

GOLDEN_TEXT = "a lighthouse on a rock, and a red boat"
READY_FOR = 1.0
"""Seconds for which readiness is not tested again: probes must not become load."""
READY_SECONDS = 5.0
"""The deadline of the golden image and caption. They go before what callers wait for: a busy server is ready."""
PREPARING = {"image": 0.005, "text": 0.0002}
"""Seconds that an image takes to be decoded, and a text to be encoded, before any was."""
SMOOTHING = 0.1
"""The weight of the latest item in the running mean of that."""
ARRIVED: ContextVar[float] = ContextVar("arrived")
"""When the request that is being answered began to arrive, by `time.monotonic`."""


@dataclass(frozen=True)
class Limits:
    """What one request, and all of them together, may take."""

    deadline: float = 30.0
    """Seconds from the arrival of a request to its answer."""
    queue_seconds: float = 2.0
    """Seconds of work that may wait: beyond it requests are refused at once. Short, so that a server that was
    overloaded is itself again as soon as that is over."""
    queue_requests: int = 64
    """Requests that may always wait, however long they take, while they have two items each on average or fewer."""
    items: int = 256
    """Images and texts of one request."""
    body_bytes: int = 64_000_000
    """Bytes of one request."""
    all_body_bytes: int = 256_000_000
    """Bytes of all requests that are being read or answered."""
    body_seconds: float = 30.0
    """Seconds in which a request has to be sent completely."""
    connections: int = 1000
    cache_bytes: int = 64_000_000
    """Memory for vectors of texts and images that were asked before; 0 is none."""


@dataclass(frozen=True)
class Answer:
    """The vectors of one request, all of one model."""

    vectors: np.ndarray
    fingerprint: str


class VectorCache:
    """The vectors that were asked for last, up to a number of bytes. Threads may share it."""

    ENTRY = 200
    """Bytes that an entry takes beside its numbers."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._bytes = most_bytes, 0
        self._vectors: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    def get(self, digest: bytes) -> np.ndarray | None:
        if not self._most:
            return None
        with self._lock:
            vector = self._vectors.get(digest)
            if vector is None:
                self.misses += 1
                return None
            self._vectors.move_to_end(digest)
            self.hits += 1
            return vector

    def put(self, digest: bytes, vector: np.ndarray) -> None:
        size = vector.nbytes + self.ENTRY
        if size > self._most:
            return
        with self._lock:
            if digest not in self._vectors:
                self._bytes += size
            self._vectors[digest] = vector.copy()  # of its own: it may be a row of a whole batch
            while self._bytes > self._most:
                _, old = self._vectors.popitem(last=False)
                self._bytes -= old.nbytes + self.ENTRY

    @property
    def bytes(self) -> int:
        return self._bytes


class ServedModel:
    """One model with its engine, its queue and its cache. `name` is what callers see; `fingerprint` is what counts."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        cache_bytes: int,
        report: Callable[[BatchReport], None] = lambda report: None,
    ) -> None:
        self.name, self.engine = name, engine
        self.encoder, self.fingerprint, self.dimension = (
            engine.encoder,
            engine.fingerprint,
            engine.encoder.embedding,
        )
        self.batcher = Batcher(engine, report)
        self.cache = VectorCache(cache_bytes)
        self.since = time.time()
        self.golden = _golden_vectors(engine)
        self.callers = 0
        """Requests that are being answered by it, and an index that asks it."""
        self._counting = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Not retired meanwhile."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def hold(self) -> None:
        """One more who needs it."""
        with self._counting:
            self.callers += 1

    def release(self) -> None:
        """One less."""
        with self._counting:
            self.callers -= 1

    def seconds_of(self, item: Loaded) -> float:
        """What an item costs the engine now."""
        return self.batcher.seconds_of(item.tower)

    def agrees(self, vectors: np.ndarray) -> bool:
        """Return whether these are the vectors of the golden image and caption at the start of this model."""
        if vectors.shape != self.golden.shape:
            return False
        if self.engine.is_exact:
            return bool(np.abs(vectors - self.golden).max() < 1e-4)
        return bool((vectors * self.golden).sum(axis=1).min() > 0.999)


class Service:
    """Embeds what callers send, within limits, with the model that is served now."""

    def __init__(
        self,
        model: ServedModel,
        limits: Limits | None = None,
        metrics: Metrics | None = None,
        *,
        allow_urls: bool = False,
    ) -> None:
        self.limits, self.metrics = limits or Limits(), metrics or Metrics()
        self.metrics.watch(self)
        self.fetcher = (
            Fetcher(self.limits.body_bytes, self.limits.all_body_bytes) if allow_urls else None
        )
        """Fetches images that are given by their address; None where that was not allowed."""
        self._model = model
        # One thread of torch each: they are as many as there are cores already.
        self._decoders = max(2, logical_cores())
        self._decoding = ThreadPoolExecutor(
            self._decoders, "lapclip-decode", initializer=lambda: use_threads(1)
        )
        # Texts do not wait behind images that take long, nor tests of the model behind either.
        self._encoding = ThreadPoolExecutor(2, "lapclip-encode", initializer=lambda: use_threads(1))
        self._testing = ThreadPoolExecutor(1, "lapclip-test", initializer=lambda: use_threads(1))
        self._preparing_seconds = dict(PREPARING)
        self._replacing = threading.Lock()
        self.notes: dict[str, str] = {}
        """What is wrong beside the answers, such as an index that cannot be brought up to date; shown on the page."""
        self._waiting_seconds = 0.0
        self._requests = self._items = 0
        self._ready: tuple[float, Refusal | None] | None = None
        self._ready_lock: asyncio.Lock | None = None
        self.draining = False
        self.listeners: list[Callable[[], None]] = []
        """Called after each `replace`, before the old model may be retired."""

    @property
    def model(self) -> ServedModel:
        """The model that new requests meet."""
        return self._model

    @property
    def load(self) -> tuple[int, float]:
        """Items that were admitted and are not answered, and the seconds of work they are."""
        return self._items, self._waiting_seconds

    async def embed(
        self,
        items: Sequence[Item],
        *,
        demand: str | None = None,
        deadline: float | None = None,
        model: ServedModel | None = None,
    ) -> Answer:
        """The vectors of texts and images. Raises a `Refusal`; one about an item names its position.

        `demand` is the fingerprint that the caller needs; `deadline` is by `time.monotonic`. A `model` other than the
        one that is served now is for an index whose model was replaced.
        """
        self.check_demand(demand, model)
        if not items:
            raise BadItem("There is nothing to embed.")
        if len(items) > self.limits.items:
            raise TooLarge(
                f"{len(items):,} items in one request; at most {self.limits.items:,} are taken."
            )
        deadline = deadline or self.deadline()
        loaded = [item for item in items if not isinstance(item, ImageAddress)]
        if len(loaded) < len(items):
            async with self._fetched(items, deadline, model) as files:
                return await self.embed(files, demand=demand, deadline=deadline, model=model)
        model, items = model or self._model, loaded
        use_cache = self.limits.cache_bytes > 0  # without, no digest is needed
        vectors: list[np.ndarray | None] = [
            model.cache.get(item.digest) if use_cache else None for item in items
        ]
        missing = [position for position, vector in enumerate(vectors) if vector is None]
        if missing:
            with self._admitted(model, [items[position] for position in missing]):
                made = await self._compute(
                    model, [(position, items[position]) for position in missing], deadline
                )
            for position, vector in zip(missing, made, strict=True):
                vectors[position] = vector
                if use_cache:
                    model.cache.put(items[position].digest, vector)
        return Answer(np.stack(vectors), model.fingerprint)  # type: ignore[arg-type]

    @asynccontextmanager
    async def _fetched(
        self, items: Sequence[Item], deadline: float, model: ServedModel | None
    ) -> AsyncIterator[list[Loaded]]:
        """The items, with images in place of addresses. A `model` that was asked for stays loaded meanwhile."""
        if self.fetcher is None:
            position = next(
                index for index, item in enumerate(items) if isinstance(item, ImageAddress)
            )
            raise BadItem(
                "addresses are not fetched.",
                position=position,
                hint="a data URI, or lapclip serve --allow-urls",
            )
        with model.held() if model is not None else nullcontext():
            async with self.fetcher.fetched(items, deadline) as files:
                yield files

    def check_room(self, items: int = 1, seconds: float = 0.0) -> None:
        """Refuse what the queue has no room for."""
        few = self.limits.queue_requests
        if not self._items or (self._requests < few and self._items + items <= 2 * few):
            return
        if self._waiting_seconds + seconds > self.limits.queue_seconds:
            raise TooMany(
                f"The queue is full: {self._items:,} items wait, about {self._waiting_seconds:.1f} s of work.",
                retry_after=max(1.0, self._waiting_seconds / 2),
            )

    def deadline(self) -> float:
        """When the request that is being answered has to be, by `time.monotonic`: counted from its arrival."""
        return ARRIVED.get(time.monotonic()) + self.limits.deadline

    def check_demand(self, demand: str | None, model: ServedModel | None = None) -> None:
        """Refuse a caller who needs the vectors of another model."""
        model = model or self._model
        if demand and demand != model.fingerprint:
            raise WrongModel(
                f"This server has model {model.fingerprint}, not {demand}: their vectors do not compare."
            )

    async def ready(self) -> None:
        """Send the golden image and caption through the queue; raise `Unavailable` unless their vectors are right."""
        if self.draining:
            raise Unavailable("The server is ending.")
        self._ready_lock = self._ready_lock or asyncio.Lock()
        async with self._ready_lock:
            now = time.monotonic()
            if self._ready is None or now - self._ready[0] > READY_FOR:
                self._ready = now, await self.test(self._model)
        if self._ready[1] is not None:
            raise self._ready[1]

    async def test(self, model: ServedModel) -> Refusal | None:
        """Why the golden image and caption do not get their vectors from a model, if so."""
        deadline = time.monotonic() + READY_SECONDS
        try:
            vectors = await self._compute(
                model, list(enumerate(golden_items())), deadline, first=True
            )
        except Refusal as error:
            return Unavailable(f"The golden image and caption were not answered: {error.message}")
        if not model.agrees(np.stack(vectors)):
            return Unavailable(
                "The golden image or caption has other vectors than at the start of this model."
            )
        return None

    def replace(self, model: ServedModel) -> ServedModel:
        """Serve another model from now on; returns the old one, which answers those who met it. See `retire`."""
        with self._replacing:
            old, self._model = self._model, model
        self._ready = None
        for listener in self.listeners:
            listener()
        return old

    def hold_model(self) -> ServedModel:
        """The model that is served now, held for the caller, from any thread: it is not retired before `release`."""
        with self._replacing:
            self._model.hold()
            return self._model

    async def retire(self, model: ServedModel) -> None:
        """Wait until nobody needs a model any more, then end its engine thread."""
        while model.callers:
            await asyncio.sleep(0.05)
        model.batcher.close()

    def close(self) -> None:
        """End the threads."""
        self._model.batcher.close()
        for pool in (self._decoding, self._encoding, self._testing):
            pool.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _admitted(self, model: ServedModel, items: Sequence[Loaded]) -> Iterator[None]:
        """Room in the queue for some items, or `TooMany` at once. A request always finds room in an empty queue."""
        seconds = sum(self._seconds_of(model, item) for item in items)
        self.check_room(len(items), seconds)
        self._requests += 1
        self._items += len(items)
        self._waiting_seconds += seconds
        try:
            yield
        finally:
            self._requests -= 1
            self._items -= len(items)
            self._waiting_seconds = self._waiting_seconds - seconds if self._items else 0.0

    def _seconds_of(self, model: ServedModel, item: Loaded) -> float:
        """What an item costs now: its time in the engine or its share of the threads that decode, whichever is more."""
        return max(model.seconds_of(item), self._preparing_seconds[item.tower] / self._decoders)

    async def _compute(
        self,
        model: ServedModel,
        items: Sequence[tuple[int, Loaded]],
        deadline: float,
        *,
        first: bool = False,
    ) -> list[np.ndarray]:
        """The vectors of items with their positions. If one fails, or the caller goes away, the rest is given up."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[np.ndarray]] = [loop.create_future() for _ in items]
        pairs = [(item, future) for (_, item), future in zip(items, futures, strict=True)]
        if quick := [
            pair for pair in pairs if first or isinstance(pair[0], Text)
        ]:  # one job for all
            (self._testing if first else self._encoding).submit(
                self._prepare, model, quick, deadline, first
            )
        for pair in pairs:
            if not (first or isinstance(pair[0], Text)):
                self._decoding.submit(self._prepare, model, [pair], deadline, first)
        with model.held():
            try:
                await asyncio.wait(
                    futures,
                    timeout=max(0.0, deadline - time.monotonic()),
                    return_when=asyncio.FIRST_EXCEPTION,
                )
                for (position, _), future in zip(items, futures, strict=True):
                    if future.done() and (error := future.exception()) is not None:
                        raise _at(error, position)
                if not all(future.done() for future in futures):
                    raise Unavailable("The answer was not ready before the deadline.")
                return [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()

    def _prepare(
        self,
        model: ServedModel,
        items: Sequence[tuple[Loaded, asyncio.Future[np.ndarray]]],
        deadline: float,
        first: bool,
    ) -> None:
        """In a thread: items become rows, which go to the engine at once."""
        for item, future in items:
            began = time.monotonic()
            if future.cancelled() or deadline < began:  # nobody waits for it any more
                continue
            try:
                model.batcher.submit(
                    Row(item.tower, item.row(model.encoder), future, deadline, first)
                )
            except Exception as error:
                _fail(future, error)
            spent = time.monotonic() - began
            self._preparing_seconds[item.tower] += SMOOTHING * (
                spent - self._preparing_seconds[item.tower]
            )
            self.metrics.phase("prepare", spent)


def _fail(future: asyncio.Future[np.ndarray], error: Exception) -> None:
    if not isinstance(error, Refusal):
        reason = error.message if isinstance(error, LapclipError) else f"{type(error).__name__}"
        error = BadItem(f"it cannot be read: {reason}")

    def hand_over() -> None:
        if not future.done():
            future.set_exception(error)

    try:
        future.get_loop().call_soon_threadsafe(hand_over)
    except RuntimeError:  # the loop has ended
        pass


def _at(error: BaseException, position: int) -> BaseException:
    """An error about one item, with its position."""
    if isinstance(error, (BadItem, TooLarge, Fault)) and error.position is None:
        error.position = position
    return error


def golden_items() -> tuple[ImageFile, Text]:
    """An image and a caption whose vectors tell whether the model still gives what it gave."""
    down, across = np.mgrid[0:240, 0:320]
    pixels = np.stack(
        [across * 255 // 319, down * 255 // 239, (across // 20 + down // 20) % 2 * 200], axis=-1
    )
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return ImageFile(file.getvalue()), Text(GOLDEN_TEXT)


def _golden_vectors(engine: Engine) -> np.ndarray:
    """Return the vectors of the golden image and caption."""
    vectors = [
        engine.embed(item.tower, item.row(engine.encoder)[None])[0] for item in golden_items()
    ]
    return np.asarray(np.stack(vectors), np.float32)
