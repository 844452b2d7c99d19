"""`lapclip train`: whole runs, in this process."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import lapclip
from lapclip.commands.evaluate import evaluate
from lapclip.commands.evaluation_data import EvaluationRequest
from lapclip.config import DataConfig, TrainConfig, build_config, parse_settings, read_recipe
from lapclip.data.sources.built_in import load_scenes
from lapclip.errors import ConfigError, DataError, TrainingError
from lapclip.evaluation.retrieval import linear_baseline
from lapclip.model.shapes import SHAPES
from lapclip.runs.events import Resumed, read_events
from lapclip.runs.folder import Run, find_run
from lapclip.training import checkpoint, ranks_in_a_run
from lapclip.training.preparation import check_kernels_early
from lapclip.training.request import Callbacks
from lapclip.training.run_process import recording

from ..conftest import SMALL, command, set_flags
from ..second_device import Pretended
from ..small_runs import events, losses, prepared, train, train_small


def test_a_run_leaves_everything_it_promises(here: Path) -> None:
    outcome = train_small()
    assert outcome.state == "finished"
    assert outcome.exit_status == 0
    assert outcome.steps == 12
    assert outcome.devices == {"image": "cpu", "text": "cpu"}
    assert outcome.peak_memory_bytes > 1e8
    assert 0 < outcome.training_seconds <= outcome.seconds
    assert outcome.evaluation is not None
    assert outcome.evaluation["candidates"] == 240
    run = here / "runs" / "run"
    assert {path.name for path in run.iterdir()} >= {
        "run.toml",
        "events.jsonl",
        "log.txt",
        "checkpoints",
        "model",
    }
    settings = tomllib.loads((run / "run.toml").read_text())
    assert settings["train"]["threads"] == 1
    assert settings["reasons"]["train.steps"] == "asked for"
    assert "finished: test text to image R@1/5/10" in (run / "log.txt").read_text()


def test_events_are_named_as_the_contract_says(here: Path) -> None:
    train_small()
    kinds = [event["type"] for event in read_events(Path("runs/run/events.jsonl"))]
    assert kinds[:3] == ["started", "checkpoint", "step"]
    assert kinds[-1] == "finished"
    assert {"memory", "evaluation", "sensors"} <= set(kinds)
    sensors = events("sensors")
    assert [event["step"] for event in sensors][:: len(sensors) - 1] == [
        1,
        12,
    ]  # the first and the last at least
    assert all(len(event["core_use"]) >= 1 and event["swap_bytes"] >= 0 for event in sensors)
    assert all(event["joules"] is not None or event["reason"] for event in sensors)
    (started,) = events("started")
    assert started["devices"] == {"image": "cpu", "text": "cpu"}
    assert started["machine"]["cores"] >= 1
    assert {"config", "reasons", "versions", "commit", "parameters"} <= started.keys()
    assert started["tuned_seconds"] is None
    assert started["memory_limit_bytes"] > 1e8
    assert started["captions"]["train"] == {"captions": 256, "distinct": 256, "told_apart": 1.0}
    first = events("step")[0]
    assert first.keys() >= {
        "v",
        "time",
        "step",
        "epoch",
        "loss",
        "t2i_accuracy",
        "i2t_accuracy",
        "logit_scale",
    }
    assert first.keys() >= {"temperature", "lr", "grad_norm", "grad_norms", "seconds"}
    assert list(first["seconds"]) == [
        "load",
        "preprocess",
        "transfer",
        "forward",
        "backward",
        "optimizer",
    ]
    assert first["temperature"] == pytest.approx(0.07, rel=1e-6)
    assert first["temperature"] == pytest.approx(math.exp(-first["logit_scale"]))
    assert events("step")[-1]["seconds"] is None
    assert [event["step"] for event in events("step")] == list(range(1, 13))


def test_the_model_learns_more_than_twice_what_a_linear_baseline_does(here: Path) -> None:
    settings = [
        "train.learning_rate=2e-3",
        "train.batch_size=64",
        "train.steps=234",
        "train.evaluate_every_epochs=3",
    ]
    words = "data.tokenizer=bpe"  # fewer tokens than characters, and each of them means something: less to learn
    outcome = train_small("data.train_pairs=5000", words, *settings)
    data = load_scenes(DataConfig(train_pairs=5000, captions=4), 32)
    floor = linear_baseline(data.train, data.splits["test"])
    assert outcome.evaluation is not None
    print(
        f"linear baseline R@1 {floor:.1%}, model after 3 epochs {outcome.evaluation['t2i_r1']:.1%}"
    )
    assert outcome.evaluation["chance"] < floor < outcome.evaluation["t2i_r1"] / 2


def test_the_same_seed_gives_the_same_losses_and_another_gives_others(here: Path) -> None:
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        train_small("train.steps=4", f"train.seed={seed}", name=name)
    assert losses("one") == losses("same") != losses("other")


def test_a_run_whose_ranks_differ_before_the_first_step_has_failed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(trainer: object) -> None:
        raise TrainingError("Rank 1 on b has other batches.")

    monkeypatch.setattr(ranks_in_a_run, "share_start", refuse)
    with pytest.raises(TrainingError, match="other batches"):
        train_small()
    assert events("failed")[0]["error"] == "Rank 1 on b has other batches."


def test_a_loss_that_is_not_a_number_ends_the_run_and_keeps_the_last_good_checkpoint(
    here: Path,
) -> None:
    settings = [
        "train.learning_rate=1e30",
        "train.warmup=0",
        "train.checkpoint_every_seconds=0.000001",
    ]
    with pytest.raises(
        TrainingError, match=r"not a number at step \d+(.|\n)*--set train\.learning_rate="
    ):
        train_small(*settings)
    assert find_run("run").state == "failed"
    assert events("failed")[0]["error"].startswith("The ")
    kept = checkpoint.list_checkpoints(here / "runs/run/checkpoints")
    assert kept
    for path in kept:
        weights = checkpoint.load_file(path / "weights.safetensors")
        assert path.name in ("step-00000000", "step-00000001")
        assert all(bool(np.isfinite(tensor.numpy()).all()) for tensor in weights.values())


def test_a_signal_after_the_last_step_does_not_spoil_a_finished_run(here: Path) -> None:
    def interrupt(event) -> None:
        if event.type == "evaluation":
            signal.raise_signal(signal.SIGINT)

    outcome = train_small(
        "train.steps=4", "train.evaluate_every_epochs=9", callbacks=Callbacks([interrupt])
    )
    assert (outcome.state, outcome.exit_status) == ("finished", 0)


@pytest.mark.parametrize("place", ["recipes/mine.toml", "elsewhere/my own.toml"])
def test_a_recipe_file_names_its_run_after_itself(here: Path, place: str) -> None:
    path = here / place
    path.parent.mkdir()
    path.write_text('[model]\nname = "tiny"\n')
    for recipe in (place, str(path)):
        outcome = train(recipe, [*SMALL, "train.steps=1"])
        assert Path(outcome.run).parent == Path("runs")
        assert Path(outcome.run).name.startswith(("mine", "my-own"))


@pytest.mark.parametrize(
    ("setting", "message"), [("train.beta1=1", "at most 0.9999"), ("train.minutes=inf", "finite")]
)
def test_settings_that_cannot_work_leave_no_run_behind(
    here: Path, setting: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train_small(setting)
    with pytest.raises(ConfigError, match="--minutes must be more than 0"):
        train_small(minutes=0.0)
    assert not Path("runs").exists()


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")
def test_the_accelerator_trains_and_resumes(here: Path) -> None:
    settings = [setting for setting in SMALL if "device" not in setting]
    outcome = train("first-run", [*settings, "train.device=accelerator"], name="run")
    assert outcome.state == "finished"
    assert outcome.devices["image"] != "cpu"


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="only CUDA records graphs, and there is none here"
)
def test_a_recorded_step_gives_the_losses_of_the_plain_one(here: Path) -> None:
    settings = [setting for setting in SMALL if "device" not in setting]
    for how in ("none", "graph"):
        train("first-run", [*settings, "train.device=cuda", f"train.compile={how}"], name=how)
    assert losses("graph") == losses("none")


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="only CUDA records graphs, and there is none here"
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_recorded_half_precision_with_every_schedule_follows_the_plain_one(
    here: Path, dtype: str
) -> None:
    settings = [setting for setting in SMALL if "device" not in setting]
    changes = [
        f"train.dtype={dtype}",
        "train.cheap_size=16",
        "train.cheap_share=0.5",
        "train.crop=0.8",
        "train.flip=0.5",
    ]
    for how in ("none", "graph"):
        train(
            "first-run",
            [*settings, "train.device=cuda", f"train.compile={how}", *changes],
            name=how,
        )
    plain = losses("none")
    assert losses("graph") == {step: pytest.approx(loss, rel=0.05) for step, loss in plain.items()}


@pytest.mark.slow
def test_what_cannot_be_compiled_runs_uncompiled_and_says_so_once(here: Path) -> None:
    settings = set_flags(*SMALL, "train.steps=2", "train.compile=compiled")
    # torch looks for a compiler here first, and only in a new process.
    nothing = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(here / "inductor")}
    done = subprocess.run(
        command("train", "--name", "run", *settings),
        env={**os.environ, **nothing},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compiled was asked for, but nothing can be compiled here") == 1
    assert tomllib.loads(Path("runs/run/run.toml").read_text())["train"]["compile"] == "none"


def test_what_the_cpu_cannot_compute_is_refused_before_images_are_drawn(here: Path) -> None:
    drawn: list[str] = []
    callbacks = Callbacks(data_progress=lambda *told: drawn.append(str(told)))
    settings = ["train.device=cpu", "train.dtype=float32", "train.linear=triton"]
    with pytest.raises(ConfigError, match="cannot be had on"):
        prepared("first-run", settings, None, callbacks)
    assert not drawn


def test_kernels_that_only_the_cpu_has_are_not_refused_because_of_an_accelerator_that_nobody_named() -> (
    None
):
    asked, found = TrainConfig(dtype="float32", linear="triton"), Pretended()
    check_kernels_early(asked, found)
    with pytest.raises(ConfigError, match="cannot be had on"):
        check_kernels_early(replace(asked, device="xpu"), found)


def test_a_graph_is_refused_where_none_can_be_recorded(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.compile graph cannot be had on cpu"):
        train_small("train.compile=graph")


def test_a_batch_larger_than_the_data_is_refused(here: Path) -> None:
    with pytest.raises(DataError, match="more than the 64 training images"):
        train_small("train.batch_size=65")
    assert Run(Path("runs/run")).never_began


def test_a_device_that_is_not_here_is_refused(here: Path) -> None:
    missing = "mps" if not torch.backends.mps.is_available() else "cuda"
    with pytest.raises(ConfigError, match=f"train.device {missing} is not here"):
        train_small(f"train.device={missing}")


def test_evaluation_can_be_repeated_and_the_model_loads(here: Path) -> None:
    outcome = train_small()
    result = evaluate(EvaluationRequest("run", device="cpu"))
    assert outcome.evaluation is not None
    assert {**result["evaluation"], "split": "test"} == outcome.evaluation
    assert 0 <= result["linear_baseline"] < 0.5
    model = lapclip.load("runs/run")
    text = model.encode_text(["a red cat on the left, at night.", "two blue cakes"])
    assert text.shape == (2, 64)
    np.testing.assert_allclose(np.linalg.norm(text, axis=1), 1, rtol=1e-5)


def test_the_log_takes_names_that_are_no_text(tmp_path: Path) -> None:
    config = build_config([read_recipe("first-run"), parse_settings(SMALL)], SHAPES)
    said = Resumed(
        step=1,
        steps=2,
        batch_size=8,
        checkpoint="step-1",
        skipped=[],
        notes=["left out a\udcff.jpg"],
    )
    with recording(Run(tmp_path), Callbacks(), config) as log:
        log.append(said)
    assert "left out a\\udcff.jpg" in (tmp_path / "log.txt").read_text(encoding="utf-8")
