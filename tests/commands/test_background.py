"""Runs that outlive the command that started them."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest

from lapclip.cli.app import app
from lapclip.cli.output import ARGUMENTS
from lapclip.cli.train import train as train_command
from lapclip.commands import choose_recipe
from lapclip.commands.background import train_in_background
from lapclip.commands.resume import resume
from lapclip.commands.train import train
from lapclip.config import DataConfig
from lapclip.data.sources.files import FILES
from lapclip.data.table import Table
from lapclip.errors import DataError, RunError
from lapclip.machine.polite import PolitePauses
from lapclip.runs.folder import (
    Run,
    _new_folder,
    all_runs,
    create_run,
    find_run,
    is_reserved,
    reserve_run,
)
from lapclip.runs.heartbeat import (
    PREPARING,
    at_work_path,
    beat_of,
    others_at_work,
    read_beat,
    write_beat,
)

from ..conftest import SMALL, lapclip, lapclip_process, set_flags
from ..small_runs import photos, stop_after, train_small

LONG = [setting for setting in SMALL if "steps" not in setting] + ["train.steps=100000"]


def begin(name: str, settings: list[str], *more: str) -> CompletedProcess[str]:
    """Start a run in the background, by a command that then ends."""
    done = lapclip_process("train", "--background", "--name", name, *more, *set_flags(*settings))
    assert done.returncode == 0, done.stderr
    return done


def until(ready: Any, seconds: float = 90.0) -> None:
    ends = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.1)


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
    until(lambda: run.state == "running" and run.events.exists() and len(events("mine")) > 5)
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
    assert not run.starting.exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_a_process_that_dies_without_a_word_is_recognised_and_can_be_resumed(here: Path) -> None:
    begin("mine", LONG)
    run = find_run("mine")
    until(
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
    until(lambda: not beat.alive and run.state == "died")
    listed = lapclip("runs")
    assert "died" in listed.stdout
    assert "resume mine" in listed.stdout
    assert lapclip_process("resume", "mine", "--background").returncode == 0
    assert run.state in ("starting", "running")
    until(lambda: any(event["type"] == "resumed" for event in events("mine")))
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
    run.starting.unlink()
    run.ask_to_stop()
    assert resume("run", detached=True).state == "stopped"


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


NOT_THERE = "machines", "address"
"""Flags that refuse the background."""
VALUES = {
    "minutes": "2.5",
    "after": "mine",
    "start": "mine",
    "teacher": "mine",
    "recipe": "seed",
    "settings": "train.seed=3",
    "device": "cpu",
    "batch_size": "32",
    "epochs": "3",
    "lr": "0.001",
}


def test_every_flag_of_train_arrives_in_the_background(
    trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is added tomorrow: the flags are those that the command has."""
    shutil.copytree(trained, here / "runs" / "mine")
    photos(here / "photos", 12)
    arguments = ["train", "photos", "--json", "--debug"]
    for name, parameter in inspect.signature(train_command).parameters.items():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY or name in (
            "common",
            "reserved",
            *NOT_THERE,
        ):
            continue
        flag = {"start": "--from", "settings": "--set"}.get(name, f"--{name.replace('_', '-')}")
        arguments += (
            [flag] if parameter.default is False else [flag, VALUES.get(name, "some words")]
        )
    arguments[arguments.index("--name") + 1] = "chosen"
    given = in_background(arguments, monkeypatch)
    expected = parsed(arguments)
    assert {name for name, value in expected.items() if value} == set(
        expected
    )  # nothing was left out here
    found = parsed(given)
    assert is_reserved("chosen", found.pop("reserved"))
    assert found == expected


def test_a_run_in_the_background_without_a_name_gets_that_of_its_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(here / "photos", 12)
    monkeypatch.setattr(choose_recipe, "towers_installed", lambda: True)
    found = parsed(in_background(["train", "--background", "--", "photos"], monkeypatch))
    assert (found["name"], found["data"]) == ("heads", "photos")  # the recipe for so few
    assert is_reserved("heads", found["reserved"])


def test_a_flag_that_nobody_thought_of_arrives(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tomorrow(
        *, background: bool = False, hidden: str = "", reserved: str = "", name: str = ""
    ) -> int:
        train_in_background(ARGUMENTS.get(), "first-run", name or None)
        return 0

    app.command(tomorrow, name="tomorrow")
    try:
        given = in_background(["tomorrow", "--background", "--hidden=a b"], monkeypatch)
        assert parsed(given)["hidden"] == "a b"
    finally:
        del app["tomorrow"]


def test_resume_in_the_background_goes_on_with_the_run_that_was_the_newest(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_run("mine", "first-run", {"run": {"format": 1}})
    for given, words in (
        ([], ["mine"]),
        (["mine"], ["mine"]),
        (["runs/mine", "--debug"], ["runs/mine", "--debug"]),
    ):
        found = in_background(["resume", "--background", *given], monkeypatch)
        assert found[:2] == ["resume", "--detached"]
        assert [word for word in found[2:] if word != "--background"] == words
        assert parsed(found)["run"] == words[0]
    assert "run" not in parsed(["resume", "--background"])


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


def test_rows_that_the_foreground_refuses_are_refused_at_once(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(choose_recipe, "CHECK_SECONDS", 60.0)
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


def test_data_is_read_once_and_what_takes_long_to_read_is_left_to_the_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(here / "photos", 12)
    monkeypatch.setattr(choose_recipe, "towers_installed", lambda: True)
    monkeypatch.setattr(choose_recipe, "CHECK_SECONDS", 30.0)
    read, slow = FILES.read_table, threading.Event()
    reads: list[str] = []

    def read_table(config: DataConfig) -> Table:
        reads.append(config.source)
        if len(reads) > 1:
            slow.wait(300)
        return read(config)

    monkeypatch.setattr(FILES, "read_table", read_table)
    assert (
        parsed(in_background(["train", "photos", "--background"], monkeypatch))["name"] == "heads"
    )
    assert len(reads) == 1
    monkeypatch.setattr(choose_recipe, "CHECK_SECONDS", 0.05)
    began = time.monotonic()
    assert (
        parsed(in_background(["train", "photos", "--background"], monkeypatch))["name"] == "heads-2"
    )
    assert len(reads) == 2
    assert time.monotonic() - began < 100
    slow.set()


def test_nothing_is_refused_with_torch_that_can_be_refused_without(here: Path) -> None:
    program = (
        "import sys\nfrom lapclip.cli import main\ntry:\n    main(['train', '--background', 'nowhere'])\n"
        "except SystemExit as end:\n    sys.exit(end.code if 'torch' not in sys.modules else 9)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], stderr=subprocess.DEVNULL).returncode == 2
    )


def refused(name: str, *log: str) -> Run:
    """A run whose process in the background has ended before it began, and what its log says."""
    run = reserve_run(name, "first-run", "secret")
    run.log.write_text("\n".join(log))
    write_beat(run.starting, replace(beat_of(os.getpid()), began=0.0))
    return run


WHY, HINT = "No captions found in photos/. Expected captions.csv.", "lapclip data check photos/"


@pytest.mark.parametrize("more", [[], ['{"error": "the same for scripts"}']])
def test_a_run_that_was_refused_says_why_everywhere(here: Path, more: list[str]) -> None:
    run = refused("mine", "drawing images: 64", WHY, f"Try: {HINT}", *more)
    assert run.state == "failed"
    for command in ("resume", "eval", "stop"):
        done = lapclip(command, "mine")
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


def test_a_process_that_was_killed_while_starting_gave_no_reason(here: Path) -> None:
    reason, hint = refused("mine", "drawing images: 64").last_words()
    assert "without a word" in reason
    assert "drawing images: 64" in reason
    assert not hint
    assert "without a word" in refused("other").last_words()[0]
    assert (
        refused("more", WHY, "Try: --set train.steps=3").last_words()[1]
        == "the same command with --set train.steps=3"
    )


def test_a_run_that_never_began_does_not_hold_its_name(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused("first-run", WHY)
    assert (
        parsed(in_background(["train", "--background", "--name", "first-run"], monkeypatch))["name"]
        == "first-run"
    )
    run = find_run("first-run")
    assert (run.state, run.log.read_text()) == ("starting", "")
    assert (
        lapclip("train", "--background", "--name", "first-run").returncode == 2
    )  # this one is at work
    refused("mine", WHY)
    assert create_run("mine", "first-run", {"run": {"format": 1}}).read_settings() == {
        "run": {"format": 1}
    }
    far = refused("far", WHY)
    write_beat(far.starting, replace(beat_of(os.getpid()), host="another computer", time=0.0))
    assert (
        lapclip("train", "--background", "--name", "far").returncode == 2
    )  # it may be at work over there


def fill_folder(path: Path, file: str, text: str) -> None:
    path.mkdir()
    (path / file).write_text(text)


@pytest.mark.parametrize("taken", [False, True])
def test_a_name_that_another_process_took_just_now_stays_its_own(
    here: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """Both found that the run never began; the other one was faster, and has reserved the name since."""
    refused("mine", WHY)
    truly = Run.never_began.__get__
    looks: list[Run] = []

    def never_began(run: Run) -> bool:
        looks.append(run)
        if len(looks) == 1:
            shutil.rmtree(run.path)
            fill_folder(run.path, "starting.key", "of the other")
            return True
        if taken:  # while that one is out of sight, a third one takes the name
            fill_folder(Path("runs/mine"), "starting.key", "of the third")
        return truly(run)

    monkeypatch.setattr(Run, "never_began", property(never_began))
    with pytest.raises(RunError):
        _new_folder("mine", "first-run", "starting.key", "of this one")
    found = sorted(path.name for path in Path("runs").iterdir())
    assert found == (["mine", "mine-2"] if taken else ["mine"])
    assert is_reserved(found[-1], "of the other")


def test_a_command_that_is_interrupted_leaves_no_reserved_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    assert lapclip("train", "--background", "--name", "mine").returncode == 130
    assert not Path("runs/mine").exists()


def test_what_fails_while_starting_is_shown_with_its_words(here: Path) -> None:
    begin("mine", [*SMALL, "data.train_pairs=12"])
    run = find_run("mine")
    until(lambda: run.state == "failed")
    assert "train.batch_size 16 is more than the 12 training images" in run.log.read_text()
    done = lapclip("resume", "mine")
    assert done.returncode == 2
    assert "did not start: train.batch_size 16 is more than the 12 training images" in done.stderr


def test_a_reserved_folder_is_filled_by_who_knows_its_key(here: Path) -> None:
    run = reserve_run(None, "first-run", "secret")
    assert is_reserved(run.name, "secret")
    assert not is_reserved(run.name, "guess")
    assert not is_reserved(run.name, "")
    write_beat(run.starting, beat_of(os.getpid()))
    assert [(found.name, found.state) for found in all_runs()] == [("first-run", "starting")]
    filled = create_run(run.name, "first-run", {"run": {"format": 1}}, "secret")
    assert filled.path == run.path
    assert not run.starting.exists()
    assert run.read_settings() == {"run": {"format": 1}}
    assert not is_reserved(run.name, "secret")
    assert create_run(None, "first-run", {}).name == "first-run-2"


def test_two_runs_that_compete_are_told(here: Path, empty_cache: Path) -> None:
    assert others_at_work() == []
    beat = beat_of(os.getppid(), "/somewhere/runs/other")
    write_beat(at_work_path().with_name("other.json"), beat)
    write_beat(at_work_path().with_name("damaged.json"), beat)
    at_work_path().with_name("damaged.json").write_text("{}")
    write_beat(at_work_path().with_name("own.json"), beat_of(os.getpid()))
    write_beat(at_work_path().with_name("far.json"), replace(beat, host="another computer"))
    (only,) = others_at_work()
    assert only.about == "/somewhere/runs/other"
    assert not at_work_path().with_name("damaged.json").exists()
    train("first-run", SMALL, name="run")
    (note,) = events("run")[0]["notes"]
    assert "another run is at work on this computer, /somewhere/runs/other" in note


def test_a_run_that_is_made_ready_in_the_foreground_is_listed(
    here: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about: list[str] = []

    def set_up(*_: object) -> None:
        until(at_work_path(PREPARING).exists, 10)
        beat = read_beat(at_work_path(PREPARING))
        assert beat is not None
        about.append(beat.about)
        raise DataError("these images are none")

    monkeypatch.setattr("lapclip.commands.train.set_up", set_up)
    for name in ("mine", None):
        with pytest.raises(DataError):
            train("first-run", SMALL, name=name)
    assert about == [str(here / "runs" / "mine"), str(here / "runs")]
    assert not at_work_path(PREPARING).exists()
    assert not Path("runs").exists()
    for at, path in enumerate([*about, str(here / "elsewhere" / "runs" / "other")]):
        write_beat(at_work_path(PREPARING).with_name(f"{at}.json"), beat_of(os.getppid(), path))
    rows = json.loads(lapclip("runs", "--json").stdout)["runs"]
    assert [(row["name"], row["state"], row["step"]) for row in rows] == [
        ("mine", "preparing", 0),
        ("", "preparing", 0),
    ]
    assert "mine                    preparing" in lapclip("runs").stdout
    assert "mine" in lapclip("watch", "--once").stdout


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
    monkeypatch.setattr("lapclip.commands.train.lower_priority", lambda: lowered.append(True))
    monkeypatch.setattr("lapclip.training.loop.PAUSE_CHECK", 0.01)
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
