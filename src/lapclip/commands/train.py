"""`lapclip train`: a new run, from its settings to its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

from lapclip import __version__
from lapclip.commands.run_setup import Callbacks, RunSetup, set_up
from lapclip.commands.run_to_end import (
    Outcome,
    competitors,
    recording,
    run_to_end,
    start_training,
    started,
    working_on,
)
from lapclip.data.dataset import save_seen
from lapclip.data.tokenizers import save_tokenizer
from lapclip.machine.desktop import Signals
from lapclip.runs.folder import FORMAT, RUNS, Run, check_name, create_run
from lapclip.runs.heartbeat import PREPARING, Pulse, at_work_path
from lapclip.training.checkpoint import save_model


def train(
    recipe: str,
    settings: Sequence[str],
    minutes: float | None = None,
    name: str | None = None,
    callbacks: Callbacks = Callbacks(),
    reserved: str = "",
) -> Outcome:
    """Train from a recipe in a new run. `reserved` is the key of a folder that was made for it in the foreground."""
    began = time.perf_counter()
    check_name(name, reserved)
    # A run in the background has its folder already. This one has none until all is ready, and may yet be refused.
    beats = nullcontext() if reserved else Pulse([at_work_path(PREPARING)], str((RUNS / (name or "")).absolute()))
    try:
        with beats:
            setup = set_up(recipe, settings, minutes, callbacks)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted before the run began: there is nothing to resume.") from None
    run = create_run(name, setup.recipe, saved_settings(setup), reserved, partial(save_start, setup=setup))
    with working_on(run, setup.config.work), Signals() as signals, recording(run, callbacks, setup.config) as log:
        training = start_training(run, setup, log)
        log.append(started(training, setup, [*setup.notes, *competitors()]))
        del setup  # so that what a fallback replaces is gone
        return run_to_end(training, signals, began)


def saved_settings(setup: RunSetup) -> dict[str, Any]:
    """The contents of run.toml."""
    about: dict[str, Any] = {"format": FORMAT, "recipe": setup.recipe, "lapclip": __version__, "asked": setup.asked}
    about["data_fingerprint"] = setup.data.fingerprint
    if setup.tuned_seconds is not None:
        about["tuned_seconds"] = setup.tuned_seconds
    if setup.teacher:
        about["teacher_digest"] = setup.teacher.digest
    return {"run": about, **asdict(setup.config), "reasons": setup.reasons}


def save_start(run: Run, setup: RunSetup) -> None:
    """Put into the run's folder what it needs to be resumed, and what it has seen."""
    save_tokenizer(setup.tokenizer, run.tokenizer)
    save_seen(setup.data.train.identities, run.seen, setup.config.train.start)
    if setup.initial_weights:
        save_model(setup.embedder, run.start)
        setup.initial_weights.read_from(run.start)
