"""`--to huggingface`: a folder that the `CLIPModel` or `SiglipModel` of Hugging Face's transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lapclip.exporting import register
from lapclip.exporting.export_folder import write_json
from lapclip.exporting.published_folder import PublishedFormat, is_siglip, learnt_bias, write_weights

if TYPE_CHECKING:
    from lapclip.embedder import Embedder


class HuggingFace(PublishedFormat):
    """Weights with the names of transformers, `config.json`, `preprocessor_config.json`, and the tokenizer's files."""

    purpose = "for transformers' CLIPModel or SiglipModel"
    use = """\
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

model = CLIPModel.from_pretrained("FOLDER")
preprocess = CLIPImageProcessor.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")"""
    use_siglip = """\
from transformers import AutoTokenizer, SiglipImageProcessor, SiglipModel

model = SiglipModel.from_pretrained("FOLDER")
preprocess = SiglipImageProcessor.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
tokens = tokenizer(["a dog"], padding="max_length", truncation=True, return_tensors="pt").input_ids"""

    def use_of(self, embedder: Embedder) -> str:
        return self.use_siglip if is_siglip(embedder) else self.use

    def write_files(self, embedder: Embedder, folder: Path) -> list[str]:
        from lapclip.exporting.tokenizer_files import write_tokenizer
        from lapclip.weights import huggingface

        shape, bias = embedder.model.shape, learnt_bias(embedder)
        limits = write_tokenizer(embedder.tokenizer, folder, shape.context)
        write_json(folder / huggingface.CONFIG, huggingface.config_of(shape, embedder.tokenizer.start, bias))
        write_json(folder / huggingface.PREPROCESSOR, huggingface.preprocessor_of(shape, embedder.view.resized))
        tensors = huggingface.to_theirs(embedder.model.state_dict(), shape.architecture)
        write_weights(tensors, folder / huggingface.WEIGHTS[0])
        notes = [
            f"The tokenizer's files cannot express {limit}: captions without it give the same ids." for limit in limits
        ]
        if bias is not None and not is_siglip(embedder):
            notes.append(
                f"CLIPModel passes over logit_bias ({bias:.4g}), which the loss learnt: similarities and the order of "
                "results do not depend on it, probabilities of pairs do."
            )
        return notes


register(HuggingFace("huggingface"))
