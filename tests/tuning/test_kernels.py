from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lapclip.config import TrainConfig
from lapclip.errors import ConfigError
from lapclip.machine.choose_device import device_of
from lapclip.machine.cpu import Cpu
from lapclip.machine.other_programs import OtherPrograms
from lapclip.model.shapes import SHAPES
from lapclip.tuning import kernels
from lapclip.tuning.kernels import check_kernels, choose_kernels, forms_here

CPU = Cpu()
TRAIN = TrainConfig(dtype="float32", batch_size=4)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPCLIP_CACHE", str(tmp_path))


def test_every_choice_has_a_reason_with_its_figures() -> None:
    choices, reasons = choose_kernels(SHAPES["tiny"], TRAIN, 16, CPU)
    assert all(choice in forms_here(name, CPU, "float32") for name, choice in choices.items())
    assert set(choices) == {"image_attention", "text_attention", "linear"}
    assert set(reasons) == {f"train.{name}" for name in choices}
    assert " ms against " in reasons["train.image_attention"]


def remembered(tmp_path: Path) -> dict[str, list[str]]:
    return json.loads((tmp_path / "kernels.json").read_text())


def test_a_choice_is_remembered_until_it_is_timed_anew(tmp_path: Path) -> None:
    """Two forms differ in the last bit, so the same command run twice has to take the same one."""
    _, timed = choose_kernels(SHAPES["tiny"], TRAIN, 16, CPU)
    other = {
        key: ["onednn" if key.startswith("linear") else "products", "as before"]
        for key in remembered(tmp_path)
    }
    (tmp_path / "kernels.json").write_text(json.dumps(other))
    choices, reasons = choose_kernels(SHAPES["tiny"], TRAIN, 16, CPU)
    assert (choices["image_attention"], choices["text_attention"]) == ("products", "products")
    assert set(reasons.values()) <= {"as before", "the only form here"}
    _, anew = choose_kernels(SHAPES["tiny"], TRAIN, 16, CPU, measure_again=True)
    assert anew.keys() == timed.keys()
    assert "as before" not in anew.values()
    assert sorted(reason for _, reason in remembered(tmp_path).values()) == sorted(
        reason for reason in anew.values() if reason != "the only form here"
    )


def test_what_is_timed_at_a_bad_moment_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OtherPrograms, "__call__", lambda self: 0.5)
    choose_kernels(SHAPES["tiny"], TRAIN, 16, CPU)
    assert not (tmp_path / "kernels.json").exists()


def test_what_is_asked_for_is_not_timed(tmp_path: Path) -> None:
    train = dataclasses.replace(
        TRAIN, image_attention="products", text_attention="fused", linear="torch"
    )
    choices, reasons = choose_kernels(SHAPES["tiny"], train, 16, CPU)
    assert choices == {"image_attention": "products", "text_attention": "fused", "linear": "torch"}
    assert set(reasons.values()) == {"asked for"}
    assert not (tmp_path / "kernels.json").exists()


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "float32"), ("cpu", "float16")])
def test_what_cannot_be_had_is_refused(device: str, dtype: str) -> None:
    train = dataclasses.replace(TRAIN, linear="onednn", dtype=dtype)
    with pytest.raises(ConfigError, match=f"onednn cannot be had on {device} in {dtype}"):
        check_kernels(train, device_of(device))


def test_a_cache_that_cannot_be_written_or_read_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels.json").write_text("[")
    assert choose_kernels(SHAPES["tiny"], TRAIN, 16, CPU)[0]
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("LAPCLIP_CACHE", str(blocked))
    assert choose_kernels(SHAPES["tiny"], TRAIN, 16, CPU)[0]


class Forms:
    """An operation whose forms differ as a test needs them to."""

    def __init__(self, **forms: Callable[[], float]) -> None:
        self.forms, self.order = forms, []

    def run(self, form: str) -> list[torch.Tensor]:
        self.order.append(form)
        return [torch.full((3,), self.forms[form]())]

    def choose(self) -> tuple[str, str]:
        operation = kernels.Operation(lambda batch, device, dtype: self.run)
        result = kernels.race_forms(operation, tuple(self.forms), 8, "float32", CPU, 1.0)
        return result.winner, result.reason


def quick() -> float:
    return 1.0


def slow() -> float:
    time.sleep(0.01)
    return 1.0


def fail() -> float:
    raise RuntimeError("could not create a primitive\nsecond line")


def test_the_quickest_form_is_taken_after_turns() -> None:
    forms = Forms(own=slow, other=quick)
    chosen, reason = forms.choose()
    assert chosen == "other"
    assert reason.endswith("ms own, timed here")
    assert forms.order[-4:] == ["own", "other"] * 2
    assert Forms(own=quick, other=slow).choose()[0] == "own"


def test_a_quick_form_that_is_wrong_or_fails_is_not_taken() -> None:
    assert Forms(own=slow, other=lambda: 1.01).choose() == ("own", "other is off by 1.0e-02 here")
    assert Forms(own=slow, other=lambda: float("nan")).choose() == (
        "own",
        "other is off by inf here",
    )
    assert Forms(own=slow, other=fail).choose() == (
        "own",
        "other does not run here (could not create a primitive)",
    )
    assert Forms(own=slow, other=fail, third=quick).choose()[0] == "third"


def test_a_form_that_fails_for_the_longest_sequences_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run meets them after it was chosen: longer captions."""
    asked = []

    def attention(
        qkv: torch.Tensor, heads: int, form: str, *, causal: bool, bias: torch.Tensor
    ) -> torch.Tensor:
        asked.append((causal, qkv.shape[1]))
        if form == "products" and qkv.shape[1] > 16:
            raise RuntimeError("too long")
        return right(qkv, heads, form, causal=causal, bias=bias)

    right = kernels.attention
    monkeypatch.setattr(kernels, "attention", attention)
    shape, train = SHAPES["tiny"], dataclasses.replace(TRAIN, linear="torch")
    choices, reasons = choose_kernels(shape, train, 8, CPU)
    patches = (shape.image_size // shape.patch) ** 2
    assert (True, 8) in asked
    assert {(False, shape.class_tokens + patches), (True, shape.context)} < set(asked)
    assert (choices["image_attention"], choices["text_attention"]) == ("fused", "fused")
    assert (
        reasons["train.image_attention"]
        == reasons["train.text_attention"]
        == "products does not run here (too long)"
    )
