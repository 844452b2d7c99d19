"""Choose the engine that serves a model here: a race of every form that gives its vectors.

An engine is timed on a batch of images and a batch of texts, while other images are decoded beside
it as when it serves. Images, which take longer, weigh more, and threads that only take cores from
the decoding lose. The winner is remembered for this model on this machine.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from PIL import Image

from lapclip.config import AUTO
from lapclip.embedder import read_description
from lapclip.errors import ConfigError, LapclipError, RunError, WeightsError
from lapclip.machine.choose_device import choose_device, default_threads, device_of, use_threads
from lapclip.machine.facts import logical_cores
from lapclip.machine.other_programs import describe_busy_cores
from lapclip.measure.memory import Memory, Question
from lapclip.measure.race import Candidate, race
from lapclip.measure.timing import Timer, Timing
from lapclip.progress import Status
from lapclip.serving.engine import BatchTimes, Engine
from lapclip.serving.items import ImageFile
from lapclip.serving.model_forms import (
    CPU,
    EXPORTS,
    INT8,
    Form,
    ModelForms,
    open_export,
    stamp_files,
)
from lapclip.suggest import command
from lapclip.weights import DESCRIPTION, is_exported
from lapclip.which_model import WhichModel

MEMORY = Memory("serving_engines.json")
TIMED_BATCH = 8
TIMER = Timer(rounds=5, min_rounds=2, max_seconds=6.0)
PHOTO_SIDE = 500  # pixels of the photo that is decoded beside the engine
MIN_COSINE = 0.999  # between the vectors of half precision and of float32
TOWERS = ("image", "text")

OpenForm = Callable[[Form], Engine]


@dataclass(frozen=True)
class EngineRequest:
    """What the user fixed. None is measured."""

    engine: str | None = None
    threads: int | None = None


def open_engine(
    which: WhichModel,
    request: EngineRequest = EngineRequest(),
    status: Status = lambda _: None,
) -> Engine:
    """Open the fastest engine for a model, raced or remembered."""
    models = None
    if is_exported(which.path):
        forms = [export_form(which, request)]
        open_form: OpenForm = open_export
        fingerprint = open_export(forms[0]).fingerprint
    else:
        status("reading the model")
        models = ModelForms(which)
        forms, open_form, fingerprint = list_forms(models, request), models.open, models.fingerprint
    question = ask_engine(fingerprint, forms, request)
    engine = recall_engine(MEMORY.recall(question), forms, open_form)
    if engine is None:
        status("measuring engines")
        busy = describe_busy_cores()
        engine = race_engines(forms, request, open_form)
        if busy is None:
            MEMORY.remember(question, to_answer(engine))
        else:
            engine.reasons.append(f"{busy}; it is measured again at the next start")
    if models is not None and INT8 in models.exports:
        engine.reasons.append(explain_int8(models, engine))
    return engine


def open_same_engine(which: WhichModel, old: Engine) -> Engine | None:
    """Open a newer model of the same run with the engine of the last one, and its times.

    Equal sizes take the same time, and a race beside a working server would measure the server.
    None if the newer model does not have this engine.
    """
    form = Form(old.name, old.device, old.threads)
    models = None
    if is_exported(which.path):
        engine = open_export(replace(form, folder=which.path))
    else:
        models = ModelForms(which)
        if old.name in EXPORTS:
            export = models.exports.get(old.name)
            if export is None:
                return None
            form = replace(form, folder=export.folder)
        engine = models.open(form)
    new_encoder, old_encoder = engine.encoder, old.encoder
    has_same_sizes = (
        new_encoder.view == old_encoder.view
        and new_encoder.context == old_encoder.context
        and new_encoder.embedding == old_encoder.embedding
    )
    if not has_same_sizes or (models and find_fault(engine, models.open)):
        return None
    engine.times, engine.reasons = old.times, old.reasons
    return engine


def export_form(which: WhichModel, request: EngineRequest) -> Form:
    """Return the only form of a model that is an exported folder."""
    is_int8 = read_description(which.path)["format"] == EXPORTS[INT8]
    name = INT8 if is_int8 else "onnx-float32"
    if request.engine not in (None, name):
        raise ConfigError(
            f"{which.path} is an export for {name}.", hint=command("serve", which.path)
        )
    return Form(name, folder=which.path)


def list_forms(models: ModelForms, request: EngineRequest) -> list[Form]:
    """Return the forms that may serve a model. Only those of the requested engine, if there is one.

    An int8 export has to be requested, because its vectors do not compare with the model's own.
    """
    device, _ = choose_device(AUTO)
    forms = [Form("torch-float32")]
    if not device.is_cpu:
        forms += [Form("torch-float32", device.kind), Form(f"torch-{device.half}", device.kind)]
    for engine, export in models.exports.items():
        if engine != INT8 or request.engine == INT8:
            forms.append(Form(engine, folder=export.folder))
    if request.engine is None:
        return forms
    requested = [form for form in forms if form.engine == request.engine]
    if not requested and request.engine.startswith("torch-"):
        requested = [Form(request.engine, device.kind)]  # another half precision than the usual one
    if not requested:
        raise missing_export(models, EXPORTS[request.engine], request.engine)
    return requested


def missing_export(models: ModelForms, export_format: str, engine: str) -> WeightsError:
    """Return the error for a requested engine that has no export of the model."""
    run = models.which.run
    name = run.typed if run else models.which.path
    return WeightsError(
        f"--engine {engine} needs an export of this very model; {name} has none.",
        hint=command("export", name, "--to", export_format, "--force"),
    )


def explain_int8(models: ModelForms, engine: Engine) -> str:
    """Explain which vectors the int8 export of a served model compares with."""
    if engine.name != INT8:
        return (
            f"{INT8} was not measured, because its vectors do not compare with the model's own: "
            f"--engine {INT8} takes it"
        )
    embed = command("embed", "DATA", "--model", models.exports[INT8].folder)
    return f"its vectors do not compare with the model's own, but with those of {embed}"


def race_engines(forms: Sequence[Form], request: EngineRequest, open_form: OpenForm) -> Engine:
    """Return the fastest engine, with the threads and the batches that pay.

    On the CPU, engines race with one thread first, and then the winner with several numbers of
    threads against the accelerator. Among equals the fewest threads win: threads that wait for
    each other become ten times as slow when another program uses a core.
    """
    engines: dict[Form, Engine] = {}

    def make_candidate(form: Form) -> Candidate:
        engine = engines[form] = open_form(form)
        rows = {tower: engine.rows(tower, TIMED_BATCH) for tower in TOWERS}
        run = partial(serve_batch, engine, rows, photo, pool)
        return Candidate(str(form), run, partial(find_fault, engine, open_form))

    cpu_forms = [
        replace(form, threads=request.threads or form.threads)
        for form in forms
        if form.device == CPU
    ]
    finalists = [form for form in forms if form.device != CPU]
    timings: dict[str, Timing] = {}
    faults: dict[str, str] = {}
    photo = make_photo()
    cores = max(2, logical_cores())
    with ThreadPoolExecutor(cores, initializer=lambda: use_threads(1)) as pool:
        try:
            if cpu_forms:
                result = race([make_candidate(form) for form in cpu_forms], TIMER)
                timings, faults = result.timings, result.faults
                winner = next(form for form in cpu_forms if str(form) == result.winner)
                counts = [request.threads] if request.threads else thread_counts()
                finalists += [replace(winner, threads=count) for count in counts]
            finalists.sort(key=lambda form: form.threads)
            result = race([make_candidate(form) for form in finalists], TIMER)
        except LapclipError as error:  # no engine gives the right vectors
            raise ConfigError(f"{error.message}.", hint="--engine torch-float32") from None
    timings, faults = timings | result.timings, faults | result.faults
    engine = next(engines[form] for form in finalists if str(form) == result.winner)
    engine.measure()
    engine.reasons = [
        explain_winner(result.winner, timings),
        *[f"left out: {fault}" for fault in faults.values()],
    ]
    return engine


def thread_counts() -> list[int]:
    """Return one thread, all that torch would take, and half of those."""
    all_threads = max(1, min(default_threads(), logical_cores()))
    return sorted({1, max(1, all_threads // 2), all_threads})


def serve_batch(
    engine: Engine, rows: dict[str, np.ndarray], photo: ImageFile, pool: ThreadPoolExecutor
) -> None:
    """Embed a batch of images and a batch of texts while as many photos are decoded."""
    decoding = [pool.submit(photo.row, engine.encoder) for _ in range(TIMED_BATCH)]
    for tower in TOWERS:
        engine.embed(tower, rows[tower])
    for photo_row in decoding:
        photo_row.result()


def make_photo() -> ImageFile:
    """Return a JPEG like those that people send."""
    noise = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
    photo = Image.fromarray(noise).resize(
        (PHOTO_SIDE, PHOTO_SIDE * 3 // 4), Image.Resampling.BICUBIC
    )
    file = io.BytesIO()
    photo.save(file, "JPEG", quality=90)
    return ImageFile(file.getvalue())


def find_fault(engine: Engine, open_form: OpenForm) -> str | None:
    """Return why half precision cannot stand for float32. Exports were checked when made."""
    if engine.is_exact or engine.name in EXPORTS:
        return None
    exact = open_form(Form("torch-float32", engine.device))
    for tower in TOWERS:
        rows = engine.rows(tower, TIMED_BATCH)
        cosines = (engine.embed(tower, rows) * exact.embed(tower, rows)).sum(axis=1)
        if not cosines.min() >= MIN_COSINE:
            return (
                f"agrees with float32 in the {tower} tower only to a cosine of {cosines.min():.4f}"
            )
    return None


def explain_winner(winner: str, timings: dict[str, Timing]) -> str:
    """Compare the winner's time with those of the others."""
    if winner not in timings:
        return f"{winner}: nothing else was to be measured"
    others = sorted(set(timings) - {winner}, key=lambda name: timings[name].median)
    comparison = "; ".join(f"{name}: {timings[name]}" for name in others)
    work = f"{TIMED_BATCH} images and {TIMED_BATCH} texts"
    return f"{winner}: {timings[winner]} for {work}, against {comparison}"


def ask_engine(fingerprint: str, forms: Sequence[Form], request: EngineRequest) -> Question:
    """Return the question which of the forms is the fastest here."""
    descriptions = []
    for form in forms:
        export = stamp_files([form.folder / DESCRIPTION]) if form.folder else ""
        descriptions.append([form.engine, form.device, export])
    try:
        onnxruntime = version("onnxruntime")
    except PackageNotFoundError:
        onnxruntime = ""
    details = {
        "fingerprint": fingerprint,
        "forms": descriptions,
        "threads": request.threads,
        "cores": [logical_cores(), default_threads()],
        "onnxruntime": onnxruntime,
    }
    devices = sorted({form.device for form in forms})
    return Question("engine", [device_of(device).key for device in devices], details)


def to_answer(engine: Engine) -> dict[str, Any]:
    """Return what is remembered of an engine."""
    times = {}
    for tower, batch_times in engine.times.items():
        times[tower] = {str(size): seconds for size, seconds in batch_times.seconds.items()}
    return {
        "engine": engine.name,
        "device": engine.device,
        "threads": engine.threads,
        "times": times,
        "reasons": engine.reasons,
    }


def recall_engine(answer: Any, forms: Sequence[Form], open_form: OpenForm) -> Engine | None:
    """Open the remembered engine. None if there is none, or if the answer makes no sense."""
    try:
        form = next(
            form
            for form in forms
            if (form.engine, form.device) == (answer["engine"], answer["device"])
        )
        form = replace(form, threads=int(answer["threads"]))
        times = {}
        for tower in TOWERS:
            seconds = answer["times"][tower].items()
            times[tower] = BatchTimes({int(size): float(spent) for size, spent in seconds})
            _ = times[tower].largest  # fails if sizes are missing
        reasons = [str(reason) for reason in answer["reasons"]]
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration):
        return None
    engine = open_form(form)
    engine.times = times
    engine.reasons = [*reasons, "measured at an earlier start"]
    return engine


def check_finite(engine: Engine) -> None:
    """Refuse a model whose training broke down."""
    for tower in TOWERS:
        if not np.isfinite(engine.embed(tower, engine.rows(tower, 1))).all():
            raise RunError(
                "The model gives no numbers: its training broke down.", hint="lapclip doctor"
            )
