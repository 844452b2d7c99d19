"""Classes as sentences, and similarities to them as shares.

Shapes: N images, C classes, T templates, E embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lapclip.errors import ConfigError

TEMPLATES = (
    "a photo of a {}.",
    "a photo of the {}.",
    "an image of a {}.",
    "a close-up photo of a {}.",
    "a {}.",
)
"""Used where none are given. The first is CLIP's own (Radford et al. 2021, section 3.1.4); the others vary it."""


def read_templates(text: str) -> list[str]:
    """Templates separated by vertical bars, each with {} for the class."""
    templates = [part.strip() for part in text.split("|") if part.strip()]
    for template in templates:
        if "{}" not in template:
            raise ConfigError(
                f"The template {template!r} has no {{}} for the class.",
                hint="--set data.prompts='a photo of a {}.'",
            )
    return templates or list(TEMPLATES)


def sentences_of(classes: Sequence[str], templates: Sequence[str]) -> list[str]:
    """All sentences of the first class, then those of the next."""
    # Replaced, not formatted: a class name may hold braces. Folder names write spaces as underscores.
    return [
        template.replace("{}", name.replace("_", " ")) for name in classes for template in templates
    ]


def class_embeddings(
    encode_text: Callable[[Sequence[str]], np.ndarray],
    classes: Sequence[str],
    templates: Sequence[str],
) -> np.ndarray:
    """A unit-length row per class: the mean of its sentences' embeddings, made unit length again, as CLIP does."""
    means_CE = (
        encode_text(sentences_of(classes, templates))
        .reshape(len(classes), len(templates), -1)
        .mean(axis=1)
    )
    return means_CE / np.maximum(np.linalg.norm(means_CE, axis=1, keepdims=True), 1e-12)


def class_shares(similarity_NC: np.ndarray, scale: float, bias: float | None = None) -> np.ndarray:
    """What share of its belief a model gives each class of an image, as its loss reads similarities: shares that sum to
    1 without a bias; with one (the sigmoid loss) each class is a question of its own, and they need not."""
    logits_NC = similarity_NC.astype(np.float64) * scale
    if bias is not None:
        return 1 / (1 + np.exp(-(logits_NC + bias)))
    exponents_NC = np.exp(logits_NC - logits_NC.max(axis=1, keepdims=True))
    return exponents_NC / exponents_NC.sum(axis=1, keepdims=True)
