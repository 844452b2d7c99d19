"""Hugging Face's folders of a `CLIPModel`, a `SiglipModel` or a `Siglip2Model`: `config.json`,
`preprocessor_config.json`, weights in one file or in shards.

Names, fields and their defaults are those of https://github.com/huggingface/transformers,
src/transformers/models/clip, siglip and siglip2, release 5. What is published as SigLIP 2 for one size of images is a
`SiglipModel`. A `Siglip2Model` takes images of any shape (NaFlex); here it sees the square that its positions were
learnt for, as it would see square images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lapclip.config import CLIP_MEAN, CLIP_STD, ModelConfig
from lapclip.errors import WeightsError
from lapclip.paths import read_json
from lapclip.weights import CONFIG, INDEX
from lapclip.weights import HUGGINGFACE_WEIGHTS as WEIGHTS
from lapclip.weights.check_fields import (
    COLORS,
    FLAG,
    POSITIVE,
    SECTION,
    SIDE_OR_EDGES,
    SIZE,
    STRING,
    check_fields,
    checked_shape,
    one_of,
    or_null,
    whole,
)
from lapclip.weights.published import Layout, Tensors, named
from lapclip.weights.torch_files import read_tensors

_BLOCK = {
    "ln_1": "layer_norm1",
    "attention.qkv": "self_attn.{q|k|v}_proj",
    "attention.out": "self_attn.out_proj",
    "ln_2": "layer_norm2",
    "mlp_in": "mlp.fc1",
    "mlp_out": "mlp.fc2",
}
_TEXT = {
    "text.token_embedding": "text_model.embeddings.token_embedding",
    "text.position_embedding": "text_model.embeddings.position_embedding.weight",
    **{
        f"text.transformer.blocks.{{n}}.{a}": f"text_model.encoder.layers.{{n}}.{b}"
        for a, b in _BLOCK.items()
    },
    "text.ln_final": "text_model.final_layer_norm",
    "logit_scale": "logit_scale",
    "logit_bias": "logit_bias",  # SiglipModel's name; a CLIPModel has none and passes over it
}
_IMAGE = {
    "image.patch_weight": "vision_model.embeddings.patch_embedding.weight",
    "image.position_embedding": "vision_model.embeddings.position_embedding.weight",
    **{
        f"image.transformer.blocks.{{n}}.{a}": f"vision_model.encoder.layers.{{n}}.{b}"
        for a, b in _BLOCK.items()
    },
    "image.ln_post": "vision_model.post_layernorm",
}
CLIP_TABLE = {
    **_IMAGE,
    **_TEXT,
    "image.class_embedding": "vision_model.embeddings.class_embedding",
    "image.ln_pre": "vision_model.pre_layrnorm",
    "image.projection": "visual_projection.weight",
    "text.projection": "text_projection.weight",
}
SIGLIP_TABLE = {
    **_IMAGE,
    **_TEXT,
    "image.patch_bias": "vision_model.embeddings.patch_embedding.bias",
    "image.head.probe": "vision_model.head.probe",
    "image.head.attention.qkv.weight": "vision_model.head.attention.in_proj_weight",
    "image.head.attention.qkv.bias": "vision_model.head.attention.in_proj_bias",
    "image.head.attention.out": "vision_model.head.attention.out_proj",
    "image.head.ln": "vision_model.head.layernorm",
    "image.head.mlp_in": "vision_model.head.mlp.fc1",
    "image.head.mlp_out": "vision_model.head.mlp.fc2",
    "text.projection": "text_model.head.weight",
    "text.projection_bias": "text_model.head.bias",
}
NO_WEIGHTS = frozenset(
    {"text_model.embeddings.position_ids", "vision_model.embeddings.position_ids"}
)
LAYOUTS = {
    "clip": Layout(CLIP_TABLE, NO_WEIGHTS, frozenset({"image.projection", "text.projection"})),
    "siglip": Layout(
        SIGLIP_TABLE,
        NO_WEIGHTS,
        frozenset({"text.projection"}),
        {"logit_scale": 1, "logit_bias": 1, "image.head.probe": 2},
    ),
}
BICUBIC, BILINEAR = 3, 2
"""Pillow's numbers."""


def has_these_names(tensors: Tensors) -> bool:
    return "vision_model.embeddings.patch_embedding.weight" in tensors


class Defaults(NamedTuple):
    """What a configuration leaves out, by its model type."""

    architecture: str
    vocabulary: int
    activation: str
    epsilon: float
    patch: int
    text_width: int
    text_heads: int
    text_mlp: int
    context: int
    seen: Mapping[str, Any]
    """The fields of `preprocessor_config.json`."""


_SIGLIP_SEEN = {"do_center_crop": False, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_SIGLIP = Defaults("siglip", 32_000, "gelu_pytorch_tanh", 1e-6, 16, 768, 12, 3072, 64, _SIGLIP_SEEN)
DEFAULTS = {
    "clip": Defaults("clip", 49_408, "quick_gelu", 1e-5, 32, 512, 8, 2048, 77, {}),
    "siglip": _SIGLIP,
    "siglip2": _SIGLIP._replace(seen={**_SIGLIP_SEEN, "resample": BILINEAR}),
}
ACTIVATIONS = {"gelu": "gelu", "quick_gelu": "quick_gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""What they call an activation, and we."""


_TOWER_FIELDS = {
    "hidden_size": SIZE,
    "num_hidden_layers": SIZE,
    "num_attention_heads": SIZE,
    "intermediate_size": SIZE,
    "hidden_act": STRING,
    "layer_norm_eps": POSITIVE,
}
_TEXT_FIELDS = {
    **_TOWER_FIELDS,
    "vocab_size": whole(3),
    "max_position_embeddings": whole(2),
    "projection_size": or_null(SIZE),
    "eos_token_id": or_null(whole(0)),
}
_VISION_FIELDS = {
    **_TOWER_FIELDS,
    "image_size": SIZE,
    "patch_size": SIZE,
    "num_patches": SIZE,
    "vision_use_head": or_null(FLAG),
}
FIELDS = {
    "text_config": or_null(SECTION),
    "vision_config": or_null(SECTION),
    **{f"text_config.{name}": rule for name, rule in _TEXT_FIELDS.items()},
    **{f"vision_config.{name}": rule for name, rule in _VISION_FIELDS.items()},
    "projection_dim": SIZE,
}
"""The fields of config.json that are read."""
PREPROCESSING_FIELDS = {
    "size": SIDE_OR_EDGES,
    "crop_size": SIDE_OR_EDGES,
    "do_center_crop": FLAG,
    "resample": one_of(BICUBIC, BILINEAR),
    "image_mean": COLORS,
    "image_std": COLORS,
}
"""The fields of preprocessor_config.json that are read."""


def shape_of(config: dict[str, Any], seen: dict[str, Any], where: str) -> ModelConfig:
    """The shape that `config.json` and `preprocessor_config.json` describe."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in DEFAULTS:
        raise WeightsError(
            f"{where} has the model type {kind!r}, which cannot be read: it is no CLIP and no SigLIP.",
            hint=f'a folder whose config.json has "model_type": {", ".join(DEFAULTS)}',
        )
    usual = DEFAULTS[kind]
    check_fields(config, FIELDS, where)
    try:
        text = config.get("text_config") or {}
        vision = config.get("vision_config") or {}
        vocabulary = text.get("vocab_size", usual.vocabulary)
        text_width = text.get("hidden_size", usual.text_width)
        activations = [tower.get("hidden_act", usual.activation) for tower in (vision, text)]
        if not set(activations) <= set(ACTIVATIONS) or (
            kind == "clip" and len(set(activations)) != 1
        ):
            known = "gelu or quick_gelu" if kind == "clip" else "gelu_pytorch_tanh or gelu"
            raise WeightsError(
                f"{where}: hidden_act is {' and '.join(sorted(set(activations)))}; {known} is read."
            )
        if any(
            tower.get("layer_norm_eps", usual.epsilon) != usual.epsilon for tower in (text, vision)
        ):
            raise WeightsError(
                f"{where}: layer_norm_eps is not {usual.epsilon:g}, as it is in every {kind} that was published."
            )
        # 2 stands in old configurations and means the highest id; transformers reads it so as well.
        if kind == "clip" and text.get("eos_token_id", 2) not in (2, vocabulary - 1):
            raise WeightsError(
                f"{where}: the end token is {text['eos_token_id']}; it must have the highest id, {vocabulary - 1}."
            )
        patch, image_width = vision.get("patch_size", usual.patch), vision.get("hidden_size", 768)
        image_size = vision.get("image_size", 224)
        embedding = config.get("projection_dim", 512)
        if kind == "siglip2":
            image_size = math.isqrt(vision.get("num_patches", 256)) * patch
        if kind != "clip":
            embedding = text.get("projection_size") or text_width
            if embedding != image_width or vision.get("vision_use_head") is False:
                raise WeightsError(
                    f"{where}: images and captions do not become vectors of one length."
                )
            square = {"height": image_size, "width": image_size}
            seen = {"size": square, **usual.seen, **seen}
        preprocessing = read_preprocessing({"crop_size": image_size, **seen}, image_size, where)
        if preprocessing["image_size"] != image_size:
            raise WeightsError(
                f"{where}: images are cut to {preprocessing['image_size']} pixels, and the image tower sees {image_size}."
            )
        image, words = (ACTIVATIONS[activation] for activation in activations)
        return named(
            checked_shape(
                dict(
                    name="published",
                    architecture=usual.architecture,
                    patch=patch,
                    image_width=image_width,
                    image_layers=vision.get("num_hidden_layers", 12),
                    image_heads=vision.get("num_attention_heads", 12),
                    image_mlp=vision.get("intermediate_size", 3072),
                    text_width=text_width,
                    text_layers=text.get("num_hidden_layers", 12),
                    text_heads=text.get("num_attention_heads", usual.text_heads),
                    text_mlp=text.get("intermediate_size", usual.text_mlp),
                    embedding=embedding,
                    vocabulary=vocabulary,
                    context=text.get("max_position_embeddings", usual.context),
                    activation=image,
                    text_activation="" if words == image else words,
                    **preprocessing,
                ),
                where,
            )
        )
    except KeyError as error:
        raise WeightsError(f"{where}: the field {error.args[0]} is missing.") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise WeightsError(
            f"{where} does not describe a model: {type(error).__name__} {error}."
        ) from None


def config_of(shape: ModelConfig, start: int, logit_bias: float | None = None) -> dict[str, Any]:
    """The `config.json` of a model of ours, whose captions begin with that token."""
    siglip = shape.architecture == "siglip"
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    common = {"layer_norm_eps": 1e-6 if siglip else 1e-5}
    kind = {"architectures": ["CLIPModel"], "model_type": "clip"}
    words: dict[str, Any] = {
        "bos_token_id": start,
        "eos_token_id": shape.vocabulary - 1,
        "pad_token_id": shape.vocabulary - 1,
    }
    if (
        siglip
    ):  # which token a caption begins, ends and is filled with is the tokenizer's business alone
        kind = {"architectures": ["SiglipModel"], "model_type": "siglip"}
        words = {"projection_size": shape.embedding}
    else:
        common["projection_dim"] = shape.embedding
        kind |= {"projection_dim": shape.embedding, "logit_scale_init_value": 2.6592}
        kind |= {} if logit_bias is None else {"logit_bias": logit_bias}
    model_type = kind["model_type"]
    return {
        **kind,
        "dtype": "float32",
        "text_config": {
            "model_type": f"{model_type}_text_model",
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.text_width,
            "intermediate_size": shape.text_hidden,
            "num_hidden_layers": shape.text_layers,
            "num_attention_heads": shape.text_heads,
            "max_position_embeddings": shape.context,
            "hidden_act": names[shape.text_activation or shape.activation],
            **words,
            **common,
        },
        "vision_config": {
            "model_type": f"{model_type}_vision_model",
            "image_size": shape.image_size,
            "patch_size": shape.patch,
            "hidden_size": shape.image_width,
            "intermediate_size": shape.image_hidden,
            "num_hidden_layers": shape.image_layers,
            "num_attention_heads": shape.image_heads,
            "hidden_act": names[shape.activation],
            **common,
        },
    }


def preprocessor_of(shape: ModelConfig, resized: int) -> dict[str, Any]:
    """The `preprocessor_config.json` of a model of ours, whose images are resized to that before they are cut."""
    side = {"height": shape.image_size, "width": shape.image_size}
    squashed = {"height": resized, "width": resized}
    return {
        "image_processor_type": "SiglipImageProcessor"
        if shape.architecture == "siglip"
        else "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": squashed if shape.resize == "squash" else {"shortest_edge": resized},
        "resample": BICUBIC if shape.interpolation == "bicubic" else BILINEAR,
        "do_center_crop": True,
        "crop_size": side,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [float(number) for number in shape.pixel_mean.split()],
        "image_std": [float(number) for number in shape.pixel_std.split()],
    }


def read_folder(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, from one file or from shards."""
    for name in WEIGHTS:
        if (folder / name).exists():
            return read_tensors(folder / name)[0]
        if (index := folder / f"{name}{INDEX}").exists():
            try:
                shards = read_json(index)["weight_map"].values()
                files = sorted({Path(shard).name for shard in shards})
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise WeightsError(
                    f"{index} cannot be read: {error}.", hint="download or copy it again"
                ) from None
            tensors: dict[str, Tensor] = {}
            for file in files:
                tensors |= read_tensors(folder / file)[0]
            return tensors
    raise WeightsError(
        f"{folder} has a {CONFIG} and no weights.",
        hint=f"{' or '.join(WEIGHTS)} from where it came",
    )


def read_preprocessing(seen: dict[str, Any], usual_side: int, where: str) -> dict[str, Any]:
    """Return how images are seen, as our settings."""
    seen = {name: value for name, value in seen.items() if value is not None}
    check_fields(seen, PREPROCESSING_FIELDS, where)
    size = seen.get("size", usual_side)
    resize = "shortest"
    if not isinstance(size, dict):
        resized = size
    elif "shortest_edge" in size:
        resized = size["shortest_edge"]
    else:
        resize, resized = "squash", _square(size, where)
    side = resized
    if "crop_size" in seen and seen.get("do_center_crop", True):
        side = seen["crop_size"]
    if isinstance(side, dict):
        side = _square(side, where)
    found = {
        "image_size": side,
        "resize": resize,
        "crop_share": side / resized,
        "interpolation": "bicubic",
        "pixel_mean": CLIP_MEAN,
        "pixel_std": CLIP_STD,
    }
    if seen.get("resample", BICUBIC) == BILINEAR:
        found["interpolation"] = "bilinear"
    for name, field in (("pixel_mean", "image_mean"), ("pixel_std", "image_std")):
        if field in seen:
            found[name] = " ".join(map(repr, seen[field]))
    return found


def _square(size: dict[str, int], where: str) -> int:
    """Return the side of a square size."""
    width = size.get("width", size.get("shortest_edge"))
    height = size.get("height", width)
    if width is None or width != height:
        raise WeightsError(f"{where}: images of {width} x {height} pixels are not square.")
    return width
