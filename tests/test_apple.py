"""A training step, an evaluation and encoding on the stand-in for Apple's GPU, and that the stand-in refuses."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from lapclip.config import TrainConfig
from lapclip.data.dataset import Pairs
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.embedder import Embedder
from lapclip.machine.cpu import Cpu
from lapclip.machine.device import UNTRUSTED
from lapclip.measure.phases import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.training.cuda_graph import make_step
from lapclip.training.final_scores import score

from .apple import AppleDevice, RefusedError, apple
from .training.test_step import batch_of

MAC = AppleDevice()
OFF = Stopwatch(MAC.synchronise, on=False)


def train(**settings) -> list[float]:
    """Losses of a few steps as a Mac would take them."""
    config = TrainConfig(
        **{
            "linear": "torch",
            "image_attention": "fused",
            "text_attention": "fused",
            "steps": 4,
            **settings,
        }
    )
    step = make_step(CLIP(SHAPES["tiny"], seed=1), config, MAC)
    return [step(batch_of(), number, 1e-3, OFF)().loss for number in range(1, 4)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"micro_batch": 3},
        {"image_attention": "products", "text_attention": "products"},
        {
            "micro_batch": 4,
            "recompute": True,
            "crop": 0.5,
            "flip": 0.5,
            "cheap_size": 16,
        },
    ],
    ids=["plain", "micro-batches", "products", "everything"],
)
def test_a_training_step_does_nothing_that_apple_refuses(
    dtype: str, settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    with apple(monkeypatch) as operations:
        losses = train(dtype=dtype, **settings)
    assert operations.seen > 500
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]


def embedder() -> tuple[Embedder, Pairs]:
    tokenizer = CharacterTokenizer("abcdefghijklmnopqrstuvwxyz. ,0123")
    shape = SHAPES["tiny"]
    assert tokenizer.vocabulary <= shape.vocabulary + 3
    model = CLIP(
        SHAPES["tiny"].__class__(**{**vars(shape), "vocabulary": tokenizer.vocabulary}), seed=1
    )
    pixels = np.random.default_rng(0).integers(
        0, 256, (20, shape.image_size, shape.image_size, 3), dtype=np.uint8
    )
    captions = [(f"a thing {'and more ' * (at % 5)}{at}", "another") for at in range(20)]
    return Embedder(model.eval(), tokenizer, MAC), Pairs(pixels, captions)


def test_evaluation_and_encoding_do_nothing_that_apple_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, pairs = embedder()
    Image.new("RGB", (50, 40), "red").save(tmp_path / "red.png")
    expected = model.encode_text(["a thing"])
    with apple(monkeypatch, context=model.model.shape.context) as operations:
        scores = score(model, pairs, 16)
        assert model.encode_image([tmp_path / "red.png"]).shape == (1, model.model.shape.embedding)
        np.testing.assert_allclose(model.encode_text(["a thing"]), expected, atol=1e-6)
    assert operations.seen > 100
    assert scores["candidates"] == 20


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def attend(
    part: torch.Tensor, value: torch.Tensor | None = None, *, causal: bool = False
) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        part, part, part if value is None else value, is_causal=causal
    )


OFFENCES = {
    "float64": lambda: torch.ones(3, dtype=torch.float64),
    "float64 by a cast": lambda: torch.ones(3).double(),
    "mixed sum": lambda: half(3) + torch.ones(3),
    "mixed sum in place": lambda: torch.ones(3).add_(half(3)),
    "mixed list": lambda: torch._foreach_add_([torch.ones(3)], [half(3)]),  # pyright: ignore[reportPrivateImportUsage]
    "mixed norm": lambda: F.layer_norm(half(2, 4), (4,), torch.ones(4), torch.zeros(4)),
    "permuted attention": lambda: attend(torch.ones(1, 4, 2, 8).transpose(1, 2)),
    "one permuted part": lambda: attend(
        torch.ones(1, 2, 4, 8), torch.ones(1, 4, 2, 8).transpose(1, 2)
    ),
    "causal half": lambda: attend(half(1, 2, 4, 8), causal=True),
    "odd captions": lambda: F.embedding(torch.zeros(2, 13, dtype=torch.long), torch.ones(5, 4)),
    "long captions": lambda: F.embedding(torch.zeros(2, 80, dtype=torch.long), torch.ones(5, 4)),
}
INNOCENT = {
    "a cast": lambda: half(3).float() + torch.ones(3),
    "a copy": lambda: torch.ones(3).copy_(half(3)),
    "numbers": lambda: half(3) * 2.5 + 1,
    "whole numbers": lambda: torch.arange(3) * torch.ones(3),
    "attention": lambda: attend(half(1, 2, 4, 8)),
    "causal float32": lambda: attend(torch.ones(1, 2, 4, 8), causal=True),
    "captions": lambda: F.embedding(torch.zeros(2, 16, dtype=torch.long), torch.ones(5, 4)),
    "captions of the whole context": lambda: F.embedding(
        torch.zeros(2, 77, dtype=torch.long), torch.ones(5, 4)
    ),
}


@pytest.mark.parametrize("offence", OFFENCES.values(), ids=OFFENCES)
def test_the_stand_in_refuses(offence, monkeypatch: pytest.MonkeyPatch) -> None:
    with apple(monkeypatch), pytest.raises(RefusedError):
        offence()
    offence()  # and outside of it nothing is refused


@pytest.mark.parametrize("deed", INNOCENT.values(), ids=INNOCENT)
def test_the_stand_in_allows(deed, monkeypatch: pytest.MonkeyPatch) -> None:
    with apple(monkeypatch) as operations:
        deed()
    assert operations.seen


def test_the_stand_in_looks_at_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sloppy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return (grad.double() * 2).float()

    y = Sloppy.apply(torch.ones(3, requires_grad=True))
    assert isinstance(y, torch.Tensor)
    with apple(monkeypatch), pytest.raises(RefusedError, match="float64"):
        y.sum().backward()


@pytest.mark.parametrize("undone", ["permuted attention", "causal attention", "norms"])
def test_without_the_guards_of_devices_a_step_is_refused(
    undone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with apple(monkeypatch), monkeypatch.context() as patch:
        if undone == "norms":
            patch.setattr(Cpu, "norms_mixed_dtypes", True)
        else:
            UNTRUSTED.remove(("cpu", undone))
        with pytest.raises(RefusedError):
            train(dtype="float16")


def test_a_mac_takes_the_plain_optimiser_until_the_canary_has_sung() -> None:
    assert not MAC.fused_adamw
    assert not MAC.is_cpu
    assert MAC.torch == torch.device("cpu")
