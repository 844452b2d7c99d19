"""What can be said of Core ML packages without running them: their inputs and outputs, and that the weights arrived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from lapclip.embedder import Embedder
from lapclip.errors import WeightsError
from lapclip.exporting.coreml import ENOUGH, INPUTS, coremltools, quietly
from lapclip.exporting.onnx_graph import OUTPUT

CLOSE = {False: 1e-3, True: 1.01 / 127}
"""How much a weight may differ, as a share of the largest in its row: float16 keeps 11 bits, a byte 8."""

LEAST = 0.9
"""The share of a tower's large weights, by their numbers, that its package must have room for."""


def verify(folder: Path, embedder: Embedder, *, small: bool) -> dict[str, Any]:
    """Raises where a package is not what was meant; else how many of its numbers are the tower's own."""
    ct = coremltools()
    found = {}
    for tower, module in (("image", embedder.model.image), ("text", embedder.model.text)):
        made = ct.models.MLModel(str(folder / f"{tower}.mlpackage"), skip_model_load=True)
        _verify_interface(made.get_spec().description, tower, embedder)
        found[tower] = _share_found(module, _weights(made), CLOSE[small])
        numbers, large = found[tower]["numbers"], found[tower]["large"]
        if large and (not found[tower]["found"] or numbers < LEAST * large):
            raise WeightsError(
                f"Of {large:,} numbers of the {tower} tower {found[tower]['found']:,} are in its package, which has "
                f"{numbers:,}. Nothing was kept."
            )
    return found


def said_of(structure: dict[str, Any]) -> list[str]:
    """What was found again, for people; a converter may fold a norm into a weight, which is then another."""
    return [
        f"{found['found']:,} of the {found['numbers']:,} numbers in the {tower} package are the model's own, "
        f"which has {found['large']:,} such"
        for tower, found in structure.items()
    ]


def _verify_interface(description: Any, tower: str, embedder: Embedder) -> None:
    (given,), (result,) = description.input, description.output
    side = embedder.view.side
    if tower == "image":
        right = (given.type.imageType.width, given.type.imageType.height) == (side, side)
    else:
        right = list(given.type.multiArrayType.shape) == [1, embedder.context]
    shape = list(result.type.multiArrayType.shape)
    if given.name != INPUTS[tower] or result.name != OUTPUT or not right or shape not in ([], [1, embedder.embedding]):
        raise WeightsError(f"The {tower} package came out with another form than asked for. Nothing was kept.")


def _weights(made: Any) -> list[np.ndarray]:
    """The matrices of a package, as the numbers that it computes with."""
    from coremltools.optimize.coreml import (  # pyright: ignore[reportMissingImports]
        decompress_weights,
        get_weights_metadata,
    )

    with quietly():
        found = get_weights_metadata(decompress_weights(made), ENOUGH)
    return [np.asarray(one.val, dtype=np.float32) for one in found.values()]


def _share_found(tower: nn.Module, weights: list[np.ndarray], close: float) -> dict[str, Any]:
    """Which large weights of the package are one of the tower's, or some rows of one, as it is or transposed."""
    known = [part.detach().float().numpy() for part in tower.parameters() if part.numel() >= ENOUGH]
    rows = [matrix for part in known for matrix in _readings(part)]
    numbers = 0
    for weight in weights:
        if any(_holds(matrix, reading, close) for reading in _readings(weight) for matrix in rows):
            numbers += weight.size
    return {
        "weights": len(weights),
        "numbers": int(sum(weight.size for weight in weights)),
        "found": int(numbers),
        "large": int(sum(part.size for part in known)),
    }


def _readings(part: np.ndarray) -> list[np.ndarray]:
    flat = part.reshape(len(part), -1) if part.ndim > 1 else part[None]
    return [flat, flat.T]


def _holds(matrix: np.ndarray, part: np.ndarray, close: float) -> bool:
    """Whether a matrix has these rows, one after the other."""
    if matrix.shape[1] != part.shape[1] or len(part) > len(matrix):
        return False
    room = close * np.abs(matrix).max() + 1e-7
    for first in np.flatnonzero((np.abs(matrix - part[0]) <= room).all(axis=1)):
        if first + len(part) <= len(matrix) and (np.abs(matrix[first : first + len(part)] - part) <= room).all():
            return True
    return False
