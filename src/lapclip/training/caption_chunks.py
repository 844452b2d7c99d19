"""Captions in chunks of similar length: on the CPU, padding costs more than launches.

Shapes: B batch, L tokens, F features, E embedding.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.data.tokenizers import LENGTH_STEP
from lapclip.machine.device import Device
from lapclip.model.clip import CLIP
from lapclip.model.pretrained_towers import PretrainedTower
from lapclip.training.inputs import Inputs

CHUNKS = 4
MIN_CHUNK_ROWS = 16


def chunk_lengths(
    lengths_B: np.ndarray | None, longest: int, config: TrainConfig, device: Device
) -> tuple[int, ...]:
    """Return the tokens of each chunk of a batch that is sorted by length. Empty to take the batch
    as a whole.

    Elsewhere than on the CPU more launches would cost more, and a compiler wants few shapes.
    """
    is_whole = not device.is_cpu or config.micro_batch or "compiled" in config.compile
    if is_whole or lengths_B is None or len(lengths_B) < 2 * CHUNKS * MIN_CHUNK_ROWS:
        return ()
    longest_of_chunks = [int(chunk.max()) for chunk in torch.from_numpy(lengths_B).chunk(CHUNKS)]
    return tuple(
        min(longest, -(-length // LENGTH_STEP) * LENGTH_STEP) for length in longest_of_chunks
    )


def encode_captions(model: CLIP, inputs: Inputs, boundary: int) -> Tensor:
    """Return embeddings of captions, from cached features if there are some: these enter the block
    `boundary`."""
    tokens_BL, text = inputs.tokens_BL, model.text
    if inputs.text_features is not None:
        return model.finish_text(inputs.text_features, tokens_BL, boundary)
    if not inputs.lengths:
        return model.encode_text(tokens_BL)
    chunks = [
        chunk[:, :length]
        for chunk, length in zip(tokens_BL.chunk(len(inputs.lengths)), inputs.lengths, strict=True)
    ]
    if isinstance(text, PretrainedTower):
        # The head takes all rows at once, because its dropout was drawn for all.
        features_BF = torch.cat([text.begin(chunk, text.depth) for chunk in chunks])
        return model.finish_text(features_BF, tokens_BL, text.depth)
    return torch.cat([model.encode_text(chunk) for chunk in chunks])
