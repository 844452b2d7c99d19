"""`lapclip train`: a new run, from a request to its end."""

from __future__ import annotations

from contextlib import ExitStack

from lapclip.commands.choose_recipe import (
    SettledRecipe,
    check_early,
    read_request,
    request_config,
)
from lapclip.errors import RunBusy
from lapclip.runs.folder import Run, TrainRequest, check_name, create_run
from lapclip.training.distributed import ALONE, Ranks
from lapclip.training.outcome import TrainOutcome
from lapclip.training.request import Callbacks
from lapclip.training.run_process import behaving, recording_failed_start, working_on
from lapclip.training.trainer import Trainer


def train(
    request: TrainRequest,
    name: str | None = None,
    callbacks: Callbacks = Callbacks(),
    ranks: Ranks = ALONE,
) -> TrainOutcome:
    """Train in a new run. Several `ranks` may share the work; this one writes."""
    check_name(name)
    settled = check_early(request)
    run = create_run(name, settled.recipe, request)
    return begin(run, request, callbacks, ranks, settled=settled)


def begin(
    run: Run,
    request: TrainRequest,
    callbacks: Callbacks = Callbacks(),
    ranks: Ranks = ALONE,
    *,
    settled: SettledRecipe | None = None,
    detached: bool = False,
) -> TrainOutcome:
    """Train a run that has a folder and took no step yet.

    `settled` is its recipe, if that was chosen already. A `detached` process leaves requests to stop
    alone: one that is there is meant for it.
    """
    with working_on(run), ExitStack() as stack:
        if run.settings.exists():
            raise RunBusy(f"Another process has just started {run.path}.", hint="lapclip runs")
        if not detached:
            run.clear_stop()
        with recording_failed_start(run):
            stack.enter_context(behaving(request_config(request).work))
            trainer = Trainer.create(run, read_request(request, settled), callbacks, ranks)
        return trainer.fit()
