"""A model's fingerprint: 16 hexadecimal digits that tell whether two models give the same embeddings.

It changes with any weight, with how the model sees images (size, resizing, cropping, interpolation, colours, pixel mean
and deviation), with how it reads captions (tokenizer, context length), and with how its towers compute. It is the same
on every device, and for a model that was saved and loaded again. The search index, exports, cached features and cached
teacher embeddings use it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import nn

from lapclip.data.pixels import View
from lapclip.data.tokenizers import Tokenizer
from lapclip.model.clip import CLIP
from lapclip.model.pretrained_towers import PretrainedTower
from lapclip.paths import digest_of_json

DIGITS = 16


def fingerprint(model: CLIP, tokenizer: Tokenizer) -> str:
    """The fingerprint of a whole model."""
    return short_digest({
        "weights": weights_digest(model),
        "image": _image_facts(model),
        "text": _text_facts(model),
        "tokenizer": tokenizer.to_dict(),
    })  # fmt: skip


def image_fingerprint(model: CLIP) -> str:
    """The fingerprint of the image side alone: it changes with whatever decides the embedding of an image."""
    return short_digest({"weights": weights_digest(model.image), "image": _image_facts(model)})


def frozen_fingerprint(model: CLIP, tower: str) -> str:
    """The fingerprint of the frozen part of one tower, "image" or "text": trainable weights do not count."""
    module = getattr(model, tower)
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    facts = _image_facts(model) if tower == "image" else _text_facts(model)
    return short_digest(
        {"weights": weights_digest(module, lambda name: name not in trainable), tower: facts}
    )


def weights_digest(module: nn.Module, counts: Callable[[str], bool] = lambda name: True) -> str:
    """Return a digest of the names, sizes and values of weights: of all, or of those whose name counts."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if counts(name):
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().float().numpy().tobytes())
    return digest.hexdigest()[:32]


def short_digest(facts: dict[str, Any]) -> str:
    """The digest of plain data, as short as a fingerprint."""
    return digest_of_json(facts)[:DIGITS]


def _image_facts(model: CLIP) -> dict[str, Any]:
    shape = model.shape
    return {
        "view": asdict(View.of(shape)),
        "mean": [float(number) for number in shape.pixel_mean.split()],
        "deviation": [float(number) for number in shape.pixel_std.split()],
        **_computation(model, "image"),
    }


def _text_facts(model: CLIP) -> dict[str, Any]:
    return {"context": model.shape.context, **_computation(model, "text")}


def _computation(model: CLIP, tower: str) -> dict[str, Any]:
    """How a tower computes, as far as its weights do not tell."""
    module, shape = getattr(model, tower), model.shape
    if isinstance(module, PretrainedTower):
        return {"network": module.spec.to_dict(), "taps": list(module.taps)}
    kind = shape.image_tower if tower == "image" else "transformer"
    if shape.architecture == "siglip":
        kind = shape.architecture
    activation = (tower == "text" and shape.text_activation) or shape.activation
    return {"tower": kind, "activation": activation, "heads": getattr(shape, f"{tower}_heads")}
