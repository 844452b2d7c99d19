"""Whether the machine does what it can."""

from __future__ import annotations

import statistics
from typing import Any

from lapclip.machine.other_programs import BUSY_SHARE, count_free_cores
from lapclip.runs.findings.checks import Found, Surroundings, check, numbers, recent
from lapclip.runs.summary import Summary
from lapclip.suggest import command
from lapclip.text import count, number

WAITING = 0.1
"""Share of a step. Below a tenth, more loader threads would gain next to nothing."""
MEASURED_STEPS = 5
"""Steps whose phases were measured, without which a share of them says little; the first fills the queue."""
SLOWER = 1.3
"""Times the tuned step. Evaluations are left out of both; captions of other lengths and warm chips make a tenth."""
TIMED_STEPS = 20
HELD_BACK, TIMES_HELD_BACK = 0.1, 3
"""Share of the readings of the sensors, ten seconds apart, and how often at least: one or two are a passing peak."""
DISTURBED, TIMES_DISTURBED = 0.25, 3
"""The same where other programs use the cores."""


@check(
    "waiting-for-data",
    "warning",
    "Training waits for data",
    f"loading takes more than {WAITING:.0%} of a typical step",
)
def waiting_for_data(summary: Summary, around: Surroundings) -> Found | None:
    measured = [event for event in summary.steps if isinstance(event.get("seconds"), dict)]
    phases = summary.phases()
    total = sum(phases.values())
    if len(measured) <= MEASURED_STEPS or not total or "load" not in phases:
        return None
    share = phases["load"] / total
    if share <= WAITING:
        return None
    threads = number(summary.setting("train", "loader_threads")) or 1
    return Found(
        f"{share:.0%} of a step ({phases['load'] * 1e3:.1f} of {total * 1e3:.1f} ms) is spent waiting for the next "
        f"batch, with {threads:.0f} loader thread{'s' if threads > 1 else ''}",
        f"{around.train(f'train.loader_threads={2 * threads:.0f}')}, with the data on a fast disk",
    )


@check(
    "slower-than-tuned",
    "warning",
    "Slower than this machine was timed to be",
    f"a step takes {SLOWER:g} times what it took when settings were chosen",
)
def slower_than_tuned(summary: Summary, around: Surroundings) -> Found | None:
    tuned = number(summary.started.get("tuned_seconds"))
    gaps = numbers(event.get("gap") for event in recent(summary.steps))
    if (
        not tuned or len(gaps) < TIMED_STEPS or summary.fallbacks
    ):  # after a fallback the settings are others
        return None
    seconds = statistics.median(gaps)
    if seconds <= SLOWER * tuned:
        return None
    used = [number(share) or 0.0 for event in summary.sensors[-1:] for share in _core_use(event)]
    cores = f"; the cores are {sum(used) / len(used):.0%} in use, by all programs" if used else ""
    return Found(
        f"{seconds * 1e3:.0f} ms a step, {tuned * 1e3:.0f} ms when tuned ({seconds / tuned:.1f} times){cores}",
        "look for other programs, low-power mode, battery and heat: lapclip machine; then time it afresh: "
        f"{around.tune()}",
    )


@check(
    "throttled",
    "warning",
    "The processor is held back by heat",
    f"at {HELD_BACK:.0%} of the readings of the sensors, {TIMES_HELD_BACK} at least",
)
def throttled(summary: Summary, around: Surroundings) -> Found | None:
    known = [event for event in summary.sensors if isinstance(event.get("throttled"), bool)]
    held = [event for event in known if event["throttled"]]
    if len(held) < max(TIMES_HELD_BACK, HELD_BACK * len(known)):
        return None
    degrees = numbers(event.get("celsius") for event in held)
    heat = f", up to {max(degrees):.0f} C" if degrees else ""
    clocks = numbers(event.get("megahertz") for event in held)
    clock = f", clock down to {min(clocks):,.0f} MHz" if clocks else ""
    threads = int(number(summary.setting("train", "threads")) or 2)
    return Found(
        f"at {len(held)} of {len(known)} readings of the sensors, first at step {count(held[0].get('step'))}"
        f"{heat}{clock}",
        "free the vents, raise the machine from the table, cool the room; fewer threads make less heat: "
        f"{around.train(f'train.threads={max(1, threads // 2)}')}",
    )


@check(
    "busy-cores",
    "warning",
    "Other programs use the cores",
    f"at {DISTURBED:.0%} of the readings of the sensors, {TIMES_DISTURBED} at least, more than {BUSY_SHARE:.0%} of them, and "
    "so many that not every thread of a run on the CPU has one",
)
def too_few_cores(summary: Summary, around: Surroundings) -> Found | None:
    known = [event for event in summary.sensors if _share_of_others(event) is not None]
    devices = summary.tower_devices[-1] if summary.tower_devices else {}
    if "cpu" not in devices.values() or summary.machines() is not None:
        return None  # an accelerator needs few cores; ranks of one run are programs of their own
    threads = number(summary.setting("train", "threads")) or 1
    free = [count_free_cores(event["others"], len(_core_use(event)) or 1) for event in known]
    disturbed = [
        event
        for event, left in zip(known, free, strict=True)
        if event["others"] > BUSY_SHARE and left < threads
    ]
    if len(disturbed) < max(TIMES_DISTURBED, DISTURBED * len(known)):
        return None
    first, used = (
        count(disturbed[0].get("step")),
        statistics.median(event["others"] for event in disturbed),
    )
    fewer = (
        f", or leave them what they use: {around.train(f'train.threads={max(1, min(free))}')}"
        if threads > 1
        else ""
    )
    return Found(
        f"at {len(disturbed)} of {len(known)} readings of the sensors, first at step {first}, they used {used:.0%} of "
        "the cores; a step waits for the slowest of its threads, so that it can take several times as long",
        f"close them{fewer}",
    )


@check(
    "competing-runs",
    "warning",
    "Runs compete for the machine",
    "another run in this folder is at work on the same device",
)
def competing_runs(summary: Summary, around: Surroundings) -> Found | None:
    if around.state != "running" or not around.others:
        return None
    rate = summary.pairs_per_second
    speed = f"; this one makes {rate:,.0f} pairs/s" if rate else ""
    first = around.others[0]
    return Found(
        f"{', '.join(around.others)} {'is' if len(around.others) == 1 else 'are'} running too{speed}",
        f"one after the other is faster: {command('stop', first)}, and when {around.name} is done, "
        f"{command('resume', first)}",
    )


def _share_of_others(event: dict[str, Any]) -> float | None:
    """What a sensors event says of other programs, where it is a share."""
    found = number(event.get("others"))
    return found if found is not None and 0 <= found <= 1 else None


def _core_use(event: dict[str, Any]) -> list[Any]:
    """What a sensors event says of each core; nothing where it says something else."""
    found = event.get("core_use")
    return found if isinstance(found, list) else []


CHECKS = (
    waiting_for_data,
    slower_than_tuned,
    throttled,
    too_few_cores,
    competing_runs,
)
