"""`lapclip resume`: go on with a run from its newest good checkpoint.

The ranks of torchrun that do not write do the same with a copy of what the writer has in the run's folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lapclip.commands.run_setup import (
    COMPARE_TOGETHER,
    FEATURES_TOGETHER,
    NOTHING_LEFT,
    Callbacks,
    Ingredients,
    RunSetup,
    assemble,
    build_again,
    fit_data,
    fit_vocabulary,
    longest_caption,
    make_plan,
    share_run_files,
)
from lapclip.commands.train import (
    Outcome,
    begin,
    behaving,
    check_same_start,
    company,
    embed_final,
    measure,
    note_job,
    recording,
    run_to_end,
    share_run,
    start_training,
    started,
    stop_signals,
    working_on,
)
from lapclip.config import AUTO, SECTIONS, Config, Layer, build_config, replace_in
from lapclip.data.dataset import DataSet
from lapclip.data.pixels import View
from lapclip.data.sources import absolute, find_source
from lapclip.data.tokenizers import load_tokenizer
from lapclip.errors import ConfigError, DataError, LostRank, RunBusy, RunError
from lapclip.machine import facts
from lapclip.machine.choose_device import (
    choose_compile,
    choose_train_device,
    find_device,
    prepare_device,
)
from lapclip.machine.device import Device
from lapclip.machine.ranks import ALONE, Ranks, job, job_agent, join
from lapclip.measure.phases import Laps
from lapclip.model.shapes import SHAPES
from lapclip.paths import temporary_folder
from lapclip.progress import DataProgress
from lapclip.runs import events
from lapclip.runs.events import mapping, read_events
from lapclip.runs.folder import Run, TrainRequest, find_unfinished_run, run_of_job
from lapclip.runs.heartbeat import read_beat
from lapclip.suggest import command
from lapclip.text import counted
from lapclip.together import Agreement, machines_wanted
from lapclip.together.bundle import load_again
from lapclip.training.initial_weights import restore_initial_weights
from lapclip.training.loop import Follower, Training
from lapclip.training.recovery import changes_so_far, persist, restore
from lapclip.training.shards import UNDER_TORCHRUN
from lapclip.training.teacher import restore_teacher_embeddings, teacher_paths
from lapclip.training.trackers import check_tracker
from lapclip.tuning.compare_machines import compare_together
from lapclip.tuning.kernels import KERNELS, check_kernels
from lapclip.tuning.resolve import is_partly_frozen, refuse_what_cannot_fit


def take_part(
    begin: Callable[[Ranks], Outcome], callbacks: Callbacks = Callbacks(), data: str | None = None
) -> Outcome | None:
    """Under torchrun: begin on the rank that writes, and follow it on the others. Where this job has begun already and
    was started again, go on with its run. None for ranks that follow, and where the run is over. `data` is where the
    data of the run lies now, if it was moved."""
    run = run_of_job(job(), job_agent())
    with join(holds_run=run is not None, writer=writer_invited()) as ranks:
        check_place(ranks)
        if not ranks.writes:
            follow(ranks)
            return None
        if run is None:
            return begin(ranks)
        if (
            run.last_state() == "finished"
        ):  # and another rank failed after that, or the same line was typed again
            print(f"{run.path} is finished; this job has nothing left to do.", file=sys.stderr)
            ranks.connect()
            ranks.from_writer({"task": NOTHING_LEFT, "run": run.name}, "set-up")
            return None
        # What the same agent starts again was asked to stop where someone asked for it meanwhile.
        beat = read_beat(run.job)
        again = beat is not None and beat.process == os.getppid() and beat.alive
        return resume(str(run.path), callbacks, detached=again, ranks=ranks, data=data)


def resume(
    name: str | None,
    callbacks: Callbacks = Callbacks(),
    *,
    detached: bool = False,
    ranks: Ranks = ALONE,
    data: str | None = None,
) -> Outcome:
    """Resume a run; without a name, the newest that is unfinished.

    For a `detached` process, earlier requests to stop were removed before it started: one that is there is for it.
    `data` is where the data of the run lies now, if it was moved.
    """
    began, laps = time.perf_counter(), Laps()
    run = find_unfinished_run(name)
    beat = read_beat(run.job)
    if (
        run.is_between_starts
        and beat is not None
        and beat.process not in (os.getpid(), os.getppid())
    ):
        raise RunBusy(
            f"{run.path} is about to go on: the computers that train it meet again.",
            hint=command("stop", run.typed),
        )
    if run.request.exists() and not run.settings.exists():
        request = TrainRequest.read(run.request)
        if data is not None:
            moved = f"data.source={json.dumps(absolute(data))}"
            request = replace(request, settings=(*request.settings, moved))
        return begin(run, request, callbacks, ranks, detached=detached)
    saved = run.read_settings()
    if data is not None:
        move_data(saved, data)
    work = build_config([Layer(str(run.settings), {"work": saved.get("work", {})})], SHAPES).work
    with working_on(run), behaving(work):
        if not detached:
            run.clear_stop()  # first of all: a request made from now on is meant for this process
        if run.last_state() == "finished":
            raise RunError(
                f"{run.path} is finished; there is nothing to resume.",
                hint=command("eval", run.typed),
            )
        check_unedited(run, saved)
        note_job(run)
        try:
            setup = set_up_again(run, saved, callbacks.data_progress, ranks)
        except KeyboardInterrupt:
            told = f"Interrupted before {run.name} went on; it is as it was. Go on: {run.resume_command()}"
            raise KeyboardInterrupt(told) from None
        if data is not None:
            run.write_settings(saved)
        with stop_signals() as signals, recording(run, callbacks, setup.config) as log:
            training = start_training(run, setup, log, ranks)
            skipped = restore(training)
            laps.lap("set-up")
            if skipped is None:
                log.append(
                    started(training, setup, company(run, ranks), laps)
                )  # killed before its first step
            else:
                log.append(_resumed(training, skipped, saved["train"].get("shards", 1)))
            del setup  # so that what a fallback replaces is gone
            share_run(training)
            return run_to_end(training, signals, began, callbacks)


def move_data(saved: dict[str, Any], data: str) -> None:
    """Change where the data lies in the contents of a run.toml, also in what was asked for."""
    saved.setdefault("data", {})["source"] = absolute(data)
    mapping(mapping(saved["run"].get("asked")).get("data"))["source"] = absolute(data)


UNCHANGEABLE = ("batch_size", "steps", "epochs", "learning_rate", "seed", "loss", "optimizer")
"""Settings of `train` that decide what is learned, and that people edit in run.toml."""


def check_unedited(run: Run, saved: dict[str, Any]) -> None:
    """Refuse to resume where run.toml was edited such that another model would be learned."""
    began = next((event for event in read_events(run.events) if event.get("type") == "started"), {})
    before, now = mapping(mapping(began.get("config")).get("train")), mapping(saved.get("train"))
    for name in UNCHANGEABLE:
        if name in before and name in now and before[name] != now[name]:
            raise RunError(
                f"{run.settings} was edited: train.{name} is {now[name]!r}, and the run began with {before[name]!r}.",
                hint=f"train.{name} = {before[name]!r} there to go on, or a new run: "
                f"{run.train_again(f'train.{name}={now[name]}')}",
            )


def writer_invited() -> int | None:
    """The rank that writes where guests have joined a host: the host, which torch numbers first. Under torchrun it
    follows from who has what."""
    return 0 if machines_wanted() else None


def check_place(ranks: Ranks) -> None:
    """A guest never writes, and a host never follows: it would open what somebody else names."""
    if machines_wanted() and ranks.writes == (Agreement.of_this_process() is not None):
        raise LostRank(
            "The computers have met without their host, or in another order.",
            hint="lapclip join again",
        )


def follow(ranks: Ranks) -> None:
    """Train on a rank that does not write, from what the writer has set up, to the end of its run."""
    with temporary_folder("rank") as folder:
        loaded = load_early(ranks)
        ranks.connect()
        while True:
            named = ranks.from_writer(what="set-up")
            if named["task"] == COMPARE_TOGETHER:
                compare_together(ranks, lambda what: None)
            if named["task"] in (COMPARE_TOGETHER, NOTHING_LEFT):
                return
            # A name such as ".." leads nowhere else.
            run = Run(folder / f"run-{Path(named['run']).name}", Path(named["base"]))
            run.path.mkdir(exist_ok=True)
            share_run_files(run, (), ranks)
            features = named["task"] == FEATURES_TOGETHER
            saved = run.read_settings()
            # The order of streamed data depends on the shards that the run began with, which `share_again` changes.
            shards = saved["train"].get("shards", 1)
            saved["train"] = {**named.get("train", saved["train"]), "shards": shards}
            saved.setdefault("work", {})["track"] = "none"  # only the writer has a run to show
            setup = set_up_again(run, saved, None, ranks, features=features, loaded=loaded)
            if not features:
                break
            del setup  # before it is made once more: there may not be room for both
        del loaded
        with stop_signals() as signals, recording(run, Callbacks(), setup.config) as log:
            training = start_training(run, setup, log, ranks, Follower)
            restore(training)
            del setup
            training.agree_on_progress()
            check_same_start(training)
            measure(training)
            training.stop_reason = signals.reason
            if persist(training, _finish_with_writer, build_again) is None:
                ranks.check_stop(training.stopped_by)


@dataclass(frozen=True)
class Loaded:
    """Data that was loaded before the settings of its run were complete."""

    config: Config
    data: DataSet

    def fits(self, config: Config) -> bool:
        """Whether complete settings mean the same data, seen alike."""
        settled, _ = fit_data(self.config, self.data, asked_batch=True)
        return settled.data == config.data and View.of(settled.model) == View.of(config.model)


def _finish_with_writer(training: Training) -> dict[str, Any]:
    """A share of the last evaluation; the writer has its scores."""
    embed_final(training)
    return {}


def load_early(ranks: Ranks) -> Loaded | None:
    """On a rank that follows, load the data while the writer does and chooses its settings, instead of after it. Where
    images are streamed the writer will say which of them can be used: then that is waited for."""
    announced = ranks.announced()
    if announced is None:
        return None
    config = build_config([Layer(f"what rank {ranks.writer} announced", announced)], SHAPES)
    agreed = Agreement.of_this_process()
    if config.data.stream == "always" or (
        agreed and agreed.source
    ):  # a copy of what the host streams
        return None
    return Loaded(config, load_again(config, agreed.fingerprint if agreed else "", None))


def set_up_again(
    run: Run,
    saved: dict[str, Any],
    progress: DataProgress | None,
    ranks: Ranks = ALONE,
    *,
    features: bool = True,
    loaded: Loaded | None = None,
) -> RunSetup:
    """What a run is made of, as it began: with the settings, the data, the tokenizer and the device of then. All ranks
    compute `features` in shares; without, they are in this one's cache. `loaded` is what this rank has of the data."""
    ingredients = gather_again(run, saved, progress, ranks, loaded)
    check_tracker(ingredients.config.work.track)
    # As it began: the order of streamed data depends on the shards of then.
    plan = make_plan(ingredients.config, ingredients.data, ingredients.tokenizer)
    config, device = restore_device(run, ingredients.config)
    if ranks is not ALONE:  # one may be what is left of several
        config = share_again(config, ranks, device)
    return assemble(
        replace(ingredients, config=config), plan, device, progress, ranks if features else ALONE
    )


def share_again(config: Config, ranks: Ranks, device: Device) -> Config:
    """The settings of a run that ranks go on with, whoever began it."""
    train = config.train
    shards = (UNDER_TORCHRUN if device.is_cpu else 0) if train.shards == 1 else train.shards
    plain = "compiled" if "compiled" in train.compile else "none"
    return replace_in(
        config, "train", shards=shards, compile=plain if ranks.many else train.compile
    )


def gather_again(
    run: Run,
    saved: dict[str, Any],
    progress: DataProgress | None,
    ranks: Ranks = ALONE,
    loaded: Loaded | None = None,
) -> Ingredients:
    """The configuration a run goes on with, its data, its tokenizer, its initial weights and teacher embeddings."""
    if "reasons" not in saved:
        raise RunError(
            f"{run.settings} is damaged: it has no [reasons].",
            hint=f"a new run: {run.train_again()}",
        )
    layer = Layer(str(run.settings), {section: saved.get(section, {}) for section in SECTIONS})
    fallbacks = Layer(str(run.events), {"train": changes_so_far(read_events(run.events))})
    config = build_config([layer, fallbacks], SHAPES)
    if ranks.writes:
        ranks.announce(asdict(config))
    fingerprint = str(saved["run"].get("data_fingerprint"))
    if loaded and loaded.fits(config):
        data = loaded.data
    else:
        with _maybe_moved(run, config.data.source):
            data = load_again(config, fingerprint, progress)
    if data.fingerprint != fingerprint:
        raise RunError(
            f"The data is not what {run.path} began with: {find_source(config.data.source).what_changed(config.data)}.",
            hint=f"the images and captions as they were, {command('resume', run.typed, '--data')} FOLDER if they "
            f"were moved, or a new run: {run.train_again()}",
        )
    # Learned once: another release of the library that learns it might number tokens differently.
    tokenizer = load_tokenizer(run.tokenizer) or fit_vocabulary(config, data)[1]
    with _elsewhere(run):
        find_device(config.train.device)
    if not is_partly_frozen(config):
        try:
            refuse_what_cannot_fit(config, longest_caption(config, data, tokenizer))
        except ConfigError as error:
            raise RunError(
                f"{run.path} cannot go on: {error.message}", hint="more free memory"
            ) from None
    teacher_digest = saved["run"].get("teacher_digest", "")
    if (
        config.train.teacher
        and Agreement.of_this_process()
        and not all(path.exists() for path in teacher_paths(teacher_digest, config, data))
    ):
        raise RunError(
            "The host did not send what its teacher makes of the pairs; a guest opens no teacher."
        )
    return Ingredients(
        recipe=str(saved["run"].get("recipe")),
        config=config,
        data=data,
        tokenizer=tokenizer,
        initial_weights=restore_initial_weights(run.start, config),
        teacher=restore_teacher_embeddings(teacher_digest, config, data, progress),
        reasons=saved["reasons"],
        tuned_seconds=saved["run"].get("tuned_seconds"),
    )


@contextmanager
def _maybe_moved(run: Run, source: str) -> Iterator[None]:
    """Suggest `--data` if data that cannot be read is not where it was."""
    try:
        yield
    except DataError as error:
        if not os.path.isabs(source) or os.path.exists(source):
            raise
        again = command("resume", run.typed, "--data")
        raise RunError(error.message, hint=f"{again} FOLDER, if the data was moved") from None


@contextmanager
def _elsewhere(run: Run) -> Iterator[None]:
    """What settings name and this machine has not means that the run began on another one. A new run chooses anew."""
    try:
        yield
    except ConfigError as error:
        asked = mapping(mapping(run.read_settings()["run"].get("asked")).get("train"))
        machines_own = ("device", *KERNELS)
        again = run.train_again(*(f"train.{name}={AUTO}" for name in machines_own if name in asked))
        raise RunError(
            f"{run.path} began on another machine: {error.message}", hint=f"a new run: {again}"
        ) from error


def restore_device(run: Run, config: Config) -> tuple[Config, Device]:
    """The device, threads and kernels a run began with: never chosen anew, because results depend on them."""
    with _elsewhere(run):
        device, _ = choose_train_device(config.train)
        check_kernels(config.train, device)
    prepare_device(device, int(config.train.threads))
    how, _ = choose_compile(config.train.compile, device)  # it may be impossible by now
    return replace_in(config, "train", compile=how), device


def _resumed(training: Training, skipped: list[str], shards: int) -> events.Resumed:
    step, best = training.progress.step, training.progress.best_step
    later = (
        [f"the best model so far is that of step {best:,}, saved after this checkpoint"]
        if best > step
        else []
    )
    if shards != training.config.train.shards:
        later.append(
            f"the run began with the whole batch as one shard and goes on with {training.config.train.shards}, for "
            f"{counted(training.ranks.count, 'rank')}: losses match to about 1e-5, not to the bit"
        )
    return events.Resumed(
        step=step,
        steps=training.steps,
        batch_size=training.config.train.batch_size,
        checkpoint=f"step-{step:08d}",
        skipped=skipped,
        notes=[*later, *company(training.run, training.ranks)],
        machine=facts.machine_facts(),
    )
