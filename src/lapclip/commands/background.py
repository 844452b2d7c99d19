"""Runs that outlive the terminal they were started from. No torch: whoever starts one has the prompt back at once."""

from __future__ import annotations

import os
import subprocess
import sys

from lapclip.errors import RunError
from lapclip.machine.facts import python
from lapclip.paths import open_own
from lapclip.runs.folder import Run, TrainRequest, create_run, find_unfinished_run
from lapclip.runs.heartbeat import beat_of, write_beat
from lapclip.suggest import command

PATTERN_CHARACTERS = "*?[{"  # a pattern of shards names several files


def train_in_background(request: TrainRequest, recipe: str, name: str | None) -> Run:
    """Make a run and start a process that trains it. `recipe` names a run without a name."""
    run = create_run(name, recipe, request)
    _spawn(run)
    return run


def resume_in_background(name: str | None, *, data: str | None = None) -> Run:
    """Start a process that goes on with a run."""
    run = find_unfinished_run(name)
    run.check_links()
    if not run.never_began:
        run.read_settings()
    if run.state in ("starting", "running", "finished"):
        raise RunError(
            f"{run.path} is {run.state}; there is nothing to resume.", hint="lapclip runs"
        )
    check_data_is_there(run, data)
    run.clear_stop()  # a request made from now on is meant for the new process
    _spawn(run, data)
    return run


def check_data_is_there(run: Run, data: str | None) -> None:
    """Refuse a run whose data is gone: nobody would see the error of a process in the background."""
    source = data if data is not None else run.data_source()
    if source is None or os.path.exists(source) or set(source) & set(PATTERN_CHARACTERS):
        return
    if data is not None or os.path.isabs(source):
        raise RunError(
            f"The data of {run.path} is gone: {source}",
            hint=f"{command('resume', run.typed, '--data')} FOLDER, if the data was moved",
        )


def _spawn(run: Run, data: str | None = None) -> None:
    """Start a process without a terminal, in a session of its own: closing the terminal does not reach it.

    What it prints goes to the run's log.txt.
    """
    arguments = ["resume", "--detached"]
    if data is not None:
        arguments += ["--data", data]
    flags = {}
    if sys.platform == "win32":
        apart = subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP  # type: ignore[attr-defined]
        flags = {"creationflags": apart}
    try:
        with open_own(run.log, "ab") as log:
            process = subprocess.Popen(
                python("-m", "lapclip", *arguments, "--", run.typed),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **flags,
            )
        write_beat(run.pulse, beat_of(process.pid))
    except OSError as error:
        raise RunError(
            f"Cannot start {run.name} in the background: {error.strerror or error}."
        ) from error
