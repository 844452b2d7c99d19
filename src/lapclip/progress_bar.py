"""A progress bar where people look: in a terminal, or below a notebook's cell. Nothing where nobody looks.

rich needs ipywidgets in notebooks, so there the bar is a little HTML that is replaced in place.
"""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lapclip.progress import Progress

EVERY = 0.2
"""Seconds between two drawings in a notebook: each is a message to the browser."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")


class LiveHtml:
    """HTML below a cell that is replaced in place."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = 0.0

    def show(self, markup: str) -> None:
        """Replace what is there, not more often than a person sees."""
        if time.monotonic() - self._shown < EVERY:
            return
        self._shown = time.monotonic()
        self._replace(markup)

    def _replace(self, markup: str) -> None:
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]  (a notebook has it)

        if self._handle is None:
            self._handle = display(HTML(markup), display_id=True)
        else:
            self._handle.update(HTML(markup))

    def clear(self) -> None:
        """Show nothing any more, if anything was shown."""
        if self._handle is not None:
            self._replace("")


def bar_html(what: str, done: int, total: int) -> str:
    """Return a bar with what is done beside it."""
    bar = f'<progress style="width:16em" max="{total}" value="{done}"></progress>'
    return f"<div>{bar} {html.escape(what)}  {done:,} of {total:,}</div>"


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """A callback for how much is done and how much there is; the bar goes away at the end."""
    if in_notebook():
        shown = LiveHtml()
        try:
            yield lambda done, total: shown.show(bar_html(what, done, total))
        finally:
            shown.clear()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
    )
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def counted(progress: bool | Progress | None, what: str) -> Iterator[Progress | None]:
    """What a caller's `progress` means: True for a bar, a callback for itself, else nothing."""
    if progress is True:
        with progress_bar(what) as bar:
            yield bar
    else:
        yield progress or None
