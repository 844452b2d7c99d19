"""Metrics, the page and the description of the requests."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from ..browsing import needs_browser
from .conftest import Serving, jpeg


def test_metrics_count_requests_items_and_refusals(served: Serving) -> None:
    image = base64.b64encode(jpeg(5)).decode()
    served.post("/embed", {"items": [{"text": "a purple elephant"}, {"image": image}]})
    served.post("/embed", {"items": [{"image": "bm90IGFuIGltYWdl"}]})
    text = served.get("/metrics").body.decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['lapclip_requests_total{path="/embed",status="200"}']) >= 1
    assert float(lines['lapclip_requests_total{path="/embed",status="400"}']) >= 1
    assert float(lines['lapclip_refusals_total{reason="invalid_input"}']) >= 1
    assert float(lines['lapclip_items_total{tower="image"}']) >= 1
    assert float(lines['lapclip_seconds_count{phase="queue"}']) >= 2
    assert served.encoder.fingerprint() in text
    assert "elephant" not in text


def test_repeated_items_come_from_the_cache(served: Serving) -> None:
    asked = {"items": [{"text": "an otter that is asked for twice"}]}
    first, cache = served.post("/embed", asked).json, served.service.model.cache
    hits = cache.hits
    assert served.post("/embed", asked).json == first
    assert cache.hits == hits + 1
    assert all(
        vector.base is None for vector in cache._vectors.values()
    )  # a row would hold its whole batch


def test_the_description_knows_the_requests(served: Serving) -> None:
    described = served.get("/openapi.json").json
    assert "/embed" in described["paths"]
    assert "422" not in described["paths"]["/embed"]["post"]["responses"]


@needs_browser
def test_the_page_shows_the_model_and_compares_captions(
    served: Serving, browser: Any, tmp_path: Path
) -> None:
    (tmp_path / "image.jpg").write_bytes(jpeg(7))
    page, faults = browser.new_page(), list[str]()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "console", lambda message: faults.append(message.text) if message.type == "error" else None
    )
    page.goto(served.url)
    # Not by a function in the page: that is compiled there, which the page's own policy forbids.
    page.locator("#standing", has_text=re.compile("^serving$")).wait_for()
    assert page.text_content("#name") == "mine"
    assert served.encoder.fingerprint() in page.text_content("#about")
    page.set_input_files("#file", str(tmp_path / "image.jpg"))
    page.fill("#captions", "a red cat\n<b>two snails</b>")
    page.click("button[type=submit]")
    page.wait_for_selector("#results li")
    shown = page.locator("#results li span:first-child").all_text_contents()
    assert sorted(shown) == ["<b>two snails</b>", "a red cat"]
    assert faults == []
    page.close()
