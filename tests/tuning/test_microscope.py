"""The microscope on tiny sizes. What is asserted moves with what is measured; nothing asserts how long it takes."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor

from lapclip import microscope
from lapclip.config import TrainConfig
from lapclip.errors import LapclipError
from lapclip.machine.devices import Device
from lapclip.machine.timing import PHASES
from lapclip.microscope import batch_loading as loading
from lapclip.microscope import copies, layouts, precisions, products
from lapclip.microscope import step_phases as steps
from lapclip.model.clip import CLIP, count_parameters
from lapclip.model.shapes import SHAPES
from lapclip.tuning import memory_ledger as held
from lapclip.tuning.fresh_process import in_fresh_process
from lapclip.tuning.workload import Rehearsal, Workload, make_workload, some_pairs

CPU = Device("cpu")
TINY = SHAPES["tiny"]
PLAIN = TrainConfig(
    batch_size=4, dtype="float32", device="cpu", threads=1, compile="none", image_attention="fused",
    text_attention="fused", linear="torch",
)  # fmt: skip


def small(batch: int = 4, layers: int = 2, **changes: object) -> Workload:
    shape = dataclasses.replace(TINY, image_layers=layers, text_layers=layers)
    return Workload(shape, PLAIN).changed(batch_size=batch, **changes)


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(LapclipError, match="KeyError"):
        in_fresh_process("lapclip.microscope.products", {})


def test_the_parts_of_a_product_add_up() -> None:
    parts = products.product_parts(CPU, size=64, rounds=5)
    added = parts.allocate_ms + parts.launch_ms + parts.synchronise_ms + parts.arithmetic_ms
    assert added == pytest.approx(parts.total_ms)
    assert parts.synchronise_ms == 0
    assert parts.first_call_ms >= 0
    assert parts.gflops == pytest.approx(2 * 64**3 / parts.arithmetic_ms / 1e6)


def test_many_products_multiply_that_often(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[Tensor] = []
    original = Tensor.__matmul__
    monkeypatch.setattr(Tensor, "__matmul__", lambda a, b: multiplied.append(a) or original(a, b))
    found = products.many_products(CPU, size=8, count=7, rounds=2)
    assert len(multiplied) == 7 * 3
    assert found.gflops == pytest.approx(2 * 8**3 * 7 / found.seconds / 1e9)


def test_copies_without_a_device_are_of_memory_alone() -> None:
    rates = copies.copy_rates(CPU, size=1 << 20, rounds=2)
    assert rates.memory > 0
    assert (rates.to_device, rates.to_device_pinned, rates.within_device) == (None, None, None)
    assert copies.transfer_times(CPU, 2, 8).pinned is None


def test_layouts_compare_the_same_numbers() -> None:
    times = layouts.layout_times(CPU, 2, 5, 16, 2, rounds=1)
    assert times.gain == pytest.approx(times.permuted_ms / times.contiguous_ms)


def test_every_phase_of_a_batch_is_there_and_shares_add_up() -> None:
    rehearsal = Rehearsal(small(), CPU, pairs=16)
    phases = steps.batch_phases(rehearsal, turns=2)
    assert tuple(phases.seconds) == PHASES
    assert sum(phases.shares.values()) == pytest.approx(1)
    assert min(phases.shares["forward"], phases.shares["backward"]) > 0
    assert rehearsal.taken == 3


def test_a_rehearsal_learns() -> None:
    rehearsal = Rehearsal(small(), CPU)
    step = rehearsal.repeated()
    first = step().loss
    assert min(step().loss for _ in range(20)) < first


def test_core_use_has_a_share_for_each_core() -> None:
    use = steps.core_use(Rehearsal(small(), CPU), seconds=0.0)
    assert len(use.cores) == torch.multiprocessing.cpu_count()
    assert all(0 <= share <= 1 for share in use.cores)


@pytest.mark.parametrize(
    ("cores", "performance", "expected"),
    [(1, 1, [1]), (2, 2, [2, 1]), (8, 4, [4, 2, 1, 8]), (12, 6, [6, 4, 2, 1, 12])],
)
def test_performance_cores_are_tried_first(cores: int, performance: int, expected: list[int]) -> None:
    assert steps.thread_counts(cores, performance) == expected


def test_threads_are_left_as_they_were() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    rehearsal = Rehearsal(small(), CPU)
    original = rehearsal.step

    def watched(*arguments):
        seen.append(torch.get_num_threads())
        return original(*arguments)

    setattr(rehearsal, "step", watched)  # noqa: B010
    times = steps.thread_times(rehearsal, [1, 2], rounds=1)
    assert set(times.seconds) == {1, 2}
    assert seen[1:] == [1, 2, 1, 2]
    assert times.best in (1, 2)
    assert torch.get_num_threads() == before


def test_the_memory_of_a_step_adds_up_to_the_measured_peak() -> None:
    memory = held.step_memory(small(), CPU)
    assert sum(memory.parts.values()) == memory.peak
    count = count_parameters(CLIP(small().shape))
    assert memory.parameters == pytest.approx(4 * count, rel=0.01)
    assert memory.optimizer == pytest.approx(8 * count, rel=0.01)
    assert 0 < memory.activations < memory.peak
    assert memory.process > 0


def followed(workload: Workload) -> held.Ledger:
    rehearsal = Rehearsal(workload, CPU)
    rehearsal()
    ledger = held.Ledger()
    with ledger.following(rehearsal.step):  # pyright: ignore[reportArgumentType]
        rehearsal()
    return ledger


def test_activations_grow_with_the_batch_and_parameters_do_not() -> None:
    few, many = followed(small(4)), followed(small(16))
    assert many.fullest["activations"] > 3 * few.fullest["activations"]
    assert many.fullest["parameters"] == few.fullest["parameters"]


def test_a_deeper_model_holds_and_moves_more() -> None:
    shallow, deep = followed(small(layers=2)), followed(small(layers=4))
    for kind in ("parameters", "optimizer", "activations"):
        assert deep.fullest[kind] > 1.5 * shallow.fullest[kind], kind
    assert deep.traffic > 1.5 * shallow.traffic


def test_the_ledger_knows_gradients_and_forgets_what_is_freed() -> None:
    rehearsal, ledger = Rehearsal(small(), CPU), held.Ledger()
    with ledger.following(rehearsal.step):  # pyright: ignore[reportArgumentType]
        rehearsal()
    count = count_parameters(rehearsal.step.model)
    assert ledger.held["gradients"] == pytest.approx(4 * count, rel=0.01)  # all have arrived when the step is over
    assert ledger.fullest["activations"] > ledger.held["activations"]
    del rehearsal
    assert ledger.held["gradients"] == 0


def test_recomputing_blocks_keeps_fewer_activations() -> None:
    plain, again = followed(small(16, layers=4)), followed(small(16, layers=4, recompute=True))
    assert again.fullest["activations"] < plain.fullest["activations"]


def test_every_way_to_load_feeds_the_same_batches() -> None:
    rehearsal = Rehearsal(small(), CPU, pairs=16)
    seen: dict[int, list[int]] = {}
    original = rehearsal.step

    def watched(batch, number, *rest):
        seen[number] = batch.tokens_BL.tolist()
        return original(batch, number, *rest)

    setattr(rehearsal, "step", watched)  # noqa: B010
    found = loading.loader_times(rehearsal, steps=2, workers=(0, 1), rounds=1)
    assert list(found) == ["thread", "in line", "1 workers"]
    assert all(way.start_seconds > 0 for way in found.values())
    by_way = [[seen[1 + 3 * way + at] for at in (1, 2, 3)] for way in range(3)]
    assert by_way[0] == by_way[1] == by_way[2]
    assert by_way[0][0] != by_way[0][1]


def test_precisions_start_alike_and_are_timed() -> None:
    found = precisions.precisions(TINY, 4, CPU, steps=6, rounds=1)
    assert set(found) == {"float32", "bfloat16", "float16"}
    whole = found["float32"]
    for one in found.values():
        assert one.error is not None or (len(one.losses) == 6 and one.losses[0] == pytest.approx(whole.losses[0], 0.02))


def test_spikes_are_counted() -> None:
    calm = (2.0, 1.9, 1.9, 1.8, 1.8, 1.7, 1.6)
    assert precisions.spikes(calm) == 0
    assert precisions.spikes((*calm, 5.0, 1.6)) == 1
    assert precisions.spikes((*calm, float("nan"))) == 1


def test_images_are_made_once_and_differ() -> None:
    pairs = some_pairs(6, 16)
    assert pairs.pixels.shape == (6, 16, 16, 3)
    assert len({image.tobytes() for image in pairs.pixels[:]}) == 6
    assert some_pairs(6, 16) is pairs


def test_a_workload_leaves_nothing_to_choose() -> None:
    assert "auto" not in vars(make_workload(TINY, 4, CPU).train).values()


def test_examine_gives_plain_values_and_a_look_that_fails_does_not_lose_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no room in /dev/shm\nand more")

    named: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(layouts, "layout_times", fails)
        found = microscope.examine(
            CPU,
            lambda done, total, what: named.append(what),
            shape=TINY,
            batch_size=4,
            loss_steps=6,
            copy_bytes=1 << 20,
            rounds=1,
            workers=1,
        )
    assert named[0] == "one product"
    assert named[-1] == ""
    assert found["layouts"] == {"error": "no room in /dev/shm"}
    assert f"{'layouts':<18}could not be looked at (no room in /dev/shm)" in microscope.lines(found)
    found["layouts"] = dataclasses.asdict(layouts.layout_times(CPU, 2, 5, 16, 2, rounds=1))
    text = "\n".join(microscope.lines(json.loads(json.dumps(found))))
    for words in (
        "512x512 product",
        "100 products",
        "GB/s",
        "forward",
        "activations",
        "threads",
        "in line",
        "contiguous",
        "bfloat16",
    ):
        assert words in text
