"""An evaluation that `lapclip eval` saved, as a page of its own and as sections of a run's report.

Read with care: what is missing or odd is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lapclip.evaluation import RANKS, WAYS
from lapclip.report.document import Block, Gallery, Headline, Report, ReportImage, Section, Sentences, Table
from lapclip.report.evaluation_plots import (
    confusion,
    hard_negatives,
    per_class,
    rank_plot,
    recall_plot,
    similarity_plot,
)
from lapclip.runs.event_log import mapping, mappings
from lapclip.text import count, interval, number, percent, significant

EVALUATION, FOLDER = "evaluation.json", "evaluation"
"""The file of an evaluation, and the folder of a run that holds a folder for each evaluation."""
THUMBNAIL = "pictures/evaluation-{}.jpg"
"""A small image of an evaluation: in a folder and under a name that no one else's images have."""


def evaluation_sections(run: Path) -> list[Section]:
    """The evaluations that a run's folder holds, the newest first."""
    found = []
    for path in (run / FOLDER).glob(f"*/{EVALUATION}"):
        try:
            evaluation = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(evaluation, dict):
                found.append((path.stat().st_mtime_ns, evaluation, path.parent))
        except (OSError, ValueError):
            continue
    newest_first = sorted(found, key=lambda entry: entry[0], reverse=True)
    return [section for _, evaluation, folder in newest_first for section in sections(evaluation, folder)]


def evaluation_report(evaluation: dict[str, Any], folder: Path) -> Report:
    """An evaluation on its own."""
    title = f"Evaluation of {evaluation.get('run')}"
    return Report(title, _where(evaluation), _headlines(evaluation), sections(evaluation, folder))


def sections(evaluation: dict[str, Any], folder: Path) -> list[Section]:
    """An evaluation as sections."""
    about = [f"{_where(evaluation)}.", *map(str, _list(evaluation.get("notes")))]
    scores, classes = mapping(evaluation.get("evaluation")), mapping(evaluation.get("zeroshot"))
    blocks: list[Block | None] = [Sentences(about)]
    if scores:
        blocks += [_recall_table(evaluation, scores), recall_plot(scores), rank_plot(evaluation, scores)]
        blocks += [
            hard_negatives(mapping(evaluation.get("negatives"))),
            similarity_plot(mapping(evaluation.get("histograms"))),
        ]
        blocks += [_confused(evaluation, folder), _examples(evaluation, folder)]
    if classes:
        templates = ", ".join(f'"{text}"' for text in _list(evaluation.get("templates")))
        blocks += [Sentences([f"Sentences for each class: {templates}."]), _class_table(classes)]
        blocks += [per_class(classes), confusion(classes), _mistaken(evaluation, folder)]
    blocks.append(_geometry(mapping(evaluation.get("geometry"))))
    return [Section(f"Evaluation: {evaluation.get('data')}, split {evaluation.get('split')}", [b for b in blocks if b])]


def _where(evaluation: dict[str, Any]) -> str:
    scores, classes = mapping(evaluation.get("evaluation")), mapping(evaluation.get("zeroshot"))
    size = f"{count(scores.get('candidates'))} images, {count(scores.get('captions'))} captions"
    if classes:
        size = f"{count(classes.get('pictures'))} images of {count(classes.get('classes'))} classes"
    return f"On {evaluation.get('data')}, split {evaluation.get('split')} ({evaluation.get('why_split')}): {size}"


def _headlines(evaluation: dict[str, Any]) -> list[Headline]:
    scores, classes = mapping(evaluation.get("evaluation")), mapping(evaluation.get("zeroshot"))
    lines = []
    if number(evaluation.get("trained_on")):
        lines.append(Headline("trained on", count(evaluation["trained_on"]), "of these images: no test of the model"))
    for way, name in WAYS.items():
        if number(scores.get(f"{way}_r1")) is not None:
            sure = interval(mapping(scores.get("intervals")).get(f"{way}_r1"))
            lines.append(Headline(f"{name}, R@1", percent(scores[f"{way}_r1"]), sure))
            chance = f"chance {percent(mapping(scores.get('chances')).get(f'{way}_r10'))}"
            lines.append(Headline(f"{name}, R@10", percent(scores.get(f"{way}_r10")), chance))
    if number(classes.get("top1")) is not None:
        sure = interval(mapping(classes.get("intervals")).get("top1"))
        lines.append(Headline("zero-shot top-1", percent(classes["top1"]), sure))
        lines.append(Headline("chance", percent(mapping(classes.get("chance")).get("top1"))))
        lines.append(Headline("always the largest class", percent(classes.get("largest_class"))))
    return lines


def _recall_table(evaluation: dict[str, Any], scores: dict[str, Any]) -> Table:
    chances, ceilings = mapping(scores.get("chances")), mapping(evaluation.get("ceilings"))
    rows: list[list[Any]] = []
    for way, name in WAYS.items():
        rows.append([name, *_metrics(scores, way)])
        rows.append([f"{name}, 95 % interval", *_intervals(mapping(scores.get("intervals")), way)])
        rows.append([f"{name}, chance", *_metrics(chances, way)])
        shared = [number(ceilings.get(f"{way}_r{rank}")) for rank in RANKS]
        if any(value is not None and value < 1 for value in shared):
            rows.append([f"{name}, most that shared captions allow", *map(percent, shared), "", ""])
    batch = mapping(scores.get("in_batch"))
    if batch:
        rows.append([f"in batches of {batch.get('size')}", percent(batch.get("accuracy")), "", "", "", ""])
        rows.append([f"chance in batches of {batch.get('size')}", percent(batch.get("chance")), "", "", "", ""])
    if number(evaluation.get("linear_baseline")) is not None:
        rows.append(["text to image, linear baseline", percent(evaluation["linear_baseline"]), "", "", "", ""])
    return Table(["", "R@1", "R@5", "R@10", "median rank", "mean reciprocal rank"], rows)


def _metrics(values: dict[str, Any], way: str) -> list[str]:
    recalls = [percent(values.get(f"{way}_r{rank}")) for rank in RANKS]
    return [*recalls, _rank(values.get(f"{way}_median_rank")), significant(values.get(f"{way}_mean_reciprocal_rank"))]


def _intervals(values: dict[str, Any], way: str) -> list[str]:
    recalls = [interval(values.get(f"{way}_r{rank}")) for rank in RANKS]
    rank, reciprocal = values.get(f"{way}_median_rank"), values.get(f"{way}_mean_reciprocal_rank")
    return [*recalls, _between(rank, _rank), _between(reciprocal, significant)]


def _rank(value: Any) -> str:
    found = number(value)
    return "-" if found is None else f"{found:,.1f}".removesuffix(".0")


def _between(low_high: Any, text: Callable[[Any], str]) -> str:
    match low_high:
        case [low, high]:
            return f"{text(low)} to {text(high)}"
    return ""


def _class_table(classes: dict[str, Any]) -> Table:
    sure, chance = mapping(classes.get("intervals")), mapping(classes.get("chance"))
    names = {"top1": "top-1", "top5": "top-5", "mean_per_class": "mean recall of the classes"}
    rows: list[list[Any]] = [
        [name, percent(classes.get(key)), interval(sure.get(key)), percent(chance.get(key))]
        for key, name in names.items()
    ]
    rows.append(["always the largest class", percent(classes.get("largest_class")), "", ""])
    return Table(["", "share", "95 % interval", "chance"], rows)


def _confused(evaluation: dict[str, Any], folder: Path) -> Gallery | None:
    rows = []
    for pair in mappings(evaluation.get("confused")):
        own, preferred = number(pair.get("own")), number(pair.get("preferred"))
        if own is None or preferred is None:
            continue
        images = [
            ReportImage(_thumbnail(folder, own), f"its own image, {significant(pair.get('own_score'))}", right=True),
            ReportImage(
                _thumbnail(folder, preferred),
                f"preferred, {significant(pair.get('preferred_score'))}: {pair.get('preferred_caption')}",
                right=False,
            ),
        ]
        rows.append((str(pair.get("caption")), images))
    look_for = (
        "Captions that score a wrong image above their own by most. Where the wrong image fits as well, the "
        "captions are at fault, not the model. Numbers are cosine similarities."
    )
    return Gallery("Most confused", look_for, rows) if rows else None


def _examples(evaluation: dict[str, Any], folder: Path) -> Gallery | None:
    rows = []
    for example in mappings(evaluation.get("examples")):
        right = number(example.get("right"))
        images = [
            ReportImage(_thumbnail(folder, at), significant(answer.get("score")), right=at == right)
            for answer in mappings(example.get("top"))
            if (at := number(answer.get("picture"))) is not None
        ]
        if right is not None and not any(image.right for image in images):
            text = f"its own has rank {count(example.get('rank'))}"
            images.append(ReportImage(_thumbnail(folder, right), text, right=True))
        rows.append((str(example.get("caption")), images))
    look_for = (
        "The five images closest to some captions, the closest first, with their similarities. Green is the "
        "caption's own image; where it is not among them it stands at the end."
    )
    return Gallery("Answers to some captions", look_for, rows) if rows else None


def _mistaken(evaluation: dict[str, Any], folder: Path) -> Gallery | None:
    images = [
        ReportImage(_thumbnail(folder, at), f"{entry.get('class')}, taken for {entry.get('guess')}")
        for entry in mappings(evaluation.get("mistaken"))
        if (at := number(entry.get("picture"))) is not None
    ]
    look_for = "Images taken for another class by the largest margin, one for each kind of mistake."
    return Gallery("Surest mistakes", look_for, [("", images)]) if images else None


def _geometry(values: dict[str, Any]) -> Table | None:
    meanings = {
        "modality_gap": ("modality gap", "distance between the mean image and the mean caption; 0 is none"),
        "alignment": ("alignment", "mean squared distance of a caption and its image; 0 is best, 2 is unrelated"),
        "uniformity_pictures": ("uniformity of images", "0 is one point, near -4 is spread evenly"),
        "uniformity_captions": ("uniformity of captions", "the same for captions"),
    }
    rows: list[list[Any]] = [
        [name, significant(values[key]), meaning]
        for key, (name, meaning) in meanings.items()
        if number(values.get(key)) is not None
    ]
    return Table(["embeddings", "", ""], rows) if rows else None


def _thumbnail(folder: Path, image: float) -> Path:
    return folder / THUMBNAIL.format(int(image))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
