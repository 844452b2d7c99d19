"""Models between two."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from lapclip.config import ModelConfig
from lapclip.data.scenes import ALPHABET
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.embedder import Embedder
from lapclip.errors import RunError
from lapclip.evaluation.blend import Blend
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES

TINY = SHAPES["tiny"]


def embedder(shape: ModelConfig = TINY, **options: Any) -> Embedder:
    return Embedder(CLIP(shape, **options).eval(), CharacterTokenizer(ALPHABET), Cpu())


def changed(start: Embedder, *beginnings: str) -> Embedder:
    """A copy of which only tensors with such names differ."""
    end = Embedder(copy.deepcopy(start.model), start.tokenizer, start.device)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(end.model.named_parameters()):
            if name.startswith(beginnings):
                parameter.add_(
                    0.1
                    * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
                )
    return end


def test_the_ends_are_exact_and_between_them_every_tensor_is_on_the_line() -> None:
    start = embedder()
    end = changed(start, "image.transformer.blocks.1", "text.projection", "logit_scale")
    firsts, lasts = (copy.deepcopy(one.model.state_dict()) for one in (start, end))
    blend = Blend(start, end)
    for alpha in (0.0, 1.0, 0.25, 0.7, 1.0, 0.0):
        blend.mix(alpha)
        for name, tensor in blend.embedder.model.state_dict().items():
            if alpha in (0.0, 1.0):
                assert torch.equal(tensor, (lasts if alpha else firsts)[name]), name
            torch.testing.assert_close(tensor, (1 - alpha) * firsts[name] + alpha * lasts[name])
    assert not torch.equal(firsts["logit_scale"], lasts["logit_scale"])


def test_models_of_another_form_are_refused_with_the_first_difference() -> None:
    start, wider = embedder(), embedder(replace(TINY, embedding=32))
    with pytest.raises(
        RunError, match=r"image.projection has shape \(64, 64\) before and has shape \(64, 32\)"
    ):
        Blend(start, wider)
    deeper = embedder(replace(TINY, image_layers=3))
    with pytest.raises(RunError, match=r"blocks.2.attention.out.bias is missing before"):
        Blend(start, deeper)
    bent = embedder(replace(TINY, activation="quick_gelu"))
    with pytest.raises(RunError, match=r"model\.activation is gelu before and quick_gelu after"):
        Blend(start, bent)
    other = changed(start)
    other.tokenizer = CharacterTokenizer(ALPHABET[::-1])
    with pytest.raises(RunError, match="tokenizers differ"):
        Blend(start, other)
