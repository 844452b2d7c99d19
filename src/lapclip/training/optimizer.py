"""AdamW, and which weights it decays, each with its share of the learning rate."""

from __future__ import annotations

import torch

from lapclip.config import TrainConfig
from lapclip.machine.device import Device
from lapclip.model.clip import CLIP
from lapclip.model.freezing import depth_of, parts_of


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
