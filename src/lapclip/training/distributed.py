"""Several processes that train one model: who they are, and what they send each other.

`torchrun` starts the processes (ranks) and starts them again after a failure; torch's process groups carry tensors.
A rank takes some rows of every batch through the towers, sees the embeddings of all rows, and computes its rows of the
loss. Gradients are summed, never averaged: the sum over ranks is the gradient of the whole batch.

- DDP: every rank has all weights. Gradients are summed in one flat buffer after the backward pass.
- FSDP: every rank has a part of each weight (`fully_shard`), which torch gathers where it is used.

Only tensors travel. Settings, scores and reasons are JSON in a tensor of bytes: torch's collectives of objects unpickle
what they receive. A process without torchrun never imports `torch.distributed`.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import secrets
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapclip.errors import (
    CheckpointError,
    ConfigError,
    LostRank,
    OutOfMemory,
    TrainingError,
    first_line,
)
from lapclip.machine.device import Device
from lapclip.machine.facts import logical_cores
from lapclip.model.block import Transformer
from lapclip.text import one_line

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lapclip.model.clip import CLIP

T = TypeVar("T")

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
TOLD = "told"  # marks an error that ranks have read: torch keeps the number when others join
MEETING_TIME = timedelta(minutes=2)  # for processes that torchrun starts at the same time
PATIENCE = timedelta(days=1)  # for work that one rank does alone, such as packing images
MAX_JSON_BYTES = 1 << 28
MAX_REASON_LENGTH = 300  # characters of what another rank says
POLL_SECONDS = 0.02
PARAMETERS = ("logit_scale", "logit_bias")  # metrics that every rank has whole
MIN_GAIN = 1.1  # of another division of rows: timings of equal hosts differ too
ALIGNMENT = 64  # numbers: 256 bytes in float32
WORTH_A_RESTART = (LostRank, OutOfMemory, CheckpointError)
SIGNS_OF_A_LOST_RANK = ("gloo/transport", "connection closed by peer", "nccl error", "ncclsystem")


@contextmanager
def joined_ranks(*, holds_run: bool = False) -> Iterator[Ranks]:
    """Meet the other ranks that torchrun started, and part from them at the end.

    `holds_run` says that this computer has the folder of the run that continues. The first such rank writes it. An
    error is left in torchelastic's error file, which `reason_of_last_stop` reads after a restart.
    """
    import torch.distributed as dist

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = fresh_store(rank, count)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=PATIENCE)
        yield Ranks.meet(holds_run=holds_run)
        # A rank that leaves while another still sends to it would abort that one.
        dist.barrier()
    except BaseException as error:
        failure = lost_rank(error) or error
        write_error_file(failure)
        if failure is error:
            raise
        raise failure from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def fresh_store(rank: int, count: int) -> Any:
    """Return a part of torchrun's store that no earlier process has written to.

    After a restart the store may hold addresses of processes that are gone, and torchrun passes no number that is the
    same on all hosts and new at each restart. So rank 0 draws a name, and answers every rank that greets it.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    store, *_ = next(iter(rendezvous("env://", rank, count, timeout=MEETING_TIME)))
    own = secrets.token_hex(8)
    until = time.monotonic() + MEETING_TIME.total_seconds()

    def part_named(name: str) -> Any:
        return dist.PrefixStore(f"lapclip/{name}", store)  # pyright: ignore[reportPrivateImportUsage]

    def wait(missing: list[int]) -> None:
        if time.monotonic() > until:
            ranks = ", ".join(map(str, missing))
            raise LostRank(f"Rank {rank} waited {MEETING_TIME} in vain for rank {ranks} to start.")
        time.sleep(POLL_SECONDS)

    if rank:
        store.set(f"lapclip/greeting/{rank}", own)
        while True:
            greeting, name = json.loads(store.get(f"lapclip/answer/{rank}"))
            if greeting == own:
                part = part_named(name)
                part.set(f"arrived/{rank}", "")
                return part
            wait([0])
    part = part_named(own)
    while True:
        missing = [other for other in range(1, count) if not part.check([f"arrived/{other}"])]
        if not missing:
            return part
        for other in missing:
            if store.check([f"lapclip/greeting/{other}"]):
                greeting = store.get(f"lapclip/greeting/{other}").decode()
                store.set(f"lapclip/answer/{other}", json.dumps([greeting, own]))
        wait(missing)


class Ranks:
    """The processes that train one model, as one of them sees them. `ALONE` is a process without torchrun."""

    def __init__(self, group: Any = None) -> None:
        """Wrap a process group for tensors on the CPU, whose ranks wait for each other as long as it takes."""
        self.rank, self.count = 0, 1
        if group is not None:
            import torch.distributed as dist

            self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self._message_group: Any = group
        self._step_group: Any = group
        self._tensor_group: Any = group
        self._flat: Tensor | None = None
        self.writer = 0
        """Rank that has the folder of the run, chooses settings and prints."""
        self.hosts = [platform.node()] * self.count
        """Name of the computer of each rank."""
        self.node_numbers = [0] * self.count
        """Number of the computer of each rank, as torchrun counts them."""
        self.threads = 1
        """CPU threads that every rank can have: results depend on how many there are."""
        self.has_own_devices = False
        """Whether every rank has an accelerator of its own."""
        self.last_stop: str | None = None
        """Why torchrun has started the ranks again."""
        self.waiting_seconds = 0.0
        """Time that this rank has spent in exchanges, most of it waiting for slower ranks."""

    @classmethod
    def meet(cls, *, holds_run: bool) -> Ranks:
        """Return the ranks of the default process group, and who writes."""
        import torch.distributed as dist

        ranks = cls(dist.group.WORLD)
        local_count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        own = {
            "host": platform.node(),
            "node": int(os.environ.get("GROUP_RANK", "0")),
            "holds_run": holds_run,
            "threads": threads_of_rank(local_count),
            "has_own_device": local_count <= torch.accelerator.device_count(),
        }
        facts = ranks.gather_json(own)
        ranks.hosts = [one_line(fact["host"])[:64] for fact in facts]
        ranks.node_numbers = [int(fact["node"]) for fact in facts]
        ranks.threads = min(int(fact["threads"]) for fact in facts)
        ranks.has_own_devices = all(fact["has_own_device"] is True for fact in facts)
        holders = [rank for rank, fact in enumerate(facts) if fact["holds_run"] is True]
        ranks.writer = min(holders, default=0)
        if ranks.has_own_devices:
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        return ranks

    def start_steps(self, device: Device, timeout_seconds: float) -> None:
        """Make the groups that steps use: an exchange that takes longer than the time-out ends this rank.

        Only the barrier at the end is as patient as before: the writer computes the final scores alone.
        """
        import torch.distributed as dist

        timeout = timedelta(seconds=timeout_seconds)
        self._step_group = self._tensor_group = dist.new_group(timeout=timeout)
        self._message_group = self._step_group
        if device.collectives == "nccl" and self.has_own_devices:
            self._tensor_group = dist.new_group(backend="nccl", timeout=timeout)

    @property
    def is_distributed(self) -> bool:
        """Whether torchrun started this process, with other ranks or without."""
        return self._message_group is not None

    @property
    def process_group(self) -> Any:
        """Torch's process group for tensors on the CPU. None without torchrun."""
        return self._message_group

    @property
    def writes(self) -> bool:
        """Whether this rank has the folder of the run."""
        return self.rank == self.writer

    # Rows of a batch

    def divide_rows(self, batch_size: int, weights: str = "") -> list[int]:
        """Return how many rows of a batch each rank takes: equally many, or as `train.rows` weighs the hosts.

        Weights of another number of hosts count as none: a run goes on with the hosts that are left.
        """
        ranks_of_node = Counter(self.node_numbers)
        node_weights = {node: Fraction(count) for node, count in ranks_of_node.items()}
        if self.are_weighed_by(weights):
            numbers = [Fraction(weight) for weight in weights.split(",")]
            node_weights = dict(zip(sorted(ranks_of_node), numbers, strict=True))
        shares = [node_weights[node] / ranks_of_node[node] for node in self.node_numbers]
        rows = divide(batch_size, shares)
        if min(rows) < 1:
            rank = rows.index(0)
            raise ConfigError(
                f"Rank {rank} on {self.hosts[rank]} would have no row of a batch of {batch_size:,}.",
                hint="a larger train.batch_size, or train.rows that differ less",
            )
        return rows

    def are_weighed_by(self, weights: str) -> bool:
        """Return whether `train.rows` has a number for each host."""
        return bool(weights) and weights.count(",") + 1 == len(set(self.node_numbers))

    def cut_micro_batches(
        self, own_rows: int, rows: Sequence[int], micro_batch: int
    ) -> list[slice]:
        """Cut the rows of this rank into micro-batches, equally many on each rank that has so many rows.

        The towers of FSDP exchange weights in every pass, so every rank has to make equally many:
        `refuse_few_rows` sees to it.
        """
        if not self.is_distributed:
            starts = range(0, own_rows, micro_batch)
            return [slice(first, min(own_rows, first + micro_batch)) for first in starts]
        count = min(own_rows, -(-max(rows) // micro_batch))  # none without rows
        ends = itertools.accumulate(divide(own_rows, [1] * count), initial=0)
        return [slice(first, last) for first, last in itertools.pairwise(ends)]

    def will_sum(self, model: CLIP, *, is_last: bool) -> None:
        """Have FSDP sum gradients in the backward pass of the last micro-batch only."""
        for tower in (model.image, model.text):
            if hasattr(tower, "set_requires_gradient_sync"):
                cast(Any, tower).set_requires_gradient_sync(is_last)

    # Tensors

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Count the time of an exchange."""
        began = time.perf_counter()
        yield
        self.waiting_seconds += time.perf_counter() - began

    def gather(self, embeddings: Mapping[str, Tensor], rows: Sequence[int]) -> Mapping[str, Tensor]:
        """Return embeddings of the whole batch, in the order of ranks, from those of this rank's rows.

        The backward pass gives each rank the sum of the gradients that all ranks have for its rows.
        """
        if not self.is_distributed:
            return embeddings
        widths = [tensor.shape[1] for tensor in embeddings.values()]
        own = torch.cat(list(embeddings.values()), dim=1)
        gathered = cast(Tensor, _Gather.apply(own, self, list(rows)))
        return dict(zip(embeddings, gathered.split(widths, dim=1), strict=True))

    def gather_rows(self, own: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the rows of all ranks in the order of ranks, without gradients."""
        import torch.distributed as dist

        most = max(rows)
        padded = F.pad(own, (0, 0, 0, most - len(own)))
        gathered = [torch.empty_like(padded) for _ in rows]
        with self._exchange():
            dist.all_gather(gathered, padded, group=self._tensor_group)
        return torch.cat([part[:count] for part, count in zip(gathered, rows, strict=True)])

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over ranks, in place, and return it."""
        if self.is_distributed:
            import torch.distributed as dist

            with self._exchange():
                dist.all_reduce(tensor, group=self._tensor_group)
        return tensor

    def sum_gradients(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Replace gradients by their sums over ranks, which travel as `dtype` in one flat buffer.

        One sum over one buffer has the same order in every step and after every restart, so that the same number of
        ranks gives the same bits, and a CUDA graph can record it. FSDP has summed gradients of weights in parts.
        """
        if not self.is_distributed:
            return
        whole = []
        for parameter in parameters:
            if parameter.grad is None:
                raise AssertionError("A parameter that learns has no gradient to sum.")
            if is_sharded(parameter) != is_sharded(parameter.grad):
                raise AssertionError("A weight in parts has a gradient that was not summed.")
            if not is_sharded(parameter):
                whole.append(parameter)
        gradients = [cast(Tensor, parameter.grad) for parameter in whole]
        # Kernels are slower on memory that is not aligned, so each part begins at a multiple.
        sizes = [-(-gradient.numel() // ALIGNMENT) * ALIGNMENT for gradient in gradients]
        if self._flat is None or self._flat.numel() != sum(sizes) or self._flat.dtype != dtype:
            self._flat = torch.zeros(sum(sizes), dtype=dtype, device=gradients[0].device)
        shaped = [
            part[: gradient.numel()].view_as(gradient)
            for part, gradient in zip(self._flat.split(sizes), gradients, strict=True)
        ]
        torch._foreach_copy_(shaped, gradients)  # pyright: ignore[reportPrivateImportUsage]
        self.sum(self._flat)
        if dtype == gradients[0].dtype:
            for parameter, part in zip(whole, shaped, strict=True):
                parameter.grad = part
        else:
            torch._foreach_copy_(gradients, shaped)  # pyright: ignore[reportPrivateImportUsage]

    def sum_metrics(self, values: Tensor, names: Sequence[str]) -> Tensor:
        """Return metrics of the whole batch: sums of what rows of each rank add, and the parameters among them."""
        is_parameter = torch.tensor([name in PARAMETERS for name in names], device=values.device)
        return torch.where(is_parameter, values, self.sum(values.clone()))

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of each gradient. Those in parts are computed over all ranks."""
        local = [local_part(gradient) for gradient in gradients]
        norms = torch.stack(torch._foreach_norm(local))  # pyright: ignore[reportPrivateImportUsage]
        sharded = [is_sharded(gradient) for gradient in gradients]
        if any(sharded):
            in_parts = torch.tensor(sharded, device=norms.device)
            summed = self.sum(torch.where(in_parts, norms**2, 0.0))
            norms = torch.where(in_parts, summed.sqrt(), norms)
        return norms

    def pass_on(self, tensors: Sequence[Tensor], next_rows: int) -> list[Tensor]:
        """Send tensors to the next rank and return those of the rank before, which have `next_rows` rows."""
        if self.count == 1:
            return list(tensors)
        import torch.distributed as dist

        received = [tensor.new_empty(next_rows, *tensor.shape[1:]) for tensor in tensors]
        next_rank, previous_rank = (self.rank + 1) % self.count, (self.rank - 1) % self.count
        group = self._tensor_group
        sends = [
            dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=next_rank)
            for tensor in tensors
        ]
        receives = [
            dist.P2POp(dist.irecv, tensor, group=group, group_peer=previous_rank)
            for tensor in received
        ]
        with self._exchange():
            for work in dist.batch_isend_irecv(sends + receives):
                work.wait()
        return received

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with the writer's, for example initial weights."""
        if not self.is_distributed:
            return
        import torch.distributed as dist

        with self._exchange():
            for tensor in tensors:
                group = self._message_group if tensor.is_cpu else self._tensor_group
                dist.broadcast(tensor.detach(), group=group, group_src=self.writer)

    # JSON and arrays

    def broadcast_json(self, value: Any = None, source: int | None = None) -> Any:
        """Return the JSON value of one rank, by default the writer, on every rank.

        Before the first step the other ranks wait as long as that rank needs.
        """
        if not self.is_distributed:
            return value
        source = self.writer if source is None else source
        body = json.dumps(value).encode() if self.rank == source else b""
        return json.loads(self._broadcast_bytes(body, source))

    def gather_json(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, in the order of ranks."""
        return [self.broadcast_json(value, source) for source in range(self.count)]

    def broadcast_array(self, array: np.ndarray | None, source: int | None = None) -> np.ndarray:
        """Return the array of one rank, by default the writer, on every rank."""
        source = self.writer if source is None else source
        header, body = None, b""
        if self.rank == source:
            assert array is not None
            header, body = [array.dtype.str, list(array.shape)], array.tobytes()
        if not self.is_distributed:
            assert array is not None
            return array
        dtype, shape = self.broadcast_json(header, source)
        return np.frombuffer(self._broadcast_bytes(body, source), dtype).reshape(shape)

    def _broadcast_bytes(self, body: bytes, source: int) -> bytearray:
        import torch.distributed as dist

        size = torch.tensor([len(body)])
        with self._exchange():
            dist.broadcast(size, group=self._message_group, group_src=source)
        if not 0 <= int(size) <= MAX_JSON_BYTES:
            raise TrainingError(f"Rank {source} announced a message of {int(size):,} bytes.")
        received = bytearray(body) if self.rank == source else bytearray(int(size))
        if received:
            data = torch.frombuffer(received, dtype=torch.uint8)
            with self._exchange():
                dist.broadcast(data, group=self._message_group, group_src=source)
        return received

    def first_reason(self, reason: str | None) -> str | None:
        """Return the reason of the first rank that has one, on every rank."""
        first, _ = self.agree_on_stop(reason, is_save_due=False)
        return first

    def agree_on_stop(self, reason: str | None, *, is_save_due: bool) -> tuple[str | None, bool]:
        """Return the first rank's reason to stop, and whether the writer finds a checkpoint due, on every rank.

        Clocks of ranks differ, and all ranks have to save at the same step.
        """
        if not self.is_distributed:
            return reason, is_save_due
        import torch.distributed as dist

        own_source = self.count if reason is None else self.rank
        own_delay = 0 if self.writes and is_save_due else 1
        agreed = torch.tensor([own_source, own_delay])
        with self._exchange():
            dist.all_reduce(agreed, dist.ReduceOp.MIN, group=self._step_group)
        source, delay = agreed.tolist()
        is_save_due = delay == 0
        if source not in range(self.count):
            return None, is_save_due
        reason = one_line(self.broadcast_json(reason, source))[:MAX_REASON_LENGTH]
        if source != self.writer:
            reason = f"{reason} (rank {source} on {self.hosts[source]})"
        return reason, is_save_due

    def compute_in_shares(
        self, compute: Callable[[T], np.ndarray], items: Sequence[T]
    ) -> Iterator[np.ndarray]:
        """Yield the array of each item in order, as `map` does. Ranks compute them in turns and give them to each other.

        Every rank computes equally often, because the forward pass of weights in parts needs all ranks: after the last
        item some compute it once more.
        """
        for first in range(0, len(items), self.count):
            own = compute(items[min(first + self.rank, len(items) - 1)])
            for source in range(min(self.count, len(items) - first)):
                yield self.broadcast_array(own, source)


ALONE = Ranks()


class _Gather(torch.autograd.Function):
    """Rows of all ranks from the rows of each; backward sums the gradients of all ranks for each row."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Ranks, rows: list[int]) -> Tensor:
        ctx.ranks, ctx.rows = ranks, rows
        return ranks.gather_rows(own, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ranks, rows = ctx.ranks, ctx.rows
        summed = ranks.sum(gradient.contiguous().clone())
        first = sum(rows[: ranks.rank])
        return summed[first : first + rows[ranks.rank]], None, None


def divide(total: int, shares: Sequence[Fraction | int]) -> list[int]:
    """Divide a whole number in proportion to shares. The parts add up to it."""
    ends = [0]
    reached = Fraction(0)
    for share in shares:
        reached += share
        ends.append(int(total * reached / sum(shares)))
    return [last - first for first, last in itertools.pairwise(ends)]


# Weights in parts


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a rank has a part of this tensor only (FSDP)."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    return dtensor is not None and isinstance(tensor, dtensor.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has: all of it without FSDP."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with all its parts, gathered from the ranks that have them."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def gather_parts(stacked: Tensor, like: Sequence[Tensor]) -> Tensor:
    """Return whole tensors, stacked, from the stacked parts that this rank has of them.

    `like` are tensors that are divided in the same way. Costs one exchange for each.
    """
    if not is_sharded(like[0]):
        return stacked
    from torch.distributed.tensor import DTensor

    gathered = []
    for part, other in zip(stacked, cast(Sequence[DTensor], like), strict=True):
        layout = {"shape": other.shape, "stride": other.stride(), "run_check": False}
        divided = DTensor.from_local(part, other.device_mesh, other.placements, **layout)
        gathered.append(divided.full_tensor())
    return torch.stack(gathered)


def own_part(full: Tensor, like: Tensor) -> Tensor:
    """Return the part of a whole tensor that this rank has of `like`."""
    if not is_sharded(like):
        return full
    mesh = cast(Any, like).device_mesh
    parts = full.chunk(mesh.size())
    rank = mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else full[:0]


def shard_towers(
    model: CLIP, ranks: Ranks, dtype: torch.dtype | None, exchange: torch.dtype
) -> None:
    """Leave each rank a part of every weight of the towers (FSDP). Scale and bias stay whole.

    Blocks are gathered one at a time. `dtype` is the half precision that they compute in, or None for their own.
    """
    from torch.distributed.fsdp import (
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    mesh = ranks_mesh(ranks, model.logit_scale.device)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=exchange)
    for tower in (model.image, model.text):
        for block in blocks_of(tower):
            fully_shard(block, mesh=mesh, mp_policy=policy)
            # The last block of a tower runs for the pooled token alone, by another method than `forward`.
            register_fsdp_forward_method(block, "pooled")
        # Torch would keep a tower's own weights gathered, and rounded, until a backward pass: after
        # an evaluation a checkpoint would hold those.
        fully_shard(tower, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        for module in tower.modules():
            if isinstance(module, FSDPModule):
                # Gradients are summed here, as in the flat buffer of DDP.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


def ranks_mesh(ranks: Ranks, device: torch.device) -> DeviceMesh:
    """Return the ranks as torch's mesh of one dimension."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(ranks._tensor_group, device.type)


def blocks_of(tower: nn.Module) -> Sequence[nn.Module]:
    """Return the blocks of a tower that are gathered one at a time."""
    transformer = getattr(tower, "transformer", None)
    return transformer.layers() if isinstance(transformer, Transformer) else []


# Threads, failures and advice


def threads_of_rank(local_count: int) -> int:
    """Return the CPU threads of one of so many ranks of a computer.

    torchrun leaves one thread to each of several. They share the cores instead.
    """
    threads = torch.get_num_threads()
    if local_count == 1 or threads > 1:
        return threads
    cores = min(psutil.cpu_count(logical=False) or 1, logical_cores())
    return max(1, cores // local_count)


def lost_rank(error: BaseException) -> LostRank | None:
    """Return an error that says that other ranks are gone, if that is what an error of torch means."""
    import torch.distributed as dist

    is_lost = isinstance(error, dist.DistError)
    if isinstance(error, RuntimeError):
        text = str(error).lower()
        is_lost = is_lost or any(sign in text for sign in SIGNS_OF_A_LOST_RANK)
    if not is_lost:
        return None
    rank = os.environ.get("RANK", "0")
    return LostRank(
        f"Rank {rank} on {platform.node()} lost the other ranks: {torch_reason(error)}",
        hint="what the others printed; lapclip resume with the same torchrun line goes on",
    )


def torch_reason(error: BaseException) -> str:
    """Return what an error of gloo or nccl says, without places in their sources and advice."""
    text = re.sub(r"^(\[[^]]*\] ?)+", "", first_line(error, 1000))
    return text.partition(" This is typically")[0].rstrip(".")[:200]


def write_error_file(error: BaseException) -> None:
    """Leave an error where torchrun and `reason_of_last_stop` look for it, in torchelastic's format."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    reason = first_line(error, MAX_REASON_LENGTH)
    details = {
        "py_callstack": traceback.format_exc(),
        "timestamp": str(int(time.time())),
        "lost_others": isinstance(error, LostRank),
        "is_worth_a_restart": isinstance(error, WORTH_A_RESTART),
    }
    message = {"message": reason, "extraInfo": details}
    with suppress(OSError):  # a full disk must not replace the error itself
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def reason_of_last_stop(ranks: Ranks) -> str | None:
    """Return one sentence about why torchrun has started the ranks again. None at the first start.

    Each rank reads the error file of the same rank of its computer.
    """
    restarts = int(os.environ.get(RESTART_COUNT, "0"))
    own = None
    if restarts and os.environ.get(ERROR_FILE):
        own = _read_error_file(Path(os.environ[ERROR_FILE]), restarts - 1)
    errors = [_clean_error(error) for error in ranks.gather_json(own)]
    return describe_stop(errors, ranks.hosts)


def _clean_error(error: Any) -> dict[str, Any] | None:
    """Return an error that a rank has sent as short text on one line, a time and a truth value."""
    if not isinstance(error, dict):
        return None
    when = error.get("time")
    return {
        "message": one_line(error.get("message", ""))[:MAX_REASON_LENGTH],
        "time": when if isinstance(when, int) else 0,
        "lost_others": error.get("lost_others") is True,
    }


def describe_stop(errors: Sequence[dict[str, Any] | None], hosts: Sequence[str]) -> str | None:
    """Return one sentence about why ranks have ended, from the error of each. None if there are no errors.

    A rank without a message was killed or cut off. A rank without an error did not end by itself: torchrun ended it
    because the others had ended. Otherwise the earliest error is the reason.
    """
    silent, unended, order = [], [], []
    for rank, error in enumerate(errors):
        name = f"rank {rank} on {hosts[rank]}"
        if error is None:
            unended.append(name)
        elif not error["message"]:
            silent.append(name)
        else:
            # A rank that lost the others ended because one of them did.
            order.append((error["lost_others"], error["time"], rank))
    if len(unended) == len(errors):
        return None
    if silent:
        return f"Ended without a message, so killed or cut off: {' and '.join(silent)}."
    has_lost_others, _, first = min(order)
    if has_lost_others and unended:
        return f"Did not answer, so paused or cut off: {' and '.join(unended)}."
    return f"Rank {first} on {hosts[first]} ended: {(errors[first] or {})['message']}"


def _read_error_file(path: Path, attempt: int) -> dict[str, Any] | None:
    """Return the message and time of an earlier attempt's error file: .../attempt_N/LOCAL_RANK/error.json.

    None if it was read before.
    """
    earlier = path.parents[1].with_name(f"attempt_{attempt}") / path.parent.name / path.name
    mark = earlier.with_name(TOLD)
    if mark.exists():
        return None
    with suppress(OSError):
        mark.touch()
    try:
        written = json.loads(earlier.read_text(encoding="utf-8"))["message"]
        details = written["extraInfo"]
        return {
            "message": one_line(written["message"])[:MAX_REASON_LENGTH],
            "time": int(details["timestamp"]),
            "lost_others": details.get("lost_others") is True,
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {"message": "", "time": 0, "lost_others": False}


@dataclass(frozen=True)
class RowsAdvice:
    """How rows would be divided best among hosts, from how long each host computes."""

    hosts: list[str]
    rows: list[int]
    """Rows of a batch that each host takes now."""
    seconds: list[float]
    """Seconds in which each host computes its rows."""
    best_rows: list[int]
    """Rows of each host with which all finish at the same time."""
    step_seconds: float
    """Seconds of the slowest host now."""
    best_step_seconds: float
    """The same with `best_rows`."""
    without_slowest_seconds: float | None
    """The same with `best_rows` of the other hosts. None for a single host."""

    def text(self, exchange_seconds: float) -> str:
        """Return which division is fastest and what it gives, beside the time of the exchange."""
        now, best = (
            seconds + exchange_seconds for seconds in (self.step_seconds, self.best_step_seconds)
        )
        parts = [f"{self.slowest} is slowest"]
        if now > MIN_GAIN * best:
            division = ",".join(map(str, self.best_rows))
            parts.append(f"train.rows={division} would make a step {now / best:.2f}x as fast")
        if self.without_slowest_seconds is not None:
            without = self.without_slowest_seconds + exchange_seconds
            parts.append(f"without it a step would take {without / now:.2f}x as long")
        return "; ".join(parts)

    @property
    def slowest(self) -> str:
        """Host that takes longest for a row."""
        per_row = [seconds / rows for seconds, rows in zip(self.seconds, self.rows, strict=True)]
        return self.hosts[per_row.index(max(per_row))]


def advise_rows(hosts: Sequence[str], rows: Sequence[int], seconds: Sequence[float]) -> RowsAdvice:
    """Return the division of rows with which all hosts finish together, and what leaving the slowest out gives."""
    speeds = [count / max(taken, 1e-9) for count, taken in zip(rows, seconds, strict=True)]
    total = sum(rows)

    def divided(speeds: Sequence[float]) -> tuple[list[int], float]:
        parts = divide(total, [Fraction(speed) for speed in speeds])
        for _ in range(parts.count(0)):  # each host needs a row
            parts[parts.index(max(parts))] -= 1
            parts[parts.index(0)] = 1
        return parts, max(part / speed for part, speed in zip(parts, speeds, strict=True))

    best_rows, best_seconds = divided(speeds)
    without = None
    if len(speeds) > 1:
        faster = sorted(speeds)[1:]
        without = divided(faster)[1]
    return RowsAdvice(
        list(hosts), list(rows), list(seconds), best_rows, max(seconds), best_seconds, without
    )
