"""`--to openclip`: a folder that OpenCLIP's `create_model_and_transforms` loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lapclip.errors import WeightsError
from lapclip.exporting import register
from lapclip.exporting.export_folder import write_json
from lapclip.exporting.published_folder import (
    PublishedFormat,
    has_clips_tokenizer,
    is_siglip,
    learnt_bias,
    write_weights,
)

if TYPE_CHECKING:
    from lapclip.embedder import Embedder


class OpenClip(PublishedFormat):
    """Weights with OpenAI's names, and `open_clip_config.json`."""

    purpose = "for open_clip.create_model_and_transforms"
    use = """\
import open_clip

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")"""

    def check_model(self, embedder: Embedder, path: Path) -> None:
        from lapclip.weights.openclip import timm_name

        super().check_model(embedder, path)
        if is_siglip(embedder) and timm_name(embedder.model.shape) is None:
            raise WeightsError(
                f"{path} is a SigLIP with an image tower that timm, from which OpenCLIP takes it, has not.",
                hint="--to huggingface",
            )

    def write_files(self, embedder: Embedder, folder: Path) -> list[str]:
        if is_siglip(embedder):
            return _write_siglip(embedder, folder)
        from lapclip.data.tokenizers import BytePairTokenizer
        from lapclip.exporting.tokenizer_files import write_tokenizer
        from lapclip.weights import openai, openclip

        shape, own_tokenizer = embedder.model.shape, not has_clips_tokenizer(embedder)
        notes = []
        if shape.crop_share != 1:
            notes.append(
                f"OpenCLIP cannot cut {shape.image_size} pixels out of {embedder.view.resized}: it resizes to "
                f"{shape.image_size} at once."
            )
        if own_tokenizer:
            write_tokenizer(embedder.tokenizer, folder, shape.context)
            notes.append("OpenCLIP reads this tokenizer through the package transformers.")
            if not isinstance(embedder.tokenizer, BytePairTokenizer):
                notes.append("OpenCLIP mends captions and removes doubled spaces first; lapclip's characters do not.")
        config = openclip.config_of(shape, tokenizer_here=own_tokenizer, logit_bias=learnt_bias(embedder))
        write_json(folder / openclip.CONFIG, config)
        tensors = openai.to_theirs(embedder.model.state_dict())
        write_weights(tensors, folder / openclip.WEIGHTS[0])
        return notes


def _write_siglip(embedder: Embedder, folder: Path) -> list[str]:
    from lapclip.data.tokenizers import SiglipTokenizer
    from lapclip.exporting.tokenizer_files import write_tokenizer
    from lapclip.weights import openclip

    shape, tokenizer = embedder.model.shape, embedder.tokenizer
    assert isinstance(tokenizer, SiglipTokenizer)
    notes = ["OpenCLIP reads this tokenizer through the package transformers."]
    if tokenizer.cleaning not in openclip.CLEANING.values():
        notes.append("OpenCLIP mends captions and unescapes HTML first, and takes an underscore for a space.")
    if openclip.timm_activation(openclip.timm_name(shape) or "") != shape.activation:
        notes.append(
            f"timm's image tower of this size has another GELU than {shape.activation}, the one that this model has: "
            "vectors of images differ in the third digit."
        )
    write_tokenizer(tokenizer, folder, shape.context)
    config = openclip.siglip_config_of(shape, tokenizer.cleaning, learnt_bias(embedder))
    write_json(folder / openclip.CONFIG, config)
    write_weights(openclip.siglip_to_theirs(embedder.model.state_dict()), folder / openclip.WEIGHTS[0])
    return notes


register(OpenClip("openclip"))
