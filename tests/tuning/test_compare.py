from __future__ import annotations

import json
import socket
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lapclip.compare import cells as compare
from lapclip.compare import fits
from lapclip.compare.fits import Cell, Contestant, Fit, crossover, fit, fitted, predictions, recommendations
from lapclip.compare.ladder import BATCHES, MEASURED, PREDICTED, Rung
from lapclip.errors import ConfigError
from lapclip.machine import devices

TINY = (Rung(64, 1), Rung(64, 2))
CPU, GPU = Contestant("cpu", "float32", 2), Contestant("cuda", "float32", 2)


def silent(text: str) -> None:
    pass


def cells_of(
    contestant: Contestant, overhead: float, rate: float, rungs=MEASURED, update: float = 0.0, layer: float = 0.0
) -> list[Cell]:
    """Cells as they would be if time were overhead, layers, updates and work alone."""
    return [
        Cell(**asdict(contestant), model=rung.shape.name, parameters=rung.parameters, work=rung.work(batch),
             batch=batch, layers=rung.layers, ms=ms, pairs_per_second=batch / ms * 1e3)
        for rung in rungs for batch in BATCHES
        if (ms := overhead + rung.layers * layer + rung.parameters * update / 1e6 + rung.work(batch) / rate * 1e3)
    ]  # fmt: skip


def test_sizes_reach_from_one_million_to_half_a_billion_and_predictions_to_a_billion() -> None:
    assert MEASURED[0].parameters == pytest.approx(1.2e6, rel=0.2)
    assert MEASURED[-1].parameters == pytest.approx(500e6, rel=0.05)
    assert [round(rung.parameters / 1e8) for rung in PREDICTED] == [2, 5, 10]


def test_the_fit_finds_what_the_times_were_made_of() -> None:
    (found,) = fit(cells_of(CPU, overhead=7.0, rate=2e11, update=1.5, layer=0.25))
    assert found.ms_per_layer == pytest.approx(0.25, rel=1e-3)
    assert found.overhead_ms == pytest.approx(7.0, rel=1e-3)
    assert found.ns_per_parameter == pytest.approx(1.5, rel=1e-3)
    assert found.flops_per_second == pytest.approx(2e11, rel=1e-3)
    assert found.error < 1e-6


def test_the_error_of_a_fit_is_that_on_cells_it_did_not_see() -> None:
    cells = cells_of(CPU, overhead=7.0, rate=2e11)
    noisy = [replace(cell, ms=(cell.ms or 0.0) * (1.3 if at % 2 else 0.8)) for at, cell in enumerate(cells)]
    (found,) = fit(noisy)
    assert 0.1 < found.error < 0.6


def test_no_figure_of_a_fit_is_negative() -> None:
    cells = cells_of(CPU, overhead=0.0, rate=2e11)
    (found,) = fit([replace(cell, ms=(cell.ms or 0.0) * (1 - 0.1 / cell.batch)) for cell in cells])
    assert found.overhead_ms >= 0
    assert found.ns_per_parameter >= 0


def test_too_few_cells_give_no_fit() -> None:
    assert fit(cells_of(CPU, 1.0, 1e11)[:3]) == []


def test_the_crossover_is_where_the_accelerator_overtakes() -> None:
    cells = cells_of(CPU, overhead=1.0, rate=1e11) + cells_of(GPU, overhead=20.0, rate=1e13)
    found = crossover(fitted(cells, fit(cells)))
    points = {point["batch"]: point["parameters"] for point in found["points"]}
    assert points[1] > points[16]
    for batch, parameters in points.items():
        for rung in MEASURED:
            ms = {c.device: c.ms or 0.0 for c in cells if c.parameters == rung.parameters and c.batch == batch}
            assert (ms["cuda"] < ms["cpu"]) == (rung.parameters >= parameters)
    assert found["text"].startswith("cuda wins from ")


def test_a_cell_that_was_not_run_is_judged_by_the_fit() -> None:
    cells = cells_of(CPU, overhead=1.0, rate=1e11) + cells_of(GPU, overhead=20.0, rate=1e13)
    whole = crossover(fitted(cells, fit(cells)))
    partial = [
        replace(cell, ms=None, skipped="too long") if cell.device == "cpu" and cell.batch == 256 else cell
        for cell in cells
    ]
    assert crossover(fitted(partial, fit(partial))) == whole


def test_one_device_alone_compares_its_precisions_and_says_so() -> None:
    half = Contestant("cpu", "bfloat16", 2)
    cells = cells_of(CPU, 0.0, 1e11) + cells_of(half, 0.0, 2e11)
    assert crossover(fitted(cells, fit(cells)))["text"] == (
        "cpu is the only device here, so precisions and threads are compared: "
        "cpu bfloat16, 2 threads is 2.00x cpu float32, 2 threads"
    )


def test_predictions_grow_with_the_model_and_recommendations_take_the_fastest() -> None:
    cells = cells_of(CPU, 1.0, 1e11) + cells_of(GPU, 20.0, 1e13)
    said = predictions(fit(cells))
    big = [one["ms"] for one in said if one["device"] == "cpu" and one["batch"] == 16]
    assert big == sorted(big)
    assert len(said) == 2 * 3 * 2
    assert {one["device"] for one in recommendations(cells)} == {"cuda"}
    assert {one["device"] for one in recommendations(cells_of(CPU, 1.0, 1e11))} == {"cpu"}


def test_real_cells_are_measured_and_their_parts_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare.compare(30.0, silent, TINY, (1, 4))
    assert len(found["cells"]) == len(compare.contestants()) * 4
    for cell in found["cells"]:
        assert cell["skipped"] is None
        assert cell["pairs_per_second"] == pytest.approx(cell["batch"] / cell["ms"] * 1e3)
        assert cell["peak_memory_bytes"] > 4 * 4 * cell["parameters"]
    assert {(one["device"], one["dtype"]) for one in found["fits"]} >= {("cpu", "float32"), ("cpu", "bfloat16")}
    json.dumps(found)


def test_a_model_too_large_for_memory_is_skipped_with_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.Device, "free_bytes", lambda self: 1e6)
    cells = compare.measure_cells([CPU], TINY[:1], (1,), 10.0, silent)
    assert cells[0].ms is None
    assert "GB of 0.0 GB free" in (cells[0].skipped or "")


def test_what_would_take_too_long_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_expected", lambda cell, cells: 9.0 * (cell.batch == 16))
    first, second = compare.measure_cells([CPU], TINY[:1], (1, 16), 100.0, silent)
    assert first.ms is not None
    assert second.skipped == "about 9 s a step is too long for this comparison"


def test_what_there_is_no_time_for_says_so() -> None:
    (cell,) = compare.measure_cells([CPU], TINY[:1], (1,), 1e-9, silent)
    assert cell.skipped == "no time was left"


def test_a_step_that_fails_is_a_skipped_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(compare, "make_step", fails)
    assert compare.measure_cells([CPU], TINY[:1], (1,), 10.0, silent)[0].skipped == "does not run here (RuntimeError)"


def test_a_shared_file_is_read_back_and_names_nobody(tmp_path: Path) -> None:
    found = compare.compare(10.0, silent, TINY[:1], (1,))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(found))
    assert compare.read_shared(path) == json.loads(json.dumps(found))
    text = path.read_text()
    assert str(Path.home()) not in text
    assert socket.gethostname() not in text


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 99}', '{"format": 1, "machine": {}, "cells": [{}]}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not a comparison"):
        compare.read_shared(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        compare.read_shared(tmp_path / "missing.json")


def test_a_fit_gives_the_time_of_any_size() -> None:
    one = Fit("cpu", "float32", 2, 1.0, ms_per_layer=0.5, ns_per_parameter=2.0, flops_per_second=1e9, error=0.1)
    assert one.ms(layers=4, parameters=1e6, work=1e9) == pytest.approx(1.0 + 2.0 + 2.0 + 1000.0)
    assert fits._size(2.5e6) == "2.5 M"
    assert fits._size(1e9) == "1.0 B"


def test_what_depends_on_the_size_is_not_fitted_to_one_size() -> None:
    (found,) = fit(cells_of(CPU, overhead=7.0, rate=2e11, update=1.5, rungs=MEASURED[:1]))
    assert (found.ms_per_layer, found.ns_per_parameter) == (0.0, 0.0)
    assert found.flops_per_second == pytest.approx(2e11, rel=1e-3)


def test_recommendations_say_what_trains_most_and_compare_where_others_ran() -> None:
    slow, quick = cells_of(CPU, 10.0, 1e11, MEASURED[:1]), cells_of(GPU, 1.0, 1e13, MEASURED[:1])
    few = [replace(cell, ms=None, pairs_per_second=None) if cell.batch > 16 else cell for cell in slow]
    (found,) = recommendations([*few, *quick])
    assert (found["device"], found["batch"]) == ("cuda", 256)
    assert ", at batch 16 " in found["text"]
    assert "x cpu float32, 2 threads" in found["text"]
    near = [replace(cell, device="xpu", ms=(cell.ms or 0.0) * 1.01, pairs_per_second=1.0) for cell in quick]
    assert recommendations([*quick, *near])[0]["text"].endswith("pairs/s at batch 256, as fast as xpu float32")
    (only,) = recommendations(quick)
    assert only["text"].endswith("nothing else was run")


@pytest.mark.parametrize(("start", "best"), [(4, 4), (4, 1), (4, 16), (1, 2), (16, 8)])
def test_the_best_number_of_threads_is_found_from_any_start(start: int, best: int) -> None:
    tried: list[int] = []

    def take(threads: int) -> tuple[float, None]:
        tried.append(threads)
        return 0.01 * max(threads / best, best / threads), None

    assert compare._best_threads(take, start, 16) == (best, (0.01, None))
    assert len(tried) == len(set(tried))


def test_a_long_step_with_all_threads_is_not_tried_with_fewer() -> None:
    assert compare._best_threads(lambda threads: (threads, None), 16, 16)[0] == 16


def test_a_short_comparison_reaches_large_models_before_it_fills_in(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[int, int]] = []

    def measured(cell: Cell, *_: object) -> Cell:
        order.append((cell.parameters, cell.batch))
        return replace(cell, ms=1.0)

    monkeypatch.setattr(compare, "measured", measured)
    cells = compare.measure_cells([CPU], TINY, (1, 4, 16), 60.0, silent)
    small, large = (rung.parameters for rung in TINY)
    assert order == [(small, 1), (small, 16), (large, 1), (large, 16), (small, 4), (large, 4)]
    assert [(cell.parameters, cell.batch) for cell in cells] == sorted(order)


def test_against_an_accelerator_the_cpu_may_choose_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available", lambda: [devices.Device("cuda"), devices.Device("cpu")])
    assert [one.text() for one in compare.contestants()] == [
        "cuda float32", "cuda bfloat16", "cpu float32", "cpu bfloat16"
    ]  # fmt: skip
    (cell,) = compare.measure_cells([Contestant("cpu", "float32", 0)], TINY[:1], (1,), 30.0, silent)
    assert cell.threads == 0
    assert cell.used_threads in range(1, devices.default_threads() + 1)


def test_the_expected_time_grows_with_work_and_with_weights() -> None:
    cells = [cell for cell in cells_of(CPU, 1.0, 1e11, MEASURED[:3]) if cell.batch in (1, 256)]
    for rung in MEASURED[:4]:
        for batch in (1, 16):
            (wanted,) = [cell for cell in cells_of(CPU, 1.0, 1e11, [rung]) if cell.batch == batch]
            assert (wanted.ms or 0.0) / 1e3 == pytest.approx(compare._expected(wanted, cells), rel=4)
    assert compare._expected(cells[0], []) == 0.0


def test_a_device_does_not_win_where_it_has_no_room() -> None:
    cells = cells_of(CPU, overhead=1.0, rate=1e11) + cells_of(GPU, overhead=20.0, rate=1e13)
    largest = max(cell.parameters for cell in cells)
    full = [
        replace(cell, ms=None, skipped="predicted 9.0 GB of 4.0 GB free", too_large=True)
        if cell.device == "cuda" and cell.parameters == largest
        else cell
        for cell in cells
    ]
    told = fitted(full, fit(full))
    assert all(cell.fitted_ms is None for cell in told if cell.too_large)
    assert {point["parameters"] for point in crossover(told)["points"]} == {None}
