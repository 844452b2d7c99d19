from __future__ import annotations

from dataclasses import replace

import pytest

from lapclip.tuning.step_fits import (
    MEASURED_SIZES,
    PREDICTED_SIZES,
    Fit,
    add_fitted_ms,
    find_crossover,
    fit_cells,
    predict_larger_models,
    recommend,
)

from .made_cells import CPU, GPU, cells_of


def test_sizes_reach_from_one_million_to_half_a_billion_and_predictions_to_a_billion() -> None:
    assert MEASURED_SIZES[0].parameters == pytest.approx(1.2e6, rel=0.2)
    assert MEASURED_SIZES[-1].parameters == pytest.approx(500e6, rel=0.05)
    assert [round(size.parameters / 1e8) for size in PREDICTED_SIZES] == [2, 5, 10]


def test_the_fit_finds_what_the_times_were_made_of() -> None:
    (found,) = fit_cells(cells_of(CPU, overhead=7.0, rate=2e11, update=1.5, layer=0.25))
    assert found.ms_per_layer == pytest.approx(0.25, rel=1e-3)
    assert found.overhead_ms == pytest.approx(7.0, rel=1e-3)
    assert found.ns_per_parameter == pytest.approx(1.5, rel=1e-3)
    assert found.flops_per_second == pytest.approx(2e11, rel=1e-3)
    assert found.error < 1e-6


def test_the_error_of_a_fit_is_that_on_cells_it_did_not_see() -> None:
    cells = cells_of(CPU, overhead=7.0, rate=2e11)
    noisy = [
        replace(cell, ms=(cell.ms or 0.0) * (1.3 if at % 2 else 0.8))
        for at, cell in enumerate(cells)
    ]
    (found,) = fit_cells(noisy)
    assert 0.1 < found.error < 0.6


def test_no_figure_of_a_fit_is_negative() -> None:
    cells = cells_of(CPU, overhead=0.0, rate=2e11)
    (found,) = fit_cells(
        [replace(cell, ms=(cell.ms or 0.0) * (1 - 0.1 / cell.batch)) for cell in cells]
    )
    assert found.overhead_ms >= 0
    assert found.ns_per_parameter >= 0


def test_too_few_cells_give_no_fit() -> None:
    assert fit_cells(cells_of(CPU, 1.0, 1e11)[:3]) == []


def test_the_crossover_is_where_the_accelerator_overtakes() -> None:
    cells = cells_of(CPU, overhead=1.0, rate=1e11) + cells_of(GPU, overhead=20.0, rate=1e13)
    found = find_crossover(add_fitted_ms(cells, fit_cells(cells)))
    points = {point["batch"]: point["parameters"] for point in found["points"]}
    assert points[1] > points[16]
    for batch, parameters in points.items():
        for size in MEASURED_SIZES:
            ms = {
                c.device: c.ms or 0.0
                for c in cells
                if c.parameters == size.parameters and c.batch == batch
            }
            assert (ms["cuda"] < ms["cpu"]) == (size.parameters >= parameters)
    assert found["text"].startswith("cuda wins from ")


def test_a_cell_that_was_not_run_is_judged_by_the_fit() -> None:
    cells = cells_of(CPU, overhead=1.0, rate=1e11) + cells_of(GPU, overhead=20.0, rate=1e13)
    whole = find_crossover(add_fitted_ms(cells, fit_cells(cells)))
    partial = [
        replace(cell, ms=None, skipped="too long")
        if cell.device == "cpu" and cell.batch == 256
        else cell
        for cell in cells
    ]
    assert find_crossover(add_fitted_ms(partial, fit_cells(partial))) == whole


def test_one_device_alone_has_no_crossover() -> None:
    crossover = find_crossover(cells_of(CPU, 0.0, 1e11))
    assert crossover == {"text": "cpu is the only device here", "points": []}


def test_predictions_grow_with_the_model_and_recommendations_take_the_fastest() -> None:
    cells = cells_of(CPU, 1.0, 1e11) + cells_of(GPU, 20.0, 1e13)
    predicted = predict_larger_models(fit_cells(cells))
    big = [one["ms"] for one in predicted if one["device"] == "cpu" and one["batch"] == 16]
    assert big == sorted(big)
    assert len(predicted) == 2 * 3 * 2
    assert {one["device"] for one in recommend(cells)} == {"cuda"}
    assert {one["batch"] for one in recommend(cells)} == {256}
    assert {one["device"] for one in recommend(cells_of(CPU, 1.0, 1e11))} == {"cpu"}


def test_a_fit_gives_the_time_of_any_size() -> None:
    one = Fit(
        "cpu",
        "float32",
        2,
        1.0,
        ms_per_layer=0.5,
        ns_per_parameter=2.0,
        flops_per_second=1e9,
        error=0.1,
    )
    assert one.ms(layers=4, parameters=1e6, work=1e9) == pytest.approx(1.0 + 2.0 + 2.0 + 1000.0)


def test_what_depends_on_the_size_is_not_fitted_to_one_size() -> None:
    (found,) = fit_cells(
        cells_of(CPU, overhead=7.0, rate=2e11, update=1.5, sizes=MEASURED_SIZES[:1])
    )
    assert (found.ms_per_layer, found.ns_per_parameter) == (0.0, 0.0)
    assert found.flops_per_second == pytest.approx(2e11, rel=1e-3)


def test_a_device_does_not_win_where_it_has_no_room() -> None:
    cells = cells_of(CPU, overhead=1.0, rate=1e11) + cells_of(GPU, overhead=20.0, rate=1e13)
    largest = max(cell.parameters for cell in cells)
    full = [
        replace(cell, ms=None, skipped="predicted 9.0 GB of 4.0 GB free", too_large=True)
        if cell.device == "cuda" and cell.parameters == largest
        else cell
        for cell in cells
    ]
    judged = add_fitted_ms(full, fit_cells(full))
    assert all(cell.fitted_ms is None for cell in judged if cell.too_large)
    assert {point["parameters"] for point in find_crossover(judged)["points"]} == {None}
