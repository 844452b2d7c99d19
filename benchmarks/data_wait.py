"""How much of a step is spent waiting for data: the share of the measured steps of a run that is `load`.

lapclip train --set steps=60 && python benchmarks/data_wait.py runs/first-run
lapclip train --recipe seed --set steps=12 && python benchmarks/data_wait.py runs/seed
"""

from __future__ import annotations

import sys
from pathlib import Path

from lapclip.runs.events import read_events


def main() -> None:
    for folder in sys.argv[1:]:
        measured = [
            event["seconds"]
            for event in read_events(Path(folder) / "events.jsonl")
            if event["type"] == "step" and event["seconds"]
        ]
        if len(measured) < 2:
            sys.exit(f"{folder} has fewer than two measured steps")
        # The first batch has nothing to hide behind.
        totals = {phase: sum(seconds[phase] for seconds in measured[1:]) for phase in measured[0]}
        whole = sum(totals.values())
        shares = ", ".join(f"{phase} {seconds / whole:.2%}" for phase, seconds in totals.items())
        print(f"{folder}: {len(measured) - 1} steps of {whole / (len(measured) - 1) * 1e3:.1f} ms: {shares}")


if __name__ == "__main__":
    main()
