"""From the features of a foreign tower to an embedding. Shapes: B batch, F features, H hidden, E embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapclip.model.block import LayerNorm
from lapclip.model.kernels import Compute, linear


@dataclass(frozen=True)
class Dropping:
    """A share of each row's values is left out at random. It is drawn before, for a whole batch, so that the same is
    left out when a step is computed twice, in parts or from cached features."""

    share: float
    mask: Tensor


class Head(nn.Module):
    """Normed features through a linear map and, beside it, a hidden layer that starts without a say."""

    compute = Compute()
    dropping: Mapping[str, Dropping] = MappingProxyType({})
    """Of its features and its hidden layer; set while training."""

    def __init__(self, features: int, hidden: int, embedding: int) -> None:
        super().__init__()
        self.ln_features = LayerNorm(features)
        self.projection = nn.Parameter(torch.empty(features, embedding))
        self.hidden_in = nn.Parameter(torch.empty(features, hidden))
        self.hidden_out = nn.Parameter(torch.empty(hidden, embedding))

    def forward(self, features_BF: Tensor) -> Tensor:
        normed_BF = self._thinned(self.ln_features(features_BF), "features")
        hidden_BH = self._thinned(F.gelu(self._linear(normed_BF, self.hidden_in)), "hidden")
        return self._linear(normed_BF, self.projection) + self._linear(hidden_BH, self.hidden_out)

    def initialise(self, generator: torch.Generator) -> None:
        """First values: the linear map alone speaks."""
        for weight in (self.projection, self.hidden_in):
            nn.init.normal_(weight, 0.0, weight.shape[0] ** -0.5, generator=generator)
        nn.init.zeros_(self.hidden_out)

    def _thinned(self, x: Tensor, what: str) -> Tensor:
        """Some of the values left out, the others enlarged to make up for it."""
        dropping = self.dropping.get(what)
        return x if dropping is None else x * dropping.mask.to(x.dtype) / (1 - dropping.share)

    def _linear(self, x: Tensor, weight_IO: Tensor) -> Tensor:
        return linear(x, weight_IO.T, None, self.compute.linear)
