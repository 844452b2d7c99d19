"""The page of images in a real browser, served by the real command."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lapclip.searching.library import open_library

from ..browsing import Look, needs_browser
from .album import COPIES, ODD, Album, album, scene

pytestmark = needs_browser


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Iterator[Album]:
    place = tmp_path_factory.mktemp("shown")
    with album(place / "pictures", place / "data", trained, COPIES) as found:
        yield found


Open = Callable[..., Look]


@pytest.fixture
def look(browser: Any, shown: Album) -> Iterator[Open]:
    """Opens the page and waits for its first tiles; at the end nothing may have gone wrong in it."""
    opened: list[Look] = []

    def open_page(
        asked: str = "", *, width: int = 1280, scheme: str = "light", **options: Any
    ) -> Look:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **options
        )
        tab = Look(context)
        opened.append(tab)
        tab.page.goto(f"{shown.served.address}{asked}")
        tab.until("document.getElementById('standing').textContent !== ''")
        return tab

    yield open_page
    for each in opened:
        assert each.wrong == []
        each.context.close()


def tiles(tab: Look) -> list[str]:
    """The names of the first tiles."""
    return tab.page.evaluate(
        "[...document.querySelectorAll('#grid img')].slice(0, 6).map(image => image.alt)"
    )


def focused(tab: Look) -> str:
    """The place of the tile that has the focus, or the id of what else has it."""
    return tab.page.evaluate("document.activeElement.dataset.at || document.activeElement.id")


def shows(tab: Look, names: list[str]) -> None:
    wanted = json.dumps(names[:6])
    tab.until(f"JSON.stringify([...document.querySelectorAll('#grid img')].slice(0, 6).map(i => i.alt)) === "
              f"JSON.stringify({wanted})")  # fmt: skip


def found(shown: Album, words: str) -> list[str]:
    return [hit.path.name for hit in shown.library.find(words, 10)]


def test_typing_shows_what_fits_best(shown: Album, look: Open) -> None:
    tab = look()
    assert tab.text("#standing") == f"{shown.library.count:,} images, newest first"
    assert focused(tab) == "words"
    tab.page.keyboard.type("a red cat", delay=30)
    shows(tab, found(shown, "a red cat"))
    tab.wait_text("#standing", "best first")
    assert tab.page.url.endswith("#words=a+red+cat")
    assert tab.page.title() == "a red cat · lapclip search"
    tab.until("document.querySelector('#grid img').naturalWidth > 0")
    tab.page.keyboard.press("Control+a")
    tab.page.keyboard.press("Backspace")
    tab.wait_text("#standing", "newest first")


@pytest.mark.parametrize("width", [1280, 390])
def test_bars_show_the_similarity_and_the_page_says_what_they_are_not(
    shown: Album, look: Open, width: int
) -> None:
    tab = look(width=width)
    ranking = tab.page.locator("#ranking")
    assert not ranking.is_visible()
    assert tab.page.locator(".bar:visible").count() == 0
    tab.page.keyboard.type("a red cat", delay=30)
    shows(tab, found(shown, "a red cat"))
    tab.page.locator(".bar:visible").first.wait_for()
    assert "nothing here shows whether any of them fits" in ranking.inner_text()
    ratios = tab.page.evaluate(
        "[...document.querySelectorAll('.bar')].slice(0, 6).map(bar => "
        "bar.firstChild.getBoundingClientRect().width / (bar.getBoundingClientRect().width - 2))"
    )
    bars = [hit.bar for hit in shown.library.find("a red cat", 6)]
    assert ratios == pytest.approx(bars, abs=0.03)
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_letters_in_a_row_make_few_questions_and_stale_answers_are_dropped(
    shown: Album, look: Open
) -> None:
    tab = look()
    held: list[Any] = []
    tab.page.route("**/search?*words=two+blue*", lambda route: held.append(route))
    tab.page.keyboard.type("two blue", delay=10)
    while not held:
        tab.page.wait_for_timeout(20)
    tab.page.keyboard.press("Control+a")
    tab.page.keyboard.type("a green house", delay=10)
    shows(tab, found(shown, "a green house"))
    for route in held:
        route.continue_()  # the page gave it up long ago
    tab.page.wait_for_timeout(300)
    assert tiles(tab) == found(shown, "a green house")[:6]
    asked = [url for url in tab.requests if url.endswith("words=a+green+house")]
    assert len(asked) == 1  # it stayed, and did not have to come back
    tab.page.evaluate(
        "() => { const words = document.getElementById('words'); for (const letter of ' at night') {"
        " words.value += letter; words.dispatchEvent(new Event('input')); } }"
    )
    shows(tab, found(shown, "a green house at night"))
    asked = [url for url in tab.requests if "words=a+green+house+" in url]
    assert len(asked) == 1, asked


def test_keyboard_goes_all_the_way(shown: Album, look: Open) -> None:
    tab = look("#words=a+house")
    hits = [hit.path.name for hit in shown.library.find("a house", 30)]
    shows(tab, hits)
    press = tab.page.keyboard.press
    tab.page.evaluate("document.activeElement.blur()")
    press("/")
    assert focused(tab) == "words"
    press("Enter")
    assert focused(tab) == "0"
    assert tab.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    press("ArrowRight")
    press("ArrowDown")
    columns = int(focused(tab)) - 1
    assert columns >= 4
    press("ArrowLeft")
    press("ArrowUp")
    assert focused(tab) == "0"
    press("ArrowUp")
    assert focused(tab) == "words"
    press("ArrowDown")
    press("End")
    assert focused(tab) == str(shown.library.count - 1)
    tab.until("document.activeElement.classList.contains('there')")
    assert tab.page.evaluate("document.activeElement.getBoundingClientRect().bottom <= innerHeight")
    press("PageUp")
    assert int(focused(tab)) < shown.library.count - 1
    press("Home")
    assert focused(tab) == "0"
    press("Enter")
    tab.wait_text("#viewer-path", hits[0])
    press("ArrowRight")
    tab.wait_text("#viewer-path", hits[1])
    assert tab.page.url.endswith(f"&open={shown.library.find('a house', 2)[1].number}")
    press("Escape")
    tab.page.locator("#viewer").wait_for(state="hidden")
    assert focused(tab) == "1"
    assert tab.page.url.endswith("#words=a+house")
    press("Escape")
    assert focused(tab) == "words"


def test_open_image_says_what_is_known_and_finds_more_like_it(shown: Album, look: Open) -> None:
    number = shown.number("large.png")
    tab = look(f"#words=a+house&open={number}")
    tab.wait_text("#viewer-name", "large.png")
    tab.wait_text("#viewer-path", "large.png")
    tab.wait_text("#viewer-facts", "700 \u00d7 700")
    tab.wait_text("#viewer-facts", "Nov 2023")
    tab.until("document.getElementById('viewer-image').naturalWidth === 700")
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.page.get_by_role("button", name="Copy path").click()
    tab.wait_text("#viewer-status", "Copied")
    assert tab.page.evaluate("navigator.clipboard.readText()") == "large.png"
    tab.page.get_by_role("button", name="More like this").click()
    shows(tab, [hit.path.name for hit in shown.library.like(number, 6)])
    assert tab.page.url.endswith(f"#like={number}")
    assert tab.page.locator("#by").is_visible()


def test_back_and_forward_keep_what_was_seen(shown: Album, look: Open) -> None:
    tab = look()
    for letters in ("a red", " cat"):
        tab.page.keyboard.type(letters, delay=10)
        tab.wait_text("#standing", "best first")
        tab.until(f"location.hash.endsWith({letters.strip().replace(' ', '+')!r})")
    shows(tab, found(shown, "a red cat"))
    tab.page.locator("#grid button").nth(2).click()
    third = shown.library.find("a red cat", 3)[2]
    tab.wait_text("#viewer-path", third.path.name)
    tab.page.get_by_role("button", name="More like this").click()
    liked = [hit.path.name for hit in shown.library.like(third.number, 6)]
    shows(tab, liked)
    tab.page.go_back()
    tab.wait_text("#viewer-path", third.path.name)
    shows(tab, found(shown, "a red cat"))
    tab.page.go_back()
    tab.page.locator("#viewer").wait_for(state="hidden")
    assert tab.page.locator("#words").input_value() == "a red cat"
    tab.page.go_back()  # all letters were one step
    tab.wait_text("#standing", "newest first")
    assert tab.page.locator("#words").input_value() == ""
    tab.page.go_forward()
    shows(tab, found(shown, "a red cat"))
    tab.page.reload()
    shows(tab, found(shown, "a red cat"))


def test_names_are_text(shown: Album, look: Open) -> None:
    tab = look()
    odd = [name for name in ODD if (shown.folder / name).exists()]
    assert tiles(tab)[: len(odd)] == odd
    for at, name in enumerate(odd):
        tab.page.locator("#grid button").nth(at).click()
        tab.until(f"document.getElementById('viewer-path').textContent === {name!r}")
        assert tab.page.evaluate("document.getElementById('viewer-name').textContent") == name
        tab.until("document.getElementById('viewer-image').naturalWidth > 0")
        tab.page.keyboard.press("Escape")
        tab.page.locator("#viewer").wait_for(state="hidden")
    assert tab.page.evaluate("window.hacked") is None
    assert tab.page.locator("main b, dialog b").count() == 0


def test_thousands_scroll_with_few_tiles_in_the_page(shown: Album, look: Open) -> None:
    tab = look("#words=a+house")
    tab.until("document.querySelectorAll('#grid li').length > 10")
    most = 0
    for share in [*(at / 40 for at in range(41)), 0.5]:
        tab.page.evaluate(f"scrollTo(0, {share} * document.documentElement.scrollHeight)")
        tab.page.wait_for_timeout(20)
        most = max(most, tab.page.locator("#grid li").count())
    assert most < 120
    height = tab.page.evaluate("document.getElementById('grid').clientHeight")
    assert height > shown.library.count / 10 * 100  # as high as all of them
    on_screen = (
        "[...document.querySelectorAll('#grid li')].filter(item => { const box = item.getBoundingClientRect();"
        " return box.bottom > 150 && box.top < innerHeight; })"
    )
    tab.until(
        f"{on_screen}.length > 10 && {on_screen}.every(item => item.firstChild.classList.contains('there'))"
    )
    # The tile in the middle of the scroll is the image at that place.
    at, name = tab.page.evaluate(f"(({{dataset}}, image) => [Number(dataset.at), image.alt])({on_screen}[3].firstChild,"
                                 f" {on_screen}[3].firstChild.firstChild)")  # fmt: skip
    assert at > shown.library.count / 3
    assert name == shown.library.find("a house", 1, at)[0].path.name


@pytest.mark.parametrize(("width", "columns"), [(390, 3), (320, 2)])
def test_phone_has_no_sideways_scroll(shown: Album, look: Open, width: int, columns: int) -> None:
    tab = look("#words=a+house", width=width, has_touch=True, is_mobile=True)
    tab.until("document.querySelectorAll('#grid li').length > 3")
    assert tab.overflow == 0
    tops = tab.page.evaluate(
        "[...document.querySelectorAll('#grid li')].map(item => item.getBoundingClientRect().top)"
    )
    assert tops.count(tops[0]) == columns
    tab.page.locator("#grid button").nth(1).tap()
    tab.wait_text("#viewer-path", shown.library.find("a house", 2)[1].path.name)
    assert tab.overflow == 0
    box = tab.page.locator("#viewer-like").bounding_box()
    assert box["x"] + box["width"] <= width
    assert box["y"] + box["height"] <= 900
    tab.page.get_by_role("button", name="Close").tap()
    tab.page.locator("#viewer").wait_for(state="hidden")


def test_dark_as_the_system_says_or_as_chosen(shown: Album, look: Open) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    dark, light = look(scheme="dark"), look(scheme="light")
    assert dark.page.evaluate(paper) == "rgb(18, 21, 26)"
    before = light.page.evaluate(paper)
    light.page.get_by_role("button", name="Dark").click()
    assert light.page.evaluate(paper) == dark.page.evaluate(paper) != before
    light.page.reload()
    assert light.page.evaluate(paper) == dark.page.evaluate(paper)


def test_image_chosen_or_dropped_is_the_question(shown: Album, look: Open) -> None:
    tab = look()
    tab.page.set_input_files("#file", shown.folder / "scene 7.jpg")
    tab.wait_text("#by", "Like your image")
    tab.until("document.querySelector('#grid img').alt === 'scene 7.jpg'")
    assert "#image=" in tab.page.url
    data = list((shown.folder / "scene 5.jpg").read_bytes())
    tab.page.evaluate(
        "data => { const moved = new DataTransfer(); moved.items.add(new File([new Uint8Array(data)], 'a.jpg'));"
        " for (const kind of ['dragover', 'drop']) document.body.dispatchEvent("
        "new DragEvent(kind, { dataTransfer: moved, bubbles: true, cancelable: true })); }",
        data,
    )
    tab.until("document.querySelector('#grid img').alt === 'scene 5.jpg'")
    tab.page.get_by_role("button", name="Search by words again").click()
    tab.wait_text("#standing", "newest first")
    tab.page.evaluate(
        "() => { const moved = new DataTransfer(); moved.items.add(new File(['no image'], 'a.txt'));"
        " document.body.dispatchEvent(new DragEvent('drop', { dataTransfer: moved, bubbles: true })); }"
    )
    tab.wait_text("#standing", "a.txt cannot be searched by: it is not an image")
    tab.wrong = [told for told in tab.wrong if "400" not in told]  # the browser complains too


def test_what_the_model_is_worth_is_said_until_it_is_read(shown: Album, look: Open) -> None:
    tab = look()
    first, *rest = shown.library.model_notes()
    assert first in tab.text("#notes")
    tab.page.locator("#notes summary").click()
    tab.wait_text("#notes", rest[-1])
    tab.page.get_by_role("button", name="Understood").click()
    assert not tab.page.locator("#notes").is_visible()
    tab.page.reload()
    tab.until("document.querySelectorAll('#grid li').length > 3")
    assert not tab.page.locator("#notes").is_visible()


def test_nothing_found_and_an_image_that_went_are_said(shown: Album, look: Open) -> None:
    tab = look("#like=999999")
    tab.wait_text("#empty", "Nothing found")
    assert tab.page.locator("#grid li").count() == 0
    path, hidden = shown.folder / "scene 11.jpg", shown.folder.parent / "elsewhere"
    number = shown.number("scene 11.jpg")
    os.replace(path, hidden)
    try:
        gone = look(f"#image=&open={number}")
        gone.wait_text("#viewer-missing", "The file is gone")
        gone.page.keyboard.press("Escape")
        gone.page.set_input_files("#file", hidden)
        gone.until("document.querySelector('#grid img').alt === 'scene 11.jpg'")
        gone.until("document.querySelector('#grid button').classList.contains('missing')")
        gone.wait_text("#grid li:first-child", "scene 11.jpg")
    finally:
        os.replace(hidden, path)
    for each in (tab, gone):
        each.wrong = [told for told in each.wrong if "404" not in told]  # the browser complains too


def test_labels_and_roles(shown: Album, look: Open) -> None:
    tab = look("#words=a+house", reduced_motion="reduce")
    tab.until("document.querySelectorAll('#grid li').length > 3")
    assert tab.page.get_by_role("searchbox", name="Search your images").count() == 1
    first = tab.page.get_by_role("listitem").first
    name = found(shown, "a house")[0]
    assert first.get_by_role("button", name=name).count() == 1
    assert first.get_attribute("aria-setsize") == str(shown.library.count)
    assert (
        tab.page.evaluate(
            "getComputedStyle(document.querySelector('.tile img')).transitionDuration"
        )
        == "0s"
    )
    first.get_by_role("button").click()
    assert tab.page.get_by_role("dialog", name=name).count() == 1
    assert tab.page.get_by_role("img", name=name).count() >= 1


def test_what_was_indexed_meanwhile_appears_when_the_page_is_looked_at_again(
    shown: Album, look: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAPCLIP_DATA", str(shown.data))
    tab, new = look(), shown.folder / "later.png"
    try:
        scene(9, 80).save(new)
        open_library(shown.folder, str(shown.model)).close()
        tab.until_awake("document.querySelector('#grid img').alt === 'later.png'")
        assert tab.text("#standing") == f"{shown.library.count + 1:,} images, newest first"
    finally:
        new.unlink(missing_ok=True)
        open_library(shown.folder, str(shown.model)).close()
    tab.until_awake("document.querySelector('#grid img').alt !== 'later.png'")
    # Until the page looked again it may have asked for the image that is gone.
    tab.wrong[:] = [message for message in tab.wrong if "404 (Not Found)" not in message]
