"""`lapclip watch` in a terminal: an image that follows the runs, or plain lines where there is no terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from lapclip.text import one_line
from lapclip.watch.event_lines import line
from lapclip.watch.live_screen import Live, rendered
from lapclip.watch.screen import Pens, Typed, image, next_commands
from lapclip.watch.terminal_surface import can_draw, forgive_characters, quiet_end
from lapclip.watch.watched_runs import Watching


def watch(names: Sequence[str], typed: Typed, once: bool = False, as_json: bool = False) -> int:
    """Show the runs until q or Ctrl-C. Returns the exit status."""
    forgive_characters()
    if as_json:
        watching = Watching(names, wait=False)
        watching.refresh()
        commands = lambda look: next_commands(look, typed)  # noqa: E731
        print(json.dumps({"runs": [look.to_dict(commands) for look in watching.looks]}))
        return 0
    live = not once and can_draw()
    watching = Watching(names, wait=not once)
    with quiet_end(interrupted=0 if live else 130) as status:
        if live:
            Live(watching, typed).run()
        else:
            _snapshot(watching, typed)
            if not once:
                _follow_in_lines(watching, typed)
    return status[0]


def _snapshot(watching: Watching, typed: Typed) -> None:
    watching.refresh()
    console = Console(highlight=False)
    pens = Pens.of(console)
    for at in range(max(1, len(watching.runs))):
        # Each run in full; the table of all stands above the first.
        looks = watching.looks if at == 0 else watching.looks[at : at + 1]
        # Printed by Python itself: rich would end the process, with a fault, where the reader has gone away.
        print("\n".join(rendered(console, image(looks, 0, console.width, 2, pens, typed), console.width)))
    sys.stdout.flush()


def _follow_in_lines(watching: Watching, typed: Typed) -> None:
    """A line an evaluation, and whatever else happens, until all runs have ended."""
    while any(look.working for look in watching.looks) or not watching.runs:
        time.sleep(1.0)
        for run in watching.runs:
            was = run.look.state
            for event in run.refresh() if run.changed() else []:
                if text := line(event, run.look):
                    print(text)
            if run.look.state != was and run.look.state != "running":
                commands = f"  Next: {next_commands(run.look, typed)[0]}" if not run.look.working else ""
                print(f"{one_line(run.look.name)}: {run.look.state}{commands}")
        watching.refresh()
        sys.stdout.flush()
