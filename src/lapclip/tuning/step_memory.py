"""The memory of a training step, measured while it runs: its parts, and how many pairs fit at once.

A ledger follows the memory of every tensor that an operation makes until it is freed. Parameters
and the optimizer's state are known before the step, activations when autograd saves them for the
backward pass, gradients when they arrive.

`training/memory.py` predicts the memory of our own models if all of a model trains. Pretrained
networks and partly frozen models are measured here: once with some pairs and once with twice as
many, and the difference is the memory of so many pairs.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lapclip.config import ModelConfig, TrainConfig
from lapclip.data.batches import Batch
from lapclip.errors import ConfigError
from lapclip.machine import system_memory
from lapclip.machine.choose_device import prepare_device
from lapclip.machine.cpu import Cpu
from lapclip.machine.device import Device
from lapclip.measure.timing import run_in_new_process
from lapclip.model.shapes import SHAPES
from lapclip.training.cuda_graph import GraphedStep
from lapclip.training.memory import MARGIN, SHARE_OF_MEMORY
from lapclip.training.step import TrainStep
from lapclip.tuning.rehearsal import Rehearsal, Workload, some_pairs

OWNERS = ("parameters", "gradients", "optimizer", "activations")
TEMPORARY = "temporary"
MEASURED_PAIRS = 4
# Bytes of the process for each byte in the ledger. Measured: 1.23 with EfficientNet-Lite0, whose
# convolutions need working space, with gaps between results of different sizes.
UNSEEN_FACTOR = 1.3


@dataclass(frozen=True)
class StepMemory:
    """Bytes in use at the peak of a step. All but `peak` and `traffic` add up to `peak`."""

    peak: int
    """Memory of the process."""
    process: int
    """Python, torch and its libraries before there is a model."""
    parameters: int
    """Weights, and their rounded copy in half precision."""
    gradients: int
    """Gradients that have arrived by the peak."""
    optimizer: int
    activations: int
    rest: int
    """Results on their way to the next operation, working space of libraries, and gaps."""
    traffic: int
    """Bytes that the operations of a step read and write, each operand once."""

    @property
    def parts(self) -> dict[str, int]:
        names = ("process", *OWNERS, "rest")
        return {name: getattr(self, name) for name in names}


@dataclass
class LedgerEntry:
    """Memory that one or several tensors share."""

    owner: str
    size: int
    storage: weakref.ref
    """Removes the entry when the memory is freed."""


class Ledger(TorchDispatchMode):
    """Follows the memory of tensors through the operations that make them."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, int] = dict.fromkeys((*OWNERS, TEMPORARY), 0)
        self.at_peak = dict(self.held)
        """What was held when the sum was largest."""
        self.peak_saved = 0
        """Largest memory of activations."""
        self.peak_passing = 0
        """Largest memory of activations and temporary results."""
        self.traffic = 0
        self._entries: dict[int, LedgerEntry] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not func.is_view:
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            for tensor in (*inputs, *outputs):
                self.traffic += tensor.numel() * tensor.element_size()
        for tensor in outputs:
            self.enter(tensor, TEMPORARY)
        return result

    def enter(self, tensor: Tensor, owner: str) -> None:
        """Record who owns a tensor's memory. Only temporary memory may get another owner."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        entry = self._entries.get(key)
        if entry is not None:
            if entry.owner != TEMPORARY or owner == TEMPORARY:
                return
            self.held[entry.owner] -= entry.size
        reference = weakref.ref(storage, lambda _: self._remove(key))
        self._entries[key] = LedgerEntry(owner, storage.nbytes(), reference)
        self.held[owner] += storage.nbytes()
        activations, temporary = self.held["activations"], self.held[TEMPORARY]
        self.peak_saved = max(self.peak_saved, activations)
        self.peak_passing = max(self.peak_passing, activations + temporary)
        if sum(self.held.values()) > sum(self.at_peak.values()):
            self.at_peak = dict(self.held)

    def _remove(self, key: int) -> None:
        entry = self._entries.pop(key)
        self.held[entry.owner] -= entry.size

    @contextmanager
    def follow(self, step: TrainStep) -> Iterator[None]:
        """Enter what a step works with, and follow its gradients and saved activations."""
        parameters = list(step.model.parameters())
        for parameter in (*parameters, *step.worker.parameters()):
            self.enter(parameter, "parameters")
        for state in step.optimizer.state.values():
            for value in state.values():
                self.enter(value, "optimizer")
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._enter_gradient)
            for parameter in parameters
            if parameter.requires_grad
        ]
        saved_tensors = torch.autograd.graph.saved_tensors_hooks(
            self._enter_activation, lambda tensor: tensor
        )
        with self, saved_tensors:
            yield
        for hook in hooks:
            hook.remove()

    def _enter_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.enter(parameter.grad, "gradients")

    def _enter_activation(self, tensor: Tensor) -> Tensor:
        self.enter(tensor, "activations")
        return tensor


def measure_step_memory(workload: Workload) -> StepMemory:
    """Measure the memory of a step on the CPU by its owners.

    Runs in a new process, because only there the peak of the process is the step's.
    """
    request = {"shape": asdict(workload.shape), "train": asdict(workload.train)}
    return StepMemory(**run_in_new_process(__name__, request))


def measure_here(workload: Workload) -> StepMemory:
    """Measure the memory of a step in this process, which must be new."""
    # Draw the images and train a small model first: what libraries set up is not the step's.
    device = Cpu()
    some_pairs(workload.train.batch_size, workload.shape.image_size)
    small = Rehearsal(Workload(SHAPES["tiny"], workload.train), device)
    small.step_once()
    small.step_once()
    del small
    gc.collect()
    device.release_memory()  # otherwise memory of the small model would be used again, uncounted
    process = system_memory.memory_bytes()
    rehearsal = Rehearsal(workload, device)
    assert not isinstance(rehearsal.step, GraphedStep), "a recorded step cannot be followed"
    rehearsal.step_once()
    rehearsal.step_once()
    peak = device.peak_memory_bytes()
    ledger = Ledger()
    with ledger.follow(rehearsal.step):
        rehearsal.step_once()
    owned = {owner: ledger.at_peak[owner] for owner in OWNERS}
    rest = peak - process - sum(owned.values())
    return StepMemory(peak=peak, process=process, rest=rest, traffic=ledger.traffic, **owned)


@dataclass(frozen=True)
class Needs:
    """Memory that steps need beside the weights, which are in memory already."""

    trainable: int
    """Bytes of the weights that train."""
    pair: int
    """Bytes of one pair on its way through the towers and back."""

    def bytes_for(self, pairs: int) -> int:
        """Return the bytes for so many pairs at once, with gradients and AdamW's two averages."""
        return 3 * self.trainable + round(UNSEEN_FACTOR * self.pair * pairs)


def measure_needs(step: TrainStep, batch: Batch) -> Needs:
    """Measure the memory of a pair. The weights stay as they are."""
    pairs = min(MEASURED_PAIRS, max(1, len(batch.tokens_BL) // 2))
    ledgers = []
    for count in (pairs, 2 * pairs):
        ledger = Ledger()
        with ledger.follow(step):
            step.rehearse(batch, count)
        ledgers.append(ledger)
    fewer, more = ledgers
    # Temporary results may be those of weights, which do not grow with the pairs; activations do.
    growth = max(more.peak_saved - fewer.peak_saved, more.peak_passing - fewer.peak_passing)
    trainable = sum(
        parameter.numel() * parameter.element_size()
        for parameter in step.model.parameters()
        if parameter.requires_grad
    )
    return Needs(trainable, growth // pairs)


def choose_micro_batch(step: TrainStep, batch: Batch, device: Device) -> tuple[int, str]:
    """Return the micro-batch that fits by measurement, and why. 0 is the whole batch.

    Raises ConfigError if the requested micro-batch, or not even one pair, fits.
    """
    assert not isinstance(step, GraphedStep), "a step with unpredictable memory is not recorded"
    train = step.config
    needs, free = measure_needs(step, batch), device.free_bytes()

    def describe(pairs: int) -> str:
        needed = needs.bytes_for(pairs) / 1e9
        return f"{pairs:,} at once need {needed:.1f} GB of the {free / 1e9:.1f} GB that are free"

    requested = min(train.micro_batch, train.batch_size)
    if requested and needs.bytes_for(requested) <= MARGIN * free:
        return train.micro_batch, "asked for"
    fitting = [
        size
        for size in halvings(train.batch_size)
        if needs.bytes_for(size) <= SHARE_OF_MEMORY * free
    ]
    if requested or not fitting:
        hint = "--recipe heads, where less is trained, or smaller towers"
        if fitting:
            hint = (
                f"--set train.micro_batch={fitting[0]}, which gives the same result in less memory"
            )
        raise ConfigError(
            f"Pairs do not fit on {device.kind}: {describe(requested or 1)}.", hint=hint
        )
    if fitting[0] == train.batch_size:
        return 0, f"the whole batch fits: {describe(fitting[0])}"
    return fitting[0], f"what fits: {describe(fitting[0])}"


def halvings(size: int) -> Iterator[int]:
    """Yield a batch size, half of it (rounded up), and so on down to 1."""
    while size > 1:
        yield size
        size = (size + 1) // 2
    yield 1


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    workload = Workload(ModelConfig(**request["shape"]), TrainConfig(**request["train"]))
    prepare_device(Cpu(), int(workload.train.threads))
    print(json.dumps(asdict(measure_here(workload))))
