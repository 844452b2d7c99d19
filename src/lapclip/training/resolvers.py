"""Automatic settings of a run, each set by a small function `(config, context) -> (config, reason)`.

A function is named like its setting. The four tables below are the order in which they are called:
before the data is loaded, with the data, with batches, and with the model. The reasons are written
to run.toml; None is a setting that stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from lapclip.config import ALL, AUTO, CLOSED_FORM, Config, replace_in
from lapclip.data.batches import BatchPlan
from lapclip.data.dataset import DataSet
from lapclip.data.loading import split_rule as rule_of_split
from lapclip.data.sources import find_source
from lapclip.data.tokenizers import Tokenizer, choose_tokenizer
from lapclip.errors import ConfigError
from lapclip.machine.device import Device
from lapclip.progress import Status
from lapclip.text import counted
from lapclip.training.distributed import ALONE, Ranks
from lapclip.training.head_start import start_heads
from lapclip.training.initial_weights import InitialWeights, find_initial_weights
from lapclip.training.minutes import fit_minutes, trial_config
from lapclip.training.objectives.contrastive import LOSSES
from lapclip.training.request import RunRequest
from lapclip.training.run_parts import RunParts, longest_caption, make_plan
from lapclip.training.teacher import TeacherEmbeddings
from lapclip.tuning.resolve import is_partly_frozen, resolve_auto
from lapclip.tuning.step_memory import choose_micro_batch

# Highest learning rates that pretrained weights stand: 1e-5 is right for a whole CLIP and 1e-4
# destroys it (fine-tuning at batch 256, ITRA's documentation); networks with new heads took 3e-4
# (dev/LOG.md); additions of low rank take 2e-4 (CLIP-LoRA).
MAX_RATE = 1e-4
MAX_TOWER_RATE = 3e-4
MAX_LORA_RATE = 2e-3


@dataclass
class Context:
    """What resolvers know beside the settings. It grows from one table to the next."""

    request: RunRequest
    ranks: Ranks = ALONE
    status: Status = lambda text: None
    initial_weights: InitialWeights | None = None
    notes: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    teacher: TeacherEmbeddings | None = None
    data: DataSet = field(init=False)
    tokenizer: Tokenizer = field(init=False)
    plan: BatchPlan = field(init=False)
    device: Device = field(init=False)
    step_seconds: float | None = None
    """Time of a step, if settings were chosen by timing steps."""
    parts: RunParts = field(init=False)


Choice = tuple[Config, str | None]
"""A configuration, and the reason for what was chosen."""
Resolver = Callable[[Config, Context], Choice]


def resolve(config: Config, context: Context, resolvers: Mapping[str, Resolver]) -> Config:
    """Return the configuration with automatic settings chosen, and keep the reasons."""
    for setting, resolver in resolvers.items():
        config, reason = resolver(config, context)
        if reason is not None:
            context.reasons[setting] = reason
    return config


def resolve_built(context: Context) -> RunParts:
    """Choose the settings that need the model. Builds it again if they change its step."""
    for setting, resolver in WITH_MODEL.items():
        config, reason = resolver(context.parts.config, context)
        if config != context.parts.config:
            context.parts = context.parts.rebuild(config)
        if reason is not None:
            context.parts = context.parts.explain(setting, reason)
    for setting, reason in context.parts.plan.why_unused.items():
        context.parts = context.parts.explain(setting, reason)
    forget_trials(context.device)
    return context.parts


def forget_trials(device: Device) -> None:
    """Free memory that only trials used, and do not count it as the run's."""
    device.release_memory()
    device.forget_peak()


def start(config: Config, context: Context) -> Choice:
    """Open the initial weights. They decide the model's shape, and the loss unless that is set."""
    config, context.initial_weights = find_initial_weights(config, context.request.layers)
    return config, None


def views(config: Config, context: Context) -> Choice:
    """Take one view of images that are never cropped or flipped: all views are the same."""
    train = config.train
    is_plain = train.crop == 1 and not train.flip and not train.views
    if is_plain and train.image_blocks != ALL:
        config = replace_in(config, "train", views=1)
    return config, None


def learning_rate(config: Config, context: Context) -> Choice:
    """Lower a recipe's learning rate, meant for new heads, to what the initial weights stand."""
    train = config.train
    max_rate = max_learning_rate(config)
    is_set = "learning_rate" in context.request.user_settings("train")
    if is_set or not train.start or is_locked(config):
        return config, None
    if not max_rate < train.learning_rate <= MAX_TOWER_RATE:
        return config, None
    reason = (
        f"not {train.learning_rate:g}: the model to start from stands no more than {max_rate:g}"
    )
    return replace_in(config, "train", learning_rate=max_rate), reason


def max_learning_rate(config: Config) -> float:
    """Return the highest learning rate that the towers of a run stand."""
    if config.train.lora_rank:
        return MAX_LORA_RATE
    has_networks = config.model.image_from and config.model.text_from
    return MAX_TOWER_RATE if has_networks else MAX_RATE


def is_locked(config: Config) -> bool:
    """Return whether only the heads are trained."""
    return config.train.image_blocks == 0 and config.train.text_blocks == 0


def stream(config: Config, context: Context) -> Choice:
    """Settle whether images are streamed, because a resumed run needs the same order."""
    if find_source(config.data.source).is_drawn:
        return config, None
    is_streamed = context.data.train.sequential
    return replace_in(config, "data", stream="always" if is_streamed else "never"), None


def split_rule(config: Config, context: Context) -> Choice:
    """Settle what the splits are drawn by."""
    config = replace_in(config, "data", split_rule=rule_of_split(config.data))
    return config, context.data.how_split or None


def batch_size(config: Config, context: Context) -> Choice:
    """Shrink a recipe's batch to the data. A batch that the user set is refused elsewhere."""
    images = len(context.data.train)
    is_set = "batch_size" in context.request.user_settings("train")
    if is_set or images < 2 or config.train.batch_size <= images:
        return config, None
    reason = f"there are no more training images than {images}"
    return replace_in(config, "train", batch_size=images), reason


def logit_bias(config: Config, context: Context) -> Choice:
    """Give the model a bias if its loss learns one."""
    return replace_in(config, "model", logit_bias=LOSSES[config.train.loss].has_bias), None


def tokenizer(config: Config, context: Context) -> Choice:
    """Take the tokenizer of the initial weights, or make one for the captions."""
    initial = context.initial_weights
    config, context.tokenizer, reason = fit_vocabulary(config, context.data, initial)
    if initial and initial.shape.vocabulary != config.model.vocabulary:
        # A new text tower is as large as its vocabulary.
        config, context.initial_weights = find_initial_weights(config, context.request.layers)
    return config, reason


def fit_vocabulary(
    config: Config, data: DataSet, initial: InitialWeights | None = None
) -> tuple[Config, Tokenizer, str]:
    """Return the configuration with the vocabulary of a tokenizer, the tokenizer, and its reason."""
    if initial and initial.tokenizer:
        reason = "the one that the model to start from was trained with"
        return config, initial.tokenizer, reason
    captions = list(chain.from_iterable(data.train.captions))
    chosen, reason = choose_tokenizer(config.data, captions, data.alphabet, config.model.context)
    return replace_in(config, "model", vocabulary=chosen.vocabulary), chosen, reason


def steps(config: Config, context: Context) -> Choice:
    """Turn epochs into steps: the schedule and a resumed run rely on the number."""
    train = config.train
    if train.steps and train.minutes:
        raise ConfigError(
            "train.steps and train.minutes are both set.",
            hint="--minutes alone, or --set train.minutes=0",
        )
    if train.steps or train.minutes:
        return config, "asked for"
    steps_per_epoch = make_plan(config, context.data, context.tokenizer).steps_per_epoch
    reason = f"{counted(train.epochs, 'epoch')} of {counted(steps_per_epoch, 'step')}"
    return replace_in(config, "train", steps=train.epochs * steps_per_epoch), reason


def device(config: Config, context: Context) -> Choice:
    """Choose the device, and with it dtype, kernels, threads, micro-batch and loader threads."""
    context.plan = make_plan(config, context.data, context.tokenizer, context.teacher)
    longest = longest_caption(config, context.data, context.tokenizer, context.plan)
    resolved = resolve_auto(config, context.plan, longest, context.status)
    context.device, context.step_seconds = resolved.device, resolved.step_seconds
    context.reasons |= resolved.reasons
    return resolved.config, resolved.reasons.get("train.device")


def threads(config: Config, context: Context) -> Choice:
    """Give every rank as many threads as the smallest computer has for one: results depend on the number."""
    if not context.ranks.is_distributed or config.train.threads != AUTO:
        return config, None
    reason = "what the rank with the fewest cores has"
    return replace_in(config, "train", threads=context.ranks.threads), reason


def micro_batch(config: Config, context: Context) -> Choice:
    """Measure how many pairs fit, if arithmetic does not know the memory of the model."""
    if not is_partly_frozen(config):
        return config, None
    parts = context.parts
    pairs, reason = choose_micro_batch(parts.step, parts.plan.batch(1), parts.device)
    return replace_in(config, "train", micro_batch=pairs), reason


def minutes(config: Config, context: Context) -> Choice:
    """Turn minutes into steps by timing what the run will do."""
    if not config.train.minutes:
        return config, None
    keeps_evaluations = "evaluate_every_epochs" in context.request.user_settings("train")
    # The trial takes the place of the run's model: there may be no room for both. Its config is
    # restored, so that the model is built again with the number of steps.
    context.parts = context.parts.rebuild(trial_config(config))
    fit = fit_minutes(config, context.parts, keeps_evaluations=keeps_evaluations)
    notes = [*fit.notes, *context.parts.notes]
    context.parts = replace(context.parts, config=config, notes=notes)
    return fit.config, fit.reason


def head_start(config: Config, context: Context) -> Choice:
    """Start new heads in closed form if that is requested and can be done."""
    parts = context.parts
    if config.train.head_start != CLOSED_FORM or config.train.start:
        return config, None
    if start_heads(parts.step.model, parts.features, parts.data):
        return config, None
    return config, (
        "heads start at random: only pretrained towers that are frozen, with cached features, "
        "can be fitted"
    )


def features(config: Config, context: Context) -> Choice:
    """Explain which features of frozen towers are not cached."""
    cached = context.parts.features
    if cached is None or not cached.notes:
        return config, None
    return config, "; ".join(filter(None, [cached.summary, *cached.notes]))


def teacher(config: Config, context: Context) -> Choice:
    """Explain where the teacher's embeddings come from."""
    embeddings = context.parts.teacher
    return config, embeddings.note if embeddings else None


def compile_note(config: Config, requested: str, context: Context) -> list[str]:
    """Return a note if the requested form of compiling cannot be had."""
    if requested in (AUTO, config.train.compile):
        return []
    return [context.parts.reasons["train.compile"]]


BEFORE_DATA: dict[str, Resolver] = {
    "train.start": start,
    "train.views": views,
    "train.learning_rate": learning_rate,
}
WITH_DATA: dict[str, Resolver] = {
    "data.stream": stream,
    "data.split_rule": split_rule,
    "train.batch_size": batch_size,
    "model.logit_bias": logit_bias,
    "data.tokenizer": tokenizer,
    "train.steps": steps,
}
WITH_BATCHES: dict[str, Resolver] = {
    "train.threads": threads,
    "train.device": device,
}
WITH_MODEL: dict[str, Resolver] = {
    "train.micro_batch": micro_batch,
    "train.steps": minutes,
    "train.head_start": head_start,
    "train.features": features,
    "train.teacher": teacher,
}
