"""Turn a command into an evaluation: which model, which pictures, what is told of them, and where that is kept."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lapclip.config import AUTO, SECTIONS, Config, DataConfig, Layer, build_config, parse_settings
from lapclip.data.loading import SCENES, load_data
from lapclip.data.pairs import DataSet, Pairs
from lapclip.data.pixels import Progress
from lapclip.data.sources import read_table
from lapclip.embedder import CONFIG, Embedder, load
from lapclip.errors import ConfigError, DataError, RunError, nearest
from lapclip.evaluate.account import account_of_classes, account_of_pairs
from lapclip.evaluate.baseline import linear_baseline
from lapclip.evaluate.joined import joined
from lapclip.evaluate.zeroshot import TEMPLATES, class_embeddings, read_templates
from lapclip.model.zoo import SHAPES
from lapclip.records.runs import RUNS, Run, find_run
from lapclip.report.evaluation import EVALUATION, FOLDER, page_of
from lapclip.report.write import write_files

ALL = "all"
SIDE = 144
"""Pixels of a thumbnail's longer side."""


@dataclass(frozen=True)
class Wanted:
    """What the user asked for; everything may be left out."""

    model: str | None = None
    data: str | None = None
    split: str | None = None
    templates: str = ""
    device: str = AUTO
    out: Path | None = None
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class Subject:
    """The model to evaluate: a run's, with its settings, or one in a folder of its own."""

    path: Path
    run: Run | None
    config: Config | None
    fingerprint: str | None


def evaluate(
    wanted: Wanted, data_progress: Progress | None = None, encoding_progress: Progress | None = None
) -> dict[str, Any]:
    """Score a model on pictures, keep the account with its pictures and its page, and return it."""
    subject = find_subject(wanted)
    config, own = choose_data(subject, wanted)
    templates = choose_templates(wanted, subject.config)
    try:
        embedder = load(subject.path, wanted.device)
    except ConfigError as error:  # a device that is not here, which training would have as a setting
        raise ConfigError(error.message.replace("train.device", "--device"), hint="--device auto") from None
    data = load_data(config, embedder.model.shape.image_size, data_progress)
    split, why, pairs = choose_split(data, wanted.split, own=own, whole=not own and _without_splits(config))
    notes = [*data.notes]
    if own and data.fingerprint != subject.fingerprint:
        notes.append("The data is not what the run began with: it is scored as it is now.")
    batch_size = subject.config.train.batch_size if subject.config else None
    found = score(embedder, data, pairs, templates, batch_size, encoding_progress)
    result: dict[str, Any] = {
        "run": str(subject.path),
        "data": config.source,
        "split": split,
        "why_split": why,
        "device": embedder.device.kind,
        "notes": notes,
        **found,
    }
    if config.source == SCENES and "train" in data.splits:
        result["linear_baseline"] = linear_baseline(data.train, pairs)
    folder = wanted.out or (
        subject.run and subject.run.path / FOLDER / _slug(split if own else f"{config.source}-{split}")
    )
    result["files"] = [str(path) for path in keep(result, pairs, folder)] if folder else []
    return result


def find_subject(wanted: Wanted) -> Subject:
    """The model that is meant: a run by its name or path, a folder with a model, or the newest run."""
    if wanted.model and wanted.data is None and not (RUNS / wanted.model).is_dir() and _holds_no_model(wanted.model):
        raise RunError(
            f"{wanted.model} holds no model. To evaluate on it, name the model first.",
            hint=f"lapclip eval RUN {wanted.model}",
        )
    run = find_run(wanted.model)
    if not run.settings.exists() and (run.path / CONFIG).exists():
        return Subject(run.path, None, None, None)
    saved = run.read_settings()
    layer = Layer(str(run.settings), {section: saved.get(section, {}) for section in SECTIONS})
    return Subject(run.path, run, build_config([layer], SHAPES), saved["run"].get("data_fingerprint"))


def choose_data(subject: Subject, wanted: Wanted) -> tuple[DataConfig, bool]:
    """The data to score on, and whether it is what the run learnt from."""
    trained = subject.config.data if subject.config else None
    asked = parse_settings(list(wanted.settings))
    if wanted.data is None and trained is None:
        raise DataError(
            f"{subject.path} is a model without a run: name the data.", hint=f"lapclip eval {subject.path} DATA"
        )
    source = wanted.data if wanted.data is not None else trained.source if trained else ""
    own = trained is not None and _same(source, trained.source)
    values = {section: dict(part) for section, part in asked.values.items()}
    if own and trained is not None:
        first = Layer("the run", {"data": vars(trained)})
    else:
        # Of the run only the seed: columns and folders of other data are looked for anew.
        first = Layer("the run", {"data": {"source": source, "seed": trained.seed if trained else 0}})
    return build_config([first, Layer("--set", values)], SHAPES).data, own


def choose_split(data: DataSet, asked: str | None, *, own: bool, whole: bool) -> tuple[str, str, Pairs]:
    """The pictures to score, what they are called, and why these."""
    everything = list(data.splits.values())
    if asked is not None and asked != ALL:
        if asked not in data.splits:
            raise DataError(f"The data has no split {asked}. {nearest(asked, data.splits)}", hint=f"--split {ALL}")
        chosen = asked, "asked for", data.splits[asked]
    elif asked == ALL or data.classes or whole:
        reason = (
            "asked for" if asked else "classes: all pictures count" if data.classes else "it has no splits of its own"
        )
        chosen = ALL, reason, joined(everything)
    else:
        held_out = next((name for name in ("test", "val") if name in data.splits), None)
        if held_out is None:
            chosen = ALL, "it has no test or val split", joined(everything)
        else:
            why = "it chose nothing" if held_out == "test" else "there is no test split"
            why += "; val chose the checkpoint" if own and held_out == "val" else ""
            chosen = held_out, why, data.splits[held_out]
    if not len(chosen[2]):
        raise DataError(f"The split {chosen[0]} has no pictures.", hint=f"--split {ALL}")
    return chosen


def choose_templates(wanted: Wanted, config: Config | None) -> list[str]:
    """Those asked for, else those the run was trained with, else the small set that lapclip has."""
    if wanted.templates:
        return read_templates(wanted.templates)
    usual = DataConfig().prompts
    trained = config.data.prompts if config else usual
    return read_templates(trained) if trained != usual else list(TEMPLATES)


def score(
    embedder: Embedder,
    data: DataSet,
    pairs: Pairs,
    templates: Sequence[str],
    batch_size: int | None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Classes are told apart, pairs are found."""
    if pairs.labels is not None and data.classes:
        images = embedder.encode_pixels(pairs.pixels, progress)
        classes = class_embeddings(embedder.encode_text, data.classes, templates)
        return {**account_of_classes(images, classes, pairs.labels, data.classes), "templates": list(templates)}
    if not any(pairs.captions):
        raise DataError("None of the pictures has a caption.", hint="lapclip data check DATA")
    return account_of_pairs(*embedder.encode_pairs(pairs, progress), pairs, batch_size)


def keep(result: dict[str, Any], pairs: Pairs, folder: Path) -> list[Path]:
    """Write the account, small pictures of what it shows, and its page."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.jpg"):
            old.unlink()
        for picture in sorted(_shown(result)):
            thumbnail = Image.fromarray(np.asarray(pairs.pixels[picture]))
            thumbnail.thumbnail((SIDE, SIDE))
            thumbnail.save(folder / f"{picture}.jpg", quality=85)
        partial = folder / f".{EVALUATION}.partial"
        partial.write_text(json.dumps(result, indent=1), encoding="utf-8")
        os.replace(partial, folder / EVALUATION)
    except OSError as error:
        raise RunError(
            f"Cannot write to {folder}: {error.strerror or error}.", hint="lapclip eval --out FOLDER"
        ) from error
    return [*write_files(page_of(result, folder), folder, "evaluation"), folder / EVALUATION]


def _shown(result: dict[str, Any]) -> set[int]:
    """The pictures that the page shows."""
    found = {entry["picture"] for entry in result.get("mistaken", [])}
    for pair in result.get("confused", []):
        found |= {pair["own"], pair["preferred"]}
    for example in result.get("examples", []):
        found |= {example["right"], *(answer["picture"] for answer in example["top"])}
    return found


def _holds_no_model(name: str) -> bool:
    """Whether a name is that of something else than a run or a model."""
    folder = Path(name)
    return folder.exists() and not any((folder / part).exists() for part in ("run.toml", CONFIG, f"model/{CONFIG}"))


def _without_splits(config: DataConfig) -> bool:
    """Whether the data itself says nothing about splits, so that none of it was kept back by anyone."""
    return config.source != SCENES and not any(row.split for row in read_table(config).rows)


def _same(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _slug(text: str) -> str:
    """A name for a folder: the end of a path in plain letters."""
    return re.sub(r"[^A-Za-z0-9]+", "-", Path(text).name).strip("-") or "data"
