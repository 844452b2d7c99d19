"""A real browser for tests: Debian's chromium, driven by playwright.

Tests are skipped where there is none, except in CI (`.ci/run` installs one and sets CI), where that is a failure.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
MISSING = (
    "no chromium here; Debian's: apt-get install chromium"
    if BROWSER is None
    else "playwright is not installed"
    if importlib.util.find_spec("playwright") is None
    else ""
)
needs_browser = pytest.mark.skipif(bool(MISSING) and not os.environ.get("CI"), reason=MISSING)


@contextmanager
def started_browser() -> Iterator[Any]:
    assert not MISSING, MISSING
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Without its sandbox, which root may not use: all it opens is our own page.
        launched = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield launched
        launched.close()


class Look:
    """A tab, and everything that should not happen in one."""

    def __init__(self, context: Any) -> None:
        self.context, self.page, self.wrong = context, context.new_page(), list[str]()
        self.page.set_default_timeout(60_000)
        self.page.on(
            "console",
            lambda message: self._tell(message) if message.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("request", self._check)
        self.requests: list[str] = []

    def _tell(self, message: Any) -> None:
        self.wrong.append(f"{message.type}: {message.text}")

    def _check(self, request: Any) -> None:
        self.requests.append(request.url)
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            self.wrong.append(f"asked {request.url}")

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def wait_text(self, selector: str, text: str) -> None:
        self.page.locator(selector).filter(has_text=text).wait_for()

    def until(self, expression: str) -> None:
        """Wait until this is true in the page; playwright's own way evaluates a text, which our policy forbids."""
        for _ in range(3000):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(20)
        raise AssertionError(f"never true: {expression}")

    def until_awake(self, expression: str) -> None:
        """The same, for a page that rests between two looks at the server: the longer drawing takes, the longer."""
        for _ in range(600):
            self.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
            self.page.wait_for_timeout(100)
            if self.page.evaluate(expression):
                return
        raise AssertionError(f"never true: {expression}")

    def drawn(self, chart: str) -> None:
        """Wait until a chart holds what it is made of: curves, or the image of a heat map."""
        self.page.locator(f"#{chart}").scroll_into_view_if_needed()
        self.page.locator(f"#{chart}").locator("path.js-line, image").first.wait_for(
            state="attached"
        )

    @property
    def overflow(self) -> int:
        """By how many pixels the page is wider than the screen."""
        return self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
