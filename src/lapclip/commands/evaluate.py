"""`lapclip eval`: which model, on which images, its metrics, and where the evaluation is saved."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lapclip.config import AUTO, DataConfig, Layer, build_config, parse_settings
from lapclip.data.dataset import Pairs, count_seen
from lapclip.data.loading import Listing, list_data
from lapclip.data.pixels import View
from lapclip.data.sources import find_source
from lapclip.data.splits import TRAIN
from lapclip.embedder import Embedder, Encoder, load
from lapclip.errors import ConfigError, DataError, LapclipError, RunError, nearest
from lapclip.evaluation import FEW, note_on_chance, note_on_few
from lapclip.evaluation.calibration import (
    Calibration,
    calibrate,
    calibration_path,
    keep_calibration,
)
from lapclip.evaluation.evaluation import evaluate_classes, evaluate_pairs
from lapclip.evaluation.hubness import QuestionBank, bank_of, own_bank, read_bank, save_bank
from lapclip.evaluation.retrieval import linear_baseline
from lapclip.evaluation.short_questions import (
    evaluate_short_questions,
    note_on_no_questions,
    short_questions,
)
from lapclip.model.shapes import SHAPES
from lapclip.paths import temporary_folder
from lapclip.progress import DataProgress, Progress
from lapclip.prompts import TEMPLATES, class_embeddings, read_templates
from lapclip.report import report_files, report_names
from lapclip.report.evaluation_report import EVALUATION, FOLDER, THUMBNAIL, evaluation_report
from lapclip.suggest import command
from lapclip.text import to_json
from lapclip.user_files import check_replaceable, marked, write_user_files
from lapclip.which_model import NotAModel, WhichModel, which_model

ALL = "all"
DECIDE_SPLITS = ("seed", "split_rule", "split_column", "train_pairs", "held_out")
"""Settings of data that decide which images are for training: of the run's own data they stay as they were."""
CHANGED_FILES = (
    "The images are not those that the run began with (added, or saved again), so some of these may be among those it "
    "learnt from: this is no test of it."
)
SIDE = 144
"""Pixels of a thumbnail's longer side."""


@dataclass(frozen=True)
class EvaluationRequest:
    """What the user asked to evaluate; everything may be left out."""

    model: str | None = None
    data: str | None = None
    split: str | None = None
    templates: str = ""
    device: str = AUTO
    out: Path | None = None
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class EvaluationData:
    """The images to score: their split, why this one, and what the user should know of them."""

    split: str
    why: str
    pairs: Pairs
    classes: Sequence[str]
    notes: list[str]
    for_training: int | None
    """How many of them are in the run's training split; None for data that is not the run's own."""
    linear_baseline: float | None = None
    changed: bool = False
    """Whether the run's own data is no longer what it learnt from, so that any of these may be among that."""
    training_captions: Sequence[Sequence[str]] = ()
    """Of the run's own data."""


def evaluate(
    request: EvaluationRequest,
    data_progress: DataProgress | None = None,
    encoding_progress: Progress | None = None,
) -> dict[str, Any]:
    """Score a model on images, save the evaluation with its images and its page, and return it."""
    model = find_model(request)
    with model.in_use():
        return _evaluate(model, request, data_progress, encoding_progress)


def _evaluate(
    model: WhichModel,
    request: EvaluationRequest,
    data_progress: DataProgress | None,
    encoding_progress: Progress | None,
) -> dict[str, Any]:
    if request.out:
        check_replaceable(evaluation_paths(request.out))
    elif model.run:
        model.run.check_links()
    config, own = choose_data(model, request)
    templates = choose_templates(request, config, own=own)
    config = replace(
        config, prompts="|".join(templates)
    )  # what is said of class folders names the prompts in use
    try:
        embedder = load(model.path, request.device)
    except (
        ConfigError
    ) as error:  # a device that is not here, which training would have as a setting
        raise ConfigError(
            error.message.replace("train.device", "--device"), hint="--device auto"
        ) from None
    view = embedder.view
    fingerprint, seen = (
        (model.data_fingerprint or "", model.run and model.run.seen) if own else (None, None)
    )
    opened = open_data(config, view, request.split, fingerprint, data_progress, seen)
    batch_size = model.config.train.batch_size if model.config else None
    trained_on = count_trained_on(model, opened)
    # Of a published model it is not known what it has seen; of a run's it is known that it has seen images.
    unseen = trained_on == 0 or (trained_on is None and model.made_by is None)
    held_out = unseen and not opened.changed and opened.split != TRAIN
    bank = question_bank(model, opened, view) if held_out and not opened.classes else None
    scores, calibrated = score(
        embedder, opened.pairs, opened.classes, templates, batch_size, encoding_progress, bank
    )
    result: dict[str, Any] = {
        "run": str(model.path),
        "data": config.source,
        "split": opened.split,
        "why_split": opened.why,
        "device": embedder.device.kind if isinstance(embedder, Embedder) else "cpu",
        "trained_on": trained_on,
        "data_changed": opened.changed,
        "notes": [
            *note_on_training(trained_on, len(opened.pairs)),
            *opened.notes,
            *_unused_templates(request, opened),
        ],
        **scores,
    }
    if calibrated is not None:
        calibrated.facts.update(
            data=config.source, split=opened.split, own_val=own and opened.split == "val"
        )
        if kept := keep_calibration(calibrated, calibration_path(model, calibrated.model)):
            result["notes"].append(
                "The correction that search uses stays as it was measured on "
                f"{kept.facts.get('data', 'other images')} (split {kept.facts.get('split', 'not known')})."
            )
        result["hubness"] = calibrated.facts["hubness"]
    if "evaluation" in result:
        result["notes"] += note_on_few(result["evaluation"]["candidates"])
        if result["short_questions"] is None:
            result["notes"].append(note_on_no_questions(len(opened.pairs)))
    result["notes"] += note_on_chance(result.get("evaluation") or result["zeroshot"])
    if opened.linear_baseline is not None:
        result["linear_baseline"] = opened.linear_baseline
    name = _plain(opened.split) if own else f"{_slug(config.source)}-{_plain(opened.split)}"
    files: list[Path] = []
    if request.out:
        with temporary_folder("evaluation") as thumbnails:
            files = save_evaluation(result, opened.pairs, request.out, thumbnails)
    elif model.run:
        folder = model.run.path / FOLDER / name
        files = save_evaluation(result, opened.pairs, folder, folder)
    result["files"] = [str(path) for path in files]
    return result


def _unused_templates(request: EvaluationRequest, opened: EvaluationData) -> list[str]:
    if request.templates and not opened.classes:
        return [
            "--templates is for folders of classes; these images have captions, so it was not used."
        ]
    return []


def find_model(request: EvaluationRequest) -> WhichModel:
    """The model that is meant. One word alone that names no model is taken for the data."""
    try:
        return which_model(request.model)
    except NotAModel as error:
        if request.data is not None:
            raise
        raise RunError(
            f"{error.message} To evaluate on it, name the model first.",
            hint=command("eval", "RUN", request.model),
        ) from None


def choose_data(model: WhichModel, request: EvaluationRequest) -> tuple[DataConfig, bool]:
    """The data to score on, and whether it is what the run learnt from."""
    trained = model.config.data if model.config else None
    asked = parse_settings(list(request.settings))
    if request.data is None and trained is None:
        raise DataError(
            f"{model.path} is a model without a run: name the data.",
            hint=command("eval", model.path, "DATA"),
        )
    source = request.data if request.data is not None else trained.source if trained else ""
    own = trained is not None and _same(source, trained.source)
    _check_settings(asked, own=own)
    if own and trained is not None:
        first = Layer("the run", {"data": vars(trained)})
    else:
        # Of the run only the seed: columns and folders of other data are looked for anew.
        first = Layer(
            "the run", {"data": {"source": source, "seed": trained.seed if trained else 0}}
        )
    return build_config([first, asked], SHAPES).data, own


def count_trained_on(model: WhichModel, opened: EvaluationData) -> int | None:
    """How many of the images the model learnt from, known by their bytes; None where that is not known."""
    run = model.made_by
    seen = count_seen(opened.pairs.identities, run.seen) if run else None
    if seen is None and model.config and opened.for_training is None:
        # Drawn scenes are no files: a run that drew what it learnt from has seen none, and no other run has seen these.
        drawn = find_source(model.config.data.source).is_drawn, opened.pairs.identities is None
        return 0 if any(drawn) else None
    if opened.changed:
        return seen or None
    return opened.for_training if seen is None else seen


def open_data(
    config: DataConfig,
    view: View,
    asked: str | None,
    fingerprint: str | None,
    progress: DataProgress | None,
    seen: Path | None = None,
) -> EvaluationData:
    """The images to score. A fingerprint is that of the data the run began with, empty where it is not known, and None
    for data that the run did not learn from: of that only splits that it names itself count. `seen` is where the run
    keeps what it learnt from."""
    listing, own = list_data(config, view, progress), fingerprint is not None
    classes, splits = listing.table.classes, listing.splits if own else listing.named_splits(ALL)
    split, why = choose_split(
        list(dict.fromkeys(splits)), asked, learnt_from=own, classes=bool(classes)
    )
    chosen = [at for at, each in enumerate(splits) if split in (ALL, each)]
    pairs, notes = listing.load(chosen, view, progress)
    if not len(pairs):
        raise DataError(f"The split {split} has no images that can be read.", hint=f"--split {ALL}")
    of_training = min(
        len(pairs), sum(splits[at] == TRAIN for at in chosen)
    )  # at the most: some may be broken
    for_training = of_training if own else None
    if listing.drawn is None:
        changed = seen is not None and listing.has_changed_since(seen, view, progress)
        notes = [*[CHANGED_FILES] * changed, *notes]
        captions = _training_captions(listing) if own and not changed else ()
        return EvaluationData(
            split, why, pairs, classes, notes, for_training, None, changed, captions
        )
    if fingerprint not in (None, "", listing.drawn.fingerprint):
        notes = ["The data is not what the run began with: it is scored as it is now."]
    baseline, captions = (
        linear_baseline(listing.drawn.train, pairs),
        _training_captions(listing) if own else (),
    )
    return EvaluationData(
        split, why, pairs, classes, notes, for_training, baseline, training_captions=captions
    )


def choose_split(
    splits: Sequence[str], asked: str | None, *, learnt_from: bool, classes: bool = False
) -> tuple[str, str]:
    """The split to score among those there are, and why this one."""
    if asked is not None:
        if asked not in (ALL, *splits):
            raise DataError(
                f"The data has no split {asked}. {nearest(asked, splits)}", hint=f"--split {ALL}"
            )
        return asked, "asked for"
    if classes and not learnt_from:
        return ALL, "classes: all images count"
    if "test" in splits:
        return "test", "it chose nothing"
    if "val" in splits:
        return "val", "there is no test split" + (
            "; val chose the checkpoint" if learnt_from else ""
        )
    return ALL, "it has no splits of its own" if ALL in splits else "it has no test or val split"


def choose_templates(request: EvaluationRequest, config: DataConfig, *, own: bool) -> list[str]:
    """Those asked for; for the run's own classes those it was trained with; else the small set that lapclip has."""
    if request.templates:
        return read_templates(request.templates)
    # Of other data, prompts that are not the usual ones come from --set.
    return (
        read_templates(config.prompts)
        if own or config.prompts != DataConfig().prompts
        else list(TEMPLATES)
    )


def score(
    embedder: Encoder,
    pairs: Pairs,
    classes: Sequence[str],
    templates: Sequence[str],
    batch_size: int | None,
    progress: Progress | None = None,
    bank: QuestionBank | None = None,
) -> tuple[dict[str, Any], Calibration | None]:
    """The metrics: of classes, how many images get the right one; of pairs, how many find each other. With a question
    bank, also what a correction for hubness gains, where there are pairs enough."""
    if pairs.labels is not None and classes:
        images = embedder.encode_pixels(pairs.pixels, progress)
        prompted = class_embeddings(embedder.encode_text, classes, templates)
        check_numbers(images, prompted)
        return {
            **evaluate_classes(images, prompted, pairs.labels, classes),
            "templates": list(templates),
        }, None
    if not any(pairs.captions):
        raise DataError("None of the images has a caption.", hint="lapclip data check DATA")
    images, texts, owner = embedder.encode_pairs(pairs, progress)
    check_numbers(images, texts)
    questions = short_questions(pairs.captions)
    asked = embedder.encode_text(questions.texts) if questions else None
    short = (
        evaluate_short_questions(images, asked, questions)
        if questions and asked is not None
        else None
    )
    found = {**evaluate_pairs(images, texts, owner, pairs, batch_size), "short_questions": short}
    if bank is None or len(pairs) < FEW:
        return found, None
    return found, calibrate(embedder, bank, images, texts, owner, asked, questions, progress)


def question_bank(model: WhichModel, opened: EvaluationData, view: View) -> QuestionBank:
    """The bank of the run that made a model; of a run without one, from its data, where that is there. Else lapclip's
    own."""
    run = model.made_by
    if run is None:
        return own_bank()
    captions = opened.training_captions
    if (bank := read_bank(run.questions)) is None and not captions and model.config:
        with suppress(LapclipError, OSError):
            captions = _training_captions(list_data(model.config.data, view))
    if bank is None and captions:
        bank = bank_of(captions)
        with suppress(OSError):
            save_bank(bank, run.questions)
    return bank or own_bank()


def _training_captions(listing: Listing) -> Sequence[Sequence[str]]:
    if listing.drawn is not None:
        return listing.drawn.train.captions
    return [
        row.captions
        for row, split in zip(listing.table.rows, listing.splits, strict=True)
        if split == TRAIN
    ]


def evaluation_paths(folder: Path) -> list[Path]:
    """Return the paths of what an evaluation writes into a folder."""
    return [*report_names(folder, "evaluation"), folder / EVALUATION]


def save_evaluation(
    result: dict[str, Any], pairs: Pairs, folder: Path, thumbnails: Path
) -> list[Path]:
    """Write the evaluation and its page.

    The page holds small copies of images, which are saved in the folder `thumbnails`: the run's own, where the report
    of the run finds them, or a temporary one.
    """
    try:
        save_thumbnails(_shown(result), pairs, thumbnails)
    except OSError as error:
        raise RunError(
            f"Cannot write to {thumbnails}: {error.strerror or error}.", hint="--out FOLDER"
        ) from error
    files = report_files(evaluation_report(result, thumbnails), folder, "evaluation")
    files[folder / EVALUATION] = to_json(marked(result))
    return write_user_files(files, replace_any=folder == thumbnails)


def save_thumbnails(images: set[int], pairs: Pairs, folder: Path) -> None:
    """Save small copies of images in place of those of an earlier evaluation."""
    for old in folder.glob(THUMBNAIL.format("[0-9]*")):
        old.unlink()
    for image in sorted(images):
        thumbnail = Image.fromarray(np.asarray(pairs.pixels[image]))
        thumbnail.thumbnail((SIDE, SIDE))
        path = folder / THUMBNAIL.format(image)
        path.parent.mkdir(0o700, parents=True, exist_ok=True)  # they may be private photos
        thumbnail.save(path, quality=85)


def _shown(result: dict[str, Any]) -> set[int]:
    """The images that the page shows."""
    found = {entry["picture"] for entry in result.get("mistaken", [])}
    for pair in result.get("confused", []):
        found |= {pair["own"], pair["preferred"]}
    for example in result.get("examples", []):
        found |= {example["right"], *(answer["picture"] for answer in example["top"])}
    return found


def _same(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _slug(source: str) -> str:
    """A folder's name for other data: the end of its path in plain letters, and what tells it from its namesakes."""
    path = os.path.abspath(source)
    return f"{_plain(Path(path).name)}-{hashlib.sha256(path.encode()).hexdigest()[:6]}"


def _plain(text: str) -> str:
    """Text in plain letters, as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-") or "data"


def _check_settings(asked: Layer, *, own: bool) -> None:
    """Refuse settings by which images that the run learnt from would be scored as if they were held out."""
    given = asked.values.get("data", {})
    if "source" in given:
        raise ConfigError(
            "The data to score on is not a setting.", hint=command("eval", "RUN", given["source"])
        )
    fixed = [name for name in DECIDE_SPLITS if own and name in given]
    if fixed:
        raise ConfigError(
            f"data.{fixed[0]} decides which images the run learnt from, so it stays as it was.",
            hint=f"leave out --set data.{fixed[0]}; --split NAME chooses among the splits",
        )


def check_numbers(images: np.ndarray, texts: np.ndarray) -> None:
    if not (np.isfinite(images).all() and np.isfinite(texts).all()):
        raise RunError(
            "The model gives embeddings that are not numbers: its training broke down.",
            hint="lapclip doctor",
        )


def note_on_training(trained_on: int | None, pictures: int) -> list[str]:
    if not trained_on:
        return []
    return [
        f"The model was trained on {trained_on:,} of these {pictures:,} images: this is no test of it."
    ]
