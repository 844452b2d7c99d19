"""`--to openclip`: a folder that OpenCLIP's `create_model_and_transforms` loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lapclip.exporting import register
from lapclip.exporting.export_folder import write_json
from lapclip.exporting.published_folder import PublishedFormat, has_clips_tokenizer, learnt_bias, write_weights

if TYPE_CHECKING:
    from lapclip.embedder import Embedder


class OpenClip(PublishedFormat):
    """Weights with OpenAI's names, and `open_clip_config.json`."""

    purpose = "for open_clip.create_model_and_transforms"
    use = """\
import open_clip

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")"""

    def write_files(self, embedder: Embedder, folder: Path) -> list[str]:
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


register(OpenClip("openclip"))
