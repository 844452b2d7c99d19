"""An evaluation that `lapclip eval` saved, as a page of its own and as sections of a run's report.

Read with care: what is missing or odd is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lapclip.evaluation import RANKS, WAYS
from lapclip.paths import read_json
from lapclip.report.document import (
    Block,
    Gallery,
    Headline,
    Plot,
    Report,
    ReportImage,
    Section,
    Sentences,
    Table,
)
from lapclip.report.plots import axes, error_bars, plain
from lapclip.runs.events import mapping, mappings
from lapclip.text import count, interval, number, percent, significant

EVALUATION, FOLDER = "evaluation.json", "evaluation"
"""The file of an evaluation, and the folder of a run that holds a folder for each evaluation."""
THUMBNAIL = "pictures/evaluation-{}.jpg"
"""A small image of an evaluation: in a folder and under a name that no one else's images have."""
MOST_CLASSES = 60
"""Classes of a confusion matrix that can still be read."""


def evaluation_sections(run: Path) -> list[Section]:
    """The evaluations that a run's folder holds, the newest first."""
    found = []
    for path in (run / FOLDER).glob(f"*/{EVALUATION}"):
        try:
            evaluation = read_json(path)
            if isinstance(evaluation, dict):
                found.append((path.stat().st_mtime_ns, evaluation, path.parent))
        except (OSError, ValueError):
            continue
    newest_first = sorted(found, key=lambda entry: entry[0], reverse=True)
    return [
        section
        for _, evaluation, folder in newest_first
        for section in sections(evaluation, folder)
    ]


def evaluation_report(evaluation: dict[str, Any], folder: Path) -> Report:
    """An evaluation on its own."""
    title = f"Evaluation of {evaluation.get('run')}"
    return Report(title, _where(evaluation), _headlines(evaluation), sections(evaluation, folder))


def sections(evaluation: dict[str, Any], folder: Path) -> list[Section]:
    """An evaluation as sections."""
    about = [f"{_where(evaluation)}.", *map(str, _list(evaluation.get("notes")))]
    if before := mapping(evaluation.get("before")):
        about.append(str(before.get("summary")))
    scores, classes = mapping(evaluation.get("evaluation")), mapping(evaluation.get("zeroshot"))
    blocks: list[Block | None] = [Sentences(about)]
    if scores:
        blocks.append(recall_table(evaluation, scores))
        blocks += short_question_blocks(mapping(evaluation.get("short_questions")))
        blocks.append(_hubness(mapping(evaluation.get("hubness"))))
        blocks.append(hard_negatives(mapping(evaluation.get("negatives"))))
        blocks += [_confused(evaluation, folder), _examples(evaluation, folder)]
    if classes:
        templates = ", ".join(f'"{text}"' for text in _list(evaluation.get("templates")))
        blocks += [Sentences([f"Sentences for each class: {templates}."]), class_table(classes)]
        blocks += [per_class(classes), confusion(classes), _mistaken(evaluation, folder)]
    return [
        Section(
            f"Evaluation: {evaluation.get('data')}, split {evaluation.get('split')}",
            [b for b in blocks if b],
        )
    ]


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
        lines.append(
            Headline(
                "trained on",
                count(evaluation["trained_on"]),
                "of these images: no test of the model",
            )
        )
    for way, name in WAYS.items():
        if number(scores.get(f"{way}_r1")) is not None:
            sure = interval(mapping(scores.get("intervals")).get(f"{way}_r1"))
            lines.append(Headline(f"{name}, R@1", percent(scores[f"{way}_r1"]), sure))
            chance = f"chance {percent(mapping(scores.get('chances')).get(f'{way}_r10'))}"
            lines.append(Headline(f"{name}, R@10", percent(scores.get(f"{way}_r10")), chance))
    lines += among_1000_headline(scores)
    asked = mapping(evaluation.get("short_questions"))
    if number(asked.get("map")) is not None:
        lines.append(
            Headline(
                "short questions, mAP",
                significant(asked["map"]),
                f"chance {significant(asked.get('chance'))}",
            )
        )
    if number(classes.get("top1")) is not None:
        sure = interval(mapping(classes.get("intervals")).get("top1"))
        lines.append(Headline("zero-shot top-1", percent(classes["top1"]), sure))
        lines.append(Headline("chance", percent(mapping(classes.get("chance")).get("top1"))))
        lines.append(Headline("always the largest class", percent(classes.get("largest_class"))))
    return lines


def among_1000_headline(scores: dict[str, Any]) -> list[Headline]:
    """Return the R@1 among 1,000 candidates with its rating, or nothing without an estimate."""
    estimate = mapping(scores.get("r1_among_1000"))
    if number(estimate.get("recall")) is None:
        return []
    how = "measured" if estimate.get("measured") else "predicted"
    about = f"{interval(estimate.get('interval'))}, {how}: {estimate.get('rating')}"
    return [Headline("text to image, R@1 among 1,000", percent(estimate["recall"]), about)]


def recall_table(evaluation: dict[str, Any], scores: dict[str, Any]) -> Table:
    chances = mapping(scores.get("chances"))
    rows: list[list[Any]] = []
    for way, name in WAYS.items():
        rows.append([name, *_metrics(scores, way)])
        rows.append([f"{name}, 95 % interval", *_intervals(mapping(scores.get("intervals")), way)])
        rows.append([f"{name}, chance", *_metrics(chances, way)])
    empty = [""] * 3
    batch = mapping(scores.get("in_batch"))
    if batch:
        name = f"in batches of {batch.get('size')}"
        rows.append([name, percent(batch.get("accuracy")), *empty])
        rows.append([f"{name}, 95 % interval", interval(batch.get("interval")), *empty])
        rows.append([f"{name}, chance", percent(batch.get("chance")), *empty])
    if number(evaluation.get("linear_baseline")) is not None:
        baseline = percent(evaluation["linear_baseline"])
        rows.append(["text to image, linear baseline", baseline, *empty])
    return Table(["", "R@1", "R@5", "R@10", "mean reciprocal rank"], rows)


def _metrics(values: dict[str, Any], way: str) -> list[str]:
    recalls = [percent(values.get(f"{way}_r{rank}")) for rank in RANKS]
    return [
        *recalls,
        significant(values.get(f"{way}_mean_reciprocal_rank")),
    ]


def _intervals(values: dict[str, Any], way: str) -> list[str]:
    recalls = [interval(values.get(f"{way}_r{rank}")) for rank in RANKS]
    return [*recalls, _between(values.get(f"{way}_mean_reciprocal_rank"))]


def _between(low_high: Any) -> str:
    match low_high:
        case [low, high]:
            return f"{significant(low)} to {significant(high)}"
    return ""


def class_table(classes: dict[str, Any]) -> Table:
    sure, chance = mapping(classes.get("intervals")), mapping(classes.get("chance"))
    names = {"top1": "top-1", "top5": "top-5", "mean_per_class": "mean recall of the classes"}
    rows: list[list[Any]] = [
        [name, percent(classes.get(key)), interval(sure.get(key)), percent(chance.get(key))]
        for key, name in names.items()
    ]
    rows.append(["always the largest class", percent(classes.get("largest_class")), "", ""])
    return Table(["", "share", "95 % interval", "chance"], rows)


def short_question_blocks(found: dict[str, Any]) -> list[Block]:
    """How well single words and phrases find their images, and which best and worst."""
    kinds = [
        (name, kind)
        for name, kind in (("words", found), ("phrases", mapping(found.get("phrases"))))
        if kind
    ]
    rows: list[list[Any]] = [
        [
            f"{count(kind.get('questions'))} {name}",
            significant(kind.get("map")),
            _between([kind.get("map_low"), kind.get("map_high")]),
            significant(kind.get("chance")),
            percent(kind.get("first_five")),
        ]
        for name, kind in kinds
    ]
    if not rows:
        return []
    sentences = [
        "Short questions are the words and phrases that are most common in these captions; an image is right where "
        "one of its captions has them. mAP is the mean average precision: 1 where all right images come first. "
        "Captions do not mention all there is to see, so no model reaches 1."
    ]
    for name, kind in kinds:
        best, worst = (
            ", ".join(map(_question, mappings(kind.get(end)))) for end in ("best", "worst")
        )
        if best:
            sentences.append(f"Best {name}: {best}{f'; worst: {worst}' if worst else ''}.")
    header = [
        "short questions",
        "mAP",
        "95 % interval",
        "chance",
        "first five right",
    ]
    return [Table(header, rows), Sentences(sentences)]


def _hubness(found: dict[str, Any]) -> Table | None:
    """Recall without and with the hubness correction."""
    share = "not used: no sure gain"
    if found.get("used"):
        share = f"share {significant(found.get('share'))}"
    rows: list[list[Any]] = []
    for rank in RANKS:
        before, after = found.get(f"t2i_r{rank}"), found.get(f"t2i_r{rank}_with")
        if number(before) is not None:
            rows.append([f"text to image R@{rank}", percent(before), percent(after), share])
    return Table(["hubness correction", "without", "with", "in search"], rows) if rows else None


def _question(entry: dict[str, Any]) -> str:
    return f'"{entry.get("text")}" {significant(entry.get("average_precision"))}'


def _confused(evaluation: dict[str, Any], folder: Path) -> Gallery | None:
    rows = []
    for pair in mappings(evaluation.get("confused")):
        own, preferred = number(pair.get("own")), number(pair.get("preferred"))
        if own is None or preferred is None:
            continue
        images = [
            ReportImage(
                _thumbnail(folder, own),
                f"its own image, {significant(pair.get('own_score'))}",
                right=True,
            ),
            ReportImage(
                _thumbnail(folder, preferred),
                f"preferred, {significant(pair.get('preferred_score'))}: {pair.get('preferred_caption')}",
                right=False,
            ),
        ]
        rows.append((str(pair.get("caption")), images))
    explanation = (
        "Captions that score a wrong image above their own by most. Where the wrong image fits as well, the "
        "captions are at fault, not the model. Numbers are cosine similarities."
    )
    return Gallery("Most confused", explanation, rows) if rows else None


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
    explanation = (
        "The five images closest to some captions, the closest first, with their similarities. Green is the "
        "caption's own image; where it is not among them it stands at the end."
    )
    return Gallery("Answers to some captions", explanation, rows) if rows else None


def _mistaken(evaluation: dict[str, Any], folder: Path) -> Gallery | None:
    images = [
        ReportImage(_thumbnail(folder, at), f"{entry.get('class')}, taken for {entry.get('guess')}")
        for entry in mappings(evaluation.get("mistaken"))
        if (at := number(entry.get("picture"))) is not None
    ]
    explanation = (
        "Images taken for another class by the largest margin, one for each kind of mistake."
    )
    return Gallery("Surest mistakes", explanation, [("", images)]) if images else None


def _thumbnail(folder: Path, image: float) -> Path:
    return folder / THUMBNAIL.format(int(image))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def hard_negatives(found: dict[str, Any]) -> Plot | None:
    """Accuracy against easy, medium and hard wrong images."""
    kinds = [(kind, mapping(found.get(kind))) for kind in ("easy", "medium", "hard")]
    values = [number(entry.get("accuracy")) for _, entry in kinds]
    if any(value is None for value in values):
        return None
    sure = [mapping(entry.get("intervals")).get("accuracy") for _, entry in kinds]
    names, chance = [kind for kind, _ in kinds], number(found.get("chance"))
    traces = [bars("right image wins", names, values, "--blue", error_y=error_bars(values, sure))]
    if chance is not None:
        traces.append(bars("chance", names, [chance] * 3, "--faint"))
    rows: list[list[Any]] = [
        [
            kind,
            percent(entry.get("accuracy")),
            interval(between),
            percent(entry.get("pairwise")),
            significant(entry.get("similarity")),
        ]
        for (kind, entry), between in zip(kinds, sure, strict=True)
    ]
    return Plot(
        "Hard negatives",
        traces,
        {**axes("", "share of captions", share=True), "barmode": "group"},
        f"Each caption chooses between its own image and {count(found.get('negatives'))} wrong ones. Hard ones "
        "have the most similar captions by their words (tf-idf, not this model), medium ones are drawn from the most "
        "similar tenth, easy ones from the less similar half. A model that knows only the topic falls steeply.",
        Table(
            ["wrong images", "beats all", "95 % interval", "beats each", "likeness of captions"],
            rows,
        ),
    )


def per_class(classes: dict[str, Any]) -> Plot | None:
    """Recall of each class."""
    entries = [
        entry
        for entry in mappings(classes.get("per_class"))
        if number(entry.get("recall")) is not None
    ]
    if not entries:
        return None
    ordered = sorted(entries, key=lambda entry: -entry["recall"])
    names, values = (
        [str(entry.get("name")) for entry in ordered],
        [entry["recall"] for entry in ordered],
    )
    whiskers = error_bars(values, [entry.get("interval") for entry in ordered])
    rows: list[list[Any]] = [
        [
            name,
            percent(entry["recall"]),
            interval(entry.get("interval")),
            count(entry.get("pictures")),
        ]
        for name, entry in zip(names, ordered, strict=True)
    ]
    return Plot(
        "Recall of each class",
        [bars("recall", names, values, "--blue", error_y=whiskers)],
        {"xaxis": {"type": "category"}, "yaxis": axes("", "share recognised", share=True)["yaxis"]},
        "A class at zero is one whose name the model does not know, or always takes for another.",
        Table(["class", "recall", "95 % interval", "images"], rows),
        height=360,
    )


def confusion(classes: dict[str, Any]) -> Plot | None:
    """What is taken for what; of many classes, those with the most mistakes."""
    entries, cells = mappings(classes.get("per_class")), classes.get("confusion")
    numbers = [_numbers(cell) for cell in cells] if isinstance(cells, list) else []
    if (
        not entries
        or not numbers
        or any(len(cell) != 3 or max(cell[:2]) >= len(entries) for cell in numbers)
    ):
        return None
    mistakes = [0.0] * len(entries)
    for own, guess, times in numbers:
        if own != guess:
            mistakes[int(own)] += times
            mistakes[int(guess)] += times
    shown = sorted(sorted(range(len(entries)), key=lambda at: -mistakes[at])[:MOST_CLASSES])
    names = [str(entries[at].get("name")) for at in shown]
    times_of = {(int(own), int(guess)): times for own, guess, times in numbers}
    counts = [[times_of.get((own, guess), 0.0) for guess in shown] for own in shown]
    images = [number(entries[at].get("pictures")) or 0.0 for at in shown]
    shares = [
        [value / max(1, total) for value in row] for row, total in zip(counts, images, strict=True)
    ]
    trace = {
        "type": "heatmap",
        "x": [plain(name) for name in names],
        "y": [plain(name) for name in names],
        "z": shares,
        "text": [[count(value) for value in row] for row in counts],
        "texttemplate": "%{text}" if len(names) <= 20 else "",
        "hovertemplate": "%{y} taken for %{x}: %{text}<extra></extra>",
        "colorscale": "Cividis",
        "zmin": 0,
        "zmax": 1,
        "colorbar": {"thickness": 10, "tickformat": ".0%"},
    }
    rows: list[list[Any]] = [
        [name, *map(count, row)] for name, row in zip(names, counts, strict=True)
    ]
    some = f" Of {count(len(entries))} classes, the {MOST_CLASSES} that are in the most mistakes."
    return Plot(
        "Confusion matrix",
        [trace],
        {
            "xaxis": {"type": "category", "title": {"text": "taken for"}},
            "yaxis": {"type": "category", "autorange": "reversed", "title": {"text": "class"}},
        },
        "A row is a class; its bright cells are what its images are taken for. A perfect model is a bright diagonal; "
        f"a bright column is a class that swallows others.{some if len(entries) > MOST_CLASSES else ''}",
        Table(["class", *names], rows),
        height=max(320, min(900, 120 + 30 * len(names))),
    )


def bars(name: str, x: list[Any], y: list[Any], colour: str, **extra: Any) -> dict[str, Any]:
    """Bars of shares."""
    return {
        "type": "bar",
        "name": plain(name),
        "x": [plain(value) if isinstance(value, str) else value for value in x],
        "y": y,
        "marker": {"color": colour},
        "hovertemplate": f"{plain(name)}, %{{x}}: %{{y:.1%}}<extra></extra>",
        **extra,
    }


def _numbers(values: Any) -> list[float]:
    """A list of numbers; empty where anything else is in it."""
    found = [number(value) for value in values] if isinstance(values, list) else []
    return [value for value in found if value is not None] if None not in found else []
