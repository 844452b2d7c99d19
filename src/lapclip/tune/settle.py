"""Decide what is "auto": by an earlier tuning, by a short one now, or plainly where the run is too short for either."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, fields, replace
from typing import Any

from lapclip.config import AUTO, Config, TrainConfig, replace_in
from lapclip.data.batches import Batch, BatchPlan
from lapclip.machine import devices
from lapclip.machine.devices import DTYPES, Device
from lapclip.train.memory import check_memory, largest_micro_batch
from lapclip.tune.arithmetic import operations, quick_rate, step_products
from lapclip.tune.kernels import check_kernels, choose_kernels
from lapclip.tune.loading import choose_loader_threads
from lapclip.tune.measure import Setting, Tell
from lapclip.tune.notebook import Notebook, machine_key
from lapclip.tune.search import NothingWorks, Search, Tuning

NOTEBOOK = Notebook("tune.json")
SHARE_OF_RUN = 0.05
"""The most of a planned run that `lapclip train` spends on tuning before it."""
MOST_SECONDS = 60.0
LEAST_SECONDS = 2.0
"""With less there is no point in starting."""
TUNED = ("device", "dtype", "threads")
"""Settings that are worth a tuning when one of them is "auto"."""


def settle(config: Config, plan: BatchPlan, longest_caption: int, tell: Tell) -> tuple[Config, Device, dict[str, str]]:
    """The configuration with nothing "auto" left, the device, and the reason for each choice."""
    refuse_what_cannot_fit(config, longest_caption)
    batch = plan.batch(1)
    tuning = recall(config, batch) if _wants_tuning(config.train) else None
    why = " (tuned before)" if tuning else ""
    if tuning is None and _wants_tuning(config.train) and (seconds := seconds_to_spend(config, batch)) >= LEAST_SECONDS:
        with suppress(NothingWorks):  # trying needs more memory than training, so training may still work
            tuning = Search(config, batch, seconds, tell).run()
            remember(config, batch, tuning)
    if tuning is None:
        config, device, reasons = settle_plainly(config, batch, longest_caption)
    else:
        device = Device(tuning.setting.device)
        devices.prepare(device, tuning.setting.threads)
        config = replace_in(config, "train", **asdict(tuning.setting))
        reasons = {f"train.{name}": f"{text}{why}" for name, text in tuning.reasons.items()}
    loaders, reason = choose_loader_threads(
        config.train.loader_threads, plan, tuning.seconds_a_step if tuning else None
    )
    reasons["train.loader_threads"] = reason
    return replace_in(config, "train", loader_threads=loaders), device, reasons


def refuse_what_cannot_fit(config: Config, longest_caption: int) -> None:
    """A model of which one pair does not fit on any device is refused before anything takes memory."""
    here = devices.available(config.train.device)
    arguments = (config.model, config.train, longest_caption)
    if all(largest_micro_batch(*arguments, device, device.free_bytes()) is None for device in here):
        check_memory(*arguments, here[0])


def settle_plainly(config: Config, batch: Batch, longest_caption: int) -> tuple[Config, Device, dict[str, str]]:
    """Without timing steps: the accelerator where there is one, float32, torch's threads; kernels are timed alone."""
    train = config.train
    device, why = devices.choose_device(train.device)
    check_memory(config.model, train, longest_caption, device)
    reasons = {"train.device": why}
    reasons["train.threads"] = "torch's own choice" if train.threads == AUTO else "asked for"
    reasons["train.dtype"] = "the run is too short to time others" if train.dtype == AUTO else "asked for"
    threads = devices.default_threads() if train.threads == AUTO else int(train.threads)
    devices.prepare(device, threads)
    how, reasons["train.compile"] = devices.choose_compile(train.compile, device)
    dtype = "float32" if train.dtype == AUTO else train.dtype
    settled = replace(train, device=device.kind, threads=threads, dtype=dtype, compile=how)
    forms, why_forms = choose_kernels(config.model, settled, batch.tokens_BL.shape[1], device)
    return replace(config, train=replace(settled, **forms)), device, reasons | why_forms


def seconds_to_spend(config: Config, batch: Batch) -> float:
    """A small share of the run, whose length is estimated from what its products cost."""
    if config.train.minutes:
        return min(MOST_SECONDS, SHARE_OF_RUN * 60 * config.train.minutes)
    device = devices.available(config.train.device)[0]
    devices.prepare(device, devices.default_threads() if config.train.threads == AUTO else int(config.train.threads))
    products = step_products(config.model, config.train.batch_size, batch.tokens_BL.shape[1])
    rate = quick_rate(products, device.torch, DTYPES["float32"], device.synchronise)
    return min(MOST_SECONDS, SHARE_OF_RUN * config.train.steps * operations(products) / rate)


def remember(config: Config, batch: Batch, tuning: Tuning) -> None:
    """Keep a tuning for runs of the same model and batch on this machine."""
    page = {**asdict(tuning), "steps": config.train.steps}
    NOTEBOOK.write(_key(config, batch), page)


def recall(config: Config, batch: Batch) -> Tuning | None:
    """An earlier tuning of the same model and batch, with the same things asked for."""
    page = NOTEBOOK.read(_key(config, batch))
    try:
        setting = Setting(**page["setting"])
        rest = {field.name: page[field.name] for field in fields(Tuning) if field.name != "setting"}
        tuning = Tuning(setting=setting, **rest)
        check_kernels(setting.applied(config.train), Device(setting.device))
        if "compiled" in setting.compile and config.train.steps < page["steps"]:
            return None  # compiling was worth it for a longer run
    except (TypeError, KeyError, ValueError):
        return None
    return tuning


def _wants_tuning(train: TrainConfig) -> bool:
    return any(getattr(train, name) == AUTO for name in TUNED)


def _key(config: Config, batch: Batch) -> str:
    asked: dict[str, Any] = {field.name: getattr(config.train, field.name) for field in fields(Setting)}
    sizes = f"batch {config.train.batch_size} captions of {batch.tokens_BL.shape[1]}"
    machines = " and ".join(machine_key(device) for device in devices.available(config.train.device))
    return f"{config.model} {sizes} {asked} on {machines}"
