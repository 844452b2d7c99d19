from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from lapclip.machine.cpu import Cpu
from lapclip.machine.gpus import Cuda
from lapclip.training.step import TrainStep
from lapclip.tuning import compare
from lapclip.tuning.compare import Comparison
from lapclip.tuning.step_fits import MEASURED_SIZES, Cell, Contestant, ModelSize

from .made_cells import CPU, cells_of

TINY = (ModelSize(64, 1), ModelSize(64, 2))


@pytest.fixture(autouse=True)
def small_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose kernels at a size that takes no time, and time steps briefly."""
    monkeypatch.setattr(compare, "TYPICAL_SIZE", TINY[0])
    monkeypatch.setattr(compare, "TYPICAL_BATCH", 4)
    monkeypatch.setattr(compare, "MAX_TIMED_SECONDS", 0.1)


def silent(text: str) -> None:
    pass


def measured(
    contestants: list[Contestant],
    sizes: tuple[ModelSize, ...],
    batches: tuple[int, ...],
    seconds: float,
    status: Callable[[str], None],
) -> list[Cell]:
    return Comparison(contestants, seconds, status).measure(sizes, batches)


def test_real_cells_are_measured_and_their_parts_agree() -> None:
    found = compare.compare_devices(30.0, silent, (ModelSize(192, 1), ModelSize(256, 1)), (1, 4))
    assert len(found["cells"]) == len(compare.list_contestants()) * 4
    for cell in found["cells"]:
        assert cell["skipped"] is None
        assert cell["pairs_per_second"] == pytest.approx(cell["batch"] / cell["ms"] * 1e3)
        assert cell["peak_memory_bytes"] > 0
    # Weights, gradients and two averages, all at once. Not of each cell: a process that has lived long finds room for
    # some of it in the gaps between what it holds (`tests/machine/test_device.py` checks the meter itself).
    assert any(cell["peak_memory_bytes"] > 0.9 * 16 * cell["parameters"] for cell in found["cells"])
    assert {(one["device"], one["dtype"]) for one in found["fits"]} >= {
        ("cpu", "float32"),
        ("cpu", "bfloat16"),
    }
    json.dumps(found)


def test_a_model_too_large_for_memory_is_skipped_with_the_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Cpu, "free_bytes", lambda self: 1e6)
    found = measured([CPU], TINY[:1], (1,), 10.0, silent)
    assert found[0].ms is None
    assert "GB of 0.0 GB free" in (found[0].skipped or "")


def test_what_would_take_too_long_is_skipped() -> None:
    """A batch of 256 has 256 times the work of one pair, which is more than a thirtieth of ten seconds."""
    first, second = measured([CPU], TINY[:1], (1, 256), 10.0, silent)
    assert first.ms is not None
    assert second.ms is None
    assert "s a step is too long" in (second.skipped or "")


def test_what_there_is_no_time_for_says_so() -> None:
    (cell,) = measured([CPU], TINY[:1], (1,), 1e-9, silent)
    assert cell.skipped == "no time was left"


def test_a_step_that_fails_is_a_skipped_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(compare, "make_step", fails)
    assert (
        measured([CPU], TINY[:1], (1,), 10.0, silent)[0].skipped
        == "does not run here (RuntimeError)"
    )


def test_where_batches_are_sent_ahead_no_step_waits_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on CUDA, where training sends the next batch while a step computes; each number of threads begins anew."""
    sent, send = [], TrainStep.send
    monkeypatch.setattr(TrainStep, "sends_ahead", True)
    monkeypatch.setattr(
        TrainStep,
        "send",
        lambda step, batch, number: sent.append(batch) or send(step, batch, number),
    )
    (cell,) = measured([CPU], TINY[:1], (1,), 10.0, silent)
    assert cell.ms is not None
    assert len(sent) == 1


def test_a_short_comparison_reaches_large_models_before_it_fills_in() -> None:
    steps: list[str] = []
    found = measured([CPU], TINY, (1, 4, 16), 60.0, steps.append)
    small, large = (f"{size.parameters / 1e6:.3g} M" for size in TINY)
    order = [(small, 1), (small, 16), (large, 1), (large, 16), (small, 4), (large, 4)]
    named = [f"{size} parameters, batch {batch}, {CPU}" for size, batch in order]
    cells = [step for step in steps if "parameters" in step]
    assert [step.split(";")[0] for step in cells] == named
    assert "cell 6 of 6" in cells[-1]
    assert [(cell.parameters, cell.batch) for cell in found] == [
        (size.parameters, batch) for size in TINY for batch in (1, 4, 16)
    ]


def test_devices_compete_in_two_precisions_and_the_cpu_with_half_of_its_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare, "available", lambda: [Cuda(), Cpu()])
    monkeypatch.setattr(compare, "default_threads", lambda: 4)
    assert [str(contestant) for contestant in compare.list_contestants()] == [
        "cuda float32", "cuda bfloat16",
        "cpu float32, 4 threads", "cpu bfloat16, 4 threads", "cpu float32, 2 threads",
    ]  # fmt: skip


def test_the_expected_time_grows_with_work_and_with_weights() -> None:
    comparison = Comparison([CPU], 60.0, silent)
    cells = cells_of(CPU, 1.0, 1e11, MEASURED_SIZES[:4])
    assert comparison.expect_seconds(cells[0]) == 0.0
    sizes = {cell.parameters for cell in cells[: len(cells) * 3 // 4]}
    comparison.cells = [
        cell for cell in cells if cell.batch in (1, 256) and cell.parameters in sizes
    ]
    for cell in cells:
        if cell.batch in (1, 16):
            seconds = (cell.ms or 0.0) / 1e3
            assert seconds == pytest.approx(comparison.expect_seconds(cell), rel=4)
