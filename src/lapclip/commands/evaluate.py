"""`lapclip eval`: which model, on which images, its metrics, and where the evaluation is saved."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lapclip.commands.before import find_before, prepare_comparison
from lapclip.commands.evaluation_data import (
    ChosenData,
    EvaluationData,
    EvaluationRequest,
    Vectors,
    choose_data,
    choose_templates,
    count_trained_on,
    find_model,
    note_on_training,
    open_data,
)
from lapclip.data.dataset import Pairs
from lapclip.data.splits import TRAIN
from lapclip.embedder import Embedder, Encoder, load, naming_device_flag
from lapclip.errors import RunError
from lapclip.evaluation import FEW, note_on_chance, note_on_few
from lapclip.evaluation.calibration import calibrate, save_calibration
from lapclip.evaluation.evaluation import evaluate_classes, evaluate_pairs
from lapclip.evaluation.hubness import CaptionBank, draw_bank, read_bank, save_bank
from lapclip.evaluation.short_questions import (
    evaluate_short_questions,
    note_on_no_questions,
    short_questions,
)
from lapclip.paths import temporary_folder
from lapclip.progress import DataProgress, Progress
from lapclip.report import report_files, report_names
from lapclip.report.evaluation_report import EVALUATION, FOLDER, THUMBNAIL, evaluation_report
from lapclip.runs.folder import Run
from lapclip.text import to_json
from lapclip.user_files import check_replaceable, marked, write_user_files
from lapclip.which_model import WhichModel

SIDE = 144
"""Pixels of a thumbnail's longer side."""


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
    which_before = find_before(request, model)
    if request.out:
        check_replaceable(evaluation_paths(request.out))
    elif model.run:
        model.run.check_links()
    config, own = choose_data(model, request)
    templates = choose_templates(config, own=own)
    config = replace(
        config, prompts="|".join(templates)
    )  # what is said of class folders names the prompts in use
    with naming_device_flag():
        embedder = load(model.path, request.device)
    view = embedder.view
    fingerprint, seen = None, None
    if own:
        fingerprint, seen = model.data_fingerprint or "", model.run and model.run.seen
    opened = open_data(config, view, request.split, fingerprint, data_progress, seen)
    batch_size = model.config.train.batch_size if model.config else None
    trained_on = count_trained_on(model, opened)
    # Of a published model it is not known what it has seen; of a run's it is known that it has seen images.
    unseen = trained_on == 0 or (trained_on is None and model.made_by is None)
    held_out = unseen and not opened.changed and opened.split != TRAIN
    data = ChosenData(config, view, templates, opened, fingerprint, seen)
    comparison = None
    if which_before is not None:
        comparison = prepare_comparison(request, model, which_before, data, data_progress)
    vectors = data.encode(embedder, encoding_progress)
    scores = score(embedder, vectors, opened.pairs, opened.classes, batch_size)
    if vectors.image_of_text is None:
        scores["templates"] = list(templates)
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
        ],
        **scores,
    }
    bank = None
    if model.run and own and held_out and len(opened.pairs) >= FEW:
        bank = caption_bank(model.run, opened)
    if model.run and bank and vectors.image_of_text is not None:
        calibration, result["hubness"] = calibrate(
            embedder, bank, vectors.images, vectors.texts, vectors.image_of_text, encoding_progress
        )
        # Search uses what was measured on val, which chose the model; test chooses nothing.
        if opened.split == "val" or not model.run.calibration.exists():
            save_calibration(calibration, model.run.calibration)
    if "evaluation" in result:
        result["notes"] += note_on_few(result["evaluation"]["candidates"])
        if result["short_questions"] is None:
            result["notes"].append(note_on_no_questions(len(opened.pairs)))
    result["notes"] += note_on_chance(result.get("evaluation") or result["zeroshot"])
    if opened.linear_baseline is not None:
        result["linear_baseline"] = opened.linear_baseline
    if comparison is not None:
        after = vectors.mean_score(opened.pairs)
        result["before"] = comparison.run(embedder, after, encoding_progress).to_dict()
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


def score(
    embedder: Encoder,
    vectors: Vectors,
    pairs: Pairs,
    classes: Sequence[str],
    batch_size: int | None,
) -> dict[str, Any]:
    """Score pairs by how they find each other, or classes by how many images get the right one."""
    if vectors.image_of_text is None:
        assert pairs.labels is not None
        return evaluate_classes(vectors.images, vectors.texts, pairs.labels, classes)
    images, texts, owner = vectors.images, vectors.texts, vectors.image_of_text
    scores = evaluate_pairs(images, texts, owner, pairs, batch_size)
    queries = short_questions(pairs.captions)
    scores["short_questions"] = None
    if queries:
        query_vectors = embedder.encode_text(queries.texts)
        scores["short_questions"] = evaluate_short_questions(images, query_vectors, queries)
    return scores


def caption_bank(run: Run, data: EvaluationData) -> CaptionBank | None:
    """Return the saved bank of a run, else one drawn from its training captions."""
    bank = read_bank(run.questions)
    if bank is None and data.training_captions:
        bank = draw_bank(data.training_captions)
        with suppress(OSError):
            save_bank(bank, run.questions)
    return bank


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


def _slug(source: str) -> str:
    """A folder's name for other data: the end of its path in plain letters, and what tells it from its namesakes."""
    path = os.path.abspath(source)
    return f"{_plain(Path(path).name)}-{hashlib.sha256(path.encode()).hexdigest()[:6]}"


def _plain(text: str) -> str:
    """Text in plain letters, as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-") or "data"
