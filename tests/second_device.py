"""A second device on a machine that has none: an accelerator in name, which computes on the CPU."""

from __future__ import annotations

from random import Random

import pytest
import torch

from lapclip.machine import system_memory
from lapclip.machine.canary import Result
from lapclip.machine.device import KINDS
from lapclip.machine.gpus import Xpu
from lapclip.machine.transfer import PinnedTransfer, Transfer

from .late_streams import LateRuntime


class Pretended(Xpu):
    """Says that it is an accelerator, and computes on the CPU: everything but the hardware is real."""

    @property
    def torch(self) -> torch.device:
        return torch.device("cpu")

    @property
    def label(self) -> str:
        return "a pretended accelerator"

    def transfer(self) -> Transfer:
        return PinnedTransfer(self.torch, LateRuntime(Random(0)))

    def synchronise(self) -> None:
        """Nothing is ever under way."""

    def peak_memory_bytes(self) -> int:
        return system_memory.peak_memory_bytes()

    def free_bytes(self) -> int:
        return system_memory.available_bytes()

    def examine(self, *precisions: str) -> list[Result]:
        return []


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch have found one."""
    monkeypatch.setitem(KINDS, "xpu", Pretended)
    monkeypatch.setattr("lapclip.machine.choose_device.accelerator_here", Pretended)
