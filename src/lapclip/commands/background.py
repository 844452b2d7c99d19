"""Runs that outlive the terminal they were started from. No torch: whoever starts one has the prompt back at once."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Sequence

from lapclip.errors import RunError
from lapclip.machine.facts import python
from lapclip.paths import open_own
from lapclip.progress import Status
from lapclip.runs.folder import RUNS, Run, find_run, find_unfinished_run, is_reserved, reserve_run
from lapclip.runs.heartbeat import beat_of, write_beat

CHECK_EVERY = 1.0
"""Seconds between two checks of a run that is waited for."""


def train_in_background(arguments: Sequence[str], recipe: str, name: str | None) -> Run:
    """Start the process in the background for a `lapclip train` with these arguments, in a folder made for it.

    It gets the very arguments that this process was given, so that no flag is lost; only the key of the folder comes
    before them, and the run's name where none was given. What it prints goes to the run's log.txt.
    """
    key = secrets.token_hex(8)
    run = reserve_run(name, recipe, key)
    command, *rest = arguments
    try:
        _spawn(run, [command, "--reserved", key, *([] if name else ["--name", run.name]), *rest])
    except BaseException:  # Ctrl-C too: nobody else knows the key
        run.give_up()
        raise
    return run


def resume_in_background(arguments: Sequence[str], name: str | None) -> Run:
    """Start the process in the background for a `lapclip resume` with these arguments, as `train_in_background`."""
    run = find_unfinished_run(name)
    run.check_links()
    run.read_settings()
    if run.state in ("running", "finished"):
        raise RunError(
            f"{run.path} is {run.state}; there is nothing to resume.", hint="lapclip runs"
        )
    run.clear_stop()  # a request made from now on is meant for the new process
    command, *rest = arguments
    _spawn(run, [command, "--detached", *([] if name else [run.name]), *rest])
    return run


def _spawn(run: Run, arguments: Sequence[str]) -> None:
    """A process without a terminal, in a session of its own: closing the terminal does not reach it."""
    flags = {}
    if sys.platform == "win32":
        apart = subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP  # type: ignore[attr-defined]
        flags = {"creationflags": apart}
    try:
        with open_own(run.log, "ab") as log:
            process = subprocess.Popen(
                python("-m", "lapclip", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **flags,
            )
        write_beat(run.starting, beat_of(process.pid, "starting"))
    except OSError as error:
        raise RunError(
            f"Cannot start {run.name} in the background: {error.strerror or error}."
        ) from error


def wait_for(name: str, progress: Status, own: Run | None = None) -> None:
    """Wait until another run is over, however it ends, or until this one, which waits, is asked to stop."""
    run = find_run(name)
    while run.state in ("running", "starting") and not (own and own.stop_asked()):
        progress(f"waiting for {run.name} to end")
        if own:
            own.wait_for(run.name)
        time.sleep(CHECK_EVERY)
    if own:
        own.wait_for("")


def reserved_run(name: str | None, key: str) -> Run | None:
    """The folder that waits for the process that knows the key."""
    return Run(RUNS / name) if name is not None and is_reserved(name, key) else None
