"""SigLIP and SigLIP 2: towers as transformers computes them, pieces as SentencePiece cuts them, there and back, and
what is made of such a model. `benchmarks/peers_siglip.py` compares with OpenCLIP and with SentencePiece itself."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer, sentencepiece_model_pb2
from torch.nn.functional import normalize

from lapclip.data.tokenizers import SentencePieceTokenizer, tokenizer_from_dict
from lapclip.embedder import Embedder, load_torch
from lapclip.errors import DataError, WeightsError
from lapclip.exporting.tokenizer_files import others_tokenizer
from lapclip.model.clip import CLIP, count_parameters
from lapclip.model.shapes import named_shape
from lapclip.model.sizes import count_weights
from lapclip.weights import openclip
from lapclip.weights.huggingface import shape_of
from lapclip.weights.read_model import read_model
from tests.conftest import examples

from .made import SIGLIP, VOCABULARIES, change_json, embedder, siglip_tokenizer

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TEXT = {**SIZES, "vocab_size": SIGLIP.vocabulary, "max_position_embeddings": 16}
CAPTIONS = ["A photo of a Cat.", "two dogs, in the SNOW!", "", "a dog " * 60]


@pytest.fixture(scope="module", params=["siglip", "siglip2"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that transformers wrote, with a tokenizer as published folders have it."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp(kind)
    if kind == "siglip":
        vision = {**SIZES, "image_size": 33, "patch_size": 8}  # a pixel more than the patches have
        config = transformers.SiglipConfig(text_config=TEXT, vision_config=vision)
        model = transformers.SiglipModel(config)
    else:
        config = transformers.Siglip2Config(
            text_config=TEXT, vision_config={**SIZES, "num_patches": 16, "patch_size": 8}
        )
        model = transformers.Siglip2Model(config)
    draw = torch.Generator().manual_seed(0)
    with (
        torch.no_grad()
    ):  # norms and biases begin as ones and zeros, and would hide that they were swapped
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    model.save_pretrained(folder)
    shutil.copy(VOCABULARIES[kind], folder)
    return folder


def theirs(
    folder: Path, pixels_BCSS: torch.Tensor, tokens_BL: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """What transformers makes of pixels and tokens."""
    transformers: Any = pytest.importorskip("transformers")
    if json.loads((folder / "config.json").read_text())["model_type"] == "siglip":
        model, images = (
            transformers.SiglipModel.from_pretrained(folder).eval(),
            {"pixel_values": pixels_BCSS},
        )
    else:
        model = transformers.Siglip2Model.from_pretrained(folder).eval()
        cut = (
            pixels_BCSS.reshape(len(pixels_BCSS), 3, 4, 8, 4, 8)
            .permute(0, 2, 4, 3, 5, 1)
            .reshape(-1, 16, 192)
        )
        images = {
            "pixel_values": cut,
            "pixel_attention_mask": torch.ones(cut.shape[:2], dtype=torch.int32),
            "spatial_shapes": torch.tensor([[4, 4]] * len(cut)),
        }
    with torch.inference_mode():
        found = model.get_image_features(**images), model.get_text_features(input_ids=tokens_BL)
        image, text = (normalize(one.pooler_output, dim=-1).numpy() for one in found)
    return image, text


def inputs(model: Embedder) -> tuple[torch.Tensor, torch.Tensor]:
    side = model.model.shape.image_size
    pixels = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    return pixels, torch.from_numpy(model.tokenizer.batch(CAPTIONS, model.context))


def test_a_folder_gives_the_vectors_that_transformers_gives(folder: Path) -> None:
    ours = load_torch(folder)
    pixels, tokens = inputs(ours)
    assert tokens.shape == (len(CAPTIONS), 16)
    image, text = theirs(folder, pixels, tokens)
    with torch.inference_mode():
        np.testing.assert_allclose(ours.model.encode_image(pixels).numpy(), image, atol=1e-6)
    np.testing.assert_allclose(ours.encode_text(CAPTIONS), text, atol=1e-6)
    shape = ours.model.shape
    assert (shape.resize, shape.pixel_mean, shape.logit_bias) == ("squash", "0.5 0.5 0.5", True)
    assert (shape.image_size, shape.interpolation) in ((33, "bicubic"), (32, "bilinear"))


def test_pieces_are_those_of_sentencepiece(kind: str) -> None:
    ours = siglip_tokenizer(kind)
    again = tokenizer_from_dict(json.loads(json.dumps(ours.to_dict())))
    padding = {"siglip": 1, "siglip2": 0}[kind]
    for row in json.loads(VOCABULARIES["siglip"].with_name("ids.json").read_text(encoding="utf-8")):
        if kind == "siglip2" and "<" in row["caption"]:
            continue  # there the names of its marks become the marks
        wanted = [*row[kind][:63], 1]
        for one in (ours, again):
            assert one.encode(row["caption"], 64) == wanted + [padding] * (64 - len(wanted)), row[
                "caption"
            ]
        assert ours.length(row["caption"]) == len(row[kind]) + 1
    assert ours.decode(ours.encode("a photo of a cat", 64)) == "a photo of a cat"


def test_a_vocabulary_that_sentencepiece_trains_is_read_as_it_reads_it() -> None:
    out = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([*CAPTIONS, *map(str, range(300))] * 3),
        model_writer=out,
        vocab_size=60,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    theirs = SentencePieceProcessor(model_proto=out.getvalue())
    ours = SentencePieceTokenizer(out.getvalue(), "")
    for caption in ("a photo of 13 dogs", "CAT", "  two   spaces ", "ein Häuschen ﬁne", "\0"):
        assert ours.encode(caption, 64)[: ours.length(caption)] == [*theirs.encode(caption), 1]
    # Pieces that T5 reserved at the end of a vocabulary, which weights may lack, are never given.
    messages: Any = sentencepiece_model_pb2
    reserved = messages.ModelProto.FromString(out.getvalue())
    reserved.pieces.add(piece="▁<extra_id_0>", score=0.0)
    longer = SentencePieceTokenizer(reserved.SerializeToString(), "")
    assert longer.vocabulary == ours.vocabulary == len(theirs)
    assert max(longer.encode("<extra_id_0> a dog", 64)) < longer.vocabulary


def test_hostile_pieces_are_refused_and_crash_nothing() -> None:
    messages: Any = sentencepiece_model_pb2
    whole = VOCABULARIES["siglip"].read_bytes()
    long_piece = messages.ModelProto.FromString(whole)
    long_piece.pieces.add(piece="a" * 4_000_000, score=-1.0)
    astray = messages.ModelProto.FromString(whole)  # its trie begins far outside of itself
    charsmap = bytearray(astray.normalizer_spec.precompiled_charsmap)
    charsmap[4:8] = (0x7FFFFE00).to_bytes(4, "little")
    astray.normalizer_spec.precompiled_charsmap = bytes(charsmap)
    for hostile in (long_piece, astray):
        with pytest.raises(DataError, match="no file of SentencePiece"):
            SentencePieceTokenizer(hostile.SerializeToString(), "canonical")


READERS = {
    kind: (siglip_tokenizer(kind), others_tokenizer(siglip_tokenizer(kind))[0])
    for kind in VOCABULARIES
}


@settings(max_examples=examples(60))
@given(st.text(max_size=60))
def test_any_text_is_read_and_what_others_read_of_plain_ones_is_the_same(text: str) -> None:
    for ours, theirs in READERS.values():
        tokens = ours.encode(text, 64)
        assert len(tokens) == 64
        assert max(tokens) < SIGLIP.vocabulary
        assert ours.end in tokens
        ours.decode(tokens)
        plain = "".join(letter for letter in text if " " <= letter <= "~" and letter != "<")
        assert theirs.encode(plain).ids[:64] == ours.encode(plain, 64)[: ours.length(plain)]


def test_a_caption_always_has_its_full_length(kind: str) -> None:
    ours = embedder(SIGLIP, siglip_tokenizer(kind))
    alone = ours.encode_text(["a cat"])
    np.testing.assert_allclose(ours.encode_text(["a cat", "a dog " * 60])[:1], alone, atol=1e-6)
    assert ours.tokenizer.batch(["a cat"], 16).shape == (1, 16)
    with pytest.raises(AssertionError):
        ours.model.encode_text(torch.ones((1, 8), dtype=torch.long))
    # The padding is looked at: another one gives another vector.
    tokens = torch.from_numpy(ours.tokenizer.batch(["a cat"], 16))
    tokens[:, -2] = 7
    assert np.abs(ours.model.encode_text(tokens).detach().numpy() - alone).max() > 1e-3


def test_published_configurations_are_their_defaults() -> None:
    shape = shape_of(
        {"model_type": "siglip", "text_config": {}, "vision_config": {}}, {}, "config.json"
    )
    assert replace(shape, logit_bias=True) == named_shape("siglip-base-patch16-224")
    for name, parameters in (
        ("siglip-base-patch16-224", 203_155_970),
        ("siglip-so400m-patch14-384", 877_960_498),
    ):
        with torch.device("meta"):
            assert count_parameters(CLIP(named_shape(name))) == parameters
        assert count_weights(named_shape(name))[0] == parameters


@pytest.mark.parametrize(
    ("keys", "value", "named"),
    [
        ("model_type", "siglip3", "siglip3"),
        ("text_config.layer_norm_eps", 1e-5, "layer_norm_eps"),
        ("text_config.projection_size", 7, "one length"),
        ("vision_config.hidden_act", "relu", "relu"),
    ],
)
def test_what_is_no_siglip_is_refused(
    keys: str, value: object, named: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "changed")
    change_json(tmp_path / "changed" / "config.json", keys, value)
    with pytest.raises(WeightsError, match=named):
        read_model(tmp_path / "changed")


def test_a_damaged_or_missing_vocabulary_is_named(kind: str, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    vocabulary = copy / VOCABULARIES[kind].name
    whole = vocabulary.read_bytes()
    for damaged in (whole[:-9], b"", b"\xff" * 40, whole[: len(whole) // 2]):
        vocabulary.write_bytes(damaged)
        with pytest.raises(WeightsError, match=vocabulary.name):
            read_model(copy)
    vocabulary.unlink()
    with pytest.raises(WeightsError, match="no tokenizer"):
        read_model(copy)
    with pytest.raises(DataError):
        SentencePieceTokenizer(whole[:50], "canonical")


def test_the_scale_of_a_siglip_is_not_held_at_100() -> None:
    model = CLIP(SIGLIP)
    model.logit_scale.data.fill_(4.77)
    model.hold_temperature()
    assert model.logit_scale.item() == pytest.approx(4.77)
    assert (
        openclip.timm_name(named_shape("siglip-so400m-patch14-384"))
        == "vit_so400m_patch14_siglip_384"
    )
