"""AdamW with weight decay and a share of the learning rate for each group, and Muon for the matrices of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.machine.adamw import AdamW
from lapclip.machine.device import Device
from lapclip.model.clip import CLIP
from lapclip.model.freezing import depth_of, parts_of
from lapclip.training.distributed import gather_parts, is_sharded, local_part, own_part, whole

MOMENTUM = 0.95
"""Muon's memory of the gradient."""
MATRIX_DECAY = 0.1
"""Muon's decay of linear layers. Convolutions have none: only the direction of their weights matters."""
ITERATIONS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of a polynomial that brings singular values between 0 and 1 near 1 in five iterations."""


def make_optimizer(model: CLIP, config: TrainConfig, device: Device) -> torch.optim.AdamW:
    """Return AdamW over the parameters that learn; only weight matrices decay.

    Each group has its share of the rate. With Muon the matrices of blocks are groups of their own.
    """
    graph = "graph" in config.compile and device.records_graphs
    groups: dict[tuple[float, bool, bool, bool], list[Tensor]] = {}
    shares = rate_shares(model, config)
    of_matrices = config.matrix_rate / config.learning_rate if config.learning_rate else 0.0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            muon = config.optimizer == "muon" and is_matrix_of_block(name, parameter)
            share = shares[name] * (of_matrices if muon else 1.0)
            # One kernel updates a group, and takes tensors that are all whole or all in parts.
            group = (share, is_decayed(name, parameter), muon, is_sharded(parameter))
            groups.setdefault(group, []).append(parameter)
    kind = Muon if config.optimizer == "muon" else AdamW
    return kind(
        [
            {
                "params": parameters,
                # A recorded graph reads its learning rate from memory. Each group has its own: a default is shared.
                "lr": torch.tensor(config.learning_rate, device=device.torch)
                if graph
                else config.learning_rate,
                "weight_decay": (MATRIX_DECAY if muon else config.weight_decay) if decayed else 0.0,
                "share": share,
                "muon": muon,
            }
            for (share, decayed, muon, _), parameters in sorted(
                groups.items(), reverse=True, key=lambda group: group[0]
            )
        ],
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=device.fused_adamw,
        capturable=graph,
    )


def apply_gradients(
    optimizer: torch.optim.Optimizer,
    gradients: list[Tensor],
    device: Device,
    divisor: Tensor | None,
    overflowed: Tensor | None,
) -> None:
    """Update weights with their gradients divided by something; not at all where float16's overflowed."""
    if device.fused_adamw:
        # The kernel divides and looks at the mark itself, which saves a pass over the gradients and a wait.
        setattr(optimizer, "grad_scale", divisor)  # noqa: B010 (where torch's own GradScaler puts them)
        setattr(optimizer, "found_inf", None if overflowed is None else overflowed.float())  # noqa: B010
        optimizer.step()
    elif overflowed is None or not overflowed:
        if divisor is not None:
            torch._foreach_div_(gradients, divisor)  # pyright: ignore[reportPrivateImportUsage]
        optimizer.step()


def rate_shares(model: CLIP, config: TrainConfig) -> dict[str, float]:
    """The share of the learning rate of each parameter: all of it for heads, less for what lies below them."""
    found = {}
    for name, part in parts_of(model).items():
        tower, dot, _ = part.partition(".")
        below = depth_of(part, getattr(model, tower).depth) if dot else 0
        found[name] = config.tower_share * config.layer_decay**below if below else 1.0
    return found


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Norms, biases, the class embedding, the logit scale and bias are vectors or scalars; positions are named."""
    return parameter.ndim >= 2 and "position_embedding" not in name


def is_matrix_of_block(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates it: a linear layer or a convolution inside our own towers, not what comes before and after
    the blocks, where a row stands for a token, a position or a colour. Foreign networks have convolutions of one
    channel, which are no matrices."""
    inside = "blocks." in name or name.startswith("image.stem.1.")
    return inside and parameter.ndim in (2, 4) and "backbone." not in name


class Muon(AdamW):
    """AdamW, except for groups marked `muon`: their matrices take steps of equal size in every direction.

    Muon (K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): the momentum of a matrix, which a few
    directions dominate, is replaced by the nearest matrix whose singular values are all one, so that rare directions
    are learnt as fast as common ones. Weights of convolutions are standardised where they are used, so after each step
    they get back the length they start with, and the rate is the angle by which they turn.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update."""
        groups = self.param_groups
        for group in groups:
            if group["muon"]:
                self._turn(group)
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups

    def _turn(self, group: dict[str, Any]) -> None:
        """Update the matrices of a group, those of one shape together: many are small."""
        # Where AdamW's own kernel divides gradients and leaves out updates, so does this.
        divisor, overflowed = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        rate = group["lr"] if overflowed is None else group["lr"] * (1 - overflowed)
        shapes: dict[torch.Size, list[Tensor]] = {}
        for parameter in group["params"]:
            shapes.setdefault(parameter.shape, []).append(parameter)
        for shape, parameters in shapes.items():
            momentum = torch.stack([local_part(self._momentum(one)) for one in parameters])
            gradient = torch.stack(
                [local_part(one.grad) for one in parameters if one.grad is not None]
            )
            if divisor is not None:
                gradient = gradient / divisor
            if overflowed is not None:
                gradient = torch.where(overflowed.bool(), momentum, gradient)
            momentum.lerp_(gradient, 1 - MOMENTUM)
            ahead = gather_parts(gradient.lerp_(momentum, MOMENTUM), parameters)
            turned = orthogonal(ahead.flatten(2)).reshape(ahead.shape)
            for parameter, its_momentum, direction in zip(
                parameters, momentum, turned, strict=True
            ):
                local_part(self.state[parameter]["momentum"]).copy_(its_momentum)
                weight, direction = local_part(parameter), own_part(direction, parameter)
                if len(shape) == 2:
                    weight.mul_(1 - rate * group["weight_decay"])
                    weight.sub_(direction * (rate * math.sqrt(max(1.0, shape[0] / shape[1]))))
                else:
                    weight.sub_(direction * rate)
                    weight.mul_(math.sqrt(shape[0]) / whole(parameter.norm()))

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        return state["momentum"]


def orthogonal(matrices_NOI: Tensor) -> Tensor:
    """Matrices with the same directions and singular values near one, by Newton-Schulz iterations.

    Each iteration multiplies a matrix by a polynomial of its product with its own transpose. That product is small, so
    the polynomials are multiplied first and the matrix, whose long side is often nine times the short one, last.
    """
    tall = matrices_NOI.shape[1] > matrices_NOI.shape[2]
    x = matrices_NOI.mT if tall else matrices_NOI
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    square, whole = x @ x.mT, None
    first, third, fifth = QUINTIC
    for left in reversed(range(ITERATIONS)):
        factor = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
        factor.diagonal(dim1=1, dim2=2).add_(first)
        whole = factor if whole is None else factor @ whole
        if left:
            square = factor @ square @ factor
    assert whole is not None
    x = whole @ x
    return x.mT if tall else x
