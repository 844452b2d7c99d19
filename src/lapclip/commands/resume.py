"""`lapclip resume`: continue a run from its newest good checkpoint."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

from lapclip.commands.train import begin
from lapclip.config import Layer, build_config
from lapclip.data.sources import absolute
from lapclip.errors import RunBusy, RunError
from lapclip.model.shapes import SHAPES
from lapclip.runs.events import mapping, read_events
from lapclip.runs.folder import Run, TrainRequest, find_unfinished_run
from lapclip.runs.heartbeat import read_beat
from lapclip.suggest import command
from lapclip.training.distributed import ALONE, Ranks
from lapclip.training.outcome import TrainOutcome
from lapclip.training.ranks_in_a_run import note_job
from lapclip.training.request import Callbacks
from lapclip.training.run_process import behaving, working_on
from lapclip.training.trainer import Trainer

# Settings of `train` that decide what is learned, and that people edit in run.toml.
UNCHANGEABLE = ("batch_size", "steps", "epochs", "learning_rate", "seed", "loss", "optimizer")


def resume(
    name: str | None,
    callbacks: Callbacks = Callbacks(),
    *,
    detached: bool = False,
    ranks: Ranks = ALONE,
    data: str | None = None,
) -> TrainOutcome:
    """Resume a run; without a name, the newest that is unfinished.

    For a `detached` process, earlier requests to stop were removed before it started: one that is
    there is meant for it. `data` is where the data of the run lies now, if it was moved.
    """
    run = find_unfinished_run(name)
    check_between_starts(run)
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
            run.clear_stop()  # first of all: a later request is meant for this process
        if run.last_state() == "finished":
            raise RunError(
                f"{run.path} is finished; there is nothing to resume.",
                hint=command("eval", run.typed),
            )
        check_unedited(run, saved)
        note_job(run)
        try:
            trainer = Trainer.resume(run, saved, callbacks, ranks)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"Interrupted before {run.name} went on; it is as it was. "
                f"Go on: {run.resume_command()}"
            ) from None
        if data is not None:
            run.write_settings(saved)
        return trainer.fit()


def check_between_starts(run: Run) -> None:
    """Refuse a run that another process is about to start again."""
    beat = read_beat(run.job)
    if not run.is_between_starts or beat is None:
        return
    if beat.process not in (os.getpid(), os.getppid()):
        raise RunBusy(
            f"{run.path} is about to go on: the computers that train it meet again.",
            hint=command("stop", run.typed),
        )


def move_data(saved: dict[str, Any], data: str) -> None:
    """Change where the data lies in the contents of a run.toml, also in what the user gave."""
    saved.setdefault("data", {})["source"] = absolute(data)
    mapping(mapping(saved["run"].get("asked")).get("data"))["source"] = absolute(data)


def check_unedited(run: Run, saved: dict[str, Any]) -> None:
    """Refuse to resume if run.toml was edited such that another model would be learned."""
    started = (event for event in read_events(run.events) if event.get("type") == "started")
    before = mapping(mapping(next(started, {}).get("config")).get("train"))
    now = mapping(saved.get("train"))
    for name in UNCHANGEABLE:
        if name in before and name in now and before[name] != now[name]:
            again = run.train_again(f"train.{name}={now[name]}")
            raise RunError(
                f"{run.settings} was edited: train.{name} is {now[name]!r}, and the run began "
                f"with {before[name]!r}.",
                hint=f"train.{name} = {before[name]!r} there to go on, or a new run: {again}",
            )
