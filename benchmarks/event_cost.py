"""What does writing a step's event cost, as a share of the step? The events of a real run are written again and timed.

.venv/bin/python benchmarks/event_cost.py runs/first-run
"""

from __future__ import annotations

import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from lapclip.runs.events import EventLog, Step, read_events


def main(run: str) -> None:
    steps = [event for event in read_events(Path(run) / "events.jsonl") if event["type"] == "step"]
    between = median(later["time"] - earlier["time"] for earlier, later in pairwise(steps))
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        log = EventLog(Path(folder) / "events.jsonl")
        for event in steps:
            step = Step(
                **{
                    name: value
                    for name, value in event.items()
                    if name not in ("v", "type", "time")
                }
            )
            began = time.perf_counter()
            log.append(step)
            costs.append(time.perf_counter() - began)
        log.close()
    cost = median(costs)
    print(
        f"{len(steps)} events: {cost * 1e6:.0f} us each, {cost / between:.3%} of a step of {between * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main(sys.argv[1])
