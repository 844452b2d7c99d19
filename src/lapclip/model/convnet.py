"""An image tower of convolutions, for a few thousand images: it knows from the start that neighbours belong together.

A residual network (He et al. 2015) whose weights are standardised (Qiao et al. 2019, arXiv 1903.10520) and whose norms
look at one image alone (Wu and He 2018): unlike batch norm, what an image becomes does not depend on the others in
its batch, so micro-batches and resumed runs give the same result. Each block starts as the identity (its last norm
starts at zero). On Flickr8k all three matter; `dev/LOG.md` has the numbers.

Shapes: B batch, C channels, S image side, O outputs, I inputs, K kernel side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lapclip.config import STAGES, ModelConfig
from lapclip.model.kernels import Compute, linear
from lapclip.model.sizes import block_widths, last_width

GROUP = 16
"""Channels that a norm takes together, or more where that does not divide them."""


class Convolution(nn.Module):
    """A convolution with standardised weights, and the norm of its result."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, kernel, kernel))
        self.norm = nn.GroupNorm(groups_of(outputs), outputs)
        self.stride = stride

    def forward(self, x_BCSS: Tensor) -> Tensor:
        weight_OIKK = standardised(self.weight).to(x_BCSS.dtype)
        y = F.conv2d(x_BCSS, weight_OIKK, stride=self.stride, padding=self.weight.shape[-1] // 2)
        norm = self.norm
        return F.group_norm(
            y, norm.num_groups, norm.weight.to(y.dtype), norm.bias.to(y.dtype), norm.eps
        )


class Residual(nn.Module):
    """Two convolutions added to their input, which a third one brings to their width where it differs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = Convolution(inputs, outputs)
        self.second = Convolution(outputs, outputs)
        self.across = Convolution(inputs, outputs, kernel=1) if inputs != outputs else None

    def forward(self, x_BCSS: Tensor) -> Tensor:
        y_BCSS = self.second(F.relu(self.first(x_BCSS)))
        return F.relu(y_BCSS + (x_BCSS if self.across is None else self.across(x_BCSS)))


class ConvolutionTower(nn.Module):
    """Images to the mean of their last features, projected. Takes images of any size."""

    compute = Compute()

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        width = shape.image_width
        self.stem = nn.ModuleList(
            [Convolution(3, width // 2, stride=2), Convolution(width // 2, width)]
        )
        self.blocks = nn.ModuleList(
            Residual(inputs, outputs) for inputs, outputs in block_widths(shape)
        )
        self.blocks_per_stage = shape.image_layers // STAGES
        self.projection = nn.Parameter(torch.empty(last_width(shape), shape.embedding))

    def forward(self, pixels_BCSS: Tensor) -> Tensor:
        """Return embeddings before normalization."""
        return self.finish(self.begin(pixels_BCSS, 0), 0)

    @property
    def depth(self) -> int:
        return len(self.blocks)

    def begin(self, pixels_BCSS: Tensor, block: int) -> Tensor:
        """Return what enters a block, counted from 0, or the mean after the last one."""
        x_BCSS = pixels_BCSS.to(self._dtype, memory_format=torch.channels_last)
        for convolution in self.stem:
            x_BCSS = F.relu(convolution(x_BCSS))
        return self._run(x_BCSS, 0, block)

    def finish(self, features: Tensor, block: int) -> Tensor:
        """Embeddings before normalisation, from what enters a block."""
        x_BD = self._run(features.to(self._dtype), block, self.depth)
        return linear(x_BD, self.projection.T, None, self.compute.linear)

    def _run(self, x: Tensor, first: int, stop: int) -> Tensor:
        """Some of the blocks; after the last of all the mean."""
        for number in range(first, stop):
            if (
                number % self.blocks_per_stage == 0
            ):  # each stage looks at half the side of the one before
                x = F.avg_pool2d(x, 2, ceil_mode=True)
            block = self.blocks[number]
            if self.compute.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportAssignmentType]
            else:
                x = block(x)
        return x.mean(dim=(2, 3)) if first < stop == self.depth else x

    @property
    def _dtype(self) -> torch.dtype:
        return self.compute.dtype or self.projection.dtype

    def initialise_ends(self, generator: torch.Generator) -> None:
        """Initial values of the projection."""
        nn.init.normal_(self.projection, 0.0, self.projection.shape[0] ** -0.5, generator=generator)

    def initialise_blocks(self, generator: torch.Generator) -> None:
        """Initial values of the convolutions: of their weights only the direction matters."""
        for module in self.modules():
            if isinstance(module, Convolution):
                nn.init.normal_(
                    module.weight, 0.0, module.weight[0].numel() ** -0.5, generator=generator
                )
            if isinstance(module, Residual):
                nn.init.zeros_(module.second.norm.weight)


def standardised(weight_OIKK: Tensor) -> Tensor:
    """Each output's weights with mean zero and length one, in float32."""
    weight_OIKK = weight_OIKK.float()
    centred = weight_OIKK - weight_OIKK.mean(dim=(1, 2, 3), keepdim=True)
    return centred * torch.rsqrt(centred.square().sum(dim=(1, 2, 3), keepdim=True) + 1e-4)


def groups_of(channels: int) -> int:
    """Into how many groups a norm takes channels."""
    return max(count for count in range(1, max(1, channels // GROUP) + 1) if channels % count == 0)
