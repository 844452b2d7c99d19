"""Whole runs, in this process."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import lapclip
from lapclip.commands import evaluate as scoring
from lapclip.commands import run_setup as preparing
from lapclip.commands import train as launch
from lapclip.config import DataConfig, build_config, parse_settings, read_recipe, replace_in
from lapclip.data.batches import BatchPlan
from lapclip.data.scenes.dataset import load_scenes
from lapclip.errors import CheckpointError, ConfigError, DataError, RunError, TrainingError
from lapclip.evaluation.linear_baseline import linear_baseline
from lapclip.model.shapes import SHAPES
from lapclip.runs.event_log import read_events
from lapclip.runs.events import Resumed
from lapclip.runs.folder import Run, find_run
from lapclip.training import checkpoint

from .conftest import SMALL, command, set_flags


def train(*settings: str, name: str = "run", **options) -> launch.Outcome:
    return launch.start("first-run", [*SMALL, *settings], name=name, **options)


def events(kind: str, name: str = "run") -> list[dict]:
    return [event for event in read_events(Path("runs") / name / "events.jsonl") if event["type"] == kind]


def losses(name: str = "run") -> dict[int, float]:
    """The last event of each step number."""
    return {event["step"]: event["loss"] for event in events("step", name)}


def test_a_run_leaves_everything_it_promises(here: Path) -> None:
    outcome = train()
    assert outcome.state == "finished"
    assert outcome.exit_status == 0
    assert outcome.steps == 12
    assert outcome.devices == {"image": "cpu", "text": "cpu"}
    assert outcome.peak_memory_bytes > 1e8
    assert 0 < outcome.training_seconds <= outcome.seconds
    assert outcome.evaluation is not None
    assert outcome.evaluation["candidates"] == 240
    run = here / "runs" / "run"
    assert {path.name for path in run.iterdir()} >= {"run.toml", "events.jsonl", "log.txt", "checkpoints", "model"}
    settings = tomllib.loads((run / "run.toml").read_text())
    assert settings["train"]["threads"] == 1
    assert settings["reasons"]["train.steps"] == "asked for"
    assert "finished: t2i R@1/5/10" in (run / "log.txt").read_text()


def test_events_are_named_as_the_contract_says(here: Path) -> None:
    train()
    kinds = [event["type"] for event in read_events(Path("runs/run/events.jsonl"))]
    assert kinds[:3] == ["started", "checkpoint", "step"]
    assert kinds[-1] == "finished"
    assert {"memory", "evaluation", "sensors"} <= set(kinds)
    sensors = events("sensors")
    assert [event["step"] for event in sensors][:: len(sensors) - 1] == [1, 12]  # the first and the last at least
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
    assert first.keys() >= {"v", "time", "step", "epoch", "loss", "t2i_accuracy", "i2t_accuracy", "logit_scale"}
    assert first.keys() >= {"temperature", "lr", "grad_norm", "grad_norms", "seconds"}
    assert list(first["seconds"]) == ["load", "preprocess", "transfer", "forward", "backward", "optimizer"]
    assert first["temperature"] == pytest.approx(0.07, rel=1e-6)
    assert first["temperature"] == pytest.approx(math.exp(-first["logit_scale"]))
    assert events("step")[-1]["seconds"] is None
    assert [event["step"] for event in events("step")] == list(range(1, 13))


def test_the_model_learns_more_than_twice_what_a_linear_baseline_does(here: Path) -> None:
    """The smallest model, on all of the default images; the default run is measured in benchmarks/first_run.py."""
    settings = ["model.name=tiny", "train.learning_rate=2e-3", "train.epochs=8", "train.evaluate_every_epochs=8"]
    fixed = ["train.device=cpu", "train.dtype=float32", "train.threads=1"]
    outcome = launch.start("first-run", [*settings, *fixed], name="run")
    data = load_scenes(DataConfig(train_pairs=5000, captions=4), 32)
    floor = linear_baseline(data.train, data.splits["test"])
    assert outcome.evaluation is not None
    print(f"linear baseline R@1 {floor:.1%}, model after 8 epochs {outcome.evaluation['t2i_r1']:.1%}")
    assert outcome.evaluation["chance"] < floor < outcome.evaluation["t2i_r1"] / 2


def test_the_same_seed_gives_the_same_losses_and_another_gives_others(here: Path) -> None:
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        train("train.steps=4", f"train.seed={seed}", name=name)
    assert losses("one") == losses("same") != losses("other")


def test_patch_dropout_trains_and_changes_the_losses(here: Path) -> None:
    train("train.steps=4", name="all")
    train("train.steps=4", "train.patch_dropout=0.5", name="half")
    assert losses("all") != losses("half")


def test_resumed_run_matches_uninterrupted_run_step_for_step(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train("train.patch_dropout=0.25", name="whole")
    asked = iter([None] * 6 + ["enough"])
    with monkeypatch.context() as patched:
        patched.setattr(launch.Signals, "reason", lambda self: next(asked))
        first = train("train.patch_dropout=0.25", name="parts")
    assert (first.state, first.steps) == ("stopped", 7)
    second = launch.resume("parts")
    assert (second.state, second.steps) == ("finished", 12)
    assert losses("parts") == losses("whole")
    assert second.evaluation == whole.evaluation
    for name in ("weights.safetensors", "optimizer.safetensors"):
        files = [here / "runs" / run / "checkpoints" / "step-00000012" / name for run in ("whole", "parts")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_run_goes_on_with_the_tokens_it_began_with(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bpe = ("data.tokenizer=bpe", "data.vocabulary=600")
    train(*bpe, name="whole")
    assert find_run("whole").read_settings()["reasons"]["data.tokenizer"].startswith("asked for: a BPE of ")
    asked = iter([None] * 6 + ["enough"])
    with monkeypatch.context() as patched:
        patched.setattr(launch.Signals, "reason", lambda self: next(asked))
        assert train(*bpe, name="parts").state == "stopped"
    # Another release of what learns the tokens might number them otherwise, so they are not learnt again.
    monkeypatch.setattr(launch, "fit_vocabulary", lambda *_: pytest.fail("learnt again"))
    assert launch.resume("parts").state == "finished"
    assert losses("parts") == losses("whole")
    saved = json.loads((here / "runs" / "parts" / "tokenizer.json").read_text())
    assert lapclip.load("runs/parts").tokenizer.to_dict() == saved
    assert saved["kind"] == "bpe"


def test_stop_is_polled_and_resume_goes_on(here: Path) -> None:
    def ask_at_three(event) -> None:
        if getattr(event, "step", None) == 3 and event.type == "step":
            find_run("run").ask_to_stop()

    outcome = train(hooks=preparing.Hooks([ask_at_three]))
    assert outcome.state == "stopped"
    assert outcome.steps == 4  # the loss is read one step late
    assert launch.resume("run").state == "finished"


def test_minutes_become_steps_once(here: Path) -> None:
    outcome = launch.start("first-run", [*SMALL, "train.steps=0"], minutes=0.05, name="run")
    settings = tomllib.loads((here / "runs/run/run.toml").read_text())
    assert settings["train"]["steps"] == outcome.steps > 1
    assert settings["reasons"]["train.steps"].startswith("0.05 minutes at")
    with pytest.raises(ConfigError, match=r"train\.steps and train\.minutes are both set"):
        launch.start("first-run", SMALL, minutes=1.0)


def test_a_loss_that_is_not_a_number_ends_the_run_and_keeps_the_last_good_checkpoint(here: Path) -> None:
    settings = ["train.learning_rate=1e30", "train.warmup=0", "train.checkpoint_every_seconds=0.000001"]
    with pytest.raises(TrainingError, match=r"not a number at step \d+(.|\n)*--set train\.learning_rate="):
        train(*settings)
    assert find_run("run").state == "failed"
    assert events("failed")[0]["error"].startswith("The ")
    kept = checkpoint.list_checkpoints(here / "runs/run/checkpoints")
    assert kept
    for path in kept:
        weights = checkpoint.load_file(path / "weights.safetensors")
        assert path.name in ("step-00000000", "step-00000001")
        assert all(bool(np.isfinite(tensor.numpy()).all()) for tensor in weights.values())


def test_a_full_disk_fails_the_run_and_resume_finishes_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint.save_file

    def full_after_the_first(tensors, path) -> None:
        if "step-00000000" not in str(path):
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full_after_the_first)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train()
    assert find_run("run").state == "failed"
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert launch.resume("run").state == "finished"


def test_a_damaged_checkpoint_is_skipped_with_a_word(here: Path) -> None:
    train("train.checkpoint_every_epochs=1", name="whole")
    shutil.copytree("runs/whole", "runs/copy")
    run = find_run("copy")
    lines = [line for line in run.events.read_text().splitlines() if json.loads(line)["type"] != "finished"]
    run.events.write_text("\n".join(lines) + "\n")
    (run.checkpoints / "step-00000012" / "weights.safetensors").write_bytes(b"short")
    assert launch.resume("copy").state == "finished"
    assert losses("copy") == losses("whole")
    (resumed,) = events("resumed", "copy")
    assert resumed["step"] == 8
    assert "weights.safetensors" in resumed["skipped"][0]
    assert "skipped a damaged checkpoint" in run.log.read_text()


SAVING = ("train.steps=6", "train.checkpoint_every_seconds=0.000001", "data.train_pairs=32")


@pytest.fixture(scope="module")
def undisturbed_losses(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[int, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("undisturbed"))
        train(*SAVING)
        return losses()


@pytest.mark.parametrize("dies_in", ["save_file", "flush", "replace", "list_checkpoints"])
@pytest.mark.parametrize("at_call", [1, 2, 3, 5, 8])
def test_dying_anywhere_inside_a_save_loses_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, undisturbed_losses: dict[int, float], dies_in: str, at_call: int
) -> None:
    """What kill -9 does, at a chosen line: no handler runs, no clean-up is reached."""

    class Killed(BaseException):
        pass

    real, calls = getattr(checkpoint, dies_in), iter(range(1, 10_000))

    def dying(*arguments):
        if next(calls) == at_call:
            raise Killed
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, dies_in, dying)
        for attempt in (lambda: train(*SAVING), lambda: launch.resume("run")):
            with contextlib.suppress(Killed, RunError):
                attempt()
    if find_run("run").last_state() != "finished":
        assert launch.resume("run").state == "finished"
    assert losses("run") == undisturbed_losses
    assert not list(Path("runs/run/checkpoints").glob(".*"))


def test_a_run_resumed_before_its_second_checkpoint_keeps_its_first(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(hooks=preparing.Hooks([_stop_at_once]))
    shutil.rmtree("runs/run/checkpoints/step-00000001")
    untouched = (here / "runs/run/checkpoints/step-00000000/state.json").stat().st_mtime_ns
    with monkeypatch.context() as patched:
        patched.setattr(launch.Signals, "reason", lambda self: "enough")
        launch.resume("run")
    assert (here / "runs/run/checkpoints/step-00000000/state.json").stat().st_mtime_ns == untouched


def test_a_wish_to_stop_made_during_set_up_is_kept(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(hooks=preparing.Hooks([_stop_at_once]))
    reopen = launch.reopen

    def slow_set_up(run, saved, hooks):
        run.ask_to_stop()
        return reopen(run, saved, hooks)

    monkeypatch.setattr(launch, "reopen", slow_set_up)
    assert launch.resume("run").state == "stopped"


def test_a_signal_after_the_last_step_does_not_spoil_a_finished_run(here: Path) -> None:
    def interrupt(event) -> None:
        if event.type == "evaluation":
            signal.raise_signal(signal.SIGINT)

    outcome = train("train.steps=4", "train.evaluate_every_epochs=9", hooks=preparing.Hooks([interrupt]))
    assert (outcome.state, outcome.exit_status) == ("finished", 0)


@pytest.mark.parametrize("place", ["recipes/mine.toml", "elsewhere/my own.toml"])
def test_a_recipe_file_names_its_run_after_itself(here: Path, place: str) -> None:
    path = here / place
    path.parent.mkdir()
    path.write_text('[model]\nname = "tiny"\n')
    for recipe in (place, str(path)):
        outcome = launch.start(recipe, [*SMALL, "train.steps=1"])
        assert Path(outcome.run).parent == Path("runs")
        assert Path(outcome.run).name.startswith(("mine", "my-own"))


def test_short_epochs_are_not_all_evaluated_within_minutes(here: Path) -> None:
    short = [*SMALL, "train.steps=0", "train.batch_size=64"]  # an epoch is one step
    ready = preparing.prepare("first-run", short, 2.0, preparing.Hooks())
    steps, every = ready.config.train.steps, ready.config.train.evaluate_every_epochs
    assert 1 < steps / every <= preparing.MOST_EVALUATIONS + 1
    asked = preparing.prepare("first-run", [*short, "train.evaluate_every_epochs=1"], 2.0, preparing.Hooks())
    assert asked.config.train.evaluate_every_epochs == 1


def test_minutes_that_are_too_few_or_stand_beside_epochs_are_said() -> None:
    settings = [*SMALL, "train.steps=0", "train.epochs=3"]
    ready = preparing.prepare("first-run", settings, 0.0001, preparing.Hooks())
    assert ready.config.train.steps == 1
    epochs, few = ready.notes
    assert epochs == "train.epochs is not used: the run is to take 0.0001 minutes"
    assert few.startswith("0.0001 minutes are enough for 1 step, fewer than the 8 of two epochs: expect little; ")


@pytest.mark.parametrize(("setting", "message"), [("train.beta1=1", "at most 0.9999"), ("train.minutes=inf", "finite")])
def test_settings_that_cannot_work_leave_no_run_behind(here: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(setting)
    with pytest.raises(ConfigError, match="--minutes must be more than 0"):
        train(minutes=0.0)
    assert not Path("runs").exists()


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")
def test_the_accelerator_trains_and_resumes(here: Path) -> None:
    settings = [setting for setting in SMALL if "device" not in setting]
    outcome = launch.start("first-run", [*settings, "train.device=accelerator"], name="run")
    assert outcome.state == "finished"
    assert outcome.devices["image"] != "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only CUDA records graphs, and there is none here")
def test_a_recorded_step_gives_the_losses_of_the_plain_one(here: Path) -> None:
    settings = [setting for setting in SMALL if "device" not in setting]
    for how in ("none", "graph"):
        launch.start("first-run", [*settings, "train.device=cuda", f"train.compile={how}"], name=how)
    assert losses("graph") == losses("none")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only CUDA records graphs, and there is none here")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_recorded_half_precision_with_every_schedule_follows_the_plain_one(here: Path, dtype: str) -> None:
    settings = [setting for setting in SMALL if "device" not in setting]
    changes = [
        f"train.dtype={dtype}",
        "train.cheap_size=16",
        "train.cheap_share=0.5",
        "train.crop=0.8",
        "train.flip=0.5",
    ]
    for how in ("none", "graph"):
        launch.start("first-run", [*settings, "train.device=cuda", f"train.compile={how}", *changes], name=how)
    plain = losses("none")
    assert losses("graph") == {step: pytest.approx(loss, rel=0.05) for step, loss in plain.items()}


HALF = ["train.dtype=float16", "train.cheap_size=16", "train.cheap_share=0.5", "train.crop=0.8", "train.flip=0.5"]


@pytest.mark.parametrize("changes", [["train.dtype=bfloat16"], HALF], ids=["bfloat16", "float16 with schedules"])
def test_runs_in_half_precision_resume_to_the_same_losses(here: Path, changes: list[str]) -> None:
    changes = [*changes, "train.steps=6"]
    train(*changes, name="whole")

    def stop(event) -> None:
        if event.type == "step" and event.step == 2:
            find_run("run").ask_to_stop()

    assert train(*changes, hooks=preparing.Hooks([stop])).state == "stopped"
    assert launch.resume("run").state == "finished"
    assert losses() == losses("whole")


def test_a_run_from_before_kernels_were_chosen_goes_on_with_the_plain_ones(here: Path) -> None:
    plain = ["train.image_attention=fused", "train.text_attention=fused", "train.linear=torch"]
    train(*plain, name="whole")
    train(*plain, hooks=preparing.Hooks([_stop_at_once]))
    settings = Path("runs/run/run.toml")
    lines = settings.read_text().splitlines(keepends=True)
    new = ("image_attention", "text_attention", "linear", "recompute", "cheap_size", "cheap_share", "crop", "flip")
    settings.write_text("".join(line for line in lines if not line.startswith(new)))
    assert launch.resume("run").state == "finished"
    assert losses() == losses("whole")


def test_what_cannot_be_compiled_runs_uncompiled_and_says_so_once(here: Path) -> None:
    settings = set_flags(*SMALL, "train.compile=compiled")
    # torch looks for a compiler here first, and only in a new process.
    nothing = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(here / "inductor")}
    done = subprocess.run(
        command("train", "--name", "run", *settings), env={**os.environ, **nothing}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compiled was asked for, but nothing can be compiled here") == 1
    assert tomllib.loads(Path("runs/run/run.toml").read_text())["train"]["compile"] == "none"


@pytest.mark.parametrize(("share", "seconds"), [(0.0, 3.0), (0.2, 2.6), (0.5, 2.0), (1.0, 1.0)])
def test_minutes_count_the_cheap_part_at_its_own_price(
    here: Path, monkeypatch: pytest.MonkeyPatch, share: float, seconds: float
) -> None:
    settings = ["train.cheap_size=16", f"train.cheap_share={share}"]
    config = build_config([read_recipe("first-run"), parse_settings([*SMALL, *settings])], SHAPES)
    data = load_scenes(config.data, 32)
    config, tokenizer, _ = preparing.fit_vocabulary(config, data)
    plan = BatchPlan(data.train, tokenizer, 77, 16, 0)
    config, device, *_ = preparing.settle(config, plan, 40, lambda text: None)

    def price(step, plan, number, device) -> float:
        return 1.0 if step.inputs(plan.batch(1), number).side == 16 else 3.0

    monkeypatch.setattr(preparing, "time_step", price)
    built = preparing.build(replace_in(config, "train", steps=2, cheap_share=0.5), tokenizer, device)
    assert preparing.time_parts(config, data, plan, built, device)[0] == pytest.approx(seconds)


def test_a_graph_is_refused_where_none_can_be_recorded(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.compile graph cannot be had on cpu"):
        train("train.compile=graph")


def test_a_finished_run_is_not_resumed(here: Path, trained: Path) -> None:
    with pytest.raises(RunError, match=r"is finished.*\n.*lapclip eval mine"):
        launch.resume(shutil.copytree(trained, here / "runs" / "mine").name)


def test_an_emptied_run_is_not_resumed(here: Path) -> None:
    train(name="run", hooks=preparing.Hooks([_stop_at_once]))
    shutil.rmtree("runs/run/checkpoints")
    with pytest.raises(RunError, match="has no good checkpoint left"):
        launch.resume("run")


def test_a_run_killed_before_its_first_step_starts_again(here: Path) -> None:
    train(name="whole")
    train(name="run", hooks=preparing.Hooks([_stop_at_once]))
    run = find_run("run")
    shutil.rmtree(run.checkpoints)
    run.events.unlink()
    assert launch.resume("run").state == "finished"
    assert losses("run") == losses("whole")


def test_other_data_than_the_run_began_with_is_refused(here: Path) -> None:
    train(hooks=preparing.Hooks([_stop_at_once]))
    settings = Path("runs/run/run.toml")
    settings.write_text(settings.read_text().replace("data_fingerprint = ", "data_fingerprint = 'x' # "))
    with pytest.raises(RunError, match="The data is not what"):
        launch.resume("run")


def test_a_batch_larger_than_the_data_leaves_no_run_behind(here: Path) -> None:
    with pytest.raises(DataError, match="more than the 64 training images"):
        train("train.batch_size=65")
    assert not Path("runs").exists()


def test_a_device_that_is_not_here_is_refused(here: Path) -> None:
    missing = "mps" if not torch.backends.mps.is_available() else "cuda"
    with pytest.raises(ConfigError, match=f"train.device {missing} is not here"):
        train(f"train.device={missing}")


def test_evaluation_can_be_repeated_and_the_model_loads(here: Path) -> None:
    outcome = train()
    result = scoring.evaluate(scoring.Wanted("run", device="cpu"))
    assert outcome.evaluation is not None
    assert {**result["evaluation"], "split": "test"} == outcome.evaluation
    assert 0 <= result["linear_baseline"] < 0.5
    model = lapclip.load("runs/run")
    text = model.encode_text(["a red cat on the left, at night.", "two blue cakes"])
    assert text.shape == (2, 64)
    np.testing.assert_allclose(np.linalg.norm(text, axis=1), 1, rtol=1e-5)


def _stop_at_once(event) -> None:
    if event.type == "checkpoint":
        find_run(None).ask_to_stop()


def test_the_log_takes_names_that_are_no_text(tmp_path: Path) -> None:
    config = build_config([read_recipe("first-run"), parse_settings(SMALL)], SHAPES)
    said = Resumed(step=1, steps=2, batch_size=8, checkpoint="step-1", skipped=[], notes=["left out a\udcff.jpg"])
    with launch._recording(Run(tmp_path), preparing.Hooks(), config) as log:
        log.append(said)
    assert "left out a\\udcff.jpg" in (tmp_path / "log.txt").read_text(encoding="utf-8")
