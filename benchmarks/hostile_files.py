"""What do damaged and hostile files do? Real files of every format that lapclip reads, changed at random and read.

    .venv/bin/python benchmarks/hostile_files.py [--files 1000] [--format tar] [--case 17] [--seed 0] [--jobs 2]

Each file must be read, or give rows that are skipped, or an error of ours; within a second or two, and with at most
1.2 GB of memory more than the process had at rest, which the largest image that is decoded takes (89 million pixels).
Processes of their own read the files, many each, with a limit on their memory where the system has one; one that dies
or does not answer counts against the file it was given, and another goes on.
`--format NAME --case N` repeats one file in this process, with its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

MOST_MEMORY = 1200
"""MB more than at rest."""
MOST_ADDRESSES = 2200
"""MB of addresses more than at rest, where the system can limit them: more than memory, because not all are used."""
MOST_SECONDS = 10.0


# -- real files --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """Files of one format, and how lapclip reads them."""

    originals: Callable[[], list[bytes]]
    read: Callable[[Path, bytes], bool]
    """Puts the bytes where they belong in an empty folder and reads them. False where rows were skipped."""
    named: bool = False
    """Whether the name of a file in a folder stands before its bytes, up to a zero; it stays as it is."""


@cache
def drawings() -> Path:
    """Return a folder of sixteen small images, made once."""
    from PIL import Image

    folder = Path(tempfile.mkdtemp())
    draw = np.random.default_rng(0)
    for name, *_ in ROWS:
        pixels = draw.integers(0, 256, (6, 8, 3)).astype(np.uint8)
        Image.fromarray(pixels).resize((64, 48)).save(folder / name)
    return folder


def drawing() -> Any:
    from PIL import Image

    return Image.open(drawings() / "00.png")


def saved(image: Any, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def images() -> list[bytes]:
    import numpy as np
    from PIL import Image, ImageCms

    image = drawing()
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 16)
    made = [
        saved(image, "JPEG", exif=exif, icc_profile=profile),
        saved(image, "JPEG", progressive=True),
        saved(image.convert("CMYK"), "JPEG"),
        saved(image, "PNG", icc_profile=profile),
        saved(image.convert("RGBA"), "PNG"),
        saved(image.quantize(16), "PNG"),
        saved(deep, "PNG"),
        saved(
            image.quantize(16), "GIF", save_all=True, append_images=[image.rotate(90).quantize(16)]
        ),
        saved(image, "WEBP"),
        saved(image.convert("RGBA"), "WEBP", lossless=True),
        saved(image, "BMP"),
        saved(image, "TIFF", compression="tiff_lzw"),
        saved(image, "TIFF", compression="tiff_adobe_deflate", exif=exif),
        saved(Image.fromarray(np.asarray(image.convert("L")).astype(np.float32) / 255), "TIFF"),
        saved(image.convert("LAB"), "TIFF"),
        saved(image, "PPM"),
        saved(image, "TGA"),
        saved(image, "JPEG2000"),
    ]
    for form in ("AVIF", "HEIF"):
        try:
            if form == "HEIF":
                import pillow_heif  # pyright: ignore[reportMissingImports]

                pillow_heif.register_heif_opener()
            made.append(saved(image, form))
        except (ImportError, KeyError, OSError):
            continue
    return made


def read_image(folder: Path, data: bytes) -> bool:
    from lapclip.data.packed_store import MIDDLE, prepare
    from lapclip.data.pixels import View
    from lapclip.data.table import ImageFile

    path = folder / "image.jpg"
    path.write_bytes(data)
    prepare(ImageFile(path, path.name).read(), View(32), MIDDLE)
    return True


ROWS = [
    (f"{number:02}.png", f'a thing, number {number}, and "more" of it', "train")
    for number in range(16)
]


def tables() -> list[bytes]:
    import csv

    made = []
    for delimiter in ",\t;":
        text = io.StringIO()
        csv.writer(text, delimiter=delimiter).writerows([("image", "caption", "split"), *ROWS])
        made.append(text.getvalue().encode("utf-16" if delimiter == ";" else "utf-8"))
    return made


def json_files() -> list[bytes]:
    coco = {
        "images": [{"id": at, "file_name": name} for at, (name, *_) in enumerate(ROWS)],
        "annotations": [{"image_id": at, "caption": row[1]} for at, row in enumerate(ROWS)],
    }
    karpathy = {
        "images": [{"filename": n, "split": s, "sentences": [{"raw": c}]} for n, c, s in ROWS]
    }
    listed = [{"file_name": name, "text": caption, "split": split} for name, caption, split in ROWS]
    return [
        json.dumps(made).encode()
        for made in (coco, karpathy, listed, {name: c for name, c, _ in ROWS})
    ]


def json_lines() -> list[bytes]:
    return [
        "\n".join(json.dumps({"file_name": n, "text": c, "split": s}) for n, c, s in ROWS).encode()
    ]


def tars() -> list[bytes]:
    made = []
    for form in (tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=form) as archive:
            for name, caption, _ in ROWS[:6]:
                long = name.removesuffix(".png") + (
                    "é" * 120 if form != tarfile.USTAR_FORMAT else ""
                )
                texts = {"txt": caption.encode(), "json": json.dumps({"caption": caption}).encode()}
                for ending, data in {
                    "png": (drawings() / name).read_bytes(),
                    **texts,
                }.items():
                    member = tarfile.TarInfo(f"{long}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        made.append(file.getvalue())
    return made


def parquets() -> list[bytes]:
    import pyarrow as arrow
    from pyarrow import parquet

    cells = [{"bytes": (drawings() / name).read_bytes(), "path": name} for name, *_ in ROWS]
    whole = arrow.table(
        {"image": cells, "caption": [row[1] for row in ROWS], "split": [row[2] for row in ROWS]}
    )
    named = arrow.table({"file_name": [row[0] for row in ROWS], "text": [row[1] for row in ROWS]})
    made = []
    for table, rows, packed in ((whole, 5, "snappy"), (whole, 100, "zstd"), (named, 100, "none")):
        file = io.BytesIO()
        parquet.write_table(table, file, row_group_size=rows, compression=packed)
        made.append(file.getvalue())
    return made


def read_data(name: str) -> Callable[[Path, bytes], bool]:
    def read(folder: Path, data: bytes) -> bool:
        from lapclip.config import DataConfig
        from lapclip.data.packed_store import MIDDLE, prepare
        from lapclip.data.pixels import View
        from lapclip.data.sources import read_table
        from lapclip.errors import DataError

        for image in drawings().glob("*.png"):
            shutil.copy(image, folder)
        (folder / name).write_bytes(data)
        table = read_table(DataConfig(source=str(folder / name)))
        clean = not table.skipped
        for row in table.rows[:4]:
            try:
                prepare(row.image.read(), View(32), MIDDLE)
            except (OSError, DataError, MemoryError):  # what training skips
                clean = False
        return clean

    return read


def clip_model() -> Any:
    """A small model with CLIP's own tokenizer, as a file of weights alone must have it."""
    from dataclasses import replace

    from lapclip.data.tokenizers import clip_tokenizer
    from lapclip.embedder import Embedder
    from lapclip.machine.cpu import Cpu
    from lapclip.model.clip import CLIP
    from lapclip.model.shapes import SHAPES

    sizes = {
        "image_width": 16,
        "text_width": 8,
        "image_heads": 1,
        "text_heads": 1,
        "embedding": 8,
        "text_layers": 1,
    }
    tokenizer = clip_tokenizer()
    shape = replace(SHAPES["tiny"], **sizes, image_layers=1, vocabulary=tokenizer.vocabulary)
    return Embedder(CLIP(shape), tokenizer, Cpu())


def safetensors() -> list[bytes]:
    from safetensors.torch import save

    from lapclip.weights import openai

    return [save(openai.LAYOUT.to_theirs(clip_model().model.state_dict()))]


def torch_files() -> list[bytes]:
    import torch

    from lapclip.weights import openai

    tensors = openai.LAYOUT.to_theirs(clip_model().model.state_dict())
    made = []
    for content, options in ((tensors, {}), ({"state_dict": tensors, "epoch": 3}, {}),
                             (tensors, {"_use_new_zipfile_serialization": False})):  # fmt: skip
        file = io.BytesIO()
        torch.save(content, file, **options)
        made.append(file.getvalue())
    return made


def read_weights(name: str) -> Callable[[Path, bytes], bool]:
    def read(folder: Path, data: bytes) -> bool:
        from lapclip.embedder import load_torch

        (folder / name).write_bytes(data)
        load_torch(folder / name)
        return True

    return read


def files_in(folder: Path) -> list[bytes]:
    """The small files of a folder, each with its name before it: what is changed may be any of them."""
    found = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.stat().st_size < 3_000_000
    ]
    return [
        f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() for path in found
    ]


def put(folder: Path, original: Path, data: bytes) -> Path:
    """A copy of a folder in which one file, which its name before the bytes says, is another."""
    name, _, content = data.partition(b"\0")
    there = folder / "copy"
    shutil.copytree(original, there)
    (there / os.fsdecode(name)).write_bytes(content)
    return there


@cache
def a_run() -> Path:
    """Return the folder of a run of two steps, made once."""
    from lapclip.commands.train import train
    from lapclip.runs.folder import TrainRequest

    settings = ["model.name=tiny", "data.train_pairs=64", "train.batch_size=16", "train.steps=2"]
    settings += ["train.device=cpu", "train.dtype=float32", "train.word_weight=0.0"]
    settings += ["work.keep_awake=false"]
    folder = Path(tempfile.mkdtemp())
    with contextlib.chdir(folder):
        train(TrainRequest("first-run", tuple(settings)), name="made")
    return folder / "runs" / "made"


@cache
def onnx_folder() -> Path:
    """Return the folder of an export of that run, made once."""
    from lapclip.commands.export import export

    folder = a_run().parent.parent
    with contextlib.chdir(folder):
        export("made", "onnx")
    return a_run() / "exported" / "onnx"


def a_model() -> Path:
    return a_run() / "model"


def read_onnx(folder: Path, data: bytes) -> bool:
    import lapclip

    model = lapclip.load(put(folder, onnx_folder(), data))
    model.encode_text(["a red cat"])
    return True


def read_model_folder(folder: Path, data: bytes) -> bool:
    from lapclip.embedder import load_torch

    load_torch(put(folder, a_model(), data)).encode_text(["a red cat"])
    return True


def read_run(folder: Path, data: bytes) -> bool:
    from lapclip.runs.folder import Run
    from lapclip.which_model import which_model

    there = folder / "copy"
    there.mkdir()
    (there / "run.toml").write_bytes(data)
    run = Run(there)
    run.read_settings()
    _ = (run.recipe, run.data_source(), run.state)
    shutil.copytree(a_model(), there / "model")
    _ = which_model(str(there)).config
    return True


def recipes() -> list[bytes]:
    from lapclip.config import RECIPES

    return [path.read_bytes() for path in sorted(RECIPES.glob("*.toml"))]


def read_a_recipe(folder: Path, data: bytes) -> bool:
    from lapclip.config import build_config, read_recipe
    from lapclip.model.shapes import SHAPES

    (folder / "own.toml").write_bytes(data)
    build_config([read_recipe(str(folder / "own.toml"))], SHAPES)
    return True


@cache
def an_index() -> Path:
    """Return the folder of an index of eight images, made once."""
    from lapclip.searching.index import Entry, Index

    folder = Path(tempfile.mkdtemp()) / "index"
    index = Index(folder)
    index.open()
    index.begin("model", 8)
    rows = index.append(np.eye(8, dtype=np.float32))
    index.put(
        Entry(0, f"{row}.png", 100, 1, digest=f"{row:032x}", width=64, height=64, row=row)
        for row in rows
    )
    index.close()
    return folder


def read_index(folder: Path, data: bytes) -> bool:
    from lapclip.searching.index import Index

    index = Index(put(folder, an_index(), data))
    try:
        thrown_away = index.open()
        made_by = index.about("model") or ""
        index.begin(made_by, int(index.about("width") or 8))
        index.snapshot(made_by)
        index.entries()
        index.count()
    finally:
        index.close()
    return not thrown_away


def read_checkpoint(folder: Path, data: bytes) -> bool:
    from lapclip.config import SECTIONS, Layer, build_config
    from lapclip.machine.cpu import Cpu
    from lapclip.model.clip import CLIP
    from lapclip.model.freezing import freeze
    from lapclip.model.shapes import SHAPES
    from lapclip.runs.folder import Run
    from lapclip.training.checkpoint import load_newest
    from lapclip.training.optimizer import make_optimizer

    there = put(folder, a_run() / "checkpoints", data)
    settings = Run(a_run()).read_settings()
    config = build_config(
        [Layer("run.toml", {name: settings.get(name, {}) for name in SECTIONS})], SHAPES
    )
    model = CLIP(config.model)
    freeze(model, config.train)
    _, damaged = load_newest(there, model, make_optimizer(model, config.train, Cpu()))
    return not damaged


FORMATS = {
    "images": Format(images, read_image),
    "csv": Format(tables, read_data("captions.csv")),
    "json": Format(json_files, read_data("captions.json")),
    "json lines": Format(json_lines, read_data("metadata.jsonl")),
    "tar": Format(tars, read_data("shard.tar")),
    "parquet": Format(parquets, read_data("data.parquet")),
    "safetensors": Format(safetensors, read_weights("weights.safetensors")),
    "pt": Format(torch_files, read_weights("weights.pt")),
    "model folder": Format(lambda: files_in(a_model()), read_model_folder, named=True),
    "onnx folder": Format(lambda: files_in(onnx_folder()), read_onnx, named=True),
    "run.toml": Format(lambda: [(a_run() / "run.toml").read_bytes()], read_run),
    "recipe": Format(recipes, read_a_recipe),
    "search index": Format(lambda: files_in(an_index()), read_index, named=True),
    "checkpoint": Format(lambda: files_in(a_run() / "checkpoints"), read_checkpoint, named=True),
}


# -- changing them -----------------------------------------------------------------------------------------------------

LARGE = (2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, 10**9, 65535, 0)
NESTED = (b"[", b'{"a":', b"(", b"a.", b"[[", b"{a=", b"<")


def flipped(data: bytearray, chance: random.Random, other: bytes) -> None:
    for _ in range(chance.choice((1, 1, 2, 5, 40))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def cut(data: bytearray, chance: random.Random, _: bytes) -> None:
    del data[chance.randrange(len(data)) :]


def huge(data: bytearray, chance: random.Random, _: bytes) -> None:
    """A number in bytes that claims a size, mostly where headers are: at the beginning or the end."""
    size, number = chance.choice((2, 4, 8)), chance.choice(LARGE)
    where = chance.choice((len(data), 64, 600, -300))
    at = (
        chance.randrange(min(where, len(data)))
        if where > 0
        else max(0, len(data) + chance.randrange(where, 0))
    )
    data[at : at + size] = (number % 2 ** (8 * size)).to_bytes(
        size, chance.choice(("little", "big"))
    )


def huge_text(data: bytearray, chance: random.Random, other: bytes) -> None:
    """A number in digits that claims a size."""
    starts = [
        at
        for at in range(len(data))
        if chr(data[at]).isdigit() and (not at or not chr(data[at - 1]).isdigit())
    ]
    if not starts:
        return huge(data, chance, other)
    at = chance.choice(starts)
    end = at
    while end < len(data) and chr(data[end]).isdigit():
        end += 1
    data[at:end] = chance.choice(
        (b"9999999999", b"1" * 5000, b"-1", b"0", b"1e308", b"NaN", b"null", b'"x"', b"[]")
    )
    return None


def spliced(data: bytearray, chance: random.Random, other: bytes) -> None:
    """A part of another file, over or between its own."""
    start, length = chance.randrange(len(other)), chance.choice((1, 8, 100, 4096))
    at = chance.randrange(len(data))
    data[at : at + chance.choice((0, length))] = other[start : start + length]


def repeated(data: bytearray, chance: random.Random, _: bytes) -> None:
    start, length = chance.randrange(len(data)), chance.choice((1, 3, 20, 600))
    part = bytes(data[start : start + length])
    data[start:start] = part * chance.choice((1, 10, 1 + 300_000 // max(1, len(part))))


def nested(data: bytearray, chance: random.Random, _: bytes) -> None:
    at = chance.choice((0, chance.randrange(len(data))))
    data[at:at] = chance.choice(NESTED) * chance.choice((50, 2000, 100_000))


def blank(data: bytearray, chance: random.Random, _: bytes) -> None:
    at, length = chance.randrange(len(data)), chance.choice((1, 16, 512, 5000))
    length = min(length, len(data) - at)
    data[at : at + length] = bytes([chance.choice((0, 255, 32))]) * length


CHANGES = (flipped, cut, huge, huge_text, spliced, repeated, nested, blank)


def changed(originals: list[bytes], name: str, case: int, seed: int) -> bytes:
    """The file of that number: the same each time."""
    chance = random.Random(f"{seed} {name} {case}")
    original, other = chance.choice(originals), chance.choice(originals)
    kept = original.index(b"\0") + 1 if FORMATS[name].named else 0
    data = bytearray(original[kept:])
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if data:
            chance.choice(CHANGES)(data, chance, other)
    return original[:kept] + data


# -- reading them, in a process of its own -----------------------------------------------------------------------------


def memory_now() -> float:
    """MB that the process has had at most since `forget_peak`."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1e3
    except OSError:
        pass
    try:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
            1e6 if sys.platform == "darwin" else 1e3
        )
    except ImportError:
        import psutil

        return psutil.Process().memory_info().peak_wset / 1e6  # pyright: ignore[reportAttributeAccessIssue]


def forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # then the peak is that of all files so far


def limit_addresses() -> None:
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MOST_ADDRESSES * 10**6
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except (ImportError, OSError, ValueError):
        pass


def read_one(form: Format, data: bytes) -> tuple[str, str]:
    """How it ended, and with which error."""
    from lapclip.errors import LapclipError

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            return ("read" if form.read(Path(folder), data) else "skipped"), ""
        except LapclipError as error:
            return "refused", error.message
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            place = traceback.extract_tb(error.__traceback__)
            ours = [at for at in place if "lapclip" in at.filename or "hostile" in at.filename]
            return (
                "failed",
                f"{type(error).__name__}: {str(error)[:150]} at {ours[-1].filename}:{ours[-1].lineno}",
            )


def serve(name: str, seed: int) -> None:
    """Numbers of files come in, one line of JSON goes out for each."""
    form = FORMATS[name]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    originals = form.originals()
    ended = [
        read_one(form, data) for data in originals
    ]  # everything is imported, and the real files are fine
    assert all(how in ("read", "skipped") for how, _ in ended), ended
    limit_addresses()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        data = changed(originals, name, int(line), seed)
        forget_peak()
        before, began = memory_now(), time.perf_counter()
        how, why = read_one(form, data)
        seconds, memory = time.perf_counter() - began, memory_now() - before
        print(json.dumps([int(line), how, why, seconds, memory]), file=answers, flush=True)


@dataclass
class Tally:
    """What became of the files of one format."""

    ended: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    memory: float = 0.0
    seconds: float = 0.0


class Reader:
    """A process that reads files, and another one where it dies."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self.process: subprocess.Popen[str] | None = None
        self.answers: queue.Queue[str] = queue.Queue()

    def ask(self, case: int) -> tuple[str, str, float, float]:
        if self.process is None:
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            print(case, file=self.process.stdin, flush=True)
            answer = self.answers.get(timeout=MOST_SECONDS + 5)
        except (queue.Empty, OSError):
            answer = None
        if not answer:
            code = self.process.poll()
            self.close()
            return (
                "failed",
                "it took too long" if code is None else f"the process died with {code}",
                MOST_SECONDS,
                0,
            )
        _, how, why, seconds, memory = json.loads(answer)
        return how, why, seconds, memory

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _start(self) -> None:
        command = [sys.executable, __file__, "--serve", self.name, "--seed", str(self.seed)]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        pipes: Any = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
        }
        self.process = subprocess.Popen(command, **pipes, text=True, env=environment)
        self.answers = queue.Queue()
        threading.Thread(
            target=self._listen, args=(self.process, self.answers), daemon=True
        ).start()
        if self.answers.get(timeout=300).strip() != "ready":
            raise RuntimeError(
                f"Real files cannot be read: --format '{self.name}' --case -1 says why."
            )

    @staticmethod
    def _listen(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answers.put(line)
        answers.put("")


def attack(name: str, cases: Iterator[int] | range, seed: int) -> Tally:
    """Read files of a format, by their numbers."""
    tally, reader = Tally(), Reader(name, seed)
    try:
        for case in cases:
            how, why, seconds, memory = reader.ask(case)
            tally.memory, tally.seconds = max(tally.memory, memory), max(tally.seconds, seconds)
            if memory > MOST_MEMORY or seconds > MOST_SECONDS:
                how, why = "failed", why or f"{memory:,.0f} MB, {seconds:.1f} s"
            tally.ended[how] = tally.ended.get(how, 0) + 1
            if how == "failed":
                tally.failures.append(f"--format '{name}' --case {case}: {why}")
    finally:
        reader.close()
    return tally


def joined(tallies: list[Tally]) -> Tally:
    whole = Tally()
    for one in tallies:
        for how, count in one.ended.items():
            whole.ended[how] = whole.ended.get(how, 0) + count
        whole.failures += one.failures
        whole.memory, whole.seconds = max(whole.memory, one.memory), max(whole.seconds, one.seconds)
    return whole


def repeat(name: str, case: int, seed: int) -> None:
    """One file, here; below zero all real ones."""
    form = FORMATS[name]
    originals = form.originals()
    for data in originals if case < 0 else [changed(originals, name, case, seed)]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            began, before = time.perf_counter(), memory_now()
            try:
                print("read" if form.read(Path(folder), data) else "skipped")
            except Exception:
                traceback.print_exc()
            print(
                f"{time.perf_counter() - began:.2f} s, {memory_now() - before:,.0f} MB, {len(data):,} bytes"
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=1000, help="of each format")
    parser.add_argument("--first", type=int, default=0, help="the number of the first file")
    parser.add_argument("--format", choices=FORMATS, help="only this one")
    parser.add_argument("--case", type=int, help="only the file of this number, in this process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.seed)
        return 0
    if options.case is not None:
        repeat(options.format, options.case, options.seed)
        return 0
    names = [options.format] if options.format else list(FORMATS)
    parts = max(1, options.jobs // len(names))
    print(
        f"{'format':<14}{'files':>8}{'refused':>9}{'skipped':>9}{'read':>8}{'most MB':>9}{'most s':>8}{'failed':>8}"
    )
    failures: list[str] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        cases = range(options.first, options.first + options.files)
        waiting = {
            name: [
                pool.submit(attack, name, cases[part::parts], options.seed) for part in range(parts)
            ]
            for name in names
        }
        for name, done in waiting.items():
            tally = joined([one.result() for one in done])
            failures += tally.failures
            counts = [tally.ended.get(how, 0) for how in ("refused", "skipped", "read")]
            print(
                f"{name:<14}{sum(tally.ended.values()):>8,}{counts[0]:>9,}{counts[1]:>9,}{counts[2]:>8,}"
                f"{tally.memory:>9,.0f}{tally.seconds:>8.1f}{len(tally.failures):>8,}",
                flush=True,
            )
    print("\n".join(failures[:200]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
