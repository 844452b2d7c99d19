"""The settings of a new run: what the user asked for, and what follows from the data. Each step returns values."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lapclip.config import ALL, AUTO, Config, DataConfig, Layer, build_config, parse_settings, read_recipe, replace_in
from lapclip.data.batches import BatchPlan, Views
from lapclip.data.dataset import DataSet, count_seen, seen_by
from lapclip.data.sources import find_source
from lapclip.data.splits import TRAIN
from lapclip.data.tokenizers import Tokenizer, choose_tokenizer
from lapclip.errors import ConfigError
from lapclip.model.shapes import SHAPES
from lapclip.text import counted
from lapclip.training.initial_weights import InitialWeights

HIGHEST_RATE, HIGHEST_LORA_RATE = 1e-4, 2e-3
"""Learning rates of pretrained towers beyond which they are known to break: 1e-5 is right for whole towers and 1e-4
destroys them (fine-tuning CLIP at batch 256, ITRA's documentation); additions of low rank take 2e-4 (CLIP-LoRA)."""
BY_SIZE: tuple[tuple[float, str, str], ...] = (
    (1_000, "heads", "so few would only be learnt by heart, so all but the heads stays as it is"),
    (5_000, "lora", "enough to adapt attention a little, too few for all weights"),
    (math.inf, "last-blocks", "enough for whole blocks; all weights (full) pay off later still"),
)
"""The most training images for each recipe. Of 6,000 photos last-blocks made more than lora (docs/finetune.md); where
they begin to is not measured."""


@dataclass(frozen=True)
class Request:
    """What the user asked for: a recipe, and settings laid over it."""

    recipe: str
    layers: Sequence[Layer]
    config: Config
    notes: list[str]

    def asked(self, section: str) -> dict:
        """The settings of a section that the user gave, without the recipe's."""
        return dict(self.layers[-1].values.get(section, {}))


def read_request(recipe: str, settings: Sequence[str], minutes: float | None) -> Request:
    """The configuration before the data is known; a recipe that is left open is chosen by the number of images."""
    if minutes is not None and minutes <= 0:
        raise ConfigError(f"--minutes must be more than 0, not {minutes:g}.", hint="lapclip train --minutes 5")
    flags = Layer("--minutes", {"train": {"minutes": minutes}} if minutes is not None else {})
    asked = parse_settings(list(settings))
    recipe, notes = choose_recipe(recipe, build_config([asked], SHAPES).data)
    layers = [read_recipe(recipe), flags, asked]
    request = Request(recipe, layers, build_config(layers, SHAPES), notes)
    needs_teacher = "teacher_weight" in layers[0].values.get("train", {}) and request.config.train.teacher_weight
    if needs_teacher and not request.config.train.teacher:
        raise ConfigError(
            f"Recipe {recipe} learns from a teacher, and none is named.",
            hint="--teacher RUN, or a file of embeddings; --set train.teacher_weight=0 trains the same without one",
        )
    return request


def choose_recipe(recipe: str, data: DataConfig) -> tuple[str, list[str]]:
    """The recipe; where it is left open, the one for so many training images, and why."""
    if recipe != AUTO:
        return recipe, []
    count = find_source(data.source).count_training(data)
    chosen, why = next((name, why) for most, name, why in BY_SIZE if count <= most)
    return chosen, [f"recipe {chosen} for {count:,} training images: {why}; --recipe NAME takes another"]


def fit_views(config: Config) -> Config:
    """Images that are never cropped look the same each time, so one view is all there is."""
    train = config.train
    plain = train.crop == 1 and not train.flip and not train.views
    return replace_in(config, "train", views=1) if plain and train.image_blocks != ALL else config


def fit_data(config: Config, data: DataSet, *, asked_batch: bool) -> tuple[Config, list[str]]:
    """Settings that follow from the data, and what the user should know about it.

    Whether images are streamed is settled, because a resumed run needs the same order. A batch that a recipe made for
    more images becomes as large as the data; one that the user asked for is refused elsewhere.
    """
    notes = [*data.notes]
    if not find_source(config.data.source).is_drawn:
        config = replace_in(config, "data", stream="always" if data.train.sequential else "never")
    if config.train.batch_size > len(data.train) > 1 and not asked_batch:
        notes.append(f"train.batch_size is {len(data.train)}: there are no more training images")
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
            "train.steps and train.minutes are both set.", hint="--minutes alone, or --set train.minutes=0"
        )
    if train.steps or train.minutes:
        return config, "asked for"
    per_epoch = make_plan(config, data, tokenizer).steps_per_epoch
    why = f"{counted(train.epochs, 'epoch')} of {counted(per_epoch, 'step')}"
    return replace_in(config, "train", steps=train.epochs * per_epoch), why


def make_plan(config: Config, data: DataSet, tokenizer: Tokenizer) -> BatchPlan:
    """Which pairs in which order, before there are frozen features or teacher embeddings to go with them."""
    train = config.train
    views = Views(train.views, train.crop, train.flip, config.model.crop_share) if train.views else None
    return BatchPlan(
        data.train, tokenizer, config.model.context, train.batch_size, train.seed, train.symbol_dropout, views
    )


def longest_caption(config: Config, data: DataSet, tokenizer: Tokenizer) -> int:
    """The most tokens that a batch of captions is padded to. Looks at the longest ones only: encoding all takes time,
    and a caption of few bytes has few tokens."""
    captions = (caption for options in data.train.captions for caption in options)
    longest = heapq.nlargest(1000, captions, key=lambda caption: len(caption.encode("utf-8", "replace")))
    return tokenizer.batch(longest, config.model.context).shape[1]


def unused_settings(request: Request, config: Config, initial: InitialWeights | None) -> list[str]:
    """Settings that the user gave and that this run does not use."""
    notes = []
    if not config.train.teacher and request.asked("train").get("teacher_weight"):
        notes.append("train.teacher_weight is not used: no teacher is named; --teacher RUN names one")
    if initial and initial.tokenizer and "tokenizer" in request.asked("data"):
        notes.append("data.tokenizer is not used: the model to start from reads captions with its own")
    if config.train.minutes and "epochs" in request.asked("train"):
        notes.append(f"train.epochs is not used: the run is to take {counted(config.train.minutes, 'minute')}")
    return notes


def rate_warnings(config: Config, initial: InitialWeights | None) -> list[str]:
    """A learning rate that is known to destroy pretrained weights, before the run does so."""
    train = config.train
    locked = train.image_blocks == 0 and train.text_blocks == 0
    most = HIGHEST_LORA_RATE if train.lora_rank else HIGHEST_RATE
    rate = train.learning_rate * train.tower_share
    if initial is None or locked or rate <= most:
        return []
    return [
        f"the towers' learning rate, {rate:g}, is far above what pretrained weights stand (about {most / 5:g}): they "
        f"may forget what they know; --set train.tower_share={most / 5 / train.learning_rate:.2g}"
    ]


def seen_before_warnings(config: Config, data: DataSet) -> list[str]:
    """Held-out images that the model to start from has learnt from: they are no test, and no score would show it."""
    found = {split: count_seen(pairs.identities, seen_by(config.train.start)) for split, pairs in data.splits.items()}
    known = [f"{count:,} of the {len(data.splits[split]):,} of {split}" for split, count in found.items() if count]
    if not config.train.start or not any(count for split, count in found.items() if split != TRAIN):
        return []
    return [
        f"the model to start from has learnt from {' and '.join(known)}: scores on held-out ones are no test; "
        "--set data.seed as in its run splits them alike"
    ]
