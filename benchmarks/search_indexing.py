"""How much of the image tower's own speed does indexing reach, reading files and all?

    python benchmarks/search_indexing.py MODEL FOLDER [--images 600] [--rounds 3]

In turns in one run: the tower alone on squares that are ready in memory; reading alone, in a thread a core; and
indexing from nothing. Reading takes time of the same cores where the tower is on the CPU, so beside the share that is
reached stands the most that can be: the processor time of the tower to that of both. Medians, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
import torch

from lapclip.data.find_images import Scan
from lapclip.machine.facts import logical_cores
from lapclip.searching.index import Index
from lapclip.searching.read_images import read_image
from lapclip.searching.search_model import open_search_model
from lapclip.searching.update_index import update_index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    wanted = parser.parse_args()
    model = open_search_model(wanted.model, wanted.device)
    with tempfile.TemporaryDirectory() as name:
        photos, place = Path(name) / "photos", Path(name) / "index"
        photos.mkdir()
        listed = [path for path, _ in Scan(wanted.folder)]
        for at in range(
            wanted.images
        ):  # each file once, and again with a byte more where there are too few
            source = wanted.folder / listed[at % len(listed)]
            (photos / f"{at:06}{source.suffix}").write_bytes(
                source.read_bytes() + b"\0" * (at // len(listed))
            )
        stamps = dict(Scan(photos))

        def read() -> list[np.ndarray]:
            with ThreadPoolExecutor(logical_cores()) as pool:
                jobs = [
                    pool.submit(read_image, photos / path, stamp, model.view, lambda digest: False)
                    for path, stamp in stamps.items()
                ]
                return [square for job in jobs if (square := job.result().square) is not None]

        squares = read()

        def tower() -> None:
            for at in range(0, len(squares), model.batch):
                model.encode_pixels(np.stack(squares[at : at + model.batch]))

        def index() -> None:
            shutil.rmtree(place, ignore_errors=True)
            made = Index(place)
            update_index(made, photos, model)
            assert made.count() == len(squares)
            made.close()

        runs: dict[str, Callable[[], object]] = {"tower": tower, "reading": read, "indexing": index}
        seconds: dict[str, list[float]] = {run: [] for run in runs}
        work: dict[str, list[float]] = {run: [] for run in runs}
        for turn in range(wanted.rounds + 1):  # the first warms up
            for run, do in runs.items():
                began, busy = time.perf_counter(), sum(os.times()[:2])
                do()
                if turn:
                    seconds[run].append(time.perf_counter() - began)
                    work[run].append(sum(os.times()[:2]) - busy)
    took = {run: median(times) for run, times in seconds.items()}
    busy = {run: median(times) for run, times in work.items()}
    rates = {run: len(squares) / value for run, value in took.items()}
    share, ceiling = (
        took["tower"] / took["indexing"],
        busy["tower"] / (busy["tower"] + busy["reading"]),
    )
    for run, rate in rates.items():
        print(
            f"{run:<10}{rate:>9,.1f} pictures/s{busy[run] / len(squares) * 1e3:>9.2f} ms of processor an image"
        )
    print(
        f"indexing reaches {share:.1%} of the tower alone; both on the same cores can reach {ceiling:.1%}"
    )
    facts = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }
    told = {key: str(value) for key, value in vars(wanted).items()}
    print(
        json.dumps(
            {
                **told,
                "rates": rates,
                "processor_s": busy,
                "share": share,
                "ceiling": ceiling,
                **facts,
            }
        )
    )


if __name__ == "__main__":
    main()
