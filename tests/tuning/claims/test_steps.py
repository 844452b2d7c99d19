"""What claims about steps and operations measure, on tiny sizes. Nothing asserts how long it takes."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from lapclip.machine.cpu import Cpu
from lapclip.model.block import Block
from lapclip.tuning.claims import operations, steps
from lapclip.tuning.rehearsal import Rehearsal

from ..made import small
from .made import tiny_bench

CPU = Cpu()


def test_the_parts_of_a_product_add_up() -> None:
    parts = operations.measure_product_parts(CPU, size=64, rounds=5)
    assert parts.total == parts.allocate + parts.launch + parts.synchronize + parts.compute
    assert parts.synchronize == 0
    assert parts.launch > 0


def test_layouts_compare_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[bool, Tensor] = {}
    original = Block.forward

    def forward(block: Block, x_BLD: Tensor) -> Tensor:
        seen[x_BLD.is_contiguous()] = x_BLD.detach()
        return original(block, x_BLD)

    monkeypatch.setattr(Block, "forward", forward)
    operations.measure_layouts(tiny_bench())
    assert torch.equal(seen[True], seen[False])


def test_threads_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: steps.CLAIMED_CORES)
    monkeypatch.setattr(steps, "default_threads", lambda: steps.CLAIMED_THREADS)
    set_threads, counts = torch.set_num_threads, []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    seconds = steps.time_threads(tiny_bench())
    set_threads(1)
    assert list(seconds) == [1, 2, 4, 8]
    assert counts == [1, 2, 4, 8] * 2 + [steps.CLAIMED_THREADS]


def test_both_ways_to_load_feed_the_same_batches() -> None:
    rehearsal = Rehearsal(small(), CPU, pairs=16)
    captions: list[list] = []
    original = rehearsal.step

    def watched(batch, *rest):
        captions.append(batch.tokens_BL.tolist())
        return original(batch, *rest)

    setattr(rehearsal, "step", watched)  # noqa: B010
    for workers in (0, 1):
        assert steps.time_loading(rehearsal, workers, steps=2) > 0
    assert captions[:3] == captions[3:]
    assert captions[0] != captions[1]


def test_both_precisions_are_timed() -> None:
    assert set(steps.time_precisions(tiny_bench())) == {"float32", "bfloat16"}
