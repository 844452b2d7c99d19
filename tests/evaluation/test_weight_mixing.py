"""Models between two, in one pass over what they share."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lapclip.config import ModelConfig
from lapclip.data.scenes import ALPHABET
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.embedder import Embedder
from lapclip.errors import RunError
from lapclip.evaluation.forgetting import Blend
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP
from lapclip.model.pretrained_towers import FACTORY, TowerSpec
from lapclip.model.shapes import SHAPES

ALPHAS = [0.0, 0.3, 1.0]
CAPTIONS = [
    f"a red cat and {'very ' * (number % 5)}blue dogs number {'i' * number}" for number in range(40)
]
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
BATCH = 4
TINY = SHAPES["tiny"]


def quiet(done: int, total: int) -> None:
    assert 0 < done <= total


def embedder(shape: ModelConfig = TINY, **options: Any) -> Embedder:
    made = Embedder(CLIP(shape, **options).eval(), CharacterTokenizer(ALPHABET), Cpu())
    made.batch = BATCH
    return made


def changed(start: Embedder, *beginnings: str) -> Embedder:
    """A copy of which only tensors with such names differ."""
    end = Embedder(copy.deepcopy(start.model), start.tokenizer, start.device)
    end.batch = BATCH
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


@pytest.mark.parametrize(
    ("differ", "image", "text"),
    [
        (("image.projection", "text.ln_final"), 2, 2),
        (("image.transformer.blocks.1", "text.transformer.blocks.1"), 1, 1),
        (("image.transformer.blocks.0", "text.token_embedding"), 0, 0),
        (("image.", "text.", "logit_scale"), 0, 0),
        (("image.projection",), 2, 2),
        ((), 2, 2),
    ],
)
def test_sharing_what_is_equal_changes_nothing(
    differ: tuple[str, ...], image: int, text: int
) -> None:
    start = embedder()
    blend = Blend(start, changed(start, *differ))
    assert blend.blocks == {"image": image, "text": text}
    pictures = blend.encode_pixels(PIXELS, ALPHAS, quiet)
    captions = blend.encode_text(CAPTIONS, ALPHAS, quiet)
    assert pictures.shape == captions.shape == (3, 40, 64)
    for alpha, images, texts in zip(ALPHAS, pictures, captions, strict=True):
        blend.mix(alpha)
        np.testing.assert_array_equal(images, blend.embedder.encode_pixels(PIXELS))
        np.testing.assert_array_equal(texts, blend.embedder.encode_text(CAPTIONS))
    assert bool(differ) == bool(np.abs(pictures[0] - pictures[-1]).max() > 1e-4)


def test_what_is_equal_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    start = embedder()
    blend = Blend(start, changed(start, "image.transformer.blocks.1", "text.projection"))
    begun: list[int] = []
    begin = blend.embedder.model.image.begin
    monkeypatch.setattr(
        blend.embedder.model.image,
        "begin",
        lambda *given: begun.append(len(given[0])) or begin(*given),
    )
    blend.encode_pixels(PIXELS, ALPHAS, quiet)
    assert begun == [BATCH] * 10  # not thirty times
    parameters = dict(blend.embedder.model.named_parameters())
    again = [
        p
        for name, p in parameters.items()
        if name.startswith(("image.transformer.blocks.1", "image.ln_post"))
    ]
    heads = [
        parameters[name] for name in ("image.projection", "text.projection", "text.ln_final.weight")
    ]
    assert (
        blend.repeated_parameters() == sum(p.numel() for p in (*again, *heads)) + 64
    )  # the bias of ln_final


def test_a_tower_that_is_equal_throughout_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    start = embedder()
    blend = Blend(start, changed(start, "image.projection"))
    finished: list[int] = []
    finish = blend.embedder.model.text.finish
    monkeypatch.setattr(
        blend.embedder.model.text, "finish", lambda *given: finished.append(1) or finish(*given)
    )
    rows = blend.encode_text(CAPTIONS, ALPHAS, quiet)
    assert len(finished) == 10
    np.testing.assert_array_equal(rows[0], rows[2])


def test_towers_of_convolutions_share_their_first_blocks() -> None:
    start = embedder(replace(TINY, image_tower="convolutions", image_layers=4, image_width=16))
    blend = Blend(start, changed(start, "image.blocks.3"))
    assert blend.blocks["image"] == 3
    for alpha, rows in zip(ALPHAS, blend.encode_pixels(PIXELS, ALPHAS, quiet), strict=True):
        blend.mix(alpha)
        np.testing.assert_array_equal(rows, blend.embedder.encode_pixels(PIXELS))


class Foreign(nn.Module):
    """A small network of someone else's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.mark.parametrize(("taps", "block"), [("", 2), ("1", 1)])
def test_foreign_towers_share_their_first_blocks(taps: str, block: int) -> None:
    torch.manual_seed(0)
    spec = TowerSpec(kind=FACTORY, name="foreign")
    start = embedder(
        replace(TINY, image_from="foreign", image_taps=taps), networks={"image": (Foreign(), spec)}
    )
    end = embedder(
        replace(TINY, image_from="foreign", image_taps=taps), networks={"image": (Foreign(), spec)}
    )
    end.model.load_state_dict(start.model.state_dict())
    with torch.no_grad():
        backbone: Any = end.model.image.backbone
        backbone.layers[2].weight.add_(0.1)
    blend = Blend(start, end)
    assert blend.blocks["image"] == block
    for alpha, rows in zip(ALPHAS, blend.encode_pixels(PIXELS, ALPHAS, quiet), strict=True):
        blend.mix(alpha)
        np.testing.assert_allclose(rows, blend.embedder.encode_pixels(PIXELS), atol=1e-6)


def test_models_of_another_form_are_refused_with_the_first_difference() -> None:
    start, wider = embedder(), embedder(replace(TINY, embedding=32))
    with pytest.raises(
        RunError, match=r"image.projection has shape \(64, 64\) in the start, has shape \(64, 32\)"
    ):
        Blend(start, wider)
    deeper = embedder(replace(TINY, image_layers=3))
    with pytest.raises(RunError, match=r"blocks.2.attention.out.bias is missing in the start"):
        Blend(start, deeper)
    other = changed(start)
    other.tokenizer = CharacterTokenizer(ALPHABET[::-1])
    with pytest.raises(RunError, match="different tokenizers"):
        Blend(start, other)
