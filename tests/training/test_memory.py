"""Predicted memory, and what is refused because of it. Measured peaks: benchmarks/memory_prediction.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lapclip.config import TrainConfig
from lapclip.errors import ConfigError
from lapclip.machine import system_memory
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.model.sizes import count_image, count_text, count_weights
from lapclip.training.memory import check_memory, largest_micro_batch, predict_bytes
from lapclip.training.precision import enters_products

CPU = Cpu()


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if not shape.image_from])
def test_weights_are_counted_without_building_the_model(name: str) -> None:
    with torch.device("meta"):
        named = dict(CLIP(SHAPES[name]).named_parameters())
    every = sum(parameter.numel() for parameter in named.values())
    products = sum(parameter.numel() for name, parameter in named.items() if enters_products(name))
    assert count_weights(SHAPES[name]) == (every, products)
    for tower, count in (("image.", count_image), ("text.", count_text)):
        own = sum(parameter.numel() for name, parameter in named.items() if name.startswith(tower))
        assert count(SHAPES[name]).every == own


def test_parts_follow_the_settings() -> None:
    shape = SHAPES["seed"]
    whole = predict_bytes(shape, TrainConfig(batch_size=64, device="cpu"), 40)
    assert whole.parameters == 4 * 76_735_489
    assert whole.optimizer == 2 * whole.parameters
    assert whole.rounded == 0
    parts = predict_bytes(shape, TrainConfig(batch_size=64, micro_batch=8, device="cpu"), 40)
    assert parts.activations == whole.activations // 8
    assert parts.gradients == parts.parameters
    half = predict_bytes(shape, TrainConfig(batch_size=64, dtype="bfloat16", device="cpu"), 40)
    assert half.rounded == 4 * count_weights(shape)[1]
    assert 0.45 < half.activations / whole.activations < 0.6
    again = predict_bytes(shape, TrainConfig(batch_size=64, recompute=True, device="cpu"), 40)
    assert again.activations < whole.activations / 3
    sized = TrainConfig(batch_size=64, cheap_size=160, device="cpu")
    cheap = predict_bytes(shape, replace(sized, cheap_share=1.0), 40)
    assert 0.4 < cheap.activations / whole.activations < 0.7
    assert predict_bytes(shape, sized, 40) == whole


def test_activations_grow_with_the_batch() -> None:
    for name in ("seed", "photos"):
        small, large = (
            predict_bytes(SHAPES[name], TrainConfig(batch_size=size, device="cpu"), 32).activations
            for size in (8, 64)
        )
        assert large == pytest.approx(8 * small, rel=0.01)


def test_what_fits_is_not_refused_and_what_does_not_names_the_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape, train = SHAPES["seed"], TrainConfig(batch_size=64)
    need = predict_bytes(shape, replace(train, device="cpu"), 40).total
    monkeypatch.setattr(system_memory, "available_bytes", lambda: need)
    check_memory(shape, train, 40, CPU)
    monkeypatch.setattr(system_memory, "available_bytes", lambda: need // 3)
    with pytest.raises(ConfigError) as refused:
        check_memory(shape, train, 40, CPU)
    text = str(refused.value)
    assert f"seed with 64 pairs at once needs about {need / 1e9:.1f} GB" in text
    assert f"{need / 3e9:.1f} GB are free on cpu" in text
    assert len(text.splitlines()) == 2
    fitting = largest_micro_batch(shape, train, 40, CPU, need // 3)
    assert fitting is not None
    assert fitting < 64
    assert f"Try: --set train.micro_batch={fitting}," in text
    check_memory(shape, replace(train, micro_batch=fitting), 40, CPU)  # the hint works


def test_a_model_that_fits_at_no_micro_batch_is_refused_with_other_hints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape, train = SHAPES["seed"], TrainConfig(batch_size=64, micro_batch=1, device="cpu")
    plain, recomputed = (
        parts.total - parts.base
        for parts in (
            predict_bytes(shape, replace(train, recompute=on), 40) for on in (False, True)
        )
    )
    monkeypatch.setattr("lapclip.training.memory.MARGIN", 1.0)
    monkeypatch.setattr(system_memory, "available_bytes", lambda: (plain + recomputed) // 2)
    one_pair = r"one pair at once does not fit either\.\nTry: "
    with pytest.raises(
        ConfigError, match=rf"{one_pair}--set train\.recompute=true --set train\.micro_batch=\d+,"
    ):
        check_memory(shape, replace(train, micro_batch=0), 40, CPU)
    monkeypatch.setattr(system_memory, "available_bytes", lambda: recomputed // 2)
    with pytest.raises(ConfigError, match=rf"{one_pair}a smaller model"):
        check_memory(shape, train, 40, CPU)


def test_the_width_inside_the_mlps_counts() -> None:
    shape = replace(SHAPES["tiny"], image_mlp=100, text_mlp=7)
    with torch.device("meta"):
        named = dict(CLIP(shape).named_parameters())
    assert count_weights(shape)[0] == sum(parameter.numel() for parameter in named.values())
    usual, wider = (
        predict_bytes(model, TrainConfig(batch_size=64, device="cpu"), 40)
        for model in (SHAPES["seed"], replace(SHAPES["seed"], text_mlp=4096))
    )
    assert wider.activations > usual.activations
