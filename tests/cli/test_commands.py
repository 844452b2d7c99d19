"""The command as a person or a script meets it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lapclip.searching.search_model import model_notes
from lapclip.which_model import which_model

from ..conftest import SMALL, command, lapclip, lapclip_process, set_flags


def test_train_prints_a_summary_that_ends_with_the_next_command(here: Path) -> None:
    done = lapclip("train", "--name", "mine", *set_flags(*SMALL))
    assert done.returncode == 0, done.stderr
    for words in (
        "text to image",
        "image to text",
        "chance",
        "R@10",
        "pairs/s",
        "peak memory",
        "runs/mine",
        "held-out test pairs",
    ):
        assert words in done.stdout
    assert "lapclip eval mine" in done.stdout
    assert "step 12  epoch 3  val text to image R@1/5/10" in done.stderr
    listed = json.loads(lapclip("runs", "--json").stdout)["runs"]
    assert [(row["name"], row["state"], row["step"], row["steps"]) for row in listed] == [
        ("mine", "finished", 12, 12)
    ]
    known = {
        "name",
        "state",
        "step",
        "steps",
        "best",
        "best_split",
        "best_step",
        "started",
        "age_seconds",
    }
    assert listed[0].keys() == known | {"paused", "reason"}
    assert listed[0]["best_split"] == "val"
    assert "val R@1" in lapclip("runs").stdout
    assert "short queries: of the first five results " in done.stdout
    about = "".join(model_notes(which_model("mine")))
    assert "(split test)" in about
    assert "single word" in about
    written = json.loads(lapclip("report", "mine", "--json").stdout)["files"]
    assert "R@1, test" in next(Path(file) for file in written if file.endswith(".md")).read_text(
        encoding="utf-8"
    )
    watched = json.loads(lapclip("watch", "mine", "--once", "--json").stdout)["runs"][0]
    assert (watched["best_split"], watched["evaluation"]["split"]) == ("val", "test")


def test_json_is_one_object_and_nothing_else_on_stdout(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained = lapclip_process("train", "--json", *set_flags(*SMALL))
    outcome = json.loads(trained.stdout)
    assert outcome.keys() == {
        "run", "state", "seconds", "training_seconds", "steps", "pairs_per_second", "peak_memory_bytes", "devices",
        "data", "best_step", "early", "evaluation", "start_evaluation", "short_questions", "places",
    }  # fmt: skip
    evaluated = json.loads(lapclip("eval", "--json").stdout)
    assert (
        capfd.readouterr().out == ""
    )  # from libraries neither, which know nothing of Python's stdout
    scores = {
        "candidates",
        "t2i_r1",
        "t2i_r5",
        "t2i_r10",
        "i2t_r1",
        "i2t_r5",
        "i2t_r10",
        "chance",
        "intervals",
    }
    assert evaluated["evaluation"].keys() >= scores
    assert all(
        0 <= evaluated["evaluation"][name] <= 1 for name in scores - {"candidates", "intervals"}
    )
    assert evaluated["evaluation"]["intervals"].keys() >= scores - {
        "candidates",
        "chance",
        "intervals",
    }
    assert all(Path(path).exists() for path in evaluated["files"])
    told = lapclip("eval", "--split", "val")
    for words in (
        "split val (asked for)",
        "rank of the right answer",
        "easy  medium    hard",
    ):
        assert words in told.stdout
    assert "embedding images and captions" in told.stderr
    assert (
        told.stdout.strip()
        .splitlines()[-1]
        .startswith("Next: open runs/first-run/evaluation/val/evaluation.html")
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--recipe", "sed"], "Unknown recipe sed. Did you mean seed?"),
        (["train", "--set", "train.stepz=3"], "Did you mean train.steps?"),
        (["train", "--set", "train.steps=few"], "train.steps must be a whole number"),
        (
            ["train", "--set", "model.image_size=65"],
            "--set: model.patch 16 does not divide model.image_size 65",
        ),
        (["train", "--name", "a/b"], "cannot name a run"),
        (["train", "--minutes", "soon"], "Try: lapclip train --help"),
        (
            ["train", "photos", "--minutes", "0"],
            "--minutes must be more than 0, not 0. Try: --minutes 5",
        ),
        (
            ["tune", "photos", "--seconds", "0"],
            "--seconds must be more than 0, not 0. Try: --seconds 60",
        ),
        (["trian"], "Try: lapclip --help"),
        (["resume"], "There are no runs in"),
        (["resume", "nothing"], "No run called nothing"),
        (["eval"], "There are no runs in"),
        (["eval", "nothing"], "No run called nothing"),
        (["eval", "."], "Try: lapclip eval RUN ."),
        (["eval", "--before", "base"], "There are no runs in"),
        (["stop"], "There are no runs in"),
        (["export"], "Which format? --to coreml, "),
        (["report"], "There are no runs in"),
        (["report", "nothing"], "No run called nothing"),
        (["model", "sed"], "Unknown model sed. Did you mean seed?"),
        (["model"], "Try: lapclip model --help"),
    ],
)
def test_bad_input_gets_status_2_and_at_most_three_lines(
    here: Path, arguments: list[str], words: str
) -> None:
    refused = lapclip(*arguments)
    assert refused.returncode == 2, refused.stderr
    assert words in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr
    assert 1 <= len(refused.stderr.strip().splitlines()) <= 3, refused.stderr
    assert refused.stdout == ""
    assert not (here / "runs").exists()


def test_an_error_with_json_is_still_one_object(here: Path) -> None:
    refused = lapclip("resume", "--json")
    assert refused.returncode == 2
    assert "There are no runs" in json.loads(refused.stdout)["error"]


def test_debug_shows_the_traceback(here: Path) -> None:
    refused = lapclip("resume", "--debug")
    assert refused.returncode == 2
    assert "Traceback" in refused.stderr
    assert "There are no runs" in refused.stderr


def test_a_run_that_exists_is_refused_before_any_work(here: Path) -> None:
    (here / "runs" / "mine").mkdir(parents=True)
    refused = lapclip("train", "--name", "mine")
    assert refused.returncode == 2
    assert "mine exists" in refused.stderr
    assert list((here / "runs" / "mine").iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "train",
        "resume",
        "stop",
        "runs",
        "eval",
        "report",
        "machine",
        "tune",
        "compare",
        "claims",
        "model",
    ],
)
def test_help_has_runnable_examples_and_a_word_on_each_argument(name: str) -> None:
    text = lapclip(name, "--help").stdout
    examples = [
        line.strip(" •").strip()
        for line in text.splitlines()
        if line.strip(" •").startswith(f"lapclip {name}")
    ]
    assert examples or f"Example: lapclip {name}" in text
    for argument in re.findall(r"│ (RUN|NAME|--\w+)(.*)│", text):
        assert len(argument[1].split()) >= 3, argument


def test_model_counts_parameters() -> None:
    counted = json.loads(lapclip("model", "seed", "--json").stdout)
    assert counted["parameters"] == 76_735_489
    assert counted["image_parameters"] + counted["text_parameters"] + 1 == counted["parameters"]
    assert counted.keys() == {"name", "parameters", "image_parameters", "text_parameters"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["runs"], ["model", "vit-b-16"]]
)
def test_help_and_runs_never_load_torch(here: Path, arguments: list[str]) -> None:
    program = (
        "import sys\nfrom lapclip.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'torch', 'numpy', 'httpx2', 'huggingface_hub'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away_ends_a_command_without_a_word(here: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        command("runs", "--json"), stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        FileNotFoundError(2, "No usable temporary directory found"),
    ],
)
def test_a_full_disk_is_no_fault_of_ours(
    here: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("lapclip.cli.app.app", full)
    told = lapclip("runs")
    assert told.returncode == 2
    assert "Try: free some disk space" in told.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows allows no such names")
def test_names_of_files_steer_no_terminal(here: Path, trained: Path) -> None:
    hostile = "a\x1b]0;taken\x07b"
    Path("data").mkdir()
    Path("data", f"{hostile};touch pwned;.zip").write_bytes(b"x")
    Path("r.toml").write_text('[model]\nname = "x\\u001b]0;taken\\u0007"\n')
    shutil.copytree(trained, Path("runs") / hostile)
    for arguments in (
        ["data", "check", "data"],
        ["train", "--recipe", "r.toml"],
        ["stop", "nope"],
        ["eval", hostile, "--device", "cpu"],
        ["report", hostile],
    ):
        done = lapclip(*arguments)
        assert not {"\x1b", "\x07"} & set(done.stdout + done.stderr), arguments
    refused = lapclip("data", "check", "data").stderr
    assert "unzip $'" in refused or "unzip '" in refused
    for page in Path("runs", hostile).glob("report/*.md"):
        assert "\x1b" not in page.read_text(encoding="utf-8")
