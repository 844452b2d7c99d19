"""`lapclip clean`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from lapclip.cli.output import Common, confirmed, emit, typed
from lapclip.text import counted, printable, size

if TYPE_CHECKING:
    from lapclip.commands.clean import Item

SHOWN = 8
"""Items of a kind that are listed."""


def clean(
    *kinds: str,
    run: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    yes: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    common: Common | None = None,
) -> int:
    """Show what takes room on the disk, and remove what you name.

    Looks at the runs in this folder, at lapclip's caches and at its search indexes, and nowhere else. Without a kind
    nothing is removed. A run's model goes only with the run, and that only by its name. What a process works with now
    stays, and so does whatever a link leads to.

    For example:

    - `lapclip clean`
    - `lapclip clean leftovers checkpoints`
    - `lapclip clean packed scenes --yes`
    - `lapclip clean --run first-run-2`

    Parameters
    ----------
    kinds
        What to remove: leftovers, checkpoints (of finished runs), packed, bundles, scenes, features, towers, models
        (published ones), measurements, indexes, data (that Python code gave and no run here learnt from).
    run
        Remove this whole run, with its model; may be repeated. Example: lapclip clean --run first-run-2
    yes
        Do not ask. Example: lapclip clean leftovers --yes
    """
    from lapclip.commands import clean as work

    with Console(stderr=True).status("looking at what takes room"):
        items = work.list_items()
    doomed = work.chosen(items, kinds, run)
    if doomed and not yes and not _confirmed(doomed, common):
        doomed = []
    removed, failed = work.remove(doomed)
    lines = _removed_text(removed, failed) if kinds or run else _overview(items, work.KINDS)
    emit(work.Cleaned(items, removed, failed).to_dict(), lines, common)
    return 1 if failed else 0


def _confirmed(doomed: list[Item], common: Common | None) -> bool:
    """Show a person what would go, and ask."""
    what = f"{counted(len(doomed), 'item')}, {size(sum(item.bytes for item in doomed))}"
    if sys.stdin.isatty() and not (common and common.json):
        for item in doomed:
            print(f"  {size(item.bytes):>9}  {printable(item.path)}")
    return confirmed(
        f"Remove {what}?",
        f"Nothing was removed: {what}, would go, and nobody can be asked.",
        common,
    )


def _overview(items: list[Item], kinds: dict[str, str]) -> list[str]:
    lines: list[str] = []
    for kind, meaning in kinds.items():
        found = [item for item in items if item.kind == kind]
        if not found:
            continue
        lines.append(
            f"[bold]{kind:<13}{size(sum(item.bytes for item in found)):>9}[/bold]  [dim]{meaning}[/dim]"
        )
        lines += [_line(item) for item in found[:SHOWN]]
        if len(found) > SHOWN:
            lines.append(f"{'':13}{'':9}  and {len(found) - SHOWN} more")
    if not lines:
        return ["Nothing here takes room.", f"Next: {typed('train')}"]
    free = [
        kind
        for kind in kinds
        if kind != "runs" and any(item.kind == kind and not item.kept for item in items)
    ]
    command = f"clean {free[0]}" if free else "clean --run NAME"
    return [*lines, "", f"Next: {typed(command)}"]


def _line(item: Item) -> str:
    about = escape(
        printable("; ".join(filter(None, (item.about, item.kept and f"stays: {item.kept}"))))
    )
    return f"{'':13}{size(item.bytes):>9}  {escape(printable(item.path))}{f'  [dim]{about}[/dim]' if about else ''}"


def _removed_text(removed: list[Item], failed: list[Item]) -> list[str]:
    lines = [_line(item) for item in (*removed, *failed)]
    total = size(sum(item.bytes for item in removed))
    said = (
        f"Removed {counted(len(removed), 'item')}, {total}." if removed else "Nothing was removed."
    )
    return [*lines, said, f"Next: {typed('clean')}"]
