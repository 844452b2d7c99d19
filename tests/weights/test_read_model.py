"""Published weights in every form they come in, and what is refused, with the reason."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lapclip.embedder import Embedder, load_torch
from lapclip.errors import LapclipError, WeightsError
from lapclip.weights import openai, openclip
from lapclip.weights.hub import choose_files
from lapclip.weights.published import KNOWN
from lapclip.weights.read_model import read_model

from .made import CAPTIONS, SHAPE, change_json, embedder, save_huggingface, save_openclip, save_own


@pytest.fixture(scope="module")
def ours() -> Embedder:
    return embedder()


def same(one: Embedder, other: Embedder) -> bool:
    """Equal to the last bit, weights and what comes of them."""
    mine, theirs = one.model.state_dict(), other.model.state_dict()
    assert mine.keys() == theirs.keys()
    return all(torch.equal(mine[name], theirs[name]) for name in mine) and bool(
        (one.encode_text(CAPTIONS) == other.encode_text(CAPTIONS)).all()
    )


def test_openclips_folder_gives_the_same_model(ours: Embedder, tmp_path: Path) -> None:
    folder = save_openclip(ours, tmp_path / "model")
    found = load_torch(folder)
    assert found.model.shape == ours.model.shape
    assert same(found, ours)
    assert same(
        load_torch(folder / openclip.WEIGHTS[0]), ours
    )  # the file, with its configuration beside it
    os.remove(folder / openclip.WEIGHTS[0])
    torch.save(
        openai.LAYOUT.to_theirs(ours.model.state_dict()), folder / "open_clip_pytorch_model.bin"
    )
    assert same(load_torch(folder), ours)


def test_huggingfaces_folder_gives_the_same_model_in_one_file_and_in_shards(
    ours: Embedder, tmp_path: Path
) -> None:
    folder = save_huggingface(ours, tmp_path / "model")
    found = load_torch(folder)
    assert found.model.shape == ours.model.shape
    assert same(found, ours)
    tensors = list(load_file(folder / "model.safetensors").items())
    os.remove(folder / "model.safetensors")
    places = {}
    for at in range(2):
        name = f"model-0000{at + 1}-of-00002.safetensors"
        save_file(dict(tensors[at::2]), folder / name)
        places |= {tensor: name for tensor, _ in tensors[at::2]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert same(load_torch(folder), ours)
    for places in (["model.safetensors"], {"a": ["b"]}, {"a": 1}, 3):
        index = {"weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(WeightsError, match=r"index\.json cannot be read"):
            load_torch(folder)


BLOCK = {
    "ln_1": "ln_1",
    "attention.out": "attn.out_proj",
    "attention.qkv": "attn.in_proj_",
    "ln_2": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}
"""As clip/model.py of openai/CLIP names the modules of a block. Equal sizes hide a mistake here from whoever reads and
writes with the same table. Hugging Face's names are compared with transformers itself below."""
AROUND = {
    "image.ln_pre.weight": "visual.ln_pre.weight",
    "image.ln_post.weight": "visual.ln_post.weight",
    "image.class_embedding": "visual.class_embedding",
    "text.ln_final.weight": "ln_final.weight",
    "text.token_embedding.weight": "token_embedding.weight",
}


def test_every_module_has_the_name_that_openai_gives_it(ours: Embedder) -> None:
    names = dict(AROUND)
    for tower, blocks in (("image", "visual.transformer"), ("text", "transformer")):
        for block in range(2):
            for part, module in BLOCK.items():
                for end in ("weight", "bias"):
                    theirs = f"{blocks}.resblocks.{block}.{module}.{end}".replace("_.", "_")
                    names[f"{tower}.transformer.blocks.{block}.{part}.{end}"] = theirs
    tensors = ours.model.state_dict()
    written = openai.LAYOUT.to_theirs(tensors)
    for name, theirs in names.items():
        assert torch.equal(written[theirs], tensors[name]), theirs


def test_half_precision_becomes_float32(ours: Embedder, tmp_path: Path) -> None:
    folder = save_huggingface(ours, tmp_path / "model")
    halves = {
        name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(halves, folder / "model.safetensors")
    tensors = read_model(folder).tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert torch.equal(
        tensors["text.ln_final.bias"], ours.model.text.get_parameter("ln_final.bias").half().float()
    )


@pytest.mark.parametrize(
    ("name", "hint"), [("ViT-B-32.pt", "vit-b-32-openai"), ("mine.pt", "safetensors")]
)
def test_a_torchscript_archive_is_refused_with_the_name_to_use(
    name: str, hint: str, tmp_path: Path
) -> None:
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), tmp_path / name)
    with pytest.raises(WeightsError, match="is a TorchScript archive") as error:
        read_model(tmp_path / name)
    assert hint in (error.value.hint or "")


def test_a_clip_that_transformers_saves_gives_the_vectors_that_it_gives_there(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {**sizes, "vocab_size": 49_408, "max_position_embeddings": 40, "eos_token_id": 49_407}
    config = transformers.CLIPConfig(
        text_config=text,
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        projection_dim=24,
    )
    theirs = transformers.CLIPModel(config).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    theirs.save_pretrained(tmp_path)
    ours = load_torch(tmp_path)
    tokens = torch.from_numpy(ours.tokenizer.batch(CAPTIONS, ours.context))
    pixels = torch.randn(2, 3, 32, 32, generator=draw)
    with torch.inference_mode():
        images = theirs.get_image_features(pixel_values=pixels).pooler_output
        texts = theirs.get_text_features(input_ids=tokens).pooler_output
        found = ours.model.encode_image(pixels), ours.model.encode_text(tokens)
    for mine, expected in zip(found, (images, texts), strict=True):
        expected = torch.nn.functional.normalize(expected, dim=-1)
        torch.testing.assert_close(mine, expected, atol=1e-6, rtol=0)


def test_a_state_dict_alone_is_taken_for_openais_and_a_trainers_checkpoint_for_openclips(
    ours: Embedder, tmp_path: Path
) -> None:
    theirs = openai.LAYOUT.to_theirs(ours.model.state_dict())
    torch.save(theirs, tmp_path / "alone.pt")
    save_file(theirs, tmp_path / "alone.safetensors")
    for name in ("alone.pt", "alone.safetensors"):
        found = load_torch(tmp_path / name)
        assert found.model.shape.activation == "quick_gelu"
        assert same(found, ours)
    wrapped = {f"module.{name}": tensor for name, tensor in theirs.items()}
    torch.save({"epoch": 3, "name": "mine", "state_dict": wrapped}, tmp_path / "epoch_3.pt")
    found = load_torch(tmp_path / "epoch_3.pt")
    assert found.model.shape == replace(ours.model.shape, activation="gelu")


def test_a_learnt_bias_is_read_where_there_is_one(tmp_path: Path) -> None:
    ours = embedder(replace(SHAPE, logit_bias=True))
    theirs = openai.LAYOUT.to_theirs(ours.model.state_dict())
    torch.save({"state_dict": theirs}, tmp_path / "epoch_1.pt")  # as OpenCLIP's trainer writes it
    found = load_torch(tmp_path / "epoch_1.pt").model
    assert found.logit_bias is not None
    assert found.logit_bias == ours.model.logit_bias
    folder = save_openclip(ours, tmp_path / "openclip")
    for said in (None, -10):  # the tensors decide, whatever the configuration says
        change_json(folder / openclip.CONFIG, "model_cfg.init_logit_bias", said)
        assert torch.equal(
            read_model(folder).tensors["logit_bias"], ours.model.state_dict()["logit_bias"]
        )
        assert read_model(folder).shape.logit_bias


def test_preprocessing_comes_with_the_model(ours: Embedder, tmp_path: Path) -> None:
    folder = save_openclip(ours, tmp_path / "openclip")
    seen = {
        "mean": [0.5, 0.5, 0.5],
        "std": [0.25, 0.5, 0.5],
        "interpolation": "bilinear",
        "resize_mode": "squash",
    }
    change_json(folder / openclip.CONFIG, "preprocess_cfg", seen)
    shape = read_model(folder).shape
    assert (shape.pixel_mean, shape.pixel_std) == ("0.5 0.5 0.5", "0.25 0.5 0.5")
    assert (shape.interpolation, shape.resize) == ("bilinear", "squash")
    folder = save_huggingface(ours, tmp_path / "huggingface")
    seen = {
        "size": {"shortest_edge": 36},
        "crop_size": {"height": 32, "width": 32},
        "resample": 2,
        "image_mean": [0] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(seen))
    shape = read_model(folder).shape
    assert shape.crop_share == 32 / 36
    assert (shape.interpolation, shape.resize, shape.pixel_mean) == (
        "bilinear",
        "shortest",
        "0 0 0",
    )
    # As a CLIPProcessor of transformers 5 writes it, who reads it first.
    (folder / "processor_config.json").write_text(
        json.dumps({"image_processor": {**seen, "image_mean": [1] * 3}})
    )
    assert read_model(folder).shape.pixel_mean == "1 1 1"
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "CLIPProcessor"}))
    assert read_model(folder).shape.pixel_mean == "0 0 0"


def test_published_shapes_have_their_names() -> None:
    """As OpenCLIP writes them in its configurations."""
    cfg = {
        "embed_dim": 1280,
        "vision_cfg": {
            "layers": 48,
            "width": 1664,
            "head_width": 104,
            "mlp_ratio": 4.9231,
            "patch_size": 14,
        },
        "text_cfg": {"width": 1280, "heads": 20, "layers": 32},
    }
    assert openclip.shape_of({"model_cfg": cfg}, "config").name == "ViT-bigG-14"
    cfg["vision_cfg"]["layers"] = 47
    assert openclip.shape_of({"model_cfg": cfg}, "config").name == "vit-1664x47-14"
    assert KNOWN["ViT-L-14-336"].image_size == 336


# What is refused.


VISION, TEXT = "model_cfg.vision_cfg", "model_cfg.text_cfg"
REFUSED_BY_FORMAT = {
    (save_openclip, openclip.CONFIG): [
        (f"{VISION}.timm_model_name", "vit_medium_patch16_clip_224", "a tower from timm"),
        (
            f"{VISION}.timm_model_name",
            "vit_base_patch16_siglip_224",
            "vision_cfg.timm_pool = 'avg'",
        ),
        (f"{TEXT}.hf_model_name", "roberta-base", "a text tower from Hugging Face"),
        (f"{VISION}.attentional_pool", True, "pooling by attention"),
        (f"{VISION}.layers", [3, 4, 6, 3], "a residual network"),
        ("model_cfg.multimodal_cfg", {"width": 512}, "a CoCa"),
        (f"{VISION}.pool_type", "avg", "vision_cfg.pool_type = 'avg'"),
        (f"{TEXT}.vocab_size", 1000, "has 49,408 tokens, and .* knows 1,000"),
        ("preprocess_cfg.resize_mode", "longest", "resize_mode is 'longest'"),
        (f"{VISION}.width", "wide", "vision_cfg.width is .wide.; it must be a whole"),
        (f"{VISION}.patch_size", 7, "does not divide"),
    ],
    (save_huggingface, "config.json"): [
        ("model_type", "siglip", "layer_norm_eps is not 1e-06"),
        ("model_type", "bert", "'bert', which cannot be read"),
        ("text_config.hidden_act", "relu", "hidden_act is quick_gelu and relu"),
        ("text_config.eos_token_id", 7, "the end token is 7; it must have the highest id, 49407"),
        ("vision_config.layer_norm_eps", 1e-6, "layer_norm_eps"),
    ],
}


@pytest.mark.parametrize(
    ("form", "keys", "value", "message"),
    [(form, *row) for form, rows in REFUSED_BY_FORMAT.items() for row in rows],
)
def test_what_others_can_be_and_our_towers_cannot_is_named(
    form: tuple[Callable[[Embedder, Path], Path], str],
    keys: str,
    value: object,
    message: str,
    ours: Embedder,
    tmp_path: Path,
) -> None:
    save, config = form
    folder = save(ours, tmp_path / "model")
    change_json(folder / config, keys, value)
    with pytest.raises(WeightsError, match=message) as error:
        read_model(folder)
    assert 1 <= len(str(error.value).splitlines()) <= 3


def test_the_first_tensor_that_does_not_fit_is_named_with_both_sizes(
    ours: Embedder, tmp_path: Path
) -> None:
    folder = save_openclip(ours, tmp_path / "openclip")
    change_json(folder / openclip.CONFIG, "model_cfg.embed_dim", 25)
    with pytest.raises(
        WeightsError, match=r"visual\.proj has the size 64 x 24; a model of its shape has 64 x 25"
    ):
        read_model(folder)
    folder = save_huggingface(ours, tmp_path / "huggingface")
    change_json(folder / "config.json", "vision_config.intermediate_size", 8)
    with pytest.raises(
        WeightsError, match=r"layers\.0\.mlp\.fc1\.weight has the size 256 x 64; .* has 8 x 64"
    ):
        read_model(folder)


def test_a_missing_tensor_and_one_too_many_are_named(ours: Embedder, tmp_path: Path) -> None:
    folder = save_openclip(ours, tmp_path / "model")
    tensors = load_file(folder / openclip.WEIGHTS[0])
    save_file(tensors | {"visual.ls.gamma": torch.ones(3)}, folder / openclip.WEIGHTS[0])
    with pytest.raises(WeightsError, match=r"has the tensor visual\.ls\.gamma, which has no place"):
        read_model(folder)
    del tensors["ln_final.bias"]
    save_file(tensors, folder / openclip.WEIGHTS[0])
    with pytest.raises(WeightsError, match=r"lacks the tensor ln_final\.bias"):
        read_model(folder)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_safetensors_file_is_one_line(
    share: float, ours: Embedder, tmp_path: Path
) -> None:
    path = save_openclip(ours, tmp_path / "model") / openclip.WEIGHTS[0]
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(WeightsError, match="is not a whole safetensors file") as error:
        read_model(path.parent)
    assert len(error.value.message.splitlines()) == 1


@pytest.mark.parametrize("name", ["weights.pt", "weights.bin"])
@pytest.mark.parametrize(
    "contents",
    [
        b"eggs, and a list of things\n",
        b"",
        b"PK\x03\x04 not really a zip",
        b"\x80\x02}q\x00",
        pickle.dumps([1, 2]),
    ],
)
def test_a_file_that_holds_no_tensors_is_named(contents: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(WeightsError) as error:
        read_model(tmp_path / name)
    assert f"{name} is n" in error.value.message  # neither of both kinds, or not the whole of one
    assert "torch" in error.value.message
    assert len(str(error.value).splitlines()) <= 3


def test_another_architecture_is_named(tmp_path: Path) -> None:
    save_file({"encoder.weight": torch.ones(2)}, tmp_path / "bert.safetensors")
    with pytest.raises(WeightsError, match=r"it has encoder\.weight and no visual\.conv1\.weight"):
        read_model(tmp_path / "bert.safetensors")
    names = ("visual.conv1.weight", "visual.layer1.0.conv1.weight", "logit_scale")
    torch.save({name: torch.ones(1) for name in names}, tmp_path / "RN50.pt")
    with pytest.raises(WeightsError, match="a residual network"):
        read_model(tmp_path / "RN50.pt")


class Code:
    """Writes a file when it is unpickled as pickle does it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_a_pickle_with_code_is_refused_with_the_reason_and_does_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    torch.save({"visual.conv1.weight": torch.ones(1), "more": Code(ran)}, tmp_path / "weights.pt")
    with pytest.raises(WeightsError, match=r"is a pickle with code: it asks for \w+\.mkdir"):
        read_model(tmp_path / "weights.pt")
    assert not ran.exists()
    torch.load(tmp_path / "weights.pt", weights_only=False)
    assert ran.exists()  # so the code was real


def test_an_archive_with_code_is_refused_with_the_reason_and_does_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with zipfile.ZipFile(tmp_path / "weights.pt", "w") as archive:
        archive.writestr("weights/constants.pkl", pickle.dumps(()))
        archive.writestr("weights/data.pkl", pickle.dumps({"more": Code(ran)}, protocol=2))
    with pytest.raises(WeightsError, match="is a TorchScript archive"):
        read_model(tmp_path / "weights.pt")
    assert not ran.exists()


def test_a_tokenizer_that_does_not_fit_the_weights_is_named_with_both_sizes(
    ours: Embedder, tmp_path: Path
) -> None:
    folder = save_huggingface(ours, tmp_path / "model")
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    tokenizer = {"model": model, "added_tokens": [{"content": "<s>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        WeightsError, match=r"tokenizer\.json has 3 tokens, and the weights know 49,408"
    ):
        read_model(folder)
    model["vocab"] = {str(at): at for at in range(49_407)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(WeightsError, match="is another tokenizer than CLIP's own"):
        read_model(folder)


# The hub.


def test_no_more_is_downloaded_than_is_needed() -> None:
    laion = [
        "README.md",
        "config.json",
        "merges.txt",
        "open_clip_config.json",
        "open_clip_pytorch_model.bin",
    ]
    laion += ["open_clip_model.safetensors", "pytorch_model.bin", "tokenizer.json", "vocab.json"]
    assert choose_files(laion) == [
        "open_clip_config.json",
        "open_clip_model.safetensors",
        "tokenizer.json",
    ]
    openais = [
        "config.json",
        "flax_model.msgpack",
        "preprocessor_config.json",
        "pytorch_model.bin",
        "tf_model.h5",
    ]
    assert choose_files(openais) == ["config.json", "preprocessor_config.json", "pytorch_model.bin"]
    shards = [f"model-0000{at}-of-00002.safetensors" for at in (1, 2)]
    found = choose_files(
        [*shards, "model.safetensors.index.json", "config.json", "pytorch_model.bin"]
    )
    assert found == ["config.json", *shards, "model.safetensors.index.json"]


def test_an_image_is_seen_as_the_published_model_wants_it(ours: Embedder, tmp_path: Path) -> None:
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    folder = save_openclip(ours, tmp_path / "model")
    plain = load_torch(folder).encode_image([Image.fromarray(noise)])
    np.testing.assert_array_equal(plain, ours.encode_image([Image.fromarray(noise)]))
    change_json(folder / openclip.CONFIG, "preprocess_cfg.resize_mode", "squash")
    assert np.abs(plain - load_torch(folder).encode_image([Image.fromarray(noise)])).max() > 1e-3


def bomb(path: Path, kind: str, tensors: dict[str, Tensor]) -> None:
    """A small file that would take a gigabyte or more."""
    if kind == "repeated":  # one value, as a tensor of any size
        tensors = {**tensors, "token_embedding.weight": torch.zeros(1).expand(2**28, 8)}
        torch.save(tensors, path)
        return
    torch.save(tensors, path)
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    top = next(iter(members)).partition("/")[0]
    members[f"{top}/data/0"] = bytes(2**29)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


@pytest.mark.parametrize(("kind", "why"), [("packed", "unpack to"), ("repeated", "would take")])
def test_a_small_file_of_weights_does_not_fill_memory(
    ours: Embedder, tmp_path: Path, kind: str, why: str
) -> None:
    bomb(tmp_path / "x.pt", kind, openai.LAYOUT.to_theirs(ours.model.state_dict()))
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match=why):
            read_model(tmp_path / "x.pt")
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()


def test_more_blocks_than_tensors_are_refused_before_they_are_built(
    ours: Embedder, tmp_path: Path
) -> None:
    folder = save_own(ours, tmp_path / "model")
    change_json(folder / "config.json", "model.image_layers", 10**5)
    with pytest.raises(LapclipError, match=r"100,\d+ blocks"):
        load_torch(folder)
