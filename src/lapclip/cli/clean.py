"""`lapclip clean`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from lapclip.cli.output import Common, confirmed, emit, typed
from lapclip.text import counted, printable, size

if TYPE_CHECKING:
    from lapclip.commands.clean import Item

MAX_SHOWN = 8  # items of a kind
TITLES = {
    "run": "runs",
    "cache": "caches, made or fetched again when needed",
    "data": "data given by Python code; it stays while a run here learns from it",
    "index": "search indexes; lapclip search FOLDER --forget removes one",
}


def clean(
    *runs: str,
    older_than: float | None = None,
    caches: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    yes: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    common: Common | None = None,
) -> int:
    """Show what takes space on the disk, and remove runs and caches after asking.

    Looks at the runs in this folder, at lapclip's caches and at its search indexes, and nowhere else.
    Without arguments nothing is removed. What a process uses now stays, and so does whatever a link leads to.

    For example:

    - `lapclip clean`
    - `lapclip clean first-run-2`
    - `lapclip clean --older-than 90`
    - `lapclip clean --caches --older-than 30 --yes`

    Parameters
    ----------
    runs
        Remove these whole runs, with their models.
    older_than
        Remove only what was not used for so many days. Without RUN and --caches: all such runs.
        Example: lapclip clean --older-than 90
    caches
        Remove what can be made or fetched again: packed images, features, published models, timings.
        Example: lapclip clean --caches
    yes
        Do not ask. Example: lapclip clean --caches --yes
    """
    from lapclip.commands.clean import list_items, remove, select

    with Console(stderr=True).status("looking at what takes space"):
        items = list_items()
    selected = select(items, runs, older_than, caches)
    if selected and not yes and not _confirm(selected, common):
        selected = []
    removed, failed = remove(selected)
    is_removal = bool(runs) or caches or older_than is not None
    lines = _removal_text(removed, failed) if is_removal else _overview(items)
    result: dict[str, Any] = {
        "items": [item.to_dict() for item in items],
        "removed": [item.to_dict() for item in removed],
        "failed": [item.to_dict() for item in failed],
        "removed_bytes": sum(item.bytes for item in removed),
    }
    emit(result, lines, common)
    return 1 if failed else 0


def _confirm(selected: list[Item], common: Common | None) -> bool:
    total = f"{counted(len(selected), 'item')}, {size(sum(item.bytes for item in selected))}"
    if sys.stdin.isatty() and not (common and common.json):
        for item in selected:
            print(f"  {size(item.bytes):>9}  {printable(item.path)}")
    refusal = f"Nothing was removed: {total}, would go, and nobody can be asked."
    return confirmed(f"Remove {total}?", refusal, common)


def _overview(items: list[Item]) -> list[str]:
    lines = []
    for kind, title in TITLES.items():
        same_kind = [item for item in items if item.kind == kind]
        if same_kind:
            total = size(sum(item.bytes for item in same_kind))
            lines.append(f"[bold]{total:>9}[/bold]  {title}")
            lines += [_line(item) for item in same_kind[:MAX_SHOWN]]
        if len(same_kind) > MAX_SHOWN:
            lines.append(f"{'':20}  and {len(same_kind) - MAX_SHOWN} more")
    if not lines:
        return ["Nothing here takes space.", f"Next: {typed('train')}"]
    return [*lines, "", f"Next: {typed('clean --caches')}, or {typed('clean RUN')}"]


def _line(item: Item) -> str:
    facts = [item.about, f"unused for {counted(int(item.unused_days), 'day')}"]
    if item.kept:
        facts.append(f"stays: {item.kept}")
    about = printable("; ".join(filter(None, facts)))
    return f"{size(item.bytes):>20}  {escape(printable(item.path))}  [dim]{escape(about)}[/dim]"


def _removal_text(removed: list[Item], failed: list[Item]) -> list[str]:
    lines = [_line(item) for item in (*removed, *failed)]
    total = "Nothing was removed."
    if removed:
        total = f"Removed {counted(len(removed), 'item')}, {size(sum(i.bytes for i in removed))}."
    return [*lines, total, f"Next: {typed('clean')}"]
