"""Training in half precision: rounded copies of the weights to compute with, and the scale of float16's loss.

The optimiser works on float32 weights. Rounding them once a step, all together, and bringing their gradients back the
same way is cheaper than rounding each where it is used.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lapclip.model.clip import CLIP

FIRST_SCALE = 2.0**15
GROW_AFTER = 1000
"""Good steps in a row after which the scale doubles."""


class RoundedCopy:
    """A model that computes in half precision, beside the model whose weights it rounds.

    What enters products is rounded; norms, embeddings and the temperature are the original's own parameters, and their
    gradients arrive there directly.
    """

    def __init__(self, model: CLIP, dtype: torch.dtype) -> None:
        self.model = copy.deepcopy(model)
        self._exact: list[Tensor] = []
        self._rounded: list[Tensor] = []
        for name, parameter in model.named_parameters():
            path, _, last = name.rpartition(".")
            owner = self.model.get_submodule(path)
            if (
                enters_products(name) and "backbone." not in name
            ):  # foreign networks round for themselves
                rounded = nn.Parameter(
                    parameter.detach().to(dtype), requires_grad=parameter.requires_grad
                )
                setattr(owner, last, rounded)
                if parameter.requires_grad:  # what is frozen is rounded once
                    self._exact.append(parameter)
                    self._rounded.append(rounded)
            else:
                setattr(owner, last, parameter)
        self._leaves = dict(zip(self._exact, self._rounded, strict=True))

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the weights as they are now, and forget the last gradients."""
        if self._exact:
            torch._foreach_copy_(self._rounded, self._exact)  # pyright: ignore[reportPrivateImportUsage]
        for parameter in self._rounded:
            parameter.grad = None

    def hand_over(self) -> None:
        """Add the gradients to the original's, in float32, so that those of many micro-batches do not lose digits."""
        self._hand_over(list(zip(self._exact, self._rounded, strict=True)))

    @torch.no_grad()
    def _hand_over(self, both: Sequence[tuple[Tensor, Tensor]]) -> None:
        pairs = [(exact, rounded.grad) for exact, rounded in both if rounded.grad is not None]
        first = any(exact.grad is None for exact, _ in pairs)  # of the micro-batches of this step
        sums: list[Tensor] = []
        for exact, _ in pairs:
            exact.grad = torch.empty_like(exact) if first else exact.grad
            assert exact.grad is not None
            sums.append(exact.grad)
        if first:
            torch._foreach_copy_(sums, [gradient for _, gradient in pairs])  # pyright: ignore[reportPrivateImportUsage]
        else:  # not every device adds two precisions; one at a time, because micro-batches are there to save memory
            for total, (_, gradient) in zip(sums, pairs, strict=True):
                total.add_(gradient.to(total.dtype))
        for _, rounded in both:
            rounded.grad = None

    def leaf_of(self, parameter: Tensor) -> Tensor:
        """Where the gradient of one of the original's parameters arrives."""
        return self._leaves.get(parameter, parameter)

    def hand_over_some(self, parameters: Sequence[Tensor]) -> None:
        """`hand_over` for some of the original's parameters, as soon as their gradients are there."""
        self._hand_over([(one, self._leaves[one]) for one in parameters if one in self._leaves])


def enters_products(name: str) -> bool:
    """Whether a parameter is a factor or a bias of a matrix product."""
    norm = "ln_" in name or ".ln." in name or ".norm." in name
    return not (norm or "embedding" in name or name.endswith(".probe") or name.startswith("logit_"))


class LossScale:
    """Keeps float16's gradients between its smallest and its largest numbers.

    The loss is multiplied before the backward pass and the gradients divided after it. Where they overflowed, the
    update is left out and the scale halved. All of it in tensors, so that nothing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.state = torch.tensor([FIRST_SCALE, 0.0], device=device)
        """The scale, and how many good steps there were since it changed."""

    @property
    def scale(self) -> Tensor:
        return self.state[0]

    def update(self, overflowed: Tensor) -> None:
        """Halve the scale after an overflow; double it after many steps without one."""
        scale, good = self.state
        good = torch.where(overflowed, 0.0, good + 1)
        grown = good >= GROW_AFTER
        self.state.copy_(
            torch.stack(
                [
                    scale * torch.where(overflowed, 0.5, torch.where(grown, 2.0, 1.0)),
                    torch.where(grown, 0.0, good),
                ]
            )
        )
