"""The machine: what it has, what torch can do on it, and the stopwatch."""
