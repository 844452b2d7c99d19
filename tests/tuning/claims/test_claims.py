"""The claims: each has a function, each verdict has two sides, and the figures move with what is measured."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lapclip.data.scenes import split_scenes
from lapclip.errors import ConfigError
from lapclip.machine.cpu import Cpu
from lapclip.tuning import claims
from lapclip.tuning.claims import (
    CHECKS,
    arithmetic,
    check_claim,
    finished_runs,
    operations,
    read_claims,
    steps,
)
from lapclip.tuning.claims.bench import Bench
from lapclip.tuning.claims.finding import FAILS, HOLDS, UNKNOWN, Finding
from lapclip.tuning.model_size import count_parameters

from ...conftest import SMALL, lapclip
from ...small_runs import train
from .made import TINY, memory, tiny_bench


def product(total: float) -> operations.ProductParts:
    return operations.ProductParts(0.1, 0.1, 0.1, total - 0.3)


def step(cpu: float, gpu: float) -> steps.StepSpeed:
    return steps.StepSpeed(10**8, 12, cpu, gpu)


def transfer(plain: float, pinned: float | None = None) -> operations.Transfer:
    return operations.Transfer(plain, pinned, shares_memory=True)


def batches(**gigabytes: float) -> list[steps.BatchSize]:
    rates = {8: 2.0, 12: 3.0, 16: 9.0}
    peaks = {8: 1e9, 12: 3e9, 16: 9e9} | {int(key[1:]): size for key, size in gigabytes.items()}
    return [steps.BatchSize(size, rate, peaks[size]) for size, rate in rates.items()]


def energy(joules: float) -> finished_runs.RunEnergy:
    return finished_runs.RunEnergy(joules, 2340.0, 15, 0.227)


def gpu_run(device: str) -> finished_runs.GpuRun:
    return finished_runs.GpuRun(5, 2.33, 0.123, {device})


SHARES = steps.PUBLISHED_SHARES

HOLDING_AND_FAILING: dict[int, list[tuple[Any, Any]]] = {
    1: [((product(0.4), product(0.5)), (product(0.5), product(0.4)))],
    2: [((1.0, 2.0), (1.0, 1.0))],
    3: [(step(1.0, 1.1), step(1.0, 0.9))],
    4: [((step(1, 2), step(2, 1)), (step(2, 1), step(2, 1)))],
    5: [(transfer(1e-5), transfer(1e-3))],
    6: [({"float32": 1.0, "bfloat16": 1.05}, {"float32": 1.0, "bfloat16": 0.5})],
    7: [(SHARES, SHARES | {"forward": 0.30, "backward": 0.613})],
    8: [(memory(), memory(parameters=307, activations=2_000))],
    9: [(steps.CheckpointSize(921_000_000, 76_735_489), steps.CheckpointSize(307_000_000, 1))],
    10: [({4: 1.1, 8: 1.0}, {4: 1.0, 8: 1.1})],
    11: [((1.1, 1.0), (1.0, 1.0))],
    12: [(batches(), batches(_16=4e9))],
    13: [({1: 0.07, 15: 0.18}, {1: 0.07, 15: 0.07})],
    14: [({"image.0": 0.015, "text.0": 0.042}, {"image.0": 0.015, "text.0": 0.5})],
    15: [({"easy": 0.95, "medium": 0.28, "hard": 0.08}, {"easy": 0.2, "medium": 0.28, "hard": 0.08})],
    16: [(steps.Bandwidth(30e9, 60e9, 1), steps.Bandwidth(59e9, 60e9, 1))],
    17: [(energy(81_900.0), energy(8_190.0))],
    18: [(finished_runs.RunHeat(72.0, False), finished_runs.RunHeat(71.0, True))],
    19: [(76_735_489, 105_426_433)],
    20: [((1 / 16, 16), (1 / 12, 12))],
    21: [(operations.MaskTrial([], {"scripting a .bool() mask": "no"}), operations.MaskTrial(["all"]))],
    22: [("numbers differ on the way", None)],
    23: [(steps.HalvedBatch(3 * 10**9, 0.5), steps.HalvedBatch(9 * 10**9, 0.5))],
    24: [(gpu_run("mps"), gpu_run("cpu"))],
    25: [(step(1.7, 1.0), step(9.0, 1.0))],
    26: [(transfer(2.0, 1.0), transfer(1.0, 1.0))],
    27: [((0.74, 0.74), (0.50, 0.74))],
    28: [(8.75, 22.75)],
    29: [((8, 0), (4, 4))],
    30: [(operations.LayoutSeconds(1.0, 1.1), operations.LayoutSeconds(1.0, 1.0))],
}  # fmt: skip


@pytest.mark.parametrize("number", HOLDING_AND_FAILING)
def test_each_verdict_has_two_sides(number: int) -> None:
    judge = CHECKS[number].judge
    for holding, failing in HOLDING_AND_FAILING[number]:
        assert judge(holding).verdict == HOLDS
        assert judge(failing).verdict == FAILS
        assert judge(holding).here != judge(failing).here


def test_there_are_thirty_claims_and_each_has_a_function() -> None:
    assert [claim.number for claim in read_claims()] == list(range(1, 31))
    assert list(CHECKS) == list(HOLDING_AND_FAILING) == list(range(1, 31))
    assert len({check.judge for check in CHECKS.values()}) == 30
    assert {claim.kind for claim in read_claims()} == {
        "machine",
        "accelerator",
        "run",
        "arithmetic",
    }


def test_reasons_name_what_the_public_source_explains() -> None:
    with_background = {
        claim.number: claim.background for claim in read_claims() if claim.background
    }
    assert with_background.keys() == {15, 20, 24}
    assert all("\n" not in text and "  " not in text for text in with_background.values())
    (row,) = claims.measure_claims([20], tiny_bench())
    assert row["reason"].startswith(
        "1/12 is 8.3%; 1/16 belongs to batches of 16; the published 14.6 %"
    )
    assert "another alphabet" in row["reason"]
    (row,) = claims.measure_claims([28], tiny_bench())
    assert row["reason"].endswith("battery of that machine")


def test_the_background_of_the_chance_claim_is_arithmetic() -> None:
    """7 of 48 answers by guessing, and categories told apart in batches of 12 and 16."""
    guessing = sum(math.comb(48, right) * 11 ** (48 - right) / 12**48 for right in range(7, 49))
    assert pytest.approx(0.146, abs=5e-4) == 7 / 48
    assert guessing == pytest.approx(0.1, abs=0.005)
    assert pytest.approx(0.323, abs=5e-4) == 4 / 12 * (1 - 0.75**12)
    assert pytest.approx(0.25, abs=0.005) == 4 / 16 * (1 - 0.75**16)


@pytest.mark.slow
def test_every_claim_is_measured_on_a_machine_without_accelerator_and_without_runs(
    here: Path,
) -> None:
    steps: list[tuple[int, int, str]] = []
    rows = claims.measure_claims(bench=tiny_bench(), progress=lambda *what: steps.append(what))
    assert [one["number"] for one in rows] == list(range(1, 31))
    for one in rows:
        assert one.keys() == {"number", "claim", "published", "here", "verdict", "reason"}
        assert (one["here"] is None) == (one["verdict"] == UNKNOWN), one
        assert "measurement failed" not in one["reason"], one
        assert one["reason"]
        if one["number"] in (1, 2, 3, 4, 5, 25, 26):  # nothing stands in for the accelerator
            assert one["verdict"] == UNKNOWN
            assert "torch finds no accelerator here" in one["reason"]
    kinds = {claim.number: claim.kind for claim in read_claims()}
    open_ones = {one["number"] for one in rows if one["verdict"] == UNKNOWN}
    assert open_ones <= {
        number for number, kind in kinds.items() if kind in ("accelerator", "run")
    } | {10}
    assert steps[1] == (1, 30, f"1. {read_claims()[0].claim}")
    assert {int(what.split(".")[0]) for _, _, what in steps[:-1]} == set(range(1, 31))
    assert steps[-1] == (30, 30, "")


@pytest.mark.slow
def test_the_claims_about_an_accelerator_take_any_device() -> None:
    """The CPU in its place shows that the functions run; on a real one the same code is called."""
    bench = tiny_bench(accelerator=Cpu())
    for number in (1, 2, 3, 4, 5, 25):
        assert check_claim(number, bench).here is not None
    assert check_claim(26, bench).reason == "this device copies from no pinned memory"


def test_transfers_are_judged_where_memory_is_shared_only(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = operations.Transfer(1e-5, None, shares_memory=False)
    check = replace(CHECKS[5], measure=lambda bench: elsewhere)
    monkeypatch.setitem(CHECKS, 5, check)
    finding = check_claim(5, tiny_bench())
    assert finding.verdict == UNKNOWN
    assert finding.here is None


def test_threads_are_judged_on_four_and_four_cores_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps.os, "cpu_count", lambda: 16)
    assert check_claim(10, tiny_bench()).verdict == UNKNOWN


def test_a_larger_model_has_a_larger_checkpoint_and_more_memory() -> None:
    deep = replace(TINY, image_layers=4, text_layers=4)
    sizes = [check_claim(9, tiny_bench(shape=shape)).here for shape in (TINY, deep)]
    megabytes = [float(str(here).split(" MB")[0]) for here in sizes]
    assert megabytes[1] > 1.5 * megabytes[0]
    assert count_parameters(deep) > 1.5 * count_parameters(TINY)


def test_a_batch_twice_as_large_is_predicted_to_hold_more() -> None:
    bench = tiny_bench()
    bench.__dict__["memory"] = memory()
    assert steps.predict_peak(bench, 12) == bench.memory.peak
    assert steps.predict_peak(bench, 24) == bench.memory.peak + 100 * 10**6


def test_chance_follows_the_batch_and_halves_are_not_the_whole() -> None:
    assert arithmetic.measure_chance(tiny_bench())[0] == pytest.approx(1 / 12, abs=0.015)
    assert arithmetic.measure_chance(tiny_bench(batch=4))[0] == pytest.approx(1 / 4, abs=0.03)
    assert steps.compare_halves(tiny_bench()) < 0.999


def test_a_mask_is_judged_by_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "attend_with_cast_mask", operations.attend_with_bool_mask)
    finding = check_claim(21, tiny_bench())
    assert finding.verdict == FAILS
    assert "works: scripting a .bool() mask, scripting a bool mask" in str(finding.here)
    monkeypatch.setattr(
        operations,
        "attend_with_cast_mask",
        lambda *tensors: operations.attend_with_bool_mask(*tensors) + 1,
    )
    finding = check_claim(21, tiny_bench())
    assert finding.verdict == HOLDS
    assert "scripting a .bool() mask: " in str(finding.here)


def test_a_measurement_that_fails_leaves_the_others_standing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Bench) -> Finding:
        raise MemoryError("none left\nsecond line")

    monkeypatch.setitem(CHECKS, 27, replace(CHECKS[27], measure=fail))
    rows = claims.measure_claims([19, 27, 28], tiny_bench())
    assert [one["verdict"] for one in rows] == [FAILS, UNKNOWN, FAILS]
    assert rows[1]["reason"] == "the measurement failed: MemoryError: none left"


def test_an_unknown_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="no claim 31"):
        claims.measure_claims([31], tiny_bench())


def test_negatives_are_graded_by_their_differences() -> None:
    scenes = split_scenes(2, 0)["val"]
    alike_II = np.array(
        [[5 - one.differences(other) for other in scenes] for one in scenes], dtype=float
    )
    confused_II = np.where(
        alike_II >= 4, 5.0, alike_II
    )  # cannot tell scenes that differ in one attribute
    assert set(finished_runs.accuracy_by_difficulty(alike_II, scenes).values()) == {1.0}
    graded = finished_runs.accuracy_by_difficulty(confused_II, scenes)
    assert graded["hard"] == 0.0
    assert graded["easy"] == 1.0


def test_claims_about_a_run_read_the_newest_finished_one_of_the_recipes_length_and_shape(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {
        "model.name": '"tiny"',
        "data.train_pairs": 24,
        "train.epochs": 5,
        "train.batch_size": 12,
    }
    (here / "recipes").mkdir()
    (here / "recipes" / "seed.toml").write_text(
        "".join(f"{name} = {value}\n" for name, value in recipe.items())
    )
    monkeypatch.setattr("lapclip.config.RECIPES", here / "recipes")
    plain = [one for one in SMALL if one.split("=")[0] not in {*recipe, "train.steps"}]
    train("seed", [*plain, "train.steps=3"], name="short")
    text = (here / "runs" / "short" / "events.jsonl").read_text()
    for name, change in (
        ("small", ("text_layers", 9)),
        ("few", ("train_pairs", 9)),
        ("batches", ("batch_size", 9)),
    ):
        shutil.copytree(here / "runs" / "short", here / "runs" / name)
        changed = re.sub(rf'"{change[0]}":\d+', f'"{change[0]}":{change[1]}', text).replace(
            '"step":3', '"step":10'
        )
        (here / "runs" / name / "events.jsonl").write_text(changed)
    numbers = (13, 14, 15, 17, 18)
    bench = tiny_bench()
    for number in numbers:
        assert "lapclip train --recipe seed" in check_claim(number, bench).reason
    for name in ("older", "newer"):
        train("seed", plain, name=name)
    os.utime(here / "runs" / "short" / "run.toml")
    rows = {number: check_claim(number, bench) for number in numbers}
    for number in (13, 14, 15):
        assert rows[number].here is not None
    assert finished_runs.find_finished_run("seed").name == "newer"
    assert "recorded no energy" in rows[17].reason or rows[17].here is not None
    events = here / "runs" / "newer" / "events.jsonl"
    changed = [json.loads(line) for line in events.read_text().splitlines()]
    for event in changed:
        if event["type"] == "step":
            event["temperature"] = 0.07 + event["step"] / 100
    sensed = next(event for event in changed if event["type"] == "sensors")
    lines = [
        json.dumps(event)
        for event in (*changed[:-1], {**sensed, "joules": {"package": 9e4}, "celsius": 70.0})
    ]
    events.write_text("\n".join([*lines, json.dumps(changed[-1])]) + "\n")
    assert check_claim(13, bench).verdict == HOLDS
    assert "at most 70 C" in str(check_claim(18, bench).here)
    assert "J an epoch" in str(check_claim(17, bench).here)


def test_the_command_measures_some_and_prints_json(here: Path) -> None:
    done = lapclip("claims", "--only", "19", "28", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["claims"]
    assert [one["number"] for one in rows] == [19, 28]
    assert "105,426,433" in rows[0]["here"]
    assert "The model as written" in done.stderr  # what is measured is named while it is


def test_the_command_prints_a_table(here: Path) -> None:
    done = lapclip("claims", "--only", "27", "--only", "29")
    assert done.returncode == 0, done.stderr
    assert "does not" in done.stdout
    assert "Next: " in done.stdout


def test_an_unknown_claim_is_refused_in_a_few_lines(here: Path) -> None:
    refused = lapclip("claims", "--only", "99")
    assert refused.returncode == 2
    assert "no claim 99" in refused.stderr
    assert "Traceback" not in refused.stderr
