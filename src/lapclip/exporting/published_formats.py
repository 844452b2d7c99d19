"""A model as a folder that OpenCLIP or Hugging Face's `CLIPModel` loads: weights, preprocessing, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lapclip.config import ModelConfig
from lapclip.data.pixels import View
from lapclip.data.tokenizers import BytePairTokenizer, Tokenizer, save_tokenizer
from lapclip.errors import WeightsError
from lapclip.exporting.export_folder import MARK, README, check_free, written_whole
from lapclip.exporting.tokenizer_files import write_tokenizer
from lapclip.weights import huggingface, openai, openclip
from lapclip.weights.published_tokenizer import OURS
from lapclip.weights.read_model import read_model
from lapclip.which_model import which_model

FORMATS = ("openclip", "huggingface")


def export(model: str | None, to: str, out: Path, *, force: bool = False) -> dict[str, Any]:
    """Write a run's model, or any other that can be loaded, as a folder. What is written is read back and compared."""
    check_free(out, force=force)  # before what takes time
    place = which_model(model).path
    shape, tensors, tokenizer, towers = read_model(place)
    if towers:
        names = " and ".join(spec.name for spec in towers.values())
        raise WeightsError(
            f"{place} is built on {names}, for which {to} has no place: it knows CLIP's own towers.",
            hint="a model with CLIP's towers, such as one that was trained --from published weights",
        )
    if shape.image_tower != "transformer":
        raise WeightsError(
            f"{place} has an image tower of {shape.image_tower}, for which {to} has no place: it knows CLIP's own.",
            hint="a model with a vision transformer, such as lapclip train --set model.name=mini",
        )
    profiles = "Colour profiles of images are converted to sRGB by lapclip; others take the numbers as they are."
    with written_whole(out, force=force) as folder:
        write = _write_openclip if to == "openclip" else _write_huggingface
        notes = write(folder, shape, tensors, tokenizer) + [profiles] * (shape.colours == "srgb")
        if not _is_clips(tokenizer):
            save_tokenizer(tokenizer, folder / OURS)
        (folder / README).write_text(_readme(shape, to, notes), encoding="utf-8", newline="\n")
        _check(folder, shape, tensors)
    files = sorted(path for path in out.iterdir())
    total = sum(path.stat().st_size for path in files)
    return {
        "model": str(place),
        "format": to,
        "files": [str(path) for path in files],
        "bytes": total,
        "notes": notes,
    }


def _write_openclip(folder: Path, shape: ModelConfig, tensors: dict[str, Tensor], tokenizer: Tokenizer) -> list[str]:
    notes = []
    if shape.crop_share != 1:
        notes.append(
            f"OpenCLIP cannot cut {shape.image_size} pixels out of {View.of(shape).resized}: it resizes to "
            f"{shape.image_size} at once."
        )
    if not _is_clips(tokenizer):
        write_tokenizer(tokenizer, folder, shape.context)
        notes.append("OpenCLIP reads this tokenizer through the package transformers.")
        if not isinstance(tokenizer, BytePairTokenizer):
            notes.append("OpenCLIP mends captions and removes doubled spaces first; lapclip's characters do not.")
    _write_json(folder / openclip.CONFIG, openclip.config_of(shape, tokenizer_here=not _is_clips(tokenizer)))
    save_file(openai.to_theirs(tensors), folder / openclip.WEIGHTS[0], metadata={"format": "pt"})
    return notes


def _write_huggingface(folder: Path, shape: ModelConfig, tensors: dict[str, Tensor], tokenizer: Tokenizer) -> list[str]:
    limits = write_tokenizer(tokenizer, folder, shape.context)
    _write_json(folder / huggingface.CONFIG, huggingface.config_of(shape, tokenizer.start))
    _write_json(folder / huggingface.PREPROCESSOR, huggingface.preprocessor_of(shape, View.of(shape).resized))
    save_file(huggingface.to_theirs(tensors), folder / huggingface.WEIGHTS[0], metadata={"format": "pt"})
    return [f"The tokenizer's files cannot express {limit}: captions without it give the same ids." for limit in limits]


def _check(folder: Path, shape: ModelConfig, tensors: dict[str, Tensor]) -> None:
    """What was written is what was meant, to the last bit."""
    again = read_model(folder)
    if set(again.tensors) != set(tensors) or not all(
        torch.equal(again.tensors[name], tensors[name]) for name in tensors
    ):
        raise WeightsError(f"What was written for {shape.name} reads back as something else. Nothing was kept.")


def _is_clips(tokenizer: Tokenizer) -> bool:
    return isinstance(tokenizer, BytePairTokenizer) and tokenizer.own


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8", newline="\n")


def _readme(shape: ModelConfig, to: str, notes: list[str]) -> str:
    if to == "openclip":
        use = """import open_clip

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")"""
    else:
        use = """from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

model = CLIPModel.from_pretrained("FOLDER")
preprocess = CLIPImageProcessor.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")"""
    known = "".join(f"- {note}\n" for note in notes)
    differences = f"\nWhat this form cannot express:\n\n{known}" if known else ""
    return f"# {shape.name}\n\n{MARK}\n\n```python\n{use}\n```\n{differences}"
