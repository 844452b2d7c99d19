"""The screen of a run, drawn by rich for several widths."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path

import filelock
import pytest
from rich.console import Console

from lapclip.cli.runs import runs as list_runs
from lapclip.runs.folder import Run
from lapclip.runs.follow import FollowedRun
from lapclip.runs.view import RunView
from lapclip.watch.panels import FRAMED, Canvas
from lapclip.watch.screen import draw

from .recorded import append, finished, sensors, started, step, trained, write

WIDTHS = [40, 80, 120]


def view_of(folder: Path, name: str, events: list[dict], working: bool = False) -> RunView:
    """What is seen of a run with these events, while a process holds its lock or not."""
    run = write(folder, name, events)
    watched = FollowedRun(Run(run))
    if working:
        with filelock.FileLock(run / "lock"):
            watched.refresh()
    else:
        watched.refresh()
    return watched.view


def drawn(
    views: RunView | list[RunView],
    width: int,
    focus: int = 0,
    curve_height: int = 2,
    *,
    colour: bool = True,
) -> str:
    """The screen as text; no line may be wider than the window."""
    views = views if isinstance(views, list) else [views]
    console = Console(
        file=io.StringIO(), width=width, record=True, force_terminal=True, highlight=False
    )
    canvas = Canvas(width, curve_height, colour, width >= FRAMED)
    console.print(draw(views, focus, canvas, "lapclip {}".format), width=width)
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= width
    return text


def words(text: str) -> str:
    """Without frames and line ends, so that a sentence that was folded reads on."""
    return " ".join("".join(" " if letter in "│╭╮╰╯─━" else letter for letter in text).split())


@pytest.mark.parametrize("width", WIDTHS)
def test_a_running_run_shows_everything(tmp_path: Path, width: int) -> None:
    view = view_of(tmp_path, "mine", trained(170), working=True)
    text = words(drawn(view, width))
    assert view.status == "running"
    assert "mine running epoch 9 of 10" in text
    assert "170 of 200 85%" in text
    assert "16 s left" in text
    for named in (
        "loss",
        "accuracy",
        "temperature",
        "gradient",
        "Held-out recall",
        "A step: 253 ms",
    ):
        assert named in text
    assert "forward 32%" in text
    assert "backward 59%" in text
    assert "load" not in text  # less than half a percent of the step
    assert "700 MB now, 900 MB peak" in text
    assert "57% in use" in text
    assert "1,440 J, 1" in text
    assert "heat 71 °C" in text
    assert "clock 3,200 MHz" in text
    assert "6 60.0% 60.0% kept" in text
    assert "8 40.0% 40.0% " in text
    assert "The model of step 120 is kept" in text


def test_wide_windows_stand_panels_side_by_side_and_narrow_ones_stack_them(tmp_path: Path) -> None:
    view = view_of(tmp_path, "mine", trained(170), working=True)
    beside = [
        line
        for line in drawn(view, 80).splitlines()
        if "Learning" in line and "Held-out recall" in line
    ]
    assert beside
    stacked = drawn(view, 40)
    assert not [line for line in stacked.splitlines() if "Learning" in line and "recall" in line]
    assert "│" not in stacked
    assert (
        len(drawn(view, 80).splitlines()) <= 23
    )  # a window of 24 lines holds it, with the line of keys


def test_a_run_that_ended_early_is_shown_as_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    end = {"type": "finished", "time": 400.0, "step": 106, "early": "no better score"}
    view = view_of(tmp_path, "mine", [*trained(106), end])
    text = words(drawn(view, 100))
    assert "ended early, after step 106 of 200" in text
    assert "53%" not in text
    list_runs()
    assert "finished     106 (early)" in capsys.readouterr().out


@pytest.mark.parametrize("width", WIDTHS)
def test_a_finished_run_shows_its_scores_and_the_next_command(tmp_path: Path, width: int) -> None:
    text = words(drawn(view_of(tmp_path, "mine", finished(joules=False)), width))
    assert "mine finished" in text
    assert "Finished in 1 min 40 s of training." in text
    assert "lapclip eval mine" in text
    assert "text to image 55.0% 89.1% 100.0%" in text
    assert "chance 0.4% 2.1% 4.2%" in text
    assert "49.5% to 60.5%" in text
    assert " left" not in text
    assert "energy not measurable here: only" in text
    assert "root may read" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run_that_died_shows_the_command_that_resumes_it(tmp_path: Path, width: int) -> None:
    text = words(drawn(view_of(tmp_path, "mine", trained(90)), width))
    assert "mine died" in text
    assert "Ended without a word after step 90" in text
    assert "Go on: lapclip resume mine" in text


def test_a_stopped_run_and_a_failed_one_say_why(tmp_path: Path) -> None:
    end = {"time": trained(90)[-1]["time"], "step": 90}
    stopped = view_of(
        tmp_path, "a", [*trained(90), {"type": "stopped", **end, "reason": "lapclip stop"}]
    )
    assert "Stopped after step 90 by lapclip stop; all is saved. Go on: lapclip resume a" in words(
        drawn(stopped, 80)
    )
    interrupted = view_of(
        tmp_path, "c", [*trained(90), {"type": "stopped", **end, "reason": "SIGINT"}]
    )
    assert "Stopped after step 90 by Ctrl-C; all is saved." in words(drawn(interrupted, 80))
    error = "The loss is not a number at step 91.\nTry: a new run: lapclip train --set train.learning_rate=0.0002"
    failed = words(
        drawn(
            view_of(tmp_path, "b", [*trained(90), {"type": "failed", **end, "error": error}]), 120
        )
    )
    assert "Failed after step 90: The loss is not a number at step 91." in failed
    assert "Next: a new run: lapclip train --set train.learning_rate=0.0002" in failed
    assert failed.count("not a number") == 1
    assert "resume" not in failed


@pytest.mark.parametrize("width", WIDTHS)
def test_a_paused_run_says_why_and_is_not_dead(tmp_path: Path, width: int) -> None:
    events = [
        *trained(90),
        {"type": "paused", "time": 1.0, "step": 90, "reason": "on battery below 30 %"},
    ]
    view = view_of(tmp_path, "mine", events, working=True)
    assert view.status == "paused"
    assert "Paused: on battery below 30 %. It goes on by itself." in words(drawn(view, width))
    run = tmp_path / "runs" / "mine"
    append(run, [{"type": "went_on", "time": 2.0, "step": 90, "seconds": 320.5}])
    watched = FollowedRun(Run(run))
    with filelock.FileLock(run / "lock"):
        watched.refresh()
    assert watched.view.status == "running"
    assert "went on after 5 min 20 s" in words(drawn(watched.view, 80))


def test_what_happened_is_told(tmp_path: Path) -> None:
    at = 1000.0
    first = [started(at), *(step(number, at + number) for number in range(1, 40))]
    fell = {"type": "fell_back", "step": 39, "time": at + 40, "cause": "out of memory", "change": {}, "devices": {},
            "text": "Out of memory: going on with 32 pairs at once."}  # fmt: skip
    slept = [step(number, at + 4000 + number) for number in range(40, 60)]
    resumed = {
        "type": "resumed",
        "step": 59,
        "steps": 200,
        "time": at + 9000,
        "skipped": ["step-00000059 is damaged"],
    }
    view = view_of(tmp_path, "mine", [*first, fell, *slept, resumed])
    assert [notice.type for notice in view.notices] == ["fell_back", "slept", "resumed"]
    text = words(drawn(view, 120, curve_height=4))
    assert "after step 39: Out of memory: going on with 32 pairs at once." in text
    assert "the machine slept for 1 h 6 min" in text
    assert "resumed; skipped a damaged checkpoint: step-00000059 is damaged" in text


def test_heat_that_slows_the_machine_and_swap_are_told(tmp_path: Path) -> None:
    events = trained(90)
    hot = sensors(
        90, events[-1]["time"], 900.0, throttled=True, celsius=99.0, swap_bytes=3_000_000_000
    )
    text = words(drawn(view_of(tmp_path, "mine", [*events, hot], working=True), 120))
    assert "heat 99 °C, slowed down by heat" in text
    assert "swap 3.00 GB in use" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_before_the_first_step_there_is_something_to_see(tmp_path: Path, width: int) -> None:
    assert "Getting ready" in words(drawn(view_of(tmp_path, "a", [], working=True), width))
    begun = view_of(tmp_path, "b", [started(0.0)], working=True)
    assert begun.status == "starting"
    assert "0 of 200" in words(drawn(begun, width))


@pytest.mark.parametrize("width", WIDTHS)
def test_several_runs_have_a_row_each_and_one_is_in_focus(tmp_path: Path, width: int) -> None:
    views = [
        view_of(tmp_path, "first", finished()),
        view_of(tmp_path, "second-with-a-rather-long-name-for-a-run", trained(90), working=True),
        view_of(tmp_path, "third", trained(30)),
    ]
    text = drawn(views, width, focus=1)
    rows = text.splitlines()[1:4]
    assert [row[0] for row in rows] == [" ", ">", " "]
    for row, state, done in zip(
        rows, ("finished", "running", "died"), ("100%", "45%", "15%"), strict=True
    ):
        assert state in row
        assert done in row
    if width >= 80:
        assert "60.0%" in rows[0]
        assert "57 s" in rows[1]
    assert "after step 30" not in text  # the third is not in focus
    assert "Ended without a word after step 30" in words(drawn(views, width, focus=2))


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_wrong_is_an_alarm_with_its_evidence_and_a_next_step(
    tmp_path: Path, width: int
) -> None:
    guessing = [
        {**event, "loss": 4.158} if event["type"] == "step" else event for event in trained(100)
    ]
    view = view_of(tmp_path, "mine", guessing, working=True)
    (found,) = [finding for finding in view.findings if finding.id == "stuck-loss"]
    text = words(drawn(view, width))
    for said in (found.title, found.evidence, found.next):
        assert " ".join(said.split()) in text
    assert "Alarm" in text
    row = drawn([view, view_of(tmp_path, "well", trained(30), working=True)], width).splitlines()[
        1:3
    ]
    assert "running !" in row[0]
    assert "!" not in row[1]


def test_a_death_is_told_once(tmp_path: Path) -> None:
    view = view_of(tmp_path, "mine", trained(100))
    assert "died" in [finding.id for finding in view.findings]
    assert "Alarm" not in drawn(view, 80)


def test_no_state_and_no_gap_in_the_events_breaks_the_image(tmp_path: Path) -> None:
    bare = [
        {"type": "started"},
        {"type": "step", "step": 1},
        {"type": "evaluation", "step": 1, "evaluation": {}},
        {"type": "sensors"},
        {"type": "memory", "step": 1},
        {"type": "fell_back", "step": 1},
        {"type": "ranks", "step": 1},
        {"type": "ranks", "step": 1, "hosts": ["a" * 99, None], "rows": [1], "waited": "x"},
        {"type": "unheard_of"},
        {"type": "paused"},
        {"type": "step", "step": 2, "loss": float("nan"), "grad_norms": None, "seconds": {}},
    ]
    for number in range(1, len(bare) + 1):
        view = view_of(tmp_path, f"run-{number}", bare[:number])
        for width in (20, *WIDTHS):
            for state in (
                "running",
                "paused",
                "starting",
                "finished",
                "stopped",
                "failed",
                "died",
                "gone",
            ):
                drawn(replace(view, state=state), width)
        assert "checks" not in [finding.id for finding in view.findings]
        view.to_dict(lambda _: [])


def test_waiting_for_others_is_a_phase_of_its_own(tmp_path: Path) -> None:
    at = time.time()
    seconds = {"forward": 0.2, "backward": 0.5, "exchange": 0.3}
    events = [started(at), *(step(number, at + number, seconds=seconds) for number in range(1, 12))]
    assert "exchange 30%" in words(drawn(view_of(tmp_path, "mine", events), 80))
    assert "E exchange 30%" in words(drawn(view_of(tmp_path, "plain", events), 80, colour=False))


def test_hostile_words_stay_text(tmp_path: Path) -> None:
    error = "\x1b]0;owned\x07 [bold red]shout[/] \x1b[2J"
    view = view_of(
        tmp_path, "mine", [*trained(5), {"type": "failed", "time": 9e9, "step": 5, "error": error}]
    )
    console = Console(file=(file := io.StringIO()), width=120, force_terminal=True)
    console.print(draw([view], 0, Canvas(120), str), width=120)
    assert "\x1b]" not in file.getvalue()
    assert "\x1b[2J" not in file.getvalue()
    assert "[bold red]shout[/]" in words(drawn(view, 120))


def test_a_run_that_says_nothing_for_long_is_noticed(tmp_path: Path) -> None:
    view = view_of(tmp_path, "mine", trained(90, ago=600), working=True)
    assert "no event for 10 min" in words(drawn(view, 80))
    ahead = view_of(
        tmp_path, "other", trained(90, ago=-7200), working=True
    )  # written by a clock that was set back
    assert ahead.silent_seconds == 0
