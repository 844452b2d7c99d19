"""What an update works on: the tensors of a batch, by micro-batches, by shards, and on their way to a device.

Shapes: B batch, S image side, C colour channels, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from lapclip.machine.device import Device
from lapclip.machine.transfer import OnItsWay

SQUARE = ("positives_BB", "phrase_positives_BB")
"""Tensors of an update whose columns are pairs of the batch, as their rows are."""
LOADED_BY_SHARD = ("pixels_BSSC", "image_features", "text_features", "phrase_features")
"""Tensors of an update of which a rank may have the rows of its own shards alone."""
ALIGNED = 64
"""Bytes that the memory of a tensor is a multiple of where torch chooses it. Kernels may round otherwise elsewhere."""


@dataclass(frozen=True)
class Inputs:
    """What an update works on. Images stay uint8 until they are on the device."""

    pixels_BSSC: Tensor
    tokens_BL: Tensor
    positives_BB: Tensor
    boxes_B5: Tensor | None
    """The box of each image that is seen (`data/pixels.py`); None is all of it."""
    side: int
    """The side of the images that the tower sees, in pixels."""
    lengths: tuple[int, ...] = ()
    """Tokens of the longest caption in each of so many equal parts of the batch; empty takes them all as one."""
    shards: tuple[int, ...] = ()
    """Pairs of each shard, which follow each other; empty where the batch is one."""
    shard_lengths: tuple[tuple[int, ...], ...] = ()
    """What `lengths` says, for each shard."""
    own_shards: range | None = None
    """The shards whose rows large tensors have; None where they have all."""
    image_features: Tensor | None = None
    """What the frozen part of the image tower makes of the images, which are empty then."""
    text_features: Tensor | None = None
    """What the frozen part of the text tower makes of the captions."""
    teacher_image: Tensor | None = None
    """What a teacher makes of the images; None where there is none."""
    teacher_text: Tensor | None = None
    """What it makes of the captions."""
    words_BV: Tensor | None = None
    """The tokens of all captions of each image, as shares; None where no words are predicted."""
    image_features_mask: Tensor | None = None
    """What the head of a pretrained image network does not leave out of its features; None keeps all."""
    image_hidden_mask: Tensor | None = None
    """The same for its hidden layer."""
    text_hidden_mask: Tensor | None = None
    """The same for a pretrained text network."""
    phrase_tokens_BL: Tensor | None = None
    """A phrase for each image; None where only whole captions are learnt."""
    phrase_positives_BB: Tensor | None = None
    phrase_features: Tensor | None = None
    """What the frozen part of the text tower makes of the phrases."""
    phrase_hidden_mask: Tensor | None = None
    """What the head of a pretrained text network does not leave out of its hidden layer for them."""

    def __len__(self) -> int:
        return len(self.tokens_BL)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is there."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def of_phrases(self) -> Inputs | None:
        """The phrases in the place of the captions; None where there are none."""
        if self.phrase_tokens_BL is None:
            return None
        return replace(
            self,
            tokens_BL=self.phrase_tokens_BL,
            text_features=self.phrase_features,
            text_hidden_mask=self.phrase_hidden_mask,
            lengths=(),
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same change made to every tensor."""
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors().items()})

    def on(self, device: Device) -> Inputs:
        """Return the same inputs with every tensor on a device."""
        return self.each(lambda tensor: tensor.to(device.torch))

    def in_order(self, rows_B: Tensor) -> Inputs:
        """The same pairs in another order. What was loaded for some shards alone has their order already, and images
        that features stand in for are empty."""
        stay = () if self.own_shards is None else LOADED_BY_SHARD
        moved = {
            name: tensor[rows_B]
            for name, tensor in self.tensors().items()
            if len(tensor) and name not in stay
        }
        square = {name: tensor[:, rows_B] for name, tensor in moved.items() if name in SQUARE}
        return replace(self, **(moved | square))

    def shard(self, number: int) -> Inputs:
        """The pairs of one shard."""
        first, size = sum(self.shards[:number]), self.shards[number]
        loaded = range(len(self.shards)) if self.own_shards is None else self.own_shards
        assert number in loaded, "a shard that another rank computes"
        at = first - sum(self.shards[: loaded.start])
        own = {
            name: aligned(tensor[at : at + size])
            if name in LOADED_BY_SHARD
            else tensor[first : first + size]
            for name, tensor in self.tensors().items()
        }
        alone = replace(self, shards=(), shard_lengths=(), own_shards=None)
        return replace(alone, **own, lengths=self.shard_lengths[number])


@dataclass(frozen=True)
class Sent:
    """What an update works on, on its way to the device."""

    inputs: Inputs
    on_its_way: OnItsWay


def aligned(tensor: Tensor) -> Tensor:
    """A tensor whose memory begins where torch would have it begin, wherever it was cut from."""
    return tensor if tensor.data_ptr() % ALIGNED == 0 else tensor.clone()
