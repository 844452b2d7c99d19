"""The examples run as they are, only shorter; and code of users is typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lapclip

from .test_train import SETTINGS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.slow
def test_a_loop_of_ones_own_trains_and_its_model_loads(here: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "own_loop.py"), "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 3 of 3: loss \d", done.stdout)
    assert "R@1" in done.stdout
    assert lapclip.load("own-model").encode_text("a red cat").shape == (128,)


@pytest.mark.slow
def test_the_first_notebook_trains_plots_and_asks(
    here: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / "first_run.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not kept in git"
    (training,) = [
        cell for cell in notebook.cells if "minutes=3" in cell.source and cell.cell_type == "code"
    ]
    training.source = training.source.replace("minutes=3", "minutes=0.3")
    monkeypatch.setenv("LAPCLIP_DATA", str(here / "indexes"))
    monkeypatch.setenv("OMP_NUM_THREADS", str(os.cpu_count()))
    nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(here)}}
    ).execute()
    shown = {
        cell.source: "".join(
            "".join(output.get("data", {}).get("text/html", "")) for output in cell.outputs
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    }
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    errors = [output["text"] for output in outputs if output.get("name") == "stderr"]
    assert not errors, "progress is shown as HTML, and nothing warns"
    after = shown[training.source]
    assert "finished" in after
    assert "recall" in after
    charts = [output["data"] for output in outputs if PLOTLY in output.get("data", {})]
    assert [chart[PLOTLY]["layout"]["title"]["text"] for chart in charts] == [
        "Accuracy and recall",
        "Temperature",
    ]
    assert [
        markup
        for source, markup in shown.items()
        if "search.ask(" in source and markup.count("<img") == 6
    ]
    assert [
        markup
        for source, markup in shown.items()
        if "lapclip.evaluate(" in source and "R@1" in markup
    ]


PLOTLY = "application/vnd.plotly.v1+json"
USER_CODE = """
import lapclip
from PIL import Image


def tell(event: lapclip.events.Event) -> None:
    match event:
        case lapclip.events.Step(step=step, loss=loss):
            reveal_type(loss)
        case lapclip.events.Evaluation() if event.evaluation["t2i_r1"] > 0.5:
            raise lapclip.StopTraining("good enough")


pairs = [("a.jpg", "a cat"), (Image.new("RGB", (9, 9)), ["a dog", "an animal"])]
run = lapclip.train(pairs, callbacks=[tell], minutes=1)
reveal_type(run)
reveal_type(run.metrics)
reveal_type(run.model.encode_image("a.jpg"))
reveal_type(run.model.classify("a.jpg", ["cat", "dog"]))
reveal_type(run.model.classify(["a.jpg"], ["cat", "dog"]))
reveal_type(lapclip.search("photos", run).ask("a cat")[0].path)
lapclip.train(minuets=1)
lapclip.train(callbacks=[lambda: None])
"""


@pytest.mark.slow
def test_code_of_users_is_checked_by_their_type_checker(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER_CODE)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    told = re.findall(r'information: Type of .* is "(.+)"', done.stdout)
    assert told[3].startswith("ndarray")
    del told[3]
    assert told == [
        "float",
        "TrainingRun",
        "dict[str, Any]",
        "dict[str, float]",
        "list[dict[str, float]]",
        "Path",
    ]
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    assert len(errors) == 2, done.stdout
    assert "minuets" in errors[0]
    assert "callbacks" in errors[1]


def reply_to(asked: str, client: Any) -> dict[str, Any]:
    """What a kernel answers at the end of a cell."""
    while True:
        message = client.get_shell_msg(timeout=120)
        if message["parent_header"].get("msg_id") == asked:
            return message["content"]


@pytest.mark.slow
def test_the_stop_button_of_a_notebook_saves_and_the_run_goes_on(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = pytest.importorskip("jupyter_client").KernelManager()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    manager.start_kernel(cwd=str(here))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        settings = {**SETTINGS, "train.steps": 200, "train.evaluate_every_epochs": 100}
        asked = client.execute(f"import lapclip\nrun = lapclip.train(settings={settings!r})")
        log = here / "runs" / "first-run" / "events.jsonl"
        deadline = time.monotonic() + 120
        while not (log.exists() and '"type":"step"' in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        manager.interrupt_kernel()
        answer = reply_to(asked, client)
        assert (answer["status"], answer["ename"]) == ("error", "Interrupted")
        assert "everything is saved" in answer["evalue"]
        assert len(answer["traceback"]) == 1, "there is no fault to look for"
        assert lapclip.open_run().state == "stopped"
        again = reply_to(
            client.execute("run = lapclip.resume()\nassert len(run.history) == 200"), client
        )
        assert again["status"] == "ok", again
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.slow
def test_a_process_that_is_terminated_saves_and_ends(here: Path) -> None:
    program = (
        f"import lapclip, os, signal\nlapclip.train(settings={SETTINGS!r}, progress=False, callbacks=[lambda event: "
        "event.type == 'step' and event.step == 3 and os.kill(os.getpid(), signal.SIGTERM)])\nprint('goes on')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (143, ""), done.stderr
    assert lapclip.open_run().state == "stopped"
