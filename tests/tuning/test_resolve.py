from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lapclip.cli import tune as tuning_command
from lapclip.commands import choose_recipe
from lapclip.commands.tune import tune
from lapclip.config import AUTO, DataConfig, replace_in
from lapclip.data.batches import BatchPlan, prefetch
from lapclip.data.sources.built_in import load_scenes
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.errors import ConfigError
from lapclip.machine import other_programs
from lapclip.runs.folder import find_run
from lapclip.tuning import resolve
from lapclip.tuning.resolve import choose_loader_threads
from lapclip.tuning.tune import Tuning

from ..conftest import lapclip
from ..small_runs import photos, train
from .made import CONFIG, Clock, batch_of

SMALL_RUN = [
    "model.name=tiny",
    "data.train_pairs=64",
    "data.tokenizer=characters",
    "train.batch_size=16",
    "train.steps=12",
    "train.optimizer=adamw",
    "train.word_weight=0.0",
    "train.device=cpu",
]


@pytest.fixture(autouse=True)
def nothing_remembered(cache: Path) -> Iterator[None]:
    yield
    resolve.MEMORY.file.path.unlink(missing_ok=True)


def test_a_tuning_is_remembered_for_the_same_model_batch_and_wishes(tuning: Tuning) -> None:
    batch = batch_of()
    assert resolve.recall(CONFIG, batch) is None
    resolve.remember(CONFIG, batch, tuning, 5.0)
    assert resolve.recall(CONFIG, batch) == tuning
    assert resolve.recall(replace_in(CONFIG, "train", dtype="float32"), batch) is None
    assert resolve.recall(replace_in(CONFIG, "train", batch_size=4), batch_of(4)) is None
    assert resolve.recall(CONFIG, batch, budget_seconds=10.0) == tuning
    assert (
        resolve.recall(CONFIG, batch, budget_seconds=11.0) is None
    )  # so much more may be spent now that it is worth it


def test_compiling_that_paid_in_a_longer_run_is_not_recalled_for_a_shorter_one(
    tuning: Tuning,
) -> None:
    batch = batch_of()
    compiled = dataclasses.replace(
        tuning, setting=dataclasses.replace(tuning.setting, compile="compiled")
    )
    resolve.remember(CONFIG, batch, compiled, 5.0)
    assert resolve.recall(CONFIG, batch) == compiled
    assert resolve.recall(replace_in(CONFIG, "train", steps=99), batch) is None


@pytest.mark.parametrize("text", ["[", "[]", '"x"', "{"])
def test_a_damaged_cache_is_ignored_with_a_warning(
    tuning: Tuning, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    resolve.MEMORY.file.path.write_text(text)
    assert resolve.recall(CONFIG, batch_of()) is None
    assert "damaged" in capsys.readouterr().err
    resolve.remember(CONFIG, batch_of(), tuning, 5.0)
    assert resolve.recall(CONFIG, batch_of()) is not None


def test_a_form_that_is_not_here_any_more_is_tuned_again(tuning: Tuning) -> None:
    setting = dataclasses.replace(tuning.setting, device="cpu", linear="triton")
    resolve.remember(CONFIG, batch_of(), dataclasses.replace(tuning, setting=setting), 5.0)
    assert resolve.recall(CONFIG, batch_of()) is None


def test_a_page_with_other_fields_is_ignored(tuning: Tuning) -> None:
    resolve.remember(CONFIG, batch_of(), tuning, 5.0)
    pages = json.loads(resolve.MEMORY.file.path.read_text())
    for page in pages.values():
        del page["tuning"]["setting"]["dtype"]
        page["tuning"]["setting"]["colour"] = "red"
    resolve.MEMORY.file.path.write_text(json.dumps(pages))
    assert resolve.recall(CONFIG, batch_of()) is None


def test_short_runs_are_not_tuned_and_long_ones_spend_a_twentieth_at_most() -> None:
    batch = batch_of()
    assert resolve.seconds_to_spend(CONFIG, batch) == 0
    assert resolve.seconds_to_spend(replace_in(CONFIG, "train", minutes=0.5), batch) == 0
    assert resolve.seconds_to_spend(
        replace_in(CONFIG, "train", minutes=10.0), batch
    ) == pytest.approx(30)
    assert (
        resolve.seconds_to_spend(replace_in(CONFIG, "train", steps=10**9), batch)
        == resolve.MAX_SECONDS
    )


def test_training_takes_what_tuning_found(here: Path) -> None:
    settings = [*SMALL_RUN, "train.text_attention=fused"]
    found = tune("first-run", settings, seconds=3, clock=Clock())
    train("first-run", settings, name="run")
    started = json.loads((here / "runs/run/events.jsonl").read_text().splitlines()[0])
    taken = started["config"]["train"]
    for name in (
        "device",
        "dtype",
        "threads",
        "compile",
        "micro_batch",
        "image_attention",
        "linear",
    ):
        assert taken[name] == found["choices"][name]
    assert started["reasons"]["train.dtype"].endswith("; tuned before")
    assert started["tuned_seconds"] == pytest.approx(16 / found["pairs_per_second"])
    assert find_run("run").read_settings()["run"]["tuned_seconds"] == started["tuned_seconds"]
    others = [*settings, "train.dtype=float32", "train.steps=2"]
    assert train("first-run", others, name="other").state == "finished"
    assert '"dtype":"float32"' in (here / "runs/other/events.jsonl").read_text().splitlines()[0]


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_budget_of_nothing_is_refused(here: Path, seconds: float) -> None:
    with pytest.raises(ConfigError, match="--seconds must be more than 0"):
        tune("first-run", [], seconds)


def test_busy_cores_are_named_and_nothing_is_remembered(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_programs, "read_load", lambda: 0.5)
    settings = [*SMALL_RUN, "train.compile=none", "train.linear=torch", "train.dtype=float32"]
    found = tune("first-run", settings, 1.0, clock=Clock())
    assert found["warnings"] == ["other programs use 50% of the cores, so what is timed now is off"]
    assert not found["remembered"]
    assert "not remembered" in "".join(tuning_command.summary(found, "train"))
    monkeypatch.setattr(other_programs, "read_load", lambda: 0.0)
    found = tune("first-run", settings, 1.0, clock=Clock())
    assert found["remembered"]
    assert found["warnings"] == []


def test_the_clock_decides_what_a_budget_is_enough_for(here: Path) -> None:
    settings = [*SMALL_RUN, "train.dtype=float32"]
    found = tune("first-run", settings, 1.0, clock=Clock(tick=1.0))
    assert not found["remembered"]
    reasons = [entry["reason"] for entry in found["rejected"]]
    assert all(reason.endswith("not tried: 0 s of the budget are left") for reason in reasons)


def test_a_tuning_that_compared_nothing_is_not_is_worth_remembering(tuning: Tuning) -> None:
    tuning = dataclasses.replace(tuning, tried=[{}, {}], rejected=[])
    assert tuning.is_worth_remembering
    alone = dataclasses.replace(tuning, tried=[{}])
    assert not alone.is_worth_remembering
    assert dataclasses.replace(
        alone, rejected=[{"step_seconds": None, "least_seconds": 0.1}]
    ).is_worth_remembering
    assert not dataclasses.replace(
        alone, rejected=[{"step_seconds": None, "least_seconds": None}]
    ).is_worth_remembering


@pytest.fixture(scope="module")
def plan(cache) -> BatchPlan:
    data = load_scenes(DataConfig(train_pairs=64), 32)
    assert data.alphabet is not None
    return BatchPlan(data.train, CharacterTokenizer(data.alphabet), 77, 16, seed=0)


def test_many_threads_give_the_batches_of_one_in_order(plan: BatchPlan) -> None:
    one, four = (list(prefetch(plan, 1, 12, threads=threads)) for threads in (1, 4))
    assert len(one) == len(four) == 12
    for a, b in zip(one, four, strict=True):
        assert (a.pixels_BSSC == b.pixels_BSSC).all()
        assert (a.tokens_BL == b.tokens_BL).all()


def test_one_thread_is_enough_where_it_keeps_up(plan: BatchPlan) -> None:
    threads, reason = choose_loader_threads("auto", plan, step_seconds=1e3)
    assert threads == 1
    assert "a step takes 1000000.0 ms" in reason


def test_more_loader_threads_are_taken_only_where_they_are_faster(
    plan: BatchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "logical_cores", lambda: 4)

    def by_itself(plan: BatchPlan, threads: int) -> float:
        return 0.03 / threads

    def crowded(plan: BatchPlan, threads: int) -> float:
        return 0.02 + 0.01 * threads

    assert choose_loader_threads("auto", plan, 0.025, by_itself)[0] == 4
    assert choose_loader_threads("auto", plan, 0.025, crowded)[0] == 1


def test_loader_threads_that_are_asked_for_are_taken(plan: BatchPlan) -> None:
    assert choose_loader_threads(3, plan, 1.0) == (3, "asked for")
    assert choose_loader_threads("auto", plan, None)[0] == 1


def test_an_open_recipe_is_the_one_that_train_would_take(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(here / "photos", 12)
    monkeypatch.setattr(choose_recipe, "towers_installed", lambda: True)
    refused = lapclip("tune", "photos")
    assert refused.returncode == 2
    assert "The recipe heads has nothing to tune: only part of its model learns." in refused.stderr
    assert "--recipe photos" in refused.stderr
    monkeypatch.setattr(choose_recipe, "MAX_IMAGES_FOR_HEADS", 5)
    source = f"data.source={json.dumps(str(here / 'photos'))}"
    small = [*SMALL_RUN, "train.batch_size=4", "train.cheap_size=16", "train.dtype=float32"]
    found = tune(AUTO, [source, *small], 1.0, clock=Clock())
    assert found["recipe"] == "photos"
    assert tuning_command.summary(found, "train")[0] == "recipe photos"
