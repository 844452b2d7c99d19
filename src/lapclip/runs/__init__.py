"""The records of a run: its events, its folder, its state. No torch."""
