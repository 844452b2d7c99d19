"""AdamW: which weights it decays, and what changes over a run: the learning rate, and the size of what a step sees.

The latter are functions of the step alone, so that a resumed run goes on as it would have. Steps count from 1.
"""

from __future__ import annotations

import math

import torch

from lapclip.config import ModelConfig, TrainConfig
from lapclip.machine.device import Device
from lapclip.model.clip import CLIP
from lapclip.model.freezing import depth_of, parts_of


def learning_rate(step: int, steps: int, config: TrainConfig) -> float:
    """Rises linearly over the warm-up, then falls along a cosine to zero after the last step."""
    warmup = round(config.warmup * steps)
    if step <= warmup:
        return config.learning_rate * step / warmup
    progress = (step - 1 - warmup) / max(1, steps - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def cheap_steps(steps: int, config: TrainConfig) -> int:
    """How many steps the first part of the run has, with smaller images or fewer patches."""
    return round(config.cheap_share * steps) if config.cheap_size or config.patch_dropout else 0


def is_cheap(step: int, steps: int, config: TrainConfig) -> bool:
    """Whether a step belongs to that part."""
    return step <= cheap_steps(steps, config)


def image_side(cheap: bool, config: TrainConfig, model: ModelConfig) -> int:
    """The side of the images the model sees, in pixels."""
    return config.cheap_size if cheap and config.cheap_size else model.image_size


def patches_seen(cheap: bool, config: TrainConfig, model: ModelConfig) -> tuple[int, int]:
    """How many patches each image keeps, and how many it has."""
    patches = (image_side(cheap, config, model) // model.patch) ** 2
    return max(1, round(patches * (1 - (config.patch_dropout if cheap else 0.0)))), patches


def make_optimizer(model: CLIP, config: TrainConfig, device: Device) -> torch.optim.AdamW:
    """AdamW over what learns, which decays weight matrices and nothing else. Each group has its share of the rate."""
    graph = "graph" in config.compile
    groups: dict[tuple[float, bool], list[torch.Tensor]] = {}
    shares = rate_shares(model, config)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((shares[name], is_decayed(name, parameter)), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": config.weight_decay if decayed else 0.0, "share": share}
            for (share, decayed), parameters in sorted(groups.items(), reverse=True, key=lambda group: group[0])
        ],
        # A recorded graph reads its learning rate from memory.
        lr=torch.tensor(config.learning_rate, device=device.torch) if graph else config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=device.fused_adamw,
        capturable=graph,
    )


def rate_shares(model: CLIP, config: TrainConfig) -> dict[str, float]:
    """The share of the learning rate of each parameter: all of it for heads, less for what lies below them."""
    found = {}
    for name, part in parts_of(model).items():
        tower, dot, _ = part.partition(".")
        below = depth_of(part, getattr(model, tower).depth) if dot else 0
        found[name] = config.tower_share * config.layer_decay**below if below else 1.0
    return found


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Norms, biases, the class embedding, the logit scale and bias are vectors or scalars; positions are named."""
    return parameter.ndim >= 2 and "position_embedding" not in name
