"""Reports of a saved comparison."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lapclip.paths import cache_folder
from lapclip.report import write_report
from lapclip.report.comparison_report import COMPARISON

from ..conftest import lapclip
from .pages import Page

SIZES, BATCHES = (1_000_000, 10_000_000, 100_000_000), (1, 16)
SPEEDS = {
    ("cpu", "float32"): (1.0, 1e12),
    ("cpu", "bfloat16"): (1.0, 2e12),
    ("gpu", "float32"): (20.0, 1e13),
}
WORK = 100
"""Operations of a parameter and a pair, in the comparison made here."""


def milliseconds(place: tuple[str, str], size: int, batch: int) -> float:
    overhead, rate = SPEEDS[place]
    return overhead + WORK * size * batch / rate * 1000


def cells(places: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {"device": place[0], "dtype": place[1], "threads": 2, "model": "any", "parameters": size, "batch": batch,
         "work": WORK * size * batch,
         "ms": milliseconds(place, size, batch), "fitted_ms": milliseconds(place, size, batch),
         "pairs_per_second": 1.0, "peak_memory_bytes": 10**9, "skipped": None}
        for place in places for size in SIZES for batch in BATCHES
    ]  # fmt: skip


def comparison(places: list[tuple[str, str]] | None = None) -> dict[str, Any]:
    places = places or list(SPEEDS)
    return {
        "machine": {"chip": "A <chip>", "cores": 8, "memory_bytes": 8 * 10**9, "system": "Any 1"},
        "torch": "2.13.0",
        "cells": cells(places),
        "fits": [
            {"device": device, "dtype": dtype, "threads": 2, "overhead_ms": SPEEDS[device, dtype][0],
             "ms_per_layer": 0.0, "ns_per_parameter": 0.0, "flops_per_second": SPEEDS[device, dtype][1], "error": 0.05}
            for device, dtype in places
        ],
        "crossover": {"text": "The GPU wins from 10 M parameters at batch 16 up.", "points": []},
        "predictions": [
            {"device": device, "dtype": dtype, "parameters": 10**9, "batch": 16,
             "ms": milliseconds((device, dtype), 10**9, 16)}
            for device, dtype in places
        ],
        "recommendations": [
            {"parameters": 10**6, "batch": 1, "device": "cpu", "dtype": "bfloat16", "text": "20 times the GPU"}
        ],
    }  # fmt: skip


@pytest.fixture
def save(here: Path, empty_cache: Path) -> Callable[[Any], Path]:
    def write(saved: Any) -> Path:
        (cache_folder() / COMPARISON).write_text(
            saved if isinstance(saved, str) else json.dumps(saved), encoding="utf-8"
        )
        return cache_folder() / COMPARISON

    return write


def test_without_a_run_the_comparison_is_reported(save: Callable[[Any], Path]) -> None:
    save(comparison())
    done = lapclip("report", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == ["lapclip-comparison.html", "lapclip-comparison.md"]
    page = Page(Path("lapclip-comparison.html"))
    assert page.addresses == []
    assert page.titles() == ["Time of a step at batch 1", "Time of a step at batch 16"]
    assert "A <chip>, 8 cores" in page.text
    assert "The GPU wins from 10 M parameters at batch 16 up." in page.text
    assert "20 times the GPU" in page.text
    text = Path("lapclip-comparison.md").read_text(encoding="utf-8")
    assert "A \\<chip\\>" in text
    assert "| cpu, predicted, ms |" in text


def test_the_map_names_the_fastest_and_its_factor(save: Callable[[Any], Path]) -> None:
    save(comparison())
    write_report(None, None)
    text = Path("lapclip-comparison.md").read_text(encoding="utf-8")
    rows = dict(
        line.strip("| ").split(" | ", 1) for line in text.splitlines() if " times |" in line
    )
    for size, name in zip(SIZES, ("1.0 M", "10.0 M", "100.0 M"), strict=True):
        for batch, cell in zip(BATCHES, rows[name].split(" | "), strict=True):
            cpu = min(milliseconds(place, size, batch) for place in SPEEDS if place[0] == "cpu")
            gpu = milliseconds(("gpu", "float32"), size, batch)
            winner, factor = ("cpu", gpu / cpu) if cpu < gpu else ("gpu", cpu / gpu)
            assert cell.startswith(winner)
            assert float(cell.split()[1]) == pytest.approx(factor, rel=0.06)


def test_one_device_compares_its_precisions(save: Callable[[Any], Path]) -> None:
    saved = comparison([("cpu", "float32"), ("cpu", "bfloat16")])
    save(saved)
    (path, _), _ = write_report(None, None)
    page = Page(path)
    tones = [
        named["class"]
        for tag, named in page.elements
        if tag == "td" and "tone" in (named.get("class") or "")
    ]
    assert tones == [
        "tone tone-0",
        *["tone tone-1"] * 5,
    ]  # the smallest step is nearly all overhead: a tie
    assert "bfloat16 2 times" in page.text


def test_curves_have_dots_a_fit_and_dashed_predictions(save: Callable[[Any], Path]) -> None:
    save(comparison())
    (path, _), _ = write_report(None, None)
    figure = Page(path).charts["plot-2"]
    traces = {trace["name"]: trace for trace in figure["data"]}
    assert list(traces) == [
        "cpu",
        "cpu, fit",
        "cpu, predicted",
        "gpu",
        "gpu, fit",
        "gpu, predicted",
    ]
    assert traces["gpu"]["y"] == [milliseconds(("gpu", "float32"), size, 16) for size in SIZES]
    # The comparison was made by the formula of the fit, so its line meets the dots: of the CPU, the faster precision.
    assert traces["cpu, fit"]["y"][-1] == pytest.approx(
        milliseconds(("cpu", "bfloat16"), SIZES[-1], 16)
    )
    assert traces["cpu, predicted"]["line"]["dash"] == "dash"
    assert traces["cpu, predicted"]["y"][-1] == pytest.approx(
        milliseconds(("cpu", "bfloat16"), 10**9, 16)
    )
    assert figure["layout"]["xaxis"]["type"] == figure["layout"]["yaxis"]["type"] == "log"


def test_a_run_s_report_holds_the_comparison(
    run_with: Callable[..., Path], empty_cache: Path
) -> None:
    run_with()
    saved = comparison() | {"phases": {"gpu": {"load": 0.001, "forward": 0.0234}}}
    (cache_folder() / COMPARISON).write_text(json.dumps(saved), encoding="utf-8")
    (path, _), warnings = write_report(None, None)
    assert warnings == []
    page = Page(path)
    assert "Run mine" in page.text
    assert page.titles()[-1] == "Time of a step at batch 16"
    assert "Milliseconds of a step by phase" in page.text


@pytest.mark.parametrize(
    "damaged", ["", "{", "[]", "{}", '{"cells": 3}', '{"cells": ["a"]}', "\x00"]
)
def test_a_damaged_comparison_is_left_out_with_a_warning(
    run_with: Callable[..., Path], damaged: str
) -> None:
    run_with()
    (cache_folder() / COMPARISON).write_text(damaged, encoding="utf-8")
    done = lapclip("report", "--json")
    assert done.returncode == 0, done.stderr
    assert "compare.json" in done.stderr
    assert "left out" in done.stderr
    assert len(json.loads(done.stdout)["files"]) == 2


@pytest.mark.parametrize(
    "key", ["machine", "torch", "fits", "crossover", "predictions", "recommendations"]
)
@pytest.mark.parametrize("value", [None, "missing", 3, [], {}, [None], [{}]])
def test_parts_that_are_missing_or_odd_are_left_out(
    save: Callable[[Any], Path], key: str, value: Any
) -> None:
    saved = comparison()
    if value == "missing":
        del saved[key]
    else:
        saved[key] = value
    save(saved)
    (path, _), warnings = write_report(None, None)
    assert warnings == []
    assert "Every cell" in Page(path).text


@pytest.mark.parametrize(
    "key", ["device", "dtype", "threads", "model", "parameters", "batch", "ms"]
)
@pytest.mark.parametrize("value", [None, "<b>", -1, 0])
def test_cells_with_odd_figures_do_not_end_a_report(
    save: Callable[[Any], Path], key: str, value: Any
) -> None:
    saved = comparison()
    for cell in saved["cells"][::2]:
        cell[key] = value
    save(saved)
    (path, _), _ = write_report(None, None)
    assert Page(path).count("b") == 0


def test_cells_that_could_not_run_say_why(save: Callable[[Any], Path]) -> None:
    saved = comparison()
    saved["cells"][0] |= {"ms": None, "skipped": "it needs 9 GB of memory"}
    save(saved)
    (path, _), _ = write_report(None, None)
    assert "not run: it needs 9 GB of memory" in Page(path).text


def test_the_phases_of_a_step_are_shown_with_the_names_of_the_devices(
    save: Callable[[Any], Path],
) -> None:
    saved = comparison()
    saved["devices"] = {"gpu": "A <fast> card", "cpu": "A <chip>"}
    saved["phases"] = {"gpu": {"load": 0.001, "forward": 0.0234}, "cpu": {"load": "x"}, "x": 1}
    save(saved)
    (path, markdown), _ = write_report(None, None)
    page = Page(path)
    assert "A <chip>, 8 cores and A <fast> card" in page.text
    assert "Milliseconds of a step by phase" in page.text
    assert "23.4" in markdown.read_text()
