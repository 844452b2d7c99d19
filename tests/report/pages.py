"""Reading a page back as a browser would: its elements, its text, its charts."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    """The elements of a page with their attributes, the text outside scripts, and the charts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.charts: dict[str, Any] = {}
        self._inside = ""
        self.feed(path.read_text(encoding="utf-8"))

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def addresses(self) -> list[str]:
        """Everything a browser would fetch or go to."""
        return [
            value or ""
            for _, named in self.elements
            for name, value in named.items()
            if name in ("src", "href")
        ]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    def titles(self) -> list[str]:
        """The plots, by their titles."""
        names = [
            named["id"]
            for tag, named in self.elements
            if tag == "div" and named.get("class") == "plot"
        ]
        assert list(self.charts) == names
        return self._titles

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = "charts" if ("id", "charts") in attrs else tag
        self._is_plot_title = tag == "h3" and "id" in dict(attrs)

    def handle_data(self, data: str) -> None:
        if self._inside == "charts":
            self.charts = json.loads(data, parse_constant=refuse)
        elif self._inside not in ("script", "style"):
            self.words.append(data)
            if self._inside == "h3":
                self.headings.append(data)
                if self._is_plot_title:
                    self._titles.append(data)

    _titles: list[str]

    def reset(self) -> None:
        super().reset()
        self._titles = []
        self.headings: list[str] = []  # of plots and of galleries

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")
