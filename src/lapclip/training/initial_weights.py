"""Initial weights of a run that are not random: a trained model's, or those of pretrained
towers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lapclip.config import ALL, Config, Layer, ModelConfig, replace_in
from lapclip.data.tokenizers import Tokenizer
from lapclip.embedder import load_torch
from lapclip.errors import ConfigError, RunError, first_line
from lapclip.model.clip import CLIP
from lapclip.seeding import derived_seed
from lapclip.weights.pretrained_networks import open_image, open_text
from lapclip.which_model import which_model


class InitialWeights:
    """A model to start from.

    Holds the model that was opened to learn its shape until the first `take`, and opens it again
    for later ones, so that it is never in memory twice.
    """

    def __init__(
        self, open_model: Callable[[], CLIP], model: CLIP, tokenizer: Tokenizer | None
    ) -> None:
        self._open_model = open_model
        self._model: CLIP | None = model
        self.tokenizer = tokenizer
        self.shape = model.shape

    def take(self) -> CLIP:
        """Return the model with its initial values. It belongs to the caller, who trains it."""
        if self._model is None:
            return self._open_model()
        model = self._model
        self._model = None
        return model

    def read_from(self, folder: Path) -> None:
        """Read from a folder of the run from now on: the original may change or go away."""
        self._open_model = lambda: load_torch(folder).model


def find_initial_weights(
    config: Config, layers: Sequence[Layer]
) -> tuple[Config, InitialWeights | None]:
    """Return the initial weights that the settings name, and the configuration with their shape."""
    if config.train.start:
        return _open_start(config, layers)
    if config.model.image_from or config.model.text_from:
        return _open_pretrained(config, layers)
    if config.model.architecture == "siglip":
        raise ConfigError(
            f"{config.model.name} has SigLIP's towers, which are trained from published weights.",
            hint="--from hf:google/siglip-base-patch16-224; or --set model.name=vit-b-16",
        )
    train = config.train
    has_frozen_blocks = train.image_blocks != ALL or train.text_blocks != ALL
    if has_frozen_blocks or train.lora_rank or train.layer_decay < 1:
        raise ConfigError(
            "These settings preserve weights that are trained already, and this run starts from "
            "random ones.",
            hint="lapclip train DATA --recipe heads, then --from runs/heads; "
            "or --from published weights",
        )
    return config, None


def restore_initial_weights(folder: Path, config: Config) -> InitialWeights | None:
    """Return the initial weights from the run's folder, the only place that has the frozen ones.

    Returns None for a run that started from random weights.
    """
    if not folder.exists():
        if config.train.start or config.model.image_from or config.model.text_from:
            raise RunError(
                f"{folder} is gone, or the run was killed before it was written. "
                "It has the weights that the run started from.",
                hint="lapclip train for a new run",
            )
        return None
    embedder = load_torch(folder)
    return InitialWeights(lambda: load_torch(folder).model, embedder.model, embedder.tokenizer)


def _open_start(config: Config, layers: Sequence[Layer]) -> tuple[Config, InitialWeights]:
    """Open the trained model that `train.start` names. It decides the shape, and the loss by
    default."""
    start = config.train.start
    user_settings = layers[-1].values.get("model", {})
    if user_settings:
        name = min(user_settings)
        raise ConfigError(
            f"model.{name} cannot be changed: the model has the shape of {start}.",
            hint=f"leave out --set model.{name}",
        )
    path = which_model(start).path
    embedder = load_torch(path)
    was_sigmoid = embedder.model.logit_bias is not None  # as in SigLIP
    if was_sigmoid and "loss" not in _names_set(layers, "train"):
        config = replace_in(config, "train", loss="sigmoid")
    initial = InitialWeights(lambda: load_torch(path).model, embedder.model, embedder.tokenizer)
    return replace(config, model=embedder.model.shape), initial


def _open_pretrained(config: Config, layers: Sequence[Layer]) -> tuple[Config, InitialWeights]:
    """Open the pretrained towers that `model.image_from` and `model.text_from` name."""
    shape, seed, fixed = config.model, config.train.seed, _names_set(layers, "model")
    model, tokenizer = open_towers(shape, seed, fixed)
    initial = InitialWeights(lambda: open_towers(shape, seed, fixed)[0], model, tokenizer)
    return replace(config, model=model.shape), initial


def _names_set(layers: Sequence[Layer], section: str) -> set[str]:
    """Return the settings of a section that any layer sets."""
    names: set[str] = set()
    for layer in layers:
        names |= layer.values.get(section, {}).keys()
    return names


def open_towers(
    shape: ModelConfig, seed: int = 0, fixed: Collection[str] = ()
) -> tuple[CLIP, Tokenizer | None]:
    """Return a model of pretrained towers with new heads, and the tokenizer of its text tower.

    Takes settings such as the image size from the towers, except those named in `fixed`.
    """
    networks, tokenizer = {}, None
    if shape.image_from:
        image = open_image(shape.image_from)
        networks["image"] = (image.backbone, image.spec)
        shape = _with_facts(shape, image.facts, fixed)
    if shape.text_from:
        text = open_text(shape.text_from)
        networks["text"] = (text.backbone, text.spec)
        shape = _with_facts(shape, text.facts, fixed)
        tokenizer = text.tokenizer
    try:
        model = CLIP(shape, seed=derived_seed(seed, "weights"), networks=networks)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        names = " and ".join(name for name in (shape.image_from, shape.text_from) if name)
        raise ConfigError(f"{names} cannot be used as a tower: {first_line(error)}.") from error
    return model, tokenizer


def _with_facts(
    shape: ModelConfig, facts: Mapping[str, Any], fixed: Collection[str]
) -> ModelConfig:
    """Return the shape with what is known of a tower, except for fixed settings."""
    return replace(shape, **{name: value for name, value in facts.items() if name not in fixed})
