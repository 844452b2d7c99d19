"""What `--to openclip` and `--to huggingface` share: folders of CLIP's own towers that other libraries load."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from lapclip.errors import WeightsError
from lapclip.exporting import ExportFormat, Job, Written
from lapclip.exporting.export_folder import MARK, README
from lapclip.weights import OWN_TOKENIZER

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
        notes = self.write_files(embedder, folder) + [PROFILES] * (embedder.model.shape.colours == "srgb")
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
    if set(again) != set(tensors) or not all(torch.equal(again[name], tensors[name].cpu()) for name in tensors):
        name = embedder.model.shape.name
        raise WeightsError(f"What was written for {name} reads back as something else. Nothing was kept.")


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
