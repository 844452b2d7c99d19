"""What recording a step saves, and where CPU and accelerator tie without it.

    .venv/bin/python benchmarks/recording.py

For models of 1 M to 78 M parameters at batches of 1 and 16: milliseconds of a float32 step on the accelerator with its
operations launched one by one, on the accelerator recorded, and on the CPU with the number of threads that is fastest.
It needs an accelerator that records (CUDA), and takes a minute.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace

from lapclip import compare
from lapclip.compare.fits import MEASURED, Cell, Contestant, Rung
from lapclip.machine.choose_device import available, default_threads

SECONDS = 0.4
"""Of steps, for each figure."""


def main() -> None:
    accelerator = available()[0]
    if not accelerator.records_graphs:
        sys.exit("There is no accelerator here that records steps.")
    gpu, cpu = (
        Contestant(accelerator.kind, "float32", default_threads()),
        Contestant("cpu", "float32", 0),
    )
    trains = {
        contestant: compare.contestant_settings(contestant, lambda _: None)
        for contestant in (gpu, cpu)
    }
    on_cpu: list[Cell] = []
    for rung in (MEASURED[0], Rung(160, 2), MEASURED[1], MEASURED[3]):
        for batch in (1, 16):
            times = []
            for contestant, how in ((gpu, "none"), (gpu, "graph"), (cpu, "none")):
                train = replace(trains[contestant], compile=how, batch_size=batch)
                empty = Cell(**asdict(contestant), model="", parameters=rung.parameters, work=rung.work(batch),
                             batch=batch, layers=rung.layers)  # fmt: skip
                cell = compare.measure_cell(
                    empty, rung, train, on_cpu if contestant == cpu else [], SECONDS
                )
                on_cpu += [cell] if contestant == cpu else []
                times.append(f"{cell.ms:.2f} ms" if cell.ms else f"not run ({cell.skipped})")
            print(f"{rung.parameters / 1e6:.2f} M, batch {batch}: launched {times[0]}, recorded {times[1]}, "
                  f"cpu {times[2]} with {on_cpu[-1].used_threads} threads", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
