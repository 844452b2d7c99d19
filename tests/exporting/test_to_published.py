"""Our models as others' folders: to the last bit there and back, and as transformers itself loads them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError

import lapclip
from lapclip.commands.evaluate import evaluate
from lapclip.commands.evaluation_data import EvaluationRequest
from lapclip.commands.export import export
from lapclip.data.dataset import Pairs
from lapclip.data.tokenizers import (
    BytePairTokenizer,
    Tokenizer,
    clip_tokenizer,
    count_words,
    learn_bpe,
)
from lapclip.embedder import Embedder, load_torch
from lapclip.errors import ConfigError, WeightsError
from lapclip.exporting import CheckPairs, Job, Written, find_format
from lapclip.exporting.export_folder import written_whole
from lapclip.model.shapes import SHAPES
from lapclip.weights import openclip
from lapclip.weights.read_model import read_model

from ..conftest import lapclip as command
from ..weights.made import CAPTIONS, SHAPE, SIGLIP, characters, embedder, save_own, siglip_tokenizer


def learnt() -> BytePairTokenizer:
    return learn_bpe(count_words(CAPTIONS * 3), 700)


TOKENIZERS = {"clip": clip_tokenizer, "learnt": learnt, "characters": characters}
FORMATS = ("openclip", "huggingface")
NO_PAIRS = Pairs(np.zeros((0, 32, 32, 3), np.uint8), [])


def write(ours: Embedder, to: str, out: Path, *, force: bool = False) -> Written:
    """What `lapclip export` does but for the check, which the command's own test has."""
    format = find_format(to)
    format.check_model(ours, out)
    with written_whole(out, force=force) as folder:
        return format.write(Job(ours, folder, CheckPairs(NO_PAIRS, NO_PAIRS, "nothing")))


@pytest.mark.parametrize("kind", ["siglip", "siglip2"])
@pytest.mark.parametrize("to", FORMATS)
def test_a_siglip_goes_there_and_back_to_the_last_bit(
    to: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = embedder(SIGLIP, siglip_tokenizer(kind))
    if to == "openclip":
        with pytest.raises(WeightsError, match="timm"):
            write(ours, to, tmp_path / "there")
        monkeypatch.setitem(openclip.TIMM_SIZES, "base", (32, 2, 2, 48))
        monkeypatch.setitem(openclip.TIMM_TOWERS, "base", ((8, 33),))
    notes = write(ours, to, tmp_path / "there").notes
    shape, tensors, tokenizer, _ = read_model(tmp_path / "there")
    # timm's base tower has another GELU, which is said.
    changed = {"activation": "gelu", "text_activation": "gelu_tanh"} if to == "openclip" else {}
    assert shape == replace(ours.model.shape, **changed)
    assert any("GELU" in note for note in notes) == bool(changed)
    assert tokenizer.to_dict() == ours.tokenizer.to_dict()
    assert all(
        torch.equal(tensors[name], tensor) for name, tensor in ours.model.state_dict().items()
    )


@pytest.mark.parametrize("kind", ["siglip", "siglip2"])
def test_transformers_loads_a_siglip_with_its_tokenizer(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = embedder(SIGLIP, siglip_tokenizer(kind))
    write(ours, "huggingface", tmp_path / "there")
    model = transformers.SiglipModel.from_pretrained(tmp_path / "there").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "there")
    captions = [*CAPTIONS, "", "x_y  &"]
    tokens = tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt")[
        "input_ids"
    ]
    np.testing.assert_array_equal(tokens.numpy(), ours.tokenizer.batch(captions, ours.context))
    with torch.inference_mode():
        text = torch.nn.functional.normalize(
            model.get_text_features(input_ids=tokens).pooler_output, dim=-1
        )
    np.testing.assert_allclose(text.numpy(), ours.encode_text(captions), atol=1e-5)
    assert (model.logit_scale.exp().item(), model.logit_bias.item()) == pytest.approx(
        tuple(ours.logits())
    )


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("to", FORMATS)
def test_there_and_back_is_the_same_model_to_the_last_bit(
    to: str, kind: str, tmp_path: Path
) -> None:
    shape = replace(SHAPE, pixel_mean="0.5 0.5 0.5", interpolation="bilinear", resize="squash")
    ours = embedder(shape, TOKENIZERS[kind]())
    write(ours, to, tmp_path / "there")
    shape, tensors, tokenizer, _ = read_model(tmp_path / "there")
    assert shape == ours.model.shape
    assert tokenizer.to_dict() == ours.tokenizer.to_dict()
    assert all(
        torch.equal(tensors[name], tensor) for name, tensor in ours.model.state_dict().items()
    )
    again = lapclip.load(tmp_path / "there")
    np.testing.assert_array_equal(again.encode_text(CAPTIONS), ours.encode_text(CAPTIONS))
    assert again.fingerprint() == ours.fingerprint()


@pytest.mark.parametrize("to", FORMATS)
def test_a_learnt_bias_goes_there_and_back(to: str, tmp_path: Path) -> None:
    ours = embedder(replace(SHAPE, logit_bias=True), characters())
    assert ours.model.logit_bias is not None
    bias = ours.model.logit_bias.item()
    notes = write(ours, to, tmp_path / "there").notes
    assert any("logit_bias" in note for note in notes) == (
        to == "huggingface"
    )  # a CLIPModel passes over it
    assert load_torch(tmp_path / "there").fingerprint() == ours.fingerprint()
    if to == "openclip":
        config = json.loads((tmp_path / "there" / "open_clip_config.json").read_text())
        assert config["model_cfg"]["init_logit_bias"] == bias
    else:
        transformers = pytest.importorskip("transformers")
        model = transformers.CLIPModel.from_pretrained(tmp_path / "there").eval()
        assert model.config.logit_bias == bias
        pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            theirs = model.get_image_features(pixel_values=pixels)
            theirs = getattr(theirs, "pooler_output", theirs)
            images = ours.model.encode_image(pixels)
        np.testing.assert_allclose(
            torch.nn.functional.normalize(theirs, dim=-1).numpy(), images.numpy(), atol=1e-5
        )


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_transformers_loads_what_we_write_and_embeds_the_same(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer: Tokenizer = TOKENIZERS[kind]()
    ours = embedder(SHAPE, tokenizer)
    write(ours, "huggingface", tmp_path / "there")
    model = transformers.CLIPModel.from_pretrained(tmp_path / "there").eval()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "there")
    rows = theirs(CAPTIONS, padding="max_length", truncation=True, return_tensors="pt")
    for caption, row in zip(CAPTIONS, rows["input_ids"].tolist(), strict=True):
        tokens = tokenizer.encode(caption, SHAPE.context)
        assert row[: len(tokens)] == tokens, caption
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = model(
            input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], pixel_values=pixels
        )
        images = ours.model.encode_image(pixels)
    np.testing.assert_allclose(found.text_embeds.numpy(), ours.encode_text(CAPTIONS), atol=1e-5)
    np.testing.assert_allclose(found.image_embeds.numpy(), images.numpy(), atol=1e-5)


def test_transformers_sees_images_as_we_do(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from lapclip.data.pixels import View, middle_square, normalise

    shape = replace(SHAPE, crop_share=32 / 36, interpolation="bilinear", pixel_mean="0.5 0.4 0.3")
    write(embedder(shape), "huggingface", tmp_path / "there")
    processor = transformers.CLIPImageProcessorPil.from_pretrained(tmp_path / "there")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 131, 3), dtype=np.uint8))
    theirs = torch.as_tensor(np.asarray(processor(image)["pixel_values"][0]))
    ours = normalise(torch.from_numpy(middle_square(image, View.of(shape)))[None], shape)[0]
    assert (
        theirs - ours
    ).abs().max() <= 1.01 / 255 / 0.26  # a step of 256, as torch and Pillow round differently


def test_transformers_own_model_is_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.CLIPConfig(
        text_config=sizes,
        vision_config=sizes | {"image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    torch.manual_seed(0)
    model = transformers.CLIPModel(config).eval()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="3MB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    ours = load_torch(tmp_path / "theirs")
    tokens = torch.from_numpy(ours.tokenizer.batch(CAPTIONS, 77))
    pixels = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        found = model(input_ids=tokens, pixel_values=pixels)
        images = ours.model.encode_image(pixels)
    np.testing.assert_allclose(ours.encode_text(CAPTIONS), found.text_embeds.numpy(), atol=1e-5)
    np.testing.assert_allclose(images.numpy(), found.image_embeds.numpy(), atol=1e-5)


def test_what_cannot_be_expressed_is_said(tmp_path: Path) -> None:
    ours = embedder(replace(SHAPE, crop_share=0.5), characters())
    notes = write(ours, "openclip", tmp_path / "there").notes
    assert any("32 pixels out of 64" in note for note in notes)
    assert any("characters" in note for note in notes)
    readme = (tmp_path / "there" / "README.md").read_text()
    assert all(note in readme for note in notes)


def test_a_tower_of_convolutions_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    shape = replace(
        SHAPES["photos"], vocabulary=100, image_width=4, image_layers=4, text_width=8, text_heads=1
    )
    save_own(embedder(shape, characters()), tmp_path / "own")
    with pytest.raises(WeightsError, match=r"convolutions.*openclip"):
        export(str(tmp_path / "own"), "openclip", tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_nothing_is_written_over_something_else(tmp_path: Path) -> None:
    ours, out = embedder(SHAPE, characters()), tmp_path / "there"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    for force in (False, True):
        with pytest.raises(ConfigError, match="was not written by lapclip"):
            write(ours, "openclip", out, force=force)
    assert (out / "thesis.txt").read_text() == "years of work"
    (out / "thesis.txt").unlink()
    write(ours, "openclip", out)
    with pytest.raises(WeightsError, match="holds an earlier export"):
        write(ours, "huggingface", out)
    write(ours, "huggingface", out, force=True)
    assert not (out / "open_clip_config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("to", FORMATS)
def test_files_of_the_user_in_an_export_stay(to: str, tmp_path: Path) -> None:
    ours, out = embedder(SHAPE, characters()), tmp_path / "there"
    write(ours, to, out)
    (out / "sub").mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (out / name).write_text("my own")
    before = sorted(out.iterdir())
    with pytest.raises(WeightsError, match=r"a\.txt, b\.txt, c\.txt, \.\.\.") as refused:
        write(ours, to, out, force=True)
    assert refused.value.hint == "--out NEW_FOLDER"
    assert sorted(out.iterdir()) == before


def test_an_export_is_replaced_through_a_link(tmp_path: Path) -> None:
    ours, out, link = embedder(SHAPE, characters()), tmp_path / "there", tmp_path / "link"
    write(ours, "openclip", out)
    try:
        link.symlink_to(out, target_is_directory=True)
    except OSError:
        pytest.skip("links are not allowed here")
    write(ours, "huggingface", link, force=True)
    assert link.is_symlink()
    assert not (out / "open_clip_config.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]


def test_the_command_exports_a_run_and_evaluates_what_it_wrote(trained: Path, here: Path) -> None:
    done = command("export", str(trained), "--to", "openclip", "--out", "mine", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["format"] == "openclip"
    assert "mine/open_clip_model.safetensors" in [Path(path).as_posix() for path in result["files"]]
    wanted = EvaluationRequest(
        "mine", "scenes", split="val", device="cpu", settings=("data.train_pairs=64",)
    )
    assert evaluate(wanted)["evaluation"]["candidates"] > 0


FULL_DISKS = (
    OSError(28, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
)


@pytest.mark.parametrize("error", FULL_DISKS)
@pytest.mark.parametrize("to", FORMATS)
def test_a_full_disk_leaves_nothing_and_says_what_to_do(
    to: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(WeightsError, match="No space left on device") as told:
        write(embedder(SHAPE, characters()), to, tmp_path / "there")
    assert "--out" in told.value.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other rights")
def test_whoever_may_read_the_folder_may_read_the_weights(tmp_path: Path) -> None:
    write(embedder(SHAPE, characters()), "openclip", tmp_path / "there")
    [weights] = (tmp_path / "there").glob("*.safetensors")
    assert weights.stat().st_mode & 0o666 == (tmp_path / "there").stat().st_mode & 0o666
