"""Suggested commands: nothing that the user gave is lost, and a shell takes each word as it is."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from lapclip.runs.folder import Run, create_run
from lapclip.shell import quoted
from lapclip.suggest import command, install, model_word, source_word, train_command

GIVEN = {
    "run": {
        "recipe": "heads",
        "asked": {
            "data": {"source": "/data/my photos", "caption_column": "a title"},
            "train": {"batch_size": 64, "start": "/models/one", "teacher": "/models/two", "minutes": 2.5},
            "work": {"ask": "a cat|it's", "polite": True},
        },
    }
}


def test_another_run_is_given_all_that_the_first_was_given() -> None:
    words = shlex.split(train_command(GIVEN, "train.learning_rate=0.001", name="mine-2"))
    assert words[:5] == ["lapclip", "train", "/data/my photos", "--recipe", "heads"]
    assert words[5:13] == ["--from", "/models/one", "--teacher", "/models/two", "--minutes", "2.5", "--name", "mine-2"]
    assert words[13:] == [
        *("--set", "data.caption_column=a title", "--set", "train.batch_size=64"),
        *("--set", "work.ask=a cat|it's", "--set", "work.polite=true", "--set", "train.learning_rate=0.001"),
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="shlex reads as sh does")
def test_a_path_with_a_dash_in_front_is_no_option() -> None:
    words = shlex.split(command("search", Path("-photos"), "--like", Path("a.png"), "-word"))
    assert words == ["lapclip", "search", "./-photos", "--like", "a.png", "-word"]


def test_a_change_replaces_what_was_given_and_a_length_replaces_the_others() -> None:
    assert "--set train.batch_size=32" in train_command(GIVEN, "train.batch_size=32")
    assert "64" not in train_command(GIVEN, "train.batch_size=32")
    shorter = train_command(GIVEN, "train.epochs=3")
    assert "--set train.epochs=3" in shorter
    assert "--minutes" not in shorter
    assert "--minutes 2.5" in train_command(GIVEN, "train.batch_size=32")


def test_a_run_of_an_earlier_release_keeps_its_data_and_how_it_is_read() -> None:
    saved = {
        "run": {"recipe": "photos"},
        "data": {
            "source": "/data/a.csv",
            "caption_column": "title",
            "stream": "never",
            "seed": 0,
            "split_rule": "name",
        },
        "train": {"minutes": 0.0, "start": "", "teacher": "", "batch_size": 64},
    }
    assert train_command(saved) == "lapclip train /data/a.csv --recipe photos --set data.caption_column=title"
    assert train_command({"run": 3, "data": None}) == "lapclip train"


@pytest.mark.parametrize(
    ("value", "text"), [("auto", "auto"), ("12", '"12"'), ("", ""), (" x", '" x"'), (1e-5, "1e-05")]
)
def test_a_value_is_read_as_the_one_it_was(value: Any, text: str) -> None:
    made = shlex.split(train_command({"run": {"asked": {"data": {"caption_column": value}}}}))
    assert made[-1] == f"data.caption_column={text}"


def test_paths_are_named_from_here_and_are_never_taken_for_names_or_options(here: Path) -> None:
    for folder in ("photos", "scenes", "-odd", "a/b"):
        (here / folder).mkdir(parents=True)
    assert [Path(source_word(str(here / name))) for name in ("photos", "a/b")] == [Path("photos"), Path("a/b")]
    assert source_word("scenes") == "scenes"
    assert source_word(str(here / "scenes")) not in ("scenes", str(here / "scenes"))
    assert not source_word(str(here / "-odd")).startswith("-")
    assert Path(model_word(str(here / "a" / "b"))) == Path("a/b")
    assert model_word(str(here / "photos")) == str(here / "photos")  # alone it might be a run's name
    assert model_word("org/model") == "org/model"
    assert command("eval", "my run", "a.csv") == f"lapclip eval {quoted('my run')} a.csv"


def test_a_named_run_is_followed_by_the_next_free_name_and_others_by_their_recipe(here: Path) -> None:
    for name in ("mine", "mine-2", "heads", "heads-2"):
        create_run(name, "heads", {"run": {"format": 1, "recipe": "heads"}})
    assert Run(Path("runs/mine")).train_again() == "lapclip train --recipe heads --name mine-3"
    assert (
        Run(Path("runs/heads-2")).train_again("train.epochs=2") == "lapclip train --recipe heads --set train.epochs=2"
    )
    assert Run(Path("runs/mine")).typed == "mine"
    assert Run(here / "runs" / "mine").typed == str(here / "runs" / "mine")


def test_code_that_a_saved_run_names_is_not_part_of_a_suggestion() -> None:
    saved = {"run": {"recipe": "heads", "asked": {"model": {"image_from": "evil:make", "text_from": "timm:x"}}}}
    assert "evil" not in train_command(saved)
    assert "--set model.image_from=MODULE:FUNCTION" in train_command(saved)
    assert "--set model.text_from=timm:x" in train_command(saved)


@pytest.mark.parametrize(
    ("file", "has_pip", "started"),
    [
        ("", True, "pip"),
        ("", False, "uv pip"),  # uv makes environments without pip
        ("uv-receipt.toml", False, "uv tool"),
        ("pipx_metadata.json", True, "pipx runpip lapclip"),
    ],
)
def test_an_extra_is_installed_as_lapclip_was(
    file: str, has_pip: bool, started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if file:
        (tmp_path / file).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr("lapclip.suggest.find_spec", lambda name: has_pip or None)
    assert install("hub") == f'{started} install "lapclip[hub]"'
