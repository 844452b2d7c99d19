"""Runs and exports that were made before the house was rebuilt still resume and load.

`tests/fixtures/before_house/make_fixtures.py` says how they were made, by which commit, and what lies where. Nothing
here is to be made anew by later code: where a test fails, what people have on their disks is broken.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lapclip

from .conftest import lapclip as command
from .conftest import set_flags

MADE = Path(__file__).parent / "fixtures" / "before_house"
TOLERANCE = 1e-4
"""How far losses may be from the old ones on another kind of processor, or with another torch."""
NEVER_SEEN = {"paused", "went_on", "fell_back", "failed"}
"""Events that need a machine in trouble; their keys are kept beside the others, and are not compared here."""


def expected(name: str) -> Any:
    return json.loads((MADE / "expected" / f"{name}.json").read_text(encoding="utf-8"))


def same_processor() -> bool:
    """Whether this is the kind of processor, and the torch, that made what is expected."""
    text = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    )
    found = {"machine": platform.machine(), "system": platform.system()}
    for name in ("model name", "cpu family", "model"):
        match = re.search(rf"^{name}\s*: (.*)$", text, re.MULTILINE)
        found[name] = match[1].strip() if match else ""
    found |= {"vectors": torch.backends.cpu.get_cpu_capability(), "torch": str(torch.__version__)}
    return {**found, "threads": 1} == expected("processor")


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder as the old code left it."""
    shutil.copytree(MADE / "saved", tmp_path / "runs")
    for name in ("pictures", "exported"):
        shutil.copytree(MADE / name, tmp_path / name)
    shutil.copy(MADE / "stub_tower.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # for stub_tower
    monkeypatch.setenv("LAPCLIP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("LAPCLIP_TRUST", "stub_tower:stub")
    return tmp_path


def asked(*arguments: str) -> dict[str, Any]:
    """What a command prints with --json."""
    done = command(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def events(run: str, kind: str | None = None) -> list[dict]:
    lines = (Path("runs") / run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if kind in (None, event["type"])]


@pytest.mark.parametrize("name", ["scenes", "heads"])
def test_a_run_that_was_stopped_goes_on_to_the_losses_it_would_have_had(
    before: Path, name: str
) -> None:
    if name == "heads":
        pytest.importorskip("transformers", reason="the package transformers is not installed")
    then = expected(name)
    rows = {row["name"]: row for row in asked("runs")["runs"]}
    assert (rows[name]["state"], rows[name]["step"], rows[name]["steps"]) == (
        "stopped",
        then["stopped"],
        12,
    )
    ended = asked("resume", name)
    assert (ended["state"], ended["steps"]) == ("finished", 12)
    (resumed,) = events(name, "resumed")
    assert (resumed["step"], resumed["skipped"]) == (then["stopped"], [])
    steps = events(name, "step")
    assert [event["step"] for event in steps] == list(range(1, 13))
    now = {str(event["step"]): event["loss"] for event in steps}
    losses = {step: float(loss) for step, loss in then["losses"].items()}
    if same_processor():
        # The last block adds up in another order since then (`one_query_attention`): the last digits may differ.
        assert now == pytest.approx(losses, rel=1e-6)
    assert now == pytest.approx(losses, abs=TOLERANCE)
    assert ended["evaluation"].keys() >= then["evaluation"].keys()  # later versions add to it
    # The model that is kept may be another: among equal scores it was the latest, and is the first.


@pytest.mark.parametrize("name", ["finished", "onnx", "onnx-int8"])
def test_a_model_and_its_exports_give_the_same_embeddings(before: Path, name: str) -> None:
    if name != "finished":
        pytest.importorskip("onnxruntime", reason="needs the extra export")
    model = lapclip.load("runs/finished" if name == "finished" else Path("exported") / name)
    then = expected("embeddings")
    texts, images = model.encode_text(then["captions"]), model.encode_image(then["pictures"])
    # What int8 rounds to depends on the instructions that the processor has.
    close = 0.05 if name == "onnx-int8" and not same_processor() else 1e-5
    np.testing.assert_allclose(texts, then[name]["text"], rtol=0, atol=close)
    np.testing.assert_allclose(images, then[name]["image"], rtol=0, atol=close)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name.startswith("export_onnx") else [])
        for name in sorted(path.stem for path in MADE.glob("json/*.json"))
    ],
)
def test_what_a_command_prints_for_scripts_keeps_its_keys(before: Path, name: str) -> None:
    if name.startswith("export_onnx"):
        pytest.importorskip("onnxruntime", reason="needs the extra export")
        pytest.importorskip("onnxscript", reason="needs the extra export")
    then = json.loads((MADE / "json" / f"{name}.json").read_text(encoding="utf-8"))
    now = json.loads(command(*then["command"], "--json").stdout)
    assert ("error" in now) == ("error" in then["keys"]), now
    assert missing(then["keys"], now) == []


def test_events_keep_their_keys(before: Path) -> None:
    old = len(events("scenes"))
    asked("resume", "scenes")
    seen = events("scenes")[old:]
    train = json.loads((MADE / "json" / "train.json").read_text(encoding="utf-8"))["command"]
    train = ["stopped" if word == "new" else word for word in train]
    end = threading.Thread(target=stop_once_it_works, args=[Path("runs/stopped")])
    end.start()
    asked(*train, *set_flags("train.steps=5000"))
    end.join()
    seen += events("stopped")
    then = expected("events")
    assert {event["type"] for event in seen} >= then.keys() - NEVER_SEEN
    lacking = {
        event["type"]: missing(then[event["type"]], event)
        for event in seen
        if event["type"] in then
    }
    assert not {kind: keys for kind, keys in lacking.items() if keys}


def stop_once_it_works(run: Path) -> None:
    """Ask a run to end, as `lapclip stop` does from another terminal, after its first event of the sensors."""
    for _ in range(1000):
        if (run / "events.jsonl").exists() and '"sensors"' in (run / "events.jsonl").read_text(
            encoding="utf-8"
        ):
            break
        time.sleep(0.02)
    (run / "stop").touch()


def missing(then: Any, now: Any, at: str = "") -> list[str]:
    """Keys that were there and are not any more; in a list, those that not every object has. New ones are welcome."""
    if isinstance(then, dict):
        if then.keys() == {"or null"}:
            return [] if now is None else missing(then["or null"], now, at)
        if not isinstance(now, dict):
            return [f"{at or 'all'} is no object any more"]
        gone = [f"{at}.{key}" for key in then if key not in now]
        return gone + [
            line
            for key in then
            if key in now
            for line in missing(then[key], now[key], f"{at}.{key}")
        ]
    if isinstance(then, list) and then:
        if not isinstance(now, list):
            return [f"{at or 'all'} is no list any more"]
        return [line for one in now for line in missing(then[0], one, f"{at}[]")]
    return []
