"""The operations of a step, against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.tuning.model_size import count_operations


@pytest.mark.parametrize(
    ("name", "tolerance"), [("tiny", 0.15), ("mini", 0.1), ("seed", 0.02), ("photos", 0.02)]
)
def test_operations_are_about_those_that_torch_counts(name: str, tolerance: float) -> None:
    shape = SHAPES[name]
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = CLIP(shape)
        pixels = torch.empty(1, 3, shape.image_size, shape.image_size)
        tokens = torch.zeros(1, 32, dtype=torch.long)
        embeddings = model.encode_image(pixels), model.encode_text(tokens)
        torch.cat(embeddings).sum().backward()
    counted = 2 * counter.get_total_flops()
    assert count_operations(shape, 2, 32) == pytest.approx(counted, rel=tolerance)
