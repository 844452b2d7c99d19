"""Models between two: every weight interpolated (WiSE-FT, Wortsman et al. 2022, arXiv 2109.01903)."""

from __future__ import annotations

import torch

from lapclip.embedder import Embedder
from lapclip.errors import RunError

# They change what the same weights compute, and no shape of a tensor.
SAME_SETTINGS = ("activation", "text_activation", "image_heads", "text_heads")
SHARES = tuple(tenth / 10 for tenth in range(11))


class Blend:
    """An embedder whose weights can be set to any share of the way from one model to another."""

    def __init__(self, before: Embedder, after: Embedder) -> None:
        """Check that both models have the same form. `after` becomes the embedder whose weights change."""
        check_same_form(before, after)
        self.embedder = after
        self._before = before.model.state_dict()
        self._after = {name: value.clone() for name, value in after.model.state_dict().items()}

    @torch.no_grad()
    def mix(self, share: float) -> None:
        """Set each weight, also the temperature, to (1 - share) before + share after.

        Shares 0 and 1 give the weights of the two models to the last bit. Integers, such as counts of batches, are
        not interpolated.
        """
        for name, value in self.embedder.model.state_dict().items():
            before, after = self._before[name], self._after[name]
            if before.is_floating_point():
                value.copy_(torch.lerp(before, after, share))
            else:
                value.copy_(after if share else before)


def check_same_form(before: Embedder, after: Embedder) -> None:
    """Raise RunError if two models cannot be interpolated."""
    problem = "The models cannot be blended"
    states = before.model.state_dict(), after.model.state_dict()
    for name in sorted(states[0].keys() | states[1].keys()):
        forms = []
        for state in states:
            is_there = name in state
            forms.append(f"has shape {tuple(state[name].shape)}" if is_there else "is missing")
        if forms[0] != forms[1]:
            raise RunError(f"{problem}: {name} {forms[0]} before and {forms[1]} after.")
    shapes = before.model.shape, after.model.shape
    for name in SAME_SETTINGS:
        values = [getattr(shape, name) for shape in shapes]
        if values[0] != values[1]:
            raise RunError(f"{problem}: model.{name} is {values[0]} before and {values[1]} after.")
    if before.tokenizer.to_dict() != after.tokenizer.to_dict():
        raise RunError(f"{problem}: their tokenizers differ.")
