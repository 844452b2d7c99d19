"""Runs that outlive the terminal they were started from. No torch: whoever starts one has the prompt back at once."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Sequence

from lapclip.errors import RunError
from lapclip.machine.facts import python
from lapclip.paths import open_own
from lapclip.runs.folder import RUNS, Run, find_unfinished_run, is_reserved, reserve_run
from lapclip.runs.heartbeat import beat_of, write_beat


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


def reserved_run(name: str | None, key: str) -> Run | None:
    """The folder that waits for the process that knows the key."""
    return Run(RUNS / name) if name is not None and is_reserved(name, key) else None
