"""How much of the image tower's own rate does `lapclip embed` reach, from JPEG files to the finished file?

    python benchmarks/embedding_rate.py flickr8k/images [--model vit-b-32] [--images 1000] [--rounds 3]

A model is a shape with random weights, or what `--model` of `lapclip embed` takes. In turns in one run, with the same
threads: the tower alone on squares that are ready in memory, in batches as `lapclip embed` takes them; and the whole
command, of which the reading of model and folder is told apart: it takes seconds, however many images there are. Where
the tower is on the CPU, reading takes time of the same cores: the processor time an image, of both, shows how much.
Medians, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from lapclip.commands.embed import CPU_BATCH, Callbacks, EmbedOptions, FolderRows, embed
from lapclip.data.tokenizers import clip_tokenizer
from lapclip.embedder import Embedder, load
from lapclip.machine.cpu import Cpu
from lapclip.machine.facts import logical_cores, source_commit
from lapclip.machine.other_programs import read_load
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.searching.read_images import made_ahead, read_stored
from lapclip.training.checkpoint import save_model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="vit-b-32")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=logical_cores())
    parser.add_argument("--device", default="cpu")
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        photos, out, path = here / "photos", here / "vectors.npy", wanted.model
        photos.mkdir()
        every = FolderRows(wanted.folder)
        for at in range(wanted.images):  # again where there are too few
            source = every[at % len(every)].image.path
            (photos / f"{at:06}{source.suffix}").write_bytes(source.read_bytes())
        if wanted.model in SHAPES:
            path = str(here / "model")
            save_model(Embedder(CLIP(SHAPES[wanted.model]), clip_tokenizer(), Cpu()), Path(path))
        model, rows = load(path, wanted.device), FolderRows(photos)
        on_cpu = not isinstance(model, Embedder) or model.device.is_cpu
        batch = CPU_BATCH if on_cpu else model.batch
        reading = made_ahead(
            lambda at: read_stored(rows[at].image, model.view),
            range(len(rows)),
            64,
            logical_cores(),
        )
        squares = [read.square for read in reading if read.square is not None]

        def tower() -> tuple[float, float]:
            began = time.perf_counter()
            for at in range(0, len(squares), batch):
                model.encode_pixels(np.stack(squares[at : at + batch]))
            took = time.perf_counter() - began
            return took, took

        def command() -> tuple[float, float]:
            """Seconds from the first image to the last, and of all, from the model's reading to the written file."""
            ticks: list[float] = []
            out.unlink(missing_ok=True)
            request, count = (
                EmbedOptions(str(photos), out, path, wanted.device),
                lambda *_: ticks.append(time.perf_counter()),
            )
            began = time.perf_counter()
            result = embed(request, Callbacks(counting=count))
            assert result["rows"] == result["embedded"] == len(squares)
            return ticks[-1] - ticks[0], time.perf_counter() - began

        runs = {"tower": tower, "embed": command}
        took: dict[str, list[tuple[float, float]]] = {run: [] for run in runs}
        work: dict[str, list[float]] = {run: [] for run in runs}
        for turn in range(wanted.rounds + 1):  # the first warms up
            for run, do in runs.items():
                busy = sum(os.times()[:2])
                seconds = do()
                if turn:
                    took[run].append(seconds)
                    work[run].append(sum(os.times()[:2]) - busy)
        vectors = np.load(out)["image"]
        assert (
            float(np.abs(vectors[:batch] - model.encode_pixels(np.stack(squares[:batch]))).max())
            < 1e-5
        )
    medians = {run: [median(column) for column in zip(*took[run], strict=True)] for run in runs}
    busy = {run: median(work[run]) / len(squares) * 1e3 for run in runs}
    share, whole = (medians["tower"][0] / seconds for seconds in medians["embed"])
    pairs = [one[0] / other[0] for one, other in zip(took["tower"], took["embed"], strict=True)]
    for run, (seconds, _) in medians.items():
        print(
            f"{run:<8}{len(squares) / seconds:>9,.1f} images/s{busy[run]:>9.2f} ms of processor an image"
        )
    print(
        f"embed reaches {share:.1%} of the tower alone (turns from {min(pairs):.1%} to {max(pairs):.1%});"
    )
    print(
        f"with the reading of model and folder and the writing of the file {whole:.1%}, over {len(squares):,} images"
    )
    facts = {
        "torch": torch.__version__,
        "batch": batch,
        "cores": logical_cores(),
        "other_load": read_load(),
    }
    told = {key: str(value) for key, value in vars(wanted).items()}
    found = {
        "share": share,
        "whole": whole,
        "turns": pairs,
        "processor_ms": busy,
        "seconds": medians,
    }
    print(
        json.dumps(
            {**told, **found, **facts, "system": platform.platform(), "commit": source_commit()}
        )
    )


if __name__ == "__main__":
    main()
