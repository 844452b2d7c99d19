"""Does compiling pay? Measured on the whole step where there is time, else predicted from one block of each tower.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

import torch

from lapclip.errors import first_line
from lapclip.machine.choose_device import fault_in_compiling, prepare_device
from lapclip.machine.device import DTYPES, Device
from lapclip.measure.timing import Timer
from lapclip.model.block import Block
from lapclip.model.kernels import Compute
from lapclip.progress import Status
from lapclip.text import duration
from lapclip.tuning.measure import Setting, Workshop, compare

ROUNDS = 5
LEAST_SECONDS = 45.0
"""What compiling a block of each tower may take on two cores; with less left, nothing is predicted."""


@dataclass(frozen=True)
class Compiling:
    """What compiling costs once and saves each step."""

    compile: str
    """The setting of train.compile it is about."""
    cost: float
    """Seconds of compiling."""
    before: float
    after: float
    """Seconds of a step without and with it."""
    measured: bool
    fault: str | None = None

    @property
    def break_even(self) -> float:
        """The number of steps from which on compiling pays. Captions of another length have torch compile once more,
        then for any length."""
        return 2 * self.cost / (self.before - self.after) if self.after < self.before else math.inf

    def saved(self, steps: int) -> float:
        """Seconds that a run of so many steps is shorter by."""
        return steps * (self.before - self.after) - 2 * self.cost

    def pays(self, steps: int) -> bool:
        """Whether a run of so many steps ends sooner with it, by a measurement."""
        return self.fault is None and self.measured and self.break_even < steps

    def text(self, steps: int) -> str:
        """One line for people."""
        if self.fault:
            return self.fault
        how = "measured" if self.measured else "predicted from one block of each tower"
        times = f"{self.before * 1e3:.1f} ms a step to {self.after * 1e3:.1f} ms after {self.cost:.0f} s"
        if not math.isfinite(self.break_even):
            return f"compiling gains nothing ({times}, {how})"
        pays = f"pays from step {self.break_even:,.0f} on; the run has {steps:,}"
        if self.pays(steps):
            pays += f", which take {duration(self.saved(steps))} less"
        advice = "" if self.measured else "; lapclip tune --seconds 300 measures it"
        return f"compiling {pays} ({times}, {how}{advice})"


def time_compiling(
    workshop: Workshop, setting: Setting, device: Device, before: float, status: Status
) -> Compiling:
    """Compile the whole step and time it. Counts only if it computes what the uncompiled step computes."""
    how = "compiled-graph" if device.records_graphs else "compiled"
    if fault := fault_in_compiling(device):
        return Compiling(
            how,
            0.0,
            before,
            before,
            measured=False,
            fault=f"nothing can be compiled here ({fault})",
        )
    status("compiling the whole step; this takes a minute or two")
    right = workshop.contender(setting).answer()
    try:
        contender = workshop.contender(replace(setting, compile=how))
        cost = Timer(device.synchronise).time_once(contender.warm_up)
        after = statistics.median(contender.take() for _ in range(ROUNDS))
        wrong = compare(contender.answer(), right).fault(setting.dtype)
    except Exception as error:  # compilers have many ways to fail, and any of them means the same
        fault = f"the step cannot be compiled here ({first_line(error)})"
        return Compiling(how, 0.0, before, before, measured=False, fault=fault)
    fault = f"compiling is not used: {wrong}" if wrong else None
    return Compiling(how, cost, before, after, measured=True, fault=fault)


def predict_compiling(
    workshop: Workshop, setting: Setting, device: Device, before: float, left: float
) -> Compiling:
    """Compile one block of each tower; the others are alike."""
    how = "compiled-graph" if device.records_graphs else "compiled"
    nothing = Compiling(how, 0.0, before, before, measured=False)
    advice = "lapclip tune --seconds 300 measures compiling"
    if (
        device.records_graphs
    ):  # blocks timed alone would be timed by their launches, which a recording does not have
        return replace(nothing, fault=f"recorded, so that no time goes into launches; {advice}")
    if workshop.config.model.image_tower == "convolutions":
        return replace(nothing, fault=f"a tower of convolutions is not predicted; {advice}")
    if left < LEAST_SECONDS:
        return replace(nothing, fault=f"compiling was not tried in the time; {advice}")
    if fault := fault_in_compiling(device):
        return replace(nothing, fault=f"nothing can be compiled here ({fault})")
    prepare_device(device, setting.threads)
    model, batch = workshop.config.model, workshop.batch
    rows = setting.micro_batch or len(batch.tokens_BL)
    patches = (model.image_size // model.patch) ** 2
    cost = saved = 0.0
    for width, heads, hidden, layers, tokens, causal, attention in (
        (
            model.image_width,
            model.image_heads,
            model.image_hidden,
            model.image_layers,
            model.class_tokens + patches,
            False,
            setting.image_attention,
        ),
        (
            model.text_width,
            model.text_heads,
            model.text_hidden,
            model.text_layers,
            batch.tokens_BL.shape[1],
            model.architecture == "clip",
            setting.text_attention,
        ),
    ):
        compute = Compute(DTYPES[setting.dtype], attention=attention, linear=setting.linear)
        x_BLD = torch.randn(
            rows,
            tokens,
            width,
            device=device.torch,
            dtype=DTYPES[setting.dtype],
            requires_grad=True,
        )
        seconds = []
        for compiled in (False, True):
            block = Block(width, heads, causal=causal, hidden=hidden, activation=model.activation)
            block.to(device.torch, DTYPES[setting.dtype])
            for module in block.modules():
                if hasattr(module, "compute"):
                    setattr(module, "compute", compute)  # noqa: B010 (attributes of a Module are unknown to pyright)
            if compiled:
                block.compile()
            try:
                first, later = _time_block(block, x_BLD, device)
            except (
                Exception
            ) as error:  # compilers have many ways to fail, and any of them means the same
                return replace(
                    nothing, fault=f"a block cannot be compiled here ({first_line(error)})"
                )
            seconds.append(later)
            cost += layers * first if compiled else 0.0
        saved += layers * (seconds[0] - seconds[1])
    return Compiling(how, cost, before, before - saved, measured=False)


def _time_block(block: Block, x_BLD: torch.Tensor, device: Device) -> tuple[float, float]:
    """Seconds of the first pass forward and backward, and of a later one."""
    first, *later = (
        Timer(device.synchronise).time_once(lambda: block(x_BLD).sum().backward())
        for _ in range(1 + ROUNDS)
    )
    return first, statistics.median(later)
