"""`lapclip gained`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from lapclip.cli.display import display, loading
from lapclip.cli.output import Common, emit, typed
from lapclip.evaluation import RANKS, WAYS
from lapclip.runs.events import mapping
from lapclip.suggest import command


def gained(
    run: str | None = None,
    /,
    *,
    check: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    alpha: Annotated[str | None, Parameter(show_default=False)] = None,
    device: str = "auto",
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
    common: Common | None = None,
) -> int:
    """Show what fine-tuning gained on the new data and forgot elsewhere, and which mixture of start and end to take.

    For a run that began from a trained model. The new data is scored on its held-out images; the checks are the
    built-in scenes and whatever you name. Between start (alpha 0) and end (alpha 1) lie models whose weights are a
    share of each; often one of them keeps most of what was gained and most of what was known. The result is saved in
    the run's folder, with a page. Ctrl-C keeps the data sets that are scored, and the same command goes on.

    For example:

    - `lapclip gained`
    - `lapclip gained mine --check clothes/ --check holiday.csv`
    - `lapclip gained mine --check clothes/ --alpha auto`

    Parameters
    ----------
    run
        The run's name or folder; without one, the newest.
    check
        Images that the model should still know: class folders, or images with captions; may be repeated. Example:
        lapclip gained --check clothes/
    alpha
        Write the model at this alpha, from 0 to 1, or the recommended one (auto), into the run's blended/. Example:
        lapclip gained --alpha auto
    device
        Where to compute: auto, cpu, cuda, mps, xpu. Example: lapclip gained --device cpu
    out
        Folder for the result and its page; without one, the run's own. Example: lapclip gained --out shared
    """
    with loading():
        from lapclip.commands.gained import GainedRequest
        from lapclip.commands.gained import gained as find_gained

    request = GainedRequest(run, check, alpha, device, out)
    with display() as shown:
        result = find_gained(request, shown.data_progress, shown.counting)
    emit(result, [*_tables(result), "", *_ending(result)], common)
    return 0


def _tables(result: dict[str, Any]) -> list[str]:
    """The sentence, the table, the new data's recalls, and what to know."""
    from lapclip.report.gained_report import change

    best = f"alpha {result['alpha']:g}"
    lines = [escape(result["summary"]), ""]
    lines.append(
        f"[bold]{'':<40}[/bold]  before   after   change (95 % interval)   {best:>9}   change (95 % interval)"
    )
    sets = [result["new"], *result["checks"]]
    for found in sets:
        first, last, chosen = found["curve"][0], found["curve"][-1], _at(found, result["alpha"])
        what = escape(f"{found['name']} ({found['split']}), {found['figure']}"[:40])
        shares = f"{first['value']:>8.1%}{last['value']:>8.1%}   {change(last):<23}"
        text = f"{what:<40}{shares}{chosen['value']:>10.1%}   {change(chosen)}"
        lines.append(text if found.get("decides", True) else f"[dim]{text}[/dim]")
        lines += _recalls(found) if found is result["new"] else []
    header = "".join(f"{alpha:>8g}" for alpha in result["alphas"])
    lines += ["", f"[bold]{'alpha':<40}[/bold]{header}  chance"]
    for found in sets:
        values = "".join(f"{point['value']:>8.1%}" for point in found["curve"])
        lines.append(f"{escape(found['name'][:40]):<40}{values}{found['chance']:>8.1%}")
    lines += ["", f"Recommended: alpha {result['alpha']:g}, {result['why']}."]
    return lines + [f"[dim]{escape(note)}[/dim]" for note in result["notes"]]


def _recalls(new: dict[str, Any]) -> list[str]:
    """Where the new data has captions."""
    if "t2i_r1" not in new["before"]:
        return []
    lines = []
    for way, text in WAYS.items():
        for rank in RANKS:
            before, after, chosen = (
                new[kind][f"{way}_r{rank}"] for kind in ("before", "after", "recommended")
            )
            name = f"{text}, R@{rank}"
            lines.append(f"  {name:<38}{before:>8.1%}{after:>8.1%}{'':26}{chosen:>10.1%}")
    asked = [
        mapping(new[kind].get("short_questions")).get("map")
        for kind in ("before", "after", "recommended")
    ]
    if None not in asked:
        before, after, chosen = asked
        lines.append(
            f"  {'short questions, mAP':<38}{before:>8.3f}{after:>8.3f}{'':26}{chosen:>10.3f}"
        )
    return lines


def _at(found: dict[str, Any], alpha: float) -> dict[str, Any]:
    return next(point for point in found["curve"] if point["alpha"] == alpha)


def _ending(result: dict[str, Any]) -> list[str]:
    name = Path(result["run"]).name
    page = f"Next: open {result['files'][0]} in a browser"
    if result["model"] is None:
        return [
            f"{page}, or {escape(typed(command('gained', name, '--alpha', 'auto')))} to write the recommended model"
        ]
    return [f"model         {result['model']}, alpha {result['model_alpha']:g}",
            f"{page}, or, in Python: lapclip.load({result['model']!r})"]  # fmt: skip
