"""Decide every setting that is "auto": by an earlier tuning, by a short one now, or without timing.

A run that is too short to be tuned takes the plain settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from lapclip.config import ALL, AUTO, Config, TrainConfig, replace_in
from lapclip.data.batches import Batch, BatchPlan, prefetch
from lapclip.errors import ConfigError
from lapclip.machine.choose_device import (
    candidates,
    choose_compile,
    choose_device,
    default_threads,
    device_of,
    prepare_device,
)
from lapclip.machine.device import Device
from lapclip.machine.facts import logical_cores
from lapclip.measure.memory import Memory, Question
from lapclip.progress import Status
from lapclip.training.memory import check_memory, largest_micro_batch
from lapclip.tuning.kernels import check_kernels, choose_kernels
from lapclip.tuning.model_size import estimate_step_seconds
from lapclip.tuning.trial import Setting
from lapclip.tuning.tune import (
    NothingWorks,
    Tuner,
    Tuning,
    find_micro_batch,
    is_long,
    planned_steps,
)

MEMORY = Memory("tune.json")
TUNED_SETTINGS = ("device", "dtype", "threads")  # a run is tuned if one of these is "auto"
MAX_SHARE_OF_RUN = 0.05
MAX_SECONDS = 60.0
MIN_SECONDS = 2.0  # to choose kernels
MIN_STEPS = 8
TIMED_BATCHES = 8
# A loader thread that is busy for less than this share of a step keeps up on busy cores too.
MAX_LOADER_SHARE = 0.5


@dataclass(frozen=True)
class FoundTuning:
    """A tuning that a run can use."""

    tuning: Tuning
    origin: str
    """Ending of its reasons, for example "; tuned before"."""


@dataclass(frozen=True)
class Resolved:
    """A configuration with nothing "auto" left."""

    config: Config
    device: Device
    reasons: dict[str, str]
    """Reason for each choice by the name of the setting, for example "train.dtype"."""
    step_seconds: float | None = None
    """Time of a step, if it was timed."""


def resolve_auto(config: Config, plan: BatchPlan, longest_caption: int, status: Status) -> Resolved:
    """Decide everything that is "auto"."""
    found = None
    caption_tokens = longest_caption
    if not is_partly_frozen(config):
        refuse_what_cannot_fit(config, longest_caption)
        batch = plan.batch(1)
        caption_tokens = batch.tokens_BL.shape[1]
        found = find_tuning(config, batch, status)
    if found is None:
        resolved = resolve_untimed(config, caption_tokens, longest_caption)
    else:
        resolved = apply_tuning(config, found, longest_caption)
    loader_threads, reason = choose_loader_threads(
        config.train.loader_threads, plan, resolved.step_seconds
    )
    config = replace_in(resolved.config, "train", loader_threads=loader_threads)
    reasons = resolved.reasons | {"train.loader_threads": reason}
    return replace(resolved, config=config, reasons=reasons)


def find_tuning(config: Config, batch: Batch, status: Status) -> FoundTuning | None:
    """Return a remembered tuning, or a new one if the run is long enough to pay for it."""
    requested = [getattr(config.train, name) for name in TUNED_SETTINGS]
    if AUTO not in requested:
        return None
    seconds = seconds_to_spend(config, batch)
    tuning = recall(config, batch, seconds)
    if tuning is not None:
        return FoundTuning(tuning, "; tuned before")
    if not seconds:
        return None
    try:
        tuning = Tuner(config, batch, seconds, status, briefly=True).run()
    except NothingWorks:
        return None  # tuning needs more memory than training, which may still work
    if tuning.is_worth_remembering:
        remember(config, batch, tuning, seconds)
    return FoundTuning(tuning, "".join(f"; {warning}" for warning in tuning.warnings))


def apply_tuning(config: Config, found: FoundTuning, longest_caption: int) -> Resolved:
    """Return the configuration that a tuning chose."""
    tuning, batch_size = found.tuning, config.train.batch_size
    setting = tuning.setting
    device = device_of(setting.device)
    prepare_device(device, setting.threads)
    train = replace(setting.apply_to(config.train), micro_batch=config.train.micro_batch)
    reasons = {f"train.{name}": f"{text}{found.origin}" for name, text in tuning.reasons.items()}
    # Predict again: less memory may be free by now, and other batches have longer captions.
    micro_batch, reason = find_micro_batch(config.model, train, longest_caption, device)
    if (micro_batch or batch_size) <= (setting.micro_batch or batch_size):
        reasons["train.micro_batch"] = reason
    else:
        micro_batch = setting.micro_batch
    config = replace(config, train=replace(train, micro_batch=micro_batch))
    return Resolved(config, device, reasons, tuning.step_seconds)


def is_partly_frozen(config: Config) -> bool:
    """Return whether only part of the model trains, or a tower is a pretrained network.

    Neither arithmetic nor tuning knows the steps of such a run.
    """
    train, model = config.train, config.model
    has_network = bool(model.image_from or model.text_from)
    trains_all = train.image_blocks == ALL and train.text_blocks == ALL and not train.lora_rank
    return has_network or not trains_all


def choose_threads(train: TrainConfig) -> tuple[int, str]:
    """Return the CPU threads of a run that is not tuned, and why."""
    if train.threads == AUTO:
        return default_threads(), "torch's own choice"
    return int(train.threads), "asked for"


def refuse_what_cannot_fit(config: Config, longest_caption: int) -> None:
    """Raise ConfigError if not even one pair fits on any device, before memory is taken."""
    model, train = config.model, config.train
    devices = candidates(train)
    for device in devices:
        if largest_micro_batch(model, train, longest_caption, device) is not None:
            return
    check_memory(model, train, longest_caption, devices[0])


def resolve_untimed(config: Config, caption_tokens: int, longest_caption: int) -> Resolved:
    """Return settings for a run that is not tuned, of which only kernels are timed.

    Takes the accelerator if there is one, float32 and torch's number of threads.
    """
    train, model = config.train, config.model
    is_frozen = is_partly_frozen(config)
    reasons = {}
    device, reasons["train.device"] = choose_device(train.device)
    threads, reasons["train.threads"] = choose_threads(train)
    reasons["train.dtype"] = "asked for"
    if train.dtype == AUTO:
        train = replace(train, dtype="float32")
        reasons["train.dtype"] = "others are not timed for this run"
    prepare_device(device, threads)
    if is_frozen:
        compile, reasons["train.compile"] = "none", "only part of the model learns"
    else:
        check_memory(model, train, longest_caption, device)
        compile, reasons["train.compile"] = choose_compile(train.compile, device)
    train = replace(train, device=device.kind, threads=threads, compile=compile)
    kernels = {"image_attention": "fused", "text_attention": "fused", "linear": "torch"}
    if not (model.image_from or model.text_from):
        kernels, kernel_reasons = choose_kernels(model, train, caption_tokens, device)
        reasons |= kernel_reasons
    train = replace(train, **kernels)
    if not is_frozen:
        check_memory(model, train, longest_caption, device)  # kernels differ in memory
    return Resolved(replace(config, train=train), device, reasons)


def time_batches(plan: BatchPlan, threads: int) -> float:
    """Return the seconds that so many loader threads take for a batch, on an idle machine."""
    start = time.perf_counter()
    for _ in prefetch(plan, 1, TIMED_BATCHES, threads=threads):
        pass
    return (time.perf_counter() - start) / TIMED_BATCHES


def choose_loader_threads(
    requested: int | str,
    plan: BatchPlan,
    step_seconds: float | None,
    time_batches: Callable[[BatchPlan, int], float] = time_batches,
) -> tuple[int, str]:
    """Return the fewest loader threads that keep up with the steps, and why.

    Without the time of a step there is nothing to compare with, and one is taken. `time_batches`
    returns the seconds a batch for a number of threads.
    """
    if requested != AUTO:
        return int(requested), "asked for"
    if step_seconds is None:
        return 1, "one prepares the next batch while a step runs"
    plan.batch(1)  # draws the order of the epoch, which must not be timed
    limit = MAX_LOADER_SHARE * step_seconds
    threads = 1
    seconds = {threads: time_batches(plan, threads)}
    while seconds[threads] > limit and 2 * threads <= logical_cores():
        threads *= 2
        seconds[threads] = time_batches(plan, threads)
    if seconds[threads] > limit:
        # None keeps up. Of those equally fast within 0.1 ms, `min` takes the fewest.
        threads = min(seconds, key=lambda count: round(seconds[count], 4))
    return threads, (
        f"a batch is ready every {seconds[threads] * 1e3:.1f} ms; "
        f"a step takes {step_seconds * 1e3:.1f} ms"
    )


def seconds_to_spend(config: Config, batch: Batch) -> float:
    """Return a small share of the run's estimated length. 0 if that is too little to tune."""
    train = config.train
    device = candidates(train)[0]
    prepare_device(device, choose_threads(train)[0])
    step_seconds = estimate_step_seconds(
        config.model, train.batch_size, batch.tokens_BL.shape[1], device, "float32"
    )
    run_seconds = 60 * train.minutes or train.steps * step_seconds
    seconds = min(MAX_SECONDS, MAX_SHARE_OF_RUN * run_seconds)
    return seconds if seconds >= MIN_SECONDS + MIN_STEPS * step_seconds else 0.0


def remember(config: Config, batch: Batch, tuning: Tuning, budget_seconds: float) -> None:
    """Store a tuning for runs of the same model and batch on this machine."""
    answer = {
        "tuning": asdict(tuning),
        "model": str(config.model),
        "batch_size": config.train.batch_size,
        "steps": planned_steps(config.train, tuning.step_seconds),
        "budget_seconds": budget_seconds,
    }
    MEMORY.remember(_question(config, batch), answer)


def recall(config: Config, batch: Batch, budget_seconds: float = 0.0) -> Tuning | None:
    """Return an earlier tuning of the same model and batch, with the same settings requested.

    None if it had less than half of the time that may be spent now, or was for a run of another
    length where that decides about compiling.
    """
    answer = MEMORY.recall(_question(config, batch))
    try:
        setting = Setting(**answer["tuning"]["setting"])
        tuning = replace(Tuning(**answer["tuning"]), setting=setting)
        check_kernels(setting.apply_to(config.train), device_of(setting.device))
        step_seconds = tuning.step_seconds
        steps, tuned_steps = planned_steps(config.train, step_seconds), answer["steps"]
        if answer["budget_seconds"] < budget_seconds / 2:
            return None
        if "compiled" in setting.compile and steps < tuned_steps:
            return None  # compiling paid for a longer run
        if is_long(steps, step_seconds) and not is_long(tuned_steps, step_seconds):
            return None  # compiling was not tried for a shorter run
    except (ConfigError, TypeError, KeyError, ValueError):
        return None
    return tuning


def _question(config: Config, batch: Batch) -> Question:
    settings = [*Setting.__dataclass_fields__, "recompute", "cheap_size"]
    requested: dict[str, Any] = {name: getattr(config.train, name) for name in settings}
    details = {
        "model": str(config.model),
        "batch_size": config.train.batch_size,
        "caption_tokens": batch.tokens_BL.shape[1],
        "requested": requested,
        "threads": default_threads(),
        "cores": logical_cores(),
    }
    return Question("tune", [device.key for device in candidates(config.train)], details)
