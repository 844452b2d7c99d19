"""Decide what is "auto": by an earlier tuning, by a short one now, or plainly where the run is too short for either."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields, replace
from typing import Any

from lapclip import __version__
from lapclip.config import ALL, AUTO, Config, TrainConfig, replace_in
from lapclip.data.batches import Batch, BatchPlan, prefetch
from lapclip.machine.choose_device import (
    candidates,
    choose_compile,
    choose_train_device,
    default_threads,
    prepare_device,
)
from lapclip.machine.device import DTYPES, Device
from lapclip.machine.facts import logical_cores
from lapclip.machine.other_programs import describe_busy_cores
from lapclip.paths import CacheFile
from lapclip.progress import Status
from lapclip.training.memory import check_memory, largest_micro_batch
from lapclip.tuning.choose_kernels import check_kernels, choose_kernels
from lapclip.tuning.flops import least_seconds
from lapclip.tuning.measure import Setting
from lapclip.tuning.search import (
    NothingWorks,
    Search,
    Tuning,
    fitting_micro_batch,
    is_long,
    planned_steps,
)

CACHE = CacheFile("tune.json")
SHARE_OF_RUN = 0.05
"""The most of a planned run that `lapclip train` spends on tuning before it."""
MOST_SECONDS = 60.0
LEAST_SECONDS, LEAST_STEPS = 2.0, 8
"""What a tuning takes at least: to choose kernels, and to take a few steps."""
BATCHES = 8
"""How many are prepared to time the loader threads."""
AT_EASE = 0.5
"""A loader thread that is busy for less than this share of a step keeps up even while the cores are in use."""
TUNED = ("device", "dtype", "threads")
"""Settings that are worth a tuning when one of them is "auto"."""


def resolve_auto(
    config: Config, plan: BatchPlan, longest_caption: int, status: Status
) -> tuple[Config, Device, dict[str, str], float | None]:
    """The configuration with nothing "auto" left, the device, the reason for each choice, a step's time if known."""
    if is_partly_frozen(config):
        return resolve_frozen(config, longest_caption)
    refuse_what_cannot_fit(config, longest_caption)
    batch = plan.batch(1)
    seconds = seconds_to_spend(config, batch) if _wants_tuning(config.train) else 0.0
    tuning = recall(config, batch, seconds) if _wants_tuning(config.train) else None
    recalled = tuning is not None
    if tuning is None and seconds:
        with suppress(
            NothingWorks
        ):  # trying needs more memory than training, so training may still work
            tuning = Search(config, batch, seconds, status, briefly=True).run()
            if tuning.worth_remembering:
                remember(config, batch, tuning, seconds)
    if tuning is None:
        config, device, reasons = resolve_untimed(config, batch, longest_caption)
    else:
        device = tuning.setting.where
        prepare_device(device, tuning.setting.threads)
        asked = replace(
            config.train,
            **{
                **asdict(tuning.setting),
                "micro_batch": config.train.micro_batch,
            },
        )
        why = (
            "; tuned before" if recalled else "".join(f"; {warning}" for warning in tuning.warnings)
        )
        reasons = {f"train.{name}": f"{text}{why}" for name, text in tuning.reasons.items()}
        # Again: less memory may be free than there was, and other batches have longer captions.
        micro_batch, why_micro_batch = fitting_micro_batch(
            config.model, asked, longest_caption, device
        )
        if recalled or (micro_batch or config.train.batch_size) < (
            tuning.setting.micro_batch or config.train.batch_size
        ):
            reasons["train.micro_batch"] = why_micro_batch
        else:
            micro_batch = tuning.setting.micro_batch
        config = replace(config, train=replace(asked, micro_batch=micro_batch))
    timed = tuning.seconds_a_step if tuning else None
    loaders, reasons["train.loader_threads"] = choose_loader_threads(
        config.train.loader_threads, plan, timed
    )
    return replace_in(config, "train", loader_threads=loaders), device, reasons, timed


def are_idle() -> bool:
    """Whether what is timed now is worth remembering."""
    return describe_busy_cores() is None


def is_partly_frozen(config: Config) -> bool:
    """Whether steps are not those of a whole model of ours, so that neither arithmetic nor tuning knows them."""
    train, model = config.train, config.model
    foreign = model.image_from or model.text_from
    return bool(foreign or train.lora_rank or train.image_blocks != ALL or train.text_blocks != ALL)


def resolve_frozen(
    config: Config, longest_caption: int
) -> tuple[Config, Device, dict[str, str], None]:
    """As `resolve_untimed`, without what is computed from a whole model that trains."""
    train, model = config.train, config.model
    device, why_device = choose_train_device(train)
    reasons = {"train.device": why_device}
    reasons["train.loader_threads"] = "one is enough for what is not frozen"
    reasons["train.threads"] = "torch's own choice" if train.threads == AUTO else "asked for"
    reasons["train.dtype"] = (
        "what pretrained weights are kept in" if train.dtype == AUTO else "asked for"
    )
    reasons["train.compile"] = "only part of the model learns"
    threads = default_threads() if train.threads == AUTO else int(train.threads)
    prepare_device(device, threads)
    dtype = "float32" if train.dtype == AUTO else train.dtype
    loaders = 1 if train.loader_threads == AUTO else train.loader_threads
    resolved = replace(
        train,
        device=device.kind,
        threads=threads,
        dtype=dtype,
        compile="none",
        loader_threads=loaders,
    )
    forms = {"image_attention": "fused", "text_attention": "fused", "linear": "torch"}
    if not (model.image_from or model.text_from):
        forms, why_forms = choose_kernels(
            model, resolved, longest_caption, device, remember=are_idle
        )
        reasons |= why_forms
    return replace(config, train=replace(resolved, **forms)), device, reasons, None


def refuse_what_cannot_fit(config: Config, longest_caption: int) -> None:
    """A model of which one pair does not fit on any device is refused before anything takes memory."""
    here = candidates(config.train)
    arguments = (config.model, config.train, longest_caption)
    if all(largest_micro_batch(*arguments, device) is None for device in here):
        check_memory(*arguments, here[0])


def resolve_untimed(
    config: Config, batch: Batch, longest_caption: int
) -> tuple[Config, Device, dict[str, str]]:
    """Without timing steps: the accelerator where there is one, float32, torch's threads; kernels are timed alone."""
    train = config.train
    device, why_device = choose_train_device(train)
    reasons = {"train.device": why_device}
    check_memory(config.model, train, longest_caption, device)
    reasons["train.threads"] = "torch's own choice" if train.threads == AUTO else "asked for"
    reasons["train.dtype"] = (
        "the run is too short to time others" if train.dtype == AUTO else "asked for"
    )
    threads = default_threads() if train.threads == AUTO else int(train.threads)
    prepare_device(device, threads)
    how, reasons["train.compile"] = choose_compile(train.compile, device)
    dtype = "float32" if train.dtype == AUTO else train.dtype
    resolved = replace(train, device=device.kind, threads=threads, dtype=dtype, compile=how)
    forms, why_forms = choose_kernels(
        config.model, resolved, batch.tokens_BL.shape[1], device, remember=are_idle
    )
    resolved = replace(resolved, **forms)
    check_memory(
        config.model, resolved, longest_caption, device
    )  # again: some forms take more than others
    return replace(config, train=resolved), device, reasons | why_forms


def time_batches(plan: BatchPlan, threads: int) -> float:
    """Return seconds a batch by so many threads, when nothing else is done."""
    began = time.perf_counter()
    count = sum(1 for _ in prefetch(plan, 1, BATCHES, threads=threads))
    return (time.perf_counter() - began) / count


def choose_loader_threads(
    asked: int | str,
    plan: BatchPlan,
    seconds_a_step: float | None,
    time_batches: Callable[[BatchPlan, int], float] = time_batches,
) -> tuple[int, str]:
    """Return the number of loader threads, and why.

    Without the time of a step there is nothing to keep up with, and one is plenty. `time_batches`
    returns seconds a batch by so many threads.
    """
    if asked != AUTO:
        return int(asked), "asked for"
    if seconds_a_step is None:
        return 1, "one prepares the next batch while a step runs"
    plan.batch(1)  # the first draws the order of the epoch
    times = {1: time_batches(plan, 1)}
    step = f"a step takes {seconds_a_step * 1e3:.1f} ms"
    while times[max(times)] > AT_EASE * seconds_a_step and 2 * max(times) <= logical_cores():
        times[2 * max(times)] = time_batches(plan, 2 * max(times))
    best = min(
        times,
        key=lambda threads: (times[threads] > AT_EASE * seconds_a_step, round(times[threads], 4)),
    )
    others = "".join(
        f", {seconds * 1e3:.1f} ms by {threads}"
        for threads, seconds in times.items()
        if threads != best
    )
    return best, f"a batch is ready every {times[best] * 1e3:.1f} ms by {best}{others}; {step}"


def seconds_to_spend(config: Config, batch: Batch) -> float:
    """A small share of the run, whose length is estimated from what its products cost; 0 where that is too little."""
    device = candidates(config.train)[0]
    prepare_device(
        device, default_threads() if config.train.threads == AUTO else int(config.train.threads)
    )
    tokens = batch.tokens_BL.shape[1]
    step = least_seconds(config.model, config.train.batch_size, tokens, device, DTYPES["float32"])
    seconds = min(
        MOST_SECONDS, SHARE_OF_RUN * (60 * config.train.minutes or config.train.steps * step)
    )
    return seconds if seconds >= LEAST_SECONDS + LEAST_STEPS * step else 0.0


def remember(config: Config, batch: Batch, tuning: Tuning, seconds: float) -> None:
    """Store a tuning, found in so many seconds, for runs of the same model and batch on this machine."""
    entry = {
        **asdict(tuning),
        "steps": planned_steps(config.train, tuning.seconds_a_step),
        "budget": seconds,
    }
    CACHE.write(_key(config, batch), entry)


def recall(config: Config, batch: Batch, seconds: float = 0.0) -> Tuning | None:
    """An earlier tuning of the same model and batch, with the same things asked for.

    One that had less than half of the seconds that may be spent now is not good enough.
    """
    entry = CACHE.read(_key(config, batch))
    try:
        setting = Setting(**entry["setting"])
        rest = {
            field.name: entry[field.name] for field in fields(Tuning) if field.name != "setting"
        }
        tuning = Tuning(setting=setting, **rest)
        check_kernels(setting.applied(config.train), setting.where)
        if entry["budget"] < seconds / 2:
            return None
        steps, seconds_a_step = (
            planned_steps(config.train, tuning.seconds_a_step),
            tuning.seconds_a_step,
        )
        if "compiled" in setting.compile and steps < entry["steps"]:
            return None  # compiling was worth it for a longer run
        if is_long(steps, seconds_a_step) and not is_long(entry["steps"], seconds_a_step):
            return None  # and was not tried for a shorter one
    except (TypeError, KeyError, ValueError):
        return None
    return tuning


def _wants_tuning(train: TrainConfig) -> bool:
    return any(getattr(train, name) == AUTO for name in TUNED)


def _key(config: Config, batch: Batch) -> str:
    names = [
        *(field.name for field in fields(Setting)),
        "recompute",
        "patch_dropout",
        "cheap_size",
        "shards",
    ]
    asked: dict[str, Any] = {name: getattr(config.train, name) for name in names}
    sizes = f"batch {config.train.batch_size} captions of {batch.tokens_BL.shape[1]}"
    machines = " and ".join(device.key for device in candidates(config.train))
    cores = f"{default_threads()} threads of {logical_cores()}"
    return f"{config.model} {sizes} {asked} on {machines} {cores} lapclip {__version__}"
