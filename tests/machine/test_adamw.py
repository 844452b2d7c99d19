from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lapclip.machine.adamw import AdamW


@pytest.mark.parametrize("fused", [False, True])
def test_updates_and_state_are_torchs_own(fused: bool) -> None:
    found = []
    for kind in (torch.optim.AdamW, AdamW):
        torch.manual_seed(1)
        weights = [torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)]
        optimizer = kind(
            [{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}],
            0.1,
            fused=fused,
        )
        for step in range(4):
            optimizer.zero_grad()
            torch.stack([((weight - 1) ** 2).sum() for weight in weights]).sum().backward()
            optimizer.step()
            if step == 1:
                other = kind([{"params": weights[:1]}, {"params": weights[1:]}], 0.1, fused=fused)
                other.load_state_dict(optimizer.state_dict())
                optimizer = other
        found.append(
            [*weights, *(value for state in optimizer.state.values() for value in state.values())]
        )
    assert len(found[0]) == len(found[1]) == 8
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_a_step_of_training_does_not_load_the_compiler() -> None:
    code = """
import sys, torch
from lapclip.config import TrainConfig
from lapclip.machine.choose_device import choose_device, prepare_device
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.training.cuda_graph import make_step
device, _ = choose_device("cpu")
prepare_device(device, 1)
for optimizer in ("adamw", "muon"):
    config = TrainConfig(batch_size=4, steps=1, dtype="float32", compile="none", optimizer=optimizer)
    step = make_step(CLIP(SHAPES["tiny"], seed=1).to(device.torch), config, device)
    for parameter in step.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step.optimizer.step()
    step.optimizer.zero_grad()
    step.optimizer.state_dict()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr
