"""`lapclip eval`, and tables of metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from lapclip.cli.display import display, loading
from lapclip.cli.model import have_model
from lapclip.cli.output import Common, emit, typed
from lapclip.evaluation import RANKS, WAYS
from lapclip.suggest import command


def evaluate(
    model: str | None = None,
    data: str | None = None,
    /,
    *,
    split: Annotated[str | None, Parameter(show_default=False)] = None,
    device: str = "auto",
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
    settings: Annotated[
        tuple[str, ...], Parameter(name="--set", negative="", show_default=False)
    ] = (),
    before: Annotated[str | None, Parameter(show_default=False)] = None,
    check: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    blend: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    yes: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    common: Common | None = None,
) -> int:
    """Score a model on images it was not trained on: how well captions find images and images captions.

    Without DATA the run's own held-out images are taken, those that did not choose its checkpoint. A folder of class
    folders is classified by the names of the classes (zero-shot). Each metric comes with chance and a 95 % interval.
    The evaluation is saved in the run's folder, with a page of plots and images.

    For example:

    - `lapclip eval`
    - `lapclip eval first-run --json`
    - `lapclip eval first-run photos/ --split val`
    - `lapclip eval vit-b-32-laion2b photos/`
    - `lapclip eval first-run clothes/ --set "data.prompts=a photo of a {}.|a {} on a table."`
    - `lapclip eval mine --before runs/mine/start --check scenes --blend`

    Parameters
    ----------
    model
        A run's name or folder, a folder or file with a model, a published one by its name (`lapclip models` lists
        them), or hf:org/name on the Hugging Face hub; without one, the newest run with a model.
    data
        Other images to score on: a folder, a table, shards. Example: lapclip eval first-run photos/
    split
        Score this split, or `all`. Without it: test, else val, else all. Example: lapclip eval --split val
    device
        Where to compute: auto, cpu, cuda, mps, xpu. Example: lapclip eval --device cpu
    out
        Folder for the evaluation and its page; without one, the run's own. Example: lapclip eval --out shared
    settings
        How to read the data; may be repeated. Example: lapclip eval first-run a.csv --set data.caption_column=title
    before
        Compare with this model, for example the one that training started from: recall of both on these images.
        Example: lapclip eval mine --before runs/mine/start
    check
        Other images to compare both models on, to see what was forgotten; may be repeated. Example: lapclip eval
        mine --before runs/mine/start --check clothes/
    blend
        Write the best model between both into the run's blended/: weights a share of the way from the one before, the
        share chosen on val. Example: lapclip eval mine --before runs/mine/start --blend
    yes
        Fetch a published model without asking. Example: lapclip eval vit-b-32-laion2b photos/ --yes
    """
    with loading():
        from lapclip.commands.evaluate import evaluate as evaluate_model
        from lapclip.commands.evaluation_data import EvaluationRequest

    have_model(model if data else None, yes=yes)
    have_model(before, yes=yes)
    request = EvaluationRequest(model, data, split, device, out, settings, before, check, blend)
    with display() as shown:
        result = evaluate_model(
            request, shown.data_progress, shown.counting("embedding images and captions")
        )
    emit(result, [*_tables(result), *_ending(result)], common)
    return 0


def _tables(result: dict[str, Any]) -> list[str]:
    """What was found, as a few tables."""
    where = f"{result['run']} on {result['data']}, split {result['split']} ({result['why_split']})"
    lines = [escape(where)]
    for at, note in enumerate(result["notes"]):
        colour = "yellow" if (result["trained_on"] or result["data_changed"]) and at == 0 else "dim"
        lines.append(f"[{colour}]{escape(note)}[/{colour}]")
    if "evaluation" in result:
        held_out = result["split"] not in ("train", "all") and not (
            result["trained_on"] or result["data_changed"]
        )
        named = f"{result['split']} pairs" if result["split"] != "all" else "pairs"
        what = f"{'held-out ' * held_out}{named}"
        lines += recall_table(result["evaluation"], what)
        lines += _before_lines(result.get("before"))
        if (baseline := result.get("linear_baseline")) is not None:
            lines.append(f"  [dim]{'linear baseline':<33}{baseline:>8.1%}[/dim]")
        lines += short_question_lines(result["short_questions"])
        lines += _ranks(result["evaluation"]) + _negatives(result["negatives"])
        lines += _hubness(result.get("hubness") or {})
    else:
        lines += _classes(result["zeroshot"])
    if before := result.get("before"):
        lines += ["", escape(before["summary"]), ""]
    return lines


def _ending(result: dict[str, Any]) -> list[str]:
    if not result["files"]:
        return [
            f"Next: --out FOLDER keeps this with its images; in Python: lapclip.load({result['run']!r})"
        ]
    from lapclip.runs.folder import Run  # not for a command that only prints its help

    report = typed(command("report", Run(Path(result["run"])).typed))
    return [f"Next: open {result['files'][0]} in a browser, or {escape(report)}"]


def recall_table(evaluation: dict[str, Any], what: str = "") -> list[str]:
    """Recall both ways beside chance, with 95 % intervals of R@1, under the name of the split."""
    what = what or f"held-out {evaluation.get('split', '')} pairs".replace("  ", " ")
    title = escape(f"{what}: {evaluation['candidates']:,} images")
    lines = [f"[bold]{title:<39}[/bold] R@1     R@5    R@10   R@1 95 % interval"]
    lines += [_recall_line(evaluation, way, text) for way, text in WAYS.items()]
    if estimate := evaluation.get("r1_among_1000"):
        lines.append(_among_1000_line(estimate))
    found = {way: _recalls(evaluation["chances"], way) for way in WAYS}
    if found["t2i"] == found["i2t"]:
        lines.append(f"  [dim]{'chance':<33}{found['t2i']}[/dim]")
    else:  # several captions of an image are easier to hit than one image
        lines += [f"  [dim]{f'chance, {text}':<33}{found[way]}[/dim]" for way, text in WAYS.items()]
    if batch := evaluation.get("in_batch"):
        low, high = batch["interval"]
        what = f"accuracy in batches of {batch['size']}"
        lines.append(
            f"  {what:<33}{batch['accuracy']:>8.1%}{'':16}   {low:.1%} to {high:.1%}, chance {batch['chance']:.1%}"
        )
    return lines


def short_question_lines(found: dict[str, Any] | None) -> list[str]:
    """How well single words and phrases find their images, beside chance."""
    if not found:
        return []
    title = "short queries"
    lines = [f"[bold]{title:<35}[/bold]     mAP  chance   first five right   mAP 95 % interval"]
    for name, kind in (("words", found), ("phrases", found.get("phrases"))):
        if kind:
            what = f"{kind['questions']} {name}"
            scores = f"{kind['map']:>8.3f}{kind['chance']:>8.3f}{kind['first_five']:>19.1%}"
            sure = f"{kind['map_low']:.3f} to {kind['map_high']:.3f}"
            lines.append(f"  {what:<33}{scores}   {sure}")
    return lines


def short_query_line(found: dict[str, Any] | None) -> list[str]:
    """Say in one line how well single words and phrases find their images."""
    if not found:
        return []
    kinds = {"words": found, "phrases": found.get("phrases")}
    shares = [
        f"{kind['first_five']:.0%} (chance {kind['first_five_chance']:.0%}) for {name}"
        for name, kind in kinds.items()
        if kind
    ]
    return [f"short queries: of the first five results {' and '.join(shares)} are right"]


def start_lines(evaluation: dict[str, Any] | None) -> list[str]:
    """What the model scored before it was trained on, beside the table of what it scores now."""
    return (
        [_recall_line(evaluation, way, f"at the start, {text}") for way, text in WAYS.items()]
        if evaluation
        else []
    )


def _before_lines(before: dict[str, Any] | None) -> list[str]:
    """Return the recall of the model before, without intervals."""
    if not before:
        return []
    return [
        f"  {f'before, {text}':<33}{_recalls(before['recalls'], way)}" for way, text in WAYS.items()
    ]


def _recall_line(evaluation: dict[str, Any], way: str, text: str) -> str:
    low, high = evaluation["intervals"][f"{way}_r1"]
    return f"  {text:<33}{_recalls(evaluation, way)}   {low:.1%} to {high:.1%}"


def _among_1000_line(estimate: dict[str, Any]) -> str:
    """Return the line that makes the recall comparable with other results."""
    low, high = estimate["interval"]
    how = "measured" if estimate["measured"] else "predicted"
    recall = f"{estimate['recall']:>8.1%}{'':16}   {low:.1%} to {high:.1%}"
    return f"  {'text to image among 1,000':<33}{recall}, {how}: [bold]{estimate['rating']}[/bold]"


def _recalls(values: dict[str, Any], way: str) -> str:
    return "".join(f"{values[f'{way}_r{rank}']:>8.1%}" for rank in RANKS)


def _ranks(evaluation: dict[str, Any]) -> list[str]:
    title = "rank of the right answer"
    lines = [f"[bold]{title:<35}[/bold]  mean reciprocal   chance   95 % interval"]
    for way, text in WAYS.items():
        name = f"{way}_mean_reciprocal_rank"
        mean, chance = evaluation[name], evaluation["chances"][name]
        low, high = evaluation["intervals"][name]
        lines.append(f"  {text:<33}{mean:>17.3f}{chance:>9.3f}   {low:.3f} to {high:.3f}")
    return lines


def _negatives(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    title = f"against {found['negatives']} wrong image{'s' * (found['negatives'] != 1)}"
    shares = "".join(f"{found[kind]['accuracy']:>8.1%}" for kind in ("easy", "medium", "hard"))
    low, high = found["hard"]["intervals"]["accuracy"]
    return [
        f"[bold]{title:<35}[/bold]    easy  medium    hard   hard 95 % interval",
        f"  {'the right one wins':<33}{shares}   {low:.1%} to {high:.1%}, chance {found['chance']:.1%}",
    ]


def _hubness(found: dict[str, Any]) -> list[str]:
    """Return the recall with the hubness correction, on captions that did not choose its share."""
    if not found:
        return []
    how = f"share {found['share']:g}" if found["used"] else "not used: no sure gain"
    recalls = "".join(f"{found[f't2i_r{rank}_with']:>8.1%}" for rank in RANKS)
    title = "text to image, hubness corrected"
    return [
        f"[bold]{title:<39}[/bold] R@1     R@5    R@10   in search",
        f"  {'captions':<33}{recalls}   {how}",
    ]


def _classes(found: dict[str, Any]) -> list[str]:
    title = f"zero-shot: {found['pictures']:,} images, {found['classes']} classes"
    lines = [f"[bold]{title:<41}[/bold]   share   chance   95 % interval"]
    for key, text in (
        ("top1", "top-1"),
        ("top5", "top-5"),
        ("mean_per_class", "mean recall of the classes"),
    ):
        low, high = found["intervals"][key]
        lines.append(
            f"  {text:<39}{found[key]:>8.1%}{found['chance'][key]:>9.1%}   {low:.1%} to {high:.1%}"
        )
    lines.append(f"  [dim]{'always the largest class':<39}{found['largest_class']:>8.1%}[/dim]")
    ordered = sorted(
        (entry for entry in found["per_class"] if entry["pictures"]),
        key=lambda entry: -entry["recall"],
    )
    named = [f"{escape(entry['name'])} {entry['recall']:.0%}" for entry in ordered]
    best, worst = ", ".join(named[:3]), ", ".join(named[3:][-3:])
    lines.append(f"  best {best}{f'; worst {worst}' if worst else ''}")
    return lines
