"""`lapclip watch`."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from lapclip.cli.output import Common, typed
from lapclip.text import to_json


def watch(
    *runs: str,
    web: Annotated[bool, Parameter(negative="")] = False,
    port: int | None = None,
    host: str = "127.0.0.1",
    once: Annotated[bool, Parameter(negative="")] = False,
    common: Common | None = None,
) -> int:
    """Follow runs as they work: progress, time left, learning, the machine, and what is wrong. Before, during, after.

    Reads the runs' files and nothing else, so it cannot disturb a run. j, k or tab change the run in focus, space and b
    scroll, q quits. In a pipe it prints how things stand, and then a line for each evaluation.

    For example:

    - `lapclip watch`
    - `lapclip watch first-run first-run-2`
    - `lapclip watch --web`
    - `lapclip watch first-run --once`

    Parameters
    ----------
    runs
        Names of runs; without one, those that are running, else the newest. Example: lapclip watch first-run
    web
        Show it in a browser instead, at an address that is printed. Example: lapclip watch --web
    port
        Where the page is served; without it, 8765 or the next free one. Example: lapclip watch --web --port 9000
    host
        Address the page is served at; without it, only this computer reaches it. The address that is printed holds a
        token: who has it can look. Example: lapclip watch --web --host 0.0.0.0
    once
        Print how things stand and end. Example: lapclip watch --once
    """
    if web:
        from lapclip.watch.web import serve

        if common and common.json:
            return serve(
                runs,
                host,
                port,
                output=sys.stderr,
                ready=lambda url: print(to_json({"url": url}), flush=True),
            )
        return serve(runs, host, port)
    from lapclip.watch import terminal

    return terminal.watch(runs, typed, once=once, as_json=bool(common and common.json))
