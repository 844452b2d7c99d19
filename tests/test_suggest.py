"""Suggested commands: nothing that the user gave is lost, and a shell takes each word as it is."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lapclip.runs.folder import Run
from lapclip.suggest import (
    _origin,
    command,
    install,
    model_word,
    quoted,
    source_word,
    train_command,
)
from lapclip.text import path_from_here

from .small_runs import prepared_run

GIVEN = {
    "run": {
        "recipe": "heads",
        "asked": {
            "data": {"source": "/data/my photos", "caption_column": "a title"},
            "train": {
                "batch_size": 64,
                "start": "/models/one",
                "teacher": "/models/two",
                "minutes": 2.5,
            },
            "work": {"ask": "a cat|it's", "polite": True},
        },
    }
}


def test_another_run_is_given_all_that_the_first_was_given() -> None:
    words = shlex.split(train_command(GIVEN, "train.learning_rate=0.001", name="mine-2"))
    assert words[:5] == ["lapclip", "train", "/data/my photos", "--recipe", "heads"]
    assert words[5:13] == [
        "--from",
        "/models/one",
        "--teacher",
        "/models/two",
        "--minutes",
        "2.5",
        "--name",
        "mine-2",
    ]
    assert words[13:] == [
        *("--set", "data.caption_column=a title", "--set", "train.batch_size=64"),
        *(
            "--set",
            "work.ask=a cat|it's",
            "--set",
            "work.polite=true",
            "--set",
            "train.learning_rate=0.001",
        ),
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


def test_a_damaged_record_gives_a_command_all_the_same() -> None:
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
    assert [Path(source_word(str(here / name))) for name in ("photos", "a/b")] == [
        Path("photos"),
        Path("a/b"),
    ]
    assert source_word("scenes") == "scenes"
    assert source_word(str(here / "scenes")) not in ("scenes", str(here / "scenes"))
    assert not source_word(str(here / "-odd")).startswith("-")
    assert Path(model_word(str(here / "a" / "b"))) == Path("a/b")
    assert model_word(str(here / "photos")) == str(
        here / "photos"
    )  # alone it might be a run's name
    assert model_word("org/model") == "org/model"
    assert command("eval", "my run", "a.csv") == f"lapclip eval {quoted('my run')} a.csv"


def test_a_named_run_is_followed_by_the_next_free_name_and_others_by_their_recipe(
    here: Path,
) -> None:
    for name in ("mine", "mine-2", "heads", "heads-2"):
        prepared_run(name, {"run": {"format": 1, "recipe": "heads"}})
    assert Run(Path("runs/mine")).train_again() == "lapclip train --recipe heads --name mine-3"
    assert (
        Run(Path("runs/heads-2")).train_again("train.epochs=2")
        == "lapclip train --recipe heads --set train.epochs=2"
    )
    assert Run(Path("runs/mine")).typed == "mine"
    assert Run(here / "runs" / "mine").typed == str(here / "runs" / "mine")


@pytest.mark.parametrize("name", ["image_from=evil:make #", "model.image_from", "", "_"])
def test_what_is_no_setting_of_ours_is_not_part_of_a_suggestion(name: str) -> None:
    saved = {"run": {"asked": {name: {"image_from": "evil:make"}, "model": {name: "evil:make"}}}}
    assert train_command(saved) == "lapclip train"


WORDS = [
    "plain",
    "two words",
    "it's",
    "$HOME `x` *",
    "a\nb\x1b[31m",
    "caf\udce9",
    "[red]",
    "~",
    "a,b",
    "#x",
    "a\\b",
    "",
]


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of Unix is asked")
@pytest.mark.parametrize("word", WORDS)
def test_a_shell_takes_a_quoted_word_as_it_is(word: str) -> None:
    for shell in filter(shutil.which, ("bash", "zsh")):
        done = subprocess.run(
            [shell, "-c", f"printf %s {quoted(word)}"], capture_output=True, check=True
        )
        shown = "".join(letter if letter.isprintable() else "?" for letter in word)
        assert done.stdout == shown.encode(), shell
        assert quoted(word).isprintable()


@pytest.mark.parametrize(
    ("word", "typed"),
    [
        ("C:\\photos\\2024", "C:\\photos\\2024"),
        ("C:\\my photos\\", '"C:\\my photos\\\\"'),
        ("a|b & c", '"a|b & c"'),
        ("work.ask=it's", '"work.ask=it\'s"'),
        ("$(calc)", '"?(calc)"'),
        ('a"&calc', '"a?&calc"'),
        ("`n\u201d;calc\n", '"?n?;calc?"'),
        ("", '""'),
    ],
)
def test_on_windows_a_word_is_in_double_quotes_and_runs_nothing(
    word: str, typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lapclip.suggest.os", SimpleNamespace(name="nt"))
    assert quoted(word) == typed


@pytest.mark.parametrize("has_pip", [True, False])  # uv makes environments without pip
def test_an_extra_is_installed_for_this_interpreter_and_from_where_lapclip_came(
    has_pip: bool, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr("lapclip.suggest.find_spec", lambda name: has_pip or None)
    monkeypatch.setattr("lapclip.suggest.__file__", str(tmp_path / "lapclip" / "suggest.py"))
    monkeypatch.setattr("lapclip.suggest._origin", lambda: "")
    python = quoted(path_from_here(sys.executable))
    installer = f"{python} -m pip install" if has_pip else f"uv pip install --python {python}"
    assert install("towers") == f"{installer} {quoted('lapclip[towers]')}"
    wheel = "file:///home/me/dist/lapclip-0.1.0-py3-none-any.whl"
    monkeypatch.setattr("lapclip.suggest._origin", lambda: wheel)
    assert install("towers") == f"{installer} {quoted(f'lapclip[towers] @ {wheel}')}"
    clone = tmp_path / "clone"
    (clone / "src" / "lapclip").mkdir(parents=True)
    (clone / "pyproject.toml").touch()
    monkeypatch.setattr("lapclip.suggest.__file__", str(clone / "src" / "lapclip" / "suggest.py"))
    assert install("towers").endswith(f" --editable {quoted(f'{path_from_here(clone)}[towers]')}")


@pytest.mark.parametrize(
    ("told", "origin"),
    [
        (None, ""),
        ("{", ""),
        ('{"url": "file:///a.whl", "archive_info": {}}', "file:///a.whl"),
        (
            '{"url": "https://a/b", "vcs_info": {"vcs": "git", "commit_id": "c0"}}',
            "git+https://a/b@c0",
        ),
    ],
)
def test_installers_note_where_a_package_came_from(
    told: str | None, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lapclip.suggest.distribution", lambda name: SimpleNamespace(read_text=lambda file: told)
    )
    assert _origin() == origin
