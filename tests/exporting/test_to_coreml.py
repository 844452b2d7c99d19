"""Core ML packages: converted anywhere, looked into anywhere, run on a Mac."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lapclip.commands.export import write_and_check
from lapclip.data.dataset import Pairs
from lapclip.errors import WeightsError
from lapclip.exporting import CheckPairs, Job, find_format
from lapclip.exporting import to_coreml as coreml
from lapclip.exporting.check import cosines

from ..weights.made import CAPTIONS, SHAPE, characters, embedder

pytest.importorskip("coremltools", reason="needs the extra coreml")

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
PAIRS = Pairs(IMAGES, [(caption,) for caption in CAPTIONS])


@pytest.mark.parametrize("to", ["coreml", "coreml-int8"])
def test_packages_have_the_form_and_the_weights_that_were_meant(to: str, tmp_path: Path) -> None:
    ours = embedder(replace(SHAPE, text_heads=2), characters())
    result = write_and_check(
        find_format(to), Job(ours, tmp_path, CheckPairs(PAIRS, PAIRS, "noise"))
    )
    small = to == "coreml-int8"
    for tower, found in result["structure"].items():
        assert found["weights"] >= 6, tower
        assert found["found"] == found["numbers"] >= 0.9 * found["large"], tower
    assert result["weights_bytes"] < (0.5 if small else 0.7) * result["weights_bytes_before"]
    about = json.loads((tmp_path / "lapclip.json").read_text())
    rows = json.loads((tmp_path / "examples.json").read_text(encoding="utf-8"))
    assert rows[0]["symbols"] == ours.tokenizer.encode(CAPTIONS[0], ours.context)
    assert about["towers"]["text"]["shape"] == [1, ours.context]
    assert (tmp_path / "example.swift").exists()
    if coreml.can_predict():
        there = coreml.open_packages(tmp_path, ours)
        assert cosines(ours.embed_pixels(IMAGES), there.embed_pixels(IMAGES))["mean"] > 0.995
    else:
        assert about["check"] == coreml.NOT_CHECKED
        assert result["recall_after"] is None
        assert coreml.NOT_CHECKED in (tmp_path / "README.md").read_text()
    ours.context += 1
    with pytest.raises(WeightsError, match="another form"):
        coreml.verify(tmp_path, ours, small=small)
    ours.context -= 1
    # Another model of the same shape is noticed: its weights are not those of the package.
    for parameter in ours.model.parameters():
        parameter.data.add_(0.5)
    with pytest.raises(WeightsError, match="numbers of the image tower 0 are in its package"):
        coreml.verify(tmp_path, ours, small=small)
