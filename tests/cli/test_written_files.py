"""What commands write where the user points: they replace nothing of the user's."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lapclip.cli.app import app

from ..conftest import SMALL, lapclip, run_on_full_disk, set_flags
from ..small_runs import photos

READ = {
    "search FOLDER",
    "search --like",
    "serve --api-key-file",
    "serve --search",
}
"""Paths that commands only read."""


@dataclass(frozen=True)
class Case:
    """A command that writes where the user points."""

    arguments: list[str]
    targets: list[str]
    """Files that it writes, or that the user may have in its folder."""
    limit: int
    """Bytes beyond which no file can grow on the full disk: more than what comes before the file itself."""
    replaces: tuple[str, ...] = ()
    """Flags to replace an older result."""


PAGE_LIMIT = 1_000_000  # bytes; a page has five million
CASES = {
    "report --out": Case(
        ["report", "mine", "--out", "out"], ["out/report.html", "out/report.md"], PAGE_LIMIT
    ),
    "eval --out": Case(
        ["eval", "mine", "--device", "cpu", "--out", "out"],
        ["out/evaluation.html", "out/evaluation.md", "out/evaluation.json"],
        PAGE_LIMIT,
    ),
    "export --out": Case(
        ["export", "mine", "--to", "openclip", "--out", "out"],
        ["out/README.md", "out"],
        50_000,
        ("--force",),
    ),
    "embed --out": Case(
        ["embed", "photos", "--model", "mine", "--out", "out.npy"],
        ["out.npy", "out-captions.npy", "out.json"],
        20_000,
    ),
    "data check --page": Case(
        ["data", "check", "photos", "--page", "out.html"], ["out.html"], 10_000
    ),
}


def options_with_paths(command: Any, words: tuple[str, ...] = ()) -> Iterator[str]:
    """Return every argument of every command that takes a path."""
    for name in command:
        if not name.startswith("-"):
            yield from options_with_paths(command[name], (*words, name))
    if command.default_command:
        for argument in command.assemble_argument_collection(parse_docstring=False):
            if "Path" in str(argument.hint):
                yield " ".join((*words, argument.names[0]))


def test_every_argument_that_takes_a_path_is_covered() -> None:
    assert set(options_with_paths(app)) == {*READ, *CASES}


@pytest.fixture(scope="module")
def runs(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs and some photos, to copy from."""
    folder = tmp_path_factory.mktemp("written")
    shutil.copytree(trained, folder / "runs" / "mine")
    photos(folder / "photos", 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        kept = [
            setting for setting in SMALL if not setting.startswith(("model.", "data.tokenizer"))
        ]
        done = lapclip("train", "--from", "mine", "--name", "tuned", *set_flags(*kept))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def workplace(runs: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("lapclip.commands.data.towers_installed", lambda: False)
    shutil.copytree(runs, here, dirs_exist_ok=True)
    return here


def contents(folder: Path) -> dict[str, bytes]:
    """Return what the user sees there, and what is hidden, but for the runs."""
    files = (path for path in folder.rglob("*") if path.is_file())
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    return {name: content for name, content in found.items() if not name.startswith("runs/")}


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_ours_is_left_alone(name: str, workplace: Path) -> None:
    case = CASES[name]
    for target in case.targets:
        path = workplace / target
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine", encoding="utf-8")
        before = contents(workplace)
        for flags in ((), case.replaces):
            done = lapclip(*case.arguments, *flags)
            assert done.returncode == 2, (target, done.stdout)
            assert f"{target.replace('out/README.md', 'out')} is there" in done.stderr
            assert len(done.stderr.strip().splitlines()[-2:]) == 2
            assert "Try: --" in done.stderr
            assert contents(workplace) == before
        shutil.rmtree(path.parent) if path.parent != workplace else path.unlink()


@pytest.mark.parametrize("name", CASES)
def test_a_photo_of_the_data_is_not_replaced(name: str, workplace: Path) -> None:
    before = contents(workplace)
    done = lapclip(*CASES[name].arguments[:-1], "photos/000.png")
    assert done.returncode == 2, done.stdout
    assert "photos/000.png" in done.stderr
    assert contents(workplace) == before


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
@pytest.mark.parametrize("name", CASES)
def test_an_older_result_is_replaced_and_a_full_disk_leaves_it(name: str, workplace: Path) -> None:
    case = CASES[name]
    done = lapclip(*case.arguments)
    assert done.returncode == 0, done.stderr
    if name == "embed --out":  # else it is up to date
        (workplace / "photos" / "000.png").unlink()
    before = contents(workplace)
    full = run_on_full_disk(case.limit, *case.arguments, *case.replaces)
    assert full.returncode == 2, full.stderr
    assert "Cannot write out" in full.stderr
    assert "File too large" in full.stderr
    assert "Traceback" not in full.stderr
    after = contents(workplace)
    assert {file: after.get(file) for file in before} == before
    assert not [file for file in after if file.endswith(".partial")]

    identities = {path: path.stat().st_ino for path in written(case)}
    again = lapclip(*case.arguments, *case.replaces)
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_ino for path in written(case)}.keys() == identities.keys()
    assert all(path.stat().st_ino != identities[path] for path in identities)


def written(case: Case) -> list[Path]:
    return [path for path in map(Path, case.targets) if path.is_file()]


def test_a_link_is_left_alone(workplace: Path) -> None:
    assert lapclip("report", "mine", "--out", "out").returncode == 0
    page = workplace / "out" / "report.html"
    page.rename(workplace / "kept.html")
    page.symlink_to(workplace / "kept.html")
    done = lapclip("report", "mine", "--out", "out")
    assert done.returncode == 2
    assert page.is_symlink()
