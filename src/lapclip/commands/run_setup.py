"""What a run is made of, as one complete object: filled for a new run by `set_up`, and by `resume` from a run's folder.

Nothing here writes to the run's folder: a start that fails leaves its request there, and the reason as an event.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lapclip import __version__
from lapclip.commands.choose_recipe import SettledRecipe, check_towers, settle_recipe
from lapclip.config import (
    ALL,
    AUTO,
    CLOSED_FORM,
    Config,
    Layer,
    TrainConfig,
    build_config,
    check_teacher,
    minutes_layer,
    parse_settings,
    read_recipe,
    replace_in,
)
from lapclip.data.batches import BatchPlan, Views
from lapclip.data.dataset import DataSet, count_seen, seen_by
from lapclip.data.loading import checked_indexes, load_data, split_rule
from lapclip.data.pixels import View
from lapclip.data.sources import find_source
from lapclip.data.splits import TRAIN
from lapclip.data.table import Table
from lapclip.data.tokenizers import Tokenizer, choose_tokenizer, save_tokenizer
from lapclip.embedder import Embedder
from lapclip.errors import ConfigError
from lapclip.evaluation import note_on_held_out
from lapclip.loss import LOSSES
from lapclip.machine.choose_device import candidates, find_device
from lapclip.machine.device import Device
from lapclip.machine.ranks import ALONE, Ranks, under_torchrun
from lapclip.measure.phases import Laps, Stopwatch
from lapclip.measure.timing import Timer, Timing
from lapclip.model.clip import CLIP
from lapclip.model.freezing import freeze
from lapclip.model.shapes import SHAPES
from lapclip.paths import cache_folder, temporary_folder
from lapclip.progress import DataProgress, Status
from lapclip.runs.events import Listener
from lapclip.runs.folder import FORMAT, Run
from lapclip.seeding import derived_seed
from lapclip.text import counted
from lapclip.together import machines_wanted, name_here
from lapclip.training.checkpoint import save_model
from lapclip.training.cuda_graph import WARM_UP, GraphedStep, make_step
from lapclip.training.feed import ready
from lapclip.training.frozen_features import (
    CachedFeatures,
    cache_features,
    start_heads,
    towers_to_cache,
    with_features,
)
from lapclip.training.initial_weights import InitialWeights, find_initial_weights, initialise_logits
from lapclip.training.loop import Training, score
from lapclip.training.recovery import memory_explained
from lapclip.training.shards import UNDER_TORCHRUN
from lapclip.training.step import TrainStep
from lapclip.training.teacher import (
    TeacherEmbeddings,
    compute_teacher_embeddings,
    open_teacher,
    teacher_paths,
)
from lapclip.training.trackers import check_tracker
from lapclip.tuning.kernels import check_kernels
from lapclip.tuning.resolve import is_partly_frozen, resolve_auto
from lapclip.tuning.step_memory import choose_micro_batch

HIGHEST_RATE, HIGHEST_TOWER_RATE, HIGHEST_LORA_RATE = 1e-4, 3e-4, 2e-3
"""Learning rates of pretrained weights beyond which they are known to break: 1e-5 is right for a whole CLIP and 1e-4
destroys it (fine-tuning at batch 256, ITRA's documentation); networks with heads of ours took 3e-4 (`dev/LOG.md`);
additions of low rank take 2e-4 (CLIP-LoRA)."""
MOST_EVALUATIONS, SHARE_OF_EVALUATIONS = 40, 0.2
"""How often a run of some minutes is evaluated at most, and the most of its time that goes into it."""
LEAST_EPOCHS, LEAST_STEPS = 2, 40
"""What a run of some minutes should have room for. A healthy run is clearly better than guessing after 40 steps."""


@dataclass(frozen=True)
class Request:
    """What the user asked for: a recipe, and settings laid over it."""

    recipe: str
    layers: Sequence[Layer]
    config: Config
    notes: list[str]
    table: Table | None = None
    """The data, where it was read to choose the recipe."""

    def asked(self, section: str) -> dict:
        """The settings of a section that the user gave, without the recipe's."""
        return dict(self.layers[-1].values.get(section, {}))

    def is_set(self, section: str, name: str) -> bool:
        """Whether the user or the recipe gave this setting."""
        return any(name in layer.values.get(section, {}) for layer in self.layers)

    @property
    def given(self) -> dict[str, dict[str, Any]]:
        """Everything that the user gave, --minutes included: what another run like it is to be given again."""
        sections = dict.fromkeys(section for layer in self.layers[1:] for section in layer.values)
        return {
            at: {k: v for layer in self.layers[1:] for k, v in layer.values.get(at, {}).items()}
            for at in sections
        }


def read_request(
    recipe: str,
    settings: Sequence[str],
    minutes: float | None,
    settled: SettledRecipe | None = None,
) -> Request:
    """Return the configuration before the data is known.

    A recipe that is left open is chosen by the number of images, unless it is `settled` already.
    """
    flags = minutes_layer(minutes)
    asked = parse_settings(list(settings))
    settled = settled or settle_recipe(recipe, settings)
    if recipe == AUTO:
        check_towers(settled.recipe)
    layers = [read_recipe(settled.recipe), flags, asked]
    config = build_config(layers, SHAPES)
    notes = list(settled.notes)
    if config.train.minutes and "epochs" in asked.values.get("train", {}):
        minutes_text = counted(config.train.minutes, "minute")
        notes.append(f"train.epochs is not used: the run is to take {minutes_text}")
    request = Request(settled.recipe, layers, config, notes, settled.take_table())
    check_teacher(settled.recipe, layers, config)
    return request


def fit_ranks(request: Request, count: int, *, together: bool) -> Request:
    """Settings that follow from how many processes share the work; one alone may be the rest of several."""
    train, notes = request.config.train, []
    if together and not request.is_set("train", "shards"):
        train = replace(train, shards=max(UNDER_TORCHRUN, count))
    if 0 < train.shards < count:
        raise ConfigError(
            f"train.shards {train.shards} gives {counted(count - train.shards, 'rank')} of {count} nothing to compute.",
            hint=f"--set train.shards={max(UNDER_TORCHRUN, count)}, or fewer ranks",
        )
    if count > 1 and train.compile not in ("none", "compiled"):
        # What ranks exchange in the middle of a step is no part of a recording.
        rest = "compiled" if "compiled" in train.compile else "none"
        notes = [f"train.compile {train.compile} is not used by several ranks"] * (
            train.compile != AUTO
        )
        train = replace(train, compile=rest)
    return replace(
        request, config=replace(request.config, train=train), notes=[*request.notes, *notes]
    )


def fit_threads(request: Request, ranks: Ranks) -> tuple[Request, dict[str, str]]:
    """As many threads on every rank as the smallest computer has for one: results depend on the number."""
    if not ranks.many or request.config.train.threads != AUTO:
        return request, {}
    config = replace_in(request.config, "train", threads=ranks.fewest_threads)
    return replace(request, config=config), {
        "train.threads": "what the rank with the fewest cores has"
    }


def fit_shards(
    config: Config, device: Device, ranks: Ranks, *, asked: bool
) -> tuple[Config, dict[str, str]]:
    """How many shards ranks share, now that their device is known. On a GPU, which promises no bits, eight small passes
    take several times as long as one, so there each rank has one part of the batch, and a single rank all of it."""
    if config.train.shards == 1 or asked:
        return config, {"train.shards": "asked for"} if asked else {}
    if device.is_cpu:
        return config, {
            "train.shards": "several ranks on CPUs: the result does not depend on how many"
        }
    why = f"one part for each rank: on {device.kind} small passes take longer, and bits are not promised"
    return replace_in(config, "train", shards=0 if ranks.many else 1), {"train.shards": why}


def fit_views(config: Config) -> Config:
    """Images that are never cropped look the same each time, so one view is all there is."""
    train = config.train
    plain = train.crop == 1 and not train.flip and not train.views
    return replace_in(config, "train", views=1) if plain and train.image_blocks != ALL else config


def fit_rate(config: Config, *, asked: bool) -> tuple[Config, dict[str, str]]:
    """A recipe's learning rate that pretrained networks with heads of ours stand, and what one starts from does not."""
    train, most = config.train, highest_rate(config)
    locked = train.image_blocks == 0 and train.text_blocks == 0
    if asked or locked or not train.start or not most < train.learning_rate <= HIGHEST_TOWER_RATE:
        return config, {}
    why = f"not {train.learning_rate:g}: the model to start from stands no more than {most:g}"
    return replace_in(config, "train", learning_rate=most), {"train.learning_rate": why}


def highest_rate(config: Config) -> float:
    """The highest learning rate that the towers of a run stand."""
    if config.train.lora_rank:
        return HIGHEST_LORA_RATE
    return (
        HIGHEST_TOWER_RATE if config.model.image_from and config.model.text_from else HIGHEST_RATE
    )


def fit_data(config: Config, data: DataSet, *, asked_batch: bool) -> tuple[Config, list[str]]:
    """Settings that follow from the data, and what the user should know about it.

    Whether images are streamed is settled, because a resumed run needs the same order. A batch that a recipe made for
    more images becomes as large as the data; one that the user asked for is refused elsewhere.
    """
    notes = [*data.notes]
    if not find_source(config.data.source).is_drawn:
        config = replace_in(config, "data", stream="always" if data.train.sequential else "never")
    config = replace_in(config, "data", split_rule=split_rule(config.data))
    notes += note_on_held_out({split: len(pairs) for split, pairs in data.splits.items()})
    if config.train.batch_size > len(data.train) > 1 and not asked_batch:
        config = replace_in(config, "train", batch_size=len(data.train))
    return config, notes


def fit_vocabulary(
    config: Config, data: DataSet, initial: InitialWeights | None = None
) -> tuple[Config, Tokenizer, str]:
    """The tokenizer for the data and why it is that one, and the model's vocabulary to match."""
    if initial and initial.tokenizer:
        return config, initial.tokenizer, "the one that the model to start from was trained with"
    captions = [caption for options in data.train.captions for caption in options]
    tokenizer, why = choose_tokenizer(config.data, captions, data.alphabet, config.model.context)
    return replace_in(config, "model", vocabulary=tokenizer.vocabulary), tokenizer, why


def count_steps(config: Config, data: DataSet, tokenizer: Tokenizer) -> tuple[Config, str]:
    """Turn epochs into a number of steps; the schedule and a resumed run rely on it. Minutes wait for the settings."""
    train = config.train
    if train.steps and train.minutes:
        raise ConfigError(
            "train.steps and train.minutes are both set.",
            hint="--minutes alone, or --set train.minutes=0",
        )
    if train.steps or train.minutes:
        return config, "asked for"
    per_epoch = make_plan(config, data, tokenizer).steps_per_epoch
    why = f"{counted(train.epochs, 'epoch')} of {counted(per_epoch, 'step')}"
    return replace_in(config, "train", steps=train.epochs * per_epoch), why


def make_plan(config: Config, data: DataSet, tokenizer: Tokenizer) -> BatchPlan:
    """Which pairs in which order, before there are frozen features or teacher embeddings to go with them."""
    train = config.train
    views = (
        Views(train.views, train.crop, train.flip, config.model.crop_share) if train.views else None
    )
    return BatchPlan(
        data.train,
        tokenizer,
        config.model.context,
        train.batch_size,
        train.seed,
        train.symbol_dropout,
        views,
        with_phrases=train.phrases > 0,
        with_words=train.word_weight > 0,
        shards=train.shards,
    )


def longest_caption(
    config: Config, data: DataSet, tokenizer: Tokenizer, phrases: Sequence[np.ndarray] = ()
) -> int:
    """The most tokens that a batch of captions is padded to, together with those of a phrase beside it. Looks at the
    longest ones only: encoding all takes time, and a caption of few bytes has few tokens."""
    captions = (caption for options in data.train.captions for caption in options)
    longest = heapq.nlargest(
        1000, captions, key=lambda caption: len(caption.encode("utf-8", "replace"))
    )
    beside = max(map(len, phrases), default=0)
    return min(
        config.model.context, tokenizer.batch(longest, config.model.context).shape[1] + beside
    )


def rate_warnings(config: Config, initial: InitialWeights | None) -> list[str]:
    """Warn about a learning rate that is known to destroy pretrained weights."""
    train = config.train
    is_locked = train.image_blocks == 0 and train.text_blocks == 0
    if initial is None or is_locked:
        return []
    tower_rate = train.learning_rate * train.tower_share
    highest = highest_rate(config)
    if tower_rate <= highest:
        return []
    safe_rate = highest / 5
    safe_share = safe_rate / train.learning_rate
    return [
        f"the towers' learning rate, {tower_rate:g}, is far above what pretrained weights stand "
        f"(about {safe_rate:g}): they may forget what they know; "
        f"--set train.tower_share={safe_share:.2g}"
    ]


def seen_before_warnings(config: Config, data: DataSet) -> list[str]:
    """Held-out images that the model to start from has learnt from: they are no test, and no score would show it."""
    found = {
        split: count_seen(pairs.identities, seen_by(config.train.start))
        for split, pairs in data.splits.items()
    }
    known = [
        f"{count:,} of the {len(data.splits[split]):,} of {split}"
        for split, count in found.items()
        if count
    ]
    if not config.train.start or not any(count for split, count in found.items() if split != TRAIN):
        return []
    return [
        f"the model to start from has learnt from {' and '.join(known)}: scores on held-out ones are no test; "
        "--set data.seed and data.split_rule as in its run split them alike"
    ]


@dataclass(frozen=True)
class Callbacks:
    """Callbacks for a run's events, and for progress while data is made and settings are tried."""

    listeners: Sequence[Listener] = ()
    data_progress: DataProgress | None = None
    tuning_progress: Status = lambda text: None
    stop_reason: Callable[[], str | None] = lambda: None
    """Asked after each step: why the run is to save and end, or None."""


@dataclass(frozen=True, kw_only=True)
class Ingredients:
    """What a run is made from, before its device is known and its model is built."""

    recipe: str
    config: Config
    data: DataSet
    tokenizer: Tokenizer
    initial_weights: InitialWeights | None
    """None for random weights."""
    teacher: TeacherEmbeddings | None
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The settings that the user gave, by section; empty where a run is resumed."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why each automatic choice was made, by the name of the setting."""
    notes: list[str] = field(default_factory=list)
    """What the user should know before the run."""
    tuned_seconds: float | None = None
    """What a step took when the settings were chosen, where one was timed."""


@dataclass(frozen=True, kw_only=True)
class RunSetup(Ingredients):
    """What a run is made of, ready for its first step: nothing is "auto" any more."""

    device: Device
    features: CachedFeatures | None
    """Features of what is frozen; None where nothing is, or nothing is cached."""
    plan: BatchPlan
    """The batches, with the features and the teacher's embeddings in them."""
    step: TrainStep
    embedder: Embedder


def set_up(
    recipe: str,
    settings: Sequence[str],
    minutes: float | None,
    callbacks: Callbacks = Callbacks(),
    ranks: Ranks = ALONE,
    laps: Laps | None = None,
    settled_recipe: SettledRecipe | None = None,
) -> RunSetup:
    """A new run: read the settings, make the data, choose what is "auto", build the model. The rank that writes does so
    for all. `laps` is told how long each of that takes."""
    laps = laps or Laps()
    request = fit_ranks(
        read_request(recipe, settings, minutes, settled_recipe),
        ranks.count,
        together=under_torchrun(),
    )
    request, why_threads = fit_threads(request, ranks)
    # One that is not here is refused before images are drawn, and so is what it cannot compute.
    found = find_device(request.config.train.device)
    check_kernels_early(request.config.train, found)
    accelerated = not found.is_cpu
    check_tracker(request.config.work.track)
    with ThreadPoolExecutor(1, thread_name_prefix="lapclip-device") as beside:
        if accelerated:
            callbacks.tuning_progress("whether the accelerator computes what the CPU computes")
        examined = beside.submit(examine_devices, request.config.train) if accelerated else None
        # Each thread of a rank would have to be told its device, and a teacher needs the device itself.
        if examined and (ranks is not ALONE or request.config.train.teacher):
            examined.result()
        laps.lap("settings")
        ingredients = gather(request, callbacks.data_progress, ranks)
        laps.lap("data")
        if examined:
            examined.result()
    laps.lap("device")
    request = replace(request, table=None)  # its memory is the run's
    with memory_explained(ingredients.config):
        plan = make_plan(ingredients.config, ingredients.data, ingredients.tokenizer)
        longest = longest_caption(
            ingredients.config, ingredients.data, ingredients.tokenizer, plan.phrases
        )
        resolved = resolve_auto(ingredients.config, plan, longest, callbacks.tuning_progress)
        device = resolved.device
        config, why_shards = fit_shards(
            resolved.config, device, ranks, asked=request.is_set("train", "shards")
        )
        if config.train.shards != ingredients.config.train.shards:
            plan = make_plan(config, ingredients.data, ingredients.tokenizer)
        reasons = resolved.reasons | why_shards | why_threads
        laps.lap("settings")
        settled = replace(
            ingredients,
            config=config,
            reasons=reasons | ingredients.reasons,
            tuned_seconds=resolved.step_seconds,
        )
        device.release_memory()
        device.forget_peak()  # what was tried before the run is not the run's
        setup = assemble(settled, plan, device, callbacks.data_progress, ranks)
        if is_partly_frozen(setup.config):
            setup = fit_micro_batch(setup)
        if setup.config.train.minutes:
            setup = fill_minutes(
                setup, asked_evaluations="evaluate_every_epochs" in request.asked("train")
            )
        setup = replace(setup, reasons=setup.reasons | why_random_heads(setup))
    laps.lap("model")
    asked_compile = request.config.train.compile
    not_compiled = (
        [setup.reasons["train.compile"]]
        if asked_compile not in (AUTO, setup.config.train.compile)
        else []
    )
    setup = replace(setup, reasons=setup.reasons | more_reasons(setup))
    # Warnings first: a start shows the first of many notes.
    return replace(setup, notes=[*device.warnings(), *setup.notes, *not_compiled])


def more_reasons(setup: RunSetup) -> dict[str, str]:
    """Return reasons that are known once the model is built."""
    reasons = {}
    if setup.features and setup.features.notes:
        summary = setup.features.summary
        reasons["train.features"] = "; ".join(filter(None, [summary, *setup.features.notes]))
    if setup.teacher:
        reasons["train.teacher"] = setup.teacher.note
    if setup.config.train.phrases and not setup.plan.phrases:
        reasons["train.phrases"] = "not used: no word is in the captions of two images"
    return reasons


def check_kernels_early(train: TrainConfig, found: Device) -> None:
    """Refuse what the device that is sure to be taken cannot compute. An accelerator that nobody named may be left for
    the CPU, which has other kernels."""
    sure = train.device != AUTO or found.is_cpu
    if sure and train.dtype != AUTO:
        check_kernels(train, found)


def examine_devices(train: TrainConfig) -> None:
    """Check what devices compute, and have their libraries set up, while the data is made."""
    for device in candidates(train):
        device.warm_up()


def gather(request: Request, progress: DataProgress | None, ranks: Ranks = ALONE) -> Ingredients:
    """The data, the tokenizer, the weights to start from and the teacher's embeddings, and settings that follow. Other
    ranks load the data at the same time."""
    config, initial = find_initial_weights(request.config, request.layers)
    config = fit_views(config)
    config, why_rate = fit_rate(config, asked="learning_rate" in request.asked("train"))
    teacher = open_teacher(config)  # before the data: a teacher that cannot be used costs no time
    ranks.announce(asdict(config))
    data = load_data(config.data, View.of(config.model), progress, request.table)
    embeddings = compute_teacher_embeddings(teacher, config, data, progress) if teacher else None
    del teacher  # its memory is the run's
    wanted_batch = config.train.batch_size
    config, data_notes = fit_data(config, data, asked_batch="batch_size" in request.asked("train"))
    why_batch = {"train.batch_size": f"there are no more training images than {len(data.train)}"}
    config = replace_in(config, "model", logit_bias=LOSSES[config.train.loss].has_bias)
    config, tokenizer, why_tokenizer = fit_vocabulary(config, data, initial)
    if initial and initial.shape.vocabulary != config.model.vocabulary:
        config, initial = find_initial_weights(
            config, request.layers
        )  # a new text tower is as large as its vocabulary
    config, why_steps = count_steps(config, data, tokenizer)
    warnings = [*rate_warnings(config, initial), *seen_before_warnings(config, data)]
    return Ingredients(
        recipe=request.recipe,
        asked=request.given,
        config=config,
        data=data,
        tokenizer=tokenizer,
        initial_weights=initial,
        teacher=embeddings,
        reasons={
            "data.tokenizer": why_tokenizer,
            "train.steps": why_steps,
            **({"data.split_rule": data.how_split} if data.how_split else {}),
            **(why_batch if config.train.batch_size != wanted_batch else {}),
            **why_rate,
        },
        notes=[*request.notes, *warnings, *data_notes],
    )


def saved_settings(setup: Ingredients) -> dict[str, Any]:
    """The contents of run.toml."""
    about: dict[str, Any] = {
        "format": FORMAT,
        "recipe": setup.recipe,
        "lapclip": __version__,
        "asked": setup.asked,
    }
    about["data_fingerprint"] = setup.data.fingerprint
    about["notes"] = list(setup.notes)
    if setup.tuned_seconds is not None:
        about["tuned_seconds"] = setup.tuned_seconds
    if setup.teacher:
        about["teacher_digest"] = setup.teacher.digest
    return {"run": about, **asdict(setup.config), "reasons": setup.reasons}


FEATURES_TOGETHER, TRAIN_TOGETHER, COMPARE_TOGETHER, NOTHING_LEFT = (
    "features",
    "train",
    "compare",
    "nothing",
)
"""What the rank that writes has the others do with what it gives them."""


def share_set_up(
    ingredients: Ingredients, embedder: Embedder, device: Device, ranks: Ranks
) -> None:
    """Have the other ranks build the same, to compute the features of what is frozen with this one."""
    with temporary_folder("rank") as folder:
        run = Run(folder)
        run.write_settings(saved_settings(ingredients))
        save_tokenizer(ingredients.tokenizer, run.tokenizer)
        if ingredients.initial_weights:
            save_model(embedder, run.start)
        ranks.connect(device.collectives)
        task = {"task": FEATURES_TOGETHER, "run": "features", "base": str(run.base)}
        ranks.from_writer(task, "set-up")
        files = [path for path in sorted(run.path.rglob("*")) if path.is_file()]
        digest = ingredients.teacher.digest if ingredients.teacher else ""
        share_run_files(
            run, files, ranks, cached_for_others(digest, ingredients.config, ingredients.data)
        )


MAX_TIMED_STEPS = 12
TIMED_SECONDS = 10.0
CACHED_FOR_OTHERS = "features-*.npy", "packed-*/index.jsonl"
"""The names of what other ranks are given of this computer's cache."""


def share_run_files(
    run: Run, files: Sequence[Path], ranks: Ranks, cached: Sequence[Path] = ()
) -> None:
    """Give the others files of a run, and some of this computer's cache."""
    ranks.share_files(run.path, files)
    there = [path for path in cached if path.exists()]
    ranks.share_files(cache_folder(), there, CACHED_FOR_OTHERS, named=name_here)


def cached_for_others(teacher_digest: str, config: Config, data: DataSet) -> list[Path]:
    """What other ranks are given of this computer's cache: what a teacher makes of the pairs, because it may be here
    alone, and which images can be used, because to decode all of them takes long. Guests see for themselves."""
    indexes = [] if machines_wanted() else checked_indexes(config.data, View.of(config.model))
    return [*teacher_paths(teacher_digest, config, data), *indexes]


def assemble(
    ingredients: Ingredients,
    plan: BatchPlan,
    device: Device,
    progress: DataProgress | None = None,
    ranks: Ranks = ALONE,
) -> RunSetup:
    """Build the model, cache the features of what is frozen, and put all that a run is made of together. `ranks` are
    those that compute features in shares."""
    config, data = ingredients.config, ingredients.data
    step, embedder = build(config, ingredients.tokenizer, device, ingredients.initial_weights)
    if ranks.many and ranks.writes and towers_to_cache(step.model, step.boundaries, config)[0]:
        share_set_up(ingredients, embedder, device, ranks)
    features = cache_features(step, embedder, plan, data, config, progress, ranks)
    if features and features.summary:
        reasons = ingredients.reasons | {"train.features": features.summary}
        ingredients = replace(ingredients, reasons=reasons)
    return RunSetup(
        **vars(ingredients),
        device=device,
        features=features,
        plan=plan.completed(features, ingredients.teacher and ingredients.teacher.rows),
        step=step,
        embedder=with_features(embedder, features, step),
    )


def build(
    config: Config, tokenizer: Tokenizer, device: Device, initial: InitialWeights | None
) -> tuple[TrainStep, Embedder]:
    """The model as it starts with its optimiser, ready to step, and the same model ready to embed."""
    model = (
        initial.take()
        if initial
        else CLIP(config.model, seed=derived_seed(config.train.seed, "weights"))
    )
    initialise_logits(model, config.train, new=not config.train.start)
    if config.train.word_weight:
        model.start_words(derived_seed(config.train.seed, "words"))
    model.to(device.torch)
    freeze(model, config.train)
    step = make_step(model, config.train, device)
    embedder = Embedder(model, tokenizer, device)
    embedder.batch = min(
        embedder.batch, config.train.micro_batch or embedder.batch
    )  # what fits in memory at once
    return step, embedder


def build_with(setup: RunSetup, config: Config) -> RunSetup:
    """The same run with other settings: built again, because the step and its optimiser hold theirs."""
    step, embedder = build(config, setup.tokenizer, setup.device, setup.initial_weights)
    return replace(
        setup, config=config, step=step, embedder=with_features(embedder, setup.features, step)
    )


def build_again(training: Training, tokenizer: Tokenizer) -> tuple[TrainStep, Embedder]:
    """The model and its optimiser for a fallback: built again, because what failed is not to be trusted."""
    step, embedder = build(training.config, tokenizer, training.device, training.initial_weights)
    shared_by(step, training.ranks)
    return step, with_features(embedder, training.features, step)


def shared_by(step: TrainStep, ranks: Ranks) -> None:
    """From here on a step is shared by these ranks: not before, while the one that writes tries settings alone."""
    if not isinstance(step, GraphedStep):  # a recorded one is never shared
        step.ranks = ranks


def why_random_heads(setup: RunSetup) -> dict[str, str]:
    """Start new heads in closed form if that is requested, and return the reason if that cannot be done."""
    train = setup.config.train
    if train.head_start != CLOSED_FORM or train.start:
        return {}
    if start_heads(setup.step.model, setup.features, setup.data):
        return {}
    return {
        "train.head_start": "heads start at random: only pretrained towers that are frozen, with cached features, can be fitted"
    }


def fit_micro_batch(setup: RunSetup) -> RunSetup:
    """As many pairs at once as fit, seen by taking a few through the model, where arithmetic does not know it."""
    pairs, why = choose_micro_batch(setup.step, setup.plan.batch(1), setup.device)
    setup = replace(setup, reasons=setup.reasons | {"train.micro_batch": why})
    if pairs == setup.config.train.micro_batch:
        return setup
    return build_with(setup, replace_in(setup.config, "train", micro_batch=pairs))


def fill_minutes(setup: RunSetup, *, asked_evaluations: bool) -> RunSetup:
    """Turn minutes into a number of steps, once, with a warning where they are few.

    Where epochs are short, evaluations become rarer, unless the user set how often.
    """
    train, per_epoch = setup.config.train, setup.plan.steps_per_epoch
    # A run of two steps, one cheap and one not, on a model that is thrown away: timing changes the optimiser's state.
    trial = build_with(setup, replace_in(setup.config, "train", steps=2, cheap_share=0.5))
    step_seconds, evaluation_seconds = time_step_and_evaluation(trial, train.cheap_share)
    # The last step is always evaluated, the finished model once more on other pairs, and there also its trained start.
    scorings = 3 if train.start else 2
    seconds = train.minutes * 60 - scorings * evaluation_seconds
    most = max(1, min(MOST_EVALUATIONS, int(SHARE_OF_EVALUATIONS * seconds / evaluation_seconds)))
    rarely_enough = math.ceil(seconds / step_seconds / per_epoch / most)
    every = (
        train.evaluate_every_epochs
        if asked_evaluations
        else max(train.evaluate_every_epochs, rarely_enough)
    )
    per_step = step_seconds + evaluation_seconds / (per_epoch * every)
    steps = max(1, int(seconds / per_step))
    reason = (
        f"{counted(train.minutes, 'minute')} at {per_step:.3f} s a step, timed here before training"
    )
    setup = replace(setup, reasons=setup.reasons | {"train.steps": reason})
    least = max(LEAST_EPOCHS * per_epoch, LEAST_STEPS)
    if steps < least:
        verb = "is" if train.minutes == 1 else "are"
        enough_for = (
            f"{counted(train.minutes, 'minute')} {verb} enough for {counted(steps, 'step')}"
        )
        enough = round_up_minutes(least * per_step + scorings * evaluation_seconds)
        few = f"{enough_for}; {least:,} or more are better, and take about {counted(enough, 'minute')}"
        setup = replace(setup, notes=[few, *setup.notes])
    del trial
    return build_with(
        setup, replace_in(setup.config, "train", steps=steps, evaluate_every_epochs=every)
    )


def round_up_minutes(seconds: float) -> float:
    """Minutes that hold so many seconds, as a person would say them: tenths below one, else whole ones."""
    minutes = seconds / 60
    return math.ceil(minutes) if minutes > 1 else math.ceil(10 * minutes) / 10


def time_step_and_evaluation(trial: RunSetup, cheap_share: float) -> tuple[float, float]:
    """Seconds of a step, of which a share is cheap, and of an evaluation."""
    # In a run of two steps whose first half is cheap, step 1 is of one kind and step 2 of the other.
    train = trial.config.train
    share = cheap_share if train.cheap_size else 0.0
    kinds = [(1, share)] * (share > 0) + [(2, 1 - share)] * (share < 1)
    seconds = sum(part * time_step(trial, number) for number, part in kinds)
    began = time.perf_counter()
    score(trial.embedder, trial.data.held_out, train.batch_size)
    return seconds, time.perf_counter() - began


def time_step(trial: RunSetup, number: int) -> float:
    """The median time of one kind of step; the first ones warm up, compile and record."""
    # The same for all: a recording is made once for each shape.
    device, batch = trial.device, ready(trial.step, trial.plan.batch(1), number)
    off = Stopwatch(device.synchronise, on=False)

    def is_enough(timing: Timing) -> bool:
        steps = len(timing.seconds)
        return steps >= MAX_TIMED_STEPS or (timing.total >= TIMED_SECONDS and steps >= WARM_UP + 2)

    timer = Timer(device.synchronise)
    timing = timer.time_until(lambda: trial.step(batch, number, 0.0, off)(), is_enough)
    warm_up_steps = 1 if device.is_cpu else WARM_UP + 1
    return Timing(timing.seconds[warm_up_steps:]).median
