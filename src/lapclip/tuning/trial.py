"""Try a setting: real training steps, compared with float32 on the CPU, and timed."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lapclip.config import Config, TrainConfig
from lapclip.data.batches import Batch, Slicing
from lapclip.machine.choose_device import default_threads, device_of, prepare_device
from lapclip.machine.cpu import Cpu
from lapclip.machine.device import Device
from lapclip.measure.phases import Stopwatch
from lapclip.measure.timing import Timer
from lapclip.model.clip import CLIP
from lapclip.text import counted
from lapclip.training.cuda_graph import WARM_UP, GraphedStep, make_step
from lapclip.training.feed import ready
from lapclip.training.inputs import Sent
from lapclip.training.objectives import Objectives
from lapclip.training.step import StepMetrics, TrainStep

CHECKED_PAIRS = 4
CHECKED_MICRO_BATCH = 2
MAX_OVERFLOWS = 20  # float16's first loss scales may be too large; each overflow halves the scale


@dataclass(frozen=True)
class Setting:
    """What tuning may change. None of it changes what is learned, up to rounding."""

    device: str
    dtype: str = "float32"
    threads: int = 1
    micro_batch: int = 0
    """0 is the whole batch."""
    compile: str = "none"
    image_attention: str = "fused"
    text_attention: str = "fused"
    linear: str = "torch"

    def apply_to(self, train: TrainConfig) -> TrainConfig:
        return replace(train, **asdict(self))

    def __str__(self) -> str:
        parts = [self.device, self.dtype]
        if self.device == Cpu.kind:
            parts.append(counted(self.threads, "thread"))
        if self.micro_batch:
            parts.append(f"micro-batches of {self.micro_batch}")
        if self.compile != "none":
            parts.append(self.compile)
        return ", ".join(parts)


@dataclass(frozen=True)
class Tolerance:
    """How far a precision may be from float32 on the CPU."""

    loss_difference: float
    """Largest relative difference of the loss."""
    gradient_cosine: float
    """Smallest cosine between the gradients of all weights."""
    embedding_cosine: float
    """Smallest cosine between two embeddings of an image or caption."""


TOLERANCES = {
    "float32": Tolerance(1e-3, 0.9999, 0.9999),
    "bfloat16": Tolerance(2e-2, 0.99, 0.999),
    "float16": Tolerance(2e-2, 0.99, 0.999),
}


@dataclass(frozen=True)
class StepResult:
    """What a step computed."""

    loss: float
    gradients: list[Tensor]
    """Gradient of each weight, on the CPU."""
    embeddings: Tensor


@dataclass(frozen=True)
class Agreement:
    """How close a result is to the reference, for the same weights and pairs."""

    loss_difference: float
    gradient_cosine: float
    embedding_cosine: float

    def find_fault(self, dtype: str) -> str | None:
        """Return what is wrong, if it is more than the rounding of the precision."""
        tolerance = TOLERANCES[dtype]  # comparisons with a NaN are false
        if not self.loss_difference <= tolerance.loss_difference:
            return f"its loss is off by {self.loss_difference:.1%}"
        if not self.gradient_cosine >= tolerance.gradient_cosine:
            return f"its gradients do not agree (cosine {self.gradient_cosine:.4f})"
        if not self.embedding_cosine >= tolerance.embedding_cosine:
            return f"its embeddings do not agree (cosine {self.embedding_cosine:.4f})"
        return None


def compare_results(result: StepResult, reference: StepResult) -> Agreement:
    """Compare what two steps computed."""
    cosines = torch.nn.functional.cosine_similarity(
        result.embeddings.double(), reference.embeddings.double(), dim=1
    )
    return Agreement(
        loss_difference=abs(result.loss - reference.loss) / abs(reference.loss),
        gradient_cosine=cosine_of_lists(result.gradients, reference.gradients),
        embedding_cosine=cosines.min().item(),
    )


def cosine_of_lists(left: list[Tensor], right: list[Tensor]) -> float:
    """Return the cosine between all numbers of two lists, a tensor at a time to save memory."""
    product = left_square = right_square = 0.0
    for left_tensor, right_tensor in zip(left, right, strict=True):
        left_tensor, right_tensor = left_tensor.double(), right_tensor.double()
        product += (left_tensor @ right_tensor).item()
        left_square += (left_tensor @ left_tensor).item()
        right_square += (right_tensor @ right_tensor).item()
    norms = math.sqrt(left_square * right_square)
    return product / norms if norms else math.nan


@dataclass
class Trial:
    """A setting at work on a copy of the model."""

    step: TrainStep
    batch: Batch
    device: Device

    def step_once(self) -> StepMetrics:
        """Take one step. The learning rate is 0, which costs as much as any other."""
        stopwatch = Stopwatch(self.device.synchronise, on=False)
        return self.step(self._prepared_batch, 1, 0.0, stopwatch)()

    @property
    def timer(self) -> Timer:
        return Timer(self.device.synchronise)

    def warm_up(self) -> None:
        """Take the steps that set things up, compile and record."""
        steps = 1 if self.device.is_cpu else WARM_UP + 2
        for _ in range(steps):
            self.step_once()

    def compute(self) -> StepResult:
        """Return what a step computes, once float16's loss scale is small enough."""
        if isinstance(self.step, GraphedStep):
            self.warm_up()  # so that the recording is compared
        metrics = self.step_once()
        for _ in range(MAX_OVERFLOWS):
            if math.isfinite(metrics.grad_norm):
                break
            metrics = self.step_once()
        gradients = [
            weight.grad.flatten().cpu()
            for weight in self.step.model.parameters()
            if weight.grad is not None
        ]
        return StepResult(metrics.loss, gradients, self._embed())

    @cached_property
    def _prepared_batch(self) -> Batch | Sent:
        return ready(self.step, self.batch, 1)

    @torch.no_grad()
    def _embed(self) -> Tensor:
        return torch.cat(self.step.embed(self.batch)).float().cpu()


class TrialBench:
    """The model and the batch that every setting is tried on."""

    def __init__(self, config: Config, batch: Batch) -> None:
        # Without clipping and crops the gradients depend on weights and pairs alone.
        train = replace(
            config.train,
            clip_norm=0.0,
            cheap_size=0,
            crop=1.0,
            flip=0.0,
            steps=1,
        )
        self.config, self.batch = replace(config, train=train), batch
        self._model = CLIP(config.model, seed=0)
        self._objectives = Objectives(train)
        self._objectives.start(self._model, is_new=True)

    def start(self, setting: Setting, batch: Batch | None = None) -> Trial:
        """Return a copy of the model, ready to step under a setting."""
        device = device_of(setting.device)
        prepare_device(device, setting.threads)
        gc.collect()  # the model of the trial before is only freed now
        model = copy.deepcopy(self._model).to(device.torch)
        step = make_step(model, setting.apply_to(self.config.train), device)
        return Trial(step, batch or self.batch, device)

    def check(self, setting: Setting) -> Agreement:
        """Compare a setting with float32 on the CPU, on a few pairs.

        A setting that compiles is compared uncompiled here, and compiled once it was compiled for
        the whole batch.
        """
        compile = "graph" if setting.compile == "graph" else "none"
        micro_batch = min(setting.micro_batch, CHECKED_MICRO_BATCH)
        small = replace(setting, micro_batch=micro_batch, compile=compile)
        return compare_results(self._compute_few(small), self._reference)

    @cached_property
    def _reference(self) -> StepResult:
        """Float32 on the CPU with torch's own kernels, a pair at a time to need little memory."""
        setting = Setting(Cpu.kind, threads=default_threads(), micro_batch=1)
        result = self._compute_few(setting)
        return replace(result, gradients=[gradient.clone() for gradient in result.gradients])

    def _compute_few(self, setting: Setting) -> StepResult:
        few = take_pairs(self.batch, CHECKED_PAIRS, self._objectives.slicing)
        return self.start(setting, few).compute()


def take_pairs(batch: Batch, count: int, slicing: Mapping[str, Slicing]) -> Batch:
    """Return some pairs of a batch, evenly from its first to its last."""
    rows = np.linspace(0, len(batch.tokens_BL) - 1, count).round().astype(int)
    extras = {}
    for name, array in batch.extras.items():
        match slicing.get(name, Slicing.ROWS):
            case Slicing.WHOLE:
                extras[name] = array
            case Slicing.ROWS_AND_COLUMNS:
                extras[name] = np.ascontiguousarray(array[np.ix_(rows, rows)])
            case _:
                extras[name] = np.ascontiguousarray(array[rows])
    return Batch(
        np.ascontiguousarray(batch.pixels_BSSC[rows]),
        np.ascontiguousarray(batch.tokens_BL[rows]),
        np.ascontiguousarray(batch.positives_BB[np.ix_(rows, rows)]),
        batch.sided_B[rows],
        None if batch.aspects_B is None else batch.aspects_B[rows],
        extras=extras,
    )
