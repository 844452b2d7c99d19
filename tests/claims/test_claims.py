"""The claims: each has a function, each verdict has two sides, and the figures move with what is measured."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lapclip import claims
from lapclip.claims import judge, measured_claims, run_claims
from lapclip.claims.judge import FAILS, HOLDS, UNKNOWN, Finding, all_claims, unknown
from lapclip.claims.measured_claims import Bench, parameters
from lapclip.commands.train import train
from lapclip.data.scenes import split_scenes
from lapclip.errors import ConfigError
from lapclip.machine.cpu import Cpu
from lapclip.microscope.device_speed import ManyProducts, ProductParts, TransferTimes
from lapclip.model.shapes import SHAPES
from lapclip.tuning.memory_probe import StepMemory

from ..conftest import SMALL, lapclip

TINY = SHAPES["tiny"]


def tiny_bench(**changes) -> Bench:
    sizes = {
        "shape": TINY,
        "larger": TINY,
        "small": TINY,
        "batches": (8, 12),
        "turns": 1,
        "loss_steps": 6,
    }
    return Bench(
        **{**sizes, "copy_bytes": 1 << 20, "product_size": 64, "accelerator": None, **changes}
    )


def memory(**changes: int) -> StepMemory:
    parts = {
        "process": 0,
        "parameters": 2_500,
        "gradients": 300,
        "optimizer": 100,
        "activations": 50,
        "rest": 50,
    }
    parts = {name: size * 10**6 for name, size in (parts | changes).items()}
    return StepMemory(peak=sum(parts.values()), traffic=0, **parts)


def product(total: float) -> ProductParts:
    return ProductParts(512, 1.0, 0.1, 0.1, 0.1, total - 0.3, total, 1.0)


def hundred(seconds: float) -> ManyProducts:
    return ManyProducts(512, 100, seconds, 1.0)


PUBLISHED = {"float32": 1.0}

BOTH_SIDES: list[tuple[Callable[..., Finding], tuple, tuple]] = [
    (judge.one_product, (product(0.4), product(0.5)), (product(0.5), product(0.4))),
    (judge.hundred_products, (hundred(1.0), hundred(2.0)), (hundred(1.0), hundred(1.0))),
    (judge.cpu_trains_faster, (1.0, 1.1, 10**6, 12), (1.0, 0.9, 10**6, 12)),
    (judge.three_thresholds, ((1, 2), (2, 1), ("a", "b")), ((2, 1), (2, 1), ("a", "b"))),
    (judge.free_transfers, (TransferTimes(1e-5, None), True), (TransferTimes(1e-3, None), True)),
    (judge.half_precision, (PUBLISHED | {"bfloat16": 1.05}, PUBLISHED | {"float16": 2.0}, {}),
     (PUBLISHED | {"bfloat16": 0.5}, PUBLISHED | {"float16": 2.0}, {})),
    (judge.half_precision, (PUBLISHED | {"bfloat16": 1.0}, PUBLISHED | {"float16": 1.0}, {}),
     (PUBLISHED | {"bfloat16": 1.0}, PUBLISHED | {"float16": 0.5}, {})),
    (judge.batch_shares, (judge.PUBLISHED_SHARES, 8.0),
     (judge.PUBLISHED_SHARES | {"forward": 0.30, "backward": 0.613}, 8.0)),
    (judge.peak_memory, (memory(),), (memory(parameters=307, activations=2_000),)),
    (judge.checkpoint_size, (921_000_000, 76_735_489), (307_000_000, 76_735_489)),
    (judge.best_threads, ({4: 1.1, 8: 1.0},), ({4: 1.0, 8: 1.1},)),
    (judge.workers_pay, (1.1, 1.0, 0.1), (1.0, 1.0, 0.1)),
    (judge.best_batch, ({8: 2.0, 12: 3.0, 16: 9.0}, {8: 1e9, 12: 3e9, 16: 9e9}),
     ({8: 2.0, 12: 3.0, 16: 9.0}, {8: 1e9, 12: 3e9, 16: 4e9})),
    (judge.bandwidth, (30e9, 1.0, 60e9), (59e9, 1.0, 60e9)),
    (judge.accumulation, (3 * 10**9, 0.5), (9 * 10**9, 0.5)),
    (judge.larger_models, (1.7, 1.0, 10**8), (9.0, 1.0, 10**8)),
    (judge.pinning, (TransferTimes(2.0, 1.0),), (TransferTimes(1.0, 1.0),)),
    (judge.contiguous, (1.0, 1.1), (1.0, 1.0)),
    (measured_claims.count_verdict, (76_735_489, 1), (105_426_433, 1)),
    (measured_claims.chance_verdict, (1 / 16, 16), (1 / 12, 12)),
    (measured_claims.slope_verdict, (3.25, 2.51, 0.25, 0.12), (3.25, 2.75, 0.25, 0.12)),
    (measured_claims.battery_verdict, (35.0, 0.25, 58.2), (35.0, 0.65, 58.2)),
    (measured_claims.cores_verdict, (8, 0), (4, 4)),
    (run_claims.temperature_verdict, ({1: 0.07, 15: 0.18}, "run"), ({1: 0.07, 15: 0.07}, "run")),
    (run_claims.balance_verdict, ({"image.0": 0.015, "text.0": 0.042}, 10, "run"),
     ({"image.0": 0.015, "text.0": 0.5}, 10, "run")),
    (run_claims.negatives_verdict, ({"easy": 0.95, "medium": 0.28, "hard": 0.08}, "run"),
     ({"easy": 0.2, "medium": 0.28, "hard": 0.08}, "run")),
    (run_claims.energy_verdict, (81_900.0, 2340.0, 15, 0.227, "run"), (8_190.0, 2340.0, 15, 0.227, "run")),
    (run_claims.heat_verdict, (72.0, False, "run"), (71.0, True, "run")),
    (run_claims.gpu_run_verdict, (2.33, 0.123, {"mps"}, 5, "run"), (2.33, 0.123, {"cpu"}, 5, "run")),
]  # fmt: skip


@pytest.mark.parametrize(("verdict", "holding", "failing"), BOTH_SIDES)
def test_each_verdict_has_two_sides(
    verdict: Callable[..., Finding], holding: tuple, failing: tuple
) -> None:
    assert verdict(*holding).verdict == HOLDS
    assert verdict(*failing).verdict == FAILS
    assert verdict(*holding).here != verdict(*failing).here or verdict is judge.best_batch


def test_there_are_thirty_claims_and_each_has_a_function() -> None:
    assert [claim.number for claim in all_claims()] == list(range(1, 31))
    assert list(claims.MEASURES) == list(range(1, 31))
    assert len(set(claims.MEASURES.values())) == 30
    assert {claim.kind for claim in all_claims()} == {"machine", "accelerator", "run", "arithmetic"}


def test_a_figure_stands_exactly_where_there_is_a_verdict() -> None:
    assert unknown("why").here is None
    with pytest.raises(AssertionError):
        Finding(None, HOLDS, "why")
    with pytest.raises(AssertionError):
        Finding("3", UNKNOWN, "why")


def test_reasons_name_what_the_public_source_explains() -> None:
    with_background = {claim.number: claim.background for claim in all_claims() if claim.background}
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
            assert measured_claims.ABSENT in one["reason"]
    kinds = {claim.number: claim.kind for claim in all_claims()}
    open_ones = {one["number"] for one in rows if one["verdict"] == UNKNOWN}
    assert open_ones <= {
        number for number, kind in kinds.items() if kind in ("accelerator", "run")
    } | {10}
    assert steps[1] == (1, 30, f"1. {all_claims()[0].claim}")
    assert {int(what.split(".")[0]) for _, _, what in steps[:-1]} == set(range(1, 31))
    assert steps[-1] == (30, 30, "")


@pytest.mark.slow
def test_the_claims_about_an_accelerator_take_any_device() -> None:
    """The CPU in its place shows that the functions run; on a real one the same code is called."""
    bench = tiny_bench(accelerator=Cpu())
    for number in (1, 2, 3, 4, 5, 25):
        assert claims.MEASURES[number](bench).here is not None
    assert claims.MEASURES[26](bench).reason == "this device copies from no pinned memory"


def test_transfers_are_judged_by_who_owns_the_memory() -> None:
    free, slow = TransferTimes(1e-5, None), TransferTimes(1e-3, None)
    assert judge.free_transfers(slow, shared=True).verdict == FAILS
    assert judge.free_transfers(free, shared=True).verdict == HOLDS
    assert judge.free_transfers(free, shared=False).verdict == UNKNOWN


def test_threads_are_judged_on_four_and_four_cores_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_claims.os, "cpu_count", lambda: 16)
    assert measured_claims.best_threads(tiny_bench()).verdict == UNKNOWN
    monkeypatch.setattr(measured_claims.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(measured_claims, "default_threads", lambda: 4)
    assert "8 threads" in str(measured_claims.best_threads(tiny_bench()).here)


def test_a_larger_model_has_a_larger_checkpoint_and_more_memory() -> None:
    deep = dataclasses.replace(TINY, image_layers=4, text_layers=4)
    sizes = [
        measured_claims.checkpoint_size(tiny_bench(shape=shape)).here for shape in (TINY, deep)
    ]
    megabytes = [float(str(here).split(" MB")[0]) for here in sizes]
    assert megabytes[1] > 1.5 * megabytes[0]
    assert parameters(deep) > 1.5 * parameters(TINY)


def test_a_batch_twice_as_large_is_predicted_to_hold_more() -> None:
    bench = tiny_bench()
    bench.__dict__["memory"] = memory()
    assert measured_claims.predicted_peak(bench, 12) == bench.memory.peak
    assert measured_claims.predicted_peak(bench, 24) == bench.memory.peak + 100 * 10**6


def test_chance_follows_the_batch_and_halves_are_not_the_whole() -> None:
    assert measured_claims.random_accuracy(12) == pytest.approx(1 / 12, abs=0.015)
    assert measured_claims.random_accuracy(4) == pytest.approx(1 / 4, abs=0.03)
    assert measured_claims.halves_cosine(tiny_bench()) < 0.999


def test_a_mask_is_judged_by_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_claims, "_cast_attention", measured_claims._masked_attention)
    finding = measured_claims.attention_mask(tiny_bench())
    assert finding.verdict == FAILS
    assert "works: scripting a .bool() mask, scripting a bool mask" in str(finding.here)
    monkeypatch.setattr(
        measured_claims,
        "_cast_attention",
        lambda *tensors: measured_claims._masked_attention(*tensors) + 1,
    )
    finding = measured_claims.attention_mask(tiny_bench())
    assert finding.verdict == HOLDS
    assert "scripting a .bool() mask: " in str(finding.here)


def test_a_measurement_that_fails_leaves_the_others_standing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Bench) -> Finding:
        raise MemoryError("none left\nsecond line")

    monkeypatch.setitem(claims.MEASURES, 27, fail)
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
    assert set(run_claims.accuracy_by_difficulty(alike_II, scenes).values()) == {1.0}
    graded = run_claims.accuracy_by_difficulty(confused_II, scenes)
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
        assert "lapclip train --recipe seed" in claims.MEASURES[number](bench).reason
    for name in ("older", "newer"):
        train("seed", plain, name=name)
    os.utime(here / "runs" / "short" / "run.toml")
    rows = {number: claims.MEASURES[number](bench) for number in numbers}
    for number in (13, 14, 15):
        assert rows[number].here is not None
        assert "run newer" in rows[number].reason
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
    assert run_claims.temperature(bench).verdict == HOLDS
    assert "at most 70 C" in str(run_claims.heat(bench).here)
    assert "J an epoch" in str(run_claims.energy(bench).here)


def test_the_command_measures_some_and_prints_json(here: Path) -> None:
    done = lapclip("claims", "--only", "19", "28", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["claims"]
    assert [one["number"] for one in rows] == [19, 28]
    assert "105,426,433" in rows[0]["here"]
    assert "The model as written" in done.stderr  # what is measured is named while it is


def test_the_command_prints_a_table_and_writes_markdown(here: Path) -> None:
    done = lapclip("claims", "--only", "27", "--only", "29", "--markdown", "table.md")
    assert done.returncode == 0, done.stderr
    assert "does not" in done.stdout
    assert "Next: " in done.stdout
    text = (here / "table.md").read_text()
    assert text.count("\n") == 6
    assert "| 29 |" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "99"], "no claim 99"),
        (["--only", "28", "--markdown", "file/table.md"], "Cannot write file"),
    ],
)
def test_bad_input_is_refused_in_a_few_lines(here: Path, arguments: list[str], words: str) -> None:
    (here / "file").touch()
    refused = lapclip("claims", *arguments)
    assert refused.returncode == 2
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr
