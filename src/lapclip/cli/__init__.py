"""The command line: one file a command, named like it. Each parses, calls and prints; `app` puts them together."""

from lapclip.cli.app import main

__all__ = ["main"]
