"""What a run is made of before it has a folder."""

from __future__ import annotations

import dataclasses
import threading
import tomllib
from pathlib import Path

import pytest

from lapclip.data.dataset import Pairs
from lapclip.embedder import Embedder
from lapclip.errors import ConfigError
from lapclip.machine.choose_device import choose_device
from lapclip.machine.cpu import Cpu
from lapclip.runs.events import read_events
from lapclip.training import minutes, preparation, run_parts
from lapclip.training.run_parts import RunParts
from lapclip.training.step import TrainStep

from ..conftest import SMALL
from ..small_runs import prepared, train

RARELY, EACH = "train.evaluate_every_epochs=1000000", "train.evaluate_every_epochs=1"


def fix_prices(patch: pytest.MonkeyPatch, *seconds: float) -> None:
    for name, price in zip(("step", "loading", "evaluation", "final_scores"), seconds, strict=True):
        patch.setattr(minutes, f"time_{name}", lambda *_, price=price: price)


def test_minutes_become_steps_once(here: Path) -> None:
    outcome = train("first-run", [*SMALL, "train.steps=0"], minutes=0.05, name="run")
    settings = tomllib.loads((here / "runs/run/run.toml").read_text())
    assert settings["train"]["steps"] == outcome.steps > 1
    assert settings["reasons"]["train.steps"].startswith("0.05 minutes at")
    with pytest.raises(ConfigError, match=r"train\.steps and train\.minutes are both set"):
        train("first-run", SMALL, minutes=1.0)


@pytest.mark.parametrize(
    ("settings", "limit", "seconds", "steps", "every"),
    [
        # seconds: of a step, of loading a batch, of an evaluation, of the final scores
        ([RARELY], 1.0, (1.0, 0.0, 10.0, 0.0), 50, 10**6),
        ([RARELY], 1.0, (1.0, 0.0, 10.0, 20.0), 30, 10**6),
        ([RARELY], 1.0, (1.0, 2.0, 10.0, 0.0), 25, 10**6),
        ([RARELY], 1.0, (1.0, 0.0, 10.0, 90.0), 1, 10**6),
        # An epoch is one step: not all epochs are evaluated, unless the user wants that.
        (["train.batch_size=64"], 2.0, (0.1, 0.0, 0.4, 0.0), 1055, 30),
        (["train.batch_size=64", EACH], 2.0, (0.1, 0.0, 0.4, 0.0), 239, 1),
    ],
)
def test_minutes_count_loading_evaluations_and_the_final_scores(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
    limit: float,
    seconds: tuple[float, ...],
    steps: int,
    every: int,
) -> None:
    fix_prices(monkeypatch, *seconds)
    train = prepared("first-run", [*SMALL, "train.steps=0", *settings], limit).config.train
    assert train.steps == pytest.approx(steps, abs=1)
    assert train.evaluate_every_epochs == every


def test_minutes_that_are_too_few_or_stand_beside_epochs_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fix_prices(monkeypatch, 0.5, 0.0, 1.0, 2.0)
    setup = prepared("first-run", [*SMALL, RARELY, "train.steps=0", "train.epochs=3"], 0.01)
    assert setup.notes == [
        "0.01 minutes are enough for 1 step; 40 or more are better, and take about 0.4 minutes",
        "train.epochs is not used: the run is to take 0.01 minutes",
    ]


@pytest.mark.parametrize(
    ("settings", "limit", "times"),
    [
        ([], None, 1),
        (
            ["train.steps=0"],
            0.01,
            3,
        ),  # for the features, for timing, and with the steps that were found
        (
            [
                "train.start={trained}",
                "train.image_blocks=0",
                "train.text_blocks=0",
                "train.views=1",
            ],
            None,
            1,
        ),
    ],
)
def test_the_model_is_built_once_and_the_plan_is_complete(
    here: Path,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
    limit: float | None,
    times: int,
) -> None:
    built, build = [], run_parts.build
    monkeypatch.setattr(run_parts, "build", lambda *given: built.append(given) or build(*given))
    asked = [setting.format(trained=trained) for setting in settings]
    setup = prepared(
        "first-run",
        [*SMALL[1:], *([] if trained.name in "".join(asked) else SMALL[:1]), *asked],
        limit,
    )
    assert len(built) == times
    batch = setup.plan.batch(1)
    assert (
        (batch.image_features is not None)
        == (setup.features is not None)
        == (setup.initial_weights is not None)
    )
    assert setup.step.model is setup.embedder.model
    assert {
        field.name for field in dataclasses.fields(setup) if getattr(setup, field.name) is None
    } <= {
        "initial_weights",
        "teacher",
        "tuned_seconds",
        "features",
    }


@pytest.mark.parametrize(("share", "seconds"), [(0.0, 3.0), (0.2, 2.6), (0.5, 2.0), (1.0, 1.0)])
def test_minutes_count_the_cheap_part_at_its_own_price(
    here: Path, monkeypatch: pytest.MonkeyPatch, share: float, seconds: float
) -> None:
    trial = prepared(
        "first-run", [*SMALL, "train.cheap_size=16", "train.steps=2", "train.cheap_share=0.5"], None
    )

    def price(trial: RunParts, number: int) -> float:
        assert isinstance(trial.step, TrainStep)
        return 1.0 if trial.step.inputs(trial.plan.batch(1), number).side == 16 else 3.0

    monkeypatch.setattr(minutes, "time_step", price)
    assert minutes.time_mean_step(trial, share) == pytest.approx(seconds)


def test_the_last_scores_are_timed_through_whole_towers(
    here: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = ["train.image_blocks=0", "train.text_blocks=0", "train.views=1"]
    parts = prepared("first-run", [*SMALL[1:], f"train.start={trained}", *frozen])
    counted: list[tuple[type, int]] = []

    def score(embedder: Embedder, pairs: Pairs, batch_size: int) -> None:
        counted.append((type(embedder), len(pairs)))

    monkeypatch.setattr(minutes, "score", score)
    monkeypatch.setattr(minutes, "TIMED_PAIRS", 50)
    minutes.time_final_scores(parts)
    assert counted == [(Embedder, 50)]
    # The best model, the start, and the calibration on val.
    assert minutes.count_final_passes(parts) == 3


def test_a_run_says_how_long_each_phase_before_it_took(here: Path) -> None:
    train("first-run", SMALL, name="run")
    (begun,) = [
        event for event in read_events(here / "runs/run/events.jsonl") if event["type"] == "started"
    ]
    phases = begun["set_up_seconds"]
    assert list(phases) == ["settings", "data", "device", "model", "folder"]
    assert all(seconds >= 0 for seconds in phases.values())


def test_an_accelerator_is_examined_beside_the_making_of_data(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, str] = {}

    class Found(Cpu):
        is_cpu = False

        def warm_up(self) -> None:
            threads["device"] = threading.current_thread().name

    monkeypatch.setattr(preparation, "find_device", lambda asked: Found())
    monkeypatch.setattr(preparation, "candidates", lambda train: [Found()])
    prepared("first-run", SMALL, None)
    assert threads["device"].startswith("lapclip-device")
    monkeypatch.setattr(preparation, "candidates", lambda train: choose_device("nonesuch"))
    with pytest.raises(ConfigError, match="is not here"):
        prepared("first-run", SMALL, None)
