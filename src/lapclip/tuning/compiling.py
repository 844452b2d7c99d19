"""Measure whether compiling the step pays for itself within the run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lapclip.errors import first_line
from lapclip.machine.choose_device import fault_in_compiling
from lapclip.machine.device import Device
from lapclip.progress import Status
from lapclip.text import duration
from lapclip.tuning.trial import Setting, TrialBench, compare_results

COMPILATIONS = 2  # captions of another length are compiled once more, then for any length


@dataclass(frozen=True)
class Compiling:
    """What compiling costs once, and saves with each step."""

    compile: str
    """Value of train.compile."""
    compile_seconds: float
    seconds_before: float
    """Time of a step without compiling."""
    seconds_after: float
    fault: str | None = None
    """Why compiling cannot be used. None if it was measured and computes the same."""

    @property
    def break_even_steps(self) -> float:
        """Steps from which on compiling pays."""
        saved = self.seconds_before - self.seconds_after
        return COMPILATIONS * self.compile_seconds / saved if saved > 0 else math.inf

    def pays(self, steps: int) -> bool:
        """Return whether a run of so many steps ends sooner with it."""
        return self.fault is None and self.break_even_steps < steps

    def describe(self, steps: int) -> str:
        """Return the reason for choosing or rejecting it."""
        if self.fault:
            return self.fault
        before, after = self.seconds_before * 1e3, self.seconds_after * 1e3
        times = f"{before:.1f} ms a step to {after:.1f} ms after {self.compile_seconds:.0f} s"
        if not math.isfinite(self.break_even_steps):
            return f"compiling gains nothing ({times}, measured)"
        text = f"compiling pays from step {self.break_even_steps:,.0f} on; the run has {steps:,}"
        if self.pays(steps):
            saved_per_step = self.seconds_before - self.seconds_after
            saved = steps * saved_per_step - COMPILATIONS * self.compile_seconds
            text += f", which take {duration(saved)} less"
        return f"{text} ({times}, measured)"


def time_compiling(
    bench: TrialBench, setting: Setting, device: Device, seconds_before: float, status: Status
) -> Compiling:
    """Compile the whole step, time it, and compare what it computes with the uncompiled step."""
    compile = "compiled-graph" if device.records_graphs else "compiled"
    failed = Compiling(compile, 0.0, seconds_before, seconds_before)
    if fault := fault_in_compiling(device):
        return replace(failed, fault=f"nothing can be compiled here ({fault})")
    status("compiling the whole step; this takes a minute or two")
    expected = bench.start(setting).compute()
    try:
        trial = bench.start(replace(setting, compile=compile))
        compile_seconds = trial.timer.time_once(trial.warm_up)
        timing = trial.timer.time_one(trial.step_once)
        fault = compare_results(trial.compute(), expected).find_fault(setting.dtype)
    except Exception as error:  # compilers fail in many ways
        return replace(failed, fault=f"the step cannot be compiled here ({first_line(error)})")
    if fault:
        fault = f"compiling is not used: {fault}"
    return Compiling(compile, compile_seconds, seconds_before, timing.median, fault)
