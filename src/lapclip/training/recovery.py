"""Training that goes on after a failure: from a state known to be good, with settings that can work.

Whatever happened, the model, its optimiser and what was recorded of them are dropped and made again, and the newest
checkpoint is loaded: so a run that fell back goes on exactly as a run that is resumed after it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

from lapclip.config import Config, replace_in
from lapclip.data.tokenizers import Tokenizer
from lapclip.embedder import Embedder
from lapclip.errors import ConfigError, RankFailed, RunError, TrainingError
from lapclip.machine.choose_device import device_of, prepare_device
from lapclip.runs import events
from lapclip.runs.events import mapping, read_events
from lapclip.training.checkpoint import list_checkpoints, load_newest, with_best_of
from lapclip.training.fallback import DEVICE, MEMORY, SWAP, Change, brief, cause_of, decide, smaller
from lapclip.training.loop import Training
from lapclip.training.memory import describe, predict_bytes
from lapclip.training.step import TrainStep

Build = Callable[[Training, Tokenizer], tuple[TrainStep, Embedder]]
"""Makes the model and its optimiser again, with the settings and on the device that the training has by then."""


@contextmanager
def memory_explained(config: Config) -> Iterator[None]:
    """Before there is a run to go back to, memory that runs out ends the command with an explanation."""
    try:
        yield
    except Exception as error:
        failed = _failure_here(error)
        if failed is None or cause_of(failed) != MEMORY:
            raise
        half = smaller(config.train)
        raise ConfigError(
            f"{config.model.name} ran out of memory before its first step ({brief(failed)}).",
            hint=f"--set train.micro_batch={half}, which gives the same result"
            if half
            else "a smaller model",
        ) from error


def persist(
    training: Training, finish: Callable[[Training], dict[str, Any]], build: Build
) -> dict[str, Any] | None:
    """Train to the end and finish; gives back the final evaluation, or None where someone stopped the run."""
    while True:
        try:
            if training.train():
                return None
            return finish(training)
        except Exception as error:
            change = _decided(error, training)
            if change is None and cause_of(error) == SWAP:
                change = Change(
                    SWAP, {}, f"{error}; micro_batch is 1 already, so the run goes on, slowly"
                )
                training.swap = None
            if change is None:
                failed = _failure_here(error)
                if failed and cause_of(failed) == MEMORY:
                    raise _explained(failed, training) from error
                raise
            if (
                change.cause == DEVICE
            ):  # its memory is not to be trusted, nor to be freed: the error's frames hold some
                training.device.abandon(error, training.step, training.embedder, training.pending)
            else:
                save_if_good(training)
        # Out here the error is gone, and with it the tensors that its traceback held.
        try:
            change_settings(training, change, build)
        except Exception as error:
            if cause_of(error) == MEMORY:
                raise _explained(error, training) from error
            raise


def _failure_here(error: BaseException) -> BaseException | None:
    """What went wrong on this rank; None where that was on another one."""
    return error.__cause__ if isinstance(error, RankFailed) else error


def _decided(error: Exception, training: Training) -> Change | None:
    """What to change. All ranks change the same, and only after a failure that all know of: in the middle of a step, or
    in what they compute in shares."""
    train, number, ranks = training.config.train, training.progress.step + 1, training.ranks
    if not ranks.many:
        return decide(error, train, number)
    if not isinstance(error, RankFailed):
        return None
    change = decide(error.__cause__, train, number) if error.__cause__ else None
    said = ranks.agree_on_change(
        asdict(replace(change, text=f"{change.text}, on all ranks")) if change else None
    )
    return Change(**said) if said else None


def save_if_good(training: Training) -> None:
    """Save the state in memory if all of it belongs to the last step that was done."""
    newest = list_checkpoints(training.run.checkpoints)[-1:]
    if training.step.touched or (newest and newest[0].name == f"step-{training.progress.step:08d}"):
        return
    training.step.optimizer.zero_grad(set_to_none=True)
    with suppress(Exception):  # there may be no memory for it; then the newest checkpoint has to do
        training.save()


def change_settings(training: Training, change: Change, build: Build) -> None:
    """Make everything again with other settings, from the newest checkpoint, and say so."""
    tokenizer, before = training.embedder.tokenizer, training.device
    del training.step, training.embedder  # before new ones are made: there may not be room for both
    training.forget_pending()
    gc.collect()
    if change.cause != DEVICE:
        before.release_memory()
    training.config = replace_in(training.config, "train", **change.settings)
    train = training.config.train
    training.device = before if train.device == before.kind else device_of(train.device)
    prepare_device(training.device, int(train.threads))
    training.step, training.embedder = build(training, tokenizer)
    skipped = restore_together(training) or []
    step = training.progress.step
    damaged = "".join(f"; skipped a damaged checkpoint, {reason}" for reason in skipped)
    text = f"{change.text}; going on after step {step:,}{damaged}"
    towers = training.step.model.tower_devices()
    training.log.append(
        events.FellBack(
            step=step, cause=change.cause, change=change.settings, devices=towers, text=text
        )
    )


def restore_together(training: Training) -> list[str] | None:
    """`restore`, and the others take over what the rank that writes has."""
    ranks, run = training.ranks, training.run
    skipped = restore(training) if ranks.writes else None
    if ranks.many:
        newest = list_checkpoints(run.checkpoints)[-1:] if ranks.writes else []
        ranks.share_files(
            run.path, [path for folder in newest for path in sorted(folder.iterdir())]
        )
        if not ranks.writes:
            restore(training)
        training.agree_on_progress()
    return skipped


def restore(training: Training) -> list[str] | None:
    """Load the newest good checkpoint. Gives back what was wrong with later ones; None where none was ever needed."""
    run, step = training.run, training.step
    progress, skipped = load_newest(run.checkpoints, step.model, step.optimizer, step.others)
    if progress is not None:
        training.progress = with_best_of(progress, run.model)
        return skipped
    if any(event["type"] == "step" for event in read_events(run.events)):
        detail = f" ({'; '.join(skipped)})" if skipped else ""
        raise RunError(
            f"{run.path} has no good checkpoint left{detail}.",
            hint=f"a new run: {run.train_again()}",
        )
    return None


def changes_so_far(events_so_far: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The settings of `train` that fallbacks changed: what a resumed run goes on with."""
    changes: dict[str, Any] = {}
    for event in events_so_far:
        if event["type"] == "fell_back":
            changes |= mapping(event.get("change"))
    return changes


def _explained(error: BaseException, training: Training) -> TrainingError:
    """Out of memory where nothing more can be halved, or not even the weights fit, with numbers."""
    train, model = training.config.train, training.config.model
    parts = predict_bytes(model, train, caption_tokens=training.plan.batch(1).tokens_BL.shape[1])
    micro, free = train.micro_batch or train.batch_size, ""
    with suppress(Exception):  # a number less is better than another error
        free = f", {training.device.free_bytes() / 1e9:.1f} GB were free on {training.device.kind}"
    return TrainingError(
        f"Out of memory at step {training.progress.step + 1:,} of {training.run.path}, with micro_batch {micro:,} "
        f"({brief(error)}). {model.name} needs about {describe(parts)}{free}.",
        hint=f"close other programs and {training.run.resume_command()}; or a new run, which takes longer: "
        f"{training.run.train_again('train.recompute=true')}",
    )
