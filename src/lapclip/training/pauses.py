"""Pauses of a run between two steps: of a polite one for other programs, and checks for swap."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lapclip.runs import events
from lapclip.training.recovery import SwapGrew

if TYPE_CHECKING:
    from lapclip.training.trainer import Trainer

CHECK_SECONDS = 1.0


def pause_if_polite(trainer: Trainer) -> float:
    """Wait while the machine is needed otherwise, with everything saved. Return the seconds."""
    pauses, step = trainer.polite_pauses, trainer.progress.step
    if pauses is None or step == trainer.steps:
        return 0.0
    reason = pauses.reason()
    if reason is None:
        return 0.0
    began = time.perf_counter()
    trainer.save()
    trainer.log.append(events.Paused(step=step, reason=reason))
    while pauses.reason() and not trainer.why_stop():
        trainer.sensors.keep_counting()
        time.sleep(CHECK_SECONDS)
    seconds = time.perf_counter() - began
    trainer.log.append(events.WentOn(step=step, seconds=seconds))
    return seconds


def check_swap(trainer: Trainer) -> None:
    """Raise SwapGrew if the system swaps because of this process. The state is complete then."""
    if trainer.swap_watch is None or not trainer.device.shares_memory:
        return
    if trainer.progress.step == trainer.steps:
        return
    grown = trainer.swap_watch.grown()
    if grown:
        trainer.step.touched = False
        raise SwapGrew(f"swap has grown by {grown / 1e9:.1f} GB")
