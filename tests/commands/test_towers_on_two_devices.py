"""Whole runs with a tower on each of two devices: the CPU, and an accelerator in name that computes on the CPU too."""

from __future__ import annotations

import tomllib
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from lapclip.commands import run_setup
from lapclip.commands.resume import resume
from lapclip.commands.train import train
from lapclip.errors import ConfigError
from lapclip.model.towers import ImageTower, TextTower
from lapclip.runs.folder import find_run
from lapclip.runs.view import view_of
from lapclip.training.fallback import DEVICE, MEMORY

from ..conftest import SMALL
from ..second_device import Pretended, pretend
from ..small_runs import events, losses, stop_after
from .test_run_to_end import failing, keep_torch

SHORT = [*SMALL, "train.steps=5"]
OPEN = [setting for setting in SHORT if "train.device" not in setting]
SPLIT = [*OPEN, "train.image_device=xpu", "train.text_device=cpu"]


@pytest.fixture(autouse=True)
def two_devices(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_torch(monkeypatch)
    pretend(monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[int, float]:
    """The losses of a run on two devices in which nothing happens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        pretend(patch)
        train("first-run", SPLIT, name="whole")
        return losses("whole")


def close_to(wanted: dict[int, float]) -> dict:
    return {number: pytest.approx(loss, rel=2e-5) for number, loss in wanted.items()}


def saved(name: str = "run") -> dict[str, Any]:
    return tomllib.loads(Path(f"runs/{name}/run.toml").read_text())


def split_run(*settings: str, name: str = "run", **options: Any) -> Any:
    return train("first-run", [*SPLIT, *settings], name=name, **options)


def test_a_run_on_two_devices_gives_the_losses_of_one_and_says_where_and_why() -> None:
    train("first-run", SHORT, name="alone")
    outcome = split_run()
    assert outcome.state == "finished"
    assert losses() == close_to(losses("alone"))
    settings, reasons = saved()["train"], saved()["reasons"]
    assert [settings[name] for name in ("device", "image_device", "text_device")] == [
        "xpu",
        "xpu",
        "cpu",
    ]
    assert "where the loss is computed" in reasons["train.device"]
    assert reasons["train.image_device"] == "asked for"
    plain = saved("alone")
    assert [plain["train"][name] for name in ("device", "image_device", "text_device")] == [
        "cpu"
    ] * 3
    assert plain["reasons"]["train.image_device"] == "as train.device"

    steps = events("step")
    assert all(set(event["towers"]) == {"image", "text"} for event in steps)
    towers = view_of(find_run("run")).towers
    assert towers is not None
    assert {tower.name: tower.device for tower in towers} == {
        "image": "cpu",
        "text": "cpu",
    }  # where tensors really are
    assert all(tower.computed > 0 and tower.waited >= 0 for tower in towers)


def test_a_resumed_run_on_two_devices_goes_on_to_the_bit(whole: dict[int, float]) -> None:
    split_run(callbacks=stop_after(3, "run"))
    assert resume("run").state == "finished"
    assert losses() == whole


@pytest.mark.slow  # the step itself is compared in tests/training/test_two_devices.py
@pytest.mark.parametrize(
    "settings",
    [
        ("train.dtype=bfloat16", "train.micro_batch=5"),
        ("train.dtype=float16", "train.optimizer=muon"),
    ],
    ids=str,
)
def test_so_does_one_in_half_precision(settings: tuple[str, ...]) -> None:
    split_run(*settings, name="other")
    split_run(*settings, callbacks=stop_after(3, "run"))
    assert resume("run").state == "finished"
    assert losses() == losses("other")


def test_memory_that_runs_out_on_one_of_them_halves_the_micro_batch_on_both(
    whole: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        TextTower, "forward", failing(TextTower.forward, 4, counts=torch.is_grad_enabled)
    )
    assert split_run().state == "finished"
    (fell_back,) = events("fell_back")
    assert (fell_back["step"], fell_back["cause"]) == (3, MEMORY)
    assert fell_back["change"] == {"micro_batch": 8}
    assert losses() == close_to(whole)


@pytest.mark.slow  # tests/commands/test_run_to_end.py has the same of one device
def test_what_failed_on_two_devices_is_gone_before_it_is_built_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There may be no room for two models, and threads hold on to nothing."""
    real, models = run_setup.build, []

    def build(*arguments: Any) -> Any:
        assert [model() for model in models] == [None] * len(models)
        step, embedder = real(*arguments)
        models.append(weakref.ref(step.model))
        return step, embedder

    monkeypatch.setattr(run_setup, "build", build)
    monkeypatch.setattr(
        TextTower, "forward", failing(TextTower.forward, 2, 3, counts=torch.is_grad_enabled)
    )
    split_run("train.steps=3")
    assert len(models) == 3


def test_an_accelerator_that_fails_is_left_for_the_cpu_with_both_towers(
    whole: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(tower: ImageTower, *_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    broken = failing(ImageTower.forward, 3, fail=break_down, counts=torch.is_grad_enabled)
    with monkeypatch.context() as patched:
        patched.setattr(ImageTower, "forward", broken)
        split_run(callbacks=stop_after(4, "run"))
    (fell_back,) = events("fell_back")
    assert fell_back["cause"] == DEVICE
    assert fell_back["change"] == {"device": "cpu", "image_device": "cpu"}
    assert fell_back["text"].startswith("xpu failed at step 3")
    assert resume("run").state == "finished"
    assert losses() == close_to(whole)


@pytest.mark.slow  # the step itself is compared in tests/training/test_two_devices.py
def test_frozen_blocks_lora_and_cached_features_go_on_working(trained: Path) -> None:
    for at, learns in enumerate(
        (("train.image_blocks=1", "train.text_blocks=0"), ("train.lora_rank=2",))
    ):
        settings = [f"train.start={trained}", "train.learning_rate=1e-4", "train.steps=3", *learns]
        train("first-run", [*SHORT[1:], *settings], name=f"alone{at}")
        train("first-run", [*SPLIT[1:], *settings], name=f"split{at}")
        assert losses(f"split{at}") == close_to(losses(f"alone{at}"))


@pytest.mark.parametrize(
    ("settings", "error", "hint"),
    [
        (["train.shards=4"], "one process", "train.shards=1"),
        (
            ["train.text_device=cuda"],
            "train.text_device cuda is not here",
            "train.text_device=auto",
        ),
        (["train.compile=graph"], "cannot be had on xpu+cpu", "train.compile=auto"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_begins(
    settings: list[str], error: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=error.replace("+", r"\+")) as found:
        split_run(*settings)
    assert hint in str(found.value)
    assert not Path("runs").exists()


def test_a_tower_that_does_not_fit_its_device_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Pretended, "free_bytes", lambda self: 1000)
    with pytest.raises(ConfigError, match=r"the image tower of tiny .* are free on xpu"):
        split_run()


def test_compiling_is_left_out_with_the_reason() -> None:
    split_run("train.steps=2", "train.compile=compiled")
    assert saved()["train"]["compile"] == "none"
    assert "not compiled" in saved()["reasons"]["train.compile"]
