"""What a step holds in memory, by whose it is, and how many pairs fit at once: seen from a few of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lapclip.errors import ConfigError
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP, count_parameters
from lapclip.runs.events import read_events
from lapclip.runs.folder import Run
from lapclip.training.step import TrainStep
from lapclip.tuning import step_memory
from lapclip.tuning.rehearsal import Rehearsal, Workload
from lapclip.tuning.step_memory import Ledger, Needs, halvings

from ..conftest import SMALL
from ..networks import tiny_text
from ..small_runs import prepared, train
from .made import small

CPU = Cpu()


def test_the_memory_of_a_step_adds_up_to_the_measured_peak() -> None:
    memory = step_memory.measure_step_memory(small())
    assert sum(memory.parts.values()) == memory.peak
    count = count_parameters(CLIP(small().shape))
    assert memory.parameters == pytest.approx(4 * count, rel=0.01)
    assert memory.optimizer == pytest.approx(8 * count, rel=0.01)
    assert 0 < memory.activations < memory.peak
    assert memory.process > 0


def followed(workload: Workload) -> step_memory.Ledger:
    rehearsal = Rehearsal(workload, CPU)
    rehearsal.step_once()
    ledger = step_memory.Ledger()
    with ledger.follow(rehearsal.step):  # pyright: ignore[reportArgumentType]
        rehearsal.step_once()
    return ledger


def test_activations_grow_with_the_batch_and_parameters_do_not() -> None:
    few, many = followed(small(4)), followed(small(16))
    assert many.at_peak["activations"] > 3 * few.at_peak["activations"]
    assert many.at_peak["parameters"] == few.at_peak["parameters"]


def test_a_deeper_model_holds_and_moves_more() -> None:
    shallow, deep = followed(small(layers=2)), followed(small(layers=4))
    for kind in ("parameters", "optimizer", "activations"):
        assert deep.at_peak[kind] > 1.5 * shallow.at_peak[kind], kind
    assert deep.traffic > 1.5 * shallow.traffic


def test_the_ledger_knows_gradients_and_forgets_what_is_freed() -> None:
    rehearsal, ledger = Rehearsal(small(), CPU), step_memory.Ledger()
    with ledger.follow(rehearsal.step):  # pyright: ignore[reportArgumentType]
        rehearsal.step_once()
    count = count_parameters(rehearsal.step.model)
    assert ledger.held["gradients"] == pytest.approx(
        4 * count, rel=0.01
    )  # all have arrived when the step is over
    assert ledger.at_peak["activations"] > ledger.held["activations"]
    del rehearsal
    assert ledger.held["gradients"] == 0


def test_recomputing_blocks_keeps_fewer_activations() -> None:
    plain, again = followed(small(16, layers=4)), followed(small(16, layers=4, recompute=True))
    assert again.at_peak["activations"] < plain.at_peak["activations"]


KINDS = {
    "foreign": [
        "model.name=towers",
        "model.image_from=tiny-image",
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
def test_a_few_pairs_tell_what_many_take(
    kind: str, here: Path, text_folder: Path, trained: Path
) -> None:
    setup = prepared("first-run", settings(kind, text_folder, trained), None)
    step, batch = setup.step, setup.plan.batch(1)
    assert isinstance(step, TrainStep)
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    needs = step_memory.measure_needs(step, batch)
    ledger = Ledger()
    with ledger.follow(step):
        step.rehearse(batch, 64)
    # What does not grow with the pairs, such as gradients of weights, shows in a model as small as this.
    assert needs.pair * 64 == pytest.approx(ledger.peak_passing, rel=0.3)
    assert needs.trainable == 4 * sum(
        each.numel() for each in step.model.parameters() if each.requires_grad
    )
    assert all((tensor == before[name]).all() for name, tensor in step.model.state_dict().items())
    assert all(parameter.grad is None for parameter in step.worker.parameters())


def test_parts_of_the_batch_are_taken_where_memory_is_short(
    here: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = settings("foreign", text_folder)
    train("first-run", asked, name="whole")
    seen: list[Needs] = []
    watch = step_memory.measure_needs

    def watching(step: TrainStep, batch) -> Needs:
        seen.append(watch(step, batch))
        monkeypatch.setattr(
            Cpu,
            "free_bytes",
            lambda self: round((seen[0].bytes_for(16) + 1) / step_memory.SHARE_OF_MEMORY),
        )
        return seen[0]

    with monkeypatch.context() as patch:
        patch.setattr(step_memory, "measure_needs", watching)
        train("first-run", asked, name="parts")
    whole, parts = (
        list(read_events(Path("runs") / name / "events.jsonl")) for name in ("whole", "parts")
    )
    assert (
        whole[0]["config"]["train"]["micro_batch"],
        parts[0]["config"]["train"]["micro_batch"],
    ) == (0, 16)
    assert parts[0]["reasons"]["train.micro_batch"].startswith("what fits")
    losses = [[event["loss"] for event in run if event["type"] == "step"] for run in (whole, parts)]
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.parametrize(
    ("micro_batch", "hint"), [(64, "train.micro_batch=8, which"), (0, "--recipe heads, where less")]
)
def test_what_does_not_fit_is_refused_in_figures(
    micro_batch: int, hint: str, here: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_memory, "measure_needs", lambda step, batch: Needs(10**6, 10**6))
    fits = Needs(10**6, 10**6).bytes_for(8 if micro_batch else 0)
    monkeypatch.setattr(
        Cpu, "free_bytes", lambda self: round((fits + 1) / step_memory.SHARE_OF_MEMORY)
    )
    asked = [*settings("foreign", text_folder), f"train.micro_batch={micro_batch}"]
    with pytest.raises(
        ConfigError, match=r"Pairs do not fit on cpu: \d+ at once need 0\.\d GB of the 0\.\d GB"
    ) as error:
        train("first-run", asked)
    assert hint in str(error.value)
    assert Run(Path("runs/first-run")).never_began


def test_halvings_end_at_one() -> None:
    assert list(halvings(250)) == [250, 125, 63, 32, 16, 8, 4, 2, 1]
    assert list(halvings(1)) == [1]
