"""AdamW with a learning rate and weight decay for each group of parameters, and Muon."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.machine.adamw import AdamW
from lapclip.machine.device import Device
from lapclip.model.clip import CLIP
from lapclip.model.freezing import depth_of, parts_of
from lapclip.training.distributed import gather_parts, is_sharded, local_part, own_part, whole

MOMENTUM = 0.95  # of Muon
MATRIX_DECAY = 0.1  # of Muon for linear layers; convolutions keep a fixed norm instead
ITERATIONS = 5
# Coefficients of the polynomial that brings singular values from (0, 1) near 1 in five iterations.
QUINTIC = (3.4445, -4.7750, 2.0315)


class GroupSettings(NamedTuple):
    """Settings that all parameters of a group share."""

    rate_share: float
    """Factor on the learning rate."""
    is_decayed: bool
    is_muon: bool
    is_sharded: bool
    """Whether ranks have parts of them. One kernel updates a group, of whole tensors or of parts."""


def make_optimizer(model: CLIP, config: TrainConfig, device: Device) -> torch.optim.AdamW:
    """Return the optimizer of all parameters that train, AdamW or Muon."""
    has_muon = config.optimizer == "muon"
    is_recorded = "graph" in config.compile and device.records_graphs
    groups = []
    for settings, parameters in group_parameters(model, config):
        decay = MATRIX_DECAY if settings.is_muon else config.weight_decay
        rate: float | Tensor = config.learning_rate
        if is_recorded:
            # A recorded graph reads the rate from memory, and each group needs memory of its own.
            rate = torch.tensor(rate, device=device.torch)
        group = {
            "params": parameters,
            "lr": rate,
            "weight_decay": decay if settings.is_decayed else 0.0,
            "share": settings.rate_share,
            "muon": settings.is_muon,
        }
        groups.append(group)
    optimizer_class = Muon if has_muon else AdamW
    return optimizer_class(
        groups,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=device.fused_adamw,
        capturable=is_recorded,
    )


def group_parameters(model: CLIP, config: TrainConfig) -> list[tuple[GroupSettings, list[Tensor]]]:
    """Return the parameters that train, by their settings, in a fixed order."""
    matrix_share = 0.0
    if config.learning_rate:
        matrix_share = config.matrix_rate / config.learning_rate
    shares = rate_shares(model, config)
    groups: dict[GroupSettings, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_muon = config.optimizer == "muon" and is_matrix_of_block(name, parameter)
        share = shares[name]
        if is_muon:
            share *= matrix_share
        settings = GroupSettings(share, is_decayed(name, parameter), is_muon, is_sharded(parameter))
        groups.setdefault(settings, []).append(parameter)
    return sorted(groups.items(), reverse=True, key=lambda group: group[0])


def apply_gradients(
    optimizer: torch.optim.Optimizer,
    gradients: list[Tensor],
    device: Device,
    divisor: Tensor | None,
    overflowed: Tensor | None,
) -> None:
    """Update the weights with gradients that are divided first. Skip the update after an
    overflow."""
    if device.fused_adamw:
        # The fused kernel reads both itself, which saves a pass over the gradients and a wait.
        setattr(optimizer, "grad_scale", divisor)  # noqa: B010 (as torch's GradScaler does)
        setattr(optimizer, "found_inf", None if overflowed is None else overflowed.float())  # noqa: B010
        optimizer.step()
    elif overflowed is None or not overflowed:
        if divisor is not None:
            torch._foreach_div_(gradients, divisor)  # pyright: ignore[reportPrivateImportUsage]
        optimizer.step()


def rate_shares(model: CLIP, config: TrainConfig) -> dict[str, float]:
    """Return the factor on the learning rate for each parameter: 1 for heads, less for lower
    blocks."""
    shares = {}
    for name, part in parts_of(model).items():
        shares[name] = 1.0
        tower, dot, _ = part.partition(".")
        if dot:  # a part of a tower, for example "image.3"
            distance = depth_of(part, getattr(model, tower).depth)  # from the head
            if distance:
                shares[name] = config.tower_share * config.layer_decay**distance
    return shares


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies: to matrices, not to vectors, scalars and positions."""
    return parameter.ndim >= 2 and "position_embedding" not in name


def is_matrix_of_block(name: str, parameter: Tensor) -> bool:
    """Return whether Muon updates a parameter: a linear layer or a convolution inside our towers.

    Not what comes before and after the blocks, where a row stands for a token, a position or a
    color. Foreign networks have convolutions of one channel, which are no matrices.
    """
    is_inside = "blocks." in name or name.startswith("image.stem.1.")
    return is_inside and parameter.ndim in (2, 4) and "backbone." not in name


class Muon(AdamW):
    """Muon for groups marked `muon`, AdamW for the others.

    Muon (K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of
    a matrix, which a few directions dominate, by the nearest matrix whose singular values are all
    one, so that rare directions are learned as fast as common ones. Convolutions standardize their
    weights, so after each step these are scaled back to their initial norm, and the rate is an
    angle.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all groups."""
        groups = self.param_groups
        for group in groups:
            if group["muon"]:
                self._update_matrices(group)
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups

    def _update_matrices(self, group: dict[str, Any]) -> None:
        """Update the matrices of a group, stacked by shape because many are small."""
        # Set if AdamW's kernel divides the gradients and skips updates (`apply_gradients`).
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
    """Return matrices with the same singular vectors and singular values near one.

    Each Newton-Schulz iteration multiplies a matrix X by a polynomial of X X^T. That product is
    small, so the polynomials are multiplied first, and X, which is often nine times as wide, last.
    """
    first, third, fifth = QUINTIC
    is_tall = matrices_NOI.shape[1] > matrices_NOI.shape[2]
    wide = matrices_NOI.mT if is_tall else matrices_NOI
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    square = wide @ wide.mT
    product = None
    for iteration in range(ITERATIONS):
        factor = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
        factor.diagonal(dim1=1, dim2=2).add_(first)
        product = factor if product is None else factor @ product
        if iteration < ITERATIONS - 1:
            square = factor @ square @ factor
    assert product is not None
    result = product @ wide
    return result.mT if is_tall else result
