"""To which part of a model a parameter belongs: image.embedding, image.0 to image.head, the same for text, and, outside
both towers, temperature and bias. Gradients are shown by part, learning rates fall from the head down, and parts are
frozen."""

from __future__ import annotations

from collections.abc import Iterable

from lapclip.model.clip import CLIP
from lapclip.model.lora import DOWN, UP
from lapclip.model.pretrained.pretrained_towers import PretrainedTower

EMBEDDING, HEAD = "embedding", "head"
OF_LOGITS = {"logit_scale": "temperature", "logit_bias": "bias"}
OF_HEAD = ("ln_post", "ln_final", "projection", "head.")


def parts_of(model: CLIP) -> dict[str, str]:
    """The part of each parameter, by its name."""
    # An addition of low rank belongs where its layer does.
    found = {name: part_of(name.removesuffix(DOWN).removesuffix(UP)) for name, _ in model.named_parameters()}
    for tower in ("image", "text"):
        module = getattr(model, tower)
        if not isinstance(module, PretrainedTower):
            continue
        blocks = (
            module.blocks_found.block_of_parameters()
        )  # foreign names say little: what was seen while it ran says more
        named = dict(model.named_parameters())
        for name in found:
            if name.startswith(f"{tower}.backbone."):
                base = name if not name.endswith((DOWN, UP)) else f"{name.rpartition('.')[0]}.base.weight"
                block = blocks.get(id(named[base]), 0)
                found[name] = f"{tower}.{EMBEDDING if block == 0 else block - 1}"
    return found


def first_block(model: CLIP, tower: str, names: Iterable[str]) -> int:
    """The block that features of a tower enter which none of the named tensors has had a say in: the first that has one
    of them, the depth where the head alone has any, 0 where the embedding has one or where its block is not known."""
    parts = parts_of(model)
    below = [
        parts.get(name, f"{tower}.{EMBEDDING}").partition(".")[2] for name in names if name.startswith(f"{tower}.")
    ]
    module = getattr(model, tower)
    first = min((0 if block == EMBEDDING else int(block) for block in below if block != HEAD), default=module.depth)
    return module.entry(first) if isinstance(module, PretrainedTower) else first


def part_of(name: str) -> str:
    """The part of a parameter of our own towers."""
    tower, _, rest = name.partition(".")
    if not rest:
        return OF_LOGITS[name]
    if "blocks." in rest:
        return f"{tower}.{rest.partition('blocks.')[2].split('.')[0]}"
    return f"{tower}.{HEAD if rest.startswith(OF_HEAD) else EMBEDDING}"


def depth_of(part: str, depth: int) -> int:
    """How far a part is below its tower's head: 0 for the head, 1 for the last block, depth + 1 for the embedding."""
    _, _, block = part.partition(".")
    if block == EMBEDDING:
        return depth + 1
    return 0 if block in (HEAD, "") else depth - int(block)
