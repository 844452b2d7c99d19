"""The microscope on tiny sizes. What is asserted moves with what is measured; nothing asserts how long it takes."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor

from lapclip import microscope
from lapclip.machine.cpu import Cpu
from lapclip.machine.timing import PHASES
from lapclip.microscope import device_speed, step_phases
from lapclip.model.block import Block
from lapclip.model.shapes import SHAPES
from lapclip.tuning.measure import Rehearsal

from ..tuning.made import small

CPU = Cpu()
TINY = SHAPES["tiny"]


def test_the_parts_of_a_product_add_up() -> None:
    parts = device_speed.product_parts(CPU, size=64, rounds=5)
    added = parts.allocate_ms + parts.launch_ms + parts.synchronise_ms + parts.arithmetic_ms
    assert added == pytest.approx(parts.total_ms)
    assert parts.synchronise_ms == 0
    assert parts.first_call_ms >= 0
    assert parts.gflops == pytest.approx(2 * 64**3 / parts.arithmetic_ms / 1e6)


def test_many_products_multiply_that_often(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[Tensor] = []
    original = Tensor.__matmul__
    monkeypatch.setattr(Tensor, "__matmul__", lambda a, b: multiplied.append(a) or original(a, b))
    found = device_speed.many_products(CPU, size=8, count=7, rounds=2)
    assert len(multiplied) == 7 * 3
    assert found.gflops == pytest.approx(2 * 8**3 * 7 / found.seconds / 1e9)


def test_copies_without_a_device_are_of_memory_alone() -> None:
    rates = device_speed.copy_rates(CPU, size=1 << 20, rounds=2)
    assert rates.memory > 0
    assert (rates.to_device, rates.to_device_pinned, rates.within_device) == (None, None, None)
    assert device_speed.transfer_times(CPU, 2, 8).pinned is None


def test_layouts_compare_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[bool, Tensor] = {}
    original = Block.forward

    def forward(block: Block, x_BLD: Tensor) -> Tensor:
        seen[x_BLD.is_contiguous()] = x_BLD.detach()
        return original(block, x_BLD)

    monkeypatch.setattr(Block, "forward", forward)
    device_speed.layout_times(CPU, 2, 5, 16, 2, rounds=1)
    assert torch.equal(seen[True], seen[False])


def test_every_phase_of_a_batch_is_there_and_shares_add_up() -> None:
    rehearsal = Rehearsal(small(), CPU, pairs=16)
    phases = step_phases.batch_phases(rehearsal, turns=2)
    assert tuple(phases.seconds) == PHASES
    assert sum(phases.shares.values()) == pytest.approx(1)
    assert min(phases.shares["forward"], phases.shares["backward"]) > 0
    assert rehearsal.taken == 3


def test_core_use_has_a_share_for_each_core() -> None:
    use = step_phases.core_use(Rehearsal(small(), CPU), seconds=0.0)
    assert len(use.cores) == torch.multiprocessing.cpu_count()
    assert all(0 <= share <= 1 for share in use.cores)


@pytest.mark.parametrize(
    ("cores", "performance", "expected"),
    [(1, 1, [1]), (2, 2, [2, 1]), (8, 4, [4, 2, 1, 8]), (12, 6, [6, 4, 2, 1, 12])],
)
def test_performance_cores_are_tried_first(
    cores: int, performance: int, expected: list[int]
) -> None:
    assert step_phases.thread_counts(cores, performance) == expected


def test_threads_are_left_as_they_were() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    rehearsal = Rehearsal(small(), CPU)
    original = rehearsal.step

    class Watched:
        sends_ahead = False

        def __call__(self, *arguments):
            seen.append(torch.get_num_threads())
            return original(*arguments)

    setattr(rehearsal, "step", Watched())  # noqa: B010
    times = step_phases.thread_times(rehearsal, [1, 2], rounds=1)
    assert set(times.seconds) == {1, 2}
    assert seen[1:] == [1, 2, 1, 2]
    assert times.best in (1, 2)
    assert torch.get_num_threads() == before


def test_every_way_to_load_feeds_the_same_batches() -> None:
    rehearsal = Rehearsal(small(), CPU, pairs=16)
    seen: dict[int, list[int]] = {}
    original = rehearsal.step

    def watched(batch, number, *rest):
        seen[number] = batch.tokens_BL.tolist()
        return original(batch, number, *rest)

    setattr(rehearsal, "step", watched)  # noqa: B010
    found = step_phases.loader_times(rehearsal, steps=2, workers=(0, 1), rounds=1)
    assert list(found) == ["thread", "in line", "1 workers"]
    assert all(way.start_seconds > 0 for way in found.values())
    by_way = [[seen[1 + 3 * way + at] for at in (1, 2, 3)] for way in range(3)]
    assert by_way[0] == by_way[1] == by_way[2]
    assert by_way[0][0] != by_way[0][1]


def test_precisions_start_alike_and_are_timed() -> None:
    found = step_phases.precisions(TINY, 4, CPU, steps=6, rounds=1)
    assert set(found) == {"float32", "bfloat16", "float16"}
    whole = found["float32"]
    for one in found.values():
        assert one.error is not None or (
            len(one.losses) == 6 and one.losses[0] == pytest.approx(whole.losses[0], 0.02)
        )


def test_spikes_are_counted() -> None:
    calm = (2.0, 1.9, 1.9, 1.8, 1.8, 1.7, 1.6)
    assert step_phases.spikes(calm) == 0
    assert step_phases.spikes((*calm, 5.0, 1.6)) == 1
    assert step_phases.spikes((*calm, float("nan"))) == 1


@pytest.mark.slow
def test_examine_gives_plain_values_and_a_measurement_that_fails_does_not_lose_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no room in /dev/shm\nand more")

    named: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(device_speed, "layout_times", fails)
        found = microscope.examine(
            CPU,
            lambda done, total, what: named.append(what),
            shape=TINY,
            batch_size=4,
            loss_steps=6,
            copy_bytes=1 << 20,
            rounds=1,
            workers=1,
            product_size=64,
        )
    assert named[0] == "one product"
    assert named[-1] == ""
    assert found["layouts"] == {"error": "no room in /dev/shm"}
    assert f"{'layouts':<18}could not be measured (no room in /dev/shm)" in microscope.lines(found)
    found["layouts"] = dataclasses.asdict(device_speed.layout_times(CPU, 2, 5, 16, 2, rounds=1))
    text = "\n".join(microscope.lines(json.loads(json.dumps(found))))
    for fact in (
        "64x64 product",
        "100 products",
        "GB/s",
        "forward",
        "activations",
        "threads",
        "in line",
        "contiguous",
        "bfloat16",
    ):
        assert fact in text
