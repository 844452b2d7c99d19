"""The command line: one file a command, named like it. Each parses, calls and prints; `app` puts them together."""

from __future__ import annotations


def main(arguments: list[str] | None = None) -> None:
    """Run a command: the one that this process was started for, where no arguments are given."""
    if arguments is None:
        from lapclip.cli import interrupts

        interrupts.install()  # before anything else is imported, which takes a while
    from lapclip.cli.app import main as run

    run(arguments)
