"""AdamW and its groups."""

from __future__ import annotations

import torch

from lapclip.config import TrainConfig
from lapclip.machine.devices import Device
from lapclip.model.clip import CLIP


def make_optimizer(model: CLIP, config: TrainConfig, device: Device) -> torch.optim.AdamW:
    """AdamW that decays weight matrices and nothing else."""
    graph = "graph" in config.compile
    decayed = [parameter for name, parameter in model.named_parameters() if is_decayed(name, parameter)]
    spared = [parameter for name, parameter in model.named_parameters() if not is_decayed(name, parameter)]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": spared, "weight_decay": 0.0}],
        # A recorded graph reads its learning rate from memory.
        lr=torch.tensor(config.learning_rate, device=device.torch) if graph else config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=device.fused_adamw,
        capturable=graph,
    )


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Norms, biases, the class embedding and the logit scale are vectors or scalars; positions are named."""
    return parameter.ndim >= 2 and "position_embedding" not in name
