"""Which engine serves a model: by measuring, by what was asked, and by what is remembered."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lapclip.cli.serve import EngineName
from lapclip.embedder import load
from lapclip.errors import ConfigError, LapclipError
from lapclip.machine.canary import PRECISIONS
from lapclip.machine.choose_device import use_threads
from lapclip.measure.timing import Timer, Timing
from lapclip.serving import choose_engine
from lapclip.serving.choose_engine import (
    EngineRequest,
    open_engine,
    open_same_engine,
    serve_batch,
    thread_counts,
)
from lapclip.serving.engine import BatchTimes, Engine
from lapclip.serving.model_forms import EXPORTS
from lapclip.weights import DESCRIPTION
from lapclip.which_model import which_model

pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")


@pytest.fixture
def run(exported: Path, here: Path, empty_cache: Path) -> Path:
    """A run with an export in float32, and the same where its int8 one would be."""
    run = here / "runs" / "mine"
    shutil.copytree(exported, run)
    shutil.copytree(run / "exported" / "onnx", run / "exported" / "onnx-int8")
    describe(run, format="onnx-int8")
    return run


@pytest.fixture(autouse=True)
def known_speeds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Batches a second by engine; two threads are a little faster than one."""
    speeds = {"torch-float32": 10.0, "onnx-float32": 20.0, "onnx-int8": 40.0}

    def time_in_turns(self: Timer, runs: dict[str, Any]) -> dict[str, Timing]:
        timings = {}
        for label in runs:
            engine, threads = label.split(", ")
            speed = speeds.get(engine, 1.0) * (1 + int(threads.split()[0]) / 10)
            timings[label] = Timing((1 / speed,))
        return timings

    def measure(self: Engine) -> None:
        self.times = {
            "image": BatchTimes({1: 0.01, 2: 0.02}),
            "text": BatchTimes({1: 0.01, 8: 0.02}),
        }

    monkeypatch.setattr(Timer, "time_in_turns", time_in_turns)
    monkeypatch.setattr(choose_engine, "thread_counts", lambda: [1, 2])
    monkeypatch.setattr(Engine, "measure", measure)
    return speeds


def describe(run: Path, **changes: Any) -> None:
    path = run / "exported" / "onnx-int8" / DESCRIPTION
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8"
    )


def opened(run: Path, *asked: Any) -> Engine:
    return open_engine(which_model(str(run)), EngineRequest(*asked))


def test_the_fastest_wins_and_says_why(run: Path) -> None:
    engine = opened(run)
    assert (engine.name, engine.threads) == ("onnx-float32", 2)
    assert engine.reasons[0].startswith("onnx-float32, 2 threads: 41.7 ms for 8 images")
    assert "torch-float32" in engine.reasons[0]


def test_what_was_measured_is_remembered(run: Path, known_speeds: dict[str, float]) -> None:
    opened(run)
    known_speeds["torch-float32"] = 1000.0
    assert opened(run).name == "onnx-float32"
    assert opened(run, None, 1).name == "torch-float32"  # other threads: another measurement


def test_int8_is_taken_only_if_requested_because_its_vectors_do_not_compare(run: Path) -> None:
    plain, int8 = opened(run), opened(run, "onnx-int8")
    assert plain.fingerprint == load(run).fingerprint() != int8.fingerprint
    assert "--engine onnx-int8 takes it" in plain.reasons[-1]
    folder = run / "exported" / "onnx-int8"
    assert int8.fingerprint == load(folder).fingerprint()
    assert int8.reasons[-1].endswith(f"lapclip embed DATA --model {folder}")
    assert "--engine onnx-int8 takes it" in opened(run).reasons[-1]  # remembered


def test_an_export_of_another_model_is_never_taken(run: Path) -> None:
    describe(run, made_from="another")
    engine = opened(run)
    assert engine.name == "onnx-float32"
    with pytest.raises(LapclipError, match="this very model") as error:
        opened(run, "onnx-int8")
    assert "--to onnx-int8 --force" in error.value.hint


def change(run: Path) -> None:
    tensors = run / "model" / "model.safetensors"
    changed = {
        name: value * 1.01 if value.ndim > 1 else value
        for name, value in load_file(tensors).items()
    }
    save_file(changed, tensors.with_suffix(".new"))
    tensors.with_suffix(".new").replace(tensors)


def test_a_model_that_was_replaced_is_another_one(run: Path, trained: Path) -> None:
    before = opened(run, "torch-float32")
    change(run)
    after = opened(run)
    assert after.name == "torch-float32"  # its exports are of the old one
    assert after.fingerprint == after.encoder.fingerprint() != before.fingerprint


def test_float32_forms_bear_the_fingerprint_of_the_model(run: Path) -> None:
    torch_engine, onnx = opened(run, "torch-float32"), opened(run, "onnx-float32")
    assert torch_engine.fingerprint == onnx.fingerprint == torch_engine.encoder.fingerprint()


def test_half_precision_has_to_agree_with_float32(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, exact = opened(run, "torch-bfloat16", 1), opened(run, "torch-float32", 1)
    rows = engine.rows("image", 4)
    cosine = (engine.embed("image", rows) * exact.embed("image", rows)).sum(axis=1)
    assert 0.999 < cosine.min() < 1 - 1e-9
    assert engine.fingerprint == exact.fingerprint
    which = which_model(str(run))
    assert open_same_engine(which, engine) is not None
    monkeypatch.setattr(choose_engine, "MIN_COSINE", 0.9999999)
    assert open_same_engine(which, engine) is None  # a newer model is compared too
    assert open_same_engine(which, exact) is not None
    with pytest.raises(ConfigError, match="cosine"):
        opened(run, "torch-bfloat16", 2)


def test_an_exported_folder_is_served_alone(run: Path) -> None:
    assert opened(run / "exported" / "onnx-int8").name == "onnx-int8"
    with pytest.raises(ConfigError, match="onnx-int8"):
        opened(run / "exported" / "onnx-int8", "torch-float32")


def test_each_thread_keeps_its_own_number_of_threads() -> None:
    before, seen, steps = torch.get_num_threads(), {}, threading.Barrier(2)

    def work(name: str, count: int) -> None:
        use_threads(count)
        steps.wait(5)  # the other one has set its own since
        np.asarray(torch.ones(64, 64) @ torch.ones(64, 64))
        seen[name] = torch.get_num_threads()

    workers = [
        threading.Thread(target=work, args=each) for each in (("engine", 2), ("preparation", 1))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(10)
    torch.set_num_threads(before)
    assert seen == {"engine": 2, "preparation": 1}


def test_thread_counts_start_at_one() -> None:
    assert thread_counts()[0] == 1


def test_what_is_timed_are_batches_of_both_towers(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, computed = opened(run, "torch-float32", 1), []
    real_embed = Engine.embed

    def embed(self: Engine, tower: str, rows: np.ndarray) -> np.ndarray:
        computed.append((tower, len(rows)))
        return real_embed(self, tower, rows)

    monkeypatch.setattr(Engine, "embed", embed)
    with ThreadPoolExecutor(2) as pool:
        rows = {tower: engine.rows(tower, 8) for tower in ("image", "text")}
        serve_batch(engine, rows, choose_engine.make_photo(), pool)
    assert computed == [("image", 8), ("text", 8)]


def test_the_photo_of_the_measurement_is_a_jpeg_that_an_engine_reads(run: Path) -> None:
    photo, encoder = choose_engine.make_photo(), opened(run, "torch-float32", 1).encoder
    assert photo.data.startswith(b"\xff\xd8")
    row = photo.row(encoder)
    assert row.shape == (encoder.view.side, encoder.view.side, 3)
    assert row.std() > 10  # not of one color: that would be decoded too fast


def test_the_command_takes_every_engine_there_is() -> None:
    assert set(get_args(EngineName)) == {
        *(f"torch-{dtype}" for dtype in PRECISIONS),
        *EXPORTS,
    }
