"""Turn a command into an export: which model, which pairs it is checked on, and the check before it is called done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.config import DataConfig
from lapclip.data.dataset import Pairs
from lapclip.data.loading import SCENES, TRAIN, load_data, load_to_score
from lapclip.data.pixels import View
from lapclip.data.sources import read_table
from lapclip.data.splits import assign_splits
from lapclip.embedder import Embedder, Encoder, load
from lapclip.errors import DataError
from lapclip.exporting import coreml, coreml_structure, readme
from lapclip.exporting import onnx_towers as towers_in_onnx
from lapclip.exporting import published_formats as published
from lapclip.exporting.check import (
    LEAST_COSINE,
    MOST_LOST,
    Embedded,
    both_towers,
    compare,
    latencies,
    recall_lost,
    typical_inputs,
)
from lapclip.exporting.description import EXAMPLES, describe, write_description, write_tokenizers
from lapclip.exporting.engine import open_export
from lapclip.exporting.export_folder import EXPORTED, check_free, written_whole
from lapclip.exporting.required_packages import needs
from lapclip.machine.timing import busy_cores
from lapclip.progress import DataProgress, Progress
from lapclip.seeding import generator
from lapclip.which_model import WhichModel, which_model

MOST, TRAINING = 1000, 256
"""Held-out images that an export is checked on, and training images that int8 is chosen and scaled with."""


@dataclass(frozen=True)
class Shown:
    """How what goes on is told."""

    tell: Callable[[str], None] = lambda _: None
    data: DataProgress | None = None
    counting: Callable[[str], Progress] = lambda _: lambda done, total: None


@dataclass(frozen=True)
class Checked:
    """The pairs of a check: held out, and of training."""

    held_out: Pairs
    training: Pairs
    words: str
    notes: tuple[str, ...] = ()


def export(
    model: str | None, to: str, out: Path | None = None, *, force: bool = False, shown: Shown = Shown()
) -> dict[str, Any]:
    """Write a run's model, or any other that can be loaded, as a folder, and check it."""
    subject = which_model(model)
    place = out or default_place(subject, to)
    check_free(place, force=force)  # before what takes time
    if to.startswith("onnx"):
        needs("onnx", "onnxscript", "onnxruntime")
    if to.startswith("coreml"):
        needs("coremltools")
    shown.tell("reading the model")
    if to in published.FORMATS:
        made = published.export(str(subject.path), to, place, force=force)
        embedder = load(subject.path)
        pairs = open_pairs(subject, embedder.view, shown.data)
        check = _check(embedder, load(place), pairs, shown)
        sizes = _sizes(embedder, [path for path in map(Path, made["files"]) if path.suffix == ".safetensors"])
        return {**made, "out": str(place), **check, **sizes, "notes": [*made["notes"], *pairs.notes], "towers": {}}
    embedder = load(subject.path)
    pairs = open_pairs(subject, embedder.view, shown.data)
    write = write_onnx if to.startswith("onnx") else write_coreml
    with written_whole(place, force=force) as folder:
        result = write(embedder, to, folder, pairs, shown)
    files = sorted(path for path in place.iterdir())
    return {
        "model": str(subject.path),
        "out": str(place),
        "files": [str(path) for path in files],
        "bytes": sum(map(_bytes, files)),
        **result,
    }


def default_place(subject: WhichModel, to: str) -> Path:
    """Beside the run that it came from; for another model, in the current folder."""
    if subject.run:
        return subject.run.path / EXPORTED / to
    return Path(f"{subject.path.stem if subject.path.is_file() else subject.path.name}-{to}")


def write_onnx(embedder: Embedder, to: str, folder: Path, pairs: Checked, shown: Shown) -> dict[str, Any]:
    """Fill a folder for ONNX Runtime, and the account of it."""
    small = to == "onnx-int8"
    about_towers = towers_in_onnx.interface(embedder)
    notes = write_tokenizers(folder, embedder.tokenizer)
    if small:
        chosen = towers_in_onnx.write_small(embedder, folder, pairs.training, shown.tell)
    else:
        towers_in_onnx.write_float(embedder, folder, shown.tell)
        chosen = {tower: {"numbers": "float32"} for tower in about_towers}
    about = describe(embedder, to, {tower: {**about_towers[tower], **chosen[tower]} for tower in about_towers})
    write_description(folder, about)
    before = Embedded.by(embedder, pairs.held_out, shown.counting("embedding held-out pairs with torch"))
    exported = open_export(folder)
    after = Embedded.by(exported, pairs.held_out, shown.counting("embedding held-out pairs with ONNX Runtime"))
    if small and _keep_what_loses(before, after, folder, about):
        write_description(folder, about)
        exported = open_export(folder)
        after = Embedded.by(exported, pairs.held_out, shown.counting("embedding held-out pairs again"))
    shutil.rmtree(folder / "tried", ignore_errors=True)
    check = _compared(embedder, exported, before, after, pairs, shown)
    sizes = _sizes(embedder, [folder / tower["file"] for tower in about["towers"].values()])
    notes += [tower["why"] for tower in about["towers"].values() if "why" in tower]
    result = {"format": to, **check, **sizes, "towers": about["towers"], "notes": [*notes, *pairs.notes]}
    write_description(folder, {**about, "check": {**check, **sizes}})
    readme.write_onnx_readme(folder, embedder.model.shape.name, result)
    return result


def _keep_what_loses(before: Embedded, after: Embedded, folder: Path, about: dict[str, Any]) -> bool:
    """Put back in float32 the towers that fail the check by themselves; whether there was one."""
    alone = {
        "image": Embedded(after.images, before.texts, before.owner),
        "text": Embedded(before.images, after.texts, before.owner),
    }
    changed = False
    for tower, found in alone.items():
        described = about["towers"][tower]
        check, (lost, by_chance) = compare(before, found), recall_lost(before, found)
        keeps = check["cosine"][tower]["mean"] >= LEAST_COSINE and lost <= MOST_LOST + by_chance
        if keeps or described["numbers"] == towers_in_onnx.FLOAT:
            continue
        shutil.copyfile(folder / "tried" / f"{tower}.onnx", folder / f"{tower}.onnx")
        described["why"] = (
            f"the {tower} tower stays in float32: in {described['numbers']} it has cosine "
            f"{check['cosine'][tower]['mean']:.4f} and R@1 {check['recall_after']:.1%} after "
            f"{check['recall_before']:.1%} on held-out pairs"
        )
        described["numbers"] = towers_in_onnx.FLOAT
        changed = True
    return changed


def write_coreml(embedder: Embedder, to: str, folder: Path, pairs: Checked, shown: Shown) -> dict[str, Any]:
    """Fill a folder for Core ML, and the account of it; without a Mac, of what can be known without running it."""
    small = to == "coreml-int8"
    notes = write_tokenizers(folder, embedder.tokenizer)
    coreml.write_packages(embedder, folder, shown.tell, small=small)
    shown.tell("verifying the packages")
    structure = coreml_structure.verify(folder, embedder, small=small)
    notes += coreml_structure.said_of(structure)
    captions = [options[0] for options in pairs.held_out.captions[:5]]
    rows = [{"caption": text, "symbols": embedder.tokenizer.encode(text, embedder.context)} for text in captions]
    (folder / EXAMPLES).write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8", newline="\n")
    before = Embedded.by(embedder, pairs.held_out, shown.counting("embedding held-out pairs with torch"))
    if coreml.can_predict():
        exported = coreml.CoreMLEmbedder(folder, embedder)
        after = Embedded.by(exported, pairs.held_out, shown.counting("embedding held-out pairs with Core ML"))
        check = _compared(embedder, exported, before, after, pairs, shown)
    else:
        notes.append(coreml.NOT_CHECKED)
        recall, interval = before.recall()
        check = {
            "checked_on": pairs.words,
            "candidates": len(pairs.held_out),
            "recall_before": recall,
            "recall_after": None,
            "intervals": {"recall_before": interval, "recall_after": None},
            "cosine": None,
            "passed": None,
            "latency": [],
            "ms_before": None,
            "ms_after": None,
        }
    sizes = _sizes(embedder, [folder / "image.mlpackage", folder / "text.mlpackage"])
    about = describe(embedder, to, coreml.interface(embedder))
    checked = {**check, **sizes, "structure": structure}
    write_description(folder, {**about, "check": checked if coreml.can_predict() else coreml.NOT_CHECKED})
    result = {"format": to, **checked, "towers": about["towers"], "notes": [*notes, *pairs.notes]}
    readme.write_coreml_readme(folder, embedder.model.shape.name, result)
    return result


def _check(embedder: Embedder, exported: Encoder, pairs: Checked, shown: Shown) -> dict[str, Any]:
    before = Embedded.by(embedder, pairs.held_out, shown.counting("embedding held-out pairs"))
    after = Embedded.by(exported, pairs.held_out, shown.counting("embedding held-out pairs with what was written"))
    return _compared(embedder, exported, before, after, pairs, shown)


def _compared(
    embedder: Embedder, exported: Encoder, before: Embedded, after: Embedded, pairs: Checked, shown: Shown
) -> dict[str, Any]:
    busy = busy_cores()
    timed = latencies(embedder, exported, typical_inputs(embedder, pairs.held_out), shown.tell)
    return {
        "checked_on": pairs.words,
        **compare(before, after),
        "latency": timed,
        "busy": busy,
        "ms_before": both_towers(timed, "ms_before"),
        "ms_after": both_towers(timed, "ms_after"),
    }


def _sizes(embedder: Embedder, towers: list[Path]) -> dict[str, Any]:
    numbers = sum(part.numel() for part in embedder.model.state_dict().values())
    return {"weights_bytes_before": 4 * numbers, "weights_bytes": sum(map(_bytes, towers))}


def _bytes(path: Path) -> int:
    if path.is_dir():
        return sum(member.stat().st_size for member in path.rglob("*") if member.is_file())
    return path.stat().st_size


def open_pairs(subject: WhichModel, view: View, progress: DataProgress | None) -> Checked:
    """The run's own held-out and training pairs; for a model without a run, or without data, the built-in scenes."""
    few = DataConfig(train_pairs=TRAINING)
    if subject.config is None:
        return _of_scenes(few, view, progress, ())
    if subject.config.data.source == SCENES:
        return _of_scenes(subject.config.data, view, progress, ())
    try:
        return _of_images(subject.config.data, view, progress)
    except DataError as error:
        note = f"The run's own data cannot be used ({error.message}), so the built-in scenes took its place."
        return _of_scenes(few, view, progress, (note,))


def _of_scenes(config: DataConfig, view: View, progress: DataProgress | None, notes: tuple[str, ...]) -> Checked:
    data = load_data(config, view, progress)
    split, held_out = data.final
    training = _some(data.train, TRAINING)
    return Checked(held_out, training, f"the built-in scenes, split {split}: {len(held_out)} images", notes)


def _of_images(config: DataConfig, view: View, progress: DataProgress | None) -> Checked:
    table = read_table(config)
    splits = assign_splits(table.rows, config.seed)
    split = "test" if "test" in splits else "val"
    chosen = {
        name: _drawn([at for at, own in enumerate(splits) if own == name and table.rows[at].captions], most)
        for name, most in ((split, MOST), (TRAIN, TRAINING))
    }
    if not all(chosen.values()):
        raise DataError(f"{config.source} has no captions in the split {split} or for training")
    held_out, _ = load_to_score(config, table, chosen[split], view, progress)
    training, _ = load_to_score(config, table, chosen[TRAIN], view, progress)
    if held_out.identities is not None and training.identities is not None:  # copies of held-out files stay out
        apart = np.flatnonzero(~np.isin(training.identities, held_out.identities)).tolist()
        training = Pairs(np.array(training.pixels[apart]), [training.captions[at] for at in apart])
    words = f"{config.source}, split {split}: {len(held_out)} of its {splits.count(split)} images"
    return Checked(held_out, training, words)


def _some(pairs: Pairs, most: int) -> Pairs:
    rows = _drawn(list(range(len(pairs))), most)
    return Pairs(np.array(pairs.pixels[rows]), [pairs.captions[at] for at in rows])


def _drawn(rows: list[int], most: int) -> list[int]:
    """All rows, or as many as are wanted, drawn at random and in order."""
    if len(rows) <= most:
        return rows
    return sorted(generator(0, "export").choice(rows, most, replace=False).tolist())
