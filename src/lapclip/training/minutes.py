"""`--minutes`: the number of steps that fills a time, from timing what the run will do."""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import dataclass

from lapclip.config import Config, replace_in
from lapclip.data.batches import prefetch
from lapclip.embedder import Embedder
from lapclip.measure.phases import Stopwatch
from lapclip.measure.timing import Timer, Timing
from lapclip.text import counted
from lapclip.training.cuda_graph import WARM_UP
from lapclip.training.feed import ready
from lapclip.training.final_scores import count_final_passes, score
from lapclip.training.run_parts import RunParts

MAX_EVALUATIONS = 40
MAX_EVALUATION_SHARE = 0.2  # of the time
MIN_EPOCHS = 2
MIN_STEPS = 40  # a healthy run is clearly better than guessing after 40 steps
MAX_TIMED_STEPS = 12
TIMED_SECONDS = 10.0
TIMED_PAIRS = 256  # of the last evaluation


@dataclass(frozen=True)
class MinutesFit:
    """The settings that fill the time, and why."""

    config: Config
    reason: str
    notes: list[str]
    """A warning if the steps are few."""


def trial_config(config: Config) -> Config:
    """Return the configuration of a run of two steps, one cheap and one not."""
    return replace_in(config, "train", steps=2, cheap_share=0.5)


def fit_minutes(config: Config, trial: RunParts, *, keeps_evaluations: bool) -> MinutesFit:
    """Turn minutes into a number of steps, once, by timing a trial of the run.

    Where epochs are short, evaluations become rarer unless `keeps_evaluations`.
    """
    train, steps_per_epoch = config.train, trial.plan.steps_per_epoch
    step_seconds = max(time_mean_step(trial, train.cheap_share), time_loading(trial))
    evaluation_seconds = time_evaluation(trial)
    # The last step is always evaluated, and the finished model is scored.
    end_seconds = evaluation_seconds + time_final_scores(trial)
    seconds = max(0.0, train.minutes * 60 - end_seconds)
    evaluation_count = int(MAX_EVALUATION_SHARE * seconds / evaluation_seconds)
    evaluation_count = max(1, min(MAX_EVALUATIONS, evaluation_count))
    every = train.evaluate_every_epochs
    if not keeps_evaluations:
        epochs = seconds / step_seconds / steps_per_epoch
        every = max(every, math.ceil(epochs / evaluation_count))
    seconds_per_step = step_seconds + evaluation_seconds / (steps_per_epoch * every)
    steps = max(1, int(seconds / seconds_per_step))
    minutes = counted(train.minutes, "minute")
    return MinutesFit(
        replace_in(config, "train", steps=steps, evaluate_every_epochs=every),
        f"{minutes} at {seconds_per_step:.3f} s a step, timed here before training",
        _notes_on_few(train.minutes, steps, steps_per_epoch, seconds_per_step, end_seconds),
    )


def _notes_on_few(
    minutes: float, steps: int, steps_per_epoch: int, seconds_per_step: float, end_seconds: float
) -> list[str]:
    min_steps = max(MIN_EPOCHS * steps_per_epoch, MIN_STEPS)
    if steps >= min_steps:
        return []
    verb = "is" if minutes == 1 else "are"
    enough = round_up_minutes(min_steps * seconds_per_step + end_seconds)
    return [
        f"{counted(minutes, 'minute')} {verb} enough for {counted(steps, 'step')}; "
        f"{min_steps:,} or more are better, and take about {counted(enough, 'minute')}"
    ]


def round_up_minutes(seconds: float) -> float:
    """Return minutes that hold so many seconds: tenths below one minute, else whole ones."""
    minutes = seconds / 60
    return math.ceil(minutes) if minutes > 1 else math.ceil(10 * minutes) / 10


def time_mean_step(trial: RunParts, cheap_share: float) -> float:
    """Return the mean seconds of a step in a run that starts with a share of cheap steps.

    The trial has two steps: the first sees the small images of cheap steps, the second full ones.
    """
    if not trial.config.train.cheap_size:
        cheap_share = 0.0
    seconds = 0.0
    if cheap_share > 0:
        seconds += cheap_share * time_step(trial, 1)
    if cheap_share < 1:
        seconds += (1 - cheap_share) * time_step(trial, 2)
    return seconds


def time_step(trial: RunParts, number: int) -> float:
    """Return the median time of one kind of step. The first ones warm up, compile and record."""
    # The same batch for all: a recording is made once for each shape.
    device, batch = trial.device, ready(trial.step, trial.plan.batch(1), number)
    off = Stopwatch(device.synchronise, on=False)

    def is_enough(timing: Timing) -> bool:
        steps = len(timing.seconds)
        return steps >= MAX_TIMED_STEPS or (timing.total >= TIMED_SECONDS and steps >= WARM_UP + 2)

    timer = Timer(device.synchronise)
    timing = timer.time_until(lambda: trial.step(batch, number, 0.0, off)(), is_enough)
    warm_up_steps = 1 if device.is_cpu else WARM_UP + 1
    return Timing(timing.seconds[warm_up_steps:]).median


def time_loading(trial: RunParts) -> float:
    """Return the seconds in which a batch is prepared. Steps wait for it if they are faster."""
    threads = int(trial.config.train.loader_threads)
    began, count = time.perf_counter(), 0
    with closing(prefetch(trial.plan, 1, MAX_TIMED_STEPS, threads)) as batches:
        for _ in batches:
            count += 1
            if time.perf_counter() - began > TIMED_SECONDS:
                break
    return (time.perf_counter() - began) / count


def time_evaluation(trial: RunParts) -> float:
    """Return the seconds of an evaluation between epochs."""
    began = time.perf_counter()
    score(trial.embedder, trial.data.held_out, trial.config.train.batch_size)
    return time.perf_counter() - began


def time_final_scores(trial: RunParts) -> float:
    """Return the seconds of scoring the finished model, which goes through whole towers.

    Evaluations between epochs may start from cached features, so they say nothing about it.
    """
    pairs = trial.data.final[1]
    some = pairs.select(range(min(len(pairs), TIMED_PAIRS)))
    embedder = Embedder(trial.step.model, trial.tokenizer, trial.device)
    embedder.batch = trial.embedder.batch
    began = time.perf_counter()
    score(embedder, some, trial.config.train.batch_size)
    seconds = time.perf_counter() - began
    return seconds * count_final_passes(trial) * len(pairs) / len(some)
