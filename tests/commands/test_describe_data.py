"""`lapclip data describe`: the contact sheet as an image and as a page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lapclip.commands.data import describe_data, make_sheet
from lapclip.errors import ConfigError, DataError
from lapclip.report import contact_sheet
from lapclip.report.contact_sheet import Shown, to_image, to_page
from tests.browsing import needs_browser
from tests.data.check.made import encoded, odd_folder, odd_images, scene, write_csv


def test_a_sheet_shows_the_same_images_each_time_and_passes_over_broken_ones(tmp_path: Path) -> None:
    folder = str(odd_folder(tmp_path))
    sheet = make_sheet(folder, 100, [])
    assert {shown.name for shown in sheet.shown} == set(odd_images()) - {"early.jpg", "words.jpg"}
    few = [[shown.name for shown in make_sheet(folder, 5, []).shown] for _ in range(2)]
    assert few[0] == few[1] == [shown.name for shown in sheet.shown[:5]]
    image = to_image(sheet)
    assert image.width > image.height / 2
    assert len(set(image.resize((64, 64)).tobytes())) > 50


def test_captions_on_the_page_are_text_and_the_page_asks_no_network(tmp_path: Path) -> None:
    folder = write_csv(tmp_path, {"a.jpg": encoded(scene(1))}, [("a.jpg", "x", "train")])
    sheet = make_sheet(str(folder), 3, [])
    hostile = replace(sheet.shown[0], name="<b>", captions=['<script>alert(1)</script> & \ud800 "so"'])
    page = to_page(replace(sheet, shown=[hostile]))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; ? &quot;so&quot;" in page
    assert "http" not in page.replace("http-equiv", "")
    page.encode("utf-8")


@needs_browser
def test_the_page_finds_images_by_a_word_and_lays_them_out(browser: Any, tmp_path: Path) -> None:
    folder = write_csv(
        tmp_path,
        {name: encoded(scene(at)) for at, name in enumerate(("a.jpg", "b.jpg", "c.jpg"))},
        [("a.jpg", "a red cat", "train"), ("b.jpg", "a blue dog", "train"), ("c.jpg", "a red dog", "val")],
    )
    (tmp_path / "sheet.html").write_text(to_page(make_sheet(str(folder), 3, [])), encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "sheet.html").as_uri())
    assert page.locator("#count").inner_text() == "3 shown"
    assert page.locator(".images").evaluate("box => getComputedStyle(box).display") == "grid"
    page.fill("#wanted", "red")
    assert page.locator("#count").inner_text() == "2 shown"
    page.select_option("#split", "val")
    assert page.locator("#count").inner_text() == "1 shown"
    page.close()


def test_a_sheet_is_written_where_it_was_asked_for(here: Path) -> None:
    folder = str(odd_folder(here))
    assert describe_data(folder, Path("one/sheet.png"), 4, [])["files"] == [str(Path("one/sheet.png"))]
    assert [Path(file).name for file in describe_data(folder, None, 4, [])["files"]] == [
        "contact-sheet.png",
        "contact-sheet.html",
    ]
    with pytest.raises(ConfigError, match="at least 1"):
        describe_data(folder, None, 0, [])


def test_data_without_a_readable_image_makes_no_sheet(tmp_path: Path) -> None:
    folder = write_csv(tmp_path, {"a.jpg": b"no"}, [("a.jpg", "x", "train")])
    with pytest.raises(DataError, match="No image"):
        make_sheet(str(folder), 3, [])


def test_long_captions_without_spaces_are_cut_before_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    width = contact_sheet._width
    monkeypatch.setattr(contact_sheet, "_width", lambda text, size: measured.append(len(text)) or width(text, size))
    lines = contact_sheet._lines(Shown("name" * 50_000, "train", ["\u4e00" * 20_000] * 500, scene(0)))
    assert len(lines) == contact_sheet.LINES
    assert lines[-1].endswith("...")
    assert sum(measured) < 300_000
    short = contact_sheet._lines(Shown("name", "train", ["a dog in the snow"], scene(0)))
    assert short == ["train  name", "\N{MIDDLE DOT} a dog in the snow"]
