from __future__ import annotations

import pytest
import torch

from lapclip.config import TrainConfig
from lapclip.model.clip import CLIP
from lapclip.model.freezing import LowRank, boundary, freeze, merged_state
from lapclip.model.shapes import SHAPES


def adapted(**settings) -> CLIP:
    model = CLIP(SHAPES["tiny"], seed=1).double()
    freeze(model, TrainConfig(lora_rank=3, **settings))
    return model.double()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 30, (3, 12), generator=torch.Generator().manual_seed(0))
    tokens[:, 8] = 32
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double(), tokens


def shaken(model: CLIP) -> CLIP:
    """Additions that are not zero."""
    with torch.no_grad():
        for at, module in enumerate(
            module for module in model.modules() if isinstance(module, LowRank)
        ):
            module.lora_up.copy_(
                torch.randn(module.lora_up.shape, generator=torch.Generator().manual_seed(at)) / 10
            )
    return model


def test_nothing_changes_before_the_first_update() -> None:
    pixels, tokens = inputs()
    plain, model = CLIP(SHAPES["tiny"], seed=1).double(), adapted()
    assert (
        sum(isinstance(module, LowRank) for module in model.modules()) == 2 * 2 * 2
    )  # qkv and out of every block
    assert torch.equal(model.encode_image(pixels), plain.encode_image(pixels))
    assert torch.equal(model.encode_text(tokens), plain.encode_text(tokens))


def test_merged_weights_give_what_the_additions_give() -> None:
    pixels, tokens = inputs()
    model, plain = shaken(adapted()), CLIP(SHAPES["tiny"], seed=2).double()
    plain.load_state_dict(merged_state(model))
    torch.testing.assert_close(
        plain.encode_image(pixels), model.encode_image(pixels), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        plain.encode_text(tokens), model.encode_text(tokens), rtol=0, atol=1e-12
    )
    assert (
        plain.encode_text(tokens) - CLIP(SHAPES["tiny"], seed=1).double().encode_text(tokens)
    ).abs().max() > 1e-3


def test_only_additions_and_heads_learn_and_all_of_them_do() -> None:
    pixels, tokens = inputs()
    model = shaken(adapted())
    (
        model.encode_image(pixels).sum() + model.encode_text(tokens).sum() * model.logit_scale
    ).backward()
    learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(model.get_parameter(name).grad is not None for name in learns)
    ends = {"logit_scale", "image.projection", "text.projection"}
    ends |= {
        f"{norm}.{part}"
        for norm in ("image.ln_post", "text.ln_final")
        for part in ("weight", "bias")
    }
    assert {name for name in learns if "lora" not in name} == ends


@pytest.mark.parametrize(("blocks", "first"), [("all", 0), (1, 1), (0, 2)])
def test_additions_go_where_blocks_would_learn(blocks: int | str, first: int) -> None:
    model = adapted(image_blocks=blocks, text_blocks=blocks)
    assert boundary(model, "image") == boundary(model, "text") == first
    assert sum(isinstance(module, LowRank) for module in model.modules()) == 2 * 2 * (2 - first)
