"""Time callables, let candidates race, and remember the winners."""
