"""Everything before a run has a folder: settings, data, choices, the model. What fails here leaves nothing behind."""

from __future__ import annotations

import heapq
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lapclip.config import ALL, AUTO, Config, DataConfig, Layer, build_config, parse_settings, read_recipe, replace_in
from lapclip.data.batches import BatchPlan, Views
from lapclip.data.dataset import DataSet
from lapclip.data.loading import SCENES, TRAIN, load_data
from lapclip.data.pixels import View
from lapclip.data.sources import read_table
from lapclip.data.splits import assign_splits
from lapclip.data.tokenizers import Tokenizer, choose_tokenizer
from lapclip.data.training_images import count_seen, seen_by
from lapclip.embedder import Embedder
from lapclip.errors import ConfigError
from lapclip.machine import devices
from lapclip.machine.devices import Device
from lapclip.machine.timing import Stopwatch, timed
from lapclip.model.clip import CLIP
from lapclip.model.freezing import freeze
from lapclip.model.lora import LowRank
from lapclip.model.shapes import SHAPES
from lapclip.progress import DataProgress, Status
from lapclip.runs.event_log import Listener
from lapclip.seeding import derived_seed
from lapclip.text import counted, duration
from lapclip.training.cuda_graph import WARM_UP, AnyStep, make_step
from lapclip.training.frozen_features import Kept, keep_features, with_features
from lapclip.training.initial_weights import Foundation, find_foundation, initialise_logits
from lapclip.training.loop import score
from lapclip.training.recovery import memory_explained
from lapclip.training.teacher import Lessons, open_teacher, take_lessons
from lapclip.training.trackers import check_tracker
from lapclip.tuning.memory_probe import pairs_at_once
from lapclip.tuning.resolve import is_partly_frozen, settle

HIGHEST_RATE, HIGHEST_LORA_RATE = 1e-4, 2e-3
"""Learning rates of pretrained towers beyond which they are known to break: 1e-5 is right for whole towers and 1e-4
destroys them (fine-tuning CLIP at batch 256, ITRA's documentation); additions of low rank take 2e-4 (CLIP-LoRA)."""
MOST_EVALUATIONS, SHARE_OF_EVALUATIONS = 40, 0.2
"""How often a run of some minutes is evaluated at most, and the most of its time that goes into it."""
BY_SIZE: tuple[tuple[float, str, str], ...] = (
    (1_000, "heads", "so few would only be learnt by heart, so all but the heads stays as it is"),
    (5_000, "lora", "enough to adapt attention a little, too few for all weights"),
    (math.inf, "last-blocks", "enough for whole blocks; all weights (full) pay off later still"),
)
"""The most training images for each recipe. Of 6,000 photos last-blocks made more than lora (docs/finetune.md); where
they begin to is not measured."""


@dataclass(frozen=True)
class Hooks:
    """Who wants to know: listeners for events, and progress while data is made and settings are tried."""

    listeners: Sequence[Listener] = ()
    data_progress: DataProgress | None = None
    tuning_progress: Status = lambda text: None
    reserved: str = ""
    """What a process in the background knows, so that it may fill the folder that was made for it."""


@dataclass(frozen=True)
class Ready:
    """A run before it has a folder: nothing is "auto" any more, and the model is built."""

    recipe: str
    config: Config
    data: DataSet
    device: Device
    built: tuple[AnyStep, Embedder]
    foundation: Foundation | None
    kept: Kept | None
    lessons: Lessons | None
    reasons: dict[str, str]
    notes: list[str]
    tuned_seconds: float | None
    """What a step took when the settings were chosen, where one was timed."""


def prepare(recipe: str, settings: list[str], minutes: float | None, hooks: Hooks) -> Ready:
    """Read the settings, make the data, choose what is "auto" and build the model. What fails here leaves nothing."""
    if minutes is not None and minutes <= 0:
        raise ConfigError(f"--minutes must be more than 0, not {minutes:g}.", hint="lapclip train --minutes 5")
    flags = Layer("--minutes", {"train": {"minutes": minutes}} if minutes is not None else {})
    asked = parse_settings(settings)
    recipe, why_recipe = choose_recipe(recipe, build_config([asked], SHAPES).data)
    layers = [read_recipe(recipe), flags, asked]
    config = build_config(layers, SHAPES)
    if devices.accelerator_here():
        hooks.tuning_progress("whether the accelerator computes what the CPU computes")
    devices.available(config.train.device)  # an unknown device is refused before images are drawn
    check_tracker(config.work.track)
    compile_asked = config.train.compile
    config, foundation = find_foundation(config, layers)
    config = fit_views(config)
    taught = "teacher_weight" in layers[0].values.get("train", {}) and config.train.teacher_weight
    if taught and not config.train.teacher:
        raise ConfigError(
            f"Recipe {recipe} learns from a teacher, and none is named.",
            hint="--teacher RUN, or a file of embeddings; --set train.teacher_weight=0 trains the same without one",
        )
    teacher = open_teacher(config)
    data = load_data(config.data, View.of(config.model), hooks.data_progress)
    lessons = take_lessons(teacher, config, data, hooks.data_progress) if teacher else None
    del teacher  # its memory is the run's
    asked_for = asked.values.get("train", {})
    config, notes = fit_data(config, data, asked_batch="batch_size" in asked_for)
    if lessons is None and asked_for.get("teacher_weight"):
        notes.append("train.teacher_weight is not used: no teacher is named; --teacher RUN names one")
    if foundation and foundation.tokenizer and "tokenizer" in asked.values.get("data", {}):
        notes.append("data.tokenizer is not used: the model to start from reads captions with its own")
    if config.train.minutes and "epochs" in asked_for:
        notes.append(f"train.epochs is not used: the run is to take {counted(config.train.minutes, 'minute')}")
    config, tokenizer, why_tokenizer = fit_vocabulary(config, data, foundation)
    if foundation and foundation.shape.vocabulary != config.model.vocabulary:
        config, foundation = find_foundation(config, layers)  # a text tower that is new is as large as its vocabulary
    config, why_steps = count_steps(config, data, tokenizer)
    notes = [*why_recipe, *notes, *rate_warnings(config, foundation), *said_of_start(config, data)]
    with memory_explained(config):
        longest = longest_caption(config, data, tokenizer)
        plan = make_plan(config, data, tokenizer)
        config, device, reasons, tuned_seconds = settle(config, plan, longest, hooks.tuning_progress)
        device.release_memory()
        device.forget_peak()  # what was tried before the run is not the run's
        built = build(config, tokenizer, device, foundation)
        notes += said_of_lora(config, built[0].model)
        kept = keep_features(*built, plan, data, config, hooks.data_progress)
        if is_partly_frozen(config):
            plan.frozen = kept
            pairs, reasons["train.micro_batch"] = pairs_at_once(built[0], plan.batch(1), device)
            if pairs != config.train.micro_batch:
                config = replace_in(config, "train", micro_batch=pairs)
                notes.append(f"train.micro_batch is {pairs}: {reasons['train.micro_batch']}; the result is the same")
                built = build(config, tokenizer, device, foundation)
        if config.train.minutes:
            config, why_steps, few = fill_minutes(
                config,
                data,
                tokenizer,
                device,
                foundation,
                kept,
                lessons,
                asked_evaluations="evaluate_every_epochs" in asked_for,
            )
            notes += few
            built = build(config, tokenizer, device, foundation)
    notes += [*(kept.said if kept else []), *([lessons.said] if lessons else [])]
    reasons |= {"data.tokenizer": why_tokenizer, "train.steps": why_steps}
    notes += [reasons["train.compile"]] if compile_asked not in (AUTO, config.train.compile) else []
    notes += device.warnings()
    return Ready(recipe, config, data, device, built, foundation, kept, lessons, reasons, notes, tuned_seconds)


def choose_recipe(recipe: str, data: DataConfig) -> tuple[str, list[str]]:
    """The recipe; where it is left open, the one that suits so many training images, and why."""
    if recipe != AUTO:
        return recipe, []
    drawn = data.source == SCENES
    count = data.train_pairs if drawn else assign_splits(read_table(data).rows, data.seed).count(TRAIN)
    chosen, why = next((name, why) for most, name, why in BY_SIZE if count <= most)
    return chosen, [f"recipe {chosen} for {count:,} training images: {why}; --recipe NAME takes another"]


def fit_views(config: Config) -> Config:
    """Images that are never cropped look the same each time, so one view is all there is."""
    train = config.train
    plain = train.crop == 1 and not train.flip and not train.views
    return replace_in(config, "train", views=1) if plain and train.image_blocks != ALL else config


def rate_warnings(config: Config, foundation: Foundation | None) -> list[str]:
    """What is known to destroy pretrained weights, said before the run."""
    train = config.train
    locked = train.image_blocks == 0 and train.text_blocks == 0
    most = HIGHEST_LORA_RATE if train.lora_rank else HIGHEST_RATE
    rate = train.learning_rate * train.tower_share
    if foundation is None or locked or rate <= most:
        return []
    return [
        f"the towers' learning rate, {rate:g}, is far above what pretrained weights stand (about {most / 5:g}): they "
        f"may forget what they know; --set train.tower_share={most / 5 / train.learning_rate:.2g}"
    ]


def said_of_start(config: Config, data: DataSet) -> list[str]:
    """Held-out images that the model to start from has learnt from are no test, which a score would not show."""
    found = {split: count_seen(pairs.identities, seen_by(config.train.start)) for split, pairs in data.splits.items()}
    known = [f"{count:,} of the {len(data.splits[split]):,} of {split}" for split, count in found.items() if count]
    if not config.train.start or not any(count for split, count in found.items() if split != TRAIN):
        return []
    return [
        f"the model to start from has learnt from {' and '.join(known)}: scores on held-out ones are no test; "
        "--set data.seed as in its run splits them alike"
    ]


def said_of_lora(config: Config, model: CLIP) -> list[str]:
    """Towers that got no addition of low rank, because there is no attention in them."""
    towers = {"image": model.image, "text": model.text}
    bare = [name for name, tower in towers.items() if not any(isinstance(part, LowRank) for part in tower.modules())]
    return [f"the {name} tower has no attention to add to: but for its head it stays as it is" for name in bare] * bool(
        config.train.lora_rank
    )


def fit_data(config: Config, data: DataSet, *, asked_batch: bool) -> tuple[Config, list[str]]:
    """Settings that follow from the data, and what the user should know about it.

    Whether images are streamed is settled, because a resumed run needs the same order. A batch that a recipe made for
    more images becomes as large as the data; one that the user asked for is refused elsewhere.
    """
    notes = [*data.notes]
    if config.data.source != SCENES:
        config = replace_in(config, "data", stream="always" if data.train.sequential else "never")
    if config.train.batch_size > len(data.train) > 1 and not asked_batch:
        notes.append(f"train.batch_size is {len(data.train)}: there are no more training images")
        config = replace_in(config, "train", batch_size=len(data.train))
    return config, notes


def longest_caption(config: Config, data: DataSet, tokenizer: Tokenizer) -> int:
    """The most tokens that a batch of captions is padded to. Looks at the longest ones only: encoding all takes time,
    and a caption of few bytes has few tokens."""
    captions = (caption for options in data.train.captions for caption in options)
    longest = heapq.nlargest(1000, captions, key=lambda caption: len(caption.encode("utf-8", "replace")))
    return tokenizer.batch(longest, config.model.context).shape[1]


def fit_vocabulary(
    config: Config, data: DataSet, foundation: Foundation | None = None
) -> tuple[Config, Tokenizer, str]:
    """The tokenizer for the data and why it is that one, and the model's vocabulary to match."""
    if foundation and foundation.tokenizer:
        return config, foundation.tokenizer, "the one that the model to start from was trained with"
    captions = [caption for options in data.train.captions for caption in options]
    tokenizer, why = choose_tokenizer(config.data, captions, data.alphabet, config.model.context)
    return replace_in(config, "model", vocabulary=tokenizer.vocabulary), tokenizer, why


def make_plan(config: Config, data: DataSet, tokenizer: Tokenizer) -> BatchPlan:
    """Which pairs in which order."""
    train = config.train
    views = Views(train.views, train.crop, train.flip, config.model.crop_share) if train.views else None
    return BatchPlan(
        data.train, tokenizer, config.model.context, train.batch_size, train.seed, train.symbol_dropout, views
    )


def count_steps(config: Config, data: DataSet, tokenizer: Tokenizer) -> tuple[Config, str]:
    """Turn epochs into a number of steps; the schedule and a resumed run rely on it. Minutes wait for the settings."""
    train = config.train
    if train.steps and train.minutes:
        raise ConfigError(
            "train.steps and train.minutes are both set.", hint="--minutes alone, or --set train.minutes=0"
        )
    if train.steps or train.minutes:
        return config, "asked for"
    per_epoch = make_plan(config, data, tokenizer).steps_per_epoch
    why = f"{counted(train.epochs, 'epoch')} of {counted(per_epoch, 'step')}"
    return replace_in(config, "train", steps=train.epochs * per_epoch), why


def fill_minutes(
    config: Config,
    data: DataSet,
    tokenizer: Tokenizer,
    device: Device,
    foundation: Foundation | None,
    kept: Kept | None,
    lessons: Lessons | None = None,
    *,
    asked_evaluations: bool = False,
) -> tuple[Config, str, list[str]]:
    """Turn minutes into a number of steps, once. Returns why it is that many, and a warning where they are few.

    Where epochs are short, evaluations become rarer, unless the user said how often.
    """
    train, plan = config.train, make_plan(config, data, tokenizer)
    plan.frozen, plan.teacher = kept, lessons and lessons.rows
    step, embedder = build(replace_in(config, "train", steps=2, cheap_share=0.5), tokenizer, device, foundation)
    embedder = with_features(embedder, kept, step)
    step_seconds, evaluation_seconds = time_parts(config, data, plan, (step, embedder), device)
    # The last step is always evaluated, the finished model once more on other pairs, and there also its trained start.
    scorings = 3 if train.start else 2
    seconds = train.minutes * 60 - scorings * evaluation_seconds
    most = max(1, min(MOST_EVALUATIONS, int(SHARE_OF_EVALUATIONS * seconds / evaluation_seconds)))
    rarely_enough = math.ceil(seconds / step_seconds / plan.steps_per_epoch / most)
    every = train.evaluate_every_epochs if asked_evaluations else max(train.evaluate_every_epochs, rarely_enough)
    per_step = step_seconds + evaluation_seconds / (plan.steps_per_epoch * every)
    steps = max(1, int(seconds / per_step))
    reason = f"{counted(train.minutes, 'minute')} at {per_step:.3f} s a step, timed here before training"
    enough, notes = 2 * plan.steps_per_epoch, []
    if steps < enough:
        needed = duration(enough * per_step + scorings * evaluation_seconds)
        verb = "is" if train.minutes == 1 else "are"
        said = f"{counted(train.minutes, 'minute')} {verb} enough for {counted(steps, 'step')}"
        notes.append(f"{said}, fewer than the {enough:,} of two epochs: expect little; those take about {needed}")
    return replace_in(config, "train", steps=steps, evaluate_every_epochs=every), reason, notes


def time_parts(
    config: Config, data: DataSet, plan: BatchPlan, built: tuple[AnyStep, Embedder], device: Device
) -> tuple[float, float]:
    """Seconds of a real step and of a real evaluation, on a model that is thrown away."""
    # In a run of two steps whose first half is cheap, step 1 is of one kind and step 2 of the other.
    step, embedder = built
    share = config.train.cheap_share if config.train.cheap_size or config.train.patch_dropout else 0.0
    kinds = [(1, share)] * (share > 0) + [(2, 1 - share)] * (share < 1)
    seconds = sum(part * time_step(step, plan, number, device) for number, part in kinds)
    began = time.perf_counter()
    score(embedder, data.held_out, config.train.batch_size)
    return seconds, time.perf_counter() - began


def time_step(step: AnyStep, plan: BatchPlan, number: int, device: Device) -> float:
    """The median time of one kind of step; the first ones warm up, compile and record."""
    times: list[float] = []
    off = Stopwatch(device.synchronise, on=False)
    batch = plan.batch(1)  # the same for all: a recording is made once for each shape
    while len(times) < 12 and (sum(times) < 10 or len(times) < WARM_UP + 2):
        times.append(timed(lambda: step(batch, number, 0.0, off)(), device.synchronise))
    return statistics.median(times[1:] if device.is_cpu else times[WARM_UP + 1 :])


def build(
    config: Config, tokenizer: Tokenizer, device: Device, foundation: Foundation | None = None
) -> tuple[AnyStep, Embedder]:
    """The model as it starts with its optimiser, ready to step, and the same model ready to embed."""
    if foundation is None:
        model = CLIP(config.model, seed=derived_seed(config.train.seed, "weights"))
    else:
        model = foundation.take()
    initialise_logits(model, config.train, new=not config.train.start)
    model = model.to(device.torch)
    freeze(model, config.train)
    step = make_step(model, config.train, device)
    embedder = Embedder(model, tokenizer, device)
    embedder.batch = min(embedder.batch, config.train.micro_batch or embedder.batch)  # what fits in memory at once
    return step, embedder
