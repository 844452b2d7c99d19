"""The flags of `lapclip train` that are short for settings, and answers to command lines that do not parse."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from pathlib import Path

import pytest

import lapclip as package
from lapclip.cli.hints import OTHER_FLAGS
from lapclip.cli.train import train
from lapclip.config import SETTING_FLAGS, build_config, parse_settings
from lapclip.model.shapes import SHAPES

from ..conftest import SMALL, lapclip, set_flags

QUICK = [setting for setting in SMALL if "device" not in setting and "steps" not in setting]
FLAGS = ["--device", "cpu", "--batch-size", "32", "--epochs", "2", "--lr", "1e-3"]


def recorded(name: str) -> dict:
    return tomllib.loads((Path("runs") / name / "run.toml").read_text(encoding="utf-8"))


def test_flags_set_settings_and_win_over_set(here: Path) -> None:
    done = lapclip(
        "train", "--name", "mine", "--json", *FLAGS, *set_flags(*QUICK, "train.batch_size=16")
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 4  # 64 pairs in batches of 32, twice
    asked = recorded("mine")["run"]["asked"]["train"]
    wanted = {"device": "cpu", "batch_size": 32, "epochs": 2, "learning_rate": 0.001}
    assert {name: asked[name] for name in wanted} == wanted
    settings = {
        "train.batch_size": 16,
        "data.train_pairs": 64,
        "model.name": "tiny",
        "train.threads": 1,
    }
    package.train(
        name="python",
        settings=settings,
        device="cpu",
        batch_size=32,
        epochs=1,
        lr=1e-3,
        progress=False,
    )
    asked = recorded("python")["run"]["asked"]["train"]
    assert {name: asked[name] for name in wanted} == wanted | {"epochs": 1}


def test_bad_values_are_refused_by_name(here: Path) -> None:
    for flag, value, part in (
        ("--batch-size", "1", "batch_size"),
        ("--device", "gpu", "device"),
        ("--lr", "x", "lr"),
    ):
        done = lapclip("train", flag, value)
        assert done.returncode == 2
        assert part in done.stderr
        assert len(done.stderr.strip().splitlines()) <= 3
    assert not Path("runs").exists()


@pytest.mark.parametrize("flag", OTHER_FLAGS)
def test_flags_of_other_trainers_are_answered_with_ones_that_exist(here: Path, flag: str) -> None:
    done = lapclip("train", flag, "4")
    assert done.returncode == 2
    unknown, hint = done.stderr.strip().splitlines()
    assert unknown == f"Unknown option: {flag}."
    assert hint == f"Try: {OTHER_FLAGS[flag]}"
    own = {
        "from" if name == "start" else name.replace("_", "-")
        for name in inspect.signature(train).parameters
    }
    for named in re.findall(r"--([a-z-]+)", hint):
        assert named in {*own, "set"}
    for setting in re.findall(r"--set (\S+?),?(?= |$)", hint):
        build_config([parse_settings([setting])], SHAPES)


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--weight-decay=0.1", "--set train.weight_decay=VALUE"),
        ("--warmup", "--set train.warmup=VALUE"),
        ("--learning_rate", "--lr 1e-3"),
    ],
)
def test_names_of_settings_are_answered_with_set(here: Path, flag: str, hint: str) -> None:
    assert f"Try: {hint}" in lapclip("train", flag, "4").stderr


def test_a_path_with_a_space_is_answered_with_quotes(here: Path) -> None:
    Path("My Photos").mkdir()
    for arguments in (
        ["train", "My", "Photos/", "--epochs", "3"],
        ["data", "check", "My", "Photos/"],
    ):
        done = lapclip(*arguments)
        assert done.returncode == 2
        problem, hint = done.stderr.strip().splitlines()
        assert "quotes" in problem
        assert hint.startswith("Try: lapclip ")
        assert re.search(r"""['"]My Photos/['"]""", hint)
    done = lapclip("train", "No", "Photos")
    assert "needs quotes" in done.stderr
    assert done.stderr.strip().endswith("Try: lapclip train --help")


def test_every_short_flag_is_a_setting() -> None:
    assert set(SETTING_FLAGS) < set(inspect.signature(train).parameters)
    assert set(SETTING_FLAGS) < set(inspect.signature(package.train).parameters)
