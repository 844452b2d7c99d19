"""Results that people share: what is in a file and what is not, hostile files, and the page of many."""

from __future__ import annotations

import copy
import json
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lapclip.commands.share_run import share_run
from lapclip.errors import ConfigError, RunError
from lapclip.report import to_markdown
from lapclip.report.document import to_html
from lapclip.report.results_report import GOALS, results_report
from lapclip.results import SCENES, check_writable, read_result, sealed, to_text, write_result

from ..conftest import lapclip
from .conftest import Events
from .pages import Page

Make = Callable[..., Path]
SECRET = "anna-s-holiday"
HOSTILE = "<script>window.hacked=1</script><img src=x onerror=hacked()>[red]|`"


def shared(**changes: Any) -> dict[str, Any]:
    """A result of a run, as `lapclip report --share` writes it, with some fields changed."""
    result = {
        "format": 1,
        "kind": "run",
        "machine": {"chip": "A chip", "cores": 8, "memory_bytes": 8_000_000_000, "system": "Linux 6.1",
                    "architecture": "x86_64", "python": "3.12.1"},
        "devices": {"cpu": "A chip"},
        "lapclip": "0.1.0",
        "torch": "2.13.0",
        "commit": None,
        "data": "scenes",
        "pairs": {"train": 5000, "val": 240},
        "recipe": "first-run",
        "changed": {"train.seed": 3},
        "start": "from scratch",
        "model": "mini",
        "parameters": 1_000_000,
        "batch_size": 128,
        "towers": {"image": "cpu", "text": "cpu"},
        "choices": {"dtype": "float32", "threads": 8},
        "ranks": 1,
        "state": "finished",
        "step": 480,
        "steps": 480,
        "set_up_seconds": 4.5,
        "training_seconds": 61.0,
        "pairs_per_second": 1000.0,
        "peak_memory_bytes": 900_000_000,
        "joules": None,
        "evaluations": [{"seconds": 10.0, "step": 80, "t2i_r1": 0.3, "t2i_r10": 0.8},
                        {"seconds": 43.0, "step": 320, "t2i_r1": 0.62, "t2i_r10": 0.95}],
        "evaluation": {"split": "test", "candidates": 240, "chance": 0.004, "t2i_r1": 0.7, "t2i_r5": 0.9,
                       "t2i_r10": 0.95, "i2t_r1": 0.7, "i2t_r5": 0.9, "i2t_r10": 0.95},
    }  # fmt: skip
    return {**copy.deepcopy(result), **changes}


def steps(**changes: Any) -> dict[str, Any]:
    about = {name: shared()[name] for name in ("format", "machine", "devices", "lapclip", "torch", "commit")}
    row = {"model": "seed", "device": "cpu", "dtype": "float32", "batch": 12, "caption_tokens": 40, "ours_ms": 100.0,
           "peer_ms": 150.0, "peer_settings": "float32", "limit_ms": 60.0}  # fmt: skip
    return {**about, "kind": "steps", "peer": "openclip-3.3.0", "rounds": 5, "rows": [row], **changes}


def compared(**changes: Any) -> dict[str, Any]:
    about = {name: shared()[name] for name in ("format", "machine", "devices", "lapclip", "torch")}
    who = {"device": "cpu", "dtype": "float32", "threads": 2}
    cells = [
        {**who, "model": "any", "parameters": size, "work": 1e9, "batch": 16, "layers": 4, "used_threads": 2,
         "ms": size / 1e6, "pairs_per_second": 5.0, "peak_memory_bytes": 10**8, "joules": None, "fitted_ms": 3.0,
         "skipped": None, "too_large": False}
        for size in (10**6, 10**7)
    ]  # fmt: skip
    fit = {
        **who,
        "overhead_ms": 1.0,
        "ms_per_layer": 0.0,
        "ns_per_parameter": 1.0,
        "flops_per_second": 1e9,
        "error": 0.1,
    }
    advice = {**who, "parameters": 10**6, "batch": 16, "text": "cpu float32"}
    verdict = {"text": "cpu is the only device here", "points": []}
    return {**about, "kind": "comparison", "warnings": [], "cells": cells, "fits": [fit], "crossover": verdict,
            "predictions": [], "recommendations": [advice], **changes}  # fmt: skip


def saved(path: Path, result: dict[str, Any]) -> str:
    write_result(path, sealed(result))
    return str(path)


def test_a_run_is_shared_without_anything_about_a_person(run_with: Make) -> None:
    def tell(events: Events) -> Events:
        started = events[0]
        started["machine"]["system"] = f"Linux 6.1.0-{SECRET}"
        started["config"]["data"]["source"] = f"/home/{SECRET}/photos"
        started["config"]["work"]["ask"] = f"{SECRET} on the beach"
        started["config"]["model"]["name"] = SECRET
        started["notes"], started["reasons"] = [SECRET], {"train.device": SECRET}
        return [*events, {"v": 1, "type": "ranks", "time": 1.0, "step": 12, "hosts": [SECRET, "b"]}]

    folder = run_with(tell, SECRET)
    about = tomllib.loads((folder / "run.toml").read_text(encoding="utf-8"))
    about["run"]["recipe"] = f"/home/{SECRET}/mine.toml"
    about["run"]["asked"] = {"data": {"pictures": SECRET, "seed": 7}, "train": {"start": SECRET, "dtype": "float32"}}
    (folder / "run.toml").write_text(tomli_w.dumps(about), encoding="utf-8")
    done = lapclip("report", SECRET, "--share", "mine.json", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"][-1] == "mine.json"
    text = Path("mine.json").read_text(encoding="utf-8")
    assert text in done.stderr  # shown before it was written
    assert SECRET not in text
    found = read_result(Path("mine.json"))
    assert (found["data"], found["recipe"], found["model"]) == ("own", "own", "own")
    assert found["changed"] == {
        "data.pictures": "not shared", "data.seed": 7, "train.start": "not shared", "train.dtype": "float32"
    }  # fmt: skip
    assert found["machine"]["system"] == "Linux 6.1.0"


def test_what_is_shared_is_what_the_run_measured(run_with: Make) -> None:
    events: Events = []
    run_with(lambda found: events.extend(found) or found)
    assert lapclip("report", "--share", "mine.json", "--yes").returncode == 0
    found, finished = read_result(Path("mine.json")), events[-1]
    assert found["training_seconds"] == round(finished["training_seconds"], 3)
    assert found["evaluation"]["t2i_r1"] == finished["evaluation"]["t2i_r1"]
    assert (found["data"], found["recipe"], found["model"], found["state"]) == (
        "scenes",
        "first-run",
        "tiny",
        "finished",
    )
    scored = [event for event in events if event["type"] == "evaluation"]
    began = events[0]["time"]
    assert found["evaluations"][0]["seconds"] == pytest.approx(scored[0]["time"] - began, abs=0.01)
    assert found["evaluations"][0]["t2i_r1"] == scored[0]["evaluation"]["t2i_r1"]
    assert found["devices"] == {"cpu": events[0]["machine"]["chip"]}


def test_flickr8k_is_known_by_its_splits(run_with: Make) -> None:
    def change(events: Events) -> Events:
        events[0]["config"]["data"]["source"] = "/somewhere"
        events[0]["pairs"] = {"train": 6000, "val": 1000}
        events[0]["captions"] = {"train": {"captions": 29_991}, "val": {"captions": 5000}}
        return events

    run_with(change)
    assert lapclip("report", "--share", "mine.json", "--yes").returncode == 0
    assert read_result(Path("mine.json"))["data"] == "flickr8k"


def test_without_a_person_nothing_is_shared_unless_that_was_said(run_with: Make) -> None:
    run_with()
    for arguments in ((), ("--json",)):
        done = lapclip("report", "--share", "mine.json", *arguments)
        assert done.returncode == 2
        assert "--yes" in done.stderr
    assert not Path("mine.json").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of this kind is Unix's")
@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_person_is_asked(run_with: Make, answer: str) -> None:
    import pty
    import subprocess

    run_with()
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "lapclip", "report", "--share", "mine.json"]
    process = subprocess.Popen(command, stdin=its, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    os.write(ours, f"{answer}\n".encode())
    output, errors = process.communicate(timeout=60)
    os.close(ours)
    os.close(its)
    assert process.returncode == 0, errors
    assert '"training_seconds"' in errors
    assert Path("mine.json").exists() == (answer == "y")
    assert ("mine.json" in output) == (answer == "y")


def test_a_file_that_is_no_result_is_not_replaced(run_with: Make) -> None:
    run_with()
    Path("note.txt").write_text("hello")
    done = lapclip("report", "--share", "note.txt", "--yes")
    assert done.returncode == 2
    assert "no result of lapclip" in done.stderr
    assert Path("note.txt").read_text() == "hello"
    for _ in range(2):  # a result is replaced by another
        assert lapclip("report", "--share", "mine.json", "--yes").returncode == 0


def test_a_run_that_was_never_scored_or_goes_on_is_not_shared(run_with: Make) -> None:
    run_with(lambda events: [event for event in events if event["type"] not in ("evaluation", "finished")], "unscored")
    done = lapclip("report", "unscored", "--share", "mine.json", "--yes")
    assert done.returncode == 2
    assert "never scored" in done.stderr
    assert not Path("mine.json").exists()


def test_a_run_that_moved_to_another_device_or_computer_is_not_shared(run_with: Make) -> None:
    def resumed(chip: str) -> Callable[[Events], Events]:
        def change(events: Events) -> Events:
            machine = events[0]["machine"] | {"chip": chip}
            again = {"v": 1, "type": "resumed", "time": events[0]["time"], "step": 0, "machine": machine}
            return [events[0], again, *events[1:]]

        return change

    def fallen(events: Events) -> Events:
        events[0]["devices"] = {"image": "cuda", "text": "cuda"}
        cpu = {"image": "cpu", "text": "cpu"}
        return [events[0], {"v": 1, "type": "fell_back", "time": 1.0, "step": 1, "devices": cpu}, *events[1:]]

    begun: Events = []
    run_with(lambda events: begun.extend(events) or events, "plain")
    run_with(resumed(begun[0]["machine"]["chip"]), "here")
    assert share_run("here")["steps"] == share_run("plain")["steps"]
    for name, change, why in (("there", resumed("Other"), "one computer"), ("fallen", fallen, "on cuda, then on cpu")):
        run_with(change, name)
        with pytest.raises(RunError, match=why):
            share_run(name)


def test_many_results_become_one_page(here: Path) -> None:
    slow = shared(machine={**shared()["machine"], "chip": "Slow"}, devices={"cpu": "Slow"})
    slow["evaluations"] = slow["evaluations"][:1]
    other = shared(changed={"train.epochs": 2})
    own = saved(here / "a.json", shared())
    (here / "more").mkdir()
    for name, result in (
        ("slow", slow),
        ("steps", steps()),
        ("compared", compared()),
        ("other", other),
        ("copy", shared()),
    ):
        saved(here / "more" / f"{name}.json", result)
    done = lapclip("results", own, "more", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    by_file = {Path(result["file"]).name: result for result in found["results"]}
    assert by_file["a.json"]["goal_seconds"] == 43.0
    assert (by_file["slow.json"]["goal"], by_file["slow.json"]["goal_seconds"]) == (SCENES, None)
    assert by_file["other.json"]["goal"] is None
    assert found["duplicates"] == [{"file": str(Path("more", "copy.json")), "same_as": own}]
    page = Page(Path("lapclip-results.html"))
    titles = ["text-to-image R@1 over time", "How many times as fast", "The fastest training step at batch 16"]
    assert page.titles() == titles
    assert page.charts["plot-3"]["data"][0]["y"] == [1.0, 10.0]
    assert page.charts["plot-1"]["data"][0]["x"] == [10.0, 43.0]
    assert page.text.index("43 s") < page.text.index("not reached")
    assert page.charts["plot-2"]["data"][0]["x"] == [1.5]
    assert "| 1.50x |" in Path("lapclip-results.md").read_text(encoding="utf-8")
    shown = lapclip("results", own).stdout
    assert "43 s" in shown


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def edited(name: str, value: Any) -> str:
    """A file whose field was changed by hand: the checksum is of what it was."""
    return to_text({**sealed(shared()), name: value})


def resealed(**changes: Any) -> str:
    """A file that somebody made: the checksum fits."""
    return to_text(sealed(shared(**changes)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line 1"),
        ("\x00\xff", "line 1"),
        ("[]", "no result"),
        ('{"kind": ["run"]}', "no result"),
        ('{"kind": "run"}', "no checksum"),
        (nested(200_000), "nested"),
        ('{"kind": "run", "checksum": 1, "more": ' + nested(900) + "}", "checksum"),
        (" " * 2_100_000, "at most 2 MB"),
        ("1" * 5_000, "line 1|digits"),
        (edited("training_seconds", 1.0), "edited or damaged"),
        (resealed(format=2), "another format"),
        (resealed(machine=[]), "machine is no object"),
        (resealed(machine={"chip": "x"}), "missing"),
        (resealed(note="hello"), "note is not known"),
        (resealed(training_seconds="long"), "training_seconds"),
        (resealed(training_seconds=float("nan")), "training_seconds"),
        (resealed(training_seconds=float("inf")), "training_seconds"),
        (resealed(training_seconds=10**400), "training_seconds"),
        (resealed(training_seconds=-1), "training_seconds"),
        (to_text(sealed(steps(rows=[{**steps()["rows"][0], "ours_ms": 5e-324}]))), "ours_ms"),  # a ratio of infinity
        (resealed(training_seconds=True), "training_seconds"),
        (resealed(step=1.5), "step"),
        (resealed(torch="x" * 1000), "torch"),
        (resealed(torch="\x1b[2J"), "torch"),
        (resealed(torch="\ud800"), "torch"),
        (resealed(devices={"\n": "x"}), "devices"),
        (resealed(data="/home"), "data is not"),
        (resealed(evaluations=[{"seconds": 1}]), r"evaluations\[0\]"),
        (resealed(evaluations=[{}] * 6000), "evaluations is no list"),
        (resealed(evaluation={**shared()["evaluation"], "t2i_r1": 1.5}), "evaluation.t2i_r1"),
        (to_text(sealed(steps(rows=[{**steps()["rows"][0], "ours_ms": 0}]))), "ours_ms"),
    ],
)
def test_hostile_files_are_refused_in_a_line_and_make_no_page(here: Path, text: str, reason: str) -> None:
    Path("good.json").write_text(resealed(), encoding="utf-8")
    Path("bad.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=reason):
        read_result(Path("bad.json"))
    done = lapclip("results", "good.json", "bad.json")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) <= 2
    assert done.stderr.startswith("bad.json")
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in here.iterdir()) == ["bad.json", "good.json"]


def test_what_is_no_file_is_refused(here: Path) -> None:
    Path("empty").mkdir()
    for arguments in ((), ("missing.json",), ("empty",)):
        done = lapclip("results", *arguments)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) <= 2
    if hasattr(os, "mkfifo"):
        os.mkfifo("pipe.json")
        assert "no plain file" in lapclip("results", "pipe.json").stderr


def test_that_a_file_can_be_written_is_asked_without_leaving_one(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json")
    assert not list(tmp_path.iterdir())
    for text in ("", to_text(sealed(shared()))):
        (tmp_path / "mine.json").write_text(text)
        check_writable(tmp_path / "mine.json")
        assert (tmp_path / "mine.json").read_text() == text
    for path in (tmp_path, tmp_path / "nowhere" / "new.json"):
        with pytest.raises(ConfigError, match="cannot be written"):
            check_writable(path)


def test_markup_in_a_file_stays_text(here: Path) -> None:
    hostile = shared(
        machine={**shared()["machine"], "chip": HOSTILE}, devices={"cuda": HOSTILE}, recipe=HOSTILE, start=HOSTILE,
        changed={HOSTILE: HOSTILE}, choices={"dtype": HOSTILE}, towers={"image": HOSTILE, "text": HOSTILE},
    )  # fmt: skip
    rows = [{**steps()["rows"][0], "model": HOSTILE, "peer_settings": HOSTILE}]
    files = [
        saved(here / "a.json", hostile),
        saved(here / "b.json", {**hostile, "data": "flickr8k"}),
        saved(here / "c.json", steps(devices={"cuda": HOSTILE}, rows=rows, peer=HOSTILE)),
        saved(here / "d.json", {**hostile, "changed": {}, "recipe": "first-run"}),
    ]
    done = lapclip("results", *files)
    assert done.returncode == 0, done.stderr
    assert "[red]" in done.stdout
    page = Page(Path("lapclip-results.html"))
    assert page.count("img") == 0
    assert HOSTILE in page.text
    assert page.count("script") == 3  # plotly.js, its charts, and what draws them
    assert page.addresses == []
    assert "<script" not in json.dumps(page.charts)
    text = Path("lapclip-results.md").read_text(encoding="utf-8")
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    for lines in blocks:
        assert len({line.replace("\\|", "").count("|") for line in lines}) == 1, lines


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every object and list with each of its names or positions."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for name, each in inside for found in ((value, name), *places(each))]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.sampled_from([shared, steps, compared]), at=st.integers(0, 10_000), value=JSON)
def test_a_file_with_any_field_changed_is_refused_or_shown(tmp_path: Path, which: Any, at: int, value: Any) -> None:
    result = which()
    found = places(result)
    holder, name = found[at % len(found)]
    holder[name] = value
    path = tmp_path / "any.json"
    write_result(path, sealed(result))
    try:
        read = read_result(path)
    except ConfigError as refused:
        lines = str(refused).splitlines()
    else:
        lines = []
        report = results_report([read, sealed(shared())])
        assert "<!doctype html>" in to_html(report)
        assert to_markdown(report)
    assert len(lines) <= 2


def test_the_goal_of_drawn_scenes_takes_runs_of_the_default_recipe_alone() -> None:
    fits = GOALS[SCENES].fits
    assert fits(shared())
    assert fits(shared(changed={"train.device": "cpu"}))
    assert not fits(shared(changed={"train.batch_size": 64}))
    assert not fits(shared(recipe="own"))
    assert not fits(shared(data="own"))
