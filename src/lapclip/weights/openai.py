"""OpenAI's names, and the shape of a model that comes as tensors alone.

Both follow https://github.com/openai/CLIP, clip/model.py: the modules' names and `build_model`.
"""

from __future__ import annotations

from pathlib import Path

from lapclip.config import ModelConfig
from lapclip.errors import ConfigError, WeightsError
from lapclip.weights.published import (
    IMAGE_HEADS,
    TEXT_HEADS,
    Layout,
    Tensors,
    block_count,
    named,
)

_BLOCK = {
    "ln_1": "ln_1",
    "attention.qkv.weight": "attn.in_proj_weight",
    "attention.qkv.bias": "attn.in_proj_bias",
    "attention.out": "attn.out_proj",
    "ln_2": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}
IMAGE = {
    "image.patch_weight": "visual.conv1.weight",
    "image.class_embedding": "visual.class_embedding",
    "image.position_embedding": "visual.positional_embedding",
    "image.ln_pre": "visual.ln_pre",
    **{
        f"image.transformer.blocks.{{n}}.{a}": f"visual.transformer.resblocks.{{n}}.{b}"
        for a, b in _BLOCK.items()
    },
    "image.ln_post": "visual.ln_post",
    "image.projection": "visual.proj",
    "logit_scale": "logit_scale",
    "logit_bias": "logit_bias",  # OpenCLIP's, of models that learnt with a sigmoid loss
}
TEXT = {
    "text.token_embedding": "token_embedding",
    "text.position_embedding": "positional_embedding",
    **{
        f"text.transformer.blocks.{{n}}.{a}": f"transformer.resblocks.{{n}}.{b}"
        for a, b in _BLOCK.items()
    },
    "text.ln_final": "ln_final",
    "text.projection": "text_projection",
}
NO_WEIGHTS = frozenset(
    {"input_resolution", "context_length", "vocab_size", "attn_mask", "text.attn_mask"}
)
"""What lies beside the weights and is known from them, or needs no learning."""
LAYOUT = Layout({**IMAGE, **TEXT}, NO_WEIGHTS)


def has_these_names(tensors: Tensors) -> bool:
    return "visual.conv1.weight" in tensors and "logit_scale" in tensors


def infer_shape(tensors: Tensors, path: Path, *, activation: str) -> ModelConfig:
    """The shape of a model that comes without a configuration, as OpenAI's `build_model` finds it."""
    where = str(path)
    _refuse_residual_networks(tensors, where)

    def size(ours: str) -> tuple[int, ...]:
        theirs = LAYOUT.their_name(ours)
        if theirs not in tensors:
            raise WeightsError(
                f"{where} lacks the tensor {theirs}: it is no CLIP, or not all of one."
            )
        return tuple(tensors[theirs].shape)

    image_width, _, patch, _ = size("image.patch_weight")
    positions, _ = size("image.position_embedding")
    vocabulary, text_width = size("text.token_embedding.weight")
    context, _ = size("text.position_embedding")
    try:
        shape = ModelConfig(
            name="published",
            image_size=round((positions - 1) ** 0.5) * patch,
            patch=patch,
            image_width=image_width,
            image_layers=block_count(tensors, r"visual\.transformer\.resblocks\.(\d+)\."),
            image_heads=IMAGE_HEADS.get(image_width, max(1, image_width // 64)),
            text_width=text_width,
            text_layers=block_count(tensors, r"transformer\.resblocks\.(\d+)\."),
            text_heads=TEXT_HEADS.get(text_width, max(1, text_width // 64)),
            embedding=size("text.projection")[1],
            vocabulary=vocabulary,
            context=context,
            activation=activation,
            image_mlp=size("image.transformer.blocks.0.mlp_in.weight")[0],
            text_mlp=size("text.transformer.blocks.0.mlp_in.weight")[0],
            logit_bias="logit_bias" in tensors,
        )
    except ConfigError as error:
        raise WeightsError(f"{where} has sizes that no CLIP has: {error.message}") from None
    return named(shape)


def _refuse_residual_networks(tensors: Tensors, where: str) -> None:
    if any(name.startswith(("visual.layer1.", "visual.attnpool.")) for name in tensors):
        raise WeightsError(
            f"{where} has a residual network (RN50 and its kin) as its image tower; vision transformers can be read.",
            hint="weights of a CLIP with a vision transformer, such as ViT-B-32",
        )
