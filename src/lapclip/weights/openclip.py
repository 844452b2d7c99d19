"""OpenCLIP's folders: `open_clip_config.json` with the shape and the preprocessing, and weights with OpenAI's names.

The fields and their defaults are those of CLIPVisionCfg, CLIPTextCfg and PreprocessCfg in
https://github.com/mlfoundations/open_clip, src/open_clip/model.py and transform.py, release 3.3.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lapclip.config import CLIP_MEAN, CLIP_STD, ModelConfig
from lapclip.errors import ConfigError, WeightsError
from lapclip.weights import OPENCLIP_CONFIG as CONFIG
from lapclip.weights.published import named

WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors", "open_clip_pytorch_model.bin")
"""Names of the file of weights, the best first."""

_BLOCKS = {
    "ls_init_value": (None,),
    "final_ln_after_pool": (False,),
    "act_kwargs": (None, {}),
    "norm_kwargs": (None, {}, {"eps": 1e-5}),
    "block_type": (None, "default"),
    "qk_norm": (False,),
    "scaled_cosine_attn": (False,),
    "scale_heads": (False,),
    "scale_attn_inner": (False,),
    "scale_attn": (False,),
    "scale_fc": (False,),
}
VISION = {
    **_BLOCKS,
    "timm_model_name": (None, ""),
    "attentional_pool": (False,),
    "no_ln_pre": (False,),
    "pos_embed_type": ("learnable",),
    "pool_type": ("tok",),
}
TEXT = {
    **_BLOCKS,
    "hf_model_name": (None, ""),
    "embed_cls": (False,),
    "no_causal_mask": (False,),
    "pool_type": ("argmax",),
    "proj_bias": (False,),
    "proj_type": ("linear",),
}
MODEL = {"multimodal_cfg": (None,), "nonscalar_logit_scale": (False,)}
"""What our towers can be, by field; any other value is another architecture. Fields that are not here do not matter."""

WHY = {
    "timm_model_name": "a tower from timm",
    "hf_model_name": "a text tower from Hugging Face",
    "attentional_pool": "pooling by attention",
    "multimodal_cfg": "a CoCa, with a tower that writes captions",
    "no_causal_mask": "a text tower that looks both ways, as SigLIP's does",
}


def shape_of(config: dict[str, Any], where: str) -> ModelConfig:
    """The shape that a configuration describes. What our towers cannot be is refused by its name."""
    try:
        model, seen = config["model_cfg"], config.get("preprocess_cfg") or {}
        vision, text = model["vision_cfg"], model["text_cfg"]
        for fields, allowed, section in (
            (model, MODEL, ""),
            (vision, VISION, "vision_cfg."),
            (text, TEXT, "text_cfg."),
        ):
            _refuse_others(fields, allowed, section, where)
        if not isinstance(vision.get("layers", 12), int):
            raise WeightsError(f"{where}: its image tower is a residual network; vision transformers can be read.")
        image_width, text_width = vision.get("width", 768), text.get("width", 512)
        return named(
            ModelConfig(
                name="published",
                image_size=_square(vision.get("image_size", 224), where),
                patch=_square(vision.get("patch_size", 16), where),
                image_width=image_width,
                image_layers=vision.get("layers", 12),
                image_heads=image_width // vision.get("head_width", 64),
                image_mlp=int(image_width * vision.get("mlp_ratio", 4.0)),
                text_width=text_width,
                text_layers=text.get("layers", 12),
                text_heads=text.get("heads", 8),
                text_mlp=int(text_width * text.get("mlp_ratio", 4.0)),
                embedding=model["embed_dim"],
                vocabulary=text.get("vocab_size", 49_408),
                context=text.get("context_length", 77),
                activation="quick_gelu" if model.get("quick_gelu", False) else "gelu",
                pixel_mean=_numbers(seen.get("mean"), CLIP_MEAN),
                pixel_std=_numbers(seen.get("std"), CLIP_STD),
                interpolation=_one_of(seen, "interpolation", ("bicubic", "bilinear"), where),
                resize=_one_of(seen, "resize_mode", ("shortest", "squash"), where),
            )
        )
    except ConfigError as error:
        raise WeightsError(f"{where}: {error.message}") from None
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise WeightsError(f"{where} does not describe a model: {type(error).__name__} {error}.") from None


def config_of(shape: ModelConfig, *, tokenizer_here: bool, logit_bias: float | None = None) -> dict[str, Any]:
    """The configuration of a model of ours. With `tokenizer_here` the folder's own tokenizer is to be used; a learnt
    bias has to be named, or OpenCLIP makes no place for it."""
    text = {
        "context_length": shape.context,
        "vocab_size": shape.vocabulary,
        "width": shape.text_width,
        "heads": shape.text_heads,
        "layers": shape.text_layers,
        "mlp_ratio": _ratio(shape.text_hidden, shape.text_width),
    }
    if tokenizer_here:
        text["hf_tokenizer_name"] = "here"  # of a folder OpenCLIP takes the tokenizer inside it, whatever the name
    return {
        "model_cfg": {
            "embed_dim": shape.embedding,
            "quick_gelu": shape.activation == "quick_gelu",
            "vision_cfg": {
                "image_size": shape.image_size,
                "layers": shape.image_layers,
                "width": shape.image_width,
                "head_width": shape.image_width // shape.image_heads,
                "patch_size": shape.patch,
                "mlp_ratio": _ratio(shape.image_hidden, shape.image_width),
            },
            "text_cfg": text,
            **({} if logit_bias is None else {"init_logit_bias": logit_bias}),
        },
        "preprocess_cfg": {
            "mean": [float(number) for number in shape.pixel_mean.split()],
            "std": [float(number) for number in shape.pixel_std.split()],
            "interpolation": shape.interpolation,
            "resize_mode": shape.resize,
        },
    }


def _refuse_others(fields: dict[str, Any], allowed: dict[str, tuple], section: str, where: str) -> None:
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


def _one_of(seen: dict[str, Any], field: str, values: tuple[str, ...], where: str) -> str:
    value = seen.get(field, values[0])
    if value not in values:
        raise WeightsError(f"{where}: preprocess_cfg.{field} is {value!r}; lapclip knows {' and '.join(values)}.")
    return value


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
        f"{folder} has an {CONFIG} and no weights.", hint=f"{WEIGHTS[0]} or {WEIGHTS[-1]} from where it came"
    )
