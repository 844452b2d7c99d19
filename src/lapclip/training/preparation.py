"""Prepare a run: a new one from a request, or an earlier one from its folder.

Nothing here writes to the run's folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lapclip.config import AUTO, SECTIONS, Config, Layer, TrainConfig, build_config, replace_in
from lapclip.data.dataset import DataSet, count_seen, seen_by
from lapclip.data.loading import load_data
from lapclip.data.pixels import View
from lapclip.data.sources import find_source
from lapclip.data.splits import TRAIN
from lapclip.data.tokenizers import load_tokenizer
from lapclip.errors import ConfigError, DataError, RunError
from lapclip.evaluation import note_on_held_out
from lapclip.join.send_data import load_again
from lapclip.machine.choose_device import (
    candidates,
    choose_compile,
    choose_train_device,
    find_device,
    prepare_device,
)
from lapclip.machine.device import Device
from lapclip.measure.phases import Laps
from lapclip.model.shapes import SHAPES
from lapclip.progress import DataProgress
from lapclip.runs.events import mapping, read_events
from lapclip.runs.folder import Run
from lapclip.suggest import command
from lapclip.training.distributed import ALONE, Ranks
from lapclip.training.initial_weights import InitialWeights, restore_initial_weights
from lapclip.training.objectives import Objectives
from lapclip.training.ranks_in_a_run import refuse_rows, refuse_settings
from lapclip.training.recovery import changes_so_far, explain_memory
from lapclip.training.request import Callbacks, RunRequest
from lapclip.training.resolvers import (
    BEFORE_DATA,
    WITH_BATCHES,
    WITH_DATA,
    Context,
    compile_note,
    fit_vocabulary,
    forget_trials,
    is_locked,
    max_learning_rate,
    resolve,
    resolve_built,
)
from lapclip.training.run_parts import (
    RunInputs,
    RunParts,
    assemble,
    longest_caption,
    make_plan,
)
from lapclip.training.teacher import (
    compute_teacher_embeddings,
    open_teacher,
    restore_teacher_embeddings,
)
from lapclip.training.trackers import check_tracker
from lapclip.tuning.kernels import KERNELS, check_kernels
from lapclip.tuning.resolve import is_partly_frozen, refuse_what_cannot_fit


def prepare(
    request: RunRequest,
    callbacks: Callbacks = Callbacks(),
    ranks: Ranks = ALONE,
    laps: Laps | None = None,
) -> RunParts:
    """Prepare a new run: load its data, choose automatic settings, build its model.

    `laps` receives how long each part takes.
    """
    laps = laps or Laps()
    context = Context(request, ranks, callbacks.tuning_progress)
    # Refuse first what is not available here. The data may take long.
    found = find_device(request.config.train.device)
    check_kernels_early(request.config.train, found)
    refuse_settings(request.config, ranks)
    refuse_rows(request.config, ranks)
    check_tracker(request.config.work.track)
    with ThreadPoolExecutor(1, thread_name_prefix="lapclip-device") as background:
        check = None
        if not found.is_cpu:
            callbacks.tuning_progress("whether the accelerator computes what the CPU computes")
            check = background.submit(warm_up_devices, request.config.train)
            # Threads of a rank do not know its device, and a teacher needs the device itself.
            if ranks.is_distributed or request.config.train.teacher:
                check.result()
        laps.lap("settings")
        inputs = gather(context, callbacks.data_progress)
        laps.lap("data")
        if check:
            check.result()
    laps.lap("device")
    with explain_memory(inputs.config):
        config = resolve(inputs.config, context, WITH_BATCHES)
        laps.lap("settings")
        reasons = context.reasons | request.reasons
        seconds = context.step_seconds
        inputs = replace(inputs, config=config, reasons=reasons, tuned_seconds=seconds)
        device = context.device
        forget_trials(device)
        context.parts = assemble(inputs, context.plan, device, callbacks.data_progress, ranks)
        parts = resolve_built(context)
    laps.lap("model")
    compile_notes = compile_note(parts.config, request.config.train.compile, context)
    # Warnings first: the start of a run shows the first of many notes.
    return replace(parts, notes=[*device.warnings(), *parts.notes, *compile_notes])


def check_kernels_early(train: TrainConfig, device: Device) -> None:
    """Refuse kernels that the device cannot compute, if it is certain that it will be used.

    An accelerator that nobody named may be left for the CPU, which has other kernels.
    """
    is_certain = train.device != AUTO or device.is_cpu
    if is_certain and train.dtype != AUTO:
        check_kernels(train, device)


def warm_up_devices(train: TrainConfig) -> None:
    """Check what devices compute, and set up their libraries."""
    for device in candidates(train):
        device.warm_up()


def gather(context: Context, progress: DataProgress | None) -> RunInputs:
    """Load what a new run needs, and choose the settings that follow from it."""
    request = context.request
    config = resolve(request.config, context, BEFORE_DATA)
    Objectives(config.train).check()
    teacher = open_teacher(config)  # before the data: one that cannot be used costs no time
    context.data = load_data(config.data, View.of(config.model), progress, request.table.take())
    if teacher:
        context.teacher = compute_teacher_embeddings(teacher, config, context.data, progress)
    del teacher  # its memory is the run's
    config = resolve(config, context, WITH_DATA)
    data = context.data
    notes = [
        *request.notes,
        *rate_warnings(config, context.initial_weights),
        *seen_before_warnings(config, data),
        *data.notes,
        *note_on_held_out({split: len(pairs) for split, pairs in data.splits.items()}),
    ]
    return RunInputs(
        recipe=request.recipe,
        given=request.given,
        config=config,
        data=data,
        tokenizer=context.tokenizer,
        initial_weights=context.initial_weights,
        teacher=context.teacher,
        reasons=context.reasons,
        notes=notes,
    )


def rate_warnings(config: Config, initial: InitialWeights | None) -> list[str]:
    """Warn about a learning rate that is known to destroy pretrained weights."""
    train = config.train
    if initial is None or is_locked(config):
        return []
    tower_rate = train.learning_rate * train.tower_share
    max_rate = max_learning_rate(config)
    if tower_rate <= max_rate:
        return []
    safe_rate = max_rate / 5
    safe_share = safe_rate / train.learning_rate
    return [
        f"the towers' learning rate, {tower_rate:g}, is far above what pretrained weights stand "
        f"(about {safe_rate:g}): they may forget what they know; "
        f"--set train.tower_share={safe_share:.2g}"
    ]


def seen_before_warnings(config: Config, data: DataSet) -> list[str]:
    """Return a warning if the initial weights were trained on images that are held out here."""
    if not config.train.start:
        return []
    seen_images = seen_by(config.train.start)
    has_seen_held_out = False
    parts = []
    for split, pairs in data.splits.items():
        count = count_seen(pairs.identities, seen_images)
        if count:
            parts.append(f"{count:,} of the {len(pairs):,} images of {split}")
            has_seen_held_out |= split != TRAIN
    if not has_seen_held_out:
        return []
    return [
        f"the initial weights were trained on {' and '.join(parts)}, so scores on held-out images "
        "are too high; set data.seed and data.split_rule as in that run to get the same split"
    ]


def prepare_again(
    run: Run,
    saved: dict[str, Any],
    progress: DataProgress | None,
    ranks: Ranks = ALONE,
) -> RunParts:
    """Prepare a run that is resumed, with the settings, tokenizer and device that it began with."""
    inputs = gather_again(run, saved, progress)
    refuse_settings(inputs.config, ranks)
    check_tracker(inputs.config.work.track)
    plan = make_plan(inputs.config, inputs.data, inputs.tokenizer, inputs.teacher)
    config, device = restore_device(run, inputs.config)
    return assemble(replace(inputs, config=config), plan, device, progress, ranks)


def gather_again(
    run: Run,
    saved: dict[str, Any],
    progress: DataProgress | None,
) -> RunInputs:
    """Load what a resumed run needs: its settings, data, tokenizer, initial weights and teacher."""
    if "reasons" not in saved:
        raise RunError(
            f"{run.settings} is damaged: it has no [reasons].",
            hint=f"a new run: {run.train_again()}",
        )
    layer = Layer(str(run.settings), {section: saved.get(section, {}) for section in SECTIONS})
    changes = Layer(str(run.events), {"train": changes_so_far(read_events(run.events))})
    config = build_config([layer, changes], SHAPES)
    fingerprint = str(saved["run"].get("data_fingerprint"))
    data = _load_same_data(run, config, fingerprint, progress)
    # Learned once: another release of the library that learns it might number tokens differently.
    tokenizer = load_tokenizer(run.tokenizer) or fit_vocabulary(config, data)[1]
    with _on_another_machine(run):
        find_device(config.train.device)
    if not is_partly_frozen(config):
        try:
            refuse_what_cannot_fit(config, longest_caption(config, data, tokenizer))
        except ConfigError as error:
            raise RunError(
                f"{run.path} cannot go on: {error.message}", hint="more free memory"
            ) from None
    teacher_digest = saved["run"].get("teacher_digest", "")
    return RunInputs(
        recipe=str(saved["run"].get("recipe")),
        config=config,
        data=data,
        tokenizer=tokenizer,
        initial_weights=restore_initial_weights(run.start, config),
        teacher=restore_teacher_embeddings(teacher_digest, config, data, progress),
        reasons=saved["reasons"],
        tuned_seconds=saved["run"].get("tuned_seconds"),
    )


def _load_same_data(
    run: Run,
    config: Config,
    fingerprint: str,
    progress: DataProgress | None,
) -> DataSet:
    """Load the data that the run began with, or refuse to continue."""
    with _hint_at_moved_data(run, config.data.source):
        data = load_again(config, fingerprint, progress)
    if data.fingerprint != fingerprint:
        changed = find_source(config.data.source).what_changed(config.data)
        raise RunError(
            f"The data is not what {run.path} began with: {changed}.",
            hint=f"the images and captions as they were, "
            f"{command('resume', run.typed, '--data')} FOLDER if they were moved, "
            f"or a new run: {run.train_again()}",
        )
    return data


@contextmanager
def _hint_at_moved_data(run: Run, source: str) -> Iterator[None]:
    """Suggest `--data` if data that cannot be read is not where it was."""
    try:
        yield
    except DataError as error:
        if not os.path.isabs(source) or os.path.exists(source):
            raise
        again = command("resume", run.typed, "--data")
        raise RunError(error.message, hint=f"{again} FOLDER, if the data was moved") from None


@contextmanager
def _on_another_machine(run: Run) -> Iterator[None]:
    """Explain settings that this machine lacks: the run began on another one."""
    try:
        yield
    except ConfigError as error:
        given = mapping(mapping(run.read_settings()["run"].get("asked")).get("train"))
        machine_settings = ("device", *KERNELS)
        automatic = [f"train.{name}={AUTO}" for name in machine_settings if name in given]
        raise RunError(
            f"{run.path} began on another machine: {error.message}",
            hint=f"a new run: {run.train_again(*automatic)}",
        ) from error


def restore_device(run: Run, config: Config) -> tuple[Config, Device]:
    """Return the device that a run began with. It is never chosen anew: results depend on it."""
    with _on_another_machine(run):
        device, _ = choose_train_device(config.train)
        check_kernels(config.train, device)
    prepare_device(device, int(config.train.threads))
    how, _ = choose_compile(config.train.compile, device)  # it may be impossible by now
    return replace_in(config, "train", compile=how), device
