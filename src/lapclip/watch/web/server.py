"""The page of `lapclip watch --web`, from its start to Ctrl-C."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lapclip.web.server import Announcement, serve_until_interrupted

PORT = 8765


def serve(names: Sequence[str], host: str = "127.0.0.1", port: int | None = None) -> int:
    """Serve the page until Ctrl-C. It opens on the runs `names`. Without a port: 8765, or the next free one."""
    # Here, so that the command's help does not wait for the modules of the web server.
    from lapclip.watch.web.app import Application
    from lapclip.watch.web.feed import run_named

    names = [Path(name).name for name in names]
    absent = [name for name in names if run_named(name) is None]
    announcement = Announcement(
        command="lapclip watch --web",
        title="Watching the runs in this folder",
        shared="Who has this address can look at your runs.",
        ending="Ctrl-C ends the page; training goes on.",
        notes=[f"There is no run called {name} yet; the page shows it as soon as it begins." for name in absent],
    )
    application = Application(names)
    serve_until_interrupted(application.routed(), announcement, host, port, PORT, application.closing.set)
    return 0
