"""Reports of runs, read back as a browser and a person would."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lapclip import text as words
from lapclip.errors import ConfigError, RunError
from lapclip.report import write_report
from lapclip.report.document import Cell, Headline, Plot, Report, Section, Sentences, Table, to_html
from lapclip.runs.events import read_events
from lapclip.runs.folder import Run

from ..conftest import lapclip
from .conftest import Events
from .pages import Page

HOSTILE = (
    "</script><script>hacked=1</script><img src=x onerror=hacked=1> | [a](https://example.com) `b`"
)
Make = Callable[..., Path]


def page_of(name: str | None = None) -> Page:
    files, warnings = write_report(name, None)
    assert warnings == []
    return Page(files[0])


def test_the_command_writes_both_files_and_prints_their_paths(run_with: Make) -> None:
    run_with()
    done = lapclip("report")
    assert done.returncode == 0, done.stderr
    names = [str(Path("runs", "mine", name)) for name in ("report.html", "report.md")]
    assert done.stdout.splitlines()[:2] == names
    assert done.stdout.splitlines()[-1].startswith("Next: ")
    assert json.loads(lapclip("report", "mine", "--json").stdout) == {"files": names}
    elsewhere = json.loads(lapclip("report", "--json", "--out", "a/b").stdout)["files"]
    assert elsewhere == [str(Path("a", "b", name)) for name in ("report.html", "report.md")]
    assert all(Path(name).stat().st_size for name in [*names, *elsewhere])


def test_a_page_holds_everything_and_asks_no_network(run_with: Make) -> None:
    run_with()
    page = page_of()
    assert page.addresses == []
    policies = [
        named["content"]
        for _, named in page.elements
        if named.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(policies) == 1
    assert str(policies[0]).startswith("default-src 'none'")
    assert page.titles() == [
        "Loss", "Accuracy and recall", "Temperature", "Gradient norms", "Speed", "Where the time of a step goes",
        "Memory",
    ]  # fmt: skip
    assert page.count("figcaption") == page.count("figure") == 8  # and its pictures
    # Each plot has its figures as a table beside it, and each choice its reason.
    assert page.text.count("As a table") == 7
    assert "train.linear" in page.text


def test_pictures_of_a_run_are_shown_without_an_evaluation(run_with: Make, trained: Path) -> None:
    folder = run_with()
    shutil.copytree(trained / "pictures", folder / "pictures")
    page = page_of()
    images = [named for tag, named in page.elements if tag == "img"]
    assert len(images) >= 4
    assert all(str(image["src"]).startswith("data:image/png;base64,") for image in images)
    probed = [event for event in read_events(folder / "events.jsonl") if event["type"] == "looked"]
    for answer in probed[-1]["answers"][:4]:
        assert answer["caption"] in page.text


def test_plots_hold_the_run_s_own_figures(run_with: Make) -> None:
    events: Events = []
    run_with(lambda found: events.extend(found) or found)
    page = page_of()
    steps = [event for event in events if event["type"] == "step"]
    raw, mean = page.charts["plot-1"]["data"]
    assert raw["x"] == mean["x"] == list(range(1, 13))
    assert raw["y"] == [event["loss"] for event in steps]
    norms = page.charts["plot-4"]["data"][0]
    assert norms["y"][0] == "image embedding"
    first = steps[0]["grad_norms"]["image.embedding"]
    assert norms["z"][0][0] == pytest.approx(math.log10(first))
    phases = {trace["name"]: trace["x"][0] for trace in page.charts["plot-6"]["data"]}
    measured = sorted(step["seconds"]["forward"] for step in steps[1:10])
    assert phases["forward"] == pytest.approx(1000 * measured[4])


def test_markdown_has_the_same_figures(run_with: Make) -> None:
    events: Events = []
    folder = run_with(lambda found: events.extend(found) or found)
    write_report("mine", None)
    text = (folder / "report.md").read_text(encoding="utf-8")
    finished = events[-1]
    scores = finished["evaluation"]
    low, high = scores["intervals"]["t2i_r1"]
    kept = f"model of step {finished['best_step']}"
    assert (
        f"| {scores['t2i_r1']:.1%} | {kept}; {low:.1%} to {high:.1%}; chance {scores['chance']:.1%} |"
        in text
    )
    assert f"{finished['pairs_per_second']:,.0f} pairs/s" in text
    assert f"| peak memory | {words.size(finished['peak_memory_bytes'])} |" in text
    for name, reason in events[0]["reasons"].items():
        assert f"| {name} | " in text
        assert reason in text
    for heading in ("# Run mine", "## Learning", "### Gradient norms", "## Machine and versions"):
        assert f"\n{heading}\n" in f"\n{text}"
    assert "finished, step 12 of 12" in text
    # Every row of a table has as many cells as its head.
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    for lines in blocks:
        assert len({line.count(" | ") for line in [lines[0], *lines[2:]]}) == 1, lines[0]


@pytest.mark.parametrize("kept", [0, 1, 2, 5])
def test_an_unfinished_run_is_reported_as_far_as_it_is(run_with: Make, kept: int) -> None:
    folder = run_with(lambda events: events[:kept])
    page = page_of()
    assert "died" in page.text
    steps = sum(
        '"type": "step"' in line for line in (folder / "events.jsonl").read_text().splitlines()
    )
    assert ("No step has been recorded yet" in page.text) == (steps == 0)
    assert ("Loss" in page.titles()) == (steps > 0)


def test_a_running_run_says_so_and_how_long_it_takes(run_with: Make) -> None:
    folder = run_with(lambda events: [event for event in events if event["type"] != "finished"][:9])
    with Run(folder).lock():
        done = lapclip("report", "--json")
    page = Page(Path(json.loads(done.stdout)["files"][0]))
    assert "running, step" in page.text
    assert re.search(r"about .* s left", page.text)
    assert "ended without a word" not in page.text


def test_a_run_without_evaluations_leaves_scores_out(run_with: Make) -> None:
    run_with(
        lambda events: [
            event for event in events if event["type"] not in ("evaluation", "finished")
        ]
    )
    page = page_of()
    assert "Held-out scores" not in page.text
    names = [trace["name"] for trace in page.charts["plot-2"]["data"]]
    assert names == ["each batch", "training batches", "chance, batches"]


def test_float16_overflow_is_counted_and_leaves_no_hole(run_with: Make) -> None:
    def overflow(events: Events) -> Events:
        return [
            {**e, "grad_norm": None, "grad_norms": {}}
            if e.get("step") == 3 and e["type"] == "step"
            else e
            for e in events
        ]

    run_with(overflow)
    page = page_of()
    assert "Updates that overflowed in float16 and were left out: 1." in page.text
    assert 3 not in page.charts["plot-4"]["data"][0]["x"]


def test_steps_repeated_after_a_crash_count_once(run_with: Make) -> None:
    def crash(events: Events) -> Events:
        at = next(i for i, e in enumerate(events) if e["type"] == "step" and e["step"] == 8)
        lost = [
            {**e, "loss": 99.0} if e["type"] == "step" and e["step"] > 4 else e
            for e in events[: at + 1]
        ]
        resumed = {
            "v": 1,
            "type": "resumed",
            "time": events[at]["time"] + 3600,
            "step": 4,
            "steps": 12,
            "skipped": [],
        }
        again = next(i for i, e in enumerate(events) if e["type"] == "step" and e["step"] == 5)
        later = [{**e, "time": e["time"] + 3600} for e in events[again:]]
        return [*lost, resumed, *later]

    run_with(crash)
    page = page_of()
    loss = page.charts["plot-1"]
    assert loss["data"][0]["x"] == list(range(1, 13))
    assert 99.0 not in loss["data"][0]["y"]
    assert [mark["x0"] for mark in loss["layout"]["shapes"]] == [4]
    assert "Resumed after step 4" in page.text


def test_what_is_not_a_number_is_left_out(run_with: Make) -> None:
    run_with(
        lambda events: [
            {**e, "loss": math.nan} if e.get("step") == 2 and "loss" in e else e for e in events
        ]
    )
    assert 2 not in page_of().charts["plot-1"]["data"][0]["x"]


def sensed(joules: Any, reason: str | None) -> Callable[[Events], Events]:
    """The run with a look at the sensors after each step."""

    def change(events: Events) -> Events:
        found: Events = []
        for event in events:
            found.append(event)
            if event["type"] == "step":
                at = event["step"]
                counted = None if joules is None else {"cpu": joules * at}
                figures = {
                    "celsius": 50.0 + at,
                    "megahertz": 3000.0,
                    "core_use": [1.0, 0.1],
                    "swap_bytes": 10**9,
                }
                more = {
                    "type": "sensors",
                    "step": at,
                    "time": event["time"] + 0.001,
                    "joules": counted,
                    "throttled": at > 6,
                }
                found.append({**more, **figures, "reason": reason})
        return found

    return change


def test_sensors_become_plots_and_accuracy_per_watt_hour(run_with: Make) -> None:
    run_with(sensed(300.0, None))
    page = page_of()
    assert page.titles()[7:] == ["Power", "Heat of the processor"]
    assert "Energy: 3,600 J, which is 1 Wh" in page.text
    assert "points of held-out text-to-image R@1 per Wh" in page.text
    assert "slowed itself down in 50% of the readings" in page.text


def test_energy_that_cannot_be_measured_says_why(run_with: Make) -> None:
    run_with(sensed(None, "not measurable here: may be read by root only"))
    page = page_of()
    assert "Energy: not measurable here: may be read by root only." in page.text
    assert "Power" not in page.titles()
    assert "Heat of the processor" in page.titles()


def ranked(hosts: list[str]) -> Callable[[Events], Events]:
    """The run as several machines would have trained it."""

    def change(events: Events) -> Events:
        told = [event["step"] for event in events if event["type"] == "step"]
        ranks = {
            "type": "ranks",
            "hosts": hosts,
            "rows": [96, 32],
            "waited": [0.4, 0.03],
            "writer": 0,
            "advice": "laptop is slowest",
            "time": events[-1]["time"],
        }
        return [*events[:-1], *({**ranks, "step": at} for at in told), events[-1]]

    return change


def test_machines_that_trained_together_have_a_section(run_with: Make) -> None:
    folder = run_with(ranked(["desktop", HOSTILE]))
    page = page_of()
    assert "desktop waits for </script>" in page.text
    assert "laptop is slowest." in page.text
    assert page.count("img") == 0
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "| desktop (has the run) | 96 | 75% | 40% |" in text


def test_a_fallback_is_a_marked_line_and_a_sentence(run_with: Make) -> None:
    fell = {
        "type": "fell_back", "step": 6, "cause": "device error", "change": {"device": "cpu"},
        "devices": {"image": "elsewhere", "text": "elsewhere"}, "text": "The GPU failed; going on on the CPU.",
    }  # fmt: skip

    def change(events: Events) -> Events:
        at = next(i for i, e in enumerate(events) if e["type"] == "step" and e["step"] == 7)
        return [*events[:at], {**fell, "time": events[at]["time"]}, *events[at:]]

    run_with(change)
    page = page_of()
    assert "Change 1, after step 6: The GPU failed; going on on the CPU." in page.text
    assert [mark["x0"] for mark in page.charts["plot-1"]["layout"]["shapes"]] == [6]
    assert "then elsewhere, from step 7 on" in page.text


def test_hostile_words_stay_text(run_with: Make, here: Path) -> None:
    def poison(events: Events) -> Events:
        events[0]["notes"] = [HOSTILE]
        events[0]["reasons"]["train.device"] = HOSTILE
        events[0]["machine"]["chip"] = HOSTILE
        for event in events:
            if event["type"] == "step":
                event["grad_norms"][HOSTILE] = 1.0
        return events

    name = "mine" if sys.platform == "win32" else "<img src=x onerror=hacked=1>"
    folder = run_with(poison, name)
    page = page_of(name)
    assert page.count("img") == page.count("a") == 0
    assert page.count("script") == 3
    assert page.addresses == []
    assert page.text.count(" ".join(HOSTILE.split())) >= 4
    assert f"Run {name}" in page.text
    # plotly.js reads simple markup, so what it is given holds none.
    assert "<" not in json.dumps([trace["y"] for trace in page.charts["plot-4"]["data"]])
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "<img" not in text.replace("\\<img", "")
    assert "[a](" not in text


def test_no_text_inside_a_figure_can_end_its_script(tmp_path: Path) -> None:
    traces = [{"type": "scatter", "name": HOSTILE, "x": [1], "y": [2]}]
    plot = Plot(
        HOSTILE,
        traces,
        {},
        HOSTILE,
        Table([HOSTILE], [[HOSTILE], [Cell(HOSTILE, 1)]], folded=HOSTILE),
    )
    report = Report(
        HOSTILE,
        HOSTILE,
        [Headline(HOSTILE, HOSTILE, HOSTILE)],
        [Section(HOSTILE, [plot, Sentences([HOSTILE])])],
    )
    path = tmp_path / "page.html"
    path.write_text(to_html(report), encoding="utf-8")
    page = Page(path)
    assert page.charts["plot-1"]["data"] == traces
    assert page.count("script") == 3
    assert page.count("img") == 0


def test_a_folder_that_is_no_run_is_refused(here: Path, empty_cache: Path) -> None:
    (here / "runs" / "odd").mkdir(parents=True)
    with pytest.raises(RunError, match="is not a run"):
        write_report("odd", None)
    with pytest.raises(RunError, match="no saved comparison") as refused:
        write_report(None, None)
    assert refused.value.hint == "lapclip train"


def test_a_place_that_cannot_be_written_is_named(run_with: Make, here: Path) -> None:
    run_with()
    (here / "file").write_text("")
    with pytest.raises(ConfigError, match="Cannot write"):
        write_report("mine", here / "file")


def test_reporting_loads_neither_torch_nor_plotly(run_with: Make) -> None:
    run_with()
    program = (
        "import sys\nfrom lapclip.cli import main\n"
        "try:\n    main(['report'])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'torch', 'numpy', 'plotly'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_long_run_makes_no_longer_page(run_with: Make) -> None:
    def stretch(events: Events) -> Events:
        step = next(event for event in events if event["type"] == "step")
        return [
            events[0],
            *({**step, "step": at, "time": step["time"] + at} for at in range(1, 20_001)),
        ]

    run_with(stretch)
    page = page_of()
    assert len(page.charts["plot-1"]["data"][0]["x"]) <= 1502
    assert page.charts["plot-1"]["data"][0]["x"][-1] == 20_000
    assert len(page.charts["plot-4"]["data"][0]["x"]) <= 120
