"""Foreign networks as towers: pixels or tokens in, features pooled, and a head of our own.

They stay in evaluation mode while they learn: batch norms keep their statistics and nothing is dropped, so that what an
image becomes depends neither on its batch nor on chance.

Shapes: B batch, C channels, S side, L tokens, D width, F features, H hidden, E embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapclip.config import ModelConfig
from lapclip.model.block import LayerNorm
from lapclip.model.kernels import Compute, linear
from lapclip.model.split_network import Blocks, same

HUGGING_FACE, TIMM, PACKAGE = "huggingface", "timm", "package"


@dataclass(frozen=True, kw_only=True)
class TowerSpec:
    """What is needed to build a foreign network again without its origin: saved beside a model's weights, as JSON."""

    kind: str
    name: str
    """How the user named it."""
    config: dict[str, Any] = field(default_factory=dict)
    """Hugging Face's own config.json; empty for other kinds."""
    pooling: str = "mean"
    """mean, first, last or max of its tokens."""
    unit_length: bool = False
    """Whether its features are brought to length one."""
    padding: int = 0
    """The token that is no part of a caption."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Dropping:
    """A share of each row's values is left out at random. It is drawn before, for a whole batch, so that the same is
    left out when a step is computed twice, in parts or from cached features."""

    share: float
    mask: Tensor


class Head(nn.Module):
    """From the features of a foreign network to an embedding: a linear map and, beside it, a hidden layer."""

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
        """First values: the hidden path starts at zero."""
        for weight in (self.projection, self.hidden_in):
            nn.init.normal_(weight, 0.0, weight.shape[0] ** -0.5, generator=generator)
        nn.init.zeros_(self.hidden_out)

    def _thinned(self, x: Tensor, what: str) -> Tensor:
        """Some of the values left out, the others enlarged to make up for it."""
        dropping = self.dropping.get(what)
        return x if dropping is None else x * dropping.mask.to(x.dtype) / (1 - dropping.share)

    def _linear(self, x: Tensor, weight_IO: Tensor) -> Tensor:
        return linear(x, weight_IO.T, None, self.compute.linear)


Network = tuple[nn.Module, TowerSpec]
"""A pretrained network and what it is."""


class PretrainedTower(nn.Module, ABC):
    """What image and text have in common."""

    compute = Compute()

    def __init__(self, backbone: nn.Module, spec: TowerSpec, taps: str) -> None:
        super().__init__()
        self.backbone, self.spec = backbone.eval(), spec
        self.blocks_found = Blocks(backbone)
        self.taps = sorted({int(tap) for tap in taps.split()})
        if self.taps and self.taps[-1] > self.depth:
            raise ValueError(
                f"it has {self.depth} blocks, so nothing can be tapped after block {self.taps[-1]}"
            )
        self.head: Head
        """Put on when the features are known."""

    @property
    def depth(self) -> int:
        return len(self.blocks_found)

    def entry(self, first: int) -> int:
        """The block that cached features enter, where blocks from `first` on learn: none that is tapped is left out."""
        return first if first == self.depth else min([first, *(tap for tap in self.taps if tap)])

    def add_head(self, sample: Tensor, hidden: int, embedding: int) -> None:
        """Run the network once, to see its features and what happens when, and put a head on it."""
        features_BF = self.blocks_found.watch(lambda: self._tapped(sample))
        if features_BF.ndim != 2:
            raise ValueError(
                f"its features have shape {tuple(features_BF.shape)}, not one row for each input"
            )
        self.head = Head(features_BF.shape[1], hidden, embedding)
        used = self.blocks_found.block_of_parameters()
        for parameter in self.backbone.parameters():  # a classifier, say, that nothing depends on
            parameter.requires_grad_(id(parameter) in used)

    @torch.no_grad()
    def divides(self, block: int) -> bool:
        """Whether running it in two parts gives what running it whole gives."""
        sample, stand_in = self._samples()
        try:
            caught = self.blocks_found.begin(lambda: self._tapped(sample), block)
            halves = self.blocks_found.finish(lambda: self._tapped(stand_in), caught, block)
        except Exception:  # whatever a foreign network makes of a blank image
            return False
        return same(halves, self._tapped(sample))

    def train(self, mode: bool = True) -> PretrainedTower:
        super().train(mode)
        self.backbone.eval()
        return self

    def initialise_ends(self, generator: torch.Generator) -> None:
        """First values of the head."""
        self.head.initialise(generator)

    def initialise_blocks(self, generator: torch.Generator) -> None:
        """The network has its values."""

    def _tapped(self, inputs: Tensor) -> Tensor:
        """The network's features, and beside them what was tapped, pooled."""
        with self.blocks_found.tapping(self.taps) as caught:
            own_BF = self._features(inputs)
        return torch.cat([own_BF, *(self._pooled(caught[tap], inputs) for tap in self.taps)], dim=1)

    @abstractmethod
    def _features(self, inputs: Tensor) -> Tensor:
        """What the network gives, pooled."""

    @abstractmethod
    def _pooled(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """One row for each input, of what a block gives."""

    @abstractmethod
    def _samples(self) -> tuple[Tensor, Tensor]:
        """Some inputs, and what stands in for them where the first blocks are passed over."""

    def _goes_on(self, features: Tensor, block: int, inputs: Tensor) -> Tensor:
        """Embeddings before normalisation, from what enters a block; inputs stand in for those that it came from."""
        if block < self.depth:
            features = (
                features.float()
            )  # cached in half precision, perhaps, and the network's weights are not
            with self._precision(features.device):
                features = self.blocks_found.finish(lambda: self._tapped(inputs), features, block)
        return self.head(features.to(self.compute.dtype or features.dtype))

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.compute.dtype in (None, torch.float32):
            return nullcontext()
        return torch.autocast(device.type, self.compute.dtype)


class PretrainedImageTower(PretrainedTower):
    """Images through a foreign network."""

    def __init__(self, network: Network, shape: ModelConfig) -> None:
        super().__init__(*network, shape.image_taps)
        self.side = shape.image_size
        self.add_head(torch.zeros(1, 3, self.side, self.side), shape.head, shape.embedding)

    def forward(self, pixels_BCSS: Tensor) -> Tensor:
        """Return embeddings before normalization."""
        return self.finish(self.begin(pixels_BCSS, self.depth), self.depth)

    def begin(self, pixels_BCSS: Tensor, block: int) -> Tensor:
        """Return what enters a block, counted from 0, or the features after the last one."""
        # Channels last: what convolutions on a CPU are fastest with.
        pixels_BCSS = pixels_BCSS.contiguous(memory_format=torch.channels_last)
        with self._precision(pixels_BCSS.device):
            return self.blocks_found.begin(lambda: self._tapped(pixels_BCSS), block)

    def finish(self, features: Tensor, block: int) -> Tensor:
        """Embeddings before normalisation, from what enters a block."""
        blank = torch.zeros(1, 3, self.side, self.side, device=features.device)
        return self._goes_on(features, block, blank)

    def _features(self, inputs: Tensor) -> Tensor:
        if self.spec.kind == HUGGING_FACE:
            hidden = self.backbone(pixel_values=inputs).last_hidden_state
        elif self.spec.kind == PACKAGE:
            hidden = self.backbone.extract_features(inputs)  # pyright: ignore[reportCallIssue]
        else:  # timm's are pooled already
            hidden = self.backbone(inputs)
        return self._pooled(hidden, inputs)

    def _pooled(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        return pooled_image(hidden, self.spec.pooling)

    def _samples(self) -> tuple[Tensor, Tensor]:
        device = self.head.projection.device
        pixels = torch.randn(
            2, 3, self.side, self.side, generator=torch.Generator().manual_seed(0)
        ).to(device)
        return pixels, torch.zeros_like(pixels[:1])


class PretrainedTextTower(PretrainedTower):
    """Captions through a foreign network. Padding is known by its token."""

    def __init__(self, network: Network, shape: ModelConfig) -> None:
        super().__init__(*network, shape.text_taps)
        self.add_head(self._tokens()[:4][None], shape.head, shape.embedding)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Embeddings before normalisation."""
        return self.finish(self.begin(tokens_BL, self.depth), tokens_BL, self.depth)

    def begin(self, tokens_BL: Tensor, block: int) -> Tensor:
        """What enters a block, counted from 0; after the last, the features."""
        with self._precision(tokens_BL.device):
            return self.blocks_found.begin(lambda: self._tapped(tokens_BL), block)

    def finish(self, features: Tensor, tokens_BL: Tensor, block: int) -> Tensor:
        """Embeddings before normalisation, from what enters a block."""
        return self._goes_on(features, block, tokens_BL)

    def _features(self, inputs: Tensor) -> Tensor:
        mask_BL = inputs != self.spec.padding
        tokens_BLD = self.backbone(
            input_ids=inputs, attention_mask=mask_BL.long()
        ).last_hidden_state
        return self._pooled(tokens_BLD, inputs)

    def _pooled(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        features_BF = pooled_caption(hidden, inputs != self.spec.padding, self.spec.pooling)
        return F.normalize(features_BF, dim=-1) if self.spec.unit_length else features_BF

    def _samples(self) -> tuple[Tensor, Tensor]:
        tokens_BL = self._tokens().repeat(2, 1)
        tokens_BL[0, 5:] = self.spec.padding
        tokens_BL = tokens_BL.to(self.head.projection.device)
        return tokens_BL, tokens_BL

    def _tokens(self) -> Tensor:
        """Eight tokens that every vocabulary has and that are not padding, which may be the last of all."""
        return torch.tensor([token for token in range(9) if token != self.spec.padding][:8])


def pooled_image(features: Tensor, pooling: str) -> Tensor:
    """One row for each image: from a map the mean over the map, from tokens the first or their mean."""
    if features.ndim == 4:
        return features.mean(dim=(2, 3))
    if features.ndim == 3:
        return features[:, 0] if pooling == "first" else features.mean(dim=1)
    return features


def pooled_caption(tokens_BLD: Tensor, mask_BL: Tensor, pooling: str) -> Tensor:
    """One row for each caption, of the tokens that are not padding."""
    if pooling == "first":
        return tokens_BLD[:, 0]
    if pooling == "last":
        return tokens_BLD[
            torch.arange(tokens_BLD.shape[0], device=tokens_BLD.device), mask_BL.sum(1) - 1
        ]
    seen_BL1 = mask_BL[..., None].to(tokens_BLD.dtype)
    if pooling == "max":
        return tokens_BLD.masked_fill(~mask_BL[..., None], -torch.inf).amax(dim=1)
    return (tokens_BLD * seen_BL1).sum(dim=1) / seen_BL1.sum(dim=1)
