"""Packing photos against OpenCLIP's CSV data set with its own transforms: photos a second, in one run, in turns.

    PYTHONPATH=src benchmarks/.venv/bin/python benchmarks/packing.py photos

The photos are repeated under many names, each with a comment of its own so that no two files are the same bytes. Our
side packs them as `lapclip train` would: `whole` is what training reads, `middle` what held-out scores are made from.
The peer reads the same files through its CsvDataset in a DataLoader, with the better of no worker and one a core, and
its own transform for training or for evaluation; captions are a constant, so that no tokenizer is timed. It does that
each epoch, we do it once. Rounds are interleaved, and each of ours starts from an empty store.

Few files flatter us: starting the peer's workers costs it about 1 ms a photo at 144 files. On a busy machine so does
our one thread more. So take many files on a quiet machine, and look at the processor time beside the rate.

A photo of 12 megapixels, made from noise and gradients, is decoded with and without `draft` as well.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openclip  # first: it makes torchvision importable beside a CPU torch
import PIL
import torch
from open_clip.transform import image_transform  # pyright: ignore[reportMissingImports]
from open_clip_train.data import CsvDataset  # pyright: ignore[reportMissingImports]
from PIL import Image
from torch.utils.data import DataLoader

from lapclip.data.decode import decode
from lapclip.data.packed_store import MIDDLE, WHOLE, pack
from lapclip.data.pixels import squeeze_image, whole_side
from lapclip.data.table import ImageFile
from lapclip.machine.facts import logical_cores, source_commit

BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("photos", type=Path, help="a folder of JPEGs")
    parser.add_argument("--count", type=int, default=1440, help="files to pack")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--sides", type=int, nargs="*", default=[112, 224], help="what the model sees, in pixels"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = repeat(options.photos, folder / "photos", options.count)
        table = folder / "captions.csv"
        table.write_text(
            "filepath\ttitle\n" + "".join(f"{path}\tphoto\n" for path in files), encoding="utf-8"
        )
        rows = [
            row
            for side in options.sides
            for row in compare(files, table, folder / "store", side, options.rounds)
        ]
    record = {
        "rows": rows,
        "draft": draft(options.rounds),
        "count": options.count,
        "rounds": options.rounds,
    }
    versions = {"torch": torch.__version__, "pillow": PIL.__version__, "commit": source_commit()}
    print(
        json.dumps({**record, **versions, "cores": logical_cores(), "system": platform.platform()})
    )


def repeat(photos: Path, folder: Path, count: int) -> list[Path]:
    """So many files, all different, all real photos."""
    folder.mkdir()
    sources = [path.read_bytes() for path in sorted(photos.glob("*.jpg"))]
    files = []
    for at in range(count):
        data, comment = sources[at % len(sources)], f"{at:08}".encode()
        # A comment segment after the start of the file: marker, length with its own two bytes, text.
        files.append(folder / f"{at:05}.jpg")
        files[-1].write_bytes(
            data[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + data[2:]
        )
    return files


def compare(files: list[Path], table: Path, store: Path, side: int, rounds: int) -> list[dict]:
    """Photos a second of both sides at one size, for training and for evaluation."""
    pictures = [ImageFile(path, path.name) for path in files]

    def ours(size: int, fit: str) -> Callable[[], None]:
        def run() -> None:
            shutil.rmtree(store, ignore_errors=True)
            made = pack(pictures, store, size, fit)
            assert len(made.usable) == len(files), made.skipped[:3]

        return run

    def theirs(training: bool, workers: int) -> Callable[[], None]:
        transform = image_transform(side, is_train=training)
        data = CsvDataset(
            str(table),
            transform,
            "filepath",
            "title",
            tokenizer=lambda texts: torch.zeros(len(texts), 77),
        )

        def run() -> None:
            loader = DataLoader(data, batch_size=BATCH, shuffle=training, num_workers=workers)
            assert sum(len(images) for images, _ in loader) == len(files)

        return run

    workers = (0, logical_cores())
    sides: dict[str, Callable[[], None]] = {
        "train ours": ours(whole_side(side), WHOLE),
        **{f"train peer {count}": theirs(True, count) for count in workers},
        "val ours": ours(side, MIDDLE),
        **{f"val peer {count}": theirs(False, count) for count in workers},
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    work: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):  # the first warms up
        for name, run in sides.items():
            began, busy = time.perf_counter(), processor_seconds()
            run()
            if turn:
                times[name].append(time.perf_counter() - began)
                work[name].append((processor_seconds() - busy) / len(files))
    rates = {name: len(files) / statistics.median(seconds) for name, seconds in times.items()}
    costs = {name: statistics.median(seconds) for name, seconds in work.items()}
    return [said(what, side, rates, times, costs, workers) for what in ("train", "val")]


def processor_seconds() -> float:
    """Seconds of processor time of this process and of the workers it had; other programs do not disturb them much."""
    return sum(os.times()[:4])


def said(
    what: str,
    side: int,
    rates: dict[str, float],
    times: dict[str, list[float]],
    costs: dict[str, float],
    workers: tuple[int, ...],
) -> dict:
    """One line for people, and the same as figures."""
    best = max(workers, key=lambda count: rates[f"{what} peer {count}"])
    mine, peer = f"{what} ours", f"{what} peer {best}"
    spreads = [
        (max(times[name]) - min(times[name])) / statistics.median(times[name])
        for name in (mine, peer)
    ]
    ratio = rates[mine] / rates[peer]
    print(
        f"packing, {what}, {side} px: {ratio:.2f}x {openclip.NAME}'s CSV data set; {rates[mine]:,.0f} photos/s against "
        f"{rates[peer]:,.0f} with {best} workers (median of {len(times[mine])}, spreads {spreads[0]:.0%} and "
        f"{spreads[1]:.0%}); processor {costs[mine] * 1e3:.2f} and {costs[peer] * 1e3:.2f} ms a photo",
        flush=True,
    )
    return {
        "what": what,
        "side": side,
        "ours_per_second": rates[mine],
        "peer_per_second": rates[peer],
        "ours_processor_ms": costs[mine] * 1e3,
        "peer_processor_ms": costs[peer] * 1e3,
        "peer": openclip.NAME,
        "peer_workers": best,
        "ratio": ratio,
    }


def draft(rounds: int) -> dict:
    """One large photo to a square of 256 pixels on one thread, with and without `draft`."""
    draw = np.random.default_rng(0)
    coarse = Image.fromarray(draw.integers(0, 256, (60, 80, 3), dtype=np.uint8)).resize(
        (4000, 3000), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(coarse).astype(np.int16) + draw.integers(
        -8, 9, (3000, 4000, 1), dtype=np.int16
    )
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    data = file.getvalue()
    times: dict[int | None, list[float]] = {None: [], 256: []}
    for _ in range(rounds):
        for short_side, seconds in times.items():
            began = time.perf_counter()
            squeeze_image(decode(data, short_side).image, 256)
            seconds.append(time.perf_counter() - began)
    plain, drafted = (statistics.median(seconds) for seconds in times.values())
    print(
        f"a photo of 12 megapixels ({len(data) / 1e6:.1f} MB) to 256 px: {drafted * 1e3:.0f} ms with draft, "
        f"{plain * 1e3:.0f} ms without, {plain / drafted:.1f}x",
        flush=True,
    )
    return {
        "plain_ms": plain * 1e3,
        "drafted_ms": drafted * 1e3,
        "ratio": plain / drafted,
        "bytes": len(data),
    }


if __name__ == "__main__":
    main()
