"""lapclip.json: what a program has to know to use exported towers. `lapclip.embedder` reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lapclip import __version__
from lapclip.embedder import Embedder
from lapclip.exporting.tokenizer_files import TOKENIZER
from lapclip.weights.recognise import DESCRIPTION


def describe(embedder: Embedder, to: str, towers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What lapclip.json says, but for the result of the check."""
    model, tokenizer, view = embedder.model, embedder.tokenizer, embedder.view
    shape, bias = model.shape, model.logit_bias
    return {
        "format": to,
        "written_by": f"lapclip {__version__}",
        "made_from": embedder.fingerprint(),
        "model": shape.name,
        "embedding": shape.embedding,
        "logit_scale": float(model.logit_scale.detach().exp()),
        **({} if bias is None else {"logit_bias": float(bias.detach())}),
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


def write_description(folder: Path, about: dict[str, Any]) -> None:
    (folder / DESCRIPTION).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8", newline="\n")
