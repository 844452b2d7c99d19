"""An evaluation as a page of its own and within a run's report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lapclip.data.dataset import Pairs
from lapclip.evaluation.evaluation import evaluate_classes, evaluate_pairs
from lapclip.report import report_files, to_markdown, write_report
from lapclip.report.document import to_html
from lapclip.report.evaluation_report import (
    confusion,
    evaluation_report,
    evaluation_sections,
    sections,
)
from lapclip.user_files import write_user_files

from ..browsing import needs_browser
from ..evaluation.embeddings import noisy_pairs, unit
from .pages import Page
from .test_run_report import HOSTILE

PLOT = "Hard negatives"


def evaluation(folder: Path, words: str = "a thing") -> dict[str, Any]:
    """Of 40 images with two captions each, and their thumbnails."""
    images, texts, owner = noisy_pairs(40, 0.5, 2)
    captions = [[f"{words} {at}", f"{words} number {at}"] for at in range(40)]
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    found = evaluate_pairs(images, texts, owner, Pairs(pixels, captions), 16)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for at in range(40):
        Image.fromarray(pixels[at]).save(folder / "pictures" / f"evaluation-{at}.jpg")
    return {
        "run": "runs/mine",
        "data": words,
        "split": "test",
        "why_split": "asked for",
        "notes": [words],
        **found,
    }


def classes(folder: Path, name: str = "owl") -> dict[str, Any]:
    images, rows, _ = noisy_pairs(30, 0.0)
    found = evaluate_classes(unit(images + 0.5), rows[:3], np.arange(30) % 3, [name, "cat", "dog"])
    return {
        "run": "runs/mine",
        "data": "x",
        "split": "all",
        "why_split": "y",
        "templates": ["a {}."],
        **found,
    }


def test_the_page_shows_every_plot_and_images_with_their_frames(tmp_path: Path) -> None:
    found = evaluation(tmp_path)
    page = Page(
        write_user_files(report_files(evaluation_report(found, tmp_path), tmp_path, "evaluation"))[
            0
        ]
    )
    assert page.titles()[0] == PLOT
    assert {"Most confused", "Answers to some captions"} <= {*page.headings}
    shown = sum(
        len(example["top"]) + (example["rank"] > 5) for example in found["examples"]
    ) + 2 * len(found["confused"])
    assert page.count("img") == shown
    assert all(address.startswith("data:image/jpeg;base64,") for address in page.addresses)
    frames = [
        named["class"]
        for tag, named in page.elements
        if tag == "div" and str(named.get("class")).startswith("image ")
    ]
    assert frames.count("image right") == len(found["examples"]) + len(found["confused"])
    assert f"{found['evaluation']['t2i_r1']:.1%}" in page.text


def test_whiskers_reach_from_the_lower_to_the_upper_end_of_each_interval(tmp_path: Path) -> None:
    found = evaluation(tmp_path)
    page = Page(
        write_user_files(report_files(evaluation_report(found, tmp_path), tmp_path, "evaluation"))[
            0
        ]
    )
    (chart,) = page.charts.values()
    (trace,) = [trace for trace in chart["data"] if "error_y" in trace]
    for at, kind in enumerate(("easy", "medium", "hard")):
        low, high = found["negatives"][kind]["intervals"]["accuracy"]
        value = found["negatives"][kind]["accuracy"]
        assert value + trace["error_y"]["array"][at] == pytest.approx(high)
        assert value - trace["error_y"]["arrayminus"][at] == pytest.approx(low)


def test_a_runs_report_holds_its_evaluations_the_newest_first(
    run_with: Callable[..., Path],
) -> None:
    run = run_with()
    for name, make in (("test", evaluation), ("things-all", classes)):
        folder = run / "evaluation" / name
        folder.mkdir(parents=True)
        (folder / "evaluation.json").write_text(json.dumps(make(folder)), encoding="utf-8")
    (run / "evaluation" / "torn").mkdir()
    (run / "evaluation" / "torn" / "evaluation.json").write_text(
        '{"evaluation": ', encoding="utf-8"
    )
    (html, markdown), _ = write_report("mine", None)
    titles = Page(html).titles()
    assert titles.index("Confusion matrix") < titles.index(PLOT)
    text = markdown.read_text(encoding="utf-8")
    assert "## Evaluation: a thing, split test" in text
    assert "its own image" in text


def test_words_from_outside_stay_words(tmp_path: Path) -> None:
    for found in (evaluation(tmp_path, HOSTILE), classes(tmp_path, HOSTILE)):
        report = evaluation_report(found, tmp_path)
        (tmp_path / "page.html").write_text(to_html(report), encoding="utf-8")
        page = Page(tmp_path / "page.html")
        assert page.count("script") == 3
        assert not [
            named for _, named in page.elements if any(name.startswith("on") for name in named)
        ]
        assert " ".join(HOSTILE.split()) in page.text
        assert "<script" not in to_markdown(report).replace("\\<", "")


def test_what_is_missing_or_odd_is_left_out(tmp_path: Path) -> None:
    whole = evaluation(tmp_path) | {"zeroshot": classes(tmp_path)["zeroshot"]}
    for name in (
        "evaluation",
        "negatives",
        "confused",
        "examples",
        "zeroshot",
        "notes",
    ):
        for odd in (None, 3, "x", [], {}, [None], {"easy": 3}, {"t2i_r1": "much"}):
            to_html(evaluation_report({**whole, name: odd}, tmp_path))
            to_markdown(evaluation_report({**whole, name: odd}, tmp_path))
    assert len(sections({}, tmp_path)) == 1
    assert evaluation_sections(tmp_path / "nowhere") == []


def test_images_of_training_are_told_at_the_top(tmp_path: Path) -> None:
    found = evaluation(tmp_path)
    assert "no test of the model" not in to_markdown(
        evaluation_report({**found, "trained_on": 0}, tmp_path)
    )
    assert "no test of the model" in to_markdown(
        evaluation_report({**found, "trained_on": 12}, tmp_path)
    )


def test_of_many_classes_the_matrix_shows_those_in_the_most_mistakes() -> None:
    names = [f"class {at}" for at in range(200)]
    labels = np.repeat(np.arange(200), 4)
    rows = np.eye(200)[np.where(labels < 70, (labels + 1) % 70, labels)]
    rows[0] = np.eye(200)[150]  # one more mistake, of classes 0 and 150
    classes = evaluate_classes(rows, np.eye(200), labels, names)["zeroshot"]
    plot = confusion(classes)
    assert plot is not None
    shown = plot.traces[0]["x"]
    assert len(shown) == len(plot.traces[0]["z"]) == len(plot.traces[0]["z"][0]) == 60
    assert "class 150" not in shown
    assert "class 100" not in shown
    assert shown == [name for name in names if name in shown]
    at = shown.index("class 3")
    assert plot.traces[0]["z"][at][shown.index("class 4")] == 1.0
    assert "Of 200 classes, the 60" in plot.explanation
    assert len(json.dumps(classes["confusion"])) < 4000


def test_a_thumbnail_that_is_gone_leaves_its_words(tmp_path: Path) -> None:
    found = evaluation(tmp_path / "kept")
    shutil.rmtree(tmp_path / "kept")
    text = to_html(evaluation_report(found, tmp_path / "kept"))
    assert "<img" not in text
    assert "no image" in text


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_the_page_is_drawn_and_fits(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    found = evaluation(tmp_path, HOSTILE) | {"zeroshot": classes(tmp_path, HOSTILE)["zeroshot"]}
    path = write_user_files(
        report_files(evaluation_report(found, tmp_path), tmp_path, "evaluation")
    )[0]
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    told: list[str] = []
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.goto(path.absolute().as_uri())
    plots = page.locator(".plot")
    plots.last.locator(".xaxislayer-above").first.wait_for(state="attached", timeout=60_000)
    drawn = plots.evaluate_all(
        "plots => plots.map(plot => plot.querySelectorAll('.bars path, image').length)"
    )
    assert len(drawn) == 3
    assert all(drawn), drawn
    assert told == []
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
    page.close()
