"""What is measured: real training steps of the real model, timed under one setting after another, and checked for what
they compute.
"""

from __future__ import annotations

import copy
import gc
import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lapclip.config import Config, TrainConfig
from lapclip.data.batches import Batch
from lapclip.machine.choose_device import (
    choose_train_device,
    default_threads,
    device_of,
    prepare_device,
)
from lapclip.machine.cpu import Cpu
from lapclip.machine.device import Device
from lapclip.machine.timing import Stopwatch
from lapclip.measure.timing import Timer
from lapclip.model.clip import CLIP
from lapclip.training.cuda_graph import WARM_UP, AnyStep, GraphedStep, make_step
from lapclip.training.feed import ready
from lapclip.training.initial_weights import initialise_logits
from lapclip.training.inputs import Sent

FEW = 4
"""Pairs that show whether a setting computes the right thing."""


@dataclass(frozen=True)
class Setting:
    """What tuning may change: none of it changes what is learnt, up to rounding."""

    device: str
    dtype: str = "float32"
    threads: int = 1
    micro_batch: int = 0
    compile: str = "none"
    image_attention: str = "fused"
    text_attention: str = "fused"
    linear: str = "torch"

    def applied(self, train: TrainConfig) -> TrainConfig:
        return replace(train, **asdict(self))

    @property
    def where(self) -> Device:
        """The device that it names."""
        return device_of(self.device)

    def text(self) -> str:
        """For people: what stands out."""
        parts = [self.device, self.dtype]
        parts += [f"{self.threads} thread{'s' * (self.threads > 1)}"] if self.where.is_cpu else []
        parts += [f"micro-batches of {self.micro_batch}"] if self.micro_batch else []
        parts += [self.compile] if self.compile != "none" else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Agreement:
    """How near a setting is to float32 on the CPU, for the same weights and pairs."""

    loss: float
    """Relative difference of the loss."""
    gradients: float
    """Cosine between the gradients of all weights."""
    embeddings: float
    """Smallest cosine between the embeddings of an image or caption, computed without a graph."""

    def fault(self, dtype: str) -> str | None:
        """What is wrong, if more than the precision's rounding explains."""
        most, least_gradients, least_embeddings = TOLERANCE[dtype]
        if not self.loss <= most:
            return f"its loss is off by {self.loss:.1%}"
        if not self.gradients >= least_gradients:
            return f"its gradients do not agree (cosine {self.gradients:.4f})"
        if not self.embeddings >= least_embeddings:
            return f"its embeddings do not agree (cosine {self.embeddings:.4f})"
        return None


TOLERANCE = {
    "float32": (1e-3, 0.9999, 0.9999),
    "bfloat16": (2e-2, 0.99, 0.999),
    "float16": (2e-2, 0.99, 0.999),
}
"""Largest relative difference of the loss, smallest cosine of the gradients, smallest cosine of an embedding."""


@dataclass(frozen=True)
class Answer:
    """What a step computed."""

    loss: float
    gradients: list[Tensor]
    """Of each weight, on the CPU."""
    embeddings: Tensor


class Workshop:
    """The model and the batch that every setting is tried on."""

    def __init__(self, config: Config, batch: Batch) -> None:
        # Without clipping and crops the gradients are a function of weights and pairs alone.
        plain = replace(
            config.train,
            clip_norm=0.0,
            patch_dropout=0.0,
            cheap_size=0,
            crop=1.0,
            flip=0.0,
            steps=1,
        )
        self.config, self.batch = replace(config, train=plain), batch
        self._model = CLIP(config.model, seed=0)
        initialise_logits(self._model, plain, new=True)

    def contender(self, setting: Setting) -> Contender:
        """A fresh copy of the model, ready to step under a setting."""
        device, _ = choose_train_device(setting.applied(self.config.train))
        prepare_device(device, setting.threads)
        gc.collect()  # the one before is gone, but not what refers to itself
        model = copy.deepcopy(self._model).to(device.torch)
        return Contender(
            make_step(model, setting.applied(self.config.train), device), self.batch, device
        )

    def agreement(self, setting: Setting) -> Agreement:
        """Compare a setting with float32 on the CPU, on a few pairs. In micro-batches, if those are to be used.

        Recorded, if it is to be; what is compiled is compared on the whole batch, once it has been compiled for that.
        """
        how = "graph" if setting.compile == "graph" else "none"
        return compare(
            self._answer(replace(setting, micro_batch=min(setting.micro_batch, 2), compile=how)),
            self._right,
        )

    @cached_property
    def _right(self) -> Answer:
        """Float32 on the CPU by torch's own forms, a pair at a time: in no more memory than any setting needs."""
        answer = self._answer(Setting(Cpu.kind, threads=default_threads(), micro_batch=1))
        return replace(answer, gradients=[gradient.clone() for gradient in answer.gradients])

    def _answer(self, setting: Setting) -> Answer:
        return replace(self.contender(setting), batch=first_pairs(self.batch, FEW)).answer()


@dataclass
class Contender:
    """A setting at work."""

    step: AnyStep
    batch: Batch
    device: Device

    def take(self) -> float:
        """Seconds of one whole step. The learning rate is 0, which costs as much as any other."""
        return Timer(self.device.synchronise).time_once(self._step)

    def warm_up(self) -> float:
        """Take the steps that set things up, compile and record; seconds of the longest."""
        steps = 1 if self.device.is_cpu else WARM_UP + 2
        return max(self.take() for _ in range(steps))

    def answer(self) -> Answer:
        """What the step computes. float16's first scales may overflow; it then halves them, so it may try again."""
        if isinstance(self.step, GraphedStep):  # so that what is compared is what was recorded
            self.warm_up()
        metrics = self._step()
        for _ in range(20):
            if math.isfinite(metrics.grad_norm):
                break
            metrics = self._step()
        gradients = [
            p.grad.flatten().cpu() for p in self.step.model.parameters() if p.grad is not None
        ]
        return Answer(metrics.loss, gradients, self._embeddings())

    @cached_property
    def _ready(self) -> Batch | Sent:
        return ready(self.step, self.batch, 1)

    def _step(self):
        return self.step(self._ready, 1, 0.0, Stopwatch(self.device.synchronise, on=False))()

    @torch.no_grad()
    def _embeddings(self) -> Tensor:
        plain = self.step.step if isinstance(self.step, GraphedStep) else self.step
        return torch.cat(plain.embed(self.batch)).float().cpu()


def compare(answer: Answer, right: Answer) -> Agreement:
    """Not-a-numbers compare as not agreeing."""
    cosine = torch.nn.functional.cosine_similarity(
        answer.embeddings.double(), right.embeddings.double(), dim=1
    )
    return Agreement(
        loss=abs(answer.loss - right.loss) / abs(right.loss),
        gradients=_cosine(answer.gradients, right.gradients),
        embeddings=cosine.min().item(),
    )


def _cosine(left: list[Tensor], right: list[Tensor]) -> float:
    """Between all numbers of two lists, a tensor at a time: both as one in float64 would take more than a step does."""
    product = left_square = right_square = 0.0
    for one, other in zip(left, right, strict=True):
        one, other = one.double(), other.double()
        product += (one @ other).item()
        left_square += (one @ one).item()
        right_square += (other @ other).item()
    return (
        product / math.sqrt(left_square * right_square) if left_square * right_square else math.nan
    )


def first_pairs(batch: Batch, count: int) -> Batch:
    """So many pairs of a batch, from its shortest captions to its longest."""
    rows = np.linspace(0, len(batch.tokens_BL) - 1, count).round().astype(int)
    return Batch(
        np.ascontiguousarray(batch.pixels_BSSC[rows]),
        np.ascontiguousarray(batch.tokens_BL[rows]),
        np.ascontiguousarray(batch.positives_BB[np.ix_(rows, rows)]),
        batch.sided_B[rows],
        None if batch.aspects_B is None else batch.aspects_B[rows],
    )
