"""Whether the run goes on, and has room to; and, where there is no run to look at, whether the machine is ready."""

from __future__ import annotations

import json
from dataclasses import fields

from lapclip.config import TrainConfig
from lapclip.errors import split_hint
from lapclip.runs.curves import curve
from lapclip.runs.events import mapping
from lapclip.runs.findings.checks import Found, Surroundings, check
from lapclip.runs.findings.gradients import NOT_A_NUMBER
from lapclip.runs.summary import Summary
from lapclip.text import count, number

NEAR_LIMIT = 0.9
"""Share of the memory that the run could have when it began: an evaluation or a browser takes the rest."""
SUSPECT = 0.7
"""The same, of a run that died: its last moments were not seen."""
SWAPPED = 1_000_000_000
"""Bytes by which swap grows in a run that is short of memory; systems tidy up less (`machine/system_memory.py`)."""


@check(
    "memory-limit",
    "warning",
    "Memory is nearly full",
    f"the peak is above {NEAR_LIMIT:.0%} of what the run could have",
)
def memory_limit(summary: Summary, around: Surroundings) -> Found | None:
    limit, peak = number(summary.started.get("memory_limit_bytes")), summary.peak_memory_bytes
    if not limit or not peak or peak <= NEAR_LIMIT * limit:
        return None
    return Found(
        f"peak {peak / 1e9:.2f} GB of the {limit / 1e9:.2f} GB that were to be had when the run began",
        f"close other programs; next time {_less_memory(summary, around)}, which gives the same result",
    )


@check(
    "swapping",
    "warning",
    "The system swaps",
    f"swap has grown by {SWAPPED / 1e9:g} GB since the run began",
)
def swapping(summary: Summary, around: Surroundings) -> Found | None:
    swap = curve(summary.sensors, lambda event: event.get("swap_bytes"))
    fell = [event for event in summary.fallbacks if event.get("cause") == "swap"]
    grown = max(swap.y) - swap.y[0] if swap else 0.0
    if grown < SWAPPED and not fell:
        return None
    change = "".join(f"; {event.get('text')}" for event in fell[-1:])
    return Found(
        f"swap grew by {grown / 1e9:.1f} GB{change}",
        f"close other programs: a step that swaps takes many times as long; next time {_less_memory(summary, around)}",
    )


@check(
    "fell-back",
    "note",
    "The run goes on with other settings",
    "something failed and the run found a way on",
)
def fell_back(summary: Summary, around: Surroundings) -> Found | None:
    others = [event for event in summary.fallbacks if event.get("cause") != "swap"]
    if not others:
        return None
    change = mapping(others[-1].get("change"))
    changed = ", ".join(f"{name} = {value}" for name, value in change.items())
    known = [
        f"train.{field.name}={json.dumps(change[field.name])}"
        for field in fields(TrainConfig)
        if field.name in change
    ]
    return Found(
        f"{len(others)} time{'s' if len(others) > 1 else ''}, last after step {count(others[-1].get('step'))}: "
        f"{others[-1].get('text')} ({changed})",
        f"nothing, the result stands; to start with these settings next time: {around.train(*known)}",
    )


@check(
    "died",
    "alarm",
    "The run died without a word",
    "no process works on it, and no event says how it ended",
)
def died(summary: Summary, around: Surroundings) -> Found | None:
    if around.state != "died":
        return None
    limit, peak = number(summary.started.get("memory_limit_bytes")), summary.peak_memory_bytes
    memory = f"; it held up to {peak / 1e9:.2f} GB" if peak else ""
    again = f"{around.resume()}, which goes on from the last checkpoint, to the same result"
    if not summary.step or (limit and peak and peak > SUSPECT * limit):
        memory += "; a system that runs out of memory ends processes this way"
        again += f"; if it dies again, {_less_memory(summary, around)}"
    if not summary.started:
        return Found(f"before its first step{memory}", again)
    return Found(f"nothing after step {summary.step:,} of {summary.total_steps:,}{memory}", again)


@check("failed", "alarm", "The run failed", "an error ended it")
def failed(summary: Summary, around: Surroundings) -> Found | None:
    if summary.ending.get("type") != "failed":
        return None
    error = str(summary.ending.get("error", ""))
    if NOT_A_NUMBER in error:
        return None  # a finding of its own
    text, hint = split_hint(error)
    if not summary.started:
        return Found(f"before its first step: {text}", hint or around.resume())
    return Found(
        f"after step {summary.step:,} of {summary.total_steps:,}: {text}", hint or around.resume()
    )


@check(
    "paused", "note", "The run is or was paused", "it waits for the machine, or the machine slept"
)
def paused(summary: Summary, around: Surroundings) -> Found | None:
    if summary.paused and around.state in ("", "running"):
        return Found(
            f"since step {summary.step:,}: {summary.paused.get('reason')}",
            f"it goes on by itself; to have the machine back, {around.command('stop')}",
        )
    if summary.pauses:
        minutes = sum(end - begin for begin, end in summary.pauses) / 60
        times = "once" if len(summary.pauses) == 1 else f"{len(summary.pauses)} times"
        return Found(
            f"nothing happened for {minutes:.0f} min in all, {times}: the machine slept",
            "nothing is lost; a lid left open keeps it awake",
        )
    return None


def _less_memory(summary: Summary, around: Surroundings) -> str:
    now = number(summary.setting("train", "micro_batch")) or summary.batch_size
    return around.train(f"train.micro_batch={max(1, int(now) // 2)}")


CHECKS = (memory_limit, swapping, fell_back, died, failed, paused)
