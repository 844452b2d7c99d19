"""An event as a sentence, for the log, for a watch and for a list of what happened."""

from __future__ import annotations

import io
from typing import Any

import pytest

from lapclip.runs.events import Failed, FellBack, Paused, Resumed, Step, Stopped, WentOn
from lapclip.runs.messages import LineWriter, log_line, message, notices, watch_line
from lapclip.runs.summary import summarise

EVALUATION = {
    "t2i_r1": 0.5,
    "t2i_r5": 0.75,
    "t2i_r10": 0.9,
    "i2t_r1": 0.4,
    "i2t_r5": 0.6,
    "i2t_r10": 0.8,
}


def step(number: int) -> Step:
    return Step(
        step=number, epoch=2, loss=2.5, t2i_accuracy=0.25, i2t_accuracy=0.75, logit_scale=2.66, temperature=0.07,
        lr=1e-3, grad_norm=1.0, grad_norms={}, seconds=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("event", "facts"),
    [
        (Resumed(step=3, steps=1200, batch_size=4, checkpoint="c", skipped=["step-9"]), ["3 of 1,200", "step-9"]),
        (Paused(step=90, reason="on battery"), ["paused", "step 90", "on battery"]),
        (WentOn(step=90, seconds=320.5), ["5 min 20 s"]),
        (Stopped(step=7, reason="lapclip stop"), ["stopped", "step 7", "lapclip stop"]),
        (Failed(step=8, error="No space left"), ["failed", "step 8", "No space left"]),
        (FellBack(step=4, cause="swap", change={}, devices={}, text="Less at once."), ["Less at once."]),
        (step(12), ["step 12", "epoch 2", "2.500", "50.0%"]),
    ],
)  # fmt: skip
def test_a_line_of_the_log_holds_the_facts_of_its_event(event: Any, facts: list[str]) -> None:
    for fact in facts:
        assert fact in log_line(event)


def test_a_start_shows_the_first_of_many_notes_and_where_the_rest_is() -> None:
    start = {
        "type": "started",
        "pairs": {"train": 8, "val": 2},
        "steps": 4,
        "devices": {"image": "cpu"},
    }
    start |= {"parameters": 1000, "notes": [f"note {number}" for number in range(5)]}
    assert log_line(start).splitlines()[1:] == start["notes"]
    start["notes"].append("note 5")
    assert log_line(start).splitlines()[1:] == [*start["notes"][:4], "2 more notes in run.toml"]


def test_the_step_is_named_once_where_it_stands_beside_the_sentence() -> None:
    event = {"type": "stopped", "step": 7, "reason": "asked"}
    assert "7" not in message(event)
    assert watch_line(event, "mine").count("7") == 1


def test_an_evaluation_of_a_watched_run_is_one_line_with_its_recalls_and_the_time_left() -> None:
    event = {"type": "evaluation", "step": 40, "epoch": 8, "evaluation": EVALUATION, "best": True}
    text = watch_line(event, "mine", loss=1.25, seconds_left=12.0)
    for fact in ("mine: step 40", "epoch 8", "1.25", "50.0%", "40.0%", "best", "12 s left"):
        assert fact in text
    assert watch_line({"type": "step", "step": 41}, "mine") == ""


def test_foreign_text_steers_no_terminal() -> None:
    event = {"type": "failed", "step": 1, "error": "\x1b[2J\nnext"}
    assert "\x1b" not in watch_line(event, "a\x1bb")
    assert len(watch_line(event, "a").splitlines()) == 1


def test_what_happened_is_in_order_and_a_machine_that_slept_is_among_it() -> None:
    steps = [
        {"type": "step", "step": number, "time": float(number), "loss": 1.0}
        for number in range(1, 21)
    ]
    slept = [{"type": "step", "step": 21, "time": 4000.0, "loss": 1.0}]
    stopped = {"type": "stopped", "step": 21, "time": 4001.0, "reason": "asked"}
    found = notices(
        summarise(
            [
                {"type": "started", "time": 0.0, "notes": ["no GPU", "few images"]},
                *steps,
                *slept,
                stopped,
            ]
        )
    )
    assert [notice.type for notice in found] == ["started", "started", "slept", "stopped"]
    assert [notice.text for notice in found[:2]] == [
        "no GPU",
        "few images",
    ]  # each by itself, not as one long sentence
    assert "1 h 6 min" in found[2].text


def test_of_the_steps_a_log_has_one_now_and_then() -> None:
    times = iter([0.0, 0.0, 3.0, 3.0, 12.0, 12.0, 12.0])
    writer = LineWriter(stream := io.StringIO(), every=10.0, clock=lambda: next(times))
    for number in (1, 2, 3):
        writer(step(number))
    written = [line.split()[1] for line in stream.getvalue().splitlines()]
    assert written[0] == "1"
    assert "2" not in written
