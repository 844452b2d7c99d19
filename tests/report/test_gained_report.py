"""What was gained and forgotten, as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lapclip.report import report_files, to_markdown
from lapclip.report.document import to_html
from lapclip.report.gained_report import gained_report, gained_sections, sections
from lapclip.user_files import write_user_files

from ..browsing import needs_browser
from .pages import Page
from .test_run_report import HOSTILE

ALPHAS = [number / 10 for number in range(11)]


def curve(first: float, last: float) -> list[dict[str, Any]]:
    points = []
    for alpha in ALPHAS:
        value = first + alpha * (last - first)
        between = [value - 0.01, value + 0.03]
        change = {
            "change": value - first,
            "change_interval": [value - first - 0.01, value - first + 0.01],
        }
        points.append({"alpha": alpha, "value": value, "interval": between, **change})
    return points


def gained(name: str = "photos") -> dict[str, Any]:
    recalls = {f"{way}_r{place}": place / 20 for way in ("t2i", "i2t") for place in (1, 5, 10)}
    scores = {
        **recalls,
        "intervals": {key: [value - 0.01, value + 0.01] for key, value in recalls.items()},
    }
    new = {
        "before": scores,
        "after": scores,
        "recommended": scores,
        "curve": curve(0.12, 0.3),
        "figure": "mean recall",
    }
    shared = {"chance": 0.1, "pictures": 240, "figure": "zero-shot top-1"}
    return {
        "run": "runs/mine", "alpha": 0.6, "why": "the best", "summary": f"Fine-tuning gained on {name}.",
        "alphas": ALPHAS, "notes": [name], "model": None, "model_alpha": None,
        "new": {"name": name, "chance": 0.01, "pictures": 1000, **new},
        "checks": [
            {"name": f"clothes {name}", "curve": curve(0.31, 0.25), "decides": True, **shared},
            {"name": "scenes", "curve": curve(0.03, 0.02), "decides": False, **shared},
        ],
    }  # fmt: skip


def test_the_page_opens_with_the_sentence_and_has_curve_and_tables(tmp_path: Path) -> None:
    page = Page(write_user_files(report_files(gained_report(gained()), tmp_path, "gained"))[0])
    assert page.titles() == ["Between start and end"]
    (figure,) = page.charts.values()
    assert [trace["x"] for trace in figure["data"]] == [ALPHAS] * 3
    for trace in figure["data"]:
        assert trace["error_y"]["array"] == pytest.approx([0.03] * 11)  # upwards
        assert trace["error_y"]["arrayminus"] == pytest.approx([0.01] * 11)
    assert figure["layout"]["shapes"][0]["x0"] == 0.6
    assert page.text.index("Fine-tuning gained on photos.") < page.text.index("recommended alpha")
    assert "-3.6 (-4.6 to -2.6)" in page.text  # clothes at alpha 0.6
    assert "50.0% (49.0% to 51.0%)" in page.text
    text = to_markdown(gained_report(gained()))
    assert "| scenes, zero-shot top-1 |" in text
    assert "| no |" in text
    written = gained() | {"model": "runs/mine/blended", "model_alpha": 0.5}
    assert "The model at alpha 0.5 is in runs/mine/blended." in to_markdown(gained_report(written))


def test_what_is_missing_or_odd_is_left_out(tmp_path: Path) -> None:
    whole = gained()
    for name in whole:
        for odd in (None, 3, "x", [], {}, [None], {"curve": [{"alpha": "x"}]}, {"curve": 3}):
            to_html(gained_report({**whole, name: odd}))
            to_markdown(gained_report({**whole, name: odd}))
    assert len(sections({})) == 1
    assert gained_sections(tmp_path) == []
    (tmp_path / "gained.json").write_text("[", encoding="utf-8")
    assert gained_sections(tmp_path) == []
    (tmp_path / "gained.json").write_text(json.dumps(whole), encoding="utf-8")
    assert len(gained_sections(tmp_path)) == 1


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_is_drawn_and_fits(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    path = write_user_files(report_files(gained_report(gained(HOSTILE)), tmp_path, "gained"))[0]
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    told: list[str] = []
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.goto(path.absolute().as_uri())
    plot = page.locator(".plot")
    plot.locator(".xaxislayer-above").first.wait_for(state="attached", timeout=60_000)
    assert page.locator(".scatterlayer path.js-line").count() == 3
    assert page.locator("path.yerror").count() == 3 * len(ALPHAS)
    assert told == []
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.close()
