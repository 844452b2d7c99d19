"""Weights that a run starts from if they are not random: of a trained model, or of pretrained towers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from lapclip.config import ALL, Config, Layer, ModelConfig, replace_in
from lapclip.data.tokenizers import Tokenizer
from lapclip.embedder import load_torch
from lapclip.errors import ConfigError, RunError, first_line
from lapclip.model.clip import CLIP
from lapclip.seeding import derived_seed
from lapclip.weights.pretrained_networks import open_image, open_text
from lapclip.which_model import which_model


class InitialWeights:
    """A model to start from. It is opened again each time it is taken, so it is never in memory twice."""

    def __init__(
        self, open_model: Callable[[], CLIP], model: CLIP, tokenizer: Tokenizer | None
    ) -> None:
        self._open, self._model, self.tokenizer = open_model, model, tokenizer
        self.shape = model.shape

    def take(self) -> CLIP:
        """Return the model with its initial values."""
        model, self._model = self._model, None
        return self._open() if model is None else model

    def read_from(self, folder: Path) -> None:
        """Read from a folder of the run from now on: the original may change or go away."""
        self._open = lambda: load_torch(folder).model


def find_initial_weights(
    config: Config, layers: Sequence[Layer]
) -> tuple[Config, InitialWeights | None]:
    """Return the configuration with the shape of the initial weights, and the weights that it names."""
    if config.train.start:
        return _from_model(config, layers)
    if config.model.image_from or config.model.text_from:
        arguments = (
            config.model,
            config.train.seed,
            {name for layer in layers for name in layer.values.get("model", {})},
        )
        model, tokenizer = open_towers(*arguments)
        initial = InitialWeights(lambda: open_towers(*arguments)[0], model, tokenizer)
        return replace(config, model=model.shape), initial
    if config.model.architecture == "siglip":
        raise ConfigError(
            f"{config.model.name} has SigLIP's towers, which are trained from published weights.",
            hint="--from hf:google/siglip-base-patch16-224; or --set model.name=vit-b-16",
        )
    train = config.train
    if (
        train.lora_rank
        or train.layer_decay < 1
        or train.image_blocks != ALL
        or train.text_blocks != ALL
    ):
        raise ConfigError(
            "There is nothing to go on from: these settings spare weights that have learnt something already.",
            hint="lapclip train DATA --recipe heads, then --from runs/heads; or --from published weights",
        )
    return config, None


def restore_initial_weights(folder: Path, config: Config) -> InitialWeights | None:
    """Return what a run started from, from its own folder. Frozen weights are saved nowhere else."""
    if not folder.exists():
        if config.train.start or config.model.image_from or config.model.text_from:
            raise RunError(
                f"{folder} is gone, or the run was killed before it was there: what the run started from is not known.",
                hint="lapclip train for a new run",
            )
        return None
    embedder = load_torch(folder)
    return InitialWeights(lambda: load_torch(folder).model, embedder.model, embedder.tokenizer)


def _from_model(config: Config, layers: Sequence[Layer]) -> tuple[Config, InitialWeights]:
    start = config.train.start
    if asked := layers[-1].values.get("model", {}):
        raise ConfigError(
            f"model.{min(asked)} cannot be changed: the model has the shape of {start}.",
            hint=f"leave out --set model.{min(asked)}",
        )
    path = which_model(start).path
    embedder = load_torch(path)
    initial = InitialWeights(lambda: load_torch(path).model, embedder.model, embedder.tokenizer)
    # What has learnt with the sigmoid loss, as SigLIP has, goes on with it, unless another is asked for.
    if embedder.model.logit_bias is not None and not any(
        "loss" in layer.values.get("train", {}) for layer in layers
    ):
        config = replace_in(config, "train", loss="sigmoid")
    return replace(config, model=embedder.model.shape), initial


def open_towers(
    shape: ModelConfig, seed: int = 0, asked: Collection[str] = ()
) -> tuple[CLIP, Tokenizer | None]:
    """Pretrained towers with new heads; what is known of them goes into the shape, unless it was asked otherwise."""
    networks, tokenizer = {}, None
    if shape.image_from:
        image = open_image(shape.image_from)
        networks["image"] = (image.backbone, image.spec)
        facts = {name: value for name, value in image.facts.items() if name not in asked}
        shape = replace(shape, **facts)
    if shape.text_from:
        text = open_text(shape.text_from)
        networks["text"], tokenizer = (text.backbone, text.spec), text.tokenizer
        facts = {name: value for name, value in text.facts.items() if name not in asked}
        shape = replace(shape, **facts)
    try:
        model = CLIP(shape, seed=derived_seed(seed, "weights"), networks=networks)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        names = " and ".join(name for name in (shape.image_from, shape.text_from) if name)
        raise ConfigError(f"{names} cannot be used as a tower: {first_line(error)}.") from error
    return model, tokenizer
