"""Foreign networks as towers: in two parts as in one, with taps, pooled as they should be."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lapclip.embedder import Embedder, load_torch
from lapclip.errors import ConfigError
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP
from lapclip.model.freezing import parts_of
from lapclip.model.pretrained_towers import (
    PretrainedImageTower,
    PretrainedTextTower,
    TowerSpec,
    pooled_caption,
)
from lapclip.model.shapes import SHAPES
from lapclip.model.split_network import Blocks, find_blocks
from lapclip.training.checkpoint import save_model
from lapclip.weights.pretrained_networks import (
    _architecture,
    build_network,
    open_image,
    open_text,
)

from ..networks import tiny_text, write_tokenizer

pytest.importorskip("transformers", reason="the package transformers is not installed")

IMAGE = "tiny-image"


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text(tmp_path_factory.mktemp("bert"))


def both(text_folder: Path, **changes: str) -> tuple[CLIP, Embedder]:
    image, text = open_image(IMAGE), open_text(str(text_folder))
    shape = replace(
        SHAPES["towers"],
        **{**image.facts, **text.facts},
        head=24,
        embedding=16,
        image_from=IMAGE,
        text_from="x",
        **changes,
    )
    model = CLIP(
        shape,
        seed=3,
        networks={"image": (image.backbone, image.spec), "text": (text.backbone, text.spec)},
    )
    assert text.tokenizer is not None
    return model, Embedder(model, text.tokenizer, Cpu())


@torch.no_grad()
@pytest.mark.parametrize("taps", ["", "0 2 4"])
def test_an_image_network_in_two_parts_gives_what_it_gives_whole(
    text_folder: Path, taps: str
) -> None:
    model, _ = both(text_folder, image_taps=taps)
    pixels = torch.randn(3, 3, 32, 32)
    whole = model.encode_image(pixels)
    assert model.image.depth == 4
    blocks = [block for block in range(5) if block == 4 or not taps or block == 0]
    for block in blocks:
        assert torch.equal(model.finish_image(model.image.begin(pixels, block), block), whole), (
            block
        )


@torch.no_grad()
@pytest.mark.parametrize("taps", ["", "0 1 3"])
def test_a_text_network_in_two_parts_gives_what_it_gives_whole(
    text_folder: Path, taps: str
) -> None:
    model, embedder = both(text_folder, text_taps=taps)
    tokens = torch.from_numpy(
        embedder.tokenizer.batch(["a red cat", "the small dog on the left at night"], 40)
    )
    whole = model.encode_text(tokens)
    for block in [0, 1, 2, 3] if not taps else [0, 1, 3]:
        halves = model.finish_text(model.text.begin(tokens, block), tokens, block)
        torch.testing.assert_close(halves, whole, rtol=0, atol=1e-6)


@torch.no_grad()
def test_padding_changes_nothing(text_folder: Path) -> None:
    model, _ = both(text_folder)
    tokens = torch.tensor([[2, 5, 6, 3]])
    padded = torch.tensor([[2, 5, 6, 3, 0, 0, 0, 0]])
    torch.testing.assert_close(
        model.encode_text(tokens), model.encode_text(padded), rtol=0, atol=1e-6
    )


def test_kept_features_enter_before_any_block_that_is_tapped(text_folder: Path) -> None:
    model, _ = both(text_folder, image_taps="2 4")
    assert isinstance(model.image, PretrainedImageTower)
    assert [model.image.entry(first) for first in range(5)] == [0, 1, 2, 2, 4]
    assert all(model.image.divides(model.image.entry(first)) for first in range(5))
    assert not model.image.divides(3)  # what was tapped before it would be missing


def test_a_tap_beyond_the_last_block_is_refused(text_folder: Path) -> None:
    with pytest.raises(ValueError, match="it has 4 blocks, so nothing can be tapped after block 5"):
        both(text_folder, image_taps="5")


def test_parts_follow_what_runs_when_and_the_unused_never_learns(text_folder: Path) -> None:
    model, _ = both(text_folder)
    parts = parts_of(model)
    assert parts["image.backbone.stem.weight"] == "image.embedding"
    assert parts["image.backbone.stages.2.convolution.weight"] == "image.2"
    assert parts["image.backbone.after.weight"] == "image.3"  # after the last block
    assert parts["image.head.projection"] == "image.head"
    assert parts["text.backbone.embeddings.word_embeddings.weight"] == "text.embedding"
    assert parts["text.backbone.encoder.layer.1.output.dense.weight"] == "text.1"
    idle = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert idle == ["image.backbone.classes.weight", "image.backbone.classes.bias"]


@torch.no_grad()
def test_statistics_and_dropout_stay_as_in_evaluation(text_folder: Path) -> None:
    model, _ = both(text_folder)
    before = {name: tensor.clone() for name, tensor in model.image.state_dict().items()}
    pixels = torch.randn(4, 3, 32, 32)
    first = model.train().encode_image(pixels)
    assert torch.equal(first[:2], model.encode_image(pixels)[:2])
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in model.image.state_dict().items()
    )


def test_a_model_on_foreign_towers_is_saved_and_loaded_without_their_origin(
    text_folder: Path, tmp_path: Path
) -> None:
    _, embedder = both(text_folder, image_taps="2", text_taps="1")
    (tmp_path / "saved").mkdir()
    save_model(embedder, tmp_path / "saved")
    loaded = load_torch(tmp_path / "saved")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    assert np.array_equal(loaded.encode_pixels(pixels), embedder.encode_pixels(pixels))
    captions = ["a red cat", "words it has never seen", ""]
    assert np.array_equal(loaded.encode_text(captions), embedder.encode_text(captions))


@pytest.mark.parametrize("name", ["builtins:dict", "minilm-l6", "os.path"])
def test_a_model_cannot_name_code(name: str) -> None:
    with pytest.raises(ConfigError, match="not known here"):
        build_network(TowerSpec(kind="package", name=name))


def test_a_saved_configuration_cannot_make_transformers_fetch_anything(text_folder: Path) -> None:
    saved = json.loads((text_folder / "config.json").read_text())
    hostile = {
        "attn_implementation": "someone/kernels",
        "_attn_implementation": "someone/kernels",
        "auto_map": {"AutoModel": "someone/code--code.Model"},
        "quantization_config": {"quant_method": "gptq"},
        "_name_or_path": "someone/else",
        "hidden_act": "someone/activation",
    }
    built = build_network(TowerSpec(kind="huggingface", name="x", config=saved | hostile))
    config: Any = built.config
    assert config.hidden_size == saved["hidden_size"]
    assert "someone" not in config.to_json_string(use_diff=False)
    assert "someone" not in str(config._attn_implementation)
    (text_folder / "config.json").write_text(json.dumps(saved | hostile))
    try:
        assert "someone" not in str(open_text(str(text_folder)).spec.config)
    finally:
        (text_folder / "config.json").write_text(json.dumps(saved))
    sizes: Any = _architecture({"model_type": "mobilevit", "conv_kernel_size": 5})
    assert sizes.conv_kernel_size == 5
    rates: Any = _architecture({"model_type": "convnext", "drop_path_rate": 0.4})
    assert rates.drop_path_rate == 0.4
    with pytest.raises(ConfigError, match="unheard-of"):
        build_network(TowerSpec(kind="huggingface", name="x", config={"model_type": "unheard-of"}))


def test_code_beside_weights_is_not_run_whatever_someone_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_text(tmp_path / "bert")
    about = json.loads((folder / "config.json").read_text())
    about |= {
        "model_type": "unheard-of",
        "auto_map": {"AutoConfig": "code.C", "AutoModel": "code.M"},
    }
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError, match="cannot be read as a Hugging Face model"):
        open_text(str(folder))
    assert not (tmp_path / "ran").exists()


@torch.no_grad()
@pytest.mark.parametrize("place", ["preprocessor_config.json", "processor_config.json"])
def test_a_hugging_face_image_network_comes_with_its_preprocessing(
    tmp_path: Path, place: str
) -> None:
    from transformers import ViTConfig, ViTModel

    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    ViTModel(ViTConfig(image_size=32, patch_size=8, intermediate_size=32, **sizes)).save_pretrained(
        tmp_path
    )
    seen = {
        "size": {"height": 32, "width": 32},
        "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3,
        "resample": 2,
    }
    (tmp_path / place).write_text(
        json.dumps({"image_processor": seen} if place.startswith("processor") else seen)
    )
    opened = open_image(str(tmp_path))
    assert opened.facts == {
        "image_size": 32,
        "pixel_mean": "0.5 0.5 0.5",
        "pixel_std": "0.25 0.25 0.25",
        "interpolation": "bilinear",
        "resize": "squash",
        "crop_share": 1.0,
    }
    tower = PretrainedImageTower(
        (opened.backbone, opened.spec), replace(SHAPES["tiny"], **opened.facts)
    )
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    whole = opened.backbone(pixel_values=pixels).last_hidden_state[:, 0]
    torch.testing.assert_close(tower.begin(pixels, tower.depth), whole)
    assert (tower.depth, tower.divides(2)) == (3, True)


def test_a_text_network_whose_padding_is_its_last_token(tmp_path: Path) -> None:
    folder = tiny_text(tmp_path / "bert")
    opened = open_text(str(folder))
    spec = replace(opened.spec, padding=opened.facts["vocabulary"] - 1)
    tower = PretrainedTextTower((opened.backbone, spec), SHAPES["tiny"])
    assert all(tower.divides(block) for block in range(1, tower.depth + 1))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("builtins:dict", "There is no folder builtins:dict"),
        ("minilm-l6", "is a text tower"),
        ("timm:no_such_network", "timm"),
        ("hf:nowhere/at-all", "the hub did not give it"),
        ("runs/nowhere", "There is no folder runs/nowhere"),
    ],
)
def test_references_that_lead_nowhere_say_so(
    reference: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with suppress(ImportError):
        import huggingface_hub.constants

        # The environment is read when the package is imported, which may be long ago; online it tries for 20 seconds.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=message):
        open_image(reference)


def test_a_tokenizer_with_more_tokens_than_the_weights_know_is_refused(tmp_path: Path) -> None:
    folder = tiny_text(tmp_path / "bert")
    write_tokenizer(
        folder, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"word{at}" for at in range(50))]
    )
    with pytest.raises(ConfigError, match=r"has 54 tokens, but its weights know 27"):
        open_text(str(folder))


@pytest.mark.parametrize(
    ("mode", "pooling"), [("cls_token", "first"), ("max_tokens", "max"), ("lasttoken", "last")]
)
def test_pooling_is_that_of_the_folder(tmp_path: Path, mode: str, pooling: str) -> None:
    folder = tiny_text(tmp_path / "bert")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    (folder / "modules.json").write_text(
        json.dumps([{"type": "sentence_transformers.models.Normalize"}])
    )
    opened = open_text(str(folder))
    assert (opened.spec.pooling, opened.spec.unit_length) == (pooling, True)


def test_captions_are_pooled_over_what_is_not_padding() -> None:
    tokens = torch.arange(12.0).view(1, 4, 3)
    mask = torch.tensor([[True, True, True, False]])
    expected = {
        "first": tokens[:, 0],
        "last": tokens[:, 2],
        "max": tokens[:, 2],
        "mean": tokens[:, 1],
    }
    for pooling, value in expected.items():
        assert torch.equal(pooled_caption(tokens, mask, pooling), value), pooling


def test_blocks_are_the_largest_list_of_one_kind() -> None:
    network = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.ReLU()
    )
    assert find_blocks(network) == list(network.get_submodule("1").children())
    assert len(Blocks(nn.Linear(3, 3))) == 0
