"""A few of the files of `benchmarks/hostile_files.py`: real ones of every format, changed at random and read."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FORMATS = ["images", "csv", "json", "json lines", "tar", "parquet", "safetensors", "pt", "model folder", "onnx folder",
           "run.toml", "recipe", "search index", "checkpoint"]  # fmt: skip
CASES = 25


@pytest.fixture(scope="module")
def hostile(exported: Path) -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "hostile_files.py"
    spec = importlib.util.spec_from_file_location("hostile_files", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(a_run=lambda: exported, onnx_folder=lambda: exported / "exported" / "onnx")
    return module


def test_every_format_is_tried(hostile: ModuleType) -> None:
    assert list(hostile.FORMATS) == FORMATS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_read_skipped_or_refused(hostile: ModuleType, name: str) -> None:
    form = hostile.FORMATS[name]
    originals = form.originals()
    assert {hostile.read_one(form, data)[0] for data in originals} == {"read"}
    ended = [
        hostile.read_one(form, hostile.changed(originals, name, case, seed=1))
        for case in range(CASES)
    ]
    assert not [why for how, why in ended if how == "failed"]
    assert any(how != "read" for how, _ in ended)
