"""Several processes that train one model together: who they are, and what they say to each other.

`torchrun` starts them, on one computer or on several, and gives each its number, its rank, in its environment. One rank
writes the run; the others follow it. All of it goes by exchanges between two ranks: so a rank that waits knows for
whom, and sums have the order that is asked for, which a collective leaves open.

No other module imports `torch.distributed`, and this one not before ranks meet: a process alone does not pay for it.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import math
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from lapclip.errors import LostRank, TrainingError, first_line
from lapclip.paths import write_atomic
from lapclip.text import counted, duration, one_line

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

T = TypeVar("T")

WRITER = 0
"""The rank that has the run's folder, chooses the settings and speaks to the user."""
TIME_OUT = 1800.0
"""Seconds that an exchange may take. The others wait as long for what the writer does alone, such as an evaluation."""
SAY_AFTER = 60.0
"""Seconds of waiting after which a rank says what it waits for, and again after as many."""
LOOK_EVERY = 2.0
"""Seconds between two looks at whether the writer is ready or has failed, so that Ctrl-C is heard meanwhile."""
WORD_COMES = 5.0
"""Seconds in which a rank that failed has told the others what to do."""
SHARES = 8
"""Items that a rank computes before it gives them to the others."""
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun puts into the environment of every process."""
_FAILED, _BACKEND = "failed", "backend"
_MEETINGS = itertools.count()


def under_torchrun() -> bool:
    """Whether torchrun, or what stands in for it, started this process."""
    return all(os.environ.get(name) for name in TORCHRUN)


def follows() -> bool:
    """Whether this process follows another rank, which writes."""
    return under_torchrun() and int(os.environ["RANK"]) != WRITER


@contextmanager
def join() -> Iterator[Ranks]:
    """This process among its ranks; one that torchrun did not start is alone. An error in here ends this rank, and the
    others are told which and why."""
    if not under_torchrun() or int(os.environ["WORLD_SIZE"]) == 1:
        yield ALONE
        return
    ranks = _meet()
    try:
        yield ranks
    except BaseException as error:
        ranks.tell_failure(error)
        raise
    finally:
        ranks.close()


def _meet() -> Ranks:
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.accelerator.is_available() and local < torch.accelerator.device_count():
        torch.accelerator.set_device_index(local)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, *_ = next(iter(rendezvous("env://", rank, count, timeout=timedelta(seconds=TIME_OUT))))
    except (RuntimeError, ValueError, OSError) as error:
        raise TrainingError(
            f"Rank {rank} does not reach the others at {address}: {first_line(error)}.",
            hint="the same --master-addr on all hosts, and a firewall that lets its port through",
        ) from error
    # A process that trains again, or that an agent started again, does not read what was said the time before.
    own = dist.PrefixStore(f"lapclip/{os.environ.get('LAPCLIP_ROUND', '')}/{next(_MEETINGS)}", store)  # pyright: ignore[reportPrivateImportUsage]
    return Ranks(rank, count, own)


class Ranks:
    """The processes that train one model, as one of them sees them."""

    def __init__(self, rank: int = 0, count: int = 1, store: Any = None) -> None:
        self.rank, self.count = rank, count
        self._store: Any = store
        """Where ranks leave words for each other before they are connected, and after one is lost."""
        self._changes = 0
        """How often the ranks have changed their settings."""
        self._open, self._by_gpu = True, False
        """Whether tensors go from GPU to GPU; else they take the way over the CPU."""
        self._waiting: tuple[float, str] | None = None
        self.sent_bytes, self.waited_seconds = 0, 0.0
        """What this rank has sent, and how long it has waited for others."""
        if self.many:
            threading.Thread(target=self._say, name="lapclip-ranks", daemon=True).start()

    @property
    def many(self) -> bool:
        return self.count > 1

    @property
    def writes(self) -> bool:
        """Whether this rank has the run's folder."""
        return self.rank == WRITER

    @property
    def others(self) -> list[int]:
        """The other ranks, from the next one on: so not all send to the same one first."""
        return [(self.rank + far) % self.count for far in range(1, self.count)]

    def tell_failure(self, error: BaseException) -> None:
        """Say to the others why this rank ends."""
        if isinstance(error, LostRank):  # the rank that was lost has said so, or cannot
            return
        text = "interrupted" if isinstance(error, KeyboardInterrupt) else one_line(first_line(error, 300))
        with suppress(Exception):  # whoever keeps the words may be gone
            self._store.set(_FAILED, f"rank {self.rank} on {platform.node()} ended: {text}")

    def connect(self, *, cuda: bool = False) -> None:
        """Meet the others, when the writer is ready: it may have been at work for long. `cuda` is the writer's word."""
        import torch
        import torch.distributed as dist

        if not self.many or dist.is_initialized():
            return
        if self.writes:
            alone = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.accelerator.device_count()
            self._store.set(_BACKEND, "cpu:gloo,cuda:nccl" if cuda and alone and dist.is_nccl_available() else "gloo")
        else:
            self._await(_BACKEND, "set-up")
        backend = self._store.get(_BACKEND).decode()
        self._by_gpu = "nccl" in backend
        limit = timedelta(seconds=TIME_OUT)
        self._waiting = time.monotonic(), "all ranks"
        try:
            dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.count, timeout=limit)
        except RuntimeError as error:
            raise self._lost(WRITER, "connection", error) from error
        self._waiting = None

    def agree_on_change(self, change: Any) -> Any:
        """What all ranks do after one of them could not go on: what the first to fail says, or None where none says
        anything. The others know that one failed, and ask without a change of their own."""
        key = f"change/{self._changes}"
        self._changes += 1
        if change is not None:
            return json.loads(self._store.compare_set(key, "", json.dumps(change)))
        until = time.monotonic() + WORD_COMES
        while not self._store.check([key]):
            if time.monotonic() > until or self._store.check([_FAILED]):
                return None
            time.sleep(0.05)
        return json.loads(self._store.get(key))

    def _await(self, key: str, what: str) -> None:
        """Wait for something that the writer will say, as long as it takes."""
        self._waiting = time.monotonic(), f"the {what} of rank {WRITER}"
        while True:
            try:
                if self._store.check([key]):
                    break
                if self._store.check([_FAILED]):
                    raise self._lost(WRITER, what)
            except RuntimeError as error:  # the agent that kept it has ended
                raise self._lost(WRITER, what, error) from error
            time.sleep(min(LOOK_EVERY, 0.05 + 0.1 * (time.monotonic() - self._waiting[0])))
        self._waiting = None

    # What ranks say to each other

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], what: str) -> None:
        """Send tensors to ranks and fill others with what ranks send, all at once. Empty ones are not sent."""
        import torch.distributed as dist

        began = time.monotonic()
        # One order for all: a rank's receives are posted before its sends.
        operations = [(dist.irecv, peer, tensor) for peer, tensor in incoming.items() if tensor.numel()]
        operations += [(dist.isend, peer, tensor) for peer, tensor in outgoing.items() if tensor.numel()]
        if not operations:
            return
        self._waiting = began, f"{what} of rank {operations[0][1]}"
        peers = [peer for _, peer, _ in operations]
        peer = peers[0]
        try:
            works = dist.batch_isend_irecv([dist.P2POp(do, tensor, peer) for do, peer, tensor in operations])
            for peer, work in zip(peers if len(works) == len(peers) else peers[:1], works, strict=False):
                self._waiting = began, f"{what} of rank {peer}"
                work.wait()
        except RuntimeError as error:
            raise self._lost(peer, what, error) from error
        self._waiting = None
        self.sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor in outgoing.values())
        self.waited_seconds += time.monotonic() - began

    def gathered(self, own: Tensor, rows: Sequence[int], what: str) -> Tensor:
        """The rows of all ranks, one rank's after the other's; `rows` says how many each has. No gradient crosses."""
        if not self.many:
            return own
        import torch

        own = self.ready(own)
        found = [own if rank == self.rank else own.new_empty(n, *own.shape[1:]) for rank, n in enumerate(rows)]
        self.exchange(dict.fromkeys(self.others, own), {rank: found[rank] for rank in self.others}, what)
        return torch.cat(found)

    def in_shares(self, items: Sequence[T], compute: Callable[[T], np.ndarray]) -> Iterator[np.ndarray]:
        """What is computed of each item, in order: each rank computes some of them and gives them to the others. All
        ranks have the same items, and each item is computed the same way wherever that is."""
        if not self.many:
            yield from map(compute, items)
            return
        import numpy as np

        for first in range(0, len(items), SHARES * self.count):
            window = items[first : first + SHARES * self.count]
            own = [compute(item) for item in window[self.rank :: self.count]]
            found = [self._arrays_from(rank, own) for rank in range(self.count)]
            yield from (np.asarray(found[at % self.count][at // self.count]) for at in range(len(window)))

    def _arrays_from(self, source: int, arrays: list[np.ndarray]) -> list[np.ndarray]:
        import numpy as np

        shapes = [(array.dtype.str, array.shape) for array in arrays]
        shapes = self.from_rank(source, shapes, "share")
        body = self._bytes_from(source, b"".join(array.tobytes() for array in arrays), "share")
        if source == self.rank:
            return arrays
        found, at = [], 0
        for dtype, shape in shapes:
            count = math.prod(shape)
            found.append(np.frombuffer(body, dtype, count, at).reshape(shape))
            at += found[-1].nbytes
        return found

    def reduced(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in whatever order the collective has."""
        import torch.distributed as dist

        tensor = self.ready(tensor)
        self._waiting = time.monotonic(), "the gradients of all ranks"
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise self._lost((self.rank + 1) % self.count, "gradients", error) from error
        self._waiting = None
        self.sent_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def from_rank(self, source: int, value: Any = None, what: str = "word") -> Any:
        """What one rank says, as JSON says it: its own value there, that rank's everywhere else."""
        if not self.many:
            return value
        return json.loads(self._bytes_from(source, json.dumps(value).encode(), what))

    def from_writer(self, value: Any = None, what: str = "word") -> Any:
        """What the writer says."""
        return self.from_rank(WRITER, value, what)

    def agreed(self, wish: str | None) -> str | None:
        """The wish of the first rank that has one, for all; None where none has."""
        if not self.many:
            return wish
        import torch

        own = torch.tensor([int(bool(wish))], dtype=torch.int64)
        wishes = self.gathered(own, [1] * self.count, "a sign to go on")
        if not wishes.any():
            return None
        rank = int(wishes.argmax())
        said = self.from_rank(rank, wish)
        return said if rank == WRITER else f"{said} on rank {rank}"

    def share_files(self, folder: Path, files: Sequence[Path] = (), allowed: str = "*") -> None:
        """Give the others files of the writer's folder. They put them into a folder of their own, where they are not
        there already: ranks of one computer may share a folder. They take only those whose names are `allowed`."""
        if not self.many:
            return
        listed = [path.relative_to(folder).as_posix() for path in files]
        for name in self.from_writer(listed, "list of files"):
            path = folder / PurePosixPath(name)
            body = self._bytes_from(WRITER, path.read_bytes() if self.writes else b"", name)
            if self.writes or path.exists():
                continue
            if not path.resolve().is_relative_to(folder.resolve()) or not fnmatch.fnmatchcase(name, allowed):
                raise TrainingError(f"Rank {WRITER} sent a file for another folder: {one_line(name)}.")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, body)

    def _bytes_from(self, source: int, body: bytes, what: str) -> bytes:
        import torch

        size = torch.tensor([len(body)], dtype=torch.int64)
        mine = self.rank == source
        self.exchange(dict.fromkeys(self.others, size) if mine else {}, {} if mine else {source: size}, what)
        held = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body and mine else None
        if held is None:
            held = torch.empty(int(size), dtype=torch.uint8)
        self.exchange(dict.fromkeys(self.others, held) if mine else {}, {} if mine else {source: held}, what)
        return body if mine else held.numpy().tobytes()

    def ready(self, tensor: Tensor) -> Tensor:
        """Where exchanges can take it from."""
        tensor = tensor.detach().contiguous()
        return tensor if self._by_gpu else tensor.cpu()

    # Waiting in vain

    def _lost(self, peer: int, what: str, error: Exception | None = None) -> LostRank:
        """Why an exchange failed: what a rank that failed has said, else whom this one waited for."""
        said = ""
        with suppress(Exception):
            time.sleep(0.2)  # whoever ends says so first, but it may still be on its way
            said = self._store.get(_FAILED).decode(errors="replace") if self._store.check([_FAILED]) else ""
        # gloo puts the place in its source before what it says.
        words = re.sub(r"^(\[[^]]*\] ?)+", "", first_line(error, 300)) if error else ""
        reason = f": {one_line(words)[:100]}" if words else ""
        fault = said or f"rank {peer} did not answer{reason}"
        return LostRank(
            f"Rank {self.rank} waited for the {what} of rank {peer}, in vain: {one_line(fault)}",
            hint="what that rank printed; then lapclip resume with the same torchrun line",
        )

    def _say(self) -> None:
        """Say now and then what is waited for."""
        said = 0.0
        while self._open:
            time.sleep(LOOK_EVERY)
            waiting, now = self._waiting, time.monotonic()
            if waiting and now - max(waiting[0], said) > SAY_AFTER:
                said = now
                print(
                    f"rank {self.rank} of {counted(self.count, 'rank')} waits for {waiting[1]}, "
                    f"{duration(now - waiting[0])} so far",
                    file=sys.stderr,
                    flush=True,
                )

    def close(self) -> None:
        """Part from the others."""
        import torch.distributed as dist

        self._open = False
        if dist.is_initialized():
            with suppress(Exception):  # of a rank that is gone
                dist.destroy_process_group()


ALONE = Ranks()
