"""The page in a real browser."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from ..browsing import Look, needs_browser
from ..conftest import SMALL, command, set_flags
from .made import (
    HOSTILE,
    Served,
    append,
    ended,
    evaluation,
    learning_run,
    looked,
    make_run,
    ranks,
    server,
    started,
    step,
)

pytestmark = needs_browser


Open = Callable[..., Look]
ENDINGS = ("404", "ERR_CONNECTION", "ERR_CONTENT_LENGTH_MISMATCH")
"""What a browser says of a file that is gone, and of a server that ended, also in the middle of an answer."""


@pytest.fixture
def look(browser: Any) -> Iterator[Open]:
    """Opens a page; at the end nothing may have gone wrong in it."""
    opened: list[Look] = []

    def open_page(
        served: Served, *, width: int = 1280, scheme: str = "light", runs: tuple[str, ...] = ()
    ) -> Look:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        opened.append(Look(context))
        opened[-1].page.goto(f"{served.address}#{urlencode([('run', run) for run in runs])}")
        return opened[-1]

    yield open_page
    for each in opened:
        assert each.wrong == []
        each.context.close()


def test_real_training_is_followed_live(here: Path, look: Open) -> None:
    with server() as served:
        tab = look(served)
        tab.wait_text("main", "No runs yet")
        tab.page.evaluate("window.sameDocument = true")
        settings = set_flags(*SMALL, "train.steps=150", "train.evaluate_every_epochs=15")
        training = subprocess.Popen(
            command("train", "--name", "live", *settings), stderr=subprocess.DEVNULL
        )
        try:
            tab.wait_text("#title", "live")
            tab.wait_text("#progress-text", "of 150")
            seen = set()
            while "100 %" not in seen:
                tab.page.wait_for_timeout(50)
                seen.add(tab.text("#progress-text").split(" · ")[1])
            tab.wait_text("#state", "Finished")
        finally:
            assert training.wait(120) == 0
        assert len(seen) > 2, seen  # steps on the way were seen, not only the end
        tab.wait_text("#spoken", "live: Finished")
        for chart in ("loss", "recall", "gradients", "temperature", "memory"):
            tab.drawn(chart)
        assert tab.page.locator("#answers article").count() > 0
        tab.until(
            "[...document.querySelectorAll('#answers img')].every(image => image.naturalWidth)"
        )
        assert tab.page.evaluate("window.sameDocument")


def test_new_steps_and_an_end_arrive_by_the_stream(here: Path, look: Open) -> None:
    run = make_run("mine", learning_run(60))
    with run.lock(), server() as served:
        tab = look(served)
        tab.wait_text("#progress-text", "Step 60 of 60")
        append(run, [step(61, loss=0.1234)])
        tab.wait_text("#now-loss", "0.123")
        assert tab.text("#spoken") == ""  # a step is not announced
        append(run, [ended(61, "failed", error="No space left on device")])
        tab.wait_text("#alarms", "No space left on device")
        tab.wait_text("#alarms", "lapclip resume mine")
        tab.wait_text("#wrong-answer", "Yes")
        tab.wait_text("#spoken", "failed")


def test_runs_are_compared_on_one_axis(here: Path, look: Open) -> None:
    make_run("first", [*learning_run(60), ended(60)])
    make_run("second", [*learning_run(40), ended(40)])
    with server() as served:
        tab = look(served)
        tab.wait_text("#title", "second")
        tab.page.get_by_label("Compare first").check()
        tab.wait_text("#comparison-table", "first")
        tab.drawn("compare-loss")
        tab.drawn("compare-recall")
        names = "document.getElementById('compare-loss').data.map(trace => trace.name)"
        assert sorted(tab.page.evaluate(names)) == ["first", "second"]
        longest = (
            "Math.max(...document.getElementById('compare-loss').data.flatMap(trace => trace.x))"
        )
        assert tab.page.evaluate(longest) == 60
        assert not tab.page.locator("#overview").is_visible()
        tab.page.get_by_text("Minutes of work").click()
        tab.until(f"{longest} < 2")
        tab.page.reload()  # the choice is in the address
        tab.wait_text("#comparison-table", "second")
        tab.page.locator("#comparison-table").get_by_role("button", name="first").click()
        tab.wait_text("#title", "first")


def test_machines_that_train_together_are_shown_with_their_waiting(here: Path, look: Open) -> None:
    make_run("alone", [*learning_run(20), ended(20)])
    run = make_run("both", [started(30), *(step(number) for number in range(1, 21))])
    with run.lock(), server() as served:
        tab = look(served, runs=("both",))
        tab.wait_text("#title", "both")
        append(
            run,
            [
                ranks(20, hosts=["desktop", HOSTILE], advice=HOSTILE),
                step(21, seconds={"forward": 0.2, "exchange": 0.2}),
            ],
        )
        tab.until_awake(
            "document.getElementById('together')?.innerText.includes('desktop waits for')"
        )
        rows = tab.page.locator("#together tbody tr").all_inner_texts()
        assert [row.split("\t")[1:] for row in rows] == [
            ["96", "75 %", "42 %"],
            ["32", "25 %", "3 %"],
        ]
        assert "onerror" in rows[1]
        assert tab.page.locator("#together img").count() == 0
        assert tab.text("#machine-title") == "The machines at work"
        tab.wait_text("#phases", "exchange")
        phone = look(served, width=390, runs=("both",))
        phone.wait_text("#together", "desktop waits for")
        assert phone.overflow == 0
        phone.page.close()
        tab.page.get_by_role("button", name="alone").click()
        tab.wait_text("#title", "alone")
        assert tab.page.locator("#together").count() == 0


def test_slider_shows_what_was_answered_at_each_evaluation(here: Path, look: Open) -> None:
    run = make_run("mine", learning_run(60))
    with run.lock(), server() as served:
        tab = look(served)
        slider = tab.page.get_by_label("Evaluation")
        tab.wait_text("#epoch-text", "Epoch 6")
        card = tab.page.locator("#answers article").filter(has_text="a red cat")
        assert "comes first" in card.inner_text()
        assert card.locator("li.right img").get_attribute("src").split("?")[0].endswith("/17.png")
        tab.until(
            "[...document.querySelectorAll('#answers img')].every(image => image.naturalWidth)"
        )
        slider.focus()
        tab.page.keyboard.press("Home")
        tab.wait_text("#epoch-text", "Epoch 1")
        assert "comes fourth" in card.inner_text()
        assert card.locator("li").nth(3).get_attribute("class") == "thumbnail right"
        assert "the right one" in card.locator("li.right img").get_attribute("alt")
        assert "Epoch 1" in slider.get_attribute("aria-valuetext")
        tab.page.keyboard.press("ArrowRight")
        tab.wait_text("#epoch-text", "Epoch 2")
        assert "comes second" in card.inner_text()
        assert "4 at epoch 1, 2 at epoch 2" in card.locator("svg").get_attribute("aria-label")
        # A new evaluation does not take the reader away from where they are.
        append(run, [step(61), evaluation(70, 0.7), looked(70, 9)])
        tab.until_awake("document.getElementById('epoch').max === '6'")
        assert "Epoch 2" in tab.text("#epoch-text")
        for _ in range(3):
            tab.page.keyboard.press("ArrowRight")
        tab.page.get_by_role("button", name="Play").click()
        tab.wait_text("#epoch-text", "Epoch 7")
        assert "not among these: number 9 of 240" in card.inner_text()
        assert card.locator("li.right").count() == 0
        own = tab.page.locator("#answers article").filter(has_text="my own dog")
        assert "judge for yourself" in own.inner_text()
        assert own.locator("li.right, svg").count() == 0


def test_dark_follows_the_system_and_a_switch_is_remembered(here: Path, look: Open) -> None:
    make_run("mine", [*learning_run(30), ended(30)])
    light, dark = "rgb(246, 247, 249)", "rgb(18, 21, 26)"
    colour = "getComputedStyle(document.body).backgroundColor"
    with server() as served:
        tab = look(served, scheme="dark")
        tab.drawn("loss")
        assert tab.page.evaluate(colour) == dark
        # Not the colour of a line: a line more may be drawn in the meantime.
        ticks = "document.querySelector('#loss .xtick text').style.fill"
        before = tab.page.evaluate(ticks)
        tab.page.emulate_media(color_scheme="light")
        tab.until(f"{colour} === '{light}'")
        tab.until(f"{ticks} !== '{before}'")  # charts change with the page, a moment after it
        switch = tab.page.get_by_role("button", name="Dark")
        assert switch.get_attribute("aria-pressed") == "false"
        switch.click()
        assert tab.page.evaluate(colour) == dark
        tab.page.locator(
            "#loss"
        ).scroll_into_view_if_needed()  # a chart out of sight is drawn when it is seen again
        tab.until(f"{ticks} === '{before}'")
        tab.page.reload()
        assert tab.page.evaluate(colour) == dark
        switch.click()
        assert tab.page.evaluate(colour) == light


def test_phone_scrolls_in_one_direction_only(here: Path, look: Open) -> None:
    words = ["a very long caption " * 8, "unbreakable" * 20]
    make_run(
        "mine", [*learning_run(60), looked(60, 7, words), ended(60, "failed", error="long" * 80)]
    )
    make_run("other", [*learning_run(30), ended(30)])
    with server() as served:
        for runs, chart in ((("mine",), "loss"), (("mine", "other"), "compare-loss")):
            tab = look(served, width=390, runs=runs)
            tab.drawn(chart)
            tab.page.get_by_text("Runs", exact=True).click()
            for summary in tab.page.get_by_text("As a table").all():
                if summary.is_visible():
                    summary.click()
            assert tab.overflow == 0
            tab.page.close()  # else it would ask the server after its end


def test_markup_in_captions_and_records_stays_text(here: Path, look: Open) -> None:
    poisoned = started(30, notes=[HOSTILE], devices={"image": HOSTILE, "text": HOSTILE})
    poisoned["config"]["model"]["name"] = HOSTILE
    poisoned["machine"]["chip"] = HOSTILE
    steps = [
        step(number, grad_norms={HOSTILE: 1.0}, seconds={HOSTILE: 0.1}) for number in range(1, 31)
    ]
    last = [looked(30, 2, [HOSTILE]), ended(30, "failed", error=HOSTILE)]
    names = ["mine", *(["<b onclick=alert(1)>&amp;"] if os.name != "nt" else [])]
    for name in names:
        make_run(name, [poisoned, *steps, evaluation(30, 0.5), *last])
    with server() as served:
        for runs in ([names[0]], [names[-1]], names):
            tab = look(served, runs=tuple(runs))
            if len(runs) == 1:
                tab.wait_text("#alarms", HOSTILE)
                tab.wait_text("#answers", HOSTILE)
                tab.wait_text("#about", HOSTILE)
                tab.drawn("gradients")
                tab.wait_text("#gradients", "<img")
            else:
                tab.drawn("compare-loss")
            tab.page.wait_for_timeout(300)
            assert tab.page.evaluate("typeof window.hacked") == "undefined"
            assert tab.page.locator("main b, main img[src=x], [onerror], [onclick]").count() == 0
            tab.page.close()  # else it would ask the server after its end


def test_everything_can_be_reached_and_worked_by_keyboard(here: Path, look: Open) -> None:
    make_run("first", [*learning_run(60), ended(60)])
    make_run("second", [*learning_run(40), ended(40)])
    with server() as served:
        tab = look(served)
        tab.wait_text("#title", "second")
        tab.drawn("recall")
        tab.page.evaluate("scrollTo(0, 0)")
        reached = []
        name = (
            "(at => at.getAttribute('aria-label') || at.innerText || at.id)(document.activeElement)"
        )
        for _ in range(60):
            tab.page.keyboard.press("Tab")
            if tab.page.evaluate("document.activeElement === document.body"):
                break
            assert tab.page.evaluate("document.activeElement.matches(':focus-visible')")
            reached.append(tab.page.evaluate(name).strip().split("\n")[0])
        else:
            raise AssertionError(f"focus never left the page: {reached}")
        for wanted in (
            "Skip to the run",
            "Dark",
            "Runs",
            "second",
            "first",
            "Compare first",
            "Play",
            "epoch",
            "As a table",
        ):
            assert wanted in reached, reached
        tab.page.get_by_role("button", name="first").focus()
        tab.page.keyboard.press("Enter")
        tab.wait_text("#title", "first")
        tab.page.get_by_label("Compare second").focus()
        tab.page.keyboard.press("Space")
        tab.wait_text("#comparison-table", "second")
        tab.page.keyboard.press("Space")
        tab.wait_text("#title", "first")
        # Focus is where it was, although the list was drawn again.
        assert (
            tab.page.evaluate("document.activeElement.getAttribute('aria-label')")
            == "Compare second"
        )


def test_page_has_landmarks_headings_and_tables_behind_the_charts(here: Path, look: Open) -> None:
    make_run("mine", [*learning_run(60), ended(60)])
    with server() as served:
        tab = look(served)
        tab.wait_text("#title", "mine")
        for role in ("banner", "navigation", "main", "contentinfo"):
            assert tab.page.get_by_role(role).count() == 1, role
        seen = "[...document.querySelectorAll('h1, h2, h3')].filter(heading => heading.checkVisibility())"
        levels = tab.page.evaluate(f"{seen}.map(heading => Number(heading.tagName[1]))")
        assert levels[0] == 1
        assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), levels
        for figure in tab.page.locator("figure:has(.plot)").all():
            if figure.is_visible():
                figure.get_by_text("As a table").click()
                figure.locator("table tbody tr").first.wait_for()
        assert tab.page.locator("img:not([alt]), button:empty").count() == 0


def test_curves_zoom_and_a_zoom_outlasts_new_steps(here: Path, look: Open) -> None:
    run = make_run("mine", learning_run(60))
    with run.lock(), server() as served:
        tab = look(served)
        tab.drawn("loss")
        extent = "document.getElementById('loss').layout.xaxis.range"
        place = tab.page.locator("#loss .nsewdrag").bounding_box()
        legend, tools = (
            tab.page.locator(f"#loss .{part}").bounding_box() for part in ("legend", "modebar")
        )
        assert legend["x"] + legend["width"] <= tools["x"]
        middle = place["y"] + place["height"] / 2
        tab.page.mouse.move(place["x"] + place["width"] * 0.25, middle)
        tab.page.mouse.down()
        tab.page.mouse.move(place["x"] + place["width"] * 0.75, middle, steps=4)
        tab.page.mouse.up()
        tab.until(f"{extent}[1] - {extent}[0] < 40")
        append(run, [step(61), step(62)])
        tab.until_awake("document.getElementById('loss').data.some(trace => trace.x.includes(62))")
        assert tab.page.evaluate(f"{extent}[1] - {extent}[0]") < 40
        tab.page.get_by_text("Last half").click()
        tab.until(f"{extent}[0] > 25 && {extent}[1] > 60")


def test_run_that_goes_and_server_that_ends_are_said(here: Path, look: Open) -> None:
    run = make_run("mine", [*learning_run(20), ended(20)])
    other = make_run("other", [*learning_run(20), ended(20)])
    with server() as served:
        tab = look(served, runs=("mine",))
        tab.wait_text("#title", "mine")
        shutil.rmtree(run.path)
        tab.until_awake("document.getElementById('notice').textContent.includes('mine is gone')")
        tab.page.get_by_role("button", name="other").click()
        tab.wait_text("#title", "other")
        assert not tab.page.locator("#notice").is_visible()
        shutil.rmtree(other.path)
        make_run("other", [started(999), step(5), ended(5)])
        tab.until_awake(
            "document.getElementById('progress-text').textContent === 'Ended early, after step 5 of 999'"
        )
    tab.until_awake("document.getElementById('notice').textContent.includes('does not answer')")
    # The browser itself complains of images that went with their run, and of a server that is not there.
    tab.wrong = [told for told in tab.wrong if not any(end in told for end in ENDINGS)]


def test_many_tabs_share_one_stream(here: Path, look: Open) -> None:
    # A browser opens six connections to one server at most: seven streams would leave a tab without an answer.
    run = make_run("mine", learning_run(30))
    with run.lock(), server() as served:
        first = look(served)
        tabs = [first]
        for _ in range(6):
            tab = Look(first.context)
            tab.page.goto(served.address)
            tabs.append(tab)
        for tab in tabs:
            tab.wait_text("#title", "mine")
        append(run, [step(31, loss=0.4321)])
        for tab in tabs:
            tab.wait_text("#now-loss", "0.432")
        streams = [url for tab in tabs for url in tab.requests if "/events" in url]
        assert len(streams) == 1, streams
        assert [tab.wrong for tab in tabs] == [[]] * 7


def test_token_leaves_the_address_and_two_pages_stay_open(here: Path, look: Open) -> None:
    make_run("mine", [*learning_run(20), ended(20)])
    with server() as served, server() as other:
        tab = look(served, runs=("mine",))
        tab.wait_text("#title", "mine")
        assert tab.page.url == f"http://127.0.0.1:{served.port}/#run=mine"
        assert tab.page.evaluate("document.cookie") == ""  # no script can read it
        # A link on another site, such as a terminal in a browser.
        tab.page.goto(f"http://localhost:{other.port}/?token={other.token}")
        tab.wait_text("#title", "mine")
        tab.page.evaluate("address => { location.href = address; }", other.address)
        tab.wait_text("#title", "mine")
        assert tab.page.url.startswith(f"http://127.0.0.1:{other.port}/")
        assert "token" not in tab.page.url
        tab.page.goto(f"http://127.0.0.1:{served.port}/")  # the first one knows its cookie still
        tab.wait_text("#title", "mine")
    tab.wrong = [told for told in tab.wrong if "localhost" not in told]
