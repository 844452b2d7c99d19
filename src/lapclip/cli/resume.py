"""`lapclip resume`."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from lapclip.cli.display import display, loading
from lapclip.cli.join import check_machines, invite
from lapclip.cli.output import Common, emit, typed
from lapclip.cli.train import report_outcome
from lapclip.errors import ConfigError
from lapclip.suggest import command


def resume(
    run: str | None = None,
    /,
    *,
    data: str | None = None,
    background: Annotated[bool, Parameter(negative="")] = False,
    machines: int | None = None,
    detached: Annotated[bool, Parameter(negative="", show=False)] = False,
    common: Common | None = None,
) -> int:
    """Go on with a run that was stopped, killed or put to sleep; it ends with the result it would have had.

    For example:

    - `lapclip resume`
    - `lapclip resume first-run-2`
    - `lapclip resume --machines 2`

    Parameters
    ----------
    run
        The run's name; without one, the newest that is not finished.
    data
        Where the images and captions of the run lie now, if they were moved. Example: lapclip resume --data photos/
    background
        Return at once; the run goes on without this terminal. Example: lapclip resume --background
    machines
        Go on with so many computers, this one among them. Example: lapclip resume --machines 2
    detached
        This is the process in the background.
    """
    from lapclip.machine.torchrun import under_torchrun

    check_machines(machines, background=background)
    if background and under_torchrun():
        raise ConfigError(
            "--background cannot be had under torchrun.", hint="nohup torchrun ... &, or a terminal"
        )
    if background and not detached:
        from lapclip.commands.background import resume_in_background

        found = resume_in_background(run, data=data)
        lines = [
            f"{found.path} goes on in the background.",
            f"Next: {typed(command('watch', found.typed))}",
        ]
        emit({"run": str(found.path), "name": found.name, "state": "starting"}, lines, common)
        return 0
    found_here: list[str] = []
    if run is None and not under_torchrun():
        from lapclip.runs.folder import find_unfinished_run

        unfinished = find_unfinished_run(None)
        run = unfinished.typed
        found_here = [run]  # the process that trains must not look for the newest again
        print(f"Resuming {unfinished.path}.", file=sys.stderr)
    with loading():
        from lapclip.commands.resume import resume as resume_run
        from lapclip.training.ranks_in_a_run import take_part
        from lapclip.training.request import Callbacks

    if machines is not None and not under_torchrun():
        return invite(
            machines,
            lambda plans, progress: plans.plan_resumed_run(run, data, progress),
            *found_here,
        )
    with display() as shown:
        # In the background log.txt has the run's lines already.
        listeners = [] if detached else [shown]
        callbacks = Callbacks(listeners, shown.data_progress, shown.tuning_progress)
        if under_torchrun():
            outcome = take_part(
                lambda ranks: resume_run(run, callbacks, ranks=ranks, data=data),
                lambda own, ranks, again: resume_run(
                    str(own.path), callbacks, detached=again, ranks=ranks, data=data
                ),
            )
        else:
            outcome = resume_run(run, callbacks, detached=detached, data=data)
    return (
        0
        if outcome is None
        else report_outcome(outcome, None if detached else common, "since it was resumed")
    )
