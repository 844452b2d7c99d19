"""`lapclip clean`: what takes room is shown, what is named goes, and what is in use or not ours stays."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import pytest
from PIL import Image

from lapclip.commands.clean import list_items, remove, select
from lapclip.paths import leftovers, partial_path, sweep
from lapclip.runs.folder import Run, TrainRequest, create_run
from lapclip.runs.heartbeat import beat_of, write_beat
from lapclip.searching.indexes import note_use
from lapclip.weights import WEIGHTS

from ..conftest import command, lapclip


def dead_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def fill(path: Path, size: int = 1000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def left_by(path: Path, process: int) -> Path:
    """Half of something that another process of this computer was making."""
    mine = partial_path(path)
    return mine.with_name(mine.name.replace(f".{os.getpid()}-", f".{process}-"))


@pytest.fixture
def disk(here: Path, empty_cache: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, one that died, caches, an index and leftovers."""
    monkeypatch.setenv("LAPCLIP_DATA", str(here / "data"))
    shutil.copytree(trained, here / "runs" / "mine")
    shutil.copytree(trained, here / "runs" / "died")
    lines = (here / "runs/died/events.jsonl").read_text().splitlines(keepends=True)
    (here / "runs/died/events.jsonl").write_text("".join(lines[:-1]))
    fill(here / "runs/died/checkpoints/damaged-step-00000004/weights.safetensors")
    fill(empty_cache / "packed-1/pixels-1.bin", 5000)
    fill(empty_cache / "packed-1/source").write_text("/photos\x1b[2J")
    fill(empty_cache / "scenes-1/pixels.npy", 3000)
    fill(empty_cache / "features-1.npy", 2000)
    fill(empty_cache / "tower-1/model.safetensors", 4000)
    fill(empty_cache / "tune.json").write_text("{}")
    fill(left_by(empty_cache / "scenes-2", dead_process()) / "pixels.npy", 7000)
    fill(here / "data/search/photos-1/abc/pictures.db")
    return here


def cleaned(*arguments: str) -> dict:
    done = lapclip("clean", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def removed_names(done: dict) -> list[str]:
    return sorted(Path(item["path"]).name for item in done["removed"])


def test_what_takes_space_is_shown_and_nothing_is_removed(disk: Path, empty_cache: Path) -> None:
    before = sorted(disk.rglob("*"))
    items = cleaned()["items"]
    sizes = {Path(item["path"]).name: item["bytes"] for item in items}
    assert sizes["packed-1"] == 5000 + len("/photos\x1b[2J")
    assert (sizes["scenes-1"], sizes["features-1.npy"], sizes["tower-1"]) == (3000, 2000, 4000)
    assert {"mine", "died", "photos-1", "tune.json"} < set(sizes)
    assert {item["bytes"] for item in items if "killed" in item["about"]} == {7000}
    done = lapclip("clean")
    assert "clean --caches" in done.stdout
    assert "\x1b" not in done.stdout
    assert sorted(disk.rglob("*")) == before


def test_what_is_asked_for_goes_and_nothing_else(disk: Path, empty_cache: Path) -> None:
    refused = lapclip("clean", "--caches")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert (empty_cache / "packed-1").exists()
    done = cleaned("--caches", "--yes")
    assert done["removed_bytes"] == sum(item["bytes"] for item in done["removed"]) > 18_000
    assert not list(empty_cache.iterdir())
    assert (disk / "data/search/photos-1/abc/pictures.db").exists()
    assert (disk / "runs/mine/model" / WEIGHTS).exists()
    assert lapclip("report", "mine").returncode == 0
    assert removed_names(cleaned("died", "--yes")) == ["died"]
    assert sorted(path.name for path in (disk / "runs").iterdir()) == ["mine"]
    assert "Did you mean mine?" in lapclip("clean", "min", "--yes").stderr


def test_what_was_used_lately_stays(disk: Path, empty_cache: Path) -> None:
    for path in [*(disk / "runs/died").rglob("*"), *empty_cache.glob("features-*")]:
        os.utime(path, (1, 1))
    assert removed_names(cleaned("--older-than", "30", "--yes")) == ["died"]
    old_caches = cleaned("--caches", "--older-than", "30", "--yes")
    assert removed_names(old_caches) == ["features-1.npy"]
    assert removed_names(cleaned("mine", "--older-than", "30", "--yes")) == []


@pytest.mark.parametrize("days", ["-1", "nan", "inf"])
def test_an_age_that_is_none_removes_nothing(disk: Path, days: str) -> None:
    done = lapclip("clean", "--older-than", days, "--yes")
    assert done.returncode == 2
    assert "--older-than" in done.stderr
    assert sorted(path.name for path in (disk / "runs").iterdir()) == ["died", "mine"]


def test_what_is_in_use_or_not_ours_stays(disk: Path, empty_cache: Path) -> None:
    outside = fill(disk / "outside" / "precious.bin")
    for link in (empty_cache / "packed-9", disk / "runs" / "linked", disk / "data/search/linked"):
        link.symlink_to(outside.parent, target_is_directory=True)
    shutil.copy(disk / "runs/mine/run.toml", outside.parent)
    (empty_cache / "packed-1" / "inside").symlink_to(outside.parent, target_is_directory=True)
    scenes = str(empty_cache / "scenes-1/pixels.npy")
    program = "import sys; file = open(sys.argv[1]); print(1, flush=True); input()"
    reader = subprocess.Popen(
        [sys.executable, "-c", program, scenes], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert reader.stdout is not None
    reader.stdout.readline()
    try:
        with filelock.FileLock(disk / "runs/mine/lock"):
            done = cleaned("--caches", "--yes")
            old = cleaned("--older-than", "0", "--yes")
            refused = lapclip("clean", "mine", "--yes")
    finally:
        reader.communicate(b"\n")
    assert refused.returncode == 2
    assert "lapclip stop mine" in refused.stderr
    assert "packed-1" in removed_names(done)
    assert removed_names(old) == ["died"]
    assert (empty_cache / "scenes-1/pixels.npy").exists()
    assert (disk / "runs/mine/checkpoints").exists()
    assert outside.exists()
    assert lapclip("clean", "linked", "--yes").returncode == 2


@contextmanager
def at_work_on(*locks: Path) -> Iterator[None]:
    """Another process that holds these locks."""
    program = (
        "import sys, filelock\nheld = [filelock.FileLock(path) for path in sys.argv[1:]]\n"
        "for lock in held:\n    lock.acquire()\nprint(1, flush=True)\ninput()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, locks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdout is not None
    other.stdout.readline()
    try:
        yield
    finally:
        other.communicate(b"\n")


def test_what_comes_into_use_while_a_person_is_asked_stays(
    disk: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lapclip.commands.clean._paths_in_use", set)  # not every system tells
    selected = select(list_items(), ["died"], None, caches=True)
    with at_work_on(disk / "runs/died/lock"):
        removed, failed = remove(selected)
    assert {item.kind for item in removed} == {"cache"}
    assert [item.path.name for item in failed] == ["died"]
    assert (disk / "runs/died/run.toml").exists()
    assert [item.path.name for item in remove(failed)[0]] == ["died"]
    assert [item.kept for item in remove(failed)[1]] == ["it is gone"]  # and is not made again
    assert sorted(path.name for path in (disk / "runs").iterdir()) == ["mine"]


def test_a_run_that_is_locked_at_the_last_moment_stays(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = list_items()
    monkeypatch.setattr("lapclip.commands.clean.list_items", lambda: listed)
    with at_work_on(disk / "runs/died/lock"):
        removed, failed = remove(select(listed, ["died"], None, caches=False))
    assert not removed
    assert "process" in failed[0].kept
    assert (disk / "runs/died/run.toml").exists()


def test_a_run_that_begins_while_a_person_is_asked_stays(disk: Path) -> None:
    selected = select(list_items(), ["died", "mine"], None, caches=False)
    for name in ("died", "mine"):
        write_beat(Run(Path("runs", name)).pulse, beat_of(os.getpid()))
    removed, failed = remove(selected)
    assert not removed
    assert [item.kept for item in failed] == ["it is starting"] * 2


def test_the_hint_fits_what_keeps_a_run(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = {str(Path("runs/mine").resolve()), str(Path("runs/died").resolve())}
    monkeypatch.setattr("lapclip.commands.clean._paths_in_use", lambda: used)
    with filelock.FileLock(disk / "runs/died/lock"):
        assert "lapclip stop died" in lapclip("clean", "died", "--yes").stderr
        refusal = lapclip("clean", "mine", "--yes").stderr
    assert "stays: another process uses it now" in refusal
    assert "lapclip stop" not in refusal  # it is finished


def test_what_is_shown_tells_whose_it_is(disk: Path, empty_cache: Path) -> None:
    fill(disk / "data/search/photos-1/abc/pictures.db")
    note_use(disk / "data/search/photos-1/abc", disk / "my photos", "hf:some/model")
    shown = {Path(item["path"]).name: item for item in cleaned()["items"]}
    assert shown["photos-1"]["about"] == "my photos, with hf:some/model"
    assert set(shown["photos-1"]) == {"kind", "path", "about", "bytes", "unused_days", "kept"}


def test_given_data_stays_as_long_as_a_run_may_need_it(disk: Path, empty_cache: Path) -> None:
    for name in ("learnt", "other"):
        fill(disk / "runs/.data" / name / "captions.jsonl")
    settings = disk / "runs/died/run.toml"
    recorded = "./runs/.data/learnt"
    settings.write_text(
        settings.read_text().replace('source = "scenes"', f"source = {json.dumps(recorded)}")
    )
    assert Run(Path("runs/died")).data_source() == str(disk / "runs/.data/learnt")

    def removable() -> list[str]:
        return [item.path.name for item in list_items() if item.kind == "data" and not item.kept]

    assert removable() == ["other"]
    listed = [item for item in list_items() if item.kind == "data"]
    begun = create_run("begun", "first-run", TrainRequest("first-run"))
    assert removable() == []
    assert (
        remove(select(listed, [], None, caches=True))[0] == []
    )  # it began while a person was asked
    begun.pulse.unlink()
    wanted = json.dumps(str(disk / "runs/.data/other"))
    request = TrainRequest("first-run", (f"data.source={wanted}",))
    begun.request.write_text(json.dumps(dataclasses.asdict(request)))
    assert removable() == []  # `lapclip resume` would start it
    begun.request.write_text(json.dumps(dataclasses.asdict(TrainRequest("first-run"))))
    assert [item.path.name for item in remove(select(listed, [], None, caches=True))[0]] == [
        "other"
    ]


def test_leftovers_are_told_from_work_by_their_process(tmp_path: Path) -> None:
    mine, dead = partial_path(tmp_path / "a"), left_by(tmp_path / "b", dead_process())
    far = dead.with_name(dead.name.replace(".partial", "x.partial"))  # of another computer
    unknown = tmp_path / "notes.partial"
    for path in (mine, dead, far, unknown):
        path.mkdir()
    taken = partial_path(tmp_path / "c")
    taken.mkdir()  # long ago, by a process whose number this one was given
    os.utime(taken, (1, 1))
    assert leftovers(tmp_path) == sorted([dead, taken])
    for path in (far, unknown):
        os.utime(path, (1, 1))
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine.name, unknown.name])


def test_names_that_only_look_half_made_and_what_a_link_leads_to_stay(tmp_path: Path) -> None:
    kept = [tmp_path / "thesis.2023.old", tmp_path / "photos.7.partial", tmp_path / "mybest.2.old"]
    ours = tmp_path / ".run.4194999-1-nobody.partial"
    for path in (*kept, ours):
        path.write_text("x")
        os.utime(path, (0, 0))
    if os.name != "nt":
        (tmp_path / "linked").symlink_to(tmp_path, target_is_directory=True)
        assert leftovers(tmp_path / "linked") == []
    assert leftovers(tmp_path) == [ours]
    sweep(tmp_path)
    assert all(path.exists() for path in kept)
    assert not ours.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "mine", "--engine", "torch-float32", "--threads", "1"),
        ("search", "photos", "--web", "--model", "mine"),
    ],
)
def test_a_run_whose_model_is_served_stays_until_its_server_has_died(
    disk: Path, arguments: tuple[str, ...]
) -> None:
    (disk / "photos").mkdir()
    Image.new("RGB", (32, 32), "red").save(disk / "photos/a.png")
    process = subprocess.Popen(
        command(*arguments, "--json", "--port", "0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout
        assert json.loads(process.stdout.readline())["url"]
        done = lapclip("clean", "mine", "--yes")
        assert done.returncode == 2
        assert "mine stays: another process uses its model now" in done.stderr
        kept = {Path(item["path"]).name: item["kept"] for item in cleaned()["items"]}
        assert kept["mine"]
        assert not kept["died"]
        assert (disk / "runs/mine/model").exists()
    finally:
        process.kill()
        process.wait()
    done = lapclip("clean", "mine", "--yes")
    assert done.returncode == 0, done.stderr
    assert not (disk / "runs/mine").exists()


def test_a_run_that_comes_into_use_while_a_person_is_asked_stays(
    disk: Path, empty_cache: Path
) -> None:
    doomed = select(list_items(), ["mine", "died"], None, caches=False)
    code = "import sys; from pathlib import Path; from lapclip.which_model import which_model\n"
    code += "with which_model('mine/model').in_use(): print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        removed, failed = remove(doomed)
        process.communicate()
    assert [item.path.name for item in removed] == ["died"]
    assert ["uses its model" in item.kept for item in failed] == [True]
    assert [item.path.name for item in remove(failed)[0]] == ["mine"]


def test_a_run_is_not_found_where_there_are_none(here: Path, empty_cache: Path) -> None:
    assert "There are none.\nTry: lapclip runs" in lapclip("clean", "mine", "--yes").stderr
