"""Batches on their way to a device, by streams that are as late as they may be (`tests/late_streams.py`)."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress

import numpy as np
import pytest
import torch

from lapclip.machine.cpu import Cpu
from lapclip.machine.gpus import Cuda
from lapclip.machine.transfer import ALIGNED, BLOCKS, Delivered, Layout, PinnedTransfer, Transfer

from ..late_streams import LateRuntime, LateStream, LateTransfer

NEEDS_CUDA = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no CUDA device here"
)


def tensors_of(number: int) -> dict[str, torch.Tensor]:
    """A batch of its own sizes and numbers."""
    draw = np.random.default_rng(number)
    rows, length = 5 + number % 3, 8 * (1 + number % 2)
    return {
        "pixels": torch.from_numpy(draw.integers(0, 256, (rows, 3, 3), dtype=np.uint8)),
        "tokens": torch.from_numpy(draw.integers(0, 99, (rows, length))),
        "positives": torch.eye(rows, dtype=torch.bool),
        "empty": torch.zeros(0, 4, 4, 3, dtype=torch.uint8),
        "boxes": torch.from_numpy(draw.random((rows, 5)).astype(np.float32)),
    }


def test_a_layout_gives_back_what_was_put_into_one_block() -> None:
    tensors = tensors_of(3)
    layout = Layout.of(tensors)
    memory = torch.zeros(layout.size, dtype=torch.uint8)
    for name, place in layout.tensors(memory).items():
        place.copy_(tensors[name])
        assert place.data_ptr() % 8 == 0
    assert all(first % ALIGNED == 0 for *_, first in layout.offsets)
    for name, found in layout.tensors(memory).items():
        assert found.dtype == tensors[name].dtype
        assert torch.equal(found, tensors[name])
    assert Layout.of(tensors_of(3)) == layout != Layout.of(tensors_of(4))
    assert len({Layout.of(tensors_of(3)), layout}) == 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ahead", [0, 1])
def test_every_batch_is_read_as_it_was_sent_however_late_the_streams_are(
    seed: int, ahead: int
) -> None:
    runtime = LateRuntime(random.Random(seed))
    transfer, steps = LateTransfer(runtime), 12
    read: dict[int, dict[str, torch.Tensor]] = {}
    coming = [transfer.send(tensors_of(number)) for number in range(ahead)]
    for number in range(steps):
        if number + ahead < steps:
            coming.append(transfer.send(tensors_of(number + ahead)))
        with coming.pop(0).received() as delivered:
            for _ in range(3):  # a computation reads its inputs early and late
                runtime.current_stream().enqueue(
                    lambda number=number, delivered=delivered: read.__setitem__(
                        number, {name: tensor.clone() for name, tensor in delivered.tensors.items()}
                    )
                )
    runtime.synchronize()
    for number in range(steps):
        assert all(
            torch.equal(read[number][name], tensor) for name, tensor in tensors_of(number).items()
        )


@pytest.mark.parametrize("seed", range(5))
def test_a_step_that_fails_half_way_leaves_nothing_to_be_overwritten(seed: int) -> None:
    runtime = LateRuntime(random.Random(seed))
    transfer, read = LateTransfer(runtime), []
    with suppress(ValueError), transfer.send(tensors_of(0)).received() as delivered:
        runtime.current_stream().enqueue(lambda: read.append(delivered.tensors["tokens"].clone()))
        raise ValueError("half-way")
    for number in range(1, 2 * BLOCKS):
        with transfer.send(tensors_of(number)).received():
            pass
    runtime.synchronize()
    assert torch.equal(read[0], tensors_of(0)["tokens"])


def test_memory_is_used_again_and_a_batch_that_lost_its_memory_is_refused() -> None:
    runtime = LateRuntime(random.Random(0))
    transfer, places = LateTransfer(runtime), set()
    for _ in range(6):
        with transfer.send(tensors_of(1)).received() as delivered:
            assert delivered.memory is not None
            places.add(delivered.memory.data_ptr())
    assert len(places) == BLOCKS
    late, *_ = [transfer.send(tensors_of(number)) for number in range(BLOCKS + 1)]
    with pytest.raises(AssertionError, match="given to a later one"), late.received():
        pass


def test_a_copy_of_a_batch_takes_over_later_ones_as_a_recorded_step_does() -> None:
    for transfer in (Transfer(torch.device("cpu")), Cpu().transfer()):
        with transfer.send(tensors_of(1)).received() as delivered:
            held = delivered.copy()
        with transfer.send(
            tensors_of(1) | {"tokens": tensors_of(1)["tokens"] + 1}
        ).received() as delivered:
            held.fill(delivered)
        assert torch.equal(held.tensors["tokens"], tensors_of(1)["tokens"] + 1)
    layout = Layout.of(tensors_of(1))
    one, other = (torch.full((layout.size,), value, dtype=torch.uint8) for value in (1, 2))
    held = Delivered(layout.tensors(one), one).copy()
    held.fill(Delivered(layout.tensors(other), other))
    assert set(held.tensors["pixels"].flatten().tolist()) == {2}
    assert set(one.tolist()) == {1}


def test_only_where_memory_can_be_pinned_batches_are_sent_ahead() -> None:
    assert not Cpu().transfer().ahead
    assert not Transfer.ahead
    assert PinnedTransfer.ahead


@NEEDS_CUDA
def test_batches_reach_a_gpu_as_they_were_sent_while_it_computes() -> None:
    device = Cuda()
    transfer = device.transfer()
    assert isinstance(transfer, PinnedTransfer)
    busy, read = torch.randn(4096, 4096, device="cuda"), []
    coming = transfer.send(tensors_of(0))
    for number in range(40):
        now, coming = coming, transfer.send(tensors_of(number + 1))
        with now.received() as delivered:
            for _ in range(20):
                busy = (
                    busy @ busy.sign() / 64
                )  # so that the copy of the next batch would overtake, if it could
            read.append({name: tensor.clone() for name, tensor in delivered.tensors.items()})
    device.synchronise()
    for number, found in enumerate(read):
        for name, tensor in tensors_of(number).items():
            assert torch.equal(found[name].cpu(), tensor)
    assert all(block._pinned.is_pinned() for block in transfer._blocks)


def test_simulated_streams_do_show_memory_that_is_written_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the waiting of one stream for the other, the tests above would fail."""
    monkeypatch.setattr(LateStream, "wait_event", lambda self, event: None)
    wrong = 0
    for seed, ahead in itertools.product(range(20), (0, 1)):
        try:
            test_every_batch_is_read_as_it_was_sent_however_late_the_streams_are(seed, ahead)
        except (AssertionError, RuntimeError):
            wrong += 1
    assert wrong > 10
