"""The page in a real browser: charts are drawn, nothing is fetched, nothing hostile runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lapclip.paths import cache_folder
from lapclip.report import write_report
from lapclip.report.comparison_report import COMPARISON

from ..browsing import needs_browser
from .conftest import Events
from .test_comparison_report import comparison
from .test_run_report import HOSTILE, sensed

pytestmark = needs_browser


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_charts_are_drawn_without_errors_or_requests(
    browser: Any, run_with: Callable[..., Path], width: int, scheme: str
) -> None:
    def poison(events: Events) -> Events:
        events[0]["notes"] = [HOSTILE]
        for event in events:
            if event["type"] == "step":
                event["grad_norms"][HOSTILE] = 1.0
        return sensed(300.0, None)(events)

    run_with(poison)
    (cache_folder() / COMPARISON).write_text(json.dumps(comparison()), encoding="utf-8")
    (path, _), _ = write_report(None, None)
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    told: list[str] = []
    page.on("console", lambda message: told.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: told.append(f"error: {error}"))
    page.on(
        "request",
        lambda request: (
            told.append(request.url) if request.url != path.absolute().as_uri() else None
        ),
    )
    page.goto(path.absolute().as_uri())
    plots = page.locator(".plot")
    assert plots.count() == 11
    plots.last.locator(".xaxislayer-above").first.wait_for(state="attached", timeout=60_000)
    # Every chart holds what it is made of: curves, bars or the image of a heat map.
    shapes = "path.js-line, .bars path, image, path.point"
    drawn = plots.evaluate_all(
        f"plots => plots.map(plot => plot.querySelectorAll('{shapes}').length)"
    )
    assert all(drawn), drawn
    assert told == []
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.locator("svg a").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == width
    colours = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == colours[scheme]
    assert (
        page.evaluate("document.querySelector('.plot .main-svg').style.background")
        == colours[scheme]
    )
    page.close()
