"""Exported towers, run by ONNX Runtime: the same questions as to a model in torch, without torch's model.

model = open_export("runs/first-run/exported/onnx-int8")
images = model.encode_image(["cat.jpg", "dog.jpg"])
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from lapclip.embedder import Encoder
from lapclip.errors import WeightsError, first_line
from lapclip.exporting.description import read_description, read_tokenizer, read_view
from lapclip.exporting.required_packages import needs


class Session:
    """One ONNX file, ready to run on the CPU."""

    def __init__(self, path: Path, threads: int = 0) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Threads that spin between two calls take the cores from whoever decodes the next images.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # whatever the engine says of a damaged file
            raise WeightsError(f"{path} cannot be run: {first_line(error)}.", hint="lapclip export again") from None
        self._input = self._session.get_inputs()[0].name

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        return np.asarray(self._session.run(None, {self._input: inputs})[0])


class OnnxEmbedder(Encoder):
    """A model that `lapclip export --to onnx` or `onnx-int8` wrote."""

    def __init__(self, folder: Path, about: dict[str, Any], threads: int = 0) -> None:
        super().__init__(
            read_view(about), read_tokenizer(folder, about), about["tokenizer"]["longest"], about["embedding"]
        )
        self.about = about
        self._image = Session(folder / about["towers"]["image"]["file"], threads)
        self._text = Session(folder / about["towers"]["text"]["file"], threads)

    def embed_pixels(self, pixels_BSSC: np.ndarray) -> np.ndarray:
        return self._image(pixels_BSSC)

    def embed_tokens(self, tokens_BL: np.ndarray) -> np.ndarray:
        return self._text(tokens_BL)


def open_export(folder: str | os.PathLike, threads: int = 0) -> OnnxEmbedder:
    """The model in an exported folder. `threads` is for each tower; 0 takes a thread a core."""
    place = Path(folder)
    about = read_description(place)
    if not about["format"].startswith("onnx"):
        raise WeightsError(f"{place} is for {about['format']}, which ONNX Runtime does not read.", hint="--to onnx")
    needs("onnxruntime")
    return OnnxEmbedder(place, about, threads)
