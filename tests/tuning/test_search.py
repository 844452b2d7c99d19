from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lapclip.cli import tune as tuning_command
from lapclip.commands.train import train
from lapclip.commands.tune import tune
from lapclip.config import Config, DataConfig, TrainConfig, replace_in
from lapclip.data.batches import Batch
from lapclip.errors import ConfigError
from lapclip.machine import devices
from lapclip.machine import other_load as load
from lapclip.model import block as transformer
from lapclip.model import kernels
from lapclip.model.shapes import SHAPES
from lapclip.runs.folder import find_run
from lapclip.tuning import resolve as settle
from lapclip.tuning import search
from lapclip.tuning.compiling import Compiling
from lapclip.tuning.measure import Setting, Workshop
from lapclip.tuning.search import Search, Tuning

SMALL_RUN = ["model.name=tiny", "data.train_pairs=64", "train.batch_size=16", "train.steps=12", "train.device=cpu"]
CONFIG = Config(model=SHAPES["tiny"], data=DataConfig(), train=TrainConfig(batch_size=8, steps=100))


@pytest.fixture(autouse=True)
def nothing_remembered(cache: Path) -> Iterator[None]:
    yield
    settle.NOTEBOOK.path.unlink(missing_ok=True)


def batch_of(rows: int = 8) -> Batch:
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 30, (rows, 16))
    tokens[:, 9] = 32
    pixels = draw.integers(0, 256, (rows, 32, 32, 3), dtype=np.uint8)
    return Batch(pixels, tokens, np.eye(rows, dtype=bool), np.zeros(rows, dtype=bool))


def tuned(seconds: float = 5.0, **train) -> Tuning:
    return Search(replace_in(CONFIG, "train", **train), batch_of(), seconds).run()


@pytest.fixture(scope="module")
def tuning(cache: Path) -> Tuning:
    """A real one, for those that only read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "other_load", lambda: 0.0)
        return tuned()


def test_every_choice_has_a_reason_and_the_chosen_one_was_timed(tuning: Tuning) -> None:
    assert set(tuning.reasons) == set(dataclasses.asdict(tuning.setting))
    assert {**dataclasses.asdict(tuning.setting), "ms": tuning.seconds_a_step * 1e3} in tuning.tried
    assert tuning.pairs_per_second == pytest.approx(8 / tuning.seconds_a_step)
    assert "cosine" in tuning.reasons["dtype"]


def test_what_is_asked_for_is_kept() -> None:
    asked = {"device": "cpu", "dtype": "float32", "threads": 1, "micro_batch": 4, "compile": "none"}
    tuning = tuned(**asked, image_attention="products", text_attention="fused", linear="torch")
    chosen = dataclasses.asdict(tuning.setting)
    assert chosen == {**asked, "image_attention": "products", "text_attention": "fused", "linear": "torch"}
    assert all(reason == "asked for" for reason in tuning.reasons.values())


def test_however_small_the_budget_something_is_chosen() -> None:
    tuning = tuned(seconds=1e-6)
    assert len(tuning.tried) == 1
    assert any("not tried" in entry["reason"] or "products alone" in entry["reason"] for entry in tuning.rejected)


def test_the_batch_and_the_updates_stay_the_recipes() -> None:
    assert {field.name for field in dataclasses.fields(Setting)}.isdisjoint(
        {"batch_size", "steps", "epochs", "learning_rate"}
    )


def wrong_attention(monkeypatch: pytest.MonkeyPatch, wrong: torch.dtype) -> None:
    """Attention that looks at the future in one precision, as MPS's has done."""

    def attention(qkv_BLD: Tensor, heads: int, form: str, *, causal: bool) -> Tensor:
        return kernels.attention(qkv_BLD, heads, form, causal=causal and qkv_BLD.dtype != wrong)

    monkeypatch.setattr(transformer, "attention", attention)


def test_a_setting_that_computes_something_else_is_rejected_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_attention(monkeypatch, torch.bfloat16)
    monkeypatch.setattr(search, "HOPELESS", 1e6)  # so that speed is no reason
    tuning = tuned()
    assert tuning.setting.dtype != "bfloat16"
    reasons = [entry["reason"] for entry in tuning.rejected if entry["choices"]["dtype"] == "bfloat16"]
    assert any("compared with float32 on the CPU" in reason for reason in reasons)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("micro_batch", [0, 2])
def test_right_settings_agree(dtype: str, micro_batch: int) -> None:
    agreement = Workshop(CONFIG, batch_of()).agreement(Setting("cpu", dtype, micro_batch=micro_batch))
    assert agreement.fault(dtype) is None
    if dtype == "float32":
        assert agreement.gradients > 0.999999


def test_wrong_gradients_are_noticed_where_the_loss_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(CONFIG, batch_of())
    right = workshop.agreement(Setting("cpu"))
    assert right.fault("float32") is None

    class Leaky(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return 0.5 * grad

    def attention(qkv_BLD: Tensor, heads: int, form: str, *, causal: bool) -> Tensor:
        return kernels.attention(Leaky.apply(qkv_BLD), heads, form, causal=causal)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(transformer, "attention", attention)
    wrong = workshop.agreement(Setting("cpu"))
    assert wrong.loss < 1e-6
    fault = wrong.fault("float32")
    assert fault is not None
    assert "gradients" in fault


def test_a_batch_too_large_for_memory_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search.predict_bytes(CONFIG.model, replace_in(CONFIG, "train", dtype="float32").train, 16).total
    part = dataclasses.replace(CONFIG.train, dtype="float32", micro_batch=4)
    needed = search.predict_bytes(CONFIG.model, part, 16).total
    assert needed < whole
    monkeypatch.setattr(devices.Device, "free_bytes", lambda self: (needed + 1) / search.SHARE_OF_MEMORY)
    tuning = tuned(device="cpu", dtype="float32", threads=1)
    assert tuning.setting.micro_batch == 4
    assert "a part of the batch fits" in tuning.reasons["micro_batch"]


def test_a_model_too_large_for_memory_is_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.Device, "free_bytes", lambda self: 1e6)
    with pytest.raises(ConfigError, match=r"too large for memory: predicted .* GB of 0\.0 GB free"):
        tuned(device="cpu")


def test_compiling_is_chosen_only_where_it_was_measured_and_pays() -> None:
    compiling = Compiling("compiled", cost=10.0, before=0.2, after=0.1, measured=True)
    assert compiling.break_even == pytest.approx(100)
    assert compiling.pays(101)
    assert not compiling.pays(99)
    assert "pays from step 100 on; the run has 99" in compiling.text(99)
    predicted = dataclasses.replace(compiling, measured=False)
    assert not predicted.pays(10_000)
    assert "predicted" in predicted.text(10_000)
    assert "gains nothing" in dataclasses.replace(compiling, after=0.2).text(10)
    assert not dataclasses.replace(compiling, fault="its loss is off").pays(10_000)


def test_a_tuning_is_remembered_for_the_same_model_batch_and_wishes(tuning: Tuning) -> None:
    batch = batch_of()
    assert settle.recall(CONFIG, batch) is None
    settle.remember(CONFIG, batch, tuning, 5.0)
    assert settle.recall(CONFIG, batch) == tuning
    assert settle.recall(replace_in(CONFIG, "train", dtype="float32"), batch) is None
    assert settle.recall(replace_in(CONFIG, "train", batch_size=4), batch_of(4)) is None
    assert settle.recall(CONFIG, batch, seconds=10.0) == tuning
    assert settle.recall(CONFIG, batch, seconds=11.0) is None  # so much more may be spent now that it is worth it


def test_compiling_that_paid_in_a_longer_run_is_not_recalled_for_a_shorter_one(tuning: Tuning) -> None:
    batch = batch_of()
    compiled = dataclasses.replace(tuning, setting=dataclasses.replace(tuning.setting, compile="compiled"))
    settle.remember(CONFIG, batch, compiled, 5.0)
    assert settle.recall(CONFIG, batch) == compiled
    assert settle.recall(replace_in(CONFIG, "train", steps=99), batch) is None


@pytest.mark.parametrize("text", ["[", "[]", '"x"', "{"])
def test_a_damaged_cache_is_ignored_with_a_warning(
    tuning: Tuning, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settle.NOTEBOOK.path.write_text(text)
    assert settle.recall(CONFIG, batch_of()) is None
    assert "damaged" in capsys.readouterr().err
    settle.remember(CONFIG, batch_of(), tuning, 5.0)
    assert settle.recall(CONFIG, batch_of()) is not None


def test_a_page_with_other_fields_is_ignored(tuning: Tuning) -> None:
    settle.remember(CONFIG, batch_of(), tuning, 5.0)
    pages = json.loads(settle.NOTEBOOK.path.read_text())
    for page in pages.values():
        del page["setting"]["dtype"]
        page["setting"]["colour"] = "red"
    settle.NOTEBOOK.path.write_text(json.dumps(pages))
    assert settle.recall(CONFIG, batch_of()) is None


def test_short_runs_are_not_tuned_and_long_ones_spend_a_twentieth_at_most() -> None:
    batch = batch_of()
    assert settle.seconds_to_spend(CONFIG, batch) == 0
    assert settle.seconds_to_spend(replace_in(CONFIG, "train", minutes=0.5), batch) == 0
    assert settle.seconds_to_spend(replace_in(CONFIG, "train", minutes=10.0), batch) == pytest.approx(30)
    assert settle.seconds_to_spend(replace_in(CONFIG, "train", steps=10**9), batch) == settle.MOST_SECONDS


def test_training_takes_what_tuning_found(here: Path) -> None:
    found = tune("first-run", SMALL_RUN, seconds=5)
    train("first-run", SMALL_RUN, name="run")
    started = json.loads((here / "runs/run/events.jsonl").read_text().splitlines()[0])
    taken = started["config"]["train"]
    for name in ("device", "dtype", "threads", "compile", "micro_batch", "image_attention", "linear"):
        assert taken[name] == found["choices"][name]
    assert started["reasons"]["train.dtype"].endswith("; tuned before")
    assert started["tuned_seconds"] == pytest.approx(16 / found["pairs_per_second"])
    assert find_run("run").read_settings()["run"]["tuned_seconds"] == started["tuned_seconds"]
    overridden = train("first-run", [*SMALL_RUN, "train.dtype=float32"], name="other")
    assert overridden.state == "finished"
    assert '"dtype":"float32"' in (here / "runs/other/events.jsonl").read_text().splitlines()[0]


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_budget_of_nothing_is_refused(here: Path, seconds: float) -> None:
    with pytest.raises(ConfigError, match="--seconds must be more than 0"):
        tune("first-run", [], seconds)


def test_busy_cores_are_named_and_nothing_is_remembered(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "other_load", lambda: 0.5)
    found = tune("first-run", SMALL_RUN, 3.0)
    assert found["warnings"] == ["other programs use 50% of the cores, so what is timed now is off"]
    assert not found["remembered"]
    assert "not remembered" in "".join(tuning_command.summary(found, "train"))
    monkeypatch.setattr(load, "other_load", lambda: 0.0)
    found = tune("first-run", SMALL_RUN, 10.0)
    assert found["remembered"]
    assert found["warnings"] == []


def test_a_tuning_that_compared_nothing_is_not_worth_keeping(tuning: Tuning) -> None:
    tuning = dataclasses.replace(tuning, tried=[{}, {}], rejected=[])
    assert tuning.worth_keeping
    alone = dataclasses.replace(tuning, tried=[{}])
    assert not alone.worth_keeping
    assert dataclasses.replace(alone, rejected=[{"ms": None, "bound": 0.1}]).worth_keeping
    assert not dataclasses.replace(alone, rejected=[{"ms": None, "bound": None}]).worth_keeping
