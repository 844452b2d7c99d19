"""Watching a run from another process: in the terminal and in a browser. No torch."""
