"""What a run is made of before it has a folder."""

from __future__ import annotations

import dataclasses
import re
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


def test_minutes_become_steps_once(here: Path) -> None:
    outcome = train("first-run", [*SMALL, "train.steps=0"], minutes=0.05, name="run")
    settings = tomllib.loads((here / "runs/run/run.toml").read_text())
    assert settings["train"]["steps"] == outcome.steps > 1
    assert settings["reasons"]["train.steps"].startswith("0.05 minutes at")
    with pytest.raises(ConfigError, match=r"train\.steps and train\.minutes are both set"):
        train("first-run", SMALL, minutes=1.0)


def test_short_epochs_are_not_all_evaluated_within_minutes(here: Path) -> None:
    short = [*SMALL, "train.steps=0", "train.batch_size=64"]  # an epoch is one step
    setup = prepared("first-run", short, 2.0)
    steps, every = setup.config.train.steps, setup.config.train.evaluate_every_epochs
    assert 1 < steps / every <= minutes.MAX_EVALUATIONS + 1
    asked = prepared("first-run", [*short, "train.evaluate_every_epochs=1"], 2.0)
    assert asked.config.train.evaluate_every_epochs == 1


def test_minutes_that_are_too_few_or_stand_beside_epochs_are_said() -> None:
    settings = [*SMALL, "train.steps=0", "train.epochs=3"]
    setup = prepared("first-run", settings, 0.0001)
    assert setup.config.train.steps == 1
    few, epochs = setup.notes
    assert epochs == "train.epochs is not used: the run is to take 0.0001 minutes"
    assert few.startswith("0.0001 minutes are enough for 1 step; ")
    least = max(
        2 * setup.plan.steps_per_epoch, minutes.MIN_STEPS
    )  # two epochs of this are eight steps
    assert re.search(rf"; {least} or more are better, and take about 0\.\d minutes$", few)


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


@pytest.mark.parametrize(
    ("loading_seconds", "final_seconds", "steps"),
    [(0.0, 0.0, 50), (0.0, 20.0, 30), (2.0, 0.0, 25), (0.0, 90.0, 1)],
)
def test_minutes_count_loading_and_the_last_scores(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    loading_seconds: float,
    final_seconds: float,
    steps: int,
) -> None:
    monkeypatch.setattr(minutes, "time_step", lambda trial, number: 1.0)
    monkeypatch.setattr(minutes, "time_loading", lambda trial: loading_seconds)
    monkeypatch.setattr(minutes, "time_evaluation", lambda trial: 10.0)
    monkeypatch.setattr(minutes, "time_final_scores", lambda trial: final_seconds)
    own = ["train.steps=0", "train.evaluate_every_epochs=1000000"]
    assert prepared("first-run", [*SMALL, *own], 1.0).config.train.steps == pytest.approx(
        steps, abs=1
    )


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
