from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from lapclip.config import replace_in
from lapclip.errors import ConfigError
from lapclip.machine.cpu import Cpu
from lapclip.model import kernels
from lapclip.training.memory import predict_bytes
from lapclip.tuning import tune
from lapclip.tuning.compiling import Compiling
from lapclip.tuning.trial import Setting
from lapclip.tuning.tune import Tuning

from .made import CONFIG, tuned


def test_every_choice_has_a_reason_and_the_chosen_one_was_timed(tuning: Tuning) -> None:
    assert set(tuning.reasons) == set(dataclasses.asdict(tuning.setting))
    assert {
        **dataclasses.asdict(tuning.setting),
        "step_seconds": tuning.step_seconds,
    } in tuning.tried
    assert tuning.pairs_per_second == pytest.approx(8 / tuning.step_seconds)
    assert "cosine" in tuning.reasons["dtype"]


def test_what_is_asked_for_is_kept() -> None:
    asked = {"device": "cpu", "dtype": "float32", "threads": 1, "micro_batch": 4, "compile": "none"}
    tuning = tuned(**asked, image_attention="products", text_attention="fused", linear="torch")
    chosen = dataclasses.asdict(tuning.setting)
    assert chosen == {
        **asked,
        "image_attention": "products",
        "text_attention": "fused",
        "linear": "torch",
    }
    assert set(tuning.reasons.values()) == {"asked for"}


def test_however_small_the_budget_something_is_chosen() -> None:
    tuning = tuned(seconds=1e-6)
    assert len(tuning.tried) == 1
    assert any(
        "not tried" in entry["reason"] or "products alone" in entry["reason"]
        for entry in tuning.rejected
    )


def test_the_batch_and_the_updates_stay_the_recipes() -> None:
    assert {field.name for field in dataclasses.fields(Setting)}.isdisjoint(
        {"batch_size", "steps", "epochs", "learning_rate"}
    )


def wrong_attention(monkeypatch: pytest.MonkeyPatch, wrong: torch.dtype) -> None:
    """Attention that looks at the future in one precision, as MPS's has done."""

    right = kernels.attention

    def attention(
        qkv_BLD: Tensor, heads: int, form: str, *, causal: bool, bias: Tensor | None = None
    ) -> Tensor:
        return right(qkv_BLD, heads, form, causal=causal and qkv_BLD.dtype != wrong, bias=bias)

    monkeypatch.setattr(kernels, "attention", attention)


def test_a_setting_that_computes_something_else_is_rejected_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong_attention(monkeypatch, torch.bfloat16)
    monkeypatch.setattr(tune, "SLOW_RATIO", 1e6)  # so that speed is no reason
    tuning = tuned(device="cpu", threads=1, linear="torch", image_attention="fused")
    assert tuning.setting.dtype != "bfloat16"
    reasons = [
        entry["reason"] for entry in tuning.rejected if entry["choices"]["dtype"] == "bfloat16"
    ]
    assert any("compared with float32 on the CPU" in reason for reason in reasons)


def test_a_batch_too_large_for_memory_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = predict_bytes(
        CONFIG.model, replace_in(CONFIG, "train", dtype="float32").train, 16
    ).total
    part = dataclasses.replace(CONFIG.train, dtype="float32", micro_batch=4)
    parts = predict_bytes(CONFIG.model, part, 16)
    needed = parts.total - parts.base  # this process has the base already
    assert parts.total < whole
    monkeypatch.setattr(Cpu, "free_bytes", lambda self: (needed + 1) / tune.SHARE_OF_MEMORY)
    tuning = tuned(device="cpu", dtype="float32", threads=1)
    assert tuning.setting.micro_batch == 4
    assert "a part of the batch fits" in tuning.reasons["micro_batch"]


def test_a_model_too_large_for_memory_is_refused_with_the_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Cpu, "free_bytes", lambda self: 1e6)
    with pytest.raises(ConfigError, match=r"too large for memory: predicted .* GB of 0\.0 GB free"):
        tuned(device="cpu")


def test_compiling_is_chosen_only_where_it_was_measured_and_pays() -> None:
    compiling = Compiling("compiled", 10.0, seconds_before=0.2, seconds_after=0.1)
    assert compiling.break_even_steps == pytest.approx(200)
    assert compiling.pays(201)
    assert not compiling.pays(199)
    assert "pays from step 200 on; the run has 199" in compiling.describe(199)
    assert "take 2 min" in compiling.describe(1400)
    assert "gains nothing" in dataclasses.replace(compiling, seconds_after=0.2).describe(10)
    assert not dataclasses.replace(compiling, fault="its loss is off").pays(10_000)


KNOWN = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "image_attention": "fused",
    "text_attention": "fused",
    "linear": "torch",
}


def test_a_short_run_does_not_try_to_compile() -> None:
    tuning = tuned(2.0, briefly=True, **KNOWN, steps=20)
    assert tuning.setting.compile == "none"
    assert "tune --seconds 300" in tuning.reasons["compile"]


def test_a_run_that_looks_long_beside_other_programs_does_not_try_to_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tune, "describe_busy_cores", lambda: "other programs use all cores")
    tuning = tuned(2.0, briefly=True, **KNOWN, steps=100_000_000)
    assert tuning.setting.compile == "none"
    assert "tune --seconds 300" in tuning.reasons["compile"]


@pytest.mark.slow
def test_a_long_run_measures_compiling_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "describe_busy_cores", lambda: None)
    tuning = tuned(2.0, briefly=True, **KNOWN, steps=100_000_000)
    reason = tuning.reasons["compile"]
    assert "measured" in reason or "compiled here" in reason  # where there is no compiler
    assert (tuning.setting.compile == "compiled") == ("less" in reason)
