"""`lapclip claims`."""

from __future__ import annotations

import collections
from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape
from rich.table import Table

from lapclip.cli.display import display, loading
from lapclip.cli.output import Common, emit, typed

STYLES = {"holds": "green", "does not hold": "red", "cannot be measured here": "dim"}


def claims(
    *,
    only: Annotated[
        tuple[int, ...], Parameter(consume_multiple=True, negative="", show_default=False)
    ] = (),
    common: Common | None = None,
) -> int:
    """Measure again, on this machine, what was published about training CLIP on a laptop.

    Thirty claims, from the cost of one matrix product to the heat of a whole run. Each gets the figure found here and a
    verdict: holds, does not hold, or cannot be measured here, with the reason. Claims about a whole run read the newest
    finished run of the recipe `seed` in this folder. Takes under five minutes on two cores.

    For example:

    - `lapclip claims`
    - `lapclip claims --only 6 9 20`

    Parameters
    ----------
    only
        Measure the claims of these numbers alone. Example: lapclip claims --only 6 9
    """
    with loading():
        from lapclip.tuning.claims import measure_claims

    with display() as shown:
        rows = measure_claims(only, progress=shown.doing)
    emit({"claims": rows}, [table(rows), *summary(rows)], common)
    return 0


def table(rows: list[dict[str, Any]]) -> Table:
    """The claims for people: what was said, what was found, and why."""
    shown = Table(show_lines=True)
    shown.add_column("#", justify="right")
    shown.add_column("claim, and the figure published", ratio=4)
    shown.add_column("here, and why", ratio=5)
    shown.add_column("verdict", width=13)
    for one in rows:
        here = f"{escape(one['here'])}\n" if one["here"] else ""
        style = STYLES[one["verdict"]]
        shown.add_row(
            str(one["number"]),
            f"{escape(one['claim'])}\n[dim]{escape(one['published'])}[/dim]",
            f"{here}[dim]{escape(one['reason'])}[/dim]",
            f"[{style}]{one['verdict']}[/{style}]",
        )
    return shown


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """How many claims hold, and what to do next."""
    counts = collections.Counter(one["verdict"] for one in rows)
    lines = [", ".join(f"{counts[verdict]} {verdict}" for verdict in STYLES if counts[verdict])]
    if any("lapclip train --recipe seed" in one["reason"] for one in rows):
        return [
            *lines,
            f"Next: {typed('train --recipe seed')}, then the claims about a whole run can be measured",
        ]
    return [*lines, f"Next: {typed('claims --json')}"]
