"""`lapclip compare`: the devices of this machine side by side."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from itertools import pairwise
from typing import Any

from lapclip.commands.join import invite, plan_new_run
from lapclip.commands.train import train
from lapclip.errors import ConfigError, JoinError
from lapclip.machine.choose_device import available
from lapclip.paths import CacheFile, temporary_folder
from lapclip.progress import Status, ignore_progress
from lapclip.runs.events import read_events
from lapclip.runs.folder import TrainRequest, find_run
from lapclip.training.request import Callbacks
from lapclip.tuning.compare import QUICK_SECONDS, SECONDS, compare_devices
from lapclip.tuning.rehearsal import measure_phases

# The short run that is timed alone and with other computers.
RECIPE = "seed"
SETTINGS = ("train.steps=12",)
ALONE, TOGETHER = "alone", "together"


def compare(*, quick: bool, seconds: float | None, progress: Status) -> dict[str, Any]:
    """Compare the devices of this machine and save the result for `report`."""
    if seconds is not None and seconds <= 0:
        raise ConfigError(
            f"--seconds must be more than 0, not {seconds:g}.", hint="lapclip compare --quick"
        )
    usual_seconds = QUICK_SECONDS if quick else SECONDS
    found = compare_devices(seconds or usual_seconds, progress)
    saved = CacheFile("compare.json")
    saved.replace(found)  # before the rest: what took minutes is not to be lost
    if not quick:
        found["phases"] = {}
        for device in available():
            progress(f"phases of a step on {device.kind}")
            found["phases"][device.kind] = measure_phases(device)
        saved.replace(found)
    return found


def compare_machines(machines: int, callbacks: Callbacks, say: Status) -> dict[str, Any]:
    """Time steps of a short run alone, then of the same run with other computers."""
    request = TrainRequest(RECIPE, SETTINGS, None)
    arguments = ["train", "--recipe", RECIPE, "--name", TOGETHER]
    for setting in SETTINGS:
        arguments += ["--set", setting]
    with temporary_folder("compare") as folder, chdir(folder):
        train(request, ALONE, callbacks)
        plan = plan_new_run(request, TOGETHER, callbacks.data_progress or ignore_progress)
        with _output_to_stderr():
            status = invite(plan, machines, arguments, say, ignore_progress)
        if status:
            raise JoinError("The run with the other computers failed; the reason is above.")
        alone, together = _step_seconds(ALONE), _step_seconds(TOGETHER)
    return {
        "machines": machines,
        "alone_step_seconds": alone,
        "together_step_seconds": together,
        "speedup": alone / together,
    }


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Send what processes print meanwhile to stderr: the comparison alone belongs on stdout."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _step_seconds(name: str) -> float:
    """Return the median time of a step of a run, without the first two."""
    events = read_events(find_run(name).events)
    times = [event["time"] for event in events if event["type"] == "step"]
    return statistics.median(later - earlier for earlier, later in pairwise(times[2:]))
