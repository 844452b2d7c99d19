"""`lapclip doctor`, as a person or a script meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from lapclip.runs.folder import Run

from ..conftest import SMALL, lapclip, set_flags
from ..small_runs import write_photos
from ..suggestions import commands_in


def test_a_run_that_does_not_learn_is_told_in_words_with_the_next_command(here: Path) -> None:
    faulty = set_flags(*SMALL, "train.learning_rate=0", "train.steps=32")
    assert lapclip("train", "--name", "dull", *faulty).returncode == 0
    done = lapclip("doctor")
    assert done.returncode == 0
    for words in (
        "dull, finished, step 32 of 32",
        "The loss is that of guessing",
        " 2.77",  # ln(16)
        "train --recipe first-run --name dull-2 --set model.name=tiny",
        "--set train.learning_rate=0.0005",
    ):
        assert words in done.stdout
    assert "slower-than-tuned" not in done.stdout
    assert done.stdout.index("alarm") < done.stdout.index(
        "note "
    )  # the small batch is good to know
    result = json.loads(lapclip("doctor", "dull", "--json").stdout)
    assert result.keys() == {"run", "findings"}
    assert Path(result["run"]) == Path("runs/dull")
    found = [
        finding["id"] for finding in result["findings"] if finding["id"] != "waiting-for-data"
    ]  # on busy cores
    assert found == ["stuck-loss", "small-batch"]
    assert all(
        each.keys() == {"id", "severity", "title", "evidence", "next"}
        for each in result["findings"]
    )


def test_a_suggested_command_runs_and_trains_on_the_same_photos(here: Path) -> None:
    write_photos(here / "my photos", ["train"] * 16 + ["val"] * 4)
    short = set_flags(
        *(each for each in SMALL if "train_pairs" not in each and "batch_size" not in each)
    )
    given = (
        "my photos",
        "--recipe",
        "first-run",
        "--name",
        "mine",
        *short,
        "--set",
        "train.batch_size=8",
        "--set",
        "train.steps=2",
    )
    assert lapclip("train", *given).returncode == 0
    (batch,) = [
        finding
        for finding in json.loads(lapclip("doctor", "--json").stdout)["findings"]
        if finding["id"] == "small-batch"
    ]
    (words,) = commands_in(batch["next"])
    done = lapclip(*words)
    assert done.returncode == 0, done.stderr
    first, second = (Run(Path("runs") / name).read_settings() for name in ("mine", "mine-2"))
    assert second["data"]["source"] == first["data"]["source"] == str(here / "my photos")
    assert (first["run"]["recipe"], second["run"]["recipe"]) == ("first-run", "first-run")
    assert (second["train"]["batch_size"], second["train"]["steps"]) == (16, 2)
    assert second["model"]["name"] == "tiny"


def test_without_runs_there_is_nothing_to_examine(here: Path) -> None:
    done = lapclip("doctor")
    assert done.returncode == 2
    assert "There are no runs" in done.stderr


def test_a_run_that_is_not_there_is_an_error(here: Path) -> None:
    done = lapclip("doctor", "nothing")
    assert done.returncode == 2
    assert "No run called nothing" in done.stderr


def test_a_run_without_events_has_nothing_to_find_but_that_it_died(here: Path) -> None:
    folder = here / "runs" / "empty"
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text("")
    result = json.loads(lapclip("doctor", "--json").stdout)
    assert [finding["id"] for finding in result["findings"]] == ["died"]


def test_examining_a_run_never_loads_torch(here: Path) -> None:
    (here / "runs" / "empty").mkdir(parents=True)
    (here / "runs" / "empty" / "run.toml").write_text("")
    program = "import sys; from lapclip.cli.doctor import doctor; doctor(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def test_what_events_say_steers_no_terminal_and_nonsense_in_them_is_passed_over(here: Path) -> None:
    steering = "\x1b]0;owned\x07 \x1b[2J\x9b31m \r [red]"
    deep = '{"type":"step","step":7,"loss":' + "[" * 100_000 + "]" * 100_000 + "}"
    said = [
        {"type": "started", "time": 1e308, "steps": 10**400, "config": {"train": {"batch_size": -1}}, "notes": 7,
         "devices": {"image": steering}},
        {"type": "step", "step": 1, "time": float("nan"), "loss": "none", "grad_norms": [], "seconds": 10**400},
        {"type": "fell_back", "step": steering, "text": steering, "cause": steering, "change": {steering: 1}},
        {"type": "resumed", "step": 1, "skipped": 10**400},
        {"type": "failed", "step": 1, "error": f"no such file: {steering}\nTry: {steering}"},
    ]  # fmt: skip
    folder = here / "runs" / "odd"
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text("")
    (folder / "events.jsonl").write_text("\n".join([deep, *map(json.dumps, said), ""]))
    for command in (["doctor"], ["runs"], ["watch", "odd", "--once"], ["report", "odd"]):
        done = lapclip(*command)
        shown = done.stdout + done.stderr
        assert done.returncode == 0, shown
        assert not [letter for letter in shown if not (letter.isprintable() or letter == "\n")]
    assert "\\x1b[2J" in lapclip("doctor").stdout
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "\\x1b[2J" in page
    assert "\x1b" not in page
