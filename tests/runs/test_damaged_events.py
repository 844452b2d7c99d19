"""Events with damaged numbers: doctor, page and report take what is sound and leave out the rest."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lapclip.report.document import to_html
from lapclip.report.run_report import run_report
from lapclip.runs.events import parse_line, read_events
from lapclip.runs.findings import findings
from lapclip.runs.follow import Tail
from lapclip.runs.forecast import forecast
from lapclip.runs.summary import summarise
from lapclip.runs.view import RunView
from lapclip.watch.web.snapshot import snapshot

from ..conftest import examples
from ..watch.made import ended, evaluation, memory, ranks, sensors, started, step

ODD = [
    -1,
    -(10**9),
    0,
    1e308,
    -1e308,
    10**400,
    math.nan,
    math.inf,
    -math.inf,
    1e-308,
    2**63,
    True,
    None,
    "odd",
]


def whole_run() -> list[dict[str, Any]]:
    """A run with every kind of event that the checks read."""
    train = {"batch_size": 16, "warmup": 0.1, "learning_rate": 1e-3, "epsilon": 1e-8, "evaluate_every_epochs": 1,
             "threads": 2, "loader_threads": 1, "minutes": 5.0, "patience": 3, "teacher_weight": 0.5}  # fmt: skip
    captions = {"train": {"captions": 400, "distinct": 200, "told_apart": 0.4}}
    captions |= {"val": {"captions": 60, "distinct": 30, "told_apart": 0.5}}
    events = [started(60, config={"model": {"name": "tiny"}, "train": train}, steps_per_epoch=10, tuned_seconds=0.1,
                      pairs={"train": 400, "val": 50, "test": 50}, captions=captions, chance_loss=2.8,
                      memory_limit_bytes=8_000_000_000)]  # fmt: skip
    for number in range(1, 61):
        events.append(step(number, logit_scale=4.6, teacher_loss=0.5))
        if number % 10 == 0:
            held_out = evaluation(number, 0.3 if number == 20 else 0.1)
            similarities = {"spread": 0.1, "mean": 0.2, "pictures": 0.1, "captions": 0.1}
            intervals = {
                f"{way}_r{rank}": [0.01, 0.2] for way in ("t2i", "i2t") for rank in (1, 10)
            }
            chances = {"t2i_r10": 0.04, "i2t_r10": 0.04}
            held_out["evaluation"] |= {
                "similarities": similarities,
                "intervals": intervals,
                "chances": chances,
            }
            held_out["best"] = number == 20
            events += [
                held_out,
                memory(number),
                ranks(number),
                {**sensors(number), "others": 0.3, "throttled": True},
            ]
    last = {"split": "val", **events[-4]["evaluation"]}
    return [
        *events,
        ended(60, evaluation=last, training_seconds=60.0, pairs_per_second=16.0, best_step=20),
    ]


RUN = whole_run()


def numbers_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every number in nested events."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers_of(inner, (*path, name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from numbers_of(inner, (*path, place))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


PATHS = [
    path
    for at in (0, 1, 20, 35, 40, 41, 42, 43, 44, len(RUN) - 1)
    for path in numbers_of(RUN[at], (at,))
]


def examined(events: list[dict[str, Any]]) -> list[str]:
    """Write events down, read them back, and show them everywhere."""
    read = [event for event in map(parse_line, map(json.dumps, events)) if event is not None]
    summary = summarise(read)
    found = findings(summary)
    for state in ("running", "finished"):
        view = RunView("run", state, summary, tuple(found))
        view.to_dict(lambda view: [])
        json.dumps(snapshot({"working": view.working}, view), allow_nan=False)
        to_html(run_report(view, [], Path()))
    forecast(summary)
    return [finding.id for finding in found]


def test_the_run_is_one_that_many_checks_have_something_to_say_about() -> None:
    assert {"small-validation", "duplicate-captions", "overfitting", "small-batch"} <= set(
        examined(RUN)
    )


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.sampled_from(PATHS), st.sampled_from(ODD)), min_size=1, max_size=6))
def test_damaged_numbers_are_no_fault(damage: list[tuple[tuple[Any, ...], Any]]) -> None:
    events = copy.deepcopy(RUN)
    for path, odd in damage:
        *outer, last = path
        target: Any = events
        for name in outer:
            target = target[name]
        target[last] = odd
    examined(events)


@pytest.mark.parametrize("odd", [-5, -1e308, 1e308, math.nan])
def test_counts_that_are_none_are_left_out(odd: float) -> None:
    events = copy.deepcopy(RUN)
    events[0]["pairs"]["val"] = odd
    events[0]["steps_per_epoch"] = odd
    assert "small-validation" not in examined(events)
    line = json.dumps(events[0])
    event = parse_line(line)
    assert event is not None
    assert event["pairs"] == {"train": 400, "val": None, "test": 50}
    assert event["steps_per_epoch"] is None


def test_a_watched_file_and_a_read_one_are_checked_alike(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [json.dumps(event) for event in [{**RUN[0], "steps": -4}, *RUN[1:]]]
    path.write_text("\n".join([*lines, "rubbish", "[1]"]) + "\n", encoding="utf-8")
    assert Tail(path).read() == list(read_events(path))
    assert next(read_events(path))["steps"] is None
