"""lapclip.json: what a program has to know to use exported towers. tokenizer.json beside it holds the tokens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import nn

from lapclip import __version__
from lapclip.data.pixels import View
from lapclip.data.tokenizers import Tokenizer, load_tokenizer, save_tokenizer
from lapclip.data.tokenizers.pretrained_tokenizer import ForeignTokenizer
from lapclip.embedder import Embedder
from lapclip.errors import WeightsError
from lapclip.exporting.tokenizer_files import others_tokenizer
from lapclip.weights.published_tokenizer import OURS
from lapclip.weights.recognise import DESCRIPTION

TOKENIZER, EXAMPLES = "tokenizer.json", "examples.json"


def describe(embedder: Embedder, to: str, towers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What lapclip.json says, but for the result of the check."""
    shape, tokenizer, view = embedder.model.shape, embedder.tokenizer, embedder.view
    return {
        "format": to,
        "written_by": f"lapclip {__version__}",
        "made_from": digest_of(embedder.model),
        "model": shape.name,
        "embedding": shape.embedding,
        "logit_scale": float(embedder.model.logit_scale.detach().exp()),
        "towers": towers,
        "preprocessing": {
            "side": view.side,
            "resized": view.resized,
            "resize": view.resize,
            "interpolation": view.interpolation,
            "colours": view.colours,
            "mean": [float(number) for number in shape.pixel_mean.split()],
            "deviation": [float(number) for number in shape.pixel_std.split()],
            "scaled_by": "the image tower itself: give it 0 to 255",
        },
        "tokenizer": {
            "file": TOKENIZER,
            "longest": shape.context,
            "padding": tokenizer.padding,
            "start": tokenizer.start,
            "end": tokenizer.end,
        },
    }


def digest_of(module: nn.Module) -> str:
    """Tells whether weights are the same, by their names, sizes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().float().numpy().tobytes())
    return digest.hexdigest()[:32]


def write_description(folder: Path, about: dict[str, Any]) -> None:
    (folder / DESCRIPTION).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8", newline="\n")


def write_tokenizers(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """The tokenizer as others read it and, where that says less, as we do. Returns what theirs cannot express."""
    theirs, limits = others_tokenizer(tokenizer)
    theirs.save(str(folder / TOKENIZER), pretty=False)
    if not isinstance(tokenizer, ForeignTokenizer):
        save_tokenizer(tokenizer, folder / OURS)
    return [f"tokenizer.json cannot express {limit}: captions without it give the same tokens." for limit in limits]


def read_description(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        return {**about, "towers": dict(about["towers"]), "preprocessing": dict(about["preprocessing"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{folder / DESCRIPTION} cannot be read: {error}.", hint="lapclip export again") from None


def read_view(about: dict[str, Any]) -> View:
    """How the exported model sees images."""
    seen = about["preprocessing"]
    share = seen["side"] / seen["resized"]
    return View(seen["side"], seen["interpolation"], seen["resize"], share, seen["colours"])


def read_tokenizer(folder: Path, about: dict[str, Any]) -> Tokenizer:
    own = load_tokenizer(folder / OURS)
    if own is not None:
        return own
    try:
        description = json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{folder / TOKENIZER} cannot be read: {error}.", hint="lapclip export again") from None
    return ForeignTokenizer(description, about["tokenizer"]["padding"])
