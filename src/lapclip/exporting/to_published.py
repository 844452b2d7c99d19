"""`--to huggingface` and `--to openclip`: folders of CLIP's or SigLIP's own towers that other libraries load."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from lapclip.errors import WeightsError
from lapclip.exporting import ExportFormat, Job, Written, register
from lapclip.exporting.export_folder import MARK, README, write_json
from lapclip.weights import OWN_TOKENIZER, PREPROCESSOR

if TYPE_CHECKING:
    from torch import Tensor

    from lapclip.embedder import Embedder

PROFILES = "Colour profiles of images are converted to sRGB by lapclip; others take the numbers as they are."


class PublishedFormat(ExportFormat):
    """Weights, preprocessing and tokenizer under the names of another library."""

    engine = "what was written"
    use: str
    """Lines of Python that load it."""

    def check_model(self, embedder: Embedder, path: Path) -> None:
        model = embedder.model
        if networks := model.networks():
            names = " and ".join(spec.name for spec in networks.values())
            raise WeightsError(
                f"{path} is built on {names}, for which {self.name} has no place: it knows CLIP's own towers.",
                hint="a model with CLIP's towers, such as one that was trained --from published weights",
            )
        if model.shape.image_tower != "transformer":
            raise WeightsError(
                f"{path} has an image tower of {model.shape.image_tower}, for which {self.name} has no place: it "
                "knows CLIP's own.",
                hint="a model with a vision transformer, such as lapclip train --set model.name=mini",
            )

    def write(self, job: Job) -> Written:
        from lapclip.data.tokenizers import save_tokenizer

        embedder, folder = job.embedder, job.folder
        job.status(f"writing for {self.name}")
        notes = self.write_files(embedder, folder) + [PROFILES] * (
            embedder.model.shape.colours == "srgb"
        )
        if not has_clips_tokenizer(embedder):
            save_tokenizer(embedder.tokenizer, folder / OWN_TOKENIZER)
        readme = self._readme(job.title, self.use_of(embedder), notes)
        (folder / README).write_text(readme, encoding="utf-8", newline="\n")
        check_read_back(embedder, folder)
        return Written(sorted(folder.glob("*.safetensors")), notes=notes)

    @abstractmethod
    def write_files(self, embedder: Embedder, folder: Path) -> list[str]:
        """Write configuration, weights and tokenizer; returns what they cannot express."""

    def use_of(self, embedder: Embedder) -> str:
        """Lines of Python that load this model."""
        return self.use

    def open(self, job: Job) -> Embedder:
        from lapclip.embedder import load_torch

        return load_torch(job.folder)

    def _readme(self, title: str, use: str, notes: list[str]) -> str:
        known = "".join(f"- {note}\n" for note in notes)
        differences = f"\nWhat this form cannot express:\n\n{known}" if known else ""
        return f"# {title}, {self.name}\n\n{MARK}\n\n```python\n{use}\n```\n{differences}"


def check_read_back(embedder: Embedder, folder: Path) -> None:
    """What was written is what was meant, to the last bit."""
    import torch

    from lapclip.weights.read_model import read_model

    tensors, again = embedder.model.state_dict(), read_model(folder).tensors
    if set(again) != set(tensors) or not all(
        torch.equal(again[name], tensors[name].cpu()) for name in tensors
    ):
        name = embedder.model.shape.name
        raise WeightsError(
            f"What was written for {name} reads back as something else. Nothing was kept."
        )


def is_siglip(embedder: Embedder) -> bool:
    """Whether a model has SigLIP's towers, and so SigLIP's tokenizer."""
    return embedder.model.shape.architecture == "siglip"


def has_clips_tokenizer(embedder: Embedder) -> bool:
    """Whether captions are read by CLIP's own tokenizer, which every library has."""
    from lapclip.data.tokenizers import BytePairTokenizer

    return isinstance(embedder.tokenizer, BytePairTokenizer) and embedder.tokenizer.own


def learnt_bias(embedder: Embedder) -> float | None:
    """The bias that a sigmoid loss has learnt beside the logit scale; None where there is none."""
    bias = embedder.model.state_dict().get("logit_bias")
    return None if bias is None else float(bias)


def write_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """Weights as other libraries load them. A full disk is an OSError, and who may read the folder may read them."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its own name for a full disk
        raise OSError(f"{error}") from error
    path.chmod(path.parent.stat().st_mode & 0o666)


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
        write_json(
            folder / huggingface.CONFIG,
            huggingface.config_of(shape, embedder.tokenizer.start, bias),
        )
        write_json(
            folder / PREPROCESSOR,
            huggingface.preprocessor_of(shape, embedder.view.resized),
        )
        tensors = huggingface.LAYOUTS[shape.architecture].to_theirs(embedder.model.state_dict())
        write_weights(tensors, folder / huggingface.WEIGHTS[0])
        notes = [
            f"The tokenizer's files cannot express {limit}: captions without it give the same ids."
            for limit in limits
        ]
        if bias is not None and not is_siglip(embedder):
            notes.append(
                f"CLIPModel passes over logit_bias ({bias:.4g}), which the loss learnt: similarities and the order of "
                "results do not depend on it, probabilities of pairs do."
            )
        return notes


register(HuggingFace("huggingface"))


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
                notes.append(
                    "OpenCLIP mends captions and removes doubled spaces first; lapclip's characters do not."
                )
        config = openclip.config_of(
            shape, tokenizer_here=own_tokenizer, logit_bias=learnt_bias(embedder)
        )
        write_json(folder / openclip.CONFIG, config)
        tensors = openai.LAYOUT.to_theirs(embedder.model.state_dict())
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
        notes.append(
            "OpenCLIP mends captions and unescapes HTML first, and takes an underscore for a space."
        )
    if openclip.timm_activation(openclip.timm_name(shape) or "") != shape.activation:
        notes.append(
            f"timm's image tower of this size has another GELU than {shape.activation}, the one that this model has: "
            "vectors of images differ in the third digit."
        )
    write_tokenizer(tokenizer, folder, shape.context)
    config = openclip.config_of(
        shape,
        tokenizer_here=True,
        cleaning=tokenizer.cleaning,
        logit_bias=learnt_bias(embedder),
    )
    write_json(folder / openclip.CONFIG, config)
    write_weights(
        openclip.SIGLIP_LAYOUT.to_theirs(embedder.model.state_dict()), folder / openclip.WEIGHTS[0]
    )
    return notes


register(OpenClip("openclip"))
