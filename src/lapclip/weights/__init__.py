"""Models that can be loaded: ours, and published CLIPs and SigLIPs with OpenAI's, OpenCLIP's and Hugging Face's names.

One file a format, each with its table of names, which reading and writing share. Neither library is needed.
Here is what on disk, or by its name, is a model that lapclip reads. No torch: nothing is opened; `read_model` reads it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

WEIGHTS, CONFIG = "model.safetensors", "config.json"
"""The files of our own models."""
OWN_TOKENIZER = "lapclip_tokenizer.json"
"""Written beside exported weights whose tokenizer is not CLIP's own."""
TOKENIZER, MERGES = "tokenizer.json", "merges.txt"
"""Hugging Face's files of a tokenizer, and OpenAI's."""
PIECES = "spiece.model"
"""SentencePiece's file, which the first SigLIP's folders have."""
OPENCLIP_CONFIG = "open_clip_config.json"
OPENCLIP_WEIGHTS = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
)
"""Names of OpenCLIP's file of weights, the best first."""
HUGGINGFACE_WEIGHTS = (WEIGHTS, "pytorch_model.bin")
INDEX = ".index.json"
"""Ending of the list of shards: model.safetensors.index.json."""
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
"""Hugging Face's preprocessing; a `CLIPProcessor` of release 5 writes the second, as `image_processor`."""
DESCRIPTION = "lapclip.json"
"""What a folder holds that `lapclip export` wrote for another engine than torch."""
EXPORT_VERSION = 1  # of lapclip.json
FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
HUB = "hf:"
"""What stands before a name on the Hugging Face hub that is meant as such: hf:org/name."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_model(path: str | os.PathLike) -> bool:
    """Whether a path is a file or a folder that `read_model` would try, the name of a published model, or looks like a
    name on the hub."""
    from lapclip.weights import published_models  # not for a command that only prints its help

    path = Path(path)
    if path.is_dir():
        names = (CONFIG, f"model/{CONFIG}", OPENCLIP_CONFIG)
        return is_exported(path) or any((path / name).exists() for name in names)
    if path.exists():
        return path.suffix in FILES
    return published_models.find(path.as_posix()) is not None or is_hub_name(path.as_posix())


def is_exported(folder: Path) -> bool:
    """Whether a folder holds towers for ONNX Runtime or Core ML."""
    return (folder / DESCRIPTION).is_file()


def is_hub_name(text: str) -> bool:
    """Whether a text may be a name on the hub, an organisation and a model: it says so by `hf:`, or looks like one and
    not like a path, such as runs/mine or something in a folder that is here."""
    from lapclip.runs.folder import RUNS  # not for a command that only prints its help

    if text.startswith(HUB):
        return bool(HUB_NAME.fullmatch(text.removeprefix(HUB)))
    folder = text.partition("/")[0]
    return bool(HUB_NAME.fullmatch(text)) and folder != RUNS.name and not Path(folder).exists()
