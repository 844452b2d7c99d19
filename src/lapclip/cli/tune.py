"""`lapclip tune`."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from lapclip.cli.display import display, loading
from lapclip.cli.output import Common, emit, source_setting, typed
from lapclip.config import recipe_for
from lapclip.suggest import command

SHOWN = (
    "device",
    "dtype",
    "attention",
    "linear",
    "micro_batch",
    "threads",
    "loader_threads",
    "compile",
)


def tune(
    data: str | None = None,
    /,
    *,
    recipe: Annotated[str | None, Parameter(show_default=False)] = None,
    seconds: float = 60.0,
    settings: Annotated[
        tuple[str, ...], Parameter(name="--set", negative="", show_default=False)
    ] = (),
    common: Common | None = None,
) -> int:
    """Find the fastest correct settings for a recipe on this machine, by timing real training steps.

    The batch and the number of updates stay the recipe's. A setting counts only if its loss, gradients and embeddings
    agree with float32 on the CPU. `lapclip train` uses what was found; `--set` overrides it.

    For example:

    - `lapclip tune`
    - `lapclip tune photos/ --recipe photos`
    - `lapclip tune --recipe seed --seconds 120`
    - `lapclip tune --set train.device=cpu --json`

    Parameters
    ----------
    data
        What to train on, as for `lapclip train`; without it, the built-in scenes.
    recipe
        A recipe's name or a TOML file; without it, the one that `lapclip train` would take. Example: lapclip tune
        --recipe seed
    seconds
        Time to spend. From 300 on, or for a run of 40 minutes or more, compiling is tried too. Example: lapclip tune
        --seconds 300
    settings
        Fix a setting instead of tuning it; may be repeated. Example: lapclip tune --set train.dtype=float32
    """
    with loading():
        from lapclip.commands.tune import tune as tune_recipe
        from lapclip.training.request import Callbacks

    with display() as shown:
        callbacks = Callbacks(
            data_progress=shown.data_progress, tuning_progress=shown.tuning_progress
        )
        asked = [*source_setting(data), *settings]
        found = tune_recipe(recipe_for(data, recipe), asked, seconds, callbacks)
    given = [] if data is None else [data]
    if recipe is not None:
        given += ["--recipe", recipe]
    again = command("train", *given, *(word for setting in settings for word in ("--set", setting)))
    emit(found, summary(found, again), common)
    return 0


def summary(found: dict[str, Any], train: str) -> list[str]:
    """What was chosen and why, and what was not."""
    lines = [f"recipe {escape(found['recipe'])}", ""]
    choices, reasons = found["choices"], found["reasons"]
    for name in SHOWN:
        choice = choices[name]
        shown = "whole batch" if name == "micro_batch" and not choice else str(choice)
        lines.append(
            f"[bold]{name.replace('_', ' '):<16}{shown}[/bold]\n{'':16}[dim]{escape(reasons[name])}[/dim]"
        )
    lines.append("")
    lines.append(
        f"{found['pairs_per_second']:,.1f} pairs/s, {found['step_seconds'] * 1e3:,.1f} ms a step"
    )
    lines += [f"[dim]not chosen: {escape(entry['reason'])}[/dim]" for entry in found["rejected"]]
    lines += [f"[yellow]{escape(warning)}[/yellow]" for warning in found["warnings"]]
    remembered = (
        "remembered for lapclip train"
        if found["remembered"]
        else "not remembered: lapclip train will tune again"
    )
    lines.append(f"tuned in {found['seconds']:.0f} s; {remembered}")
    return [*lines, f"Next: {escape(typed(train))}"]
