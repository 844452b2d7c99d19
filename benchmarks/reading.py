"""How long it takes to read a large table and a large shard, and how much memory.

    python benchmarks/reading.py

The table has a million rows for 20,000 images, of which two thirds are there; the shard has 10,000 images with
captions. Images of the table are empty files: reading a source opens none of them.
"""

from __future__ import annotations

import csv
import io
import json
import platform
import tarfile
import tempfile
import time
from pathlib import Path

from lapclip.config import DataConfig
from lapclip.data.sources import read_table
from lapclip.machine.facts import source_commit
from lapclip.machine.system_memory import peak_memory_bytes

ROWS, IMAGES, MEMBERS = 1_000_000, 20_000, 10_000


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = [
            timed("a table of a million rows", table(folder / "table")),
            timed("a shard", shard(folder / "s.tar")),
        ]
    print(json.dumps({"rows": found, "system": platform.platform(), "commit": source_commit()}))


def table(folder: Path) -> Path:
    folder.mkdir()
    for at in range(0, IMAGES, 3):
        for other in (at, at + 1):
            (folder / f"{other:05}.jpg").touch()
    with open(folder / "captions.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["filepath", "caption"])
        rows.writerows(
            [f"{at % IMAGES:05}.jpg", f"an image, seen for the {at}th time"] for at in range(ROWS)
        )
    return folder


def shard(path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        for at in range(MEMBERS):
            for ending, data in (("jpg", bytes(30_000)), ("txt", f"image number {at}".encode())):
                member = tarfile.TarInfo(f"{at:06}.{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path


def timed(what: str, source: Path) -> dict:
    began = time.perf_counter()
    read = read_table(DataConfig(source=str(source)))
    seconds = time.perf_counter() - began
    print(
        f"{what}: {read.records:,} records in {seconds:.1f} s, {peak_memory_bytes() / 1e9:.2f} GB at most so far"
    )
    return {"what": what, "records": read.records, "pictures": len(read.rows), "seconds": seconds}


if __name__ == "__main__":
    main()
