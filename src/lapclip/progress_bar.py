"""A progress bar where people look: in a terminal, or in a notebook that has ipywidgets. Elsewhere nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lapclip.progress import Progress


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """Yield a callback for how much is done and how much there is. The bar goes away at the end."""
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
    is_seen = console.is_terminal or console.is_jupyter
    with Bar(*columns, console=console, transient=True, disable=not is_seen) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def counted(progress: bool | Progress | None, what: str) -> Iterator[Progress | None]:
    """Yield what a caller's `progress` means: True for a bar, a callback for itself, else nothing."""
    if progress is True:
        with progress_bar(what) as bar:
            yield bar
    else:
        yield progress or None
