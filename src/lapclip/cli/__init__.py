"""The command line: one file a command, named like it. Each parses, calls and prints; `app` puts them together."""

from __future__ import annotations

import os


def main(arguments: list[str] | None = None) -> None:
    """Run a command: the one that this process was started for, where no arguments are given."""
    if arguments is None:
        import _signal  # pyright: ignore[reportMissingImports] (built in; the import of `signal` can be interrupted)

        if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
            _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))
        from lapclip.cli import interrupts

        interrupts.install()  # before anything else is imported, which takes a while
    from lapclip.cli.app import main as run

    run(arguments)
