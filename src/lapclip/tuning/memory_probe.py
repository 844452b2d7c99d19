"""What a training step holds in memory, seen by running it: by whose it is, and how many pairs fit at once.

Every tensor that an operation makes is entered in a ledger and leaves it when its memory is freed. Whose it is becomes
known on the way: parameters and the optimiser's state before the step, activations when the backward pass asks to keep
them, gradients when they arrive.

`training/memory.py` predicts the memory of our own models where all of a model trains. What a foreign network keeps for
its backward pass, and what is left of a model that is partly frozen, is seen here: a step is run once with some pairs
and once with twice as many, and the difference is what so many pairs take.
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
from lapclip.data.batches import Batch
from lapclip.errors import ConfigError
from lapclip.machine import system_memory
from lapclip.machine.choose_device import prepare_device
from lapclip.machine.cpu import Cpu
from lapclip.machine.device import Device
from lapclip.measure.timing import run_in_new_process
from lapclip.model.shapes import SHAPES
from lapclip.training.cuda_graph import AnyStep
from lapclip.training.memory import MARGIN, SHARE_OF_MEMORY
from lapclip.training.step import TrainStep
from lapclip.tuning.measure import Rehearsal, Workload, some_pairs

KINDS = ("parameters", "gradients", "optimizer", "activations", "temporary")
PAIRS = 4
"""How many are taken through it first; then twice as many."""
UNSEEN = 1.3
"""What the process takes for each byte that the ledger sees: measured 1.23 with EfficientNet-lite0, whose convolutions
want working space of their own, and gaps between results of different sizes."""


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
        self.most_saved, self.most_passing = 0, 0
        """The most that was held for the backward pass, and that with results on their way, at whatever moment."""
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
        self.most_saved = max(self.most_saved, self.held["activations"])
        self.most_passing = max(
            self.most_passing, self.held["activations"] + self.held["temporary"]
        )
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
        trainable = [parameter for parameter in trained if parameter.requires_grad]
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._gradient_of)
            for parameter in trainable
        ]

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
    """The memory of a step, by whose it is. On the CPU in a new process, because only there the peak is the step's."""
    if device.is_cpu:
        request = {"shape": asdict(workload.shape), "train": asdict(workload.train)}
        return StepMemory(**run_in_new_process(__name__, request))
    return measure(workload, device, device.forget_peak)


def measure(
    workload: Workload, device: Device, before: Callable[[], object] = lambda: None
) -> StepMemory:
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
    process = system_memory.memory_bytes() if device.is_cpu else device.peak_memory_bytes()
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


@dataclass(frozen=True)
class Needs:
    """What steps take beside the weights, which are in memory already."""

    trainable: int
    """Bytes of weights that train."""
    pair: int
    """Bytes that a pair takes on its way through the towers and back."""

    def of(self, pairs: int) -> int:
        """Bytes that so many pairs at once need: gradients and AdamW's two averages are as large as what trains."""
        return 3 * self.trainable + round(UNSEEN * self.pair * pairs)


def measure_needs(step: TrainStep, batch: Batch) -> Needs:
    """See what a pair takes. The weights stay as they are."""
    some = min(PAIRS, max(1, len(batch.tokens_BL) // 2))
    few, more = (_followed(step, batch, pairs) for pairs in (some, 2 * some))
    # Results on their way may be those of weights, whatever the number of pairs; activations surely grow with it.
    pair = max(more.most_saved - few.most_saved, more.most_passing - few.most_passing) // some
    trainable = sum(
        each.numel() * each.element_size() for each in step.model.parameters() if each.requires_grad
    )
    return Needs(trainable, pair)


def pairs_at_once(step: AnyStep, batch: Batch, device: Device) -> tuple[int, str]:
    """The micro-batch to take, 0 for the whole batch wherever that fits, and why; refused if not even one pair fits."""
    assert isinstance(step, TrainStep), (
        "a step whose memory cannot be predicted is not recorded as a graph"
    )
    train = step.config
    needs, free = measure_needs(step, batch), device.free_bytes()

    def needed(pairs: int) -> str:
        return f"{pairs:,} at once need {needs.of(pairs) / 1e9:.1f} GB of the {free / 1e9:.1f} GB that are free"

    asked = min(train.micro_batch, train.batch_size)
    if asked and needs.of(asked) <= MARGIN * free:
        return train.micro_batch, "asked for"
    fitting = next(
        (size for size in halvings(train.batch_size) if needs.of(size) <= SHARE_OF_MEMORY * free),
        None,
    )
    if asked or fitting is None:
        hint = f"--set train.micro_batch={fitting}, which gives the same result in less memory"
        less = "--recipe heads, where less is trained, or smaller towers"
        raise ConfigError(
            f"Pairs do not fit on {device.kind}: {needed(asked or 1)}.",
            hint=hint if fitting else less,
        )
    whole = fitting == train.batch_size
    return (
        0 if whole else fitting
    ), f"{'the whole batch fits' if whole else 'what fits'}: {needed(fitting)}"


def halvings(size: int) -> Iterator[int]:
    """A batch, half of it, and so on down to 1."""
    while size > 1:
        yield size
        size = (size + 1) // 2
    yield 1


def _followed(step: TrainStep, batch: Batch, pairs: int) -> Ledger:
    ledger = Ledger()
    with ledger.following(step):
        step.rehearse(batch, pairs)
    return ledger


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    workload = Workload(ModelConfig(**request["shape"]), TrainConfig(**request["train"]))
    prepare_device(Cpu(), int(workload.train.threads))
    print(json.dumps(asdict(measure(workload, Cpu()))))
