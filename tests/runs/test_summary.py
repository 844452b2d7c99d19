from __future__ import annotations

import json
import math
from typing import Any

import pytest

from lapclip.runs.summary import MOST_RANKS, Machines, Rank, Summary, summarise


def step(number: int, time: float, **fields: Any) -> dict[str, Any]:
    return {
        "type": "step",
        "step": number,
        "time": time,
        "loss": 1.0 / number,
        "grad_norms": {},
        **fields,
    }


def started(time: float = 0.0) -> dict[str, Any]:
    config = {"train": {"batch_size": 10, "steps": 100}}
    return {
        "type": "started",
        "time": time,
        "steps": 100,
        "config": config,
        "devices": {"image": "cuda", "text": "cuda"},
    }


def resumed(after: int, time: float) -> dict[str, Any]:
    return {"type": "resumed", "time": time, "step": after, "steps": 100, "batch_size": 10}


def sensors(time: float, joules: dict[str, float] | None, **fields: Any) -> dict[str, Any]:
    return {"type": "sensors", "step": 1, "time": time, "joules": joules, **fields}


def test_no_events_are_an_empty_run() -> None:
    summary = summarise([])
    assert summary == Summary()
    assert summary.pairs_per_second is summary.peak_memory_bytes is summary.chance_loss is None
    assert summary.scores == {}
    assert not summary.speed()
    assert not summary.joules()


def test_the_last_event_of_a_step_counts_and_a_pause_is_not_work() -> None:
    first = [started(), step(1, 2), step(2, 4), step(3, 6, loss=7.0)]
    summary = summarise([*first, resumed(2, 1000), step(3, 1002), step(4, 1004)])
    assert [(event["step"], event["loss"]) for event in summary.steps] == [
        (1, 1.0),
        (2, 0.5),
        (3, 1 / 3),
        (4, 0.25),
    ]
    assert summary.step == 4
    assert summary.elapsed == summary.training_seconds == 10
    # Gaps: steps 2 and 4 have one of 2 s; 1 and 3 are the first of their process.
    assert [event["gap"] for event in summary.steps] == [None, 2, None, 2]
    assert summary.pairs_per_second == pytest.approx(5.0)


def test_a_step_written_early_does_not_look_like_speed() -> None:
    times = [2.0 * at for at in range(1, 21)]
    times[9] = times[8] + 0.001  # before a checkpoint the pending step is written at once
    summary = summarise([started(), *(step(at, time) for at, time in enumerate(times, 1))])
    assert summary.speed().y == pytest.approx([5.0] * 4, rel=1e-6)


def test_a_resumed_run_has_not_ended() -> None:
    stopped = {"type": "stopped", "time": 4, "step": 1, "reason": "asked"}
    assert summarise([started(), step(1, 2), stopped]).ending["reason"] == "asked"
    assert summarise([started(), step(1, 2), stopped, resumed(1, 9)]).ending == {}


def test_energy_counts_every_process_from_zero_and_lost_work_too() -> None:
    counts = [sensors(1, {"cpu": 10.0, "gpu": 5.0}), sensors(2, {"cpu": 30.0, "gpu": 6.0})]
    summary = summarise(
        [
            started(),
            *counts,
            resumed(0, 500),
            sensors(501, {"cpu": 4.0}),
            sensors(502, {"cpu": 9.0}),
        ]
    )
    assert summary.joules().y == [15.0, 36.0, 40.0, 45.0]
    assert summary.joules().x == [1, 2, 3, 4]


def test_energy_that_cannot_be_measured_is_no_energy() -> None:
    assert not summarise([started(), sensors(1, None), sensors(2, {})]).joules()


def test_phases_are_medians_without_the_first_step() -> None:
    seconds = [9.0, 1.0, 3.0, 2.0]
    events = [step(at, at, seconds={"forward": value}) for at, value in enumerate(seconds, 1)]
    assert summarise([*events, step(5, 5, seconds=None)]).phases() == {"forward": 2.0}
    assert summarise(events[:1]).phases() == {"forward": 9.0}


def test_parts_are_in_order_of_depth_and_overflowed_steps_leave_no_gap() -> None:
    names = [
        "temperature",
        "text.head",
        "image.head",
        "image.10",
        "image.2",
        "text.embedding",
        "image.embedding",
    ]
    norms = dict.fromkeys(names, 1.0)
    summary = summarise(
        [
            step(1, 1, grad_norms=norms),
            step(2, 2, grad_norm=None, grad_norms={}),
            step(3, 3, grad_norms=norms),
        ]
    )
    assert summary.parts() == [
        "image.embedding", "image.2", "image.10", "image.head", "text.embedding", "text.head", "temperature",
    ]  # fmt: skip
    steps, rows = summary.gradient_map(10)
    assert steps == [1, 3]
    assert rows == [[1.0, 1.0]] * 7
    assert summary.gradient_map(1) == ([3], [[1.0]] * 7)


def test_a_fallback_says_where_the_towers_went() -> None:
    fell = {
        "type": "fell_back",
        "time": 3,
        "step": 1,
        "text": "",
        "devices": {"image": "cpu", "text": "cpu"},
    }
    smaller = {**fell, "step": 2, "time": 5}
    summary = summarise([started(), step(1, 1), step(2, 2), fell, step(2, 4), smaller])
    assert summary.tower_devices == [
        {"step": 1, "image": "cuda", "text": "cuda"},
        {"step": 2, "image": "cpu", "text": "cpu"},
    ]
    assert len(summary.fallbacks) == 2
    assert summary.steps[1]["gap"] is None


def test_unknown_kinds_and_missing_fields_are_passed_over() -> None:
    odd = [
        {"type": "later"},
        {"type": "step"},
        {"type": "evaluation", "step": 1},
        {"type": "memory", "step": 1},
    ]
    summary = summarise(
        [*odd, {"type": "started"}, {"type": "step", "step": 1, "grad_norms": None, "seconds": 3}]
    )
    assert [event["step"] for event in summary.steps] == [1]
    assert summary.evaluations == []
    assert summary.peak_memory_bytes is None
    assert summary.phases() == {}
    assert summary.parts() == []


def test_the_finished_scores_win_over_the_best_so_far() -> None:
    evaluation = {
        "type": "evaluation",
        "step": 1,
        "time": 1,
        "split": "val",
        "evaluation": {"t2i_r1": 0.5},
    }
    worse = {**evaluation, "step": 2, "evaluation": {"t2i_r1": 0.4}, "best": False}
    finished = {
        "type": "finished",
        "time": 3,
        "step": 2,
        "evaluation": {"split": "test", "t2i_r1": 0.45},
    }
    assert summarise([{**evaluation, "best": True}, worse]).scores == {
        "split": "val",
        "t2i_r1": 0.5,
    }
    assert summarise([evaluation, worse, finished]).scores == {"split": "test", "t2i_r1": 0.45}


def test_a_machine_that_slept_is_a_pause_and_no_slowness() -> None:
    events = [{"type": "started", "time": 0.0, "steps": 100}]
    events += [step(number, float(number), seconds=None) for number in range(1, 21)]
    events += [step(number, 3600.0 + number, seconds=None) for number in range(21, 31)]
    found = summarise(events)
    assert found.pauses == [(20.0, 3621.0)]
    assert found.elapsed == pytest.approx(29.0)


def test_a_long_evaluation_is_no_pause() -> None:
    events = [{"type": "started", "time": 0.0, "steps": 100}]
    events += [step(number, float(number), seconds=None) for number in range(1, 21)]
    events += [
        {"type": "evaluation", "time": 220.0, "step": 20, "evaluation": {}, "seconds": 199.0}
    ]
    assert summarise(events).pauses == []


def test_a_clock_that_is_set_back_costs_no_time() -> None:
    events = [
        {"type": "started", "time": 1000.0, "steps": 9},
        step(1, 1001.0),
        step(2, 500.0),
        step(3, 501.0),
    ]
    assert summarise(events).elapsed == pytest.approx(2.0)


def test_a_polite_pause_is_no_work() -> None:
    events = [
        {"type": "started", "time": 0.0, "steps": 1000, "config": {"train": {"batch_size": 10}}}
    ]
    events += [step(number, float(number), seconds=None) for number in range(1, 30)]
    events += [{"type": "sensors", "time": 29.0, "step": 29, "joules": {"cpu": 290.0}}]
    events += [{"type": "paused", "time": 29.5, "step": 29, "reason": "on battery"}]
    events += [{"type": "went_on", "time": 3629.5, "step": 29, "seconds": 3600.0}]
    events += [step(number, 3600.0 + number, seconds=None) for number in range(30, 35)]
    events += [{"type": "sensors", "time": 3635.0, "step": 34, "joules": {"cpu": 9000.0}}]
    events += [{"type": "sensors", "time": 3636.0, "step": 34, "joules": {"cpu": 9010.0}}]
    found = summarise(events)
    assert found.pauses == [(29.5, 3629.5)]
    assert found.elapsed == pytest.approx(36.0)
    assert found.pairs_per_second == pytest.approx(10.0, rel=0.1)
    assert found.joules().y == [290.0, 290.0, 300.0]


def test_the_loss_of_guessing_is_what_the_run_recorded() -> None:
    assert summarise([{**started(), "chance_loss": 6.93}]).chance_loss == 6.93
    assert summarise([{"type": "started", "time": 0.0}]).chance_loss is None


def ranks(number: int, time: float, waited: list[float], **fields: Any) -> dict[str, Any]:
    count = len(waited)
    about = {
        "hosts": ["desktop", "laptop", "tower", "box"][:count],
        "rows": [6, 2, 4, 4][:count],
        "writer": 1,
        "advice": "laptop is slowest",
    }
    return {"type": "ranks", "step": number, "time": time, "waited": waited, **about, **fields}


def machines_of(*events: dict[str, Any]) -> Machines:
    found = summarise([started(), *events]).machines()
    assert found is not None
    return found


def test_ranks_have_rows_waiting_and_advice() -> None:
    early = machines_of({**ranks(1, 1.0, [0.0, 0.0]), "waited": None})
    assert [(rank.name, rank.share, rank.waited) for rank in early.ranks] == [
        ("desktop", 0.75, None),
        ("laptop", 0.25, None),
    ]
    assert early.waiting == ""
    reports = [
        ranks(number, number, [waited, 0.03]) for number, waited in ((1, 0.0), (2, 0.5), (3, 0.4))
    ]
    late = machines_of(*(step(number, number) for number in range(1, 5)), *reports)
    assert late.ranks == [
        Rank("desktop", 6, 0.75, 0.4, False),
        Rank("laptop", 2, 0.25, 0.03, True),
    ]
    assert (late.step_seconds, late.advice) == (1.0, "laptop is slowest")


@pytest.mark.parametrize(
    ("waited", "sentence"),
    [
        ([0.02, 0.09], "Nobody waits long"),
        ([0.62, 0.6], "for the network"),
        ([0.4, 0.02], "desktop waits for laptop"),
        ([0.3, 0.02, 0.4, 0.04], "tower and desktop wait for laptop"),
    ],
)
def test_who_waits_least_is_waited_for(waited: list[float], sentence: str) -> None:
    assert sentence in machines_of(ranks(1, 1.0, waited)).waiting


def test_ranks_of_one_computer_are_told_apart_by_number() -> None:
    found = machines_of(ranks(1, 1.0, [0.1, 0.1, 0.1], hosts=["box", "laptop", "box"]))
    assert [rank.name for rank in found.ranks] == ["box, rank 0", "laptop", "box, rank 2"]


def test_a_run_that_goes_on_alone_has_no_machines_any_more() -> None:
    events = [started(), step(1, 1), ranks(1, 1, [0.4, 0.1])]
    assert summarise(events).machines() is not None
    assert summarise([*events, resumed(1, 10), step(2, 11)]).machines() is None
    assert summarise([started(), step(1, 1)]).machines() is None
    # With others again, what was measured of the first ones does not count.
    others = ranks(3, 11, [0.4, 0.1], hosts=["laptop", "box"])
    again = summarise([*events, step(2, 2), resumed(2, 10), step(3, 11), others])
    found = again.machines()
    assert found is not None
    assert [rank.name for rank in found.ranks] == ["laptop", "box"]
    assert found.step_seconds is None


@pytest.mark.parametrize(
    "fields",
    [
        {"hosts": None},
        {"hosts": "desktop"},
        {"hosts": ["desktop"]},
        {"hosts": [None, {}, 3]},
        {"hosts": ["", "\x1b[2J"]},
        {"hosts": ["a"] * 100_000},
        {"rows": None, "waited": None, "writer": None, "advice": None},
        {"rows": [1], "waited": [0.5], "advice": {}},
        {"rows": [0, 0], "waited": [-1, math.nan]},
        {"rows": [math.inf, "x"], "waited": [math.inf, "x"], "advice": ["x"]},
        {"rows": [10**400, 1e308], "waited": [True, 1e308], "writer": "x"},
        {"step": None},
    ],
)
def test_odd_accounts_of_ranks_leave_gaps(fields: dict[str, Any]) -> None:
    odd = [ranks(1, 1.0, [0.1, 0.2]) | fields, ranks(2, 2.0, [0.1, 0.2]) | fields]
    told = summarise([started(), *odd]).machines()
    assert told is None or 2 <= len(told.ranks) <= MOST_RANKS
    for rank in told.ranks if told else ():
        assert rank.name.isprintable()
        assert rank.waited is None or 0 <= rank.waited <= 1
        assert rank.share is None or 0 <= rank.share <= 1
    json.dumps(told.to_dict() if told else None, allow_nan=False)


def test_the_speed_after_a_resume_is_that_of_the_process_at_work() -> None:
    before = [started(), *(step(at, at / 1000) for at in range(1, 40))]
    assert summarise(before).pairs_per_second == pytest.approx(10_000)
    assert summarise([*before, resumed(39, 1000)]).pairs_per_second is None
    after = [*before, resumed(39, 1000), step(40, 1002), step(41, 1004)]
    assert summarise(after).pairs_per_second == pytest.approx(5)
