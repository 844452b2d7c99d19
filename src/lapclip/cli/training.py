"""`lapclip train` and `lapclip resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lapclip.cli.output import Common, emit, typed
from lapclip.cli.progress import display
from lapclip.cli.scores import score_table
from lapclip.config import DEFAULT_RECIPE

if TYPE_CHECKING:
    from lapclip.launch import Outcome


def train(
    *,
    recipe: str = DEFAULT_RECIPE,
    minutes: float | None = None,
    name: str | None = None,
    settings: Annotated[tuple[str, ...], Parameter(name="--set", negative="", show_default=False)] = (),
    common: Common | None = None,
) -> int:
    """Train a model from scratch on pictures and captions that lapclip draws itself.

    The run is a folder under runs/: settings, events, log, checkpoints and the best model. Ctrl-C saves and ends;
    `lapclip resume` goes on.

    For example:

    - `lapclip train`
    - `lapclip train --minutes 2 --name quick`
    - `lapclip train --recipe seed --set train.epochs=3`

    Parameters
    ----------
    recipe
        A recipe's name (first-run, seed, seed-gpu) or a TOML file. Example: lapclip train --recipe seed
    minutes
        Fill this many minutes; the schedule is fitted to them. Example: lapclip train --minutes 10
    name
        Name of the run's folder under runs/. Example: lapclip train --name mine
    settings
        Change a setting of the recipe; may be repeated. Example: lapclip train --set train.batch_size=64
    """
    from lapclip import launch

    with display() as shown:
        hooks = launch.Hooks([shown], shown.data_progress, shown.tuning_progress)
        outcome = launch.start(recipe, list(settings), minutes, name, hooks)
    emit(outcome.to_dict(), summary(outcome), common)
    return outcome.exit_status


def resume(run: str | None = None, /, *, common: Common | None = None) -> int:
    """Go on with a run that was stopped, killed or put to sleep; it ends with the result it would have had.

    For example:

    - `lapclip resume`
    - `lapclip resume first-run-2`

    Parameters
    ----------
    run
        The run's name; without one, the newest.
    """
    from lapclip import launch

    with display() as shown:
        outcome = launch.resume(run, launch.Hooks([shown], shown.data_progress))
    emit(outcome.to_dict(), summary(outcome, "since it was resumed"), common)
    return outcome.exit_status


def summary(outcome: Outcome, whole: str = "in all") -> list[str]:
    """The end of a run, for a person; `whole` says what its seconds are of."""
    name = outcome.run.replace("\\", "/").removeprefix("runs/")
    if outcome.evaluation is None:
        return [
            f"Stopped after step {outcome.steps:,} of {outcome.run}; everything is saved.",
            f"Go on: {typed(f'resume {name}')}",
        ]
    kinds = set(outcome.devices.values())
    places = kinds.pop() if len(kinds) == 1 else ", ".join(f"{tower} on {at}" for tower, at in outcome.devices.items())
    return [
        *score_table(outcome.evaluation),
        "",
        f"time          {_duration(outcome.training_seconds)} of training, {_duration(outcome.seconds)} {whole}",
        f"speed         {outcome.pairs_per_second:,.0f} pairs/s on {places}",
        f"peak memory   {outcome.peak_memory_bytes / 1e9:.2f} GB",
        f"run           {outcome.run}",
        "",
        f"Next: {typed(f'eval {name}')}",
        f"      {typed('train --minutes 10 --name longer')}",
        f"      or, in Python: lapclip.load({outcome.run!r}).encode_text(['a red cat on the left'])",
    ]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
