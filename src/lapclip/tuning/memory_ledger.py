"""What a training step holds in memory at its fullest moment, and how many bytes its operations read and write.

Every tensor that an operation makes is entered in a ledger and leaves it when its memory is freed. Whose it is becomes
known on the way: parameters and the optimiser's state before the step, activations when the backward pass asks to keep
them, gradients when they arrive. On the CPU this runs in a process of its own, because only the peak of a young
process is the step's.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lapclip.config import ModelConfig, TrainConfig
from lapclip.machine import facts
from lapclip.machine.devices import Device, prepare
from lapclip.model.shapes import SHAPES
from lapclip.training.step import TrainStep
from lapclip.tuning.fresh_process import in_fresh_process
from lapclip.tuning.workload import Rehearsal, Workload, some_pairs

KINDS = ("parameters", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True)
class StepMemory:
    """Bytes held when a step is at its fullest. All but `peak` and `traffic` add up to `peak`."""

    peak: int
    """The process's on the CPU, the allocator's on an accelerator."""
    process: int
    """Python, torch and its libraries, before there is a model; 0 on an accelerator, which does not hold them."""
    parameters: int
    """The weights, and their rounded copy in half precision."""
    gradients: int
    """Those that have arrived by then; at the end of the backward pass they are as large as the weights."""
    optimizer: int
    activations: int
    rest: int
    """Results on their way from one operation to the next, working space of libraries, and gaps."""
    traffic: int
    """Bytes that the operations of a step read and write, each operand once: what the memory is asked for."""

    @property
    def parts(self) -> dict[str, int]:
        names = ("process", "parameters", "gradients", "optimizer", "activations", "rest")
        return {name: getattr(self, name) for name in names}


class Ledger(TorchDispatchMode):
    """Follows the memory of tensors through the operations that make them."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.fullest = dict(self.held)
        self.most_kept, self.most_passing = 0, 0
        """The most that was kept for the backward pass, and that with results on their way, at whatever moment."""
        self.traffic = 0
        self._entries: dict[int, tuple[weakref.ref, str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not func.is_view:
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.traffic += sum(leaf.numel() * leaf.element_size() for leaf in (*read, *made))
        for tensor in made:
            self.enter(tensor, "temporary")
        return result

    def enter(self, tensor: Tensor, kind: str) -> None:
        """Note whose memory this is; what was noted as temporary may find an owner, nothing changes owners."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._entries.get(key)
        if known is not None and (known[1] != "temporary" or kind == "temporary"):
            return
        if known is not None:
            self.held[known[1]] -= known[2]
        size = storage.nbytes()
        self._entries[key] = (weakref.ref(storage, lambda _, key=key: self._leave(key)), kind, size)
        self.held[kind] += size
        self.most_kept = max(self.most_kept, self.held["activations"])
        self.most_passing = max(self.most_passing, self.held["activations"] + self.held["temporary"])
        if sum(self.held.values()) > sum(self.fullest.values()):
            self.fullest = dict(self.held)

    def _leave(self, key: int) -> None:
        _, kind, size = self._entries.pop(key)
        self.held[kind] -= size

    @contextmanager
    def following(self, step: TrainStep) -> Iterator[None]:
        """Enter what a step works with, and follow its gradients and what its graph keeps."""
        trained = list(step.model.parameters())
        for parameter in (*trained, *step.worker.parameters()):
            self.enter(parameter, "parameters")
        for state in step.optimizer.state.values():
            for value in state.values():
                self.enter(value, "optimizer")
        learning = [parameter for parameter in trained if parameter.requires_grad]
        hooks = [parameter.register_post_accumulate_grad_hook(self._gradient_of) for parameter in learning]

        def keep(tensor: Tensor) -> Tensor:
            self.enter(tensor, "activations")
            return tensor

        with self, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
        for hook in hooks:
            hook.remove()

    def _gradient_of(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.enter(parameter.grad, "gradients")


def step_memory(workload: Workload, device: Device) -> StepMemory:
    """The memory of a step, by whose it is."""
    if device.is_cpu:
        request = {"shape": asdict(workload.shape), "train": asdict(workload.train)}
        return StepMemory(**in_fresh_process(__name__, request))
    return measure(workload, device, device.forget_peak)


def measure(workload: Workload, device: Device, before: Callable[[], object] = lambda: None) -> StepMemory:
    """The same in this process, whose peak is the step's only if the process is young or counts from `before`."""
    # Images first, and steps of a small model: what libraries set up for themselves is the process's, not the step's.
    some_pairs(workload.train.batch_size, workload.shape.image_size)
    small = Rehearsal(Workload(SHAPES["tiny"], workload.train), device)
    small()
    small()
    del small
    gc.collect()
    device.release_memory()  # what the small model left would be used again, and counted for nobody
    before()
    process = facts.memory_bytes() if device.is_cpu else device.peak_memory_bytes()
    rehearsal = Rehearsal(workload, device)
    step = rehearsal.step
    assert isinstance(step, TrainStep), "a recorded step has no inside"
    rehearsal()
    rehearsal()
    peak = device.peak_memory_bytes()
    ledger = Ledger()
    with ledger.following(step):
        rehearsal()
    owned = {kind: ledger.fullest[kind] for kind in KINDS if kind != "temporary"}
    rest = peak - process - sum(owned.values())
    return StepMemory(peak=peak, process=process, rest=rest, traffic=ledger.traffic, **owned)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    wanted = Workload(ModelConfig(**asked["shape"]), TrainConfig(**asked["train"]))
    prepare(Device("cpu"), int(wanted.train.threads))
    print(json.dumps(asdict(measure(wanted, Device("cpu")))))
