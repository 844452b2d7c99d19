"""`lapclip train`, and the summary of a run at its end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.markup import escape

from lapclip.cli.display import display, loading
from lapclip.cli.eval import recall_table, short_query_line, start_lines
from lapclip.cli.join import check_machines, invite
from lapclip.cli.model import have_model
from lapclip.cli.output import Common, emit, source_setting, typed
from lapclip.config import flag_settings, recipe_for
from lapclip.errors import ConfigError
from lapclip.evaluation import note_on_chance, note_on_few
from lapclip.join.agreement import invited_machines, resume_words
from lapclip.runs.trend import is_worse
from lapclip.suggest import command, train_command
from lapclip.text import duration

if TYPE_CHECKING:
    from lapclip.runs.folder import TrainRequest
    from lapclip.training.outcome import TrainOutcome


def train(
    data: str | None = None,
    /,
    *,
    recipe: Annotated[str | None, Parameter(show_default=False)] = None,
    start: Annotated[str | None, Parameter(name="--from", show_default=False)] = None,
    minutes: float | None = None,
    name: str | None = None,
    teacher: str | None = None,
    device: str | None = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    lr: float | None = None,
    background: Annotated[bool, Parameter(negative="")] = False,
    polite: Annotated[bool, Parameter(negative="")] = False,
    ask: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    settings: Annotated[
        tuple[str, ...], Parameter(name="--set", negative="", show_default=False)
    ] = (),
    yes: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    machines: int | None = None,
    common: Common | None = None,
) -> int:
    """Train a model: on your images and captions or on ones that lapclip draws, from scratch or from weights.

    Data may be a folder with a .txt beside each image, a CSV or JSON table, COCO or Karpathy annotations, class
    folders, tar shards or parquet; `lapclip data check` says what it is taken for. The run is a folder under runs/:
    settings, events, log, checkpoints and the best model. Ctrl-C saves and ends;
    `lapclip resume` goes on.

    For example:

    - `lapclip train`
    - `lapclip train photos/`
    - `lapclip train photos/ --recipe photos`
    - `lapclip train photos/ --from runs/heads`
    - `lapclip train --minutes 2 --name quick`
    - `lapclip train --recipe seed --epochs 3`
    - `lapclip train --background --polite`
    - `lapclip train photos/ --recipe distil --teacher heads`
    - `lapclip train photos/ --machines 2`

    Parameters
    ----------
    data
        Images with captions: a folder, a table, a pattern of shards, `emoji` or `scenes`. Without it: scenes.
    recipe
        A recipe's name (first-run, photos, seed, seed-gpu; from pretrained weights: heads, last-blocks, lora, full;
        from a teacher: distil) or a TOML file; without it, first-run for scenes, and for your own data heads up to
        100,000 training images and photos above that; with --from, by how many images there are.
        Example: lapclip train photos/ --recipe photos
    start
        The model to go on from: a run, published weights (a file, a folder, a name that `lapclip models` lists, a name
        on the Hugging Face hub). Example: lapclip train photos/ --from vit-b-32-laion2b
    minutes
        Fill this many minutes; the schedule is fitted to them. Example: lapclip train --minutes 10
    name
        Name of the run's folder under runs/. Example: lapclip train --name mine
    teacher
        A model that this one learns from, too: a run, a model folder, or a file of vectors (.npy or .parquet). Example: lapclip
        train photos/ --teacher runs/heads
    device
        Where to train: auto, cpu, cuda, mps or xpu. Short for --set train.device. Example: lapclip train --device cuda
    batch_size
        Pairs that are compared at once. Short for --set train.batch_size. Example: lapclip train --batch-size 64
    epochs
        Passes over the training images. Short for --set train.epochs. Example: lapclip train --epochs 3
    lr
        The highest learning rate. Short for --set train.learning_rate. Example: lapclip train --lr 1e-3
    background
        Return at once; the run goes on without this terminal. Example: lapclip train --background
    polite
        Run at a low priority; pause on a low battery, under heat and while swap grows. Example: lapclip train --polite
    ask
        A caption of your own to follow while it learns; may be repeated. Example: lapclip train --ask "a red cat"
    settings
        Change a setting of the recipe; may be repeated. A flag wins over it. Example: lapclip train --set
        train.warmup=0.2
    yes
        Fetch a published model without asking. Example: lapclip train photos/ --from vit-b-32-laion2b --yes
    machines
        Train with so many computers, this one among them; the line to type on the others is shown. Example: lapclip
        train photos/ --machines 2
    """
    from lapclip.machine.torchrun import under_torchrun
    from lapclip.runs.folder import TrainRequest, check_name
    from lapclip.which_model import start_setting, teacher_setting

    check_machines(machines, background=background)
    if background and under_torchrun():
        raise ConfigError(
            "--background cannot be had under torchrun.", hint="nohup torchrun ... &, or a terminal"
        )
    for caption in ask:
        if "|" in caption:
            raise ConfigError(
                f"--ask {caption!r}: a caption that is followed holds no vertical bar.",
                hint="--ask twice",
            )

    def make_request() -> TrainRequest:
        """Return the recipe, and all settings that differ from it."""
        for model in (start, teacher):
            have_model(model, yes=yes)
        flags = {"device": device, "batch_size": batch_size, "epochs": epochs, "lr": lr}
        named = [*source_setting(data), *start_setting(start), *teacher_setting(teacher)]
        all_settings = [*named, *settings, *flag_settings(flags)]
        if polite:
            all_settings.append("work.polite=true")
        if ask:
            all_settings.append(f"work.ask={'|'.join(ask)}")
        return TrainRequest(recipe_for(data, recipe, start), tuple(all_settings), minutes)

    if under_torchrun():
        return _train_together(make_request, name, common)
    request = make_request()
    if background:
        from lapclip.commands.background import train_in_background
        from lapclip.commands.choose_recipe import check_early  # brings numpy

        check_name(name)
        settled = check_early(request)
        run = train_in_background(request, settled.recipe, name)
        lines = [
            f"{run.path} starts in the background; its log is {run.log}.",
            f"Next: {escape(typed(command('watch', run.name)))}",
        ]
        emit({"run": str(run.path), "name": run.name, "state": "starting"}, lines, common)
        return 0
    if machines is not None:
        return invite(machines, lambda plans, progress: plans.plan_new_run(request, name, progress))
    with display() as shown:
        with loading():
            from lapclip.commands.train import train as train_run
            from lapclip.training.request import Callbacks

        callbacks = Callbacks([shown], shown.data_progress, shown.tuning_progress)
        outcome = train_run(request, name, callbacks)
    return report_outcome(outcome, common)


def _train_together(
    make_request: Callable[[], TrainRequest], name: str | None, common: Common | None
) -> int:
    """Train on one of the ranks that torchrun started. Only the one that writes makes the request."""
    from lapclip.commands.resume import resume
    from lapclip.commands.train import train as train_run
    from lapclip.training.ranks_in_a_run import take_part
    from lapclip.training.request import Callbacks

    with display() as shown:
        callbacks = Callbacks([shown], shown.data_progress, shown.tuning_progress)
        outcome = take_part(
            lambda ranks: train_run(make_request(), name, callbacks, ranks),
            lambda run, ranks, again: resume(str(run.path), callbacks, detached=again, ranks=ranks),
        )
    return 0 if outcome is None else report_outcome(outcome, common)


def report_outcome(outcome: TrainOutcome, common: Common | None, whole: str = "in all") -> int:
    """Print how a run ended. `whole` says what its wall clock counts.

    A run that stopped only to meet other computers has no result yet: its agent starts it again.
    """
    if outcome.exit_status == 128 + signal.SIGTERM and invited_machines():
        print(
            f"Saved after step {outcome.steps:,} of {outcome.run}: the computers meet again.",
            file=sys.stderr,
        )
    else:
        emit(outcome.to_dict(), summary(outcome, whole), common)
    return outcome.exit_status


def summary(outcome: TrainOutcome, whole: str = "in all") -> list[str]:
    """Return the end of a run as lines. `whole` says what its wall clock counts."""
    name = outcome.run.replace("\\", "/").removeprefix("runs/")
    if outcome.evaluation is None:
        return [
            f"Stopped after step {outcome.steps:,} of {outcome.run}; everything is saved.",
            f"Go on: {escape(typed(resume_words(name)))}",
        ]
    seconds = (
        f"{duration(outcome.training_seconds)} of training, {duration(outcome.seconds)} {whole}"
    )
    kept = f"that of step {outcome.best_step:,} of {outcome.steps:,}, which did best on val"
    facts = [
        f"time          {seconds}",
        f"speed         {outcome.pairs_per_second:,.0f} pairs/s on {outcome.devices['image']}",
        f"peak memory   {outcome.peak_memory_bytes / 1e9:.2f} GB",
        f"model kept    {kept}",
    ]
    if outcome.early:
        facts.append(f"ended early   {outcome.early}")
    return [
        *recall_table(outcome.evaluation),
        *start_lines(outcome.start_evaluation),
        *_worse_lines(outcome),
        *short_query_line(outcome.short_questions),
        *note_on_few(outcome.evaluation["candidates"]),
        *note_on_chance(outcome.evaluation),
        "",
        *facts,
        f"run           {outcome.run}",
        "",
        f"Next: {escape(typed(evaluation_command(outcome, name)))}",
        *(f"      {line}" for line in _further(outcome, name)),
    ]


def _worse_lines(outcome: TrainOutcome) -> list[str]:
    """Say plainly that the model became worse than the one it started from."""
    if not is_worse(outcome.evaluation or {}, outcome.start_evaluation or {}):
        return []
    start = escape(f"{outcome.run}/start")
    return [
        "  [yellow]Training made the model worse: these scores are below those at the start. "
        f"The better model is {start}.[/yellow]"
    ]


def evaluation_command(outcome: TrainOutcome, name: str) -> str:
    """Return the command that evaluates the run, beside its start if that was trained."""
    if outcome.start_evaluation is None:
        return command("eval", name)
    return command("eval", name, "--before", f"{outcome.run}/start")


def _further(outcome: TrainOutcome, name: str) -> list[str]:
    """Return what else can be done with a run."""
    from lapclip.data.sources import find_source
    from lapclip.runs.folder import Run

    in_python = f"or, in Python: lapclip.load({outcome.run!r})"
    if find_source(outcome.data).is_drawn:
        run = Run(Path(outcome.run))
        longer = "longer" if not run.path.with_name("longer").exists() else run.next_name()
        again = train_command(run.read_settings(), "train.minutes=10", name=longer)
        return [escape(typed(again)), f"{in_python}.encode_text(['a red cat on the left'])"]
    commands = [command("report", name)]
    if Path(outcome.data).is_dir():
        commands.insert(0, command("search", outcome.data, "--model", name, "--web"))
    return [*(escape(typed(line)) for line in commands), in_python]
