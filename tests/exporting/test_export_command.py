"""`lapclip export` from its arguments to its result, on a run, and the registry of formats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lapclip.commands.evaluate import evaluate
from lapclip.commands.evaluation_data import EvaluationRequest
from lapclip.embedder import OnnxEmbedder, load
from lapclip.errors import ConfigError
from lapclip.exporting import find_format, known_formats
from lapclip.exporting.check import MOST_LOST
from lapclip.exporting.export_folder import WRITTEN

from ..conftest import lapclip as command

pytest.importorskip("onnxruntime", reason="needs the extra export")
pytest.importorskip("onnxscript", reason="needs the extra export")


def test_a_run_leaves_as_int8_with_its_loss_measured(trained: Path, here: Path) -> None:
    shutil.copytree(trained, here / "runs" / "mine")
    done = command("export", "mine", "--to", "onnx-int8", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    names = {Path(path).name for path in result["files"]}
    assert names >= {
        "image.onnx",
        "text.onnx",
        "lapclip.json",
        "tokenizer.json",
        "README.md",
        "example.py",
    }
    folder = Path("runs/mine/exported/onnx-int8")
    assert names <= WRITTEN
    assert {Path(path).parent for path in result["files"]} == {folder}
    assert result["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert result["weights_bytes"] < result["weights_bytes_before"] / 3
    assert result["ms_before"] > 0
    assert result["ms_after"] > 0
    assert {(row["tower"], row["batch"]) for row in result["latency"]} == {
        (tower, batch) for tower in ("image", "text") for batch in (1, 32)
    }
    low, high = result["intervals"]["recall_after"]
    assert low <= result["recall_after"] <= high
    assert result["passed"] == (
        result["recall_after"] >= result["recall_before"] - MOST_LOST
        and min(one["mean"] for one in result["cosine"].values()) >= 0.995
    )
    assert (
        json.loads((folder / "lapclip.json").read_text())["check"]["recall_after"]
        == result["recall_after"]
    )

    # What the account says of recall is what evaluating the folder itself gives.
    wanted = EvaluationRequest(
        str(folder), "scenes", split="test", settings=("data.train_pairs=64",)
    )
    found = evaluate(wanted)["evaluation"]
    assert found["candidates"] == result["candidates"]
    assert found["t2i_r1"] == pytest.approx(result["recall_after"], abs=1e-9)
    exported = load(folder)
    assert isinstance(exported, OnnxEmbedder)
    assert exported.encode_text(["a red cat"]).shape == (1, 64)
    assert exported.made_from == load("runs/mine").fingerprint() != exported.fingerprint()
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert 'lapclip.load("' in readme
    assert readme.startswith("# mine, ")

    again = command("export", "mine", "--to", "onnx-int8")
    assert again.returncode == 2
    assert "earlier export" in again.stderr


def test_every_format_is_named_by_the_help_and_where_another_is_asked_for(here: Path) -> None:
    assert known_formats().keys() == {
        "onnx",
        "onnx-int8",
        "coreml",
        "coreml-int8",
        "openclip",
        "huggingface",
    }
    with pytest.raises(ConfigError, match="NOPE") as refused:
        find_format("NOPE")
    for text in (
        str(refused.value),
        command("export", "--help").stdout,
        command("export", "--to", "NOPE").stderr,
    ):
        assert all(name in text for name in known_formats())
