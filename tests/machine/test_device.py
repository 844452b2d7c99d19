"""The kinds of device: each answers every question in its own file, and nobody else compares kinds."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lapclip
from lapclip.config import TrainConfig
from lapclip.machine import choose_device as choosing
from lapclip.machine.choose_device import (
    accelerator_here,
    available,
    candidates,
    choose_device,
    choose_train_device,
    device_of,
)
from lapclip.machine.cpu import Cpu
from lapclip.machine.device import KINDS, Device, register
from lapclip.machine.gpus import Mps

from ..second_device import Pretended, pretend

PACKAGE = Path(lapclip.__file__).parent
NAMES = {"cpu", "cuda", "mps", "xpu"}


def test_every_kind_that_can_be_asked_for_is_registered() -> None:
    choices = TrainConfig.__dataclass_fields__["device"].metadata["choices"]
    assert {"auto", "accelerator", *KINDS} == set(choices)
    assert set(KINDS) == NAMES
    for kind in KINDS:
        device = device_of(kind)
        assert (device.kind, device.torch) == (kind, torch.device(kind))
        assert device == device_of(kind)
        assert device.half in ("bfloat16", "float16")
    assert len({device_of(kind) for kind in KINDS}) == len(KINDS)


def test_a_new_kind_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapclip.machine.device.KINDS", KINDS)
    before = dict(KINDS)

    @register
    class Abacus(Cpu):
        kind = "abacus"
        is_cpu = False
        untrusted = frozenset({"causal attention"})

        def examine(self, *precisions: str) -> list:
            return []

    try:
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available: Beads()
        )
        assert isinstance(accelerator_here(), Abacus)
        device, why = choose_device("accelerator")
        assert (device.kind, why) == ("abacus", "asked for")
        assert [each.kind for each in available()] == ["abacus", "cpu"]
        assert not device.trusted("causal attention")
        assert device.trusted("attention")
    finally:
        KINDS.clear()
        KINDS.update(before)
        choosing.UNTRUSTED.discard(("abacus", "causal attention"))


class Beads:
    """What torch would name an accelerator it knows."""

    type = "abacus"


def test_an_accelerator_of_an_unknown_kind_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: Beads())
    assert accelerator_here() is None
    assert choose_device("auto")[0].is_cpu


@pytest.mark.parametrize("choose", [choose_train_device, candidates])
def test_what_a_run_asks_for_is_examined_in_its_own_precision(
    choose: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run chooses its device in a new process, which has examined nothing."""
    examined: set[str] = set()
    pretend(monkeypatch)
    monkeypatch.setattr(
        Pretended, "examine", lambda self, *precisions: examined.update(precisions) or []
    )
    choose(TrainConfig(device="accelerator", dtype="float16"))
    assert examined == {"float32", Pretended.half, "float16"} != {"float32", Pretended.half}


def test_the_cpu_can_always_be_asked_for() -> None:
    device, reason = choose_device("cpu")
    assert device == Cpu()
    assert reason == "asked for"
    device.synchronise()
    assert device.peak_memory_bytes() > 0
    assert device.examine() == []


def test_auto_gives_a_reason() -> None:
    assert choose_device("auto")[1]


def test_what_the_machine_shares_and_pins() -> None:
    assert {kind for kind in KINDS if device_of(kind).shares_memory} == {"cpu", "mps"}
    assert {kind for kind in KINDS if device_of(kind).pins_memory} == {"cuda", "xpu"}
    assert {kind for kind in KINDS if device_of(kind).records_graphs} == {"cuda"}
    assert {kind for kind in KINDS if device_of(kind).is_deterministic} == {"cpu"}
    assert Mps.half == "float16"


def test_where_nothing_runs_at_once_the_first_runs_first() -> None:
    order: list[str] = []

    def run(name: str) -> torch.Tensor:
        order.append(name)
        return torch.ones(1)

    Cpu().side_by_side(at_once=True)(lambda: run("first"), lambda: run("second"))
    assert order == ["first", "second"]
    with pytest.raises(NotImplementedError, match="cpu"):
        Cpu().graph_recorder()


def test_the_peak_is_what_was_held_inside() -> None:
    with Cpu().watch_peak() as peak:
        held = torch.ones(1 << 24)
    assert peak.added >= 0.9 * held.numel() * 4
    with Cpu().watch_peak() as peak:
        pass
    assert peak.added < held.numel()


def comparisons(source: str) -> list[int]:
    """Lines that compare the kind of a device with a kind's name, or reach for torch's module of a kind."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asks = any(
                isinstance(side, ast.Attribute) and side.attr in ("kind", "type") for side in sides
            )
            names = {
                each.value
                for side in sides
                for each in ast.walk(side)
                if isinstance(each, ast.Constant)
            }
            found += [node.lineno] if asks and names & NAMES else []
        if isinstance(node, ast.Attribute) and node.attr in NAMES - {"cpu"}:
            found += (
                [node.lineno]
                if isinstance(node.value, ast.Name) and node.value.id == "torch"
                else []
            )
    return found


def test_no_file_outside_machine_knows_the_kinds_of_device() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != PACKAGE / "machine"
        for line in comparisons(path.read_text(encoding="utf-8"))
    ]
    assert found == [], "ask the device: what differs between kinds is in lapclip/machine"


@pytest.mark.parametrize(
    "source",
    [
        'device.kind == "cuda"',
        'x.device.type in ("mps", "xpu")',
        '"cpu" != device.kind',
        "torch.cuda.synchronize()",
    ],
)
def test_comparing_kinds_is_noticed(source: str) -> None:
    assert comparisons(source) == [1]
    assert comparisons('saved.kind == "tar"') == []


def test_the_base_class_cannot_be_made() -> None:
    with pytest.raises(TypeError):
        Device()  # pyright: ignore[reportAbstractUsage]
