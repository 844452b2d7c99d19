"""Small models to read and write: two blocks a tower, CLIP's own tokenizer or one of ours."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from lapclip.config import ModelConfig
from lapclip.data.tokenizers import CharacterTokenizer, Tokenizer, clip_tokenizer
from lapclip.embedder import Embedder
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.weights import PIECES, TOKENIZER, huggingface, openai, openclip, read_model

CAPTIONS = [
    "a red cat on the left, at night.",
    "Two dogs and 13 birds in the snow! It's cold",
    "ein Häuschen",
    "x" * 90,
]
SHAPE = replace(
    SHAPES["tiny"],
    name="vit-64x2-8",
    image_size=32,
    text_heads=1,
    image_heads=1,
    text_width=32,
    text_mlp=100,
    embedding=24,
    vocabulary=49_408,
    context=40,
    activation="quick_gelu",
    colours="stored",
)


def embedder(shape: ModelConfig = SHAPE, tokenizer: Tokenizer | None = None) -> Embedder:
    """A model whose norms and biases are not ones and zeros, which would hide that they were swapped."""
    tokenizer = tokenizer or clip_tokenizer()
    model = CLIP(replace(shape, vocabulary=tokenizer.vocabulary), seed=1).eval()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return Embedder(model, tokenizer, Cpu())


SIGLIP = replace(
    SHAPES["siglip-base-patch16-224"],
    name="siglip-32x2-patch8-33",
    image_size=33,  # a pixel more than the patches have
    patch=8,
    image_width=32,
    image_layers=2,
    image_heads=2,
    image_mlp=48,
    text_width=32,
    text_layers=2,
    text_heads=2,
    text_mlp=48,
    embedding=32,
    vocabulary=420,
    context=16,
)
_FIXTURE = Path(__file__).parents[1] / "fixtures" / "siglip"
VOCABULARIES = {"siglip": _FIXTURE / PIECES, "siglip2": _FIXTURE / TOKENIZER}
"""Small ones of our own, of the kinds that the first SigLIP and SigLIP 2 have, named as in published folders."""


def siglip_tokenizer(kind: str = "siglip") -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(VOCABULARIES[kind], folder)
        return read_model.siglip_tokenizer(Path(folder), SIGLIP.vocabulary)


def characters() -> CharacterTokenizer:
    return CharacterTokenizer("".join(sorted("abcdefghijklmnop ,.'")))


def save_own(model: Embedder, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.description()))
    save_file(model.model.state_dict(), folder / "model.safetensors")
    return folder


def save_openclip(model: Embedder, folder: Path) -> Path:
    folder.mkdir()
    config = openclip.config_of(model.model.shape, tokenizer_here=False)
    (folder / openclip.CONFIG).write_text(json.dumps(config))
    save_file(openai.LAYOUT.to_theirs(model.model.state_dict()), folder / openclip.WEIGHTS[0])
    return folder


def save_huggingface(model: Embedder, folder: Path) -> Path:
    folder.mkdir()
    config = huggingface.config_of(model.model.shape, model.tokenizer.start)
    (folder / huggingface.CONFIG).write_text(json.dumps(config))
    save_file(
        huggingface.LAYOUTS["clip"].to_theirs(model.model.state_dict()),
        folder / huggingface.WEIGHTS[0],
    )
    return folder


def change_json(path: Path, keys: str, value: object) -> None:
    """Set one entry of a JSON file, named with dots."""
    saved = json.loads(path.read_text())
    part = saved
    *sections, name = keys.split(".")
    for section in sections:
        part = part[section]
    part[name] = value
    path.write_text(json.dumps(saved))
