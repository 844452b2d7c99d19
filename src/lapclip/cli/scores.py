"""`lapclip eval`, and how scores look."""

from __future__ import annotations

from typing import Any

from lapclip.cli.output import Common, emit, typed
from lapclip.cli.progress import display


def evaluate(run: str | None = None, /, *, common: Common | None = None) -> int:
    """Score a run's best model on held-out pictures and captions that did not choose its checkpoint.

    For example:

    - `lapclip eval`
    - `lapclip eval first-run --json`

    Parameters
    ----------
    run
        The run's name; without one, the newest.
    """
    from lapclip import launch, preparing

    with display() as shown:
        result = launch.evaluate(run, preparing.Hooks(data_progress=shown.data_progress))
    lines = [f"{result['run']}, split {result['split']}", *score_table(result["evaluation"])]
    lines.append(f"  [dim]{'linear baseline':<33}{result['linear_baseline']:>8.1%}[/dim]")
    emit(result, [*lines, f"Next: {typed('runs')}, or in Python: lapclip.load({result['run']!r})"], common)
    return 0


def score_table(evaluation: dict[str, Any]) -> list[str]:
    """Recall both ways beside chance, with 95 % intervals of R@1."""
    title = f"held-out pairs: {evaluation['candidates']} candidates"
    lines = [f"[bold]{title:<35}[/bold]     R@1     R@5    R@10   R@1 95 % interval"]
    for way, text in (("t2i", "text to image"), ("i2t", "image to text")):
        recalls = "".join(f"{evaluation[f'{way}_r{rank}']:>8.1%}" for rank in (1, 5, 10))
        low, high = evaluation["intervals"][f"{way}_r1"]
        lines.append(f"  {text:<33}{recalls}   {low:.1%} to {high:.1%}")
    chances = "".join(f"{min(1, rank * evaluation['chance']):>8.1%}" for rank in (1, 5, 10))
    lines.append(f"  [dim]{'chance':<33}{chances}[/dim]")
    if batch := evaluation.get("in_batch"):
        low, high = batch["interval"]
        what = f"accuracy in batches of {batch['size']}"
        lines.append(
            f"  {what:<33}{batch['accuracy']:>8.1%}{'':16}   {low:.1%} to {high:.1%}, chance {batch['chance']:.1%}"
        )
    return lines
