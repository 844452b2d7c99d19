"""`train.loss`: whole runs with each loss, from the command line to what others load."""

from __future__ import annotations

import json
import math
import shutil
import tomllib
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import lapclip
from lapclip.commands.resume import resume
from lapclip.embedder import load_torch
from lapclip.training.objectives.contrastive import LOSSES

from ..conftest import SMALL, set_flags
from ..conftest import lapclip as command
from ..small_runs import events, losses, stop_after, train_small

SIGMOID = ("train.loss=sigmoid", "train.micro_batch=6")


@pytest.fixture(scope="module")
def sigmoid(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The folder in which a run with the sigmoid loss, in micro-batches, has finished."""
    folder = tmp_path_factory.mktemp("sigmoid")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train_small(*SIGMOID, name="whole")
    return folder


def test_a_run_records_its_loss_of_guessing_and_its_bias(
    sigmoid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sigmoid)
    assert events("started", "whole")[0]["chance_loss"] == pytest.approx(
        LOSSES["sigmoid"].chance(16)
    )
    steps = events("step", "whole")
    assert steps[0]["logit_bias"] == pytest.approx(-math.log(15))
    assert steps[0]["temperature"] == pytest.approx(1 / 10)
    assert steps[-1]["logit_bias"] != steps[0]["logit_bias"]
    assert steps[-1]["grad_norms"]["bias"] > 0
    assert steps[0]["loss"] == pytest.approx(LOSSES["sigmoid"].chance(16), rel=0.25)
    model = load_torch("runs/whole").model
    assert model.logit_bias is not None
    assert model.logit_bias.item() != 0


def test_the_settings_of_a_run_say_that_its_model_has_a_bias(sigmoid: Path, trained: Path) -> None:
    for run, with_bias in ((sigmoid / "runs" / "whole", True), (trained, False)):
        saved = tomllib.loads((run / "run.toml").read_text(encoding="utf-8"))
        assert saved["model"]["logit_bias"] is with_bias


def test_a_bias_that_gets_no_gradient_is_no_vanishing_tower(
    sigmoid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher of weight 1 leaves the contrastive loss out, and with it the gradient of its bias."""
    monkeypatch.chdir(sigmoid)
    log = Path("runs/whole/events.jsonl")
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    shutil.copytree("runs/whole", "runs/silent")
    for line in lines:
        if line["type"] == "step":
            line["grad_norms"]["bias"] = 0.0
    Path("runs/silent/events.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    found = json.loads(command("doctor", "silent", "--json").stdout)["findings"]
    assert "vanishing-gradients" not in {finding["id"] for finding in found}


def test_a_resumed_run_goes_on_with_scale_and_bias(
    sigmoid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sigmoid)
    assert train_small(*SIGMOID, name="parts", callbacks=stop_after(5, "parts")).state == "stopped"
    assert resume("parts").state == "finished"
    assert losses("parts") == losses("whole")


def test_softmax_has_no_bias_and_its_own_loss_of_guessing(trained: Path) -> None:
    folder, name = trained.parent.parent, trained.name
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert events("started", name)[0]["chance_loss"] == pytest.approx(math.log(16))
        assert not any("logit_bias" in step for step in events("step", name))


def test_a_model_of_another_loss_starts_with_the_scale_and_bias_of_this_one(
    sigmoid: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sigmoid)
    short = [setting for setting in SMALL if not setting.startswith("model.")]
    for start, loss, scale, bias in (
        (trained, "sigmoid", 10, -math.log(15)),
        (sigmoid / "runs" / "whole", "softmax", 1 / 0.07, None),
    ):
        run = f"{loss}-from-the-other"
        flags = set_flags(*short, "train.steps=2", f"train.loss={loss}")
        done = command(
            "train", "--from", str(start), "--recipe", "full", *flags, "--name", run, "--json"
        )
        assert done.returncode == 0, done.stderr
        first = events("step", run)[0]
        assert first["temperature"] == pytest.approx(1 / scale)
        assert first.get("logit_bias") == (None if bias is None else pytest.approx(bias))


@pytest.mark.parametrize("to", ["openclip", "huggingface"])
def test_the_bias_goes_where_others_look_for_it(
    sigmoid: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sigmoid)
    done = command("export", "whole", "--to", to, "--json")
    assert done.returncode == 0, done.stderr
    folder = Path(json.loads(done.stdout)["out"])
    bias = load_torch("runs/whole").model.state_dict()["logit_bias"].item()
    tensors = load_file(next(folder.glob("*.safetensors")))
    assert tensors["logit_bias"].item() == bias
    again = load_torch(folder).model
    assert again.logit_bias is not None
    assert again.logit_bias.item() == bias
    assert lapclip.load(folder).encode_text(["a red cat"]).shape == (1, 64)
    # A CLIPModel that is saved again keeps the name in its configuration and loses the tensor.
    weights = next(folder.glob("*.safetensors"))
    del tensors["logit_bias"]
    save_file(tensors, weights, metadata={"format": "pt"})
    assert load_torch(folder).model.logit_bias is None


def test_the_doctor_and_the_report_know_the_loss(
    sigmoid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sigmoid)
    assert command("doctor", "whole").returncode == 0
    done = command("report", "whole", "--json")
    page = next(Path(path) for path in json.loads(done.stdout)["files"] if path.endswith(".html"))
    assert "bias" in page.read_text(encoding="utf-8")
