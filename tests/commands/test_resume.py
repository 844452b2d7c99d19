"""`lapclip resume`: runs that go on as if nothing had happened, in this process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import lapclip
from lapclip import paths
from lapclip.cli import interrupts
from lapclip.cli.resume import resume as resume_command
from lapclip.commands.resume import resume
from lapclip.errors import CheckpointError, RunError
from lapclip.machine import choose_device
from lapclip.machine.desktop import Signals
from lapclip.runs.folder import find_run
from lapclip.training import checkpoint, held_out_scores
from lapclip.training.distributed import ALONE
from lapclip.training.preparation import prepare_again
from lapclip.training.request import Callbacks
from lapclip.weights import WEIGHTS

from ..conftest import SMALL, set_flags
from ..conftest import lapclip as command
from ..small_runs import events, losses, stop_after, train_small

SAVING = ("train.steps=6", "train.checkpoint_every_seconds=0.000001", "data.train_pairs=32")
HALF = [
    "train.dtype=float16",
    "train.cheap_size=16",
    "train.cheap_share=0.5",
    "train.crop=0.8",
    "train.flip=0.5",
]


def test_resumed_run_matches_uninterrupted_run_step_for_step(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_small("train.crop=0.6", name="whole")
    asked = iter([None] * 6 + ["enough"])
    with monkeypatch.context() as patched:
        patched.setattr(Signals, "reason", lambda self: next(asked))
        first = train_small("train.crop=0.6", name="parts")
    assert (first.state, first.steps) == ("stopped", 7)
    second = resume("parts")
    assert (second.state, second.steps) == ("finished", 12)
    assert losses("parts") == losses("whole")
    assert second.evaluation == whole.evaluation
    for name in ("weights.safetensors", "optimizer.safetensors"):
        files = [
            here / "runs" / run / "checkpoints" / "step-00000012" / name
            for run in ("whole", "parts")
        ]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_run_goes_on_with_the_tokens_it_began_with_and_the_words_it_predicts(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bpe = (
        "data.tokenizer=bpe",
        "data.vocabulary=600",
        "train.word_weight=0.3",
        "train.optimizer=muon",
    )
    train_small(*bpe, name="whole")
    assert (
        find_run("whole")
        .read_settings()["reasons"]["data.tokenizer"]
        .startswith("asked for: a BPE of ")
    )
    asked = iter([None] * 6 + ["enough"])
    with monkeypatch.context() as patched:
        patched.setattr(Signals, "reason", lambda self: next(asked))
        assert train_small(*bpe, name="parts").state == "stopped"
    # Another release of what learns the tokens might number them otherwise, so they are not learnt again.
    monkeypatch.setattr(
        "lapclip.training.preparation.fit_vocabulary", lambda *_: pytest.fail("learnt again")
    )
    assert resume("parts").state == "finished"
    assert losses("parts") == losses("whole")
    saved = json.loads((here / "runs" / "parts" / "tokenizer.json").read_text())
    assert lapclip.load("runs/parts").tokenizer.to_dict() == saved
    assert saved["kind"] == "bpe"
    word_losses = [
        [step["word_loss"] for step in events("step", run)] for run in ("whole", "parts")
    ]
    assert word_losses[0] == word_losses[1]
    assert word_losses[0][-1] < word_losses[0][0]
    assert "word_embedding" not in load_file(here / "runs" / "parts" / "model" / WEIGHTS)


def test_stop_is_polled_and_resume_goes_on(here: Path) -> None:
    outcome = train_small(callbacks=stop_after(3))
    assert outcome.state == "stopped"
    assert outcome.steps == 4  # the loss is read one step late
    assert resume("run").state == "finished"


def test_a_full_disk_fails_the_run_and_resume_finishes_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint.save_file

    def full_after_the_first(tensors, path, *about) -> None:
        if "step-00000000" not in str(path):
            raise OSError(28, "No space left on device")
        real(tensors, path, *about)

    monkeypatch.setattr(checkpoint, "save_file", full_after_the_first)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train_small()
    assert find_run("run").state == "failed"
    monkeypatch.undo()
    monkeypatch.chdir(here)
    half = (
        here / "runs/run/model/.model.safetensors.123-4-elsewhere.partial"
    )  # what a killed process left
    half.parent.mkdir(exist_ok=True)
    half.write_text("half")
    os.utime(half, (1, 1))
    assert resume("run").state == "finished"
    assert not half.exists()


def test_a_damaged_checkpoint_is_skipped_with_a_word(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(
            "lapclip.training.checkpoint.keep_newest", lambda *_: None
        )  # as before it was finished
        train_small("train.checkpoint_every_epochs=1", name="whole")
    shutil.copytree("runs/whole", "runs/copy")
    run = find_run("copy")
    lines = [
        line
        for line in run.events.read_text().splitlines()
        if json.loads(line)["type"] != "finished"
    ]
    run.events.write_text("\n".join(lines) + "\n")
    (run.checkpoints / "step-00000012" / "weights.safetensors").write_bytes(b"short")
    assert resume("copy").state == "finished"
    assert losses("copy") == losses("whole")
    (resumed,) = events("resumed", "copy")
    assert resumed["step"] == 8
    assert "weights.safetensors" in resumed["skipped"][0]
    assert "skipped a damaged checkpoint" in run.log.read_text()


@pytest.fixture(scope="module")
def undisturbed_losses(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[int, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("undisturbed"))
        train_small(*SAVING)
        return losses()


@pytest.mark.parametrize("dies_in", ["save_file", "flush", "replace", "list_checkpoints"])
@pytest.mark.parametrize("at_call", [1, 2, 3, 5, 8])
def test_dying_anywhere_inside_a_save_loses_nothing(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed_losses: dict[int, float],
    dies_in: str,
    at_call: int,
) -> None:
    """What kill -9 does, at a chosen line: no handler runs, no clean-up is reached."""

    class Killed(BaseException):
        pass

    home = paths if dies_in in ("flush", "replace") else checkpoint
    real, calls = getattr(home, dies_in), iter(range(1, 10_000))

    def dying(*arguments):
        if next(calls) == at_call:
            raise Killed
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(home, dies_in, dying)
        for attempt in (lambda: train_small(*SAVING), lambda: resume("run")):
            with contextlib.suppress(Killed, RunError):
                attempt()
    if not Path("runs/run").exists():  # it died before there was a run
        train_small(*SAVING)
    if find_run("run").last_state() != "finished":
        assert resume("run").state == "finished"
    assert losses("run") == undisturbed_losses
    assert not list(Path("runs/run/checkpoints").glob(".*"))


def test_a_run_resumed_before_its_second_checkpoint_keeps_its_first(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_small(callbacks=Callbacks([_stop_at_once]))
    shutil.rmtree("runs/run/checkpoints/step-00000001")
    untouched = (here / "runs/run/checkpoints/step-00000000/state.json").stat().st_mtime_ns
    with monkeypatch.context() as patched:
        patched.setattr(Signals, "reason", lambda self: "enough")
        resume("run")
    assert (here / "runs/run/checkpoints/step-00000000/state.json").stat().st_mtime_ns == untouched


def test_a_wish_to_stop_made_during_set_up_is_kept(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_small(callbacks=Callbacks([_stop_at_once]))

    def slow_set_up(run, saved, progress, ranks):
        run.ask_to_stop()
        return prepare_again(run, saved, progress, ranks)

    monkeypatch.setattr("lapclip.training.trainer.prepare_again", slow_set_up)
    assert resume("run").state == "stopped"


@pytest.mark.parametrize(
    "changes", [["train.dtype=bfloat16"], HALF], ids=["bfloat16", "float16 with schedules"]
)
def test_runs_in_half_precision_resume_to_the_same_losses(here: Path, changes: list[str]) -> None:
    changes = [*changes, "train.steps=6"]
    train_small(*changes, name="whole")
    assert train_small(*changes, callbacks=stop_after(2)).state == "stopped"
    assert resume("run").state == "finished"
    assert losses() == losses("whole")


@pytest.mark.parametrize(
    ("setting", "value", "refused"),
    [
        ("device", "mps", "train.device mps is not here"),
        ("linear", "triton", "train.linear triton cannot be had"),
    ],
)
def test_a_run_of_another_machine_is_refused_with_a_command_that_works_here(
    here: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, refused: str
) -> None:
    monkeypatch.setattr(choose_device, "accelerator_here", lambda: None)
    train_small(name="mine", callbacks=stop_after(3))
    settings = here / "runs" / "mine" / "run.toml"
    changed = re.sub(
        rf'^{setting} = ".*"$', f'{setting} = "{value}"', settings.read_text(), flags=re.MULTILINE
    )
    settings.write_text(changed)
    with pytest.raises(RunError, match=f"mine began on another machine: {refused}") as caught:
        resume("mine")
    assert caught.value.hint.startswith("a new run: ")
    for chosen_anew in ("device", "linear"):
        assert f"--set train.{chosen_anew}=auto" in caught.value.hint


def test_a_finished_run_is_not_resumed(here: Path, trained: Path) -> None:
    assert [path.name for path in (trained / "checkpoints").iterdir()] == ["step-00000012"]
    with pytest.raises(RunError, match=r"is finished.*\n.*lapclip eval mine"):
        resume(shutil.copytree(trained, here / "runs" / "mine").name)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows lets few users make links")
@pytest.mark.parametrize(
    "asked", ["resume mine", "resume mine --background", "export mine --to onnx", "eval mine"]
)
def test_no_command_writes_where_a_link_in_a_run_leads(
    here: Path, trained: Path, asked: str
) -> None:
    run = Path(shutil.copytree(trained, here / "runs" / "mine"))
    (here / "precious").mkdir()
    (here / "precious" / "bashrc").write_text("half a line")
    for name, target in (
        ("exported", "precious"),
        ("evaluation", "precious"),
        ("log.txt", "precious/bashrc"),
    ):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(here / target)
    done = command(*asked.split())
    assert done.returncode == 2
    assert str(Path("runs/mine/evaluation")) in done.stderr  # the first of them
    assert "Try: " in done.stderr
    assert (here / "precious" / "bashrc").read_text() == "half a line"
    assert len(list((here / "precious").iterdir())) == 1


def test_an_emptied_run_is_not_resumed(here: Path) -> None:
    train_small(name="run", callbacks=Callbacks([_stop_at_once]))
    shutil.rmtree("runs/run/checkpoints")
    with pytest.raises(RunError, match="has no good checkpoint left"):
        resume("run")


def test_a_run_killed_before_its_first_step_starts_again(here: Path) -> None:
    train_small(name="whole")
    train_small(name="run", callbacks=Callbacks([_stop_at_once]))
    run = find_run("run")
    shutil.rmtree(run.checkpoints)
    run.events.unlink()
    assert resume("run").state == "finished"
    assert losses("run") == losses("whole")


def test_other_data_than_the_run_began_with_is_refused(here: Path) -> None:
    train_small(callbacks=Callbacks([_stop_at_once]))
    settings = Path("runs/run/run.toml")
    settings.write_text(
        settings.read_text().replace("data_fingerprint = ", "data_fingerprint = 'x' # ")
    )
    with pytest.raises(RunError, match="The data is not what"):
        resume("run")


def test_moved_data_is_told_to_all_who_go_on_with_a_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_small(callbacks=Callbacks([_stop_at_once]))
    moved = str(here / "photos")
    sources: list[str | None] = []

    def gather_again(run, saved, progress):
        sources.append(saved["data"]["source"])
        raise RunError("enough")

    monkeypatch.setattr("lapclip.commands.join.gather_again", gather_again)
    with pytest.raises(RunError, match="enough"):
        resume_command("run", data="photos", machines=2)
    assert sources == [moved]

    def take_part(begin, resume):
        begin(ALONE)
        resume(find_run("run"), ALONE, True)  # of a job that was started again

    monkeypatch.setattr("lapclip.machine.torchrun.under_torchrun", lambda: True)
    monkeypatch.setattr("lapclip.training.ranks_in_a_run.take_part", take_part)
    monkeypatch.setattr(
        "lapclip.commands.resume.resume", lambda *_, data, **__: sources.append(data)
    )
    assert resume_command("run", data="photos") == 0
    assert sources[1:] == ["photos", "photos"]


def _stop_at_once(event) -> None:
    if event.type == "checkpoint":
        find_run(None).ask_to_stop()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to send to oneself")
def test_a_run_that_prepares_its_data_ends_when_it_is_told_to(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it went on")

    train_small("train.steps=3", name="mine", callbacks=stop_after(1))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    interrupts.install()
    try:
        with monkeypatch.context() as patch:
            patch.setattr("lapclip.join.send_data.load_data", prepare)
            done = command("resume", "mine")
        assert done.returncode == 143
        assert "lapclip resume mine" in done.stderr
        with monkeypatch.context() as patch:
            patch.setattr("lapclip.training.preparation.load_data", prepare)
            assert command("train", "--name", "new", *set_flags(*SMALL)).returncode == 143
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not find_run("mine").pulse.exists()
    assert resume("mine").state == "finished"
    assert (find_run("new").state, find_run("new").never_began) == ("stopped", True)


def test_a_best_model_saved_after_the_last_checkpoint_stays_the_best(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut between the two leaves; on a GPU the steps in between do not come back to the bit."""

    class Killed(BaseException):
        pass

    def die(event) -> None:
        if event.type == "evaluation" and event.step == 8:
            raise Killed

    rarely = [
        "train.evaluate_every_epochs=2",
        "train.checkpoint_every_epochs=0",
        "train.checkpoint_every_seconds=0",
    ]
    with pytest.raises(Killed):
        train_small(*rarely, callbacks=Callbacks([die]))
    weights = Path("runs/run/model") / WEIGHTS
    best = weights.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(held_out_scores, "merit_of", lambda *_: 0.0)
        assert resume("run").state == "finished"
    assert weights.read_bytes() == best
    assert "step 8" in events("resumed")[-1]["notes"][0]
    assert [event["best"] for event in events("evaluation")[1:]] == [False, False]


def test_a_run_stopped_where_it_would_end_early_ends_there(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out_scores, "merit_of", lambda *_: 0.5)
    settings = ["train.patience=1", "train.evaluate_every_epochs=1"]
    whole = train_small(*settings, name="whole")
    assert whole.steps < 12
    assert (
        train_small(*settings, name="parts", callbacks=stop_after(whole.steps - 1, "parts")).state
        == "stopped"
    )
    parts = resume("parts")
    assert (parts.state, parts.steps, parts.early) == ("finished", whole.steps, whole.early)
    assert parts.evaluation == whole.evaluation


def test_a_run_whose_best_model_is_gone_makes_one(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no more")

    with monkeypatch.context() as patched:
        patched.setattr("lapclip.training.final_scores._scores", fail)
        with pytest.raises(RuntimeError):
            train_small()
    shutil.rmtree("runs/run/model")
    assert resume("run").state == "finished"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("[reasons]", None, "reasons"),
        ("[run", "[other", "run is no section"),
        ("[work]", "[other]\nx = 1\n[[work]]", "work is no section"),
        ("\nthreads = ", "\nthreads = 1000000 #", "train.threads must be at most 1024"),
        (
            "\nloader_threads = ",
            "\nloader_threads = 1000000 #",
            "train.loader_threads must be at most 1024",
        ),
        ("\ntext_layers = ", "\ntext_layers = 1000000 #", "needs about"),
        ("\nbattery = ", "\nbatery = ", "batery"),
    ],
)
def test_a_damaged_run_toml_is_refused_in_a_line(
    before: str, after: str | None, said: str, trained: Path, here: Path
) -> None:
    shutil.copytree(trained, here / "runs" / "mine")
    run = find_run("mine")
    text = run.settings.read_text()
    assert before in text
    whole, _, rest = text.rpartition(before)
    text = whole if after is None else f"{whole}{after}{rest}"
    run.settings.write_text(
        "run = 3\n" + text.replace("[run", "[other") if before == "[run" else text
    )
    lines = [
        line
        for line in run.events.read_text().splitlines()
        if json.loads(line)["type"] != "finished"
    ]
    run.events.write_text("\n".join(lines) + "\n")
    refused = command("resume", "mine")
    assert refused.returncode == 2
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr
    if before == "[run":
        assert command("stop", "mine").returncode == 2


@pytest.mark.parametrize(
    ("name", "value"), [("batch_size", 8), ("steps", 3), ("learning_rate", 0.5)]
)
def test_a_setting_that_was_edited_since_the_run_began_is_named(
    here: Path, name: str, value: float
) -> None:
    train_small(name="mine", callbacks=stop_after(5, "mine"))
    settings = here / "runs/mine/run.toml"
    before = settings.read_text()
    settings.write_text(re.sub(rf"(?m)^{name} = .*$", f"{name} = {value}", before))
    with pytest.raises(
        RunError, match=rf"run.toml was edited: train.{name} is {value}, and the run began with"
    ):
        resume("mine")
    settings.write_text(before)
    assert resume("mine").state == "finished"
