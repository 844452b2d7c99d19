"""A fingerprint is the same for the same model, and changes with whatever decides an embedding."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lapclip.config import ModelConfig
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.embedder import Embedder, load
from lapclip.fingerprint import frozen_fingerprint, weights_digest

from .weights.made import SHAPE, characters, embedder, save_own


def with_shape(**changes: object) -> Embedder:
    shape: ModelConfig = replace(SHAPE, **changes)  # type: ignore[arg-type]
    return embedder(shape, characters())


def test_a_saved_model_that_is_loaded_again_has_the_same_fingerprint(tmp_path: Path) -> None:
    ours = with_shape()
    assert re.fullmatch("[0-9a-f]{16}", ours.fingerprint())
    again = load(save_own(ours, tmp_path / "own"))
    assert (again.fingerprint(), again.image_fingerprint()) == (
        ours.fingerprint(),
        ours.image_fingerprint(),
    )
    ours.model.shape = replace(ours.model.shape, name="another name")
    assert again.fingerprint() == ours.fingerprint()


@pytest.mark.parametrize(
    ("tower", "change"),
    [
        ("image", {"pixel_mean": "0.5 0.5 0.5"}),
        ("image", {"pixel_std": "0.5 0.5 0.5"}),
        ("image", {"interpolation": "bilinear"}),
        ("image", {"resize": "squash"}),
        ("image", {"crop_share": 0.5}),
        ("image", {"colours": "srgb"}),
        ("image", {"image_heads": 2}),
        ("text", {"text_heads": 2}),
        ("both", {"activation": "gelu"}),
    ],
)
def test_what_a_model_sees_and_how_it_computes_counts(
    tower: str, change: dict[str, object]
) -> None:
    ours, other = with_shape(), with_shape(**change)
    assert weights_digest(ours.model) == weights_digest(other.model)
    assert ours.fingerprint() != other.fingerprint()
    assert (ours.image_fingerprint() != other.image_fingerprint()) == (tower != "text")


@pytest.mark.parametrize("name", ["image.class_embedding", "text.ln_final.bias", "logit_scale"])
def test_one_weight_counts(name: str) -> None:
    ours, other = with_shape(), with_shape()
    parameter = other.model.get_parameter(name)
    with torch.no_grad():
        parameter.view(-1)[0] += 1e-6
    assert ours.fingerprint() != other.fingerprint()
    assert (ours.image_fingerprint() != other.image_fingerprint()) == name.startswith("image")


def test_how_captions_are_read_counts() -> None:
    ours = with_shape()
    found, of_images = {ours.fingerprint()}, ours.image_fingerprint()
    other = Embedder(ours.model, CharacterTokenizer(characters().alphabet[::-1]), ours.device)
    found.add(other.fingerprint())
    ours.model.shape = replace(ours.model.shape, context=SHAPE.context - 1)
    found.add(ours.fingerprint())
    assert len(found) == 3
    assert ours.image_fingerprint() == other.image_fingerprint() == of_images


def test_of_the_frozen_part_of_a_tower_trainable_weights_do_not_count() -> None:
    ours = with_shape()
    before = {tower: frozen_fingerprint(ours.model, tower) for tower in ("image", "text")}
    ours.model.image.requires_grad_(False)
    frozen = frozen_fingerprint(ours.model, "image")
    assert frozen != before["image"]
    ours.model.get_parameter("image.projection").requires_grad_(True)
    head = frozen_fingerprint(ours.model, "image")
    with torch.no_grad():
        ours.model.get_parameter("image.projection").add_(1)
    assert frozen_fingerprint(ours.model, "image") == head != frozen
    with torch.no_grad():
        ours.model.get_parameter("image.class_embedding").add_(1)
    assert frozen_fingerprint(ours.model, "image") != head
    assert frozen_fingerprint(ours.model, "text") == before["text"]
