"""Runs that outlive the command that started them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest

from lapclip.cli.app import app
from lapclip.commands import choose_recipe
from lapclip.commands.background import check_data_is_there
from lapclip.commands.resume import resume
from lapclip.config import DataConfig, parse_settings
from lapclip.data.sources.files import FILES
from lapclip.data.table import Table
from lapclip.errors import DataError, RunError
from lapclip.machine.polite import PolitePauses
from lapclip.runs.events import EventLog, Failed
from lapclip.runs.folder import (
    Run,
    TrainRequest,
    all_runs,
    create_run,
    find_run,
    find_unfinished_run,
)
from lapclip.runs.heartbeat import beat_of, read_beat, write_beat

from ..conftest import SMALL, lapclip, lapclip_process, set_flags, wait_until
from ..small_runs import photos, prepared_run, stop_after, train, train_small

LONG = [setting for setting in SMALL if "steps" not in setting] + ["train.steps=100000"]


def begin(name: str, settings: list[str], *more: str) -> CompletedProcess[str]:
    """Start a run in the background, by a command that then ends."""
    done = lapclip_process("train", "--background", "--name", name, *more, *set_flags(*settings))
    assert done.returncode == 0, done.stderr
    return done


def events(name: str) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in Path("runs", name, "events.jsonl").read_text().splitlines()
    ]


def test_a_run_in_the_background_works_on_is_listed_and_stops_when_asked(here: Path) -> None:
    done = begin("mine", LONG, "--json")
    assert json.loads(done.stdout) == {
        "run": str(Path("runs/mine")),
        "name": "mine",
        "state": "starting",
    }
    run = find_run("mine")
    assert run.state in ("starting", "running")
    wait_until(lambda: run.state == "running" and run.events.exists() and len(events("mine")) > 5)
    beat = read_beat(run.pulse)
    assert beat is not None
    assert beat.alive
    assert psutil.Process(beat.process).parent() != psutil.Process()  # it does not hang on this one
    (row,) = json.loads(lapclip("runs", "--json").stdout)["runs"]
    assert (row["name"], row["state"]) == ("mine", "running")
    stopped = lapclip("stop", "mine", "--json")
    assert json.loads(stopped.stdout)["state"] == "stopped", stopped.stderr
    assert not beat.alive  # so that the folder may be removed now
    assert "stopped after step" in run.log.read_text()
    assert not run.pulse.exists()
    assert not run.request.exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_a_process_that_dies_without_a_word_is_recognised_and_can_be_resumed(here: Path) -> None:
    begin("mine", LONG)
    run = find_run("mine")
    wait_until(
        lambda: (
            run.state == "running"
            and run.pulse.exists()
            and run.events.exists()
            and len(events("mine")) > 5
        )
    )
    beat = read_beat(run.pulse)
    assert beat is not None
    os.kill(beat.process, signal.SIGKILL)
    wait_until(lambda: not beat.alive and run.state == "died")
    listed = lapclip("runs")
    assert "died" in listed.stdout
    assert "resume mine" in listed.stdout
    assert lapclip_process("resume", "mine", "--background").returncode == 0
    assert run.state in ("starting", "running")
    wait_until(lambda: any(event["type"] == "resumed" for event in events("mine")))
    assert lapclip("stop", "mine").returncode == 0
    refused = lapclip("train", "--background", "--name", "mine", *set_flags(*LONG))
    assert refused.returncode == 2
    assert "exists" in refused.stderr


def test_a_caption_to_follow_is_never_taken_for_two(here: Path) -> None:
    refused = lapclip("train", "--ask", "cat|dog", *set_flags(*LONG))
    assert refused.returncode == 2
    assert "cat|dog" in refused.stderr


def test_stop_reaches_a_run_that_was_just_resumed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_small(callbacks=stop_after(1)).state == "stopped"
    run = find_run("run")
    assert run.stop_asked()
    in_background(["resume", "run", "--background"], monkeypatch)
    assert not run.stop_asked()  # forgotten before the process begins, and not by it
    run.pulse.unlink()
    run.ask_to_stop()
    assert resume("run", detached=True).state == "stopped"


def test_a_run_whose_data_is_gone_does_not_go_to_the_background(here: Path) -> None:
    photos(here / "photos")
    train(
        "photos",
        [*SMALL, f"data.source={here / 'photos'}", "train.cheap_size=0"],
        name="mine",
        callbacks=stop_after(1, "mine"),
    )
    (here / "photos").rename(here / "moved")
    refused = lapclip("resume", "mine", "--background")
    assert refused.returncode == 2
    assert "photos" in refused.stderr
    assert "lapclip resume mine --data FOLDER" in refused.stderr
    assert not find_run("mine").pulse.exists()
    assert lapclip("resume", "mine", "--background", "--data", "gone").returncode == 2
    check_data_is_there(find_run("mine"), "moved")


def test_stop_asks_again_where_the_request_was_forgotten(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_small(callbacks=stop_after(1)).state == "stopped"
    asked: list[bool] = []

    def state(run: Run) -> str:
        asked.append(run.stop_asked())
        if len(asked) == 4:
            run.clear_stop()  # as a run does that is just being resumed
        return "stopped" if len(asked) > 5 and asked[-1] else "running"

    monkeypatch.setattr(Run, "state", property(state))
    monkeypatch.setattr(
        "lapclip.cli.stop.time.sleep", lambda _: len(asked) < 20 or pytest.fail("not asked again")
    )
    assert lapclip("stop", "run").returncode == 0


def in_background(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the process in the background is given after `lapclip`, where this one is given some arguments."""
    commands: list[list[str]] = []

    class Started:
        pid = os.getpid()

        def __init__(self, command: list[str], **_: object) -> None:
            commands.append(command)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Started)
        done = lapclip(*arguments)
    assert done.returncode == 0, done.stderr
    (command,) = commands
    assert command[:4] == [sys.executable, "-P", "-m", "lapclip"]
    return command[4:]


def parsed(arguments: list[str]) -> dict[str, Any]:
    _, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    return dict(bound.arguments)


def test_what_train_was_asked_for_arrives_in_the_background(
    trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained, here / "runs" / "mine")
    photos(here / "photos", 12)
    words = ["--recipe", "seed", "--teacher", "mine", "--from", "mine", "--minutes", "2.5"]
    words += ["--device", "cpu", "--batch-size", "4", "--epochs", "3", "--lr", "0.001"]
    words += ["--set", "train.seed=3", "--ask", "some words", "--polite"]
    arguments = ["train", "photos", "--background", "--name", "chosen", *words]
    assert in_background(arguments, monkeypatch) == ["resume", "--detached", "--", "chosen"]
    request = TrainRequest.read(Run(Path("runs/chosen")).request)
    assert (request.recipe, request.minutes) == ("seed", 2.5)
    values = parse_settings(list(request.settings)).values
    assert values["data"] == {"source": str(here / "photos")}
    assert values["work"] == {"ask": "some words", "polite": True}
    assert values["train"] == {
        "start": str(here / "runs/mine"),
        "teacher": str(here / "runs/mine"),
        "seed": 3,
        "device": "cpu",
        "batch_size": 4,
        "epochs": 3,
        "learning_rate": 0.001,
    }


def test_a_run_in_the_background_without_a_name_is_named_after_its_recipe(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(here / "photos", 12)
    monkeypatch.setattr(choose_recipe, "towers_installed", lambda: True)
    found = in_background(["train", "--background", "--", "photos"], monkeypatch)
    assert found[-1] == "heads"  # the recipe for so few
    assert Run(Path("runs/heads")).state == "starting"


def test_resume_in_the_background_goes_on_with_the_run_that_was_the_newest(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared_run("mine", {"run": {"format": 1}})
    Path("photos").mkdir()
    for given, words in (
        ([], ["--", "mine"]),
        (["mine"], ["--", "mine"]),
        (["runs/mine"], ["--", "mine"]),
        (["--data", "photos"], ["--data", "photos", "--", "mine"]),
    ):
        found = in_background(["resume", "--background", *given], monkeypatch)
        assert found == ["resume", "--detached", *words]
        assert parsed(found)["run"] == "mine"
        run.pulse.unlink()


def test_bad_settings_are_refused_at_once(here: Path) -> None:
    Path("empty").mkdir()
    settings = [
        ("--set", "nope=1"),
        ("--recipe", "nope"),
        ("--name", "../x"),
        ("--minutes", "0"),
    ]
    for arguments in (*settings, ("--recipe", "distil"), ("nowhere",), ("empty",)):
        done = lapclip("train", "--background", *arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
    assert not list(Path().glob("runs/*"))


def test_rows_that_the_foreground_refuses_are_refused_at_once(here: Path) -> None:
    """Nothing is decoded for it, and the towers of the recipe are not opened."""
    photos(here / "photos", 12)
    rows = "".join(f"gone{at}.jpg,a dog\n" for at in range(4))
    (here / "photos" / "captions.csv").write_text(
        f"image,caption\n000.png,a cat\n001.png,a cow\n{rows}"
    )
    (here / "one.csv").write_text("image,caption\nphotos/000.png,a cat\n")
    (here / "val.csv").write_text(
        "image,caption,split\nphotos/000.png,a cat,val\nphotos/001.png,a cow,val\n"
    )
    for data, part in (
        ("photos", "4 of 6 rows"),
        ("one.csv", "at least 10 pairs"),
        ("val.csv", "train on"),
    ):
        for recipe in ([], ["--recipe", "photos"]):
            done = lapclip("train", data, "--background", *recipe)
            assert (done.returncode, part in done.stderr) == (2, True), done.stderr
        assert lapclip("train", data, *recipe).stderr == done.stderr
    assert not list(Path().glob("runs/*"))


def test_data_is_read_once_before_a_run_goes_to_the_background(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(here / "photos", 12)
    monkeypatch.setattr(choose_recipe, "towers_installed", lambda: True)
    read = FILES.read_table
    reads: list[str] = []

    def read_table(config: DataConfig) -> Table:
        reads.append(config.source)
        return read(config)

    monkeypatch.setattr(FILES, "read_table", read_table)
    assert in_background(["train", "photos", "--background"], monkeypatch)[-1] == "heads"
    assert len(reads) == 1


def test_nothing_is_refused_with_torch_that_can_be_refused_without(here: Path) -> None:
    program = (
        "import sys\nfrom lapclip.cli import main\ntry:\n    main(['train', '--background', 'nowhere'])\n"
        "except SystemExit as end:\n    sys.exit(end.code if 'torch' not in sys.modules else 9)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], stderr=subprocess.DEVNULL).returncode == 2
    )


def refused(name: str, error: str) -> Run:
    """A run whose start failed."""
    run = create_run(name, "first-run", TrainRequest("first-run", tuple(SMALL)))
    run.pulse.unlink()
    with closing(EventLog(run.events)) as log:
        log.append(Failed(step=0, error=error))
    return run


WHY, HINT = "No captions found in photos/. Expected captions.csv.", "lapclip data check photos/"


def test_a_run_that_was_refused_says_why_everywhere(here: Path) -> None:
    run = refused("mine", f"{WHY}\nTry: {HINT}")
    assert run.state == "failed"
    done = lapclip("eval", "mine")
    assert done.returncode == 2
    assert f"runs/mine did not start: {WHY}\nTry: {HINT}" in done.stderr.replace("\\", "/")
    (row,) = json.loads(lapclip("runs", "--json").stdout)["runs"]
    assert (row["state"], row["reason"]) == ("failed", WHY)
    assert WHY in lapclip("runs").stdout
    (finding,) = json.loads(lapclip("doctor", "mine", "--json").stdout)["findings"]
    assert WHY in finding["evidence"]
    assert finding["next"] == HINT
    (watched,) = json.loads(lapclip("watch", "mine", "--json").stdout)["runs"]
    assert (watched["state"], watched["reason"], watched["next"]) == ("failed", WHY, [HINT])
    shown = " ".join(lapclip("watch", "mine", "--once").stdout.split())
    assert WHY in shown
    assert HINT in shown


def test_a_start_that_failed_or_was_killed_starts_again(here: Path) -> None:
    refused("mine", WHY)
    assert resume("mine").state == "finished"
    killed = create_run("killed", "first-run", TrainRequest("first-run", tuple(SMALL)))
    write_beat(killed.pulse, replace(beat_of(os.getpid()), began=0.0))
    assert killed.state == "died"
    assert find_unfinished_run(None).name == "killed"
    for command in ("eval", "report"):
        assert "ended before its first step" in lapclip(command, "killed").stderr
    assert "before its first step" in lapclip("doctor", "killed").stdout
    assert resume(None).state == "finished"
    assert not killed.request.exists()
    losses = [
        [event["loss"] for event in events(name) if event["type"] == "step"]
        for name in ("mine", "killed")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, DataError("these images are none")])
def test_a_start_is_listed_and_its_end_is_written_down(
    here: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    states: list[tuple[str, str]] = []

    def set_up(*_: object) -> None:
        (row,) = json.loads(lapclip("runs", "--json").stdout)["runs"]
        states.append((row["name"], row["state"]))
        raise error

    monkeypatch.setattr("lapclip.training.trainer.prepare", set_up)
    with pytest.raises(type(error) if isinstance(error, Exception) else KeyboardInterrupt):
        train("first-run", SMALL, name="mine")
    assert states == [("mine", "starting")]
    (event,) = events("mine")
    if isinstance(error, Exception):
        assert (event["type"], event["error"]) == ("failed", "these images are none")
    else:
        assert event["type"] == "stopped"
    assert Run(Path("runs/mine")).never_began


def test_a_run_that_never_began_does_not_hold_its_name(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused("first-run", WHY)
    in_background(["train", "--background", "--name", "first-run"], monkeypatch)
    run = find_run("first-run")
    assert (run.state, run.log.read_text(), run.events.exists()) == ("starting", "", False)
    assert (
        lapclip("train", "--background", "--name", "first-run").returncode == 2
    )  # this one is at work
    refused("mine", WHY)
    assert prepared_run("mine", {"run": {"format": 1}}).read_settings() == {"run": {"format": 1}}
    far = refused("far", WHY)
    write_beat(far.pulse, replace(beat_of(os.getpid()), host="another computer"))
    assert (
        lapclip("train", "--background", "--name", "far").returncode == 2
    )  # it is at work over there


@pytest.mark.parametrize("taken", [False, True])
def test_a_name_that_another_process_took_just_now_stays_its_own(
    here: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """Both found that the run never began; the other one was faster, and has taken the name since."""
    refused("mine", WHY)
    truly = Run.never_began.__get__
    looks: list[Run] = []

    def take(path: Path, whose: str) -> None:
        path.mkdir()
        (path / "request.json").write_text(json.dumps(asdict(TrainRequest(whose))))
        write_beat(path / "pulse", beat_of(os.getpid()))

    def never_began(run: Run) -> bool:
        looks.append(run)
        if len(looks) == 2:
            shutil.rmtree(run.path)
            take(run.path, "of the other")
            return True
        if taken and len(looks) == 3:  # while that one is out of sight, a third takes the name
            take(Path("runs/mine"), "of the third")
        return truly(run)

    monkeypatch.setattr(Run, "never_began", property(never_began))
    with pytest.raises(RunError):
        create_run("mine", "first-run", TrainRequest("of this one"))
    found = sorted(path.name for path in Path("runs").iterdir())
    assert found == (["mine", "mine-2"] if taken else ["mine"])
    assert TrainRequest.read(Path("runs", found[-1], "request.json")).recipe == "of the other"


def test_a_command_that_is_interrupted_leaves_a_run_that_can_be_started(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", interrupted)
        assert lapclip("train", "--background", "--name", "mine").returncode == 130
    assert Run(Path("runs/mine")).request.exists()


def test_what_fails_while_starting_is_shown_with_its_words(here: Path) -> None:
    begin("mine", [*SMALL, "data.train_pairs=12"])
    run = find_run("mine")
    wait_until(lambda: run.state == "failed")
    reason = "train.batch_size 16 is more than the 12 training images"
    wait_until(lambda: reason in run.log.read_text())  # printed once the event is written
    done = lapclip("eval", "mine")
    assert done.returncode == 2
    assert f"did not start: {reason}" in done.stderr


def test_a_folder_becomes_a_run_when_its_settings_are_chosen(here: Path) -> None:
    run = create_run(None, "first-run", TrainRequest("first-run"))
    assert [(found.name, found.state) for found in all_runs()] == [("first-run", "starting")]
    with run.lock():
        assert run.state == "starting"
        run.write_settings({"run": {"format": 1}})
        assert run.state == "running"
    assert not run.request.exists()
    assert run.read_settings() == {"run": {"format": 1}}
    assert create_run(None, "first-run", TrainRequest("first-run")).name == "first-run-2"


def test_a_polite_run_waits_and_goes_on_by_itself_with_the_same_result(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(
        [
            None,
            None,
            "on battery, 9 % left",
            "on battery, 9 % left",
            "on battery, 9 % left",
            *[None] * 99,
        ]
    )
    monkeypatch.setattr(PolitePauses, "reason", lambda self: next(looks))
    lowered: list[bool] = []
    monkeypatch.setattr("lapclip.training.run_process.lower_priority", lambda: lowered.append(True))
    monkeypatch.setattr("lapclip.training.pauses.CHECK_SECONDS", 0.01)
    train("first-run", SMALL, name="plain")
    # Each step takes longer than this, so that the pause comes right after a checkpoint of the same step.
    train(
        "first-run",
        [*SMALL, "work.polite=true", "train.checkpoint_every_seconds=0.000001"],
        name="polite",
    )
    told = [event for event in events("polite") if event["type"] in ("paused", "went_on")]
    assert [(event["type"], event["step"]) for event in told] == [("paused", 3), ("went_on", 3)]
    assert told[0]["reason"] == "on battery, 9 % left"
    assert "paused after step 3: on battery, 9 % left" in Run(Path("runs/polite")).log.read_text()
    losses = [
        [event["loss"] for event in events(name) if event["type"] == "step"]
        for name in ("plain", "polite")
    ]
    assert losses[0] == losses[1]
    assert lowered == [True]
    assert any("low priority" in note for note in events("polite")[0]["notes"])
    assert Path("runs/polite/checkpoints/step-00000012").is_dir()
