"""What a run is made of: its data and its model, built from complete settings."""

from __future__ import annotations

import heapq
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

from lapclip import __version__
from lapclip.config import Config
from lapclip.data.batches import BatchPlan, Views
from lapclip.data.dataset import DataSet
from lapclip.data.tokenizers import Tokenizer
from lapclip.embedder import Embedder
from lapclip.machine.device import DTYPES, Device
from lapclip.model.clip import CLIP
from lapclip.model.freezing import freeze
from lapclip.progress import DataProgress
from lapclip.runs.folder import FORMAT
from lapclip.seeding import derived_seed
from lapclip.training.cuda_graph import make_step
from lapclip.training.distributed import ALONE, Ranks, shard_towers
from lapclip.training.frozen_features import CachedFeatures, cache_features, with_features
from lapclip.training.initial_weights import InitialWeights
from lapclip.training.objectives import Objectives
from lapclip.training.ranks_in_a_run import share_inputs
from lapclip.training.step import TrainStep
from lapclip.training.teacher import TeacherEmbeddings

LONG_CAPTIONS = 1000  # longest captions by their bytes, of which the one with most tokens is sought


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What a run needs before its device is known and its model is built."""

    recipe: str
    config: Config
    data: DataSet
    tokenizer: Tokenizer
    initial_weights: InitialWeights | None
    """None for random weights."""
    teacher: TeacherEmbeddings | None
    given: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings that the user gave, by section. Empty for a resumed run."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Reason for each automatic choice, by the name of the setting."""
    notes: list[str] = field(default_factory=list)
    """Messages for the user."""
    tuned_seconds: float | None = None
    """Time of a step when the settings were chosen. None if none was timed."""


@dataclass(frozen=True, kw_only=True)
class RunParts(RunInputs):
    """A run that is ready for its first step. No setting is "auto"."""

    device: Device
    features: CachedFeatures | None
    """Features of the frozen part of the model. None if nothing is frozen."""
    plan: BatchPlan
    """Batches, with cached features in them."""
    step: TrainStep
    embedder: Embedder

    def rebuild(self, config: Config) -> RunParts:
        """Return the same run with other settings. Builds the model again: its step holds them."""
        step, embedder = build(config, self.tokenizer, self.device, self.initial_weights)
        embedder = with_features(embedder, self.features, step)
        return replace(self, config=config, step=step, embedder=embedder)

    def explain(self, setting: str, reason: str) -> RunParts:
        """Return the same run with the reason for a setting."""
        return replace(self, reasons=self.reasons | {setting: reason})


def assemble(
    inputs: RunInputs,
    plan: BatchPlan,
    device: Device,
    progress: DataProgress | None = None,
    ranks: Ranks = ALONE,
) -> RunParts:
    """Build the model, and compute the features of its frozen part. `ranks` share that work."""
    step, embedder = build(inputs.config, inputs.tokenizer, device, inputs.initial_weights)
    share_inputs(inputs, saved_settings(inputs), embedder, ranks)
    features = cache_features(step, embedder, plan, inputs.data, inputs.config, progress, ranks)
    if features and features.summary:
        inputs = replace(inputs, reasons=inputs.reasons | {"train.features": features.summary})
    return RunParts(
        **vars(inputs),
        device=device,
        features=features,
        plan=plan.with_features(features),
        step=step,
        embedder=with_features(embedder, features, step),
    )


def build(
    config: Config,
    tokenizer: Tokenizer,
    device: Device,
    initial: InitialWeights | None,
    ranks: Ranks = ALONE,
) -> tuple[TrainStep, Embedder]:
    """Return the model as it starts, once with its optimizer to train, once to embed.

    With `ranks` each of them has a part of every weight.
    """
    train = config.train
    if initial:
        model = initial.take()
    else:
        model = CLIP(config.model, seed=derived_seed(train.seed, "weights"))
    Objectives(train).start(model, is_new=not train.start)
    model.to(device.torch)
    freeze(model, train)
    if ranks.is_distributed:
        half = None if train.dtype == "float32" else DTYPES[train.dtype]
        shard_towers(model, ranks, half, DTYPES[train.exchange])
    step = make_step(model, train, device)
    embedder = Embedder(model, tokenizer, device)
    if train.micro_batch:
        embedder.batch = min(embedder.batch, train.micro_batch)  # more may not fit in memory
    return step, embedder


def make_plan(
    config: Config,
    data: DataSet,
    tokenizer: Tokenizer,
    teacher: TeacherEmbeddings | None = None,
) -> BatchPlan:
    """Return the batches of a run, without cached features."""
    train = config.train
    views = None
    if train.views:
        views = Views(train.views, train.crop, train.flip, config.model.crop_share)
    return BatchPlan(
        data.train,
        tokenizer,
        config.model.context,
        train.batch_size,
        train.seed,
        train.symbol_dropout,
        views,
        Objectives(train, teacher=teacher.vectors if teacher else None),
    )


def longest_caption(
    config: Config, data: DataSet, tokenizer: Tokenizer, plan: BatchPlan | None = None
) -> int:
    """Return the most tokens that captions, with the plan's further texts, are padded to in a batch.

    Encodes only the captions with most bytes, because encoding all of them takes long.
    """
    context = config.model.context
    captions = chain.from_iterable(data.train.captions)
    longest = heapq.nlargest(LONG_CAPTIONS, captions, key=_count_bytes)
    further_texts = plan.texts.values() if plan else []
    further_tokens = sum(max(map(len, texts)) for texts in further_texts)
    return min(context, tokenizer.batch(longest, context).shape[1] + further_tokens)


def _count_bytes(caption: str) -> int:
    return len(caption.encode("utf-8", "replace"))


def saved_settings(inputs: RunInputs) -> dict[str, Any]:
    """Return the contents of run.toml."""
    about: dict[str, Any] = {
        "format": FORMAT,
        "recipe": inputs.recipe,
        "lapclip": __version__,
        "asked": inputs.given,
        "data_fingerprint": inputs.data.fingerprint,
        "notes": list(inputs.notes),
    }
    if inputs.tuned_seconds is not None:
        about["tuned_seconds"] = inputs.tuned_seconds
    if inputs.teacher:
        about["teacher_digest"] = inputs.teacher.digest
    return {"run": about, **asdict(inputs.config), "reasons": inputs.reasons}
