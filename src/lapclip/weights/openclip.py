"""OpenCLIP's folders: `open_clip_config.json` with the shape and the preprocessing; weights with OpenAI's names, in the
image tower of a SigLIP with timm's.

The fields and their defaults are those of CLIPVisionCfg, CLIPTextCfg and PreprocessCfg in
https://github.com/mlfoundations/open_clip, src/open_clip/model.py and transform.py, release 3.3.0. The
sizes of SigLIP's image towers: https://github.com/huggingface/pytorch-image-models, timm/models/vision_transformer.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lapclip.config import CLIP_MEAN, CLIP_STD, ModelConfig
from lapclip.errors import WeightsError
from lapclip.weights import OPENCLIP_CONFIG as CONFIG
from lapclip.weights import OPENCLIP_WEIGHTS as WEIGHTS
from lapclip.weights.check_fields import (
    COLORS,
    FLAG,
    POSITIVE,
    SECTION,
    SIDES,
    SIZE,
    STRING,
    Rule,
    check_fields,
    checked_shape,
    one_of,
    or_null,
    whole,
)
from lapclip.weights.openai import NO_WEIGHTS
from lapclip.weights.openai import TEXT as OPENAI_TEXT
from lapclip.weights.published import Layout, named

_BLOCKS = {
    "final_ln_after_pool": (False,),
    "act_kwargs": (None, {}),
    "norm_kwargs": (None, {}, {"eps": 1e-5}),
}
VISION = {
    **_BLOCKS,
    "timm_model_name": (None, ""),
    "attentional_pool": (False,),
    "pos_embed_type": ("learnable",),
    "pool_type": ("tok",),
}
TEXT = {
    **_BLOCKS,
    "hf_model_name": (None, ""),
    "no_causal_mask": (False,),
    "pool_type": ("argmax",),
}
MODEL = {"multimodal_cfg": (None,)}
"""What our towers can be, by field. Other values are another architecture.

Fields that only add or remove tensors are not here: the tensors do not fit then.
"""

WHY = {
    "timm_model_name": "a tower from timm",
    "hf_model_name": "a text tower from Hugging Face",
    "attentional_pool": "pooling by attention",
    "multimodal_cfg": "a CoCa, with a tower that writes captions",
}


SIGLIP_TEXT = {
    **TEXT,
    "no_causal_mask": (True,),
    "pool_type": ("last",),
    "proj_bias": (True,),
    "norm_kwargs": ({"eps": 1e-6},),
    "act_kwargs": (None, {}, {"approximate": "tanh"}),
}
SIGLIP_VISION = {
    "timm_pool": ("map",),
    "timm_proj": ("none",),
    "timm_drop": (0.0,),
    "timm_drop_path": (None, 0.0),
}
TIMM_NAME = re.compile(r"vit_(base|large|so400m|giantopt)_patch(\d+)_siglip_(\d+)")
TIMM_TOWERS = {
    "base": ((16, 224), (16, 256), (16, 384), (16, 512), (32, 256)),
    "large": ((16, 256), (16, 384), (16, 512)),
    "so400m": ((14, 224), (14, 378), (14, 384), (16, 256), (16, 384), (16, 512)),
    "giantopt": ((16, 256), (16, 384)),
}
"""The patches and images that timm has towers for."""
TIMM_SIZES = {
    "base": (768, 12, 12, 3072),
    "large": (1024, 24, 16, 4096),
    "so400m": (1152, 27, 16, 4304),
    "giantopt": (1536, 40, 16, 6144),
}
"""Width, blocks, heads and width inside the MLPs."""
TIMM_TANH = re.compile(r"vit_(base_patch32|large_patch16_siglip_512|so400m_patch16|giantopt)")
"""The towers whose GELU is the approximate one; the older ones have the exact one."""
CLEANING = {"canonicalize": "mended-canonical", "lower": "mended-lower", "whitespace": "mended"}
"""What `tokenizer_kwargs.clean` asks for, and our name for it."""
CLEANED_BY = {"canonical": "canonicalize", "": "whitespace"}
"""What comes closest to cleaning that OpenCLIP does not know."""

_TIMM_BLOCK = {
    "ln_1": "norm1",
    "attention.qkv": "attn.qkv",
    "attention.out": "attn.proj",
    "ln_2": "norm2",
    "mlp_in": "mlp.fc1",
    "mlp_out": "mlp.fc2",
}
SIGLIP_TABLE = {
    **{ours: f"text.{theirs}" for ours, theirs in OPENAI_TEXT.items()},
    "text.projection": "text.text_projection.weight",
    "text.projection_bias": "text.text_projection.bias",
    "image.patch_weight": "visual.trunk.patch_embed.proj.weight",
    "image.patch_bias": "visual.trunk.patch_embed.proj.bias",
    "image.position_embedding": "visual.trunk.pos_embed",
    **{
        f"image.transformer.blocks.{{n}}.{a}": f"visual.trunk.blocks.{{n}}.{b}"
        for a, b in _TIMM_BLOCK.items()
    },
    "image.ln_post": "visual.trunk.norm",
    "image.head.probe": "visual.trunk.attn_pool.latent",
    "image.head.attention.qkv": "visual.trunk.attn_pool.{q|kv}",
    "image.head.attention.out": "visual.trunk.attn_pool.proj",
    "image.head.ln": "visual.trunk.attn_pool.norm",
    "image.head.mlp_in": "visual.trunk.attn_pool.mlp.fc1",
    "image.head.mlp_out": "visual.trunk.attn_pool.mlp.fc2",
    "logit_scale": "logit_scale",
    "logit_bias": "logit_bias",
}
SIGLIP_LAYOUT = Layout(
    SIGLIP_TABLE,
    NO_WEIGHTS,
    frozenset({"text.projection"}),
    {"image.position_embedding": 1, "image.head.probe": 2},
)


def timm_name(shape: ModelConfig) -> str | None:
    """What timm calls a SigLIP's image tower; None where it has no such."""
    sizes = (shape.image_width, shape.image_layers, shape.image_heads, shape.image_hidden)
    for kind, towers in TIMM_TOWERS.items():
        if TIMM_SIZES[kind] == sizes and (shape.patch, shape.image_size) in towers:
            return f"vit_{kind}_patch{shape.patch}_siglip_{shape.image_size}"
    return None


def timm_activation(name: str) -> str:
    """What is between the layers of an MLP in an image tower of timm's."""
    return "gelu_tanh" if TIMM_TANH.match(name) else "gelu"


def cleaning_of(config: dict[str, Any]) -> str:
    """Return how captions are cleaned before they become tokens, as our tokenizer calls it."""
    arguments = config["model_cfg"]["text_cfg"].get("tokenizer_kwargs") or {}
    return CLEANING[arguments.get("clean", "whitespace")]


_TOWER_FIELDS = {"width": SIZE, "mlp_ratio": POSITIVE}
_TEXT_FIELDS = {
    **_TOWER_FIELDS,
    "layers": SIZE,
    "heads": SIZE,
    "vocab_size": whole(3),
    "context_length": whole(2),
    "tokenizer_kwargs": or_null(SECTION),
    "tokenizer_kwargs.clean": one_of(*CLEANING),
}
_VISION_FIELDS = {
    **_TOWER_FIELDS,
    "image_size": SIDES,
    "patch_size": SIDES,
    "head_width": SIZE,
    "layers": Rule(SIZE.text, lambda value: SIZE.fits(value) or isinstance(value, list)),
    "timm_model_name": or_null(STRING),
}
FIELDS = {
    "model_cfg": SECTION,
    "preprocess_cfg": or_null(SECTION),
    "model_cfg.embed_dim": SIZE,
    "model_cfg.quick_gelu": FLAG,
    "model_cfg.text_cfg": SECTION,
    "model_cfg.vision_cfg": SECTION,
    **{f"model_cfg.text_cfg.{name}": rule for name, rule in _TEXT_FIELDS.items()},
    **{f"model_cfg.vision_cfg.{name}": rule for name, rule in _VISION_FIELDS.items()},
    "preprocess_cfg.mean": or_null(COLORS),
    "preprocess_cfg.std": or_null(COLORS),
    "preprocess_cfg.interpolation": one_of("bicubic", "bilinear"),
    "preprocess_cfg.resize_mode": one_of("shortest", "squash"),
}
"""The fields of open_clip_config.json that are read."""


def shape_of(config: dict[str, Any], where: str) -> ModelConfig:
    """Return the shape that a configuration describes. What our towers cannot be is refused by its name."""
    check_fields(config, FIELDS, where)
    try:
        model, seen = config["model_cfg"], config.get("preprocess_cfg") or {}
        vision, text = model["vision_cfg"], model["text_cfg"]
        _refuse_others(model, MODEL, "", where)
        timm_tower = TIMM_NAME.fullmatch(vision.get("timm_model_name") or "")
        if timm_tower:
            towers = _siglip_towers(vision, text, timm_tower, where)
        else:
            towers = _clip_towers(vision, text, where)
            towers["activation"] = "quick_gelu" if model.get("quick_gelu", False) else "gelu"
        text_width = text.get("width", 512)
        shape = {
            "name": "published",
            **towers,
            "text_width": text_width,
            "text_layers": text.get("layers", 12),
            "text_heads": text.get("heads", 8),
            "text_mlp": int(text_width * text.get("mlp_ratio", 4.0)),
            "embedding": model["embed_dim"],
            "vocabulary": text.get("vocab_size", 49_408),
            "context": text.get("context_length", 77),
            "pixel_mean": _numbers(seen.get("mean"), CLIP_MEAN),
            "pixel_std": _numbers(seen.get("std"), CLIP_STD),
            "interpolation": seen.get("interpolation", "bicubic"),
            "resize": seen.get("resize_mode", "shortest"),
        }
        return named(checked_shape(shape, where))
    except KeyError as error:
        raise WeightsError(f"{where}: the field {error.args[0]} is missing.") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise WeightsError(
            f"{where} does not describe a model: {type(error).__name__} {error}."
        ) from None


def _clip_towers(vision: dict[str, Any], text: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the sizes of a CLIP's image tower."""
    _refuse_others(vision, VISION, "vision_cfg.", where)
    _refuse_others(text, TEXT, "text_cfg.", where)
    if isinstance(vision.get("layers"), list):
        raise WeightsError(
            f"{where}: its image tower is a residual network; vision transformers can be read."
        )
    width = vision.get("width", 768)
    return {
        "image_size": _square(vision.get("image_size", 224), where),
        "patch": _square(vision.get("patch_size", 16), where),
        "image_width": width,
        "image_layers": vision.get("layers", 12),
        "image_heads": width // vision.get("head_width", 64),
        "image_mlp": int(width * vision.get("mlp_ratio", 4.0)),
    }


def _siglip_towers(
    vision: dict[str, Any], text: dict[str, Any], tower: re.Match[str], where: str
) -> dict[str, Any]:
    """Return the sizes and activations of a SigLIP, whose image tower is known by its name in timm."""
    # Without these fields it is another tower: SigLIP's are what is asked for.
    absent: dict[str, Any] = {"timm_pool": "avg", "timm_proj": "linear"}
    _refuse_others({**absent, **vision}, SIGLIP_VISION, "vision_cfg.", where)
    absent = {"no_causal_mask": False, "pool_type": "argmax", "proj_bias": False}
    _refuse_others({**absent, "norm_kwargs": None, **text}, SIGLIP_TEXT, "text_cfg.", where)
    side = int(tower[3])
    if _square(vision.get("image_size", 224), where) != side:
        raise WeightsError(
            f"{where}: images of {vision.get('image_size')} pixels do not fit {tower[0]}."
        )
    width, layers, heads, hidden = TIMM_SIZES[tower[1]]
    activation = timm_activation(tower[0])
    text_activation = "gelu_tanh" if text.get("act_kwargs") else "gelu"
    return {
        "architecture": "siglip",
        "image_size": side,
        "patch": int(tower[2]),
        "image_width": width,
        "image_layers": layers,
        "image_heads": heads,
        "image_mlp": hidden,
        "activation": activation,
        "text_activation": "" if text_activation == activation else text_activation,
    }


def config_of(
    shape: ModelConfig,
    *,
    tokenizer_here: bool,
    cleaning: str = "",
    logit_bias: float | None = None,
) -> dict[str, Any]:
    """Return the configuration of a model of ours.

    With `tokenizer_here` the folder's own tokenizer is to be used. A learned bias has to be named, or OpenCLIP makes
    no place for it. The image tower of a SigLIP is named as timm does.
    """
    text: dict[str, Any] = {
        "context_length": shape.context,
        "vocab_size": shape.vocabulary,
        "width": shape.text_width,
        "heads": shape.text_heads,
        "layers": shape.text_layers,
        "mlp_ratio": _ratio(shape.text_hidden, shape.text_width),
    }
    vision: dict[str, Any] = {"image_size": shape.image_size}
    model: dict[str, Any] = {"embed_dim": shape.embedding, "text_cfg": text, "vision_cfg": vision}
    if tokenizer_here:
        # OpenCLIP takes the tokenizer inside the folder, whatever the name.
        text["hf_tokenizer_name"] = "here"
    if logit_bias is not None:
        model["init_logit_bias"] = logit_bias
    if shape.architecture == "siglip":
        model["custom_text"] = True
        their_cleaning = {**CLEANED_BY, **{ours: theirs for theirs, ours in CLEANING.items()}}
        text |= {
            "tokenizer_kwargs": {"clean": their_cleaning[cleaning]},
            "no_causal_mask": True,
            "proj_bias": True,
            "pool_type": "last",
            "norm_kwargs": {"eps": 1e-6},
        }
        if (shape.text_activation or shape.activation) == "gelu_tanh":
            text["act_kwargs"] = {"approximate": "tanh"}
        vision |= {
            "timm_model_name": timm_name(shape),
            "timm_model_pretrained": False,
            "timm_pool": "map",
            "timm_proj": "none",
        }
    else:
        model["quick_gelu"] = shape.activation == "quick_gelu"
        vision |= {
            "layers": shape.image_layers,
            "width": shape.image_width,
            "head_width": shape.image_width // shape.image_heads,
            "patch_size": shape.patch,
            "mlp_ratio": _ratio(shape.image_hidden, shape.image_width),
        }
    return {"model_cfg": model, "preprocess_cfg": _preprocessing_of(shape)}


def _preprocessing_of(shape: ModelConfig) -> dict[str, Any]:
    return {
        "mean": [float(number) for number in shape.pixel_mean.split()],
        "std": [float(number) for number in shape.pixel_std.split()],
        "interpolation": shape.interpolation,
        "resize_mode": shape.resize,
    }


def _refuse_others(
    fields: dict[str, Any], allowed: dict[str, tuple], section: str, where: str
) -> None:
    for field, values in allowed.items():
        if field in fields and (value := fields[field]) not in values:
            why = f", {WHY[field]}" if field in WHY else ""
            raise WeightsError(
                f"{where} asks for {section}{field} = {value!r}{why}; our towers are CLIP's own and have no such.",
                hint="weights of a CLIP with a plain vision transformer, such as ViT-B-32",
            )


def _square(size: Any, where: str) -> int:
    sides = [size] if isinstance(size, int) else list(size)
    if len(set(sides)) != 1:
        raise WeightsError(f"{where}: images and patches of {sides} are not square.")
    return sides[0]


def _numbers(values: Any, usual: str) -> str:
    return usual if values is None else " ".join(f"{value!r}" for value in values)


def _ratio(hidden: int, width: int) -> float:
    """Such that int(width * ratio) is the hidden width again."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width


def weights_file(folder: Path) -> Path:
    """The file of weights in a folder."""
    for name in WEIGHTS:
        if (folder / name).exists():
            return folder / name
    raise WeightsError(
        f"{folder} has an {CONFIG} and no weights.",
        hint=f"{WEIGHTS[0]} or {WEIGHTS[-1]} from where it came",
    )
