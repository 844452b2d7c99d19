"""Training in half precision: rounded copies of the weights, and the scale of the loss in float16.

The optimizer updates float32 weights. Rounding all of them once a step, and collecting their
gradients once, is cheaper than rounding each weight where it is used.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from lapclip.model.clip import CLIP

FIRST_SCALE = 2.0**15
GROW_AFTER = 1000  # steps in a row without overflow, after which the scale doubles


class RoundedCopy:
    """A model that computes in half precision with rounded weights of another model.

    Only factors of matrix products are rounded. Norms, embeddings and the logit scale are the
    parameters of the original, so their gradients arrive there directly.
    """

    def __init__(self, model: CLIP, dtype: torch.dtype) -> None:
        self.model = copy.deepcopy(model)
        self._exact: list[Tensor] = []
        self._rounded: list[Tensor] = []
        for name, parameter in model.named_parameters():
            module_path, _, own_name = name.rpartition(".")
            module = self.model.get_submodule(module_path)
            is_foreign = "backbone." in name  # foreign networks round their weights themselves
            if is_foreign or not enters_products(name):
                setattr(module, own_name, parameter)
                continue
            rounded = nn.Parameter(
                parameter.detach().to(dtype), requires_grad=parameter.requires_grad
            )
            setattr(module, own_name, rounded)
            if parameter.requires_grad:  # frozen weights are rounded only here
                self._exact.append(parameter)
                self._rounded.append(rounded)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the current weights, and clear the gradients."""
        if self._exact:
            torch._foreach_copy_(self._rounded, self._exact)  # pyright: ignore[reportPrivateImportUsage]
        for parameter in self._rounded:
            parameter.grad = None

    @torch.no_grad()
    def hand_over(self) -> None:
        """Move the gradients to the original, where micro-batches add up in float32."""
        exact_parameters: list[Tensor] = []
        gradients: list[Tensor] = []
        for exact, rounded in zip(self._exact, self._rounded, strict=True):
            if rounded.grad is not None:
                exact_parameters.append(exact)
                gradients.append(rounded.grad)
                rounded.grad = None
        is_first_micro_batch = any(exact.grad is None for exact in exact_parameters)
        if is_first_micro_batch:
            sums = [torch.empty_like(exact) for exact in exact_parameters]
            torch._foreach_copy_(sums, gradients)  # pyright: ignore[reportPrivateImportUsage]
            for exact, total in zip(exact_parameters, sums, strict=True):
                exact.grad = total
            return
        # One at a time: converting all at once would take the memory that micro-batches save, and
        # not every device adds two precisions.
        for exact, gradient in zip(exact_parameters, gradients, strict=True):
            assert exact.grad is not None
            exact.grad.add_(gradient.to(exact.grad.dtype))


def enters_products(name: str) -> bool:
    """Return whether a parameter is a factor or a bias of a matrix product."""
    is_norm = "ln_" in name or ".ln." in name or ".norm." in name
    is_table = "embedding" in name or name.endswith(".probe")
    return not (is_norm or is_table or name.startswith("logit_"))


class LossScale:
    """Factor on the loss that keeps float16 gradients between underflow and overflow.

    The gradients are divided by it after the backward pass. After an overflow the update is left
    out and the scale halved. The state is a tensor, so that nothing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.state = torch.tensor([FIRST_SCALE, 0.0], device=device)
        """The scale, and the number of steps without overflow since it last changed."""

    @property
    def scale(self) -> Tensor:
        return self.state[0]

    def update(self, overflowed: Tensor) -> None:
        """Halve the scale after an overflow. Double it after many steps without one."""
        scale, good_steps = self.state
        good_steps = torch.where(overflowed, 0.0, good_steps + 1)
        is_time_to_grow = good_steps >= GROW_AFTER
        factor = torch.where(overflowed, 0.5, torch.where(is_time_to_grow, 2.0, 1.0))
        good_steps = torch.where(is_time_to_grow, 0.0, good_steps)
        self.state.copy_(torch.stack([scale * factor, good_steps]))
