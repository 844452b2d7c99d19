"""Hugging Face's folders of a `CLIPModel`: `config.json`, `preprocessor_config.json`, weights in one file or in shards.

Names, fields and their defaults are those of https://github.com/huggingface/transformers,
src/transformers/models/clip, release 5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapclip.config import CLIP_MEAN, CLIP_STD, ModelConfig
from lapclip.errors import ConfigError, WeightsError
from lapclip.paths import read_json
from lapclip.weights.published import (
    Tensors,
    as_float32,
    check_depth,
    check_leftovers,
    check_shapes,
    expected_shapes,
    named,
    their_name,
)
from lapclip.weights.torch_files import read_tensors

CONFIG, INDEX = "config.json", ".index.json"
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
"""How images are seen; a `CLIPProcessor` of release 5 writes it into the second, as `image_processor`."""
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
LETTERS = ("q", "k", "v")
"""Our queries, keys and values are one tensor; theirs are three, named with these letters."""

_BLOCK = {
    "ln_1": "layer_norm1",
    "attention.qkv": "self_attn.{letter}_proj",
    "attention.out": "self_attn.out_proj",
    "ln_2": "layer_norm2",
    "mlp_in": "mlp.fc1",
    "mlp_out": "mlp.fc2",
}
TABLE = {
    "image.patch_weight": "vision_model.embeddings.patch_embedding.weight",
    "image.class_embedding": "vision_model.embeddings.class_embedding",
    "image.position_embedding": "vision_model.embeddings.position_embedding.weight",
    "image.ln_pre": "vision_model.pre_layrnorm",
    **{f"image.transformer.blocks.{{n}}.{a}": f"vision_model.encoder.layers.{{n}}.{b}" for a, b in _BLOCK.items()},
    "image.ln_post": "vision_model.post_layernorm",
    "image.projection": "visual_projection.weight",
    "text.token_embedding": "text_model.embeddings.token_embedding",
    "text.position_embedding": "text_model.embeddings.position_embedding.weight",
    **{f"text.transformer.blocks.{{n}}.{a}": f"text_model.encoder.layers.{{n}}.{b}" for a, b in _BLOCK.items()},
    "text.ln_final": "text_model.final_layer_norm",
    "text.projection": "text_projection.weight",
    "logit_scale": "logit_scale",
    "logit_bias": "logit_bias",  # SiglipModel's name; a CLIPModel has none and passes over it
}
TURNED = {"image.projection", "text.projection"}
"""Theirs are the weights of linear layers, ours are multiplied from the right."""
NO_WEIGHTS = {"text_model.embeddings.position_ids", "vision_model.embeddings.position_ids"}
BICUBIC, BILINEAR = 3, 2
"""Pillow's numbers."""


def has_these_names(tensors: Tensors) -> bool:
    return "vision_model.embeddings.class_embedding" in tensors


def to_ours(tensors: Tensors, shape: ModelConfig, where: str) -> dict[str, Tensor]:
    """Their tensors under our names, in float32. The first that does not fit is named."""
    check_depth(shape, tensors, where)
    names = {ours: their_name(ours, TABLE) for ours in expected_shapes(shape)}
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for ours, theirs in names.items():
        split = [theirs.replace("{letter}", letter) for letter in LETTERS] if "{letter}" in theirs else [theirs]
        if not all(name in tensors for name in split):
            continue  # named below, in the order of the model
        used |= set(split)
        tensor = tensors[split[0]] if len(split) == 1 else _joined([tensors[name] for name in split], theirs, where)
        found[ours] = tensor.T if ours in TURNED else tensor
    shown = {ours: theirs.replace("{letter}", "(q, k, v)") for ours, theirs in names.items()}
    check_shapes(found, shape, shown, where)
    check_leftovers(set(tensors) - used - NO_WEIGHTS, where)
    return {ours: as_float32(tensor) for ours, tensor in found.items()}


def to_theirs(tensors: Tensors) -> dict[str, Tensor]:
    """Our tensors under their names."""
    found = {}
    for ours, tensor in tensors.items():
        theirs = their_name(ours, TABLE)
        if "{letter}" in theirs:
            for letter, third in zip(LETTERS, tensor.chunk(3), strict=True):
                found[theirs.replace("{letter}", letter)] = third.clone()
        else:
            found[theirs] = (tensor.T if ours in TURNED else tensor).contiguous()
    return found


def shape_of(config: dict[str, Any], seen: dict[str, Any], where: str) -> ModelConfig:
    """The shape that `config.json` and `preprocessor_config.json` describe."""
    kind = config.get("model_type")
    if kind != "clip":
        why = "SigLIP differs in architecture, not only in names" if str(kind).startswith("siglip") else "it is no CLIP"
        raise WeightsError(
            f"{where} has the model type {kind!r}, which cannot be read: {why}.",
            hint='a folder whose config.json has "model_type": "clip"',
        )
    try:
        text = config.get("text_config") or config.get("text_config_dict") or {}
        vision = config.get("vision_config") or config.get("vision_config_dict") or {}
        vocabulary = text.get("vocab_size", 49_408)
        activations = {tower.get("hidden_act", "quick_gelu") for tower in (text, vision)}
        if len(activations) != 1 or not activations <= {"gelu", "quick_gelu"}:
            raise WeightsError(
                f"{where}: hidden_act is {' and '.join(sorted(activations))}; gelu or quick_gelu is read."
            )
        if any(tower.get("layer_norm_eps", 1e-5) != 1e-5 for tower in (text, vision)):
            raise WeightsError(f"{where}: layer_norm_eps is not 1e-5, as it is in every CLIP that was published.")
        # 2 stands in old configurations and means the highest id; transformers reads it so as well.
        if text.get("eos_token_id", 2) not in (2, vocabulary - 1):
            raise WeightsError(
                f"{where}: the end token is {text['eos_token_id']}; it must have the highest id, {vocabulary - 1}."
            )
        image_size = vision.get("image_size", 224)
        return named(
            ModelConfig(
                name="published",
                image_size=image_size,
                patch=vision.get("patch_size", 32),
                image_width=vision.get("hidden_size", 768),
                image_layers=vision.get("num_hidden_layers", 12),
                image_heads=vision.get("num_attention_heads", 12),
                image_mlp=vision.get("intermediate_size", 3072),
                text_width=text.get("hidden_size", 512),
                text_layers=text.get("num_hidden_layers", 12),
                text_heads=text.get("num_attention_heads", 8),
                text_mlp=text.get("intermediate_size", 2048),
                embedding=config.get("projection_dim", 512),
                vocabulary=vocabulary,
                context=text.get("max_position_embeddings", 77),
                activation=activations.pop(),
                **_preprocessing(seen, image_size, where),
            )
        )
    except ConfigError as error:
        raise WeightsError(f"{where}: {error.message}") from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise WeightsError(f"{where} does not describe a model: {type(error).__name__} {error}.") from None


def config_of(shape: ModelConfig, start: int, logit_bias: float | None = None) -> dict[str, Any]:
    """The `config.json` of a model of ours, whose captions begin with that token."""
    common = {"hidden_act": shape.activation, "layer_norm_eps": 1e-5, "projection_dim": shape.embedding}
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "dtype": "float32",
        "projection_dim": shape.embedding,
        "logit_scale_init_value": 2.6592,
        **({} if logit_bias is None else {"logit_bias": logit_bias}),
        "text_config": {
            "model_type": "clip_text_model",
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.text_width,
            "intermediate_size": shape.text_hidden,
            "num_hidden_layers": shape.text_layers,
            "num_attention_heads": shape.text_heads,
            "max_position_embeddings": shape.context,
            "bos_token_id": start,
            "eos_token_id": shape.vocabulary - 1,
            "pad_token_id": shape.vocabulary - 1,
            **common,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "image_size": shape.image_size,
            "patch_size": shape.patch,
            "hidden_size": shape.image_width,
            "intermediate_size": shape.image_hidden,
            "num_hidden_layers": shape.image_layers,
            "num_attention_heads": shape.image_heads,
            **common,
        },
    }


def preprocessor_of(shape: ModelConfig, resized: int) -> dict[str, Any]:
    """The `preprocessor_config.json` of a model of ours, whose images are resized to that before they are cut."""
    side = {"height": shape.image_size, "width": shape.image_size}
    squashed = {"height": resized, "width": resized}
    return {
        "image_processor_type": "CLIPImageProcessor",
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
                files = sorted(set(read_json(index)["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise WeightsError(f"{index} cannot be read: {error}.", hint="download or copy it again") from None
            shards = [read_tensors(folder / Path(file).name)[0] for file in files]
            return {name: tensor for shard in shards for name, tensor in shard.items()}
    raise WeightsError(f"{folder} has a {CONFIG} and no weights.", hint=f"{' or '.join(WEIGHTS)} from where it came")


def _joined(tensors: list[Tensor], name: str, where: str) -> Tensor:
    try:
        return torch.cat(tensors)
    except RuntimeError:
        sizes = ", ".join(" x ".join(str(length) for length in tensor.shape) for tensor in tensors)
        raise WeightsError(f"{where}: {name.replace('{letter}', '(q, k, v)')} differ in size: {sizes}.") from None


def _preprocessing(seen: dict[str, Any], side: int, where: str) -> dict[str, Any]:
    """How images are seen, as our settings."""
    size, crop = seen.get("size", side), seen.get("crop_size", side)
    if isinstance(size, dict) and "shortest_edge" not in size:
        if size["height"] != size["width"]:
            raise WeightsError(f"{where}: images of {size['width']} x {size['height']} pixels are not square.")
        resized, resize = size["height"], "squash"
    else:
        resized, resize = size["shortest_edge"] if isinstance(size, dict) else size, "shortest"
    cut = crop["height"] if isinstance(crop, dict) else crop
    if not seen.get("do_center_crop", True):
        cut = resized
    if cut != side:
        raise WeightsError(f"{where}: images are cut to {cut} pixels, and the image tower sees {side}.")
    resample = seen.get("resample", BICUBIC)
    if resample not in (BICUBIC, BILINEAR):
        raise WeightsError(f"{where}: resample is {resample}; lapclip knows 3 (bicubic) and 2 (bilinear).")
    return {
        "resize": resize,
        "crop_share": side / resized,
        "interpolation": "bicubic" if resample == BICUBIC else "bilinear",
        "pixel_mean": " ".join(map(repr, seen["image_mean"])) if "image_mean" in seen else CLIP_MEAN,
        "pixel_std": " ".join(map(repr, seen["image_std"])) if "image_std" in seen else CLIP_STD,
    }
