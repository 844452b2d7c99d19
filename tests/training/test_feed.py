"""Steps on batches that were sent ahead, plain and recorded, are those on batches that were not: to the last bit."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lapclip.config import TrainConfig
from lapclip.data.batches import Batch, BatchPlan
from lapclip.data.dataset import Pairs
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.errors import DataError
from lapclip.machine.cpu import Cpu
from lapclip.machine.device import Device
from lapclip.machine.gpus import Cuda
from lapclip.machine.transfer import PinnedTransfer, Transfer
from lapclip.measure.phases import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.training.cuda_graph import WARM_UP, GraphedStep, make_step
from lapclip.training.feed import feed
from lapclip.training.inputs import Sent
from lapclip.training.objectives import Objectives
from lapclip.training.step import TrainStep

from ..late_streams import LateRuntime

NEEDS_CUDA = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no CUDA device here"
)
STEPS, METRICS = 14, 5


class RunAgain:
    """Replays what was recorded by running it again, on the memory that it was recorded with."""

    def __init__(self, parts: int) -> None:
        self._parts = parts

    def warm_up(self, run: Callable):
        return run()

    def record(self, run: Callable) -> tuple[Callable[[], None], Any]:
        result = torch.zeros(METRICS + self._parts)

        def replay() -> None:
            result.copy_(run())

        return replay, result


class Sending(Cpu):
    """The processor, to which batches are sent as if it were an accelerator: everything but the hardware is real."""

    records_graphs = True

    def transfer(self) -> Transfer:
        return PinnedTransfer(self.torch, LateRuntime(random.Random(0)))

    def read_later(self, values: torch.Tensor) -> Callable[[], list[float]]:
        return values.clone().tolist  # as the copy of a real one, taken when it is asked for

    def graph_recorder(self) -> RunAgain:
        return RunAgain(parts=self.parts)

    parts = 0


def plan_of(count: int = 40, batch_size: int = 8) -> BatchPlan:
    draw = np.random.default_rng(1)
    words = ["a cat", "two dogs on the left", "red", "a very long caption of a house", "snow"]
    captions = [[f"{words[at % 5]} {at}", words[at % 3]] for at in range(count)]
    pixels = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    tokenizer = CharacterTokenizer.learn([caption for options in captions for caption in options])
    return BatchPlan(Pairs(pixels, captions), tokenizer, 64, batch_size, seed=5, symbol_dropout=0.2)


def step_on(device: Device, plan: BatchPlan, **settings) -> TrainStep:
    asked = {
        "batch_size": 8,
        "steps": STEPS,
        "crop": 0.6,
        "flip": 0.5,
        "cheap_size": 16,
        "cheap_share": 0.5,
    }
    config = TrainConfig(**{"dtype": "float32", **asked, **settings})
    shape = replace(SHAPES["tiny"], vocabulary=plan.tokenizer.vocabulary, context=64)
    model = CLIP(shape, seed=1).to(device.torch)
    Objectives(config).start(model, is_new=True)
    step = make_step(model, config, device)
    if isinstance(step, GraphedStep):
        step._recorder._parts = len(step.parts)  # pyright: ignore[reportAttributeAccessIssue]
    return step


def losses_of(step: TrainStep, plan: BatchPlan, *, ahead: bool, first: int = 1) -> list[float]:
    """The losses of all steps, read one step late, as the loop does."""
    off = Stopwatch(step.device.synchronise, on=False)
    found, pending = [], None
    if not ahead:
        return [
            step(plan.batch(number), number, 1e-3, off)().loss for number in range(first, STEPS + 1)
        ]
    with feed(plan, step, first, STEPS) as batches:
        for number, batch in zip(range(first, STEPS + 1), batches, strict=True):
            read = step(batch, number, 1e-3, off)
            if pending is not None:
                found.append(pending().loss)
            pending = read
    return [*found, pending().loss] if pending else found


@pytest.mark.parametrize("settings", [{}, {"micro_batch": 3}, {"optimizer": "muon"}], ids=str)
def test_sent_batches_train_as_others(settings: dict) -> None:
    plan = plan_of()
    right = losses_of(step_on(Cpu(), plan, **settings), plan, ahead=False)
    assert losses_of(step_on(Sending(), plan, **settings), plan, ahead=True) == right
    assert losses_of(step_on(Sending(), plan, **settings), plan, ahead=False) == right
    assert losses_of(step_on(Cpu(), plan, **settings), plan, ahead=True) == right


def test_recorded_steps_take_sent_batches() -> None:
    plan = plan_of()
    graphed = step_on(Sending(), plan, compile="graph")
    plain = TrainStep(graphed.model, graphed.optimizer, graphed.config, graphed.device)
    right = losses_of(plain, plan, ahead=False)
    for ahead in (True, False):
        step = step_on(Sending(), plan, compile="graph")
        assert isinstance(step, GraphedStep)
        assert losses_of(step, plan, ahead=ahead) == right
        assert 1 < len(step._recordings) < STEPS - WARM_UP  # shapes come again


def test_a_batch_may_be_taken_again_until_its_memory_is_needed() -> None:
    plan = plan_of()
    one, other = (step_on(Sending(), plan) for _ in range(2))
    off, sent = Stopwatch(one.device.synchronise, on=False), one.send(plan.batch(1), 1)
    again = [one(sent, 1, 1e-3, off)().loss for _ in range(3)]
    assert again == [other(plan.batch(1), 1, 1e-3, off)().loss for _ in range(3)]


def test_batches_are_prepared_and_sent_beside_the_loop_and_no_thread_stays() -> None:
    plan, names, others = plan_of(), set(), set(threading.enumerate())
    step = step_on(Sending(), plan)
    send = step.send

    def note(batch: Batch, step: int) -> Sent:
        names.add(threading.current_thread().name)
        return send(batch, step)

    step.send = note
    with feed(plan, step, 1, STEPS) as batches:
        for _ in range(3):
            next(batches)
    assert {name.rsplit("_", 1)[0] for name in names} == {"lapclip-sending"}
    assert not [
        thread.name
        for thread in set(threading.enumerate()) - others
        if thread.name.startswith("lapclip-")
    ]


def test_a_batch_that_cannot_be_prepared_ends_the_loop() -> None:
    plan = plan_of(count=10)
    plan.pairs.captions[3].clear()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(DataError, match="has no caption"):
        losses_of(step_on(Sending(), plan), plan, ahead=True)


@NEEDS_CUDA
@pytest.mark.parametrize("compile", ["none", "graph"])
def test_on_a_gpu_sent_batches_train_as_others(compile: str) -> None:
    """In float32 without reduced products, so that only the order of sums differs from run to run."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    plan = plan_of()
    right = losses_of(step_on(Cpu(), plan), plan, ahead=False)
    for ahead in (True, False):
        assert losses_of(
            step_on(Cuda(), plan, compile=compile), plan, ahead=ahead
        ) == pytest.approx(right, rel=1e-3)
