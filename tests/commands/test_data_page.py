"""The page of `lapclip data check --page`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lapclip.commands.data import settings_for
from lapclip.commands.data_page import write_page
from lapclip.data.check_data import CheckedData, find_all, inspect_images
from lapclip.data.loading import Listing
from lapclip.data.sources import read_table
from lapclip.data.tokenizers import clip_tokenizer
from lapclip.errors import ConfigError
from tests.browsing import needs_browser
from tests.data.check.made import odd_folder
from tests.report.pages import Page

HOSTILE = "<script>document.title = 'hacked'</script>"


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> CheckedData:
    folder = odd_folder(tmp_path_factory.mktemp("odd"))
    with open(folder / "captions.csv", "a", encoding="utf-8") as table:
        table.writelines(f"plain{number}.jpg,{HOSTILE},train\n" for number in range(6))
    config, _ = settings_for(str(folder), "photos", [])
    table = read_table(config.data)
    splits = Listing(config.data, table).splits
    facts = inspect_images([row.image for row in table.rows])
    return CheckedData(table, splits, facts, clip_tokenizer(), config)


def test_the_page_shows_random_pairs_and_each_finding(checked: CheckedData, tmp_path: Path) -> None:
    findings = find_all(checked, {"unrelated": True, "images": 9, "by": ["a", "b"]})
    path = tmp_path / "pages" / "pairs.html"
    write_page(path, "photos", checked, findings)
    page = Page(path)
    assert f"{len(checked.usable)} of {len(checked.usable)} images" in page.text
    for finding in findings:
        assert f"{finding.count:,} {finding.heading}" in page.text
        assert finding.examples[0].text[:60] in page.text
    assert "plain0.jpg (train) = again.jpg (val)" in page.text
    assert "captions have no more to do with their images" in page.text
    assert page.count("img") >= len(checked.usable) + 2 * 2  # two groups of two copies
    assert all(address.startswith("data:image/jpeg;base64,") for address in page.addresses)
    assert HOSTILE not in path.read_text(encoding="utf-8")


def test_only_an_older_page_is_replaced(checked: CheckedData, tmp_path: Path) -> None:
    path = tmp_path / "pairs.html"
    for _ in range(2):
        write_page(path, "photos", checked, [])
    path.write_text("my own page")
    with pytest.raises(ConfigError, match="was not written by lapclip"):
        write_page(path, "photos", checked, [])
    assert path.read_text() == "my own page"


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_page(
    browser: Any, checked: CheckedData, tmp_path: Path, width: int
) -> None:
    path = tmp_path / "pairs.html"
    write_page(path, "photos", checked, find_all(checked))
    wrong: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(path.as_uri())
    images = page.locator("img")
    assert images.count() >= len(checked.usable)
    assert images.evaluate_all("all => all.every(image => image.naturalWidth > 1)")
    assert page.title() == "Check of photos"
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.close()
    assert wrong == []
