"""`lapclip gained`: what a run that began from trained weights has gained on its data and forgotten elsewhere, over
models between its start and its end, and the one to take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lapclip import __version__
from lapclip.commands.evaluate import (
    EvaluationData,
    EvaluationRequest,
    check_numbers,
    choose_data,
    choose_templates,
    count_trained_on,
    note_on_training,
    open_data,
)
from lapclip.config import AUTO, DataConfig
from lapclip.data.loading import load_data
from lapclip.data.pixels import View
from lapclip.data.sources import absolute, find_source
from lapclip.embedder import distinct_captions, load_torch
from lapclip.errors import ConfigError, DataError, RunError
from lapclip.evaluation import note_on_few
from lapclip.evaluation.forgetting import (
    MEAN_PER_CLASS,
    MEAN_RECALL,
    Blend,
    Scored,
    curve_of,
    recommend,
    score_classes,
    score_pairs,
    summary,
)
from lapclip.evaluation.short_questions import evaluate_short_questions, short_questions
from lapclip.fingerprint import short_digest
from lapclip.paths import CacheFile, digest_of_bytes
from lapclip.progress import DataProgress, Progress
from lapclip.prompts import class_embeddings, sentences_of
from lapclip.report import report_files, report_names
from lapclip.report.gained_report import GAINED, gained_report
from lapclip.runs.folder import Run
from lapclip.text import to_json
from lapclip.training.checkpoint import save_model
from lapclip.user_files import check_replaceable, marked, write_user_files
from lapclip.which_model import WhichModel, which_model

ALPHAS = [number / 10 for number in range(11)]
FEWER = [0.0, 0.25, 0.5, 0.75, 1.0]
LARGE = 25_000_000
"""Parameters that are computed with once for each alpha, from which on fewer alphas have to do."""
SCORED = CacheFile("gained.json")
"""What data sets scored: a command that was interrupted, or is given again with --alpha, does not start over."""
REMEMBERED = 50
"""Data sets whose scores are kept, the latest."""


@dataclass(frozen=True)
class GainedRequest:
    """What the user asked `lapclip gained` for; everything may be left out."""

    run: str | None = None
    checks: Sequence[str] = ()
    alpha: str | None = None
    device: str = AUTO
    out: Path | None = None


@dataclass(frozen=True)
class EvaluationSet:
    """Data to score on, its name, and the sentences for its classes."""

    name: str
    source: str
    opened: EvaluationData
    templates: Sequence[str]
    notes: list[str]


Counting = Callable[[str], Progress]


def gained(
    request: GainedRequest, data_progress: DataProgress | None, counting: Counting
) -> dict[str, Any]:
    """Score the models between start and end on the new data and on the checks, recommend one, and save the result."""
    asked = read_alpha(request.alpha)
    model = which_model(request.run)
    run = model.run
    if run is None or not (run.start / "config.json").exists():
        raise RunError(
            f"{model.path} did not begin from a trained model, so there is nothing it could have forgotten.",
            hint="lapclip train photos/ --from MODEL, then lapclip gained",
        )
    run.check_links()
    if request.out:
        check_replaceable([*report_names(request.out, "gained"), request.out / GAINED])
    blend = open_blend(run, request.device)
    alphas = FEWER if blend.repeated_parameters() > LARGE else ALPHAS
    if isinstance(asked, float):
        alphas = sorted({*alphas, asked})
    sets = open_sets(model, request, View.of(blend.embedder.model.shape), data_progress)
    found = evaluate_sets(blend, sets, alphas, counting)
    new, checks = found[0], found[1:]
    for check, one in zip(checks, sets[1:], strict=True):
        check["decides"] = check.pop("known") and not one.opened.for_training
    new.pop("known")
    best = recommend(new, checks)
    for one in found:
        one["recommended"] = one.pop("scores")[alphas.index(best.alpha)]
    result: dict[str, Any] = {
        "run": str(run.path),
        "alpha": best.alpha,
        "why": best.why,
        "summary": summary(new, checks, best.alpha),
        "notes": notes_on(model, run, new, checks),
        "alphas": list(alphas),
        "shared": {
            tower: [block, getattr(blend.embedder.model, tower).depth]
            for tower, block in blend.blocks.items()
        },
        "new": new,
        "checks": checks,
        "model": None,
        "model_alpha": None,
    }
    if asked is not None:
        result["model_alpha"] = asked if isinstance(asked, float) else best.alpha
        blend.mix(result["model_alpha"])
        save_model(blend.embedder, run.blended)
        result["model"] = str(run.blended)
    result["files"] = [str(path) for path in save_gained(result, run, request.out)]
    return result


def read_alpha(text: str | None) -> float | str | None:
    """`auto`, a number from 0 to 1, or None where nothing is to be written."""
    if text in (None, AUTO):
        return text
    try:
        alpha = float(text)
    except ValueError:
        alpha = -1.0
    if not 0 <= alpha <= 1:
        raise ConfigError(
            f"--alpha must be auto or a number from 0 to 1, not {text}.", hint="--alpha auto"
        )
    return alpha


def open_blend(run: Run, device: str) -> Blend:
    """Both models of a run; the one in model/ is its end."""
    try:
        return Blend(load_torch(run.start, device), load_torch(run.path, device))
    except (
        ConfigError
    ) as error:  # a device that is not here, which training would have as a setting
        raise ConfigError(
            error.message.replace("train.device", "--device"), hint="--device auto"
        ) from None


def open_sets(
    model: WhichModel, request: GainedRequest, view: View, progress: DataProgress | None
) -> list[EvaluationSet]:
    """The run's own data first, then the built-in scenes where it did not learn from them, then what the user named."""
    assert model.config is not None
    own = model.config.data
    fingerprint = model.data_fingerprint or ""
    opened = open_data(own, view, None, fingerprint, progress, model.run and model.run.seen)
    found = [_evaluation_set(model, own, opened, own=True)]
    if not find_source(own.source).is_drawn:
        # Held-out scenes do not depend on how many there are for training, so hardly any are drawn for that.
        scenes = load_data(DataConfig(train_pairs=2, min_pairs=2), view, progress)
        opened = EvaluationData(
            "test", "held out from every run on scenes", scenes.splits["test"], (), [], None
        )
        found.append(_evaluation_set(model, DataConfig(), opened, own=False))
    for source in dict.fromkeys(request.checks):
        config, is_own = choose_data(model, EvaluationRequest(data=source))
        if is_own:
            raise DataError(
                f"{source} is what the run learnt from: it is scored as the new data.",
                hint="--check OTHER",
            )
        if not find_source(config.source).is_drawn:
            opened = open_data(config, view, None, None, progress)
            found.append(_evaluation_set(model, config, opened, own=False))
    return found


def _evaluation_set(
    model: WhichModel, config: DataConfig, opened: EvaluationData, *, own: bool
) -> EvaluationSet:
    if not opened.classes and not any(opened.pairs.captions):
        raise DataError(
            f"None of the images of {config.source} has a caption.", hint="lapclip data check DATA"
        )
    trained_on = count_trained_on(model, opened)
    notes = [*note_on_training(trained_on, len(opened.pairs)), *opened.notes]
    name = Path(absolute(config.source)).name
    opened = replace(opened, for_training=trained_on)
    return EvaluationSet(
        name, config.source, opened, choose_templates(EvaluationRequest(), config, own=own), notes
    )


def evaluate_sets(
    blend: Blend, sets: Sequence[EvaluationSet], alphas: Sequence[float], counting: Counting
) -> list[dict[str, Any]]:
    """The metrics of each data set, of which each is kept as soon as it is known."""
    ends = [blend.embedder.fingerprint()]  # of the end, whose values the blend has at first
    blend.mix(0.0)
    ends.append(blend.embedder.fingerprint())
    found: list[dict[str, Any]] = []
    for one in sets:
        key = short_digest(
            {"lapclip": __version__, "ends": ends, "alphas": list(alphas), **_facts(one)}
        )
        progress, total = counting(f"embedding {one.name}, start to end"), len(one.opened.pairs)
        scored = SCORED.read(key)
        if scored is None:
            try:
                scored = evaluate_set(blend, one, alphas, progress)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(_interrupted(found)) from None
            SCORED.replace(dict([*SCORED.entries().items(), (key, scored)][-REMEMBERED:]))
        progress(total, total)
        # What is said about a data set may change while its scores stay.
        found.append(scored | {"trained_on": one.opened.for_training, "notes": _notes(one)})
    return found


def _interrupted(found: list[dict[str, Any]]) -> str:
    done = ", ".join(one["name"] for one in found)
    kept = f"The scores of {done} are kept" if done else "No data set was scored yet"
    return f"Interrupted. {kept}. The same command goes on: lapclip gained"


def _facts(one: EvaluationSet) -> dict[str, Any]:
    """What the scores of a data set depend on, besides the models."""
    pairs = one.opened.pairs
    # Equal files have equal numbers. Drawn images have none, and are few.
    content = np.array(pairs.pixels[:]) if pairs.identities is None else pairs.identities
    return {
        "name": one.name,
        "data": one.source,
        "split": [one.opened.split, one.opened.why],
        "content": digest_of_bytes(np.ascontiguousarray(content).tobytes()),
        "captions": [list(options) for options in pairs.captions],
        "labels": None if pairs.labels is None else pairs.labels.tolist(),
        "classes": list(one.opened.classes),
        "templates": list(one.templates),
    }


def _notes(one: EvaluationSet) -> list[str]:
    by_class = one.opened.pairs.labels is not None and bool(one.opened.classes)
    return [*one.notes, *([] if by_class else note_on_few(len(one.opened.pairs)))]


def evaluate_set(
    blend: Blend, one: EvaluationSet, alphas: Sequence[float], progress: Progress
) -> dict[str, Any]:
    """The metrics of one data set at each alpha."""
    pairs, classes = one.opened.pairs, one.opened.classes
    by_class = pairs.labels is not None and bool(classes)
    captions, which, owner = distinct_captions(pairs)
    questions = None if by_class else short_questions(pairs.captions)
    if by_class:
        captions = sentences_of(classes, one.templates)
    elif questions:
        captions = [*captions, *questions.texts]
    total = len(pairs) + len(captions)
    images = blend.encode_pixels(
        pairs.pixels, alphas, lambda done, all_: progress(len(pairs) * done // all_, total)
    )
    texts = blend.encode_text(
        captions,
        alphas,
        lambda done, all_: progress(len(pairs) + len(captions) * done // all_, total),
    )
    scored: list[Scored] = []
    for image_NE, text_ME in zip(images, texts, strict=True):
        check_numbers(image_NE, text_ME)
        if by_class:
            assert pairs.labels is not None
            prompted = class_embeddings(lambda _, rows=text_ME: rows, classes, one.templates)
            scored.append(score_classes(image_NE, prompted, pairs.labels, classes))
        else:
            scored.append(score_pairs(image_NE, text_ME[np.array(which)], owner))
            if questions:
                asked = evaluate_short_questions(
                    image_NE, text_ME[-len(questions.texts) :], questions
                )
                scored[-1].scores["short_questions"] = asked
    return {
        "name": one.name,
        "data": one.source,
        "split": one.opened.split,
        "why_split": one.opened.why,
        "figure": MEAN_PER_CLASS if by_class else MEAN_RECALL,
        "pictures": len(pairs),
        "chance": scored[0].chance,
        "known": scored[0].known,
        "before": scored[0].scores,
        "after": scored[-1].scores,
        "scores": [own.scores for own in scored],
        "curve": curve_of(alphas, scored),
    }


def notes_on(
    model: WhichModel, run: Run, new: dict[str, Any], checks: Sequence[dict[str, Any]]
) -> list[str]:
    """What the user should know before believing the metrics."""
    notes = []
    if model.config and not model.config.train.start:
        fitted = model.config.train.head_start == "closed-form"
        knows = (
            "has linear heads fitted to the training pairs, without training"
            if fitted
            else "knows nothing of pairs"
        )
        notes.append(f"The run began with new heads on pretrained towers, so its start {knows}.")
    if run.state not in ("finished", "stopped"):
        notes.append(f"The run is {run.state}; its end is the best model so far.")
    notes += [f"{found['name']}: {note}" for found in (new, *checks) for note in found["notes"]]
    for check in checks:
        if check["trained_on"]:
            notes.append(
                f"{check['name']} does not decide, because the run learnt from some of it."
            )
        elif not check["decides"]:
            before = check["curve"][0]
            notes.append(
                f"{check['name']} does not decide: the start's {before['value']:.1%} is not clearly above chance, "
                f"{check['chance']:.1%}, and what was not known cannot be forgotten."
            )
    return notes


def save_gained(result: dict[str, Any], run: Run, out: Path | None) -> list[Path]:
    """Write the result and its page into the run's folder or another."""
    folder = out or run.gained
    files = report_files(gained_report(result), folder, "gained")
    files[folder / GAINED] = to_json(marked(result))
    return write_user_files(files, replace_any=out is None)
