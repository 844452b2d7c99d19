"""Which engine serves a model here: every one that gives its vectors is timed, and the fastest wins.

A run's model can be computed by torch, on the CPU or an accelerator, and by ONNX Runtime where the run has an export
that was made from this very model. What counts is the time of one image and one text, in batches of a few, while other
images are decoded beside them as they are when it serves: so images, which take longer, weigh more, and threads that
would only take the cores from the decoding lose. What was found is remembered for this model on this machine.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lapclip import __version__
from lapclip.config import AUTO
from lapclip.embedder import Embedder, Encoder, load_torch, open_exported, read_description
from lapclip.errors import ConfigError, RunError, WeightsError
from lapclip.exporting.check import FoundExport, find_export
from lapclip.machine import other_programs
from lapclip.machine.choose_device import choose_device, default_threads, device_of, use_threads
from lapclip.machine.device import DTYPES
from lapclip.machine.facts import logical_cores, machine_facts
from lapclip.measure.timing import MIN_SPEEDUP, Timer
from lapclip.paths import CacheFile, digest_of_json
from lapclip.progress import Status
from lapclip.runs.events import mapping
from lapclip.serving.engine import BatchTimes, Engine
from lapclip.serving.items import ImageFile
from lapclip.suggest import command
from lapclip.text import counted, percent, significant
from lapclip.training.precision import RoundedCopy
from lapclip.weights import CONFIG, DESCRIPTION, is_exported
from lapclip.which_model import WhichModel

EXPORTS = {"onnx-float32": "onnx", "onnx-int8": "onnx-int8"}
"""The format of the export that an engine runs."""
CPU = "cpu"
TIMED_BATCH = 8
PHOTO = 500
"""Pixels of the longer side of the photo that is decoded beside the engine."""
LEAST_COSINE = 0.999
"""How close the vectors of half precision have to be to those of float32."""


@dataclass(frozen=True)
class Asked:
    """What the user fixed; None is measured."""

    engine: str | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Candidate:
    """One way to compute a model."""

    name: str
    device: str = CPU
    threads: int = 1
    folder: Path | None = None
    """The export it runs; None for torch."""

    @property
    def label(self) -> str:
        where = "" if self.device == CPU else f" on {self.device}"
        return f"{self.name}{where}, {counted(self.threads, 'thread')}"


@dataclass
class Forms:
    """The forms that a model is there in."""

    which: WhichModel
    exports: dict[str, FoundExport] = field(default_factory=dict)
    """By engine: those that were made from this very model."""
    stale: list[str] = field(default_factory=list)
    """Formats of exports that were made from another model."""
    _loaded: dict[str, Embedder] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find out which model it is: by what is remembered of its files, else by reading it."""
        memory, path = CacheFile("model_fingerprints.json"), str(self.which.path.absolute())
        self._stamp = stamp = files_stamp(self.which)
        kept = memory.read(path)
        if stamp and isinstance(kept, dict) and kept.get("files") == stamp:
            self.fingerprint = str(kept["fingerprint"])
        else:
            self.fingerprint = self.torch(CPU).fingerprint()
            if self._is_as_found:
                memory.write(path, {"files": stamp, "fingerprint": self.fingerprint})
        run = self.which.made_by
        for engine, to in EXPORTS.items():
            found = find_export(run, to) if run else None
            if found and found.is_of(self.fingerprint):
                self.exports[engine] = found
            elif found:
                self.stale.append(to)

    @property
    def _is_as_found(self) -> bool:
        """Whether no file of the model was replaced since."""
        return bool(self._stamp) and files_stamp(self.which) == self._stamp

    def torch(self, device: str) -> Embedder:
        """The model in torch."""
        if device not in self._loaded:
            self._loaded[device] = load_torch(self.which.path, device)
        return self._loaded[device]

    def open(self, candidate: Candidate) -> Engine:
        """An engine that computes so. Half precision bears the fingerprint of the model: its vectors agree."""
        if candidate.folder is not None:
            return _exported_engine(candidate)
        model: Encoder = self.torch(candidate.device)
        # What was found out first is not about weights that were saved before these were read.
        fingerprint = self.fingerprint if self._is_as_found else model.fingerprint()
        dtype = candidate.name.removeprefix("torch-")
        if dtype != "float32":
            rounded = RoundedCopy(model.model, DTYPES[dtype]).model.eval()
            model = Embedder(rounded, model.tokenizer, model.device)
        return Engine(
            candidate.name, model, candidate.threads, candidate.device, fingerprint=fingerprint
        )


def files_stamp(which: WhichModel) -> str:
    """Changes when a file of a model is replaced; empty where it is not on this disk."""
    path = which.path
    folder = path / "model" if (path / "model" / CONFIG).exists() else path
    files = [path, *path.parent.glob("*.json")] if path.is_file() else [*folder.glob("[!.]*")]
    return _stamp(files) if path.exists() else ""


@dataclass(frozen=True)
class Stamps:
    """The files of a model at one moment: whatever may make another engine the right one."""

    model: str
    """Of the model itself; empty where it is not on this disk."""
    exports: str

    @classmethod
    def of(cls, which: WhichModel) -> Stamps:
        run = which.made_by
        exports = (
            [run.path / "exported" / to / DESCRIPTION for to in EXPORTS.values()] if run else []
        )
        return cls(files_stamp(which), _stamp(exports))


def _stamp(files: Sequence[Path]) -> str:
    seen = []
    for path in sorted(files):
        try:
            status = path.stat()
        except OSError:
            continue
        seen.append([str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns])
    return digest_of_json([__version__, *seen])


def open_engine(
    which: WhichModel, asked: Asked = Asked(), status: Status = lambda _: None
) -> Engine:
    """The engine that serves a model here, measured or remembered."""
    if is_exported(which.path):
        name = (
            "onnx-int8" if read_description(which.path)["format"] == "onnx-int8" else "onnx-float32"
        )
        if asked.engine not in (None, name):
            raise ConfigError(
                f"{which.path} is an export for {name}.", hint=command("serve", which.path)
            )
        candidates, forms = [Candidate(name, folder=which.path)], None
        fingerprint = _exported_engine(candidates[0]).fingerprint
    else:
        status("reading the model")
        forms = Forms(which)
        candidates, fingerprint = _candidates(forms, asked), forms.fingerprint
    memory = CacheFile("serving_engines.json")
    key = _key(fingerprint, candidates, asked)
    opened = forms.open if forms else _exported_engine
    engine = _remembered(memory.read(key), candidates, opened)
    if engine is None:
        status("measuring engines")
        busy = other_programs.describe_busy_cores()
        engine = _measured(candidates, asked.threads, opened)
        if busy is None:
            memory.write(key, _to_remember(engine))
        else:
            engine.reasons.append(f"{busy}; it is measured again at the next start")
    if forms:
        engine.hints = _hints(forms, engine)
    return engine


def same_engine(which: WhichModel, like: Engine) -> Engine | None:
    """A newer model of the same run by the engine that served the last one, with the times measured then: equal sizes
    take the same time, and beside a server that works one would measure the server. None where it cannot be had."""
    forms = None
    if is_exported(which.path):
        engine = _exported_engine(Candidate(like.name, like.device, like.threads, which.path))
    else:
        forms = Forms(which)
        export = forms.exports.get(like.name)
        if like.name in EXPORTS and (
            export is None or (like.name == "onnx-int8" and not export.lost_nothing)
        ):
            return None
        engine = forms.open(
            Candidate(like.name, like.device, like.threads, export.folder if export else None)
        )
    alike = (engine.encoder.view, engine.encoder.context) == (
        like.encoder.view,
        like.encoder.context,
    )
    if not alike or engine.encoder.embedding != like.encoder.embedding:
        return None
    if forms and _strays(engine, forms.open):
        return None
    engine.times, engine.reasons = like.times, like.reasons
    return engine


def _exported_engine(candidate: Candidate) -> Engine:
    assert candidate.folder is not None
    return Engine(
        candidate.name, open_exported(candidate.folder, candidate.threads), candidate.threads
    )


def _candidates(forms: Forms, asked: Asked) -> list[Candidate]:
    """What may serve the model; with an engine asked for, what is called so."""
    device, _ = choose_device(AUTO)
    found = [Candidate("torch-float32")]
    if not device.is_cpu:
        found += [
            Candidate(name, device.kind) for name in ("torch-float32", f"torch-{device.half}")
        ]
    found += [
        Candidate(engine, folder=export.folder)
        for engine, export in forms.exports.items()
        if engine == "onnx-float32" or export.lost_nothing or asked.engine == engine
    ]
    if asked.engine is None:
        return found
    chosen = [candidate for candidate in found if candidate.name == asked.engine]
    if (
        asked.engine.startswith("torch-") and not chosen
    ):  # half precision, other than what the device has first
        chosen = [Candidate(asked.engine, device.kind)]
    if not chosen:
        to, name = (
            EXPORTS[asked.engine],
            forms.which.run.typed if forms.which.run else forms.which.path,
        )
        why = "was made from another model" if to in forms.stale else "is not there"
        again = ["--force"] if to in forms.stale else []
        raise WeightsError(
            f"--engine {asked.engine} needs an export of {name}, which {why}.",
            hint=command("export", name, "--to", to, *again),
        )
    return chosen


def _hints(forms: Forms, engine: Engine) -> list[str]:
    """The export that might be faster, where there is none of this model, or why it is not used."""
    run = forms.which.run
    export = forms.exports.get("onnx-int8")
    if export is not None and not export.lost_nothing and engine.name != "onnx-int8":
        check = mapping(export.about.get("check"))
        change = f"{percent(check.get('recall_before'))} to {percent(check.get('recall_after'))}"
        return [
            f"onnx-int8 is left out: its check saw R@1 go from {change}; --engine onnx-int8 takes it all the same"
        ]
    if run is None or engine.device != CPU or export is not None:
        return []
    again = ["--force"] if "onnx-int8" in forms.stale else []
    made = command("export", run.typed, "--to", "onnx-int8", *again)
    older = "the int8 export there is of another model; " if again else ""
    return [f"{older}{made} may serve faster: it is used where its check finds no loss"]


def _measured(
    candidates: list[Candidate], threads: int | None, opened: Callable[[Candidate], Engine]
) -> Engine:
    """The fastest engine, with the threads and the batches that pay off."""
    reasons: list[str] = []
    here = [
        Candidate(c.name, c.device, threads or c.threads, c.folder)
        for c in candidates
        if c.device == CPU
    ]
    there = [candidate for candidate in candidates if candidate.device != CPU]

    def kept(some: list[Candidate]) -> dict[Candidate, Engine]:
        """Those whose vectors are right."""
        found = {}
        for candidate in some:
            engine = opened(candidate)
            if (fault := _strays(engine, opened)) is None:
                found[candidate] = engine
            elif len(candidates) == 1:
                raise ConfigError(f"{candidate.label}: {fault}.", hint="--engine torch-float32")
            else:
                reasons.append(f"{candidate.label} is left out: {fault}")
        return found

    with ThreadPoolExecutor(max(2, logical_cores()), initializer=lambda: use_threads(1)) as beside:
        engines = kept(here)
        rates = _rates(engines, beside) if len(engines) > 1 else {}
        best = _fastest(rates) if rates else next(iter(engines), None)
        final = {}
        if best is not None:
            counts = [threads] if threads else thread_counts()
            final = {
                (c := Candidate(best.name, CPU, count, best.folder)): opened(c) for count in counts
            }
        final |= kept(there)
        again = _rates(final, beside) if len(final) > 1 else {}
        chosen = _fastest(again) if again else next(iter(final))
    engine = final[chosen]
    engine.measure()
    engine.reasons = [_sentence(chosen, {**rates, **again}), *reasons, *_batches(engine)]
    return engine


def thread_counts() -> list[int]:
    """One thread, all that torch would take, and half of those."""
    most = max(1, min(default_threads(), logical_cores()))
    return sorted({1, max(1, most // 2), most})


@dataclass(frozen=True)
class Rates:
    """Images and texts a second, in batches, with images being decoded beside."""

    images: float
    texts: float

    @property
    def seconds(self) -> float:
        """Of one image and one text."""
        return 1 / self.images + 1 / self.texts

    def __str__(self) -> str:
        return f"{significant(self.images)} images/s and {significant(self.texts)} texts/s"


def _rates(engines: dict[Candidate, Engine], beside: ThreadPoolExecutor) -> dict[Candidate, Rates]:
    """How fast each engine serves, timed in turns."""
    photo = _photo()
    runs: dict[str, Callable[[], object]] = {}
    for at, engine in enumerate(engines.values()):
        pixels, tokens = engine.rows("image", TIMED_BATCH), engine.rows("text", TIMED_BATCH)

        def images(engine: Engine = engine, rows: np.ndarray = pixels) -> None:
            prepared = [beside.submit(photo.row, engine.encoder) for _ in range(TIMED_BATCH)]
            engine.embed("image", rows)
            for each in prepared:
                each.result()

        runs[f"image {at}"] = images
        runs[f"text {at}"] = lambda engine=engine, rows=tokens: engine.embed("text", rows)
    timings = Timer(rounds=5, min_rounds=2, max_seconds=6.0).time_in_turns(runs)
    seconds = {name: timing.median for name, timing in timings.items()}
    return {
        candidate: Rates(TIMED_BATCH / seconds[f"image {at}"], TIMED_BATCH / seconds[f"text {at}"])
        for at, candidate in enumerate(engines)
    }


def _fastest(rates: dict[Candidate, Rates]) -> Candidate:
    """The fastest; of those that are as fast within noise the one with the fewest threads, because threads that wait
    for each other slow down tenfold when anything else uses a core."""
    best = min(rate.seconds for rate in rates.values())
    level = [candidate for candidate, rate in rates.items() if rate.seconds <= best * MIN_SPEEDUP]
    return min(level, key=lambda candidate: (candidate.threads, rates[candidate].seconds))


def _photo() -> ImageFile:
    """A JPEG as people send them."""
    coarse = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((PHOTO, PHOTO * 3 // 4), Image.Resampling.BICUBIC).save(
        file, "JPEG", quality=90
    )
    return ImageFile(file.getvalue())


def _strays(engine: Engine, opened: Callable[[Candidate], Engine]) -> str | None:
    """Why an engine in half precision may not stand for float32, if so."""
    if engine.is_exact or engine.name in EXPORTS:  # an export was checked when it was made
        return None
    exact = opened(Candidate("torch-float32", engine.device))
    for tower in ("image", "text"):
        rows = engine.rows(tower, TIMED_BATCH)
        cosine = float((engine.embed(tower, rows) * exact.embed(tower, rows)).sum(axis=1).min())
        if not cosine >= LEAST_COSINE:
            return f"its vectors of the {tower} tower agree with float32 to a cosine of {cosine:.4f} only"
    return None


def _sentence(chosen: Candidate, rates: dict[Candidate, Rates]) -> str:
    if chosen not in rates:
        return f"{chosen.label}: nothing else was to be measured"
    others = sorted(
        (rate.seconds, candidate.label, rate)
        for candidate, rate in rates.items()
        if candidate != chosen
    )
    against = "; ".join(f"{label}: {rate}" for _, label, rate in others)
    return f"{chosen.label}: {rates[chosen]}, against {against}"


def _batches(engine: Engine) -> list[str]:
    """What joining requests gains here."""
    said = []
    for tower, plural in (("image", "images"), ("text", "texts")):
        times = engine.times[tower]
        if times.largest == 1:
            said.append(f"{plural} of several callers are not joined: a batch is no faster here")
        else:
            said.append(
                f"up to {times.largest} {plural} are computed at once, {times.gain:.1f} times as fast as alone"
            )
    return said


def _key(fingerprint: str, candidates: list[Candidate], asked: Asked) -> str:
    """What a choice depends on: the model, what can compute it, and the machine."""
    machine = machine_facts()
    devices = sorted({candidate.device for candidate in candidates})
    facts = {
        "candidates": [
            [c.name, c.device, _stamp([c.folder / DESCRIPTION]) if c.folder else ""]
            for c in candidates
        ],
        "threads": asked.threads,
        "chip": machine["chip"],
        "cores": [logical_cores(), default_threads()],
        "devices": [device_of(kind).label for kind in devices if kind != CPU],
        "versions": [__version__, *(_version(package) for package in ("torch", "onnxruntime"))],
    }
    return f"{fingerprint} {digest_of_json(facts)[:16]}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _to_remember(engine: Engine) -> dict[str, Any]:
    times = {
        tower: {str(size): spent for size, spent in each.seconds.items()}
        for tower, each in engine.times.items()
    }
    said = {"engine": engine.name, "device": engine.device, "threads": engine.threads}
    return {**said, "times": times, "reasons": engine.reasons}


def _remembered(
    kept: Any, candidates: list[Candidate], opened: Callable[[Candidate], Engine]
) -> Engine | None:
    """The engine that was chosen before; None where there was none, or what is kept makes no sense."""
    try:
        found = [c for c in candidates if (c.name, c.device) == (kept["engine"], kept["device"])]
        times = {
            tower: BatchTimes(
                {int(size): float(spent) for size, spent in kept["times"][tower].items()}
            )
            for tower in ("image", "text")
        }
        candidate = Candidate(found[0].name, found[0].device, int(kept["threads"]), found[0].folder)
        reasons = [str(reason) for reason in kept["reasons"]]
        _ = [each.largest for each in times.values()]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return None
    engine = opened(candidate)
    engine.times, engine.reasons = times, [*reasons, "measured at an earlier start"]
    return engine


def check_finite(engine: Engine) -> None:
    """Refuse a model whose training broke down."""
    for tower in ("image", "text"):
        if not np.isfinite(engine.embed(tower, engine.rows(tower, 1))).all():
            raise RunError(
                "The model gives no numbers: its training broke down.", hint="lapclip doctor"
            )
