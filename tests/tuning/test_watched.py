"""How many pairs fit at once is seen from a few of them, and taking fewer at once changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lapclip.commands import run_setup
from lapclip.commands.train import train
from lapclip.errors import ConfigError
from lapclip.machine.devices import Device
from lapclip.runs.event_log import read_events
from lapclip.training.step import TrainStep
from lapclip.tuning import memory_probe as watched
from lapclip.tuning.memory_ledger import Ledger
from lapclip.tuning.memory_probe import Needs, halvings

from ..conftest import SMALL
from ..networks import tiny_text

pytest.importorskip("transformers", reason="the package transformers is not installed")

KINDS = {
    "foreign": [
        "model.name=towers",
        "model.image_from=tests.networks:tiny_image",
        "model.head=24",
        "model.embedding=16",
    ],
    "own, partly frozen": ["train.image_blocks=1", "train.text_blocks=1"],
    "own, half precision": ["train.image_blocks=1", "train.dtype=bfloat16"],
}


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text(tmp_path_factory.mktemp("bert"))


def settings(kind: str, text_folder: Path, start: Path | None = None) -> list[str]:
    text = [f"model.text_from={text_folder}"] if kind == "foreign" else [f"train.start={start}"]
    return [*SMALL[1:], *KINDS[kind], *text, "train.steps=4", "train.batch_size=64"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_pairs_tell_what_many_take(kind: str, here: Path, text_folder: Path, trained: Path) -> None:
    setup = run_setup.set_up("first-run", settings(kind, text_folder, trained), None)
    step, batch = setup.step, setup.plan.batch(1)
    assert isinstance(step, TrainStep)
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    needs = watched.watch(step, batch)
    ledger = Ledger()
    with ledger.following(step):
        step.rehearse(batch, 64)
    assert needs.pair * 64 == pytest.approx(ledger.most_passing, rel=0.25)
    assert needs.learning == 4 * sum(each.numel() for each in step.model.parameters() if each.requires_grad)
    assert all((tensor == before[name]).all() for name, tensor in step.model.state_dict().items())
    assert all(parameter.grad is None for parameter in step.worker.parameters())


def test_parts_of_the_batch_are_taken_where_memory_is_short(
    here: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = settings("foreign", text_folder)
    train("first-run", asked, name="whole")
    seen: list[Needs] = []
    watch = watched.watch

    def watching(step: TrainStep, batch) -> Needs:
        seen.append(watch(step, batch))
        monkeypatch.setattr(Device, "free_bytes", lambda self: round((seen[0].of(16) + 1) / watched.SHARE_OF_MEMORY))
        return seen[0]

    with monkeypatch.context() as patch:
        patch.setattr(watched, "watch", watching)
        train("first-run", asked, name="parts")
    whole, parts = (list(read_events(Path("runs") / name / "events.jsonl")) for name in ("whole", "parts"))
    assert (whole[0]["config"]["train"]["micro_batch"], parts[0]["config"]["train"]["micro_batch"]) == (0, 16)
    assert any("train.micro_batch is 16: what fits" in note for note in parts[0]["notes"])
    losses = [[event["loss"] for event in run if event["type"] == "step"] for run in (whole, parts)]
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.parametrize(
    ("micro_batch", "hint"), [(64, "train.micro_batch=8, which"), (0, "--recipe heads, where less")]
)
def test_what_does_not_fit_is_refused_in_figures(
    micro_batch: int, hint: str, here: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "watch", lambda step, batch: Needs(10**6, 10**6))
    fits = Needs(10**6, 10**6).of(8 if micro_batch else 0)
    monkeypatch.setattr(Device, "free_bytes", lambda self: round((fits + 1) / watched.SHARE_OF_MEMORY))
    asked = [*settings("foreign", text_folder), f"train.micro_batch={micro_batch}"]
    with pytest.raises(
        ConfigError, match=r"Pairs do not fit on cpu: \d+ at once need 0\.\d GB of the 0\.\d GB"
    ) as error:
        train("first-run", asked)
    assert hint in str(error.value)
    assert not Path("runs").exists()


def test_halvings_end_at_one() -> None:
    assert list(halvings(250)) == [250, 125, 63, 32, 16, 8, 4, 2, 1]
    assert list(halvings(1)) == [1]
