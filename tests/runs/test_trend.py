"""One rule says whether validation still improves; doctor, page, report and terminal all follow it."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lapclip.cli.runs import runs as list_runs
from lapclip.report.document import to_html
from lapclip.report.run_report import run_report
from lapclip.runs.findings import findings
from lapclip.runs.follow import RunStatus
from lapclip.runs.summary import Summary, summarise
from lapclip.runs.trend import Trend, deciding_score, kept_evaluation, validation
from lapclip.runs.view import RunView
from lapclip.watch.panels import Canvas, recall
from lapclip.watch.web.snapshot import snapshot

from ..watch.made import ended, make_run, started, step

OVERFITTED = [15, 13, 12, 12, 11, 11, 11, 11]
"""Right ones among 27 captions, after steps 4, 8, ... 28 and 30."""
STEPS = [4, 8, 12, 16, 20, 24, 28, 30]
RECALLS = [f"{way}_r{rank}" for way in ("t2i", "i2t") for rank in (1, 5, 10)]


def evaluation(at: int, right: float, best: bool) -> dict[str, Any]:
    """Half a recall among 27 candidates is known to within 19 points, so no interval tells these scores apart."""
    share = right / 27
    scores: dict[str, Any] = dict.fromkeys(RECALLS[::3], share)
    scores |= dict.fromkeys(RECALLS[1::3], min(1.0, share + 0.25))
    scores |= dict.fromkeys(RECALLS[2::3], min(1.0, share + 0.4))
    intervals = {
        name: [max(0.0, scores[name] - 0.19), min(1.0, scores[name] + 0.19)] for name in RECALLS
    }
    values = {**scores, "candidates": 27, "chance": 1 / 27, "intervals": intervals}
    return {"type": "evaluation", "time": 1_790_000_000.5 + at, "step": at, "epoch": at, "split": "val",
            "evaluation": values, "seconds": 0.2, "best": best}  # fmt: skip


def events_of(rights: Sequence[float], *, over: bool = True) -> list[dict[str, Any]]:
    """A run of 30 steps whose training loss falls and whose training batches come to be all right."""
    found = [started(30, steps_per_epoch=1, pairs={"train": 247, "val": 27})]
    best = -1.0
    for at in range(1, STEPS[len(rights) - 1] + 1):
        accuracy = min(1.0, at / 10)
        found.append(
            step(at, loss=3.0 / at, t2i_accuracy=accuracy, i2t_accuracy=accuracy, epoch=at)
        )
        if at in STEPS:
            right = rights[STEPS.index(at)]
            found.append(evaluation(at, right, right > best))
            best = max(best, right)
    if over:
        kept = next(event for event in reversed(found) if event.get("best"))
        scores = {"split": "val", **kept["evaluation"]}
        found.append(
            ended(
                STEPS[len(rights) - 1],
                evaluation=scores,
                best_step=kept["step"],
                training_seconds=30.0,
            )
        )
    return found


def ids(summary: Summary) -> dict[str, str]:
    return {finding.id: finding.evidence for finding in findings(summary)}


def screen_of(view: RunView) -> str:
    console = Console(file=io.StringIO(), width=120)
    drawn = recall(view, Canvas.of(console, 120))
    assert drawn is not None
    console.print(drawn)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().replace("│", " ").split())


def displays(events: list[dict[str, Any]], state: str) -> dict[str, str]:
    """What the terminal, the page and the report say of a run."""
    view = RunView("run", state, summarise(events))
    row = {"name": "run", "working": view.working, "best": view.best_recall, "best_step": None}
    return {
        "terminal": screen_of(view),
        "page": json.dumps(snapshot(row, view)["learning"]),
        "report": to_html(run_report(view, [], Path())),
    }


def test_an_overfitted_run_with_few_held_out_pairs_is_found() -> None:
    summary = summarise(events_of(OVERFITTED))
    held_out = validation(summary)
    assert held_out is not None
    assert held_out.trend is Trend.FALLING
    evidence = ids(summary)["overfitting"]
    assert (
        "R@1 on held-out pairs fell from 55.6% at step 4 to 40.7% (mean recall from 77.2% to 62.4%)"
        in evidence
    )
    assert "100% of the pairs in training batches are matched right" in evidence


@pytest.mark.parametrize(("accuracy", "trend"), [(1.0, Trend.FALLING), (0.6, Trend.LEVEL)])
def test_a_fall_of_recall_alone_counts_where_the_training_pairs_are_known_by_heart(
    accuracy: float, trend: Trend
) -> None:
    """R@5 and R@10 among few candidates hardly fall, so the mean of all recalls falls by less than R@1."""
    events = events_of(OVERFITTED)
    for event in events:
        if event["type"] == "evaluation":
            event["evaluation"] |= dict.fromkeys(RECALLS[1:], 0.95)
        if event["type"] == "step":
            event |= {"t2i_accuracy": accuracy, "i2t_accuracy": accuracy}
    held_out = validation(summarise(events))
    assert held_out is not None
    assert held_out.trend is trend


def test_all_displays_show_the_model_that_is_kept_and_ask_for_no_more_time() -> None:
    for state, events in (
        ("finished", events_of(OVERFITTED)),
        ("running", events_of(OVERFITTED[:-1], over=False)),
    ):
        for name, text in displays(events, state).items():
            assert "step 4" in text, (name, state)
            assert "have fallen since step 4" in text, (name, state)
            assert "More time may help" not in text, (name, state)
            assert "more time would help" not in text, (name, state)
            assert "55.6%" in text or "56 %" in text, (name, state)
        assert "40.7%" not in displays(events, state)["page"]
    assert "val R@1 55.6%" in displays(events, "running")["terminal"]


def test_more_time_is_spoken_of_only_while_validation_improves() -> None:
    rising = [8, 9, 10, 11, 12, 13, 14, 15]
    for text in displays(events_of(rising), "finished").values():
        assert "still rising at step 30" in text
        assert "More time may help" in text
    for text in displays(events_of(rising[:-1], over=False), "running").values():
        assert "still rising at step 28" in text
        assert "More time" not in text
    level = [8, 12, 14, 14, 13.8, 14, 13.9, 14]
    for text in displays(events_of(level), "finished").values():
        assert "have not risen since step 12: more time would not help" in text
    assert "overfitting" not in ids(summarise(events_of(level)))


@pytest.mark.parametrize(
    ("rights", "trend"),
    [
        ([15], Trend.UNKNOWN),
        ([15, 10, 10], Trend.UNKNOWN),
        ([15, 10, 10, 10], Trend.FALLING),
        ([10, 15, 10, 14.9, 10], Trend.LEVEL),
        ([10, 11], Trend.IMPROVING),
    ],
)
def test_two_later_evaluations_may_be_chance(rights: Sequence[float], trend: Trend) -> None:
    held_out = validation(summarise(events_of(rights)))
    assert held_out is not None
    assert held_out.trend is trend


def test_a_run_that_stopped_for_it_gets_a_note() -> None:
    events = events_of(OVERFITTED[:4])
    events[0]["config"]["train"]["patience"] = 3
    events[-1]["early"] = "no better score since step 4"
    (found,) = [each for each in findings(summarise(events)) if each.id == "overfitting"]
    assert found.severity == "note"
    assert "train.patience" not in found.next


def test_an_evaluation_done_again_after_a_crash_still_marks_the_model_that_is_kept() -> None:
    found = events_of(OVERFITTED, over=False)
    again = [
        {**event, "best": False} if event["type"] == "evaluation" else event for event in found[1:]
    ]
    resumed = {
        "type": "resumed",
        "time": 1_790_000_010.0,
        "step": 0,
        "steps": 30,
        "batch_size": 128,
    }
    crashed = found[
        : found.index(next(event for event in found if event["type"] == "evaluation")) + 1
    ]
    summary = summarise([*crashed, resumed, *again])
    kept = kept_evaluation(summary)
    assert kept is not None
    assert kept["step"] == summary.progress.best_step == 4
    assert "overfitting" in ids(summary)


def test_the_list_of_runs_names_the_step(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("few", events_of(OVERFITTED))
    status = RunStatus(run)
    status.refresh()
    assert (status.row()["best"], status.row()["best_step"]) == (15 / 27, 4)
    list_runs()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("few")]
    assert "55.6%" in line
    assert line.split()[4] == "4"


def test_classes_are_decided_by_their_accuracy() -> None:
    assert deciding_score({"zeroshot_top1": 0.75, "t2i_r1": 0.1}) == 0.75
    assert deciding_score({"t2i_r1": 0.1, "i2t_r1": 0.3}) == pytest.approx(0.2)
    assert deciding_score({"t2i_r1": "odd"}) is None
