"""`lapclip serve` against the engine fed by hand, against other servers, and under load, poison and swaps. Linux.

    .venv/bin/python benchmarks/serving.py --work /tmp/serving                       # all rows that need nothing more
    .venv/bin/python benchmarks/serving.py --rows throughput latency --photos PHOTOS --out results.json
    .venv/bin/python benchmarks/serving.py --rows peers --plain benchmarks/.venv/bin/python --infinity BIN/infinity_emb
    .venv/bin/python benchmarks/serving.py --rows start --heads runs/heads/exported/onnx-int8
    .venv/bin/python benchmarks/serving.py --rows soak --minutes 60

Rows: correctness, throughput, latency, peers, overload, poison, swap, start, soak. Loopback only.
The server, or the direct loop, has core 0 and one engine thread; the load comes from core 1 over raw kept-alive
connections, with bodies prepared beforehand and each photo made unique by a comment in its JPEG; caches are off. The
direct loop decodes the same bytes in the batches that the server was seen to make. Two sides are measured in turns, and
medians are shown with their spread. The model is `vit-b-32` with random weights, in torch, in ONNX, and in int8, which
is forced: random weights have no recall to lose. `--work` keeps these models for the next time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serving_load import (
    ENGINE_CORE,
    LOAD_CORE,
    Answer,
    Load,
    Photo,
    Request,
    Requests,
    Server,
    closed_loop,
    free_port,
    lapclip_serve,
    must_be_200,
    open_loop,
    photos,
    running,
    spread,
    texts,
    vectors,
    watched_memory,
)

from lapclip.data.decode import decode
from lapclip.data.pixels import View, fit_image
from lapclip.data.tokenizers import clip_tokenizer
from lapclip.embedder import Embedder, Encoder, load_torch, open_exported
from lapclip.exporting.export_folder import describe, write_json
from lapclip.exporting.int8 import DYNAMIC, STATIC, Step, quantize
from lapclip.exporting.to_onnx import interface, write_float
from lapclip.exporting.to_published import HuggingFace
from lapclip.exporting.tokenizer_files import write_tokenizers
from lapclip.machine.choose_device import choose_device
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.serving.engine import served_fingerprint
from lapclip.training.checkpoint import save_model
from lapclip.weights import DESCRIPTION, WEIGHTS

SHAPE = "vit-b-32"
FLOAT_ENGINES, INT8 = ("torch-float32", "onnx-float32"), "onnx-int8"
DISTINCT = 64
"""Photos and captions that differ; all others differ from one of these in the comment alone."""
CONCURRENCY, MANY = 32, 64
TOLERANCE, LEAST_COSINE = 1e-5, 0.995
OVERLOAD, POISON, SWAPS = 10, 0.01, 10
MEGABYTE = 1e6


@dataclass(frozen=True)
class Result:
    """A line of the table."""

    row: str
    what: str
    found: str
    bar: str = ""
    passed: bool | None = None
    """Nothing where there is no bar."""
    facts: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="*", default=[], choices=list(ROWS), metavar="ROW")
    parser.add_argument(
        "--engines", nargs="*", default=[*FLOAT_ENGINES, INT8], choices=[*FLOAT_ENGINES, INT8]
    )
    parser.add_argument(
        "--photos",
        type=Path,
        help="a folder of JPEG files, made 500 px large; otherwise they are drawn",
    )
    parser.add_argument(
        "--work", type=Path, help="keeps the models; otherwise they are made anew and removed"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20, help="of load in a round of a side")
    parser.add_argument("--requests", type=int, default=10_000, help="for correctness")
    parser.add_argument("--minutes", type=float, default=10, help="of the soak")
    parser.add_argument("--overload-seconds", type=float, default=60)
    parser.add_argument("--deadline", type=float, default=30, help="the server's own, in seconds")
    parser.add_argument(
        "--heads", type=Path, help="an int8 export of a model trained with --recipe heads"
    )
    parser.add_argument(
        "--plain", type=Path, help="Python of the peers' environment with fastapi and uvicorn"
    )
    parser.add_argument(
        "--infinity", type=Path, help="the command infinity_emb of an environment of its own"
    )
    parser.add_argument("--out", type=Path, help="writes the results as JSON")
    options = parser.parse_args()
    if sys.platform != "linux" or (os.cpu_count() or 1) < 2:
        parser.error("this needs Linux and two cores")
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["LAPCLIP_CACHE"] = temporary  # nothing is remembered from another time
        bench = Bench(options, options.work or Path(temporary) / "models", Path(temporary))
        os.sched_setaffinity(0, {LOAD_CORE})
        results = [result for name in options.rows or ROWS for result in measure(name, bench)]
    if options.out:
        options.out.write_text(
            json.dumps({"results": [asdict(result) for result in results]}, indent=1) + "\n"
        )
    sys.exit(any(result.passed is False for result in results))


def measure(name: str, bench: Bench) -> Iterator[Result]:
    """The lines of a row, printed as they come."""
    for result in ROWS[name](bench):
        verdict = {True: "met", False: "MISSED", None: ""}[result.passed]
        print(
            f"| {result.row} | {result.what} | {result.found} | {result.bar} | {verdict} |",
            flush=True,
        )
        yield result


# Models


class Bench:
    """The models, photos and captions of a run, and servers and direct loops over them."""

    def __init__(self, options: argparse.Namespace, work: Path, temporary: Path) -> None:
        self.options, self.work, self.temporary = options, work, temporary
        work.mkdir(parents=True, exist_ok=True)
        print("drawing photos", file=sys.stderr, flush=True)
        self.photos: list[Photo] = photos(options.photos, DISTINCT)
        self.texts: list[str] = texts(DISTINCT)
        self.requests = Requests(self.photos, self.texts)

    def model(self, engine: str, seed: int = 0) -> Path:
        """The folder of the model for an engine, or for another program; made when it is first asked for."""
        folder = self.work / f"{SHAPE}-{seed}-{engine}"
        if folder.exists():
            return folder
        print(f"making {folder.name}", file=sys.stderr, flush=True)
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        if engine == "torch-float32":
            embedder = Embedder(
                CLIP(SHAPES[SHAPE], seed=seed).eval(), clip_tokenizer(), choose_device("cpu")[0]
            )
            save_model(embedder, partial)
        else:
            embedder = load_torch(self.model("torch-float32", seed))
            partial.mkdir()
            write_exported(
                engine, embedder, partial, [photo.unique(0) for photo in self.photos[:32]]
            )
        partial.rename(folder)
        return folder

    @contextmanager
    def served(self, engine: str, model: Path | None = None) -> Iterator[Server]:
        """Our server on its core."""
        port = free_port()
        command = lapclip_serve(
            model or self.model(engine), port, "--engine", engine, "--threads", "1"
        )
        with running(command, port, self.temporary) as server:
            yield server

    @contextmanager
    def direct(self, engine: str, model: Path | None = None) -> Iterator[Direct]:
        """The engine without a server, in a process on the same core."""
        arguments = (str(model or self.model(engine)), engine)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, initializer=open_direct, initargs=arguments) as pool:
            yield Direct(pool, self.photos, self.texts)

    def load(self, server: Server, make: Callable[[int], Request], **more: Any) -> Load:
        """A round of full load."""
        seconds = {} if "count" in more else {"seconds": self.options.seconds}
        return asyncio.run(
            closed_loop(server.port, make, more.pop("concurrency", CONCURRENCY), **seconds, **more)
        )


def write_exported(engine: str, embedder: Embedder, folder: Path, jpegs: list[bytes]) -> None:
    """The model for ONNX Runtime or for transformers, without the check of `lapclip export`: its recall is chance.

    In int8 in the first step that `lapclip export` tries; static scales are taken from the photos.
    """
    if engine == "huggingface":
        HuggingFace(engine).write_files(embedder, folder)
        return
    write_tokenizers(folder, embedder.tokenizer)
    towers = interface(embedder)
    if engine == "onnx-float32":
        write_float(embedder, folder, lambda _: None)
    else:
        graphs = write_float(embedder, folder, lambda _: None)
        pixels = np.stack([seen(jpeg, embedder.view) for jpeg in jpegs])
        for tower, step in (("image", Step(STATIC)), ("text", Step(DYNAMIC))):
            quantize(graphs[tower], step, folder / "made.onnx", pixels)
            (folder / "made.onnx").replace(graphs[tower])
            towers[tower]["numbers"] = f"int8, {step}"
    write_json(folder / DESCRIPTION, describe(embedder, engine.removesuffix("-float32"), towers))


# The engine fed by hand, in a process of its own


_encoder: Encoder


def open_direct(model: str, engine: str) -> None:
    """Prepare the process."""
    global _encoder
    os.sched_setaffinity(0, {ENGINE_CORE})
    torch.set_num_threads(1)
    _encoder = load_torch(model) if engine.startswith("torch") else open_exported(model, threads=1)


def embed_photos(jpegs: list[bytes]) -> np.ndarray:
    """Decoded and embedded as one batch."""
    return _encoder.embed_pixels(np.stack([seen(jpeg, _encoder.view) for jpeg in jpegs]))


def seen(jpeg: bytes, view: View) -> np.ndarray:
    """What a model sees of a file, as `encode_image` has it."""
    decoded = decode(jpeg, defer_profile=True)
    return view.finish(decoded, fit_image(decoded.image, view))


def embed_all(jpegs: list[bytes], captions: list[str]) -> tuple[str, np.ndarray, np.ndarray]:
    """The fingerprint, and the vectors of all photos and captions, one at a time as no batch can disturb them."""
    images = np.concatenate([embed_photos([jpeg]) for jpeg in jpegs])
    return (
        served_fingerprint(_encoder),
        images,
        np.concatenate([_encoder.encode_text([caption]) for caption in captions]),
    )


def direct_rate(items: list[Any], batch: int, seconds: float) -> float:
    """Photos (bytes) or captions a second."""
    embed = embed_photos if isinstance(items[0], bytes) else _encoder.encode_text
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        embed([items[(done + step) % len(items)] for step in range(batch)])
        done += batch
    return done / (time.perf_counter() - began)


def direct_seconds(items: list[Any]) -> list[float]:
    """Of each photo or caption alone."""
    times = []
    for item in items:
        began = time.perf_counter()
        _ = embed_photos([item]) if isinstance(item, bytes) else _encoder.encode_text([item])
        times.append(time.perf_counter() - began)
    return times


class Direct:
    """The process, as its owner sees it."""

    def __init__(self, pool: ProcessPoolExecutor, photos: list[Photo], texts: list[str]) -> None:
        self._pool, self._items = (
            pool,
            {"image": [photo.unique(0) for photo in photos], "text": texts},
        )

    def rate(self, kind: str, batch: int, seconds: float) -> float:
        return self._pool.submit(direct_rate, self._items[kind], batch, seconds).result()

    def seconds(self, kind: str, count: int) -> list[float]:
        items = self._items[kind]
        return self._pool.submit(
            direct_seconds, [items[at % len(items)] for at in range(count)]
        ).result()

    def truth(self) -> Truth:
        return Truth(
            *self._pool.submit(embed_all, self._items["image"], self._items["text"]).result()
        )


@dataclass(frozen=True)
class Truth:
    """What each photo and caption becomes in one model."""

    fingerprint: str
    images: np.ndarray
    texts: np.ndarray

    def differs(self, request: Request, answer: Answer, *, cosine: float | None = None) -> str:
        """What is wrong with an answer; given a cosine, vectors may differ by as much."""
        if answer.status != 200:
            return must_be_200(request, answer)
        if answer.header("x-lapclip-model") != self.fingerprint:
            return f"fingerprint {answer.header('x-lapclip-model')!r}"
        found = vectors(answer.body)
        true = np.stack(
            [(self.images if kind == "image" else self.texts)[at] for kind, at in request.expected]
        )
        if found.shape != true.shape:
            return f"{found.shape} instead of {true.shape}"
        close = (
            (found * true).sum(1).min() >= cosine
            if cosine
            else np.abs(found - true).max() <= TOLERANCE
        )
        return "" if close else "another vector"

    def nearest(self) -> float:
        """The least that two rows differ by in their largest difference: if this is small, a swap goes unseen."""
        rows = np.concatenate([self.images, self.texts])
        return min(
            float(np.abs(rows[at + 1 :] - rows[at]).max(1).min()) for at in range(len(rows) - 1)
        )


# Rows


def correctness(bench: Bench) -> Iterator[Result]:
    """Many mixed requests at once: each caller gets its own vectors."""
    for engine in bench.options.engines:
        with bench.direct(engine) as direct:
            truth = direct.truth()
        cosine = LEAST_COSINE if engine == INT8 else None
        with bench.served(engine) as server:
            load = bench.load(
                server, bench.requests.mixed, concurrency=MANY, count=bench.options.requests,
                check=lambda request, answer, truth=truth, cosine=cosine: truth.differs(request, answer, cosine=cosine),
            )  # fmt: skip
        wrong = sum(load.faults.values())
        found = f"{len(load.times) - wrong:,} of {len(load.times):,} right ({load.rate:.0f}/s)"
        bar = f"all, cosine {LEAST_COSINE}" if cosine else f"all, within {TOLERANCE:g}"
        facts = {
            "faults": load.faults.most_common(5),
            "statuses": load.statuses,
            "nearest_rows": truth.nearest(),
        }
        passed = not wrong and len(load.times) == bench.options.requests
        yield Result("correctness", f"mixed, {MANY} at once, {engine}", found, bar, passed, facts)


def throughput(bench: Bench) -> Iterator[Result]:
    """Photos a second against the engine fed without HTTP in the same batches; in turns."""
    for engine in bench.options.engines:
        with bench.served(engine) as server, bench.direct(engine) as direct:
            ours, theirs, batches = [], [], []
            bench.load(server, bench.requests.image, count=2 * CONCURRENCY)
            direct.rate("image", 8, 1)
            for _ in range(bench.options.rounds):
                before = batch_totals(server)
                ours.append(clean(bench.load(server, bench.requests.image)).rate)
                batches.append(batch_size(before, batch_totals(server)))
                theirs.append(direct.rate("image", batches[-1], bench.options.seconds))
            best = max(
                direct.rate("image", batch, bench.options.seconds / 2)
                for batch in (1, 4, 16, CONCURRENCY)
            )
        ratio = statistics.median(ours) / statistics.median(theirs)
        found = (
            f"{ratio:.0%}: {statistics.median(ours):.1f} against {statistics.median(theirs):.1f} photos/s in batches "
            f"of {statistics.median(batches):.0f} (spreads {spread(ours):.0%} and {spread(theirs):.0%})"
        )
        facts = {
            "ours": ours,
            "direct": theirs,
            "batches": batches,
            "direct_at_its_best_batch": best,
        }
        yield Result(
            "throughput",
            f"{CONCURRENCY} at once, {engine}",
            found,
            "at least 85 %",
            ratio >= 0.85,
            facts,
        )
    port, engine = free_port(), bench.options.engines[0]
    every = set(range(os.cpu_count() or 1))
    os.sched_setaffinity(0, every)
    command = lapclip_serve(bench.model(engine), port, "--engine", engine)
    with running(command, port, bench.temporary, core=None) as server:
        rate = clean(bench.load(server, bench.requests.image)).rate
    os.sched_setaffinity(0, {LOAD_CORE})
    yield Result(
        "throughput",
        f"{len(every)} cores for the server and the load, {engine}",
        f"{rate:.1f} photos/s",
    )


def clean(load: Load) -> Load:
    """A load that is counted only where nothing went wrong."""
    if load.faults:
        raise SystemExit(
            f"Not every request was answered as it should be: {load.faults.most_common(3)}"
        )
    return load


def batch_totals(server: Server) -> tuple[float, float]:
    """Batches so far, and items in them, from the server's histogram of batch sizes."""
    count, total = (server.metric(rf"\w*batch\w*_{part}") for part in ("count", "sum"))
    return count or 0.0, total or 0.0


def batch_size(before: tuple[float, float], after: tuple[float, float]) -> int:
    """The mean of the batches in between; all callers at once where the server does not say."""
    count, total = after[0] - before[0], after[1] - before[1]
    return max(1, round(total / count)) if count else CONCURRENCY


def latency(bench: Bench) -> Iterator[Result]:
    """One caller against a direct call, in turns."""
    few = 10
    for engine in bench.options.engines:
        with bench.served(engine) as server, bench.direct(engine) as direct:
            for kind, make in (("image", bench.requests.image), ("text", bench.requests.text)):
                ours, theirs = [], []
                for _ in range(bench.options.rounds + 1):
                    ours += clean(bench.load(server, make, concurrency=1, count=few)).latencies
                    theirs += direct.seconds(kind, few)
                mine, own = (
                    1e3 * statistics.median(side[few:]) for side in (ours, theirs)
                )  # the first warm up
                found = f"{mine - own:+.2f} ms: {mine:.2f} against {own:.2f} ms"
                facts = {"ours_ms": mine, "direct_ms": own}
                yield Result(
                    "latency",
                    f"one {kind} at a time, {engine}",
                    found,
                    "at most +3 ms",
                    mine - own <= 3,
                    facts,
                )


def peers(bench: Bench) -> Iterator[Result]:
    """Other servers with the same weights, in turns with each of ours."""
    plain, infinity = bench.options.plain, bench.options.infinity
    if not plain and not infinity:
        yield Result("peers", "", "not measured: give --plain PYTHON or --infinity COMMAND")
        return
    here, torch_model = Path(__file__).parent, bench.model("torch-float32")
    sides: dict[str, tuple[list, dict]] = {}
    for engine in bench.options.engines:
        options = ("--engine", engine, "--threads", "1")
        sides[engine] = (lapclip_serve(bench.model(engine), 0, *options), {})
    if plain:
        search = {"PYTHONPATH": os.pathsep.join([str(here.parent / "src"), str(here)])}
        for name, more in (("FastAPI, async", []), ("FastAPI, threads", ["--threads"])):
            sides[name] = (
                [plain, here / "serving_plain.py", torch_model, "--port", "0", *more],
                search,
            )
    if infinity:
        quiet = {"HF_HUB_OFFLINE": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0", "DO_NOT_TRACK": "1"}
        model = [
            "--model-id",
            bench.model("huggingface"),
            "--served-model-name",
            "x",
            "--url-prefix",
            "/v1",
        ]
        how = [
            "--device",
            "cpu",
            "--engine",
            "torch",
            "--dtype",
            "float32",
            "--batch-size",
            str(CONCURRENCY),
        ]
        sides["infinity"] = (
            [
                infinity,
                "v2",
                *model,
                *how,
                "--no-bettertransformer",
                "--host",
                "127.0.0.1",
                "--port",
                "0",
            ],
            quiet,
        )
    with bench.direct("torch-float32") as direct:
        truth = direct.truth()
    rates: dict[str, dict[str, list[float]]] = {
        kind: {name: [] for name in sides} for kind in ("image", "text")
    }
    for _ in range(bench.options.rounds):
        for name, (command, environment) in sides.items():
            port = free_port()
            command = [
                str(port) if part == "0" and command[at - 1] == "--port" else part
                for at, part in enumerate(command)
            ]
            ready = "/v1/models" if name == "infinity" else "/ready"
            with running(
                command, port, bench.temporary, ready=ready, environment=environment
            ) as server:
                for kind, make in (("image", bench.requests.image), ("text", bench.requests.text)):
                    clean(bench.load(server, make, count=2 * CONCURRENCY, check=resembles(truth)))
                    rates[kind][name].append(clean(bench.load(server, make)).rate)
    found = {
        kind: {name: statistics.median(each) for name, each in sides.items()}
        for kind, sides in rates.items()
    }
    others = {
        "FastAPI and OpenCLIP": [name for name in sides if name.startswith("FastAPI")],
        "infinity": ["infinity"],
    }
    for peer, names in others.items():
        if names[0] in sides:
            yield from compared(peer, [name for name in names if name in sides], found, rates)


def compared(peer: str, names: list[str], found: dict, rates: dict) -> Iterator[Result]:
    """Ours against the fastest form of a peer: in float32 with the faster engine, as the server would choose."""
    mine = {"image": FLOAT_ENGINES, "text": FLOAT_ENGINES, "image, int8": (INT8,)}
    for what, bar in (("image", 1.2), ("text", 2.5), ("image, int8", 2.0)):
        medians = found[what.split(",")[0]]
        engines = [engine for engine in mine[what] if engine in medians]
        if not engines:
            continue
        engine, name = (max(some, key=lambda one: medians[one]) for some in (engines, names))
        ratio = medians[engine] / medians[name]
        said = (
            f"{ratio:.2f}x: {medians[engine]:.1f} ({engine}) against {medians[name]:.1f}/s ({name})"
        )
        yield Result(
            "peers",
            f"{what}, against {peer}",
            said,
            f"{bar:g}x",
            ratio >= bar,
            rates[what.split(",")[0]],
        )


def resembles(truth: Truth) -> Callable[[Request, Answer], str]:
    """Whether a peer gives the same vectors, as far as its own way of resizing allows."""

    def check(request: Request, answer: Answer) -> str:
        if answer.status != 200:
            return must_be_200(request, answer)
        rows = {"image": truth.images, "text": truth.texts}
        true = np.stack([rows[kind][at] for kind, at in request.expected])
        return "" if (vectors(answer.body) * true).sum(1).min() > 0.98 else "another vector"

    return check


def overload(bench: Bench) -> Iterator[Result]:
    """Ten times what the server can do, for a minute, and right after it."""
    options, engine = bench.options, bench.options.engines[0]
    with bench.served(engine) as server:
        capacity = clean(bench.load(server, bench.requests.image)).rate
        alone = bench.load(server, bench.requests.image, concurrency=1, count=10).latencies
        usual, held = statistics.median(alone), server.memory

        async def storm() -> tuple[Load, list[tuple[float, int]], float]:
            over = asyncio.Event()
            memory = asyncio.create_task(watched_memory(server, over))
            rate, seconds = OVERLOAD * capacity, options.overload_seconds
            asked = asyncio.create_task(open_loop(server.port, bench.requests.image, rate, seconds))
            await asyncio.sleep(seconds)
            after = await seconds_to_normal(server, bench.requests.image, 1.5 * usual)
            load = await asked
            over.set()
            return load, await memory, after

        load, memory, after = asyncio.run(storm())
    grown = (max(bytes for _, bytes in memory) - held) / MEGABYTE
    accepted = sorted(load.latencies)
    p99 = accepted[int(0.99 * len(accepted))] if accepted else float("inf")
    what = f"{OVERLOAD} x {capacity:.1f} photos/s for {options.overload_seconds:.0f} s, {engine}"
    starts = [began for _, began, _ in load.times]
    facts = {
        "statuses": load.statuses,
        "faults": load.faults.most_common(5),
        "capacity": capacity,
        "sent_a_second": len(starts) / (max(starts) - min(starts)),
    }
    allowed = set(load.statuses) <= {200, 429, 503}
    waits = sum(count for status, count in load.statuses.items() if status in (429, 503))
    yield Result(
        "overload",
        what,
        f"statuses {load.statuses}",
        "only 200, 429, 503",
        allowed and waits > 0,
        facts,
    )
    yield Result(
        "overload", "its memory", f"grew by {grown:.0f} MB", "less than 100 MB", grown < 100
    )
    within = p99 <= options.deadline
    yield Result(
        "overload", "p99 of what was accepted", f"{p99:.2f} s", f"{options.deadline:g} s", within
    )
    yield Result("overload", "normal again", f"{after:.2f} s after", "2 s", after <= 2)


async def seconds_to_normal(server: Server, make: Callable[[int], Request], limit: float) -> float:
    """Until the first of three requests in a row, one at a time, that were answered as fast as at rest."""
    began, well = time.perf_counter(), []
    while len(well) < 3 and time.perf_counter() - began < 60:
        start = time.perf_counter()
        load = await closed_loop(server.port, make, 1, count=1)
        quick = bool(load.latencies) and load.latencies[0] <= limit
        well = [*well, start] if quick else []
        if not load.latencies:
            await asyncio.sleep(0.05)
    return (well[0] if well else time.perf_counter()) - began


def poison(bench: Bench) -> Iterator[Result]:
    """One request in a hundred is damaged; the others must not notice. Clean and poisoned rounds in turns."""
    engine = bench.options.engines[0]
    with bench.direct(engine) as direct:
        truth = direct.truth()
    cosine = LEAST_COSINE if engine == INT8 else None
    one_in = round(1 / POISON)

    def make(number: int) -> Request:
        return (
            bench.requests.image(number)
            if number % one_in
            else bench.requests.poisoned(number // one_in)
        )

    def check(request: Request, answer: Answer) -> str:
        if request.expected:
            return truth.differs(request, answer, cosine=cosine)
        return "" if 400 <= answer.status < 500 else f"poison was answered with {answer.status}"

    with bench.served(engine) as server:
        rates: dict[str, list[float]] = {"clean": [], "poisoned": []}
        faults, refused = [], 0
        bench.load(server, make, count=2 * CONCURRENCY, check=check)
        for _ in range(bench.options.rounds):
            rates["clean"].append(clean(bench.load(server, bench.requests.image)).rate)
            load = bench.load(server, make, check=check)
            rates["poisoned"].append(load.rate)
            faults += load.faults.elements()
            refused += len(load.times) - load.statuses.get(200, 0)
    clean_rate, rate = (statistics.median(rates[side]) for side in ("clean", "poisoned"))
    facts = {**rates, "faults": faults[:5], "refused": refused}
    said = f"{len(faults)} harmed, {refused} refused"
    yield Result(
        "poison",
        f"{POISON:.0%} of requests, {engine}",
        said,
        "0 harmed",
        not faults and refused > 0,
        facts,
    )
    lost = 1 - rate / clean_rate
    said = f"{rate:.1f} good photos/s against {clean_rate:.1f} ({-lost:+.1%})"
    yield Result("poison", "throughput", said, "within 5 %", lost <= 0.05)


def swap(bench: Bench) -> Iterator[Result]:
    """Two models of one shape, swapped under full load."""
    engine = "torch-float32"
    models, truths = [bench.model(engine, seed) for seed in (0, 1)], {}
    for model in models:
        with bench.direct(engine, model) as direct:
            truth = direct.truth()
            truths[truth.fingerprint] = truth
    folder = bench.temporary / "served"
    shutil.copytree(models[0], folder)
    answered: list[str] = []

    def check(request: Request, answer: Answer) -> str:
        if answer.status != 200:
            return must_be_200(request, answer)
        fingerprint = answer.header("x-lapclip-model")
        answered.append(fingerprint)
        return (
            truths[fingerprint].differs(request, answer)
            if fingerprint in truths
            else "an unknown fingerprint"
        )

    async def only(fingerprint: str) -> bool:
        """Wait until nobody is answered by another model any more."""
        ends, callers = time.perf_counter() + 120, 2 * CONCURRENCY
        while time.perf_counter() < ends:
            if len(answered) >= callers and set(answered[-callers:]) == {fingerprint}:
                return True
            await asyncio.sleep(0.1)
        return False

    async def swaps(server: Server) -> tuple[Load, int]:
        over, done = asyncio.Event(), 0
        asked = asyncio.create_task(
            closed_loop(server.port, bench.requests.image, CONCURRENCY, check=check, until=over)
        )
        for turn in range(SWAPS):
            await only(list(truths)[turn % 2])
            await asyncio.to_thread(
                shutil.copyfile, models[(turn + 1) % 2] / WEIGHTS, folder / "new"
            )
            (folder / "new").replace(folder / WEIGHTS)
            server.process.send_signal(signal.SIGHUP)
            done += await only(list(truths)[(turn + 1) % 2])
        over.set()
        return await asked, done

    with bench.served(engine, folder) as server:
        load, done = asyncio.run(swaps(server))
    failed = len(load.times) - load.statuses.get(200, 0)
    wrong = sum(load.faults.values()) - failed
    facts = {"faults": load.faults.most_common(5)}
    found = f"{done} swaps, {failed} of {len(load.times):,} failed, {wrong} vectors of another model than was said"
    passed = not failed and not wrong and done == SWAPS
    yield Result(
        "swap",
        f"{SWAPS} times under full load, {engine}",
        found,
        "0 failed, 0 wrong",
        passed,
        facts,
    )


def start(bench: Bench) -> Iterator[Result]:
    """From the command to ready, once what is measured has been remembered. All cores."""
    if not bench.options.heads:
        yield Result("start", "", "not measured: give --heads FOLDER")
        return
    times = []
    for _ in range(bench.options.rounds + 1):
        port = free_port()
        with running(
            lapclip_serve(bench.options.heads, port), port, bench.temporary, core=None
        ) as server:
            times.append(server.seconds_to_ready)
    slowest = max(times[1:])
    found = (
        f"{statistics.median(times[1:]):.2f} s, at most {slowest:.2f} s; the first {times[0]:.2f} s"
    )
    what = f"start to ready, {bench.options.heads.name}, from the second on"
    yield Result("start", what, found, "at most 4 s", slowest <= 4, {"seconds": times})


def soak(bench: Bench) -> Iterator[Result]:
    """Half of what the server can do, for long."""
    engine, minutes = bench.options.engines[0], bench.options.minutes
    with bench.served(engine) as server:
        capacity = clean(bench.load(server, bench.requests.half)).rate

        async def half_load() -> tuple[Load, list[tuple[float, int]]]:
            over = asyncio.Event()
            memory = asyncio.create_task(watched_memory(server, over, every=5))
            load = await open_loop(server.port, bench.requests.half, capacity / 2, 60 * minutes)
            over.set()
            return load, await memory

        load, memory = asyncio.run(half_load())
    held = [bytes / MEGABYTE for _, bytes in memory]
    fifth = max(1, len(held) // 5)
    early, late = (
        statistics.median(held[fifth : 2 * fifth] or held),
        statistics.median(held[-fifth:]),
    )
    errors = len(load.times) - load.statuses.get(200, 0)
    latencies = sorted(load.latencies)
    found = (
        f"{errors} errors of {len(load.times):,} at {capacity / 2:.1f}/s; memory {early:.0f} MB in its second fifth, "
        f"{late:.0f} MB in its last; median {statistics.median(latencies) * 1e3:.0f} ms"
    )
    facts = {
        "faults": load.faults.most_common(5),
        "memory_mb": held,
        "p99_s": latencies[int(0.99 * len(latencies))],
    }
    flat = late - early < max(20.0, 0.02 * early)
    yield Result(
        "soak",
        f"half load for {minutes:g} minutes, {engine}",
        found,
        "0 errors, flat",
        not errors and flat,
        facts,
    )


ROWS: dict[str, Callable[[Bench], Iterator[Result]]] = {
    row.__name__: row
    for row in (
        correctness,
        throughput,
        latency,
        peers,
        overload,
        poison,
        swap,
        start,
        soak,
    )
}


if __name__ == "__main__":
    main()
