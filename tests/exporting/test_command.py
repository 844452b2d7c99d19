"""`lapclip export` from its arguments to its account, on a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lapclip.commands.evaluate import EvaluationRequest, evaluate
from lapclip.exporting.check import MOST_LOST
from lapclip.exporting.engine import open_export

from ..conftest import lapclip as command

pytest.importorskip("onnxruntime", reason="needs the extra export")
pytest.importorskip("onnxscript", reason="needs the extra export")


def test_a_run_leaves_as_int8_with_its_loss_measured(trained: Path, here: Path) -> None:
    shutil.copytree(trained, here / "runs" / "mine")
    done = command("export", "mine", "--to", "onnx-int8", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    names = {Path(path).name for path in result["files"]}
    assert names >= {"image.onnx", "text.onnx", "lapclip.json", "tokenizer.json", "README.md", "example.py"}
    place = Path("runs/mine/exported/onnx-int8")
    assert {Path(path).parent for path in result["files"]} == {place}
    assert result["bytes"] == sum(path.stat().st_size for path in place.iterdir())
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
    assert json.loads((place / "lapclip.json").read_text())["check"]["recall_after"] == result["recall_after"]

    # What the account says of recall is what evaluating the folder itself gives.
    wanted = EvaluationRequest(str(place), "scenes", split="test", settings=("data.train_pairs=64",))
    found = evaluate(wanted)["evaluation"]
    assert found["candidates"] == result["candidates"]
    assert found["t2i_r1"] == pytest.approx(result["recall_after"], abs=1e-9)
    assert open_export(place).encode_text(["a red cat"]).shape == (1, 64)

    again = command("export", "mine", "--to", "onnx-int8")
    assert again.returncode == 2
    assert "holds an earlier export" in again.stderr
