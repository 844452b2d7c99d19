"""What is made of a published SigLIP: runs that go on with its loss, search, evaluation and serving."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import lapclip
from lapclip.config import Layer, build_config
from lapclip.data.batches import BatchPlan
from lapclip.data.dataset import Pairs
from lapclip.embedder import load_torch
from lapclip.errors import ConfigError
from lapclip.model.shapes import SHAPES
from lapclip.serving.engine import Engine
from lapclip.serving.items import Text
from lapclip.training.initial_weights import find_initial_weights
from lapclip.training.objectives.contrastive import LOSSES

from ..conftest import SMALL, set_flags
from ..conftest import lapclip as command
from ..small_runs import events
from ..weights.made import SIGLIP, embedder, save_own, siglip_tokenizer

SHORT = [setting for setting in SMALL if not setting.startswith("model.")]
SCALE, BIAS = 117.3, -12.9


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SigLIP with a scale and a bias as published ones have, in a folder where runs are made."""
    model = embedder(SIGLIP, siglip_tokenizer("siglip2"))
    model.model.start_logits(SCALE, BIAS)
    return save_own(model, tmp_path_factory.mktemp("siglip") / "published")


@pytest.mark.parametrize("recipe", ["heads", "lora"])
def test_a_run_goes_on_with_the_sigmoid_loss_its_scale_and_its_bias(
    recipe: str, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(published.parent)
    flags = set_flags(
        *SHORT, "train.steps=2", "train.learning_rate=1e-5", "train.symbol_dropout=0.2"
    )
    done = command(
        "train", "--from", str(published), "--recipe", recipe, *flags, "--name", recipe, "--json"
    )
    assert done.returncode == 0, done.stderr
    started, first = events("started", recipe)[0], events("step", recipe)[0]
    assert started["config"]["train"]["loss"] == "sigmoid"
    assert started["chance_loss"] == pytest.approx(LOSSES["sigmoid"].chance(16))
    assert first["temperature"] == pytest.approx(1 / SCALE, rel=1e-4)
    assert first["logit_bias"] == pytest.approx(BIAS, rel=1e-4)
    learnt = load_torch(f"runs/{recipe}")
    assert learnt.logits().scale == pytest.approx(SCALE, rel=1e-3)
    assert learnt.model.shape == load_torch(published).model.shape
    assert (
        np.abs(learnt.encode_text(["a cat"]) - load_torch(published).encode_text(["a cat"])).max()
        > 0
    )


def test_another_loss_can_be_asked_for_and_nothing_begins_from_nothing(published: Path) -> None:
    start = Layer("--from", {"train": {"start": str(published)}})
    for asked, loss in (({}, "sigmoid"), ({"loss": "softmax"}, "softmax")):
        layers = [start, Layer("--set", {"train": asked})]
        assert find_initial_weights(build_config(layers, SHAPES), layers)[0].train.loss == loss
    alone = [Layer("--set", {"model": {"name": "siglip-base-patch16-224"}})]
    with pytest.raises(ConfigError, match="published weights"):
        find_initial_weights(build_config(alone, SHAPES), alone)


def test_tokens_are_left_out_and_the_caption_stays_filled() -> None:
    tokenizer = siglip_tokenizer("siglip2")
    captions = [("two dogs in the snow",), ("a cat",), ("",), ("a dog " * 60,)]
    pairs = Pairs(np.zeros((4, 33, 33, 3), np.uint8), captions)
    plain, short = (
        BatchPlan(pairs, tokenizer, 16, 4, 0, share).batch(1).tokens_BL for share in (0.0, 0.7)
    )
    assert plain.shape == short.shape == (4, 16)
    counts = [(rows != tokenizer.padding).sum(1).tolist() for rows in (plain, short)]
    assert sorted(counts[1]) != sorted(counts[0])
    assert all((rows == tokenizer.end).sum() == 4 for rows in (plain, short))


def test_search_takes_such_a_model(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw, photos = np.random.default_rng(0), tmp_path / "photos"
    photos.mkdir()
    for at in range(3):
        Image.fromarray(draw.integers(0, 256, (40 + at, 70, 3), dtype=np.uint8)).save(
            photos / f"{at}.png"
        )
    done = command("search", str(photos), "a red Cat", "--model", str(published), "--json")
    assert done.returncode == 0, done.stderr
    found = {Path(one["path"]).name: one["score"] for one in json.loads(done.stdout)["results"]}
    model = lapclip.load(published)
    wanted = (
        model.encode_image([photos / name for name in found]) @ model.encode_text(["a red Cat"])[0]
    )
    np.testing.assert_allclose(list(found.values()), wanted, atol=2e-3)


def test_a_served_text_has_its_full_length(
    published: Path,
) -> None:
    encoder = lapclip.load(published)
    engine = Engine("torch-float32", encoder, 1)
    assert engine.rows("text", 2).shape == (2, 16)
    row = Text("a red cat").row(encoder)
    np.testing.assert_allclose(
        engine.embed("text", row[None]), encoder.encode_text(["a red cat"]), atol=1e-6
    )
    assert Text("a dog " * 60).row(encoder).shape == (16,)
