"""Hugging Face models as towers, through the package transformers."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from lapclip.data.tokenizers.pretrained_tokenizer import ForeignTokenizer
from lapclip.errors import ConfigError, first_line
from lapclip.model.pretrained.spec import HUGGING_FACE, TowerSpec
from lapclip.weights.networks.opened import Opened

CONTEXT = 128
"""Most tokens of a caption; networks that know more are slow on them, and captions are short."""

NO_CODE = {"trust_remote_code": False}
"""Code that lies beside weights is never run; left open, transformers would ask whoever sits at the keyboard."""


def open_vision(reference: str) -> tuple[nn.Module, dict[str, Any], str, dict[str, Any]]:
    """The network, its config, its pooling, and what it wants to see."""
    backbone, config = _open(reference)
    facts: dict[str, Any] = {}
    # As release 5 of transformers writes it, or as all before did.
    processor = _json_beside(reference, "processor_config.json").get("image_processor")
    processor = processor or _json_beside(reference, "preprocessor_config.json")
    size = processor.get("crop_size") or processor.get("size") or config.get("image_size") or 224
    short = processor.get("size") or {}
    side = _side(size)
    facts["image_size"] = side
    if "image_mean" in processor:
        facts["pixel_mean"] = " ".join(f"{value:g}" for value in processor["image_mean"])
        facts["pixel_std"] = " ".join(f"{value:g}" for value in processor["image_std"])
    facts["interpolation"] = {2: "bilinear"}.get(processor.get("resample", 3), "bicubic")
    if isinstance(short, dict) and "shortest_edge" in short and "crop_size" in processor:
        facts["crop_share"] = min(1.0, side / short["shortest_edge"])
    elif "crop_size" not in processor and isinstance(short, dict) and "height" in short:
        facts["resize"] = "squash"
    tokens = any("cls_token" in name or "class_embedding" in name for name, _ in backbone.named_parameters())
    return backbone, config, "first" if tokens else "mean", facts


def open_text(reference: str, name: str) -> Opened:
    """The network with its tokenizer, pooled as its folder says (sentence-transformers), else by the mean."""
    backbone, config = _open(reference)
    tokenizer = _tokenizer(reference)
    if tokenizer.vocabulary > config.get("vocab_size", tokenizer.vocabulary):
        raise ConfigError(
            f"The tokenizer of {reference} has {tokenizer.vocabulary:,} tokens, but its weights know "
            f"{config['vocab_size']:,}.",
            hint="the folder as it was published, with its own tokenizer.json",
        )
    spec = TowerSpec(
        kind=HUGGING_FACE,
        name=name,
        config=config,
        pooling=_pooling(reference),
        unit_length=(_beside(reference, "modules.json") or "").find("Normalize") >= 0,
        padding=tokenizer.padding,
    )
    longest = _json_beside(reference, "sentence_bert_config.json").get("max_seq_length") or CONTEXT
    context = min(CONTEXT, int(longest), int(config.get("max_position_embeddings", CONTEXT)))
    return Opened(backbone, spec, {"context": context, "vocabulary": tokenizer.vocabulary}, tokenizer)


def build(config: dict[str, Any]) -> nn.Module:
    """The network of a saved config, with values yet to come."""
    transformers = _transformers()
    kept = {key: value for key, value in config.items() if key != "model_type"}
    about = transformers.AutoConfig.for_model(config["model_type"], **kept)
    return _without_pooler(transformers.AutoModel.from_config(about, **NO_CODE))


def _open(reference: str) -> tuple[nn.Module, dict[str, Any]]:
    transformers = _transformers()
    try:
        backbone = transformers.AutoModel.from_pretrained(reference, dtype="float32", **NO_CODE)
    except Exception as error:
        if Path(reference).exists():
            said = f"{reference} cannot be read as a Hugging Face model: {first_line(error)}."
            raise ConfigError(said, hint="a folder with config.json and model.safetensors") from error
        raise ConfigError(
            f"There is no folder {reference}, and the hub did not give it: {first_line(error)}.",
            hint="the path of a folder with config.json and model.safetensors, or a connection",
        ) from error
    if hasattr(backbone, "vision_model") and hasattr(backbone, "text_model"):
        raise ConfigError(
            f"{reference} holds an image and a text tower that belong together.",
            hint=f"lapclip train --from {reference}",
        )
    return _without_pooler(backbone), json.loads(backbone.config.to_json_string(use_diff=False))


def _without_pooler(backbone: nn.Module) -> nn.Module:
    """What would only be computed for nothing: features are pooled by us."""
    if isinstance(getattr(backbone, "pooler", None), nn.Module):
        setattr(backbone, "pooler", None)  # noqa: B010 (attributes of a Module are unknown to pyright)
    return backbone


def _tokenizer(reference: str) -> ForeignTokenizer:
    transformers = _transformers()
    try:
        found = transformers.AutoTokenizer.from_pretrained(reference, **NO_CODE)
        text = found.backend_tokenizer.to_str()
    except Exception as error:
        raise ConfigError(
            f"{reference} has no tokenizer that can be used: {first_line(error)}.", hint="a folder with tokenizer.json"
        ) from error
    if found.pad_token_id is None:
        raise ConfigError(f"The tokenizer of {reference} has no token for padding, so captions cannot be batched.")
    return ForeignTokenizer(json.loads(text), found.pad_token_id)


def _pooling(reference: str) -> str:
    modes = _json_beside(reference, "1_Pooling/config.json")
    for name, pooling in (("cls_token", "first"), ("max_tokens", "max"), ("lasttoken", "last")):
        if modes.get(f"pooling_mode_{name}"):
            return pooling
    return "mean"


def _beside(reference: str, name: str) -> str | None:
    """A file that comes with the model, if it is there."""
    path = Path(reference) / name
    if not Path(reference).exists():
        from huggingface_hub import hf_hub_download

        with suppress(Exception):  # most of these files are optional
            path = Path(hf_hub_download(reference, name))
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    return None


def _json_beside(reference: str, name: str) -> dict[str, Any]:
    with suppress(ValueError, TypeError):
        return dict(json.loads(_beside(reference, name) or "{}"))
    return {}


def _side(size: Any) -> int:
    if isinstance(size, dict):
        return int(size.get("height") or size.get("shortest_edge") or 224)
    return int(size)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "A Hugging Face tower needs the package transformers.", hint="pip install 'lapclip[towers]'"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
