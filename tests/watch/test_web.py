"""The server, asked over HTTP: what it tells, what it survives, and whom it refuses."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from lapclip.errors import LapclipError
from lapclip.runs.events import read_events
from lapclip.watch.web import serve
from lapclip.watch.web.feed import Feed

from ..conftest import command, lapclip
from .made import (
    BEGAN,
    Served,
    append,
    ended,
    evaluation,
    learning_run,
    make_run,
    ranks,
    server,
    start_server,
    started,
    step,
)


def test_page_loads_everything_it_names_from_here(served: Served) -> None:
    answer = served.ask("/")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    named = re.findall(r'(?:src|href)="([^"#]+)"', answer.read().decode())
    assert {"/page.css", "/page.js", "/theme.js"} <= set(named)
    scripts = {
        f"/{path.name}"
        for path in (Path(serve.__code__.co_filename).parent / "static").glob("*.js")
    }
    for path in {*named, *scripts, "/plotly.js"}:
        assert path.startswith("/")
        found = served.ask(path)
        assert found.status == 200, path
        assert found.read(), path


def test_plotly_is_sent_once(served: Served) -> None:
    first = served.ask("/plotly.js")
    assert int(first.headers["content-length"]) > 1_000_000
    assert "max-age" in first.headers["cache-control"]
    again = served.ask("/plotly.js", If_None_Match=first.headers["etag"])
    assert (again.status, again.read()) == (304, b"")


def test_runs_are_listed_with_their_standing(here: Path) -> None:
    make_run("done", [*learning_run(20), ended(20)])
    make_run("killed", learning_run(30)[:-1])
    working = make_run("working", [started(50), step(1), step(2)])
    paused = make_run(
        "paused", [started(50), step(1), {"type": "paused", "step": 1, "reason": "on battery"}]
    )
    with working.lock(), paused.lock(), server() as fresh:
        rows = {row["name"]: row for row in fresh.json("/runs")}
    assert list(rows) == ["done", "killed", "working", "paused"]
    assert {name: row["state"] for name, row in rows.items()} == {
        "done": "finished", "killed": "died", "working": "running", "paused": "running"}  # fmt: skip
    assert {name: (row["status"], row["working"]) for name, row in rows.items()} == {
        "done": ("Finished", False), "killed": ("Died", False), "working": ("Running", True),
        "paused": ("Paused", True)}  # fmt: skip
    assert {name: row["paused"] for name, row in rows.items() if row["paused"]} == {
        "paused": "on battery"
    }
    done = rows["done"]
    assert (done["step"], done["steps"], done["best"], done["started"]) == (20, 20, 0.2, BEGAN)


def test_run_that_is_just_being_made_is_starting(here: Path) -> None:
    run = make_run("new", [])
    with run.lock(), server() as served:
        assert served.json("/runs")[0]["status"] == "Starting"
        assert served.json("/runs/new")["curves"]["loss"] == {"x": [], "y": []}


def test_figures_hold_what_the_charts_need(served: Served) -> None:
    make_run("learning", [*learning_run(60), ended(60)])
    run = served.json("/runs/learning")
    assert run["curves"]["loss"]["x"] == list(range(1, 61))
    assert len(run["curves"]["loss_smoothed"]["y"]) == 60
    assert [each["t2i_r1"] for each in run["evaluations"]] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert run["gradients"]["parts"] == ["image.embedding", "image.0", "text.0", "temperature"]
    assert run["gradients"]["names"] == [
        "image embedding",
        "image block 1",
        "text block 1",
        "temperature",
    ]
    assert run["stopped"] is None
    assert run["phases"] == {"load": 0.01, "forward": 0.05, "backward": 0.1}
    assert run["memory"]["now"]["y"] == [600_000_000] * 6
    assert len(run["cores"]["values"]) == 2
    assert run["energy"]["joules"] == 300.0
    assert [look["answers"][0]["rank"] for look in run["looked"]] == [4, 2, 1, 1, 1, 1]
    assert run["learning"]["answer"] == "It has learned"
    tag = served.ask("/runs/learning").headers["etag"]
    assert served.ask("/runs/learning", If_None_Match=tag).status == 304


def test_machines_are_told_where_several_train(served: Served) -> None:
    make_run("alone", [*learning_run(20), ended(20)])
    make_run("both", [started(20), step(1), step(2), ranks(2), ended(2)])
    assert served.json("/runs/alone")["machines"] is None
    told = served.json("/runs/both")["machines"]
    assert [rank["name"] for rank in told["ranks"]] == ["desktop", "laptop"]
    assert "desktop waits for laptop" in told["waiting"]
    assert told["step_seconds"] == pytest.approx(1.0)
    assert told["advice"] == "laptop is slowest"


def test_long_run_is_thinned_for_the_charts(served: Served) -> None:
    make_run(
        "long", [started(20_000), *(step(number) for number in range(1, 20_001)), ended(20_000)]
    )
    run = served.json("/runs/long")
    assert run["step"] == 20_000
    assert all(len(points["x"]) <= 700 for points in run["curves"].values())
    assert run["curves"]["loss"]["x"][-1] == 20_000


def test_figures_that_are_no_numbers_become_gaps(served: Served) -> None:
    events = [
        started(),
        step(1),
        step(2, loss=math.nan, grad_norm=math.inf),
        step(3),
        ended(3, "failed", error="NaN"),
    ]
    make_run("bad", events)
    assert served.json("/runs/bad")["curves"]["loss"]["x"] == [1, 3]
    sent = [value for kind, value in served.messages("/runs/bad/events") if kind == "message"]
    assert [event.get("loss") for event in sent if event["type"] == "step"][1] is None


def test_learning_is_judged_by_held_out_pairs_then_by_the_loss(here: Path) -> None:
    falling = [step(number, loss=3 - number / 50) for number in range(1, 40)]
    level = [step(number, loss=2.77) for number in range(1, 40)]
    make_run("begun", [started(), step(1)])
    make_run("falling", [started(), *falling])
    make_run("level", [started(), *level])
    make_run("guessing", [started(), *falling, evaluation(40, 0.004)])
    recalls = enumerate((0.1, 0.3, 0.5, 0.4, 0.4, 0.4), 40)
    scored = [evaluation(number, recall) for number, recall in recalls]
    levelled = [started(), *falling, *({**event, "best": event["step"] <= 42} for event in scored)]
    make_run("killed", levelled)
    with make_run("levelled", levelled).lock(), server() as served:
        answers = {
            row["name"]: served.json(f"/runs/{row['name']}")["learning"]["answer"]
            for row in served.json("/runs")
        }
    assert answers == {
        "begun": "Too early to say", "falling": "Yes, so far", "level": "Not yet", "guessing": "Not yet",
        "killed": "It has learned", "levelled": "It has leveled off"}  # fmt: skip


def test_stream_of_an_ended_run_is_its_events_and_an_end(served: Served) -> None:
    run = make_run("ended", [*learning_run(30), ended(30)])
    answer = served.ask("/runs/ended/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    *sent, last = served.messages("/runs/ended/events")
    assert [value for _, value in sent] == list(read_events(run.events))
    assert last == ("end", {"state": "finished"})


def test_who_stopped_a_run_is_said_in_words(served: Served) -> None:
    for name, reason in (("typed", "SIGINT"), ("asked", "lapclip stop"), ("other", "because")):
        make_run(name, [started(9), step(1), ended(1, "stopped", reason=reason)])
    said = {name: served.json(f"/runs/{name}")["stopped"] for name in ("typed", "asked", "other")}
    assert said == {
        "typed": "Stopped by Ctrl-C",
        "asked": "Stopped by lapclip stop",
        "other": "Stopped: because",
    }


def test_stream_of_a_dead_run_ends_too(served: Served) -> None:
    make_run("killed", learning_run(30)[:-1])
    assert list(served.messages("/runs/killed/events"))[-1] == ("end", {"state": "died"})


def test_stream_goes_on_with_what_is_written_and_waits_for_whole_lines(served: Served) -> None:
    run = make_run("growing", [started(10), step(1)])
    with run.lock():
        stream = served.messages("/runs/growing/events")
        assert [value["type"] for _, value in itertools.islice(stream, 2)] == ["started", "step"]
        whole = json.dumps(step(2))
        with open(run.events, "a", encoding="utf-8") as file:
            file.write(whole[:50])
            file.flush()
            append(make_run("beside", []), [step(1)])
            served.json("/runs/growing")  # read in between: half a line is no event
            file.write(whole[50:] + "\n")
        assert next(stream)[1]["step"] == 2
        append(run, [step(3), ended(3)])
        assert [(kind, value.get("type")) for kind, value in stream] == [
            ("message", "step"), ("message", "finished"), ("end", None)]  # fmt: skip


def test_stream_waits_for_a_run_that_is_about_to_begin(served: Served) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: list(served.messages("/runs/w/events")))
        served.json("/runs")
        make_run("w", [started(2), step(1), ended(1)])
        assert [value.get("type") for _, value in waiting.result(60)] == [
            "started",
            "step",
            "finished",
            None,
        ]


def test_stream_goes_on_where_the_figures_ended(served: Served) -> None:
    run = make_run("position", [started(10), step(1)])
    with run.lock():
        position = served.json("/runs/position")["position"]
        append(run, [step(2)])
        kind, value = next(served.messages(f"/runs/position/events?after={position}"))
        assert (kind, value["step"]) == ("message", 2)
        # What this server does not know is told from the beginning.
        for unknown in ("0-7", "nonsense", "-", "0-99999999999999999999"):
            kinds = itertools.islice(
                served.messages("/runs/position/events", Last_Event_ID=unknown), 2
            )
            assert [(kind, value.get("type")) for kind, value in kinds] == [
                ("restart", None),
                ("message", "started"),
            ]


def test_fast_run_does_not_flood_a_tab(served: Served) -> None:
    run = make_run("fast", [started(9000)])
    with run.lock():
        stream = served.messages("/runs/fast/events")
        next(stream)
        append(
            run, [*(step(number) for number in range(1, 3001)), evaluation(3000, 0.5), ended(3000)]
        )
        sent = [value for kind, value in stream if kind == "message"]
    steps = [event["step"] for event in sent if event["type"] == "step"]
    assert 10 <= len(steps) <= 200
    assert steps[-1] == 3000
    assert [event["type"] for event in sent if event["type"] != "step"] == [
        "evaluation",
        "finished",
    ]


def test_run_that_is_replaced_is_told_anew(served: Served) -> None:
    run = make_run("replaced", [started(10), step(1), step(2), step(3)])
    with run.lock():
        stream = served.messages("/runs/replaced/events")
        assert len(list(itertools.islice(stream, 4))) == 4
        run.events.unlink()
        append(run, [started(77), step(1), ended(1)])
        told = [(kind, value.get("steps")) for kind, value in stream]
        assert told == [
            ("restart", None),
            ("message", 77),
            ("message", None),
            ("message", None),
            ("end", None),
        ]
        assert served.json("/runs/replaced")["steps"] == 77


def test_run_that_is_deleted_ends_its_stream_and_leaves_the_list(served: Served) -> None:
    run = make_run("deleted", [started(10), step(1)])
    with run.lock():
        stream = served.messages("/runs/deleted/events")
        assert len(list(itertools.islice(stream, 2))) == 2
        shutil.rmtree(run.path, ignore_errors=True)
        assert list(stream)[-1][0] == "gone"
    assert served.ask("/runs/deleted").status == 404
    while "deleted" in [row["name"] for row in served.json("/runs")]:  # read once a second
        time.sleep(0.2)


def test_clock_that_jumps_breaks_nothing(served: Served) -> None:
    events = [
        started(9),
        *(step(n, time=BEGAN + (n if n % 2 else -1e6 * n)) for n in range(1, 9)),
        step(9, time=None),
    ]
    make_run("clock", events)
    run = served.json("/runs/clock")
    assert run["step"] == 9
    assert run["elapsed"] >= 0


def test_lines_of_another_shape_break_nothing(served: Served) -> None:
    odd = [{"type": "step", "step": "one"}, {"type": "looked", "step": 1, "answers": [7, {"top": 3}, {"top": [{}, 1]}]},
           {"type": "evaluation", "step": 2, "evaluation": 5, "best": True}, {"type": "sensors", "core_use": "all"},
           {"type": "memory", "step": 3}, {"type": "of tomorrow"}]  # fmt: skip
    run = make_run("odd", [started(9, machine=None, config=3, notes="none"), step(1), *odd])
    with open(run.events, "ab") as file:
        file.write(b'\xff\xfe damaged\n[1, 2]\n"text"\n{"type": 5}\n')
    append(run, [step(2), ended(2, "failed", error="No space left on device")])
    found = served.json("/runs/odd")
    assert (found["state"], found["step"], found["ending"]["error"]) == (
        "failed",
        2,
        "No space left on device",
    )
    assert found["looked"][0]["answers"][0]["top"] == []


def test_many_tabs_are_served_by_one_reading_in_little_memory(here: Path) -> None:
    run = make_run(
        "long",
        [started(9000), *(step(number) for number in range(1, 5001)), *learning_run(60)[-1:]],
    )
    with run.lock(), server() as served, ThreadPoolExecutor(20) as pool:
        position = served.json("/runs/long")["position"]
        streams = [served.messages(f"/runs/long/events?after={position}") for _ in range(20)]
        firsts = [pool.submit(next, stream) for stream in streams]
        append(run, [step(5001)])
        assert [first.result(60)[1]["step"] for first in firsts] == [5001] * 20
        for _ in range(20):
            served.json("/runs/long")
        resident = psutil.Process(served.process.pid).memory_info().rss
    assert resident < 60e6, f"{resident / 1e6:.0f} MB"


def test_the_longer_reading_takes_the_rarer_it_is(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Feed(make_run("mine", [started(10), step(1)]))
    read = Feed._read
    monkeypatch.setattr(Feed, "_read", lambda self: (time.sleep(0.02), read(self))[1])
    asyncio.run(found.refresh())
    assert 0.02 / 0.005 - 0.5 < found.pause <= 10.0  # a two-hundredth of a core


def test_watching_does_not_load_torch_or_plotly() -> None:
    program = (
        "import sys; import lapclip.watch.web\n"
        "print([name for name in ('torch', 'plotly', 'numpy', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_images_are_sent_as_images(served: Served) -> None:
    run = make_run("pictured", [*learning_run(20), ended(20)])
    answer = served.ask("/runs/pictured/pictures/17.png")
    assert (answer.status, answer.headers["content-type"]) == (200, "image/png")
    assert answer.read() == (run.path / "pictures" / "17.png").read_bytes()


def test_port_in_use_is_said_in_a_line_or_passed_over(here: Path) -> None:
    with server(port=None) as first, server(port=None) as second:
        assert second.port > first.port
        assert first.json("/runs") == []
        with pytest.raises(
            LapclipError, match=rf"Port {first.port} is in use.\nTry: .* --port {first.port + 1}"
        ):
            serve([], "127.0.0.1", first.port)
    with pytest.raises(LapclipError, match="Cannot listen at nowhere"):
        serve([], "nowhere.invalid", 0)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one process")
def test_ends_by_ctrl_c_with_tabs_open_and_says_nothing_more(here: Path) -> None:
    run = make_run("mine", [started(10), step(1)])
    with run.lock():
        served = start_server("mine", "later")
        try:
            stream = served.messages("/runs/mine/events")
            assert len(list(itertools.islice(stream, 2))) == 2
            served.process.send_signal(signal.SIGINT)
            rest, _ = served.process.communicate(timeout=60)
        finally:
            served.process.kill()
        assert served.process.returncode == 0
        assert rest == ""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one process")
def test_json_is_one_line_with_the_address_and_its_token(here: Path) -> None:
    arguments = command("watch", "--web", "--port", "0", "--json")
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        said = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", said["url"])
    assert said["url"] in errors


def test_a_port_that_cannot_be_is_refused(here: Path) -> None:
    done = lapclip("watch", "--web", "--port", "99999")
    assert done.returncode == 2
    assert "--port must be 0 to 65535, not 99999." in done.stderr
