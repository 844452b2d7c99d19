"""Several processes that train one model together: who they are, and what they say to each other.

`torchrun` starts them, on one computer or on several, and gives each its number, its rank, in its environment. One rank
writes the run, on the computer that began it, whatever its number; the others follow it. All of it goes by exchanges
between two ranks: so a rank that waits knows for whom, and sums have the order that is asked for, which a collective
leaves open.

No other module imports `torch.distributed`, and this one not before ranks meet: a process alone does not pay for it.
"""

from __future__ import annotations

import atexit
import fnmatch
import itertools
import json
import math
import os
import platform
import re
import secrets
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import psutil

from lapclip.errors import LapclipError, LostRank, RankFailed, TrainingError, first_line
from lapclip.machine.facts import logical_cores
from lapclip.paths import write_atomic
from lapclip.text import counted, duration, one_line

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

T = TypeVar("T")
Tensors = Mapping[int, Sequence["Tensor"]]
"""Tensors for ranks, or from them."""

TIME_OUT = timedelta(days=1)
"""What the engine allows an exchange. The others wait as long for what the writer does alone, such as an evaluation; a
rank that is gone is noticed by its silence."""
MEET_WITHIN = timedelta(seconds=110)
"""How long the processes that torchrun has started may take to find each other."""
SAY_AFTER = 60.0
"""Seconds of waiting after which a rank says what it waits for, and again after as many."""
SILENT_AFTER = 75.0
"""Seconds without a sign of life after which a rank counts as gone. TCP tries again 51 s after a link went down, so one
that is back after half a minute has carried something by then."""
LOOK_EVERY = 2.0
"""Seconds between two signs of life."""
ASK_EVERY = 0.2
"""Seconds between two looks for a word of another rank, at most: whoever waits sets up the later by them."""
WORD_COMES = 5.0
"""Seconds in which a rank that failed has told the others what to do."""
LAST_WORDS = 1.0
"""Seconds that the rank which keeps the words of all stays after a failure, so that they are read."""
FILE_CHUNK = 1 << 24
"""Bytes of a file that are sent at once."""
SHARES = 8
"""Items for each rank that are computed before they are exchanged."""
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun puts into the environment of every process."""
ENDPOINT = "PET_RDZV_ENDPOINT"
"""Where torchrun takes the address of the rendezvous from, unless it is on its command line."""
UNNAMED = "none"  # torchrun's word for a job without --rdzv-id
_FAILED, _BACKEND, _EARLY = "failed", "backend", "early"


def under_torchrun() -> bool:
    """Whether torchrun, or what stands in for it, started this process."""
    return all(os.environ.get(name) for name in TORCHRUN)


def leave_at_once(status: int) -> NoReturn:
    """End a rank's process, with all that is due at an end but without taking Python apart: a thread that is in the
    code of torch's engine meanwhile, because a link or another rank is slow, would abort the process (signal 6)."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def job() -> str:
    """Return what the processes of one job of torchrun have in common: its name and their arguments."""
    return json.dumps([os.environ.get("TORCHELASTIC_RUN_ID", UNNAMED), *sys.argv[1:]])


def job_agent() -> int | None:
    """Return the process that tells a job without a name from others; None for one with a name."""
    unnamed = os.environ.get("TORCHELASTIC_RUN_ID", UNNAMED) == UNNAMED
    return os.getppid() if unnamed else None


@contextmanager
def join(*, holds_run: bool = False, writer: int | None = None) -> Iterator[Ranks]:
    """This process among its ranks; one that torchrun did not start is alone. An error in here ends this rank, and the
    others are told which and why. `holds_run` says that this computer has the run that is gone on with; who writes
    follows from that, unless it is known before."""
    if not under_torchrun():
        yield ALONE
        return
    ranks = _meet(holds_run, writer)
    try:
        yield ranks
    except BaseException as error:
        ranks.tell_failure(error)
        raise
    finally:
        ranks.close()


def _meet(holds_run: bool, writer: int | None) -> Ranks:
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.accelerator.is_available() and local < torch.accelerator.device_count():
        torch.accelerator.set_device_index(local)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = {
        "host": platform.node(),
        # Of several ranks of one computer the first one writes.
        "claim": 0 if local else 1 + 2 * _keeps_rendezvous() + 4 * holds_run,
        "nccl": torch.cuda.is_available()
        and beside <= torch.cuda.device_count()
        and dist.is_nccl_available(),
        "threads": _own_threads(beside),
    }
    try:
        store, *_ = next(iter(rendezvous("env://", rank, count, timeout=MEET_WITHIN)))
        part = _own_part(store, rank, count)
        part.set(f"alive/{rank}", "0")
        part.set(f"claim/{rank}", json.dumps(own))
        found = [json.loads(part.get(f"claim/{other}")) for other in range(count)]
        claims = [int(each["claim"]) for each in found]
        writer = claims.index(max(claims)) if writer is None else writer
        ranks = Ranks(rank, count, part, writer, [one_line(each["host"])[:64] for each in found])
        ranks.all_nccl = all(each["nccl"] is True for each in found)
        ranks.fewest_threads = min(int(each["threads"]) for each in found)
        return ranks
    except (RuntimeError, ValueError, LookupError, TypeError, OSError) as error:
        raise LostRank(
            f"Rank {rank} does not reach the others at {address}: {first_line(error)}.",
            hint="the same --master-addr on all hosts, and a firewall that lets its port through",
        ) from error


def _own_threads(beside: int) -> int:
    """Threads for a rank of a computer that has so many of them: torch's own choice, or its share of the cores, because
    torchrun leaves each of several ranks one thread where nobody says anything else."""
    import torch

    threads = torch.get_num_threads()
    if beside > 1 and threads == 1:
        cores = min(psutil.cpu_count(logical=False) or 1, logical_cores())
        return max(1, cores // beside)
    return threads


def _own_part(store: Any, rank: int, count: int) -> Any:
    """A part of the store that these processes alone know: it may have words of processes that were here before, and
    torchrun gives no number to tell their time from this one. So everybody says something that nobody said before, and
    rank 0 answers to that with the name of the part."""
    import torch.distributed as dist

    def part(name: str) -> Any:
        return dist.PrefixStore(f"lapclip/{name}", store)  # pyright: ignore[reportPrivateImportUsage]

    own, until = secrets.token_hex(8), time.monotonic() + MEET_WITHIN.total_seconds()

    def wait_a_little(whom: str) -> None:
        if time.monotonic() > until:
            raise TimeoutError(
                f"{whom} did not come within {duration(MEET_WITHIN.total_seconds())}"
            )
        time.sleep(0.02)

    hello, welcome = "lapclip/hello/{}", "lapclip/welcome/{}"
    if rank:
        store.set(hello.format(rank), own)
        while True:
            said, name = json.loads(store.get(welcome.format(rank)))
            if said == own:
                return part(name)
            wait_a_little("rank 0")
    found = part(own)
    while missing := [other for other in range(1, count) if not found.check([f"claim/{other}"])]:
        for other in missing:
            if store.check([hello.format(other)]):
                said = store.get(hello.format(other)).decode()
                store.set(welcome.format(other), json.dumps([said, own]))
        wait_a_little(", ".join(f"rank {other}" for other in missing))
    return found


def _keeps_rendezvous() -> bool:
    """Whether the computers that train together meet at this one."""
    address = os.environ.get(ENDPOINT) or os.environ["MASTER_ADDR"]
    with suppress(psutil.Error):
        agent = psutil.Process().parent()
        words = " ".join(agent.cmdline()) if agent else ""
        asked = re.search(r"--rdzv[-_]endpoint[= ](\S+)", words)
        address = asked[1] if asked else address
    host = address.rsplit(":", 1)[0] if address.count(":") == 1 or "]" in address else address
    try:
        family, kind, number, _, found = socket.getaddrinfo(
            host.strip("[]"), 0, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, number) as tried:
            tried.bind(found)  # an address of another computer cannot be had
    except OSError:
        return False
    return True


class Ranks:
    """The processes that train one model, as one of them sees them."""

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        store: Any = None,
        writer: int = 0,
        hosts: Sequence[str] = (),
    ) -> None:
        self.rank, self.count, self.writer = rank, count, writer
        self.hosts = hosts or [platform.node()] * count
        """The names of their computers."""
        self._store: Any = store
        """Where ranks leave words for each other before they are connected, and after one is lost."""
        self._deals = 0
        """How often the ranks have shared items."""
        self._changes = 0
        """How often the ranks have changed their settings."""
        self._by_gpu = False
        """Whether tensors go from GPU to GPU; else they take the way over the CPU."""
        self._over = threading.Event()
        self._watching: list[threading.Thread] = []
        self._waiting: dict[int, tuple[float, str]] = {}
        """Since when each thread of this rank waits, and for what."""
        self._heard = dict.fromkeys(range(count), time.monotonic())
        """When each rank last gave a sign of life."""
        self._tasks: SimpleQueue[Any] | None = None
        self._stream: Any = None
        """What exchanges while this rank computes: a thread, or a queue of the GPU."""
        self.speeds = [1] * count
        """How many shards each rank has, in proportion to the others."""
        self.overlaps = True
        """Whether gradients travel while others are still computed, and not when all are there."""
        self.all_nccl, self.fewest_threads = False, 1
        """Whether every rank has a GPU of its own that nccl knows, and the threads that the smallest computer has."""
        self.connected = False
        self._counting = threading.Lock()
        self.sent_bytes, self.waited_seconds = 0, 0.0
        """What this rank has sent, and how long it has waited for others."""
        self.metrics: list[tuple[float, int]] = [(0.0, 0)] * count
        """Of each rank, as they last told each other: seconds of waiting, bytes sent."""
        if self.many and store is not None:
            for task in (self._live, self._look_after):
                self._watching.append(
                    threading.Thread(target=task, name="lapclip-ranks", daemon=True)
                )
                self._watching[-1].start()

    @property
    def many(self) -> bool:
        return self.count > 1

    @property
    def writes(self) -> bool:
        """Whether this rank has the run's folder."""
        return self.rank == self.writer

    @property
    def others(self) -> list[int]:
        """The other ranks, from the next one on: so not all send to the same one first."""
        return [(self.rank + far) % self.count for far in range(1, self.count)]

    def tell_failure(self, error: BaseException) -> None:
        """Say to the others why this rank ends."""
        if isinstance(error, LostRank):  # the rank that was lost has said so, or cannot
            return
        text = (
            "interrupted"
            if isinstance(error, KeyboardInterrupt)
            else one_line(first_line(error, 300))
        )
        with suppress(Exception):  # whoever keeps the words may be gone
            self._store.set(_FAILED, f"rank {self.rank} on {platform.node()} ended: {text}")
            if self.many and self.rank == 0:
                time.sleep(LAST_WORDS)

    def announce(self, word: Any) -> None:
        """Tell the others, before all are connected, what they can begin with while this rank sets up."""
        if self.many:
            self._store.set(_EARLY, json.dumps(word))

    def announced(self) -> Any:
        """What the writer has announced; None where it is ready to connect and has announced nothing."""
        self._await((_EARLY, _BACKEND), "set-up", self.writer)
        return json.loads(self._store.get(_EARLY)) if self._store.check([_EARLY]) else None

    def connect(self, collectives: str = "gloo") -> None:
        """Meet the others, when all are ready: they may have been at work for long. `collectives` is the writer's
        word."""
        import torch.distributed as dist

        if self is ALONE or dist.is_initialized():
            return
        if self.writes:
            by_gpu = collectives == "nccl" and self.all_nccl
            self._store.set(_BACKEND, "cpu:gloo,cuda:nccl" if by_gpu else "gloo")
        else:
            self._await((_BACKEND,), "set-up", self.writer)
        # The engine would wait for a rank that has failed, and say nothing.
        self._store.set(f"ready/{self.rank}", "1")
        for peer in self.others:
            self._await((f"ready/{peer}",), "set-up", peer)
        backend = self._store.get(_BACKEND).decode()
        self._by_gpu = "nccl" in backend
        try:
            with self._waits("all ranks"):
                dist.init_process_group(
                    backend,
                    store=self._store,
                    rank=self.rank,
                    world_size=self.count,
                    timeout=TIME_OUT,
                )
        except RuntimeError as error:
            lost = self._lost(self.writer, "connection", error)
            lost.hint = "GLOO_SOCKET_IFNAME=eth0 on every computer, with the name of its network; a firewall may bar it"
            raise lost from error
        self.connected = True

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

    def _await(self, keys: Sequence[str], what: str, peer: int) -> None:
        """Wait until a rank has said one of these words, as long as it takes."""
        began = time.monotonic()
        with self._waits(f"the {what} of rank {peer}"):
            while True:
                try:
                    if any(self._store.check([key]) for key in keys):
                        return
                    if self._store.check([_FAILED]):
                        raise self._lost(peer, what)
                except RuntimeError as error:  # whoever kept it has ended
                    raise self._lost(peer, what, error) from error
                time.sleep(min(ASK_EVERY, 0.05 + 0.1 * (time.monotonic() - began)))

    # What ranks say to each other

    def exchange(self, outgoing: Tensors, incoming: Tensors, what: str) -> None:
        """Send tensors to ranks and fill others with what ranks send, all at once. Empty ones are not sent."""
        self.post(outgoing, incoming, what)()

    def post(
        self, outgoing: Tensors, incoming: Tensors, what: str, tag: int = 0
    ) -> Callable[[], None]:
        """Begin an exchange; the function returned waits for its end. Between CPUs a `tag` tells it from others that
        are under way; between GPUs they are taken in the order in which they were begun."""
        import torch.distributed as dist

        # One order for all: a rank's receives are posted before its sends.
        operations = [
            (dist.irecv, peer, t)
            for peer, tensors in incoming.items()
            for t in tensors
            if t.numel()
        ]
        operations += [
            (dist.isend, peer, t)
            for peer, tensors in outgoing.items()
            for t in tensors
            if t.numel()
        ]
        peers = [peer for _, peer, _ in operations]
        try:
            if not operations:
                works = []
            elif operations[0][2].is_cpu:
                works = [do(tensor, peer, tag=tag) for do, peer, tensor in operations]
            else:
                works = dist.batch_isend_irecv(
                    [dist.P2POp(do, tensor, peer) for do, peer, tensor in operations]
                )
        except RuntimeError as error:
            raise self._lost(peers[0], what, error) from error
        self._count(t for tensors in outgoing.values() for t in tensors)

        def wait() -> None:
            for peer, work in zip(
                peers if len(works) == len(peers) else peers[:1], works, strict=False
            ):
                try:
                    with self._waits(f"{what} of rank {peer}"):
                        assert work is not None, "this process is one of the ranks"
                        work.wait()
                except RuntimeError as error:
                    raise self._lost(peer, what, error) from error

        return wait

    def _count(self, sent: Iterable[Tensor]) -> None:
        with self._counting:  # two threads send
            self.sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor in sent)

    @contextmanager
    def _waits(self, what: str) -> Iterator[None]:
        """While this rank can do nothing but wait."""
        began, thread = time.monotonic(), threading.get_ident()
        self._waiting[thread] = began, what
        try:
            yield
        finally:
            self._waiting.pop(thread, None)
            if threading.current_thread() is threading.main_thread():
                self.waited_seconds += time.monotonic() - began

    def in_background(self, task: Callable[[], None]) -> Future[None]:
        """Do what sends and receives while this rank computes on. Tasks come one after the other."""
        if self._by_gpu:  # nothing waits for it: the engine has its own queue on the GPU
            done: Future[None] = Future()
            with self._gpu_queue():
                task()
            done.set_result(None)
            return done
        if self._tasks is None:
            self._tasks = SimpleQueue()
            # Not a pool, whose threads the end of the process waits for: this one may wait for a rank that is gone.
            threading.Thread(
                target=self._do, args=(self._tasks,), name="lapclip-exchange", daemon=True
            ).start()
        asked: Future[None] = Future()
        self._tasks.put((task, asked))
        return asked

    def _do(self, tasks: SimpleQueue[Any]) -> None:
        for task, asked in iter(tasks.get, None):
            try:
                asked.set_result(task())
            except Exception as error:
                asked.set_exception(error)

    @contextmanager
    def _gpu_queue(self) -> Iterator[None]:
        import torch

        current = torch.cuda.current_stream()
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield

    def wait_for(self, tasks: Sequence[Future[None]]) -> None:
        """Wait until what was begun in the background is done."""
        began = time.monotonic()
        for task in tasks:
            task.result()
        if self._stream is not None:
            import torch

            torch.cuda.current_stream().wait_stream(self._stream)
        self.waited_seconds += time.monotonic() - began

    def gathered(self, own: Tensor, rows: Sequence[int], what: str) -> Tensor:
        """The rows of all ranks, one rank's after the other's; `rows` says how many each has. No gradient crosses."""
        if not self.many:
            return own
        import torch

        own = self.sendable(own)
        found = [
            own if rank == self.rank else own.new_empty(n, *own.shape[1:])
            for rank, n in enumerate(rows)
        ]
        self.exchange(
            {rank: [own] for rank in self.others},
            {rank: [found[rank]] for rank in self.others},
            what,
        )
        return torch.cat(found)

    def computed_in_shares(
        self, items: Sequence[T], compute: Callable[[T], np.ndarray]
    ) -> Iterator[np.ndarray]:
        """What is computed of each item, in order: each rank computes some of them and gives them to the others. All
        ranks have the same items, and each item is computed the same way wherever that is. Whoever is done with one
        takes the next, so a slow rank, or one that begins late, has fewer. Where one fails, all do."""
        if not self.many:
            yield from map(compute, items)
            return
        import numpy as np

        for first in range(0, len(items), SHARES * self.count):
            window = items[first : first + SHARES * self.count]
            own = self.all_or_none(partial(self._share_of, window, compute))
            found: dict[int, np.ndarray] = {}
            for rank in range(self.count):
                taken = self.from_rank(rank, list(own), "share")
                found |= zip(taken, self._arrays_from(rank, list(own.values())), strict=True)
            yield from (np.asarray(found[at]) for at in range(len(window)))

    def _share_of(
        self, items: Sequence[T], compute: Callable[[T], np.ndarray]
    ) -> dict[int, np.ndarray]:
        return {at: compute(items[at]) for at in self._taken(len(items))}

    def all_or_none(self, task: Callable[[], T]) -> T:
        """Do what each rank does by itself. Where it fails on one, all raise the same, so that they can change their
        settings alike; but an error that has been explained stays what it is where it occurred."""
        if not self.many:
            return task()
        try:
            found = task()
        except LostRank:
            raise
        except Exception as error:
            said = self.agreed(first_line(error) or type(error).__name__)
            if isinstance(error, LapclipError):
                raise
            raise RankFailed(f"A rank could not go on: {one_line(said or '')}.") from error
        if said := self.agreed(None):
            raise RankFailed(f"A rank could not go on: {one_line(said)}.")
        return found

    def _taken(self, count: int) -> Iterator[int]:
        """Those of so many items that this rank takes, one after the other."""
        self._deals += 1  # as on every rank, because all compute the same
        while True:
            try:
                at = self._store.add(f"deal/{self._deals}", 1) - 1
            except RuntimeError as error:
                raise self._lost(0, "next item", error) from error
            if at >= count:
                return
            yield at

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

    def reduce(self, tensor: Tensor, dtype: torch.dtype) -> None:
        """Replace a tensor by its sum over all ranks, in whatever order the collective has, sent as `dtype`."""
        import torch.distributed as dist

        held = self.sendable(tensor.to(dtype))
        try:
            with self._waits("the gradients of all ranks"):
                dist.all_reduce(held)
        except RuntimeError as error:
            raise self._lost((self.rank + 1) % self.count, "gradients", error) from error
        if held.data_ptr() != tensor.data_ptr():
            tensor.copy_(held)
        self._count([held])

    def from_rank(self, source: int, value: Any = None, what: str = "word") -> Any:
        """What one rank says, as JSON says it: its own value there, that rank's everywhere else."""
        if not self.many:
            return value
        return json.loads(self._bytes_from(source, json.dumps(value).encode(), what))

    def from_writer(self, value: Any = None, what: str = "word") -> Any:
        """What the writer says."""
        return self.from_rank(self.writer, value, what)

    def agreed(self, wish: str | None) -> str | None:
        """The wish of the first rank that has one, for all; None where none has. Ranks also tell each other how they
        have fared."""
        if not self.many:
            return wish
        import torch

        own = torch.tensor(
            [[bool(wish), self.waited_seconds, self.sent_bytes]], dtype=torch.float64
        )
        wishes, *metrics = self.gathered(own, [1] * self.count, "sign to go on").T.tolist()
        self.metrics = [(waited, int(sent)) for waited, sent in zip(*metrics, strict=True)]
        if not any(wishes):
            return None
        rank = wishes.index(1.0)
        said = self.from_rank(rank, wish)
        return said if self.writes and rank == self.rank else f"{said} on rank {rank}"

    def check_stop(self, reason: str) -> None:
        """Raise where another rank was told to end by its own system, and not all of them by a person: then torchrun
        starts again those that are left."""
        if reason.startswith("SIGTERM on rank") and not reason.endswith(f" {self.rank}"):
            raise LostRank(
                f"{reason}: it was told to end, so all have saved and ended.",
                hint="lapclip resume goes on",
            )

    def share_files(
        self,
        folder: Path,
        files: Sequence[Path] = (),
        allowed: Sequence[str] = ("*",),
        named: Callable[[str], str] = lambda name: name,
    ) -> None:
        """Give the others files of the writer's folder. They put them into a folder of their own, where they are not
        there already: ranks of one computer may share a folder. They take only those whose names are `allowed`, under
        the names that `named` gives them."""
        if not self.many:
            return
        listed = [path.relative_to(folder).as_posix() for path in files]
        for name in self.from_writer(listed, "list of files"):
            path = folder / PurePosixPath(name if self.writes else named(name))
            if self.writes or path.exists():
                for _ in self._file_from_writer(path, name):
                    pass
                continue
            depth = name.count("/")
            allowed_here = any(
                pattern == "*"
                or (fnmatch.fnmatchcase(name, pattern) and depth == pattern.count("/"))
                for pattern in allowed
            )
            if not path.resolve().is_relative_to(folder.resolve()) or not allowed_here:
                raise TrainingError(
                    f"Rank {self.writer} sent a file for another folder: {one_line(name)}."
                )
            path.parent.mkdir(parents=True, exist_ok=True)

            def write(partial: Path, path: Path = path, name: str = name) -> None:
                with partial.open("wb") as file:
                    file.writelines(self._file_from_writer(path, name))

            write_atomic(path, write)

    def _file_from_writer(self, path: Path, name: str) -> Iterator[bytes]:
        """A file of the writer's in chunks, the last of which is short: it may be larger than what memory is left."""
        with path.open("rb") if self.writes else nullcontext() as file:
            while True:
                chunk = self._bytes_from(self.writer, file.read(FILE_CHUNK) if file else b"", name)
                yield chunk
                if len(chunk) < FILE_CHUNK:
                    return

    def _bytes_from(self, source: int, body: bytes, what: str) -> bytes:
        import torch

        size = torch.tensor([len(body)], dtype=torch.int64)
        mine = self.rank == source
        self.exchange(
            {rank: [size] for rank in self.others} if mine else {},
            {} if mine else {source: [size]},
            what,
        )
        held = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body and mine else None
        if held is None:
            held = torch.empty(int(size), dtype=torch.uint8)
        self.exchange(
            {rank: [held] for rank in self.others} if mine else {},
            {} if mine else {source: [held]},
            what,
        )
        return body if mine else held.numpy().tobytes()

    def sendable(self, tensor: Tensor) -> Tensor:
        """Where exchanges can take it from."""
        tensor = tensor.detach().contiguous()
        return tensor if self._by_gpu else tensor.cpu()

    # Waiting in vain

    def _lost(self, peer: int, what: str, error: Exception | None = None) -> LostRank:
        """Why an exchange failed: what a rank that failed has said, else whom this one waited for."""
        said = ""
        with suppress(Exception):
            time.sleep(0.2)  # whoever ends says so first, but it may still be on its way
            said = (
                self._store.get(_FAILED).decode(errors="replace")
                if self._store.check([_FAILED])
                else ""
            )
        if (
            said
        ):  # torchrun ends all when one ends, so the one that failed gets time for its own words
            time.sleep(LAST_WORDS + 0.5)
        # gloo puts the place in its source before what it says.
        words = re.sub(r"^(\[[^]]*\] ?)+", "", first_line(error, 300)) if error else ""
        reason = f": {textwrap.shorten(one_line(words), 100, placeholder=' ...')}" if words else ""
        fault = said or f"rank {peer} did not answer{reason}"
        return LostRank(
            f"Rank {self.rank} waited for the {what} of rank {peer}, in vain: {one_line(fault)}",
            hint="what that rank printed; then lapclip resume with the same torchrun line",
        )

    def _live(self) -> None:
        """Give signs of life, and take note of those of the others. Where a link is down this waits with it."""
        last: dict[int, bytes] = {}
        names = [f"alive/{rank}" for rank in range(self.count)]
        for beat in itertools.count(1):
            try:
                self._store.set(names[self.rank], str(beat))
                for rank, said in enumerate(self._store.multi_get(names)):
                    if said != last.get(rank):
                        last[rank], self._heard[rank] = said, time.monotonic()
            except RuntimeError:  # whoever kept them is gone: then nothing is heard any more
                return
            if self._over.wait(LOOK_EVERY):
                return

    def _look_after(self) -> None:
        """Say now and then what is waited for, and end this process where that will never come: nothing else can, while
        it waits for the network."""
        said = 0.0
        while not self._over.wait(LOOK_EVERY):
            waiting, now = min(list(self._waiting.values()), default=None), time.monotonic()
            if waiting is None:
                continue
            who = f"rank {self.rank} of {counted(self.count, 'rank')}"
            silent = [
                rank
                for rank in self.others
                if now - max(waiting[0], self._heard[rank]) > SILENT_AFTER
            ]
            if silent and not self._over.is_set():
                print(
                    f"Error: {who} waited for {waiting[1]}, and has heard nothing of "
                    f"{', '.join(f'rank {rank}' for rank in silent)} for {duration(SILENT_AFTER)}. It ends; torchrun "
                    "starts it again if it may (--max-restarts), else lapclip resume goes on.",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)
            if now - max(waiting[0], said) > SAY_AFTER:
                said = now
                print(
                    f"{who} waits for {waiting[1]}, {duration(now - waiting[0])} so far",
                    file=sys.stderr,
                    flush=True,
                )

    def close(self) -> None:
        """Part from the others."""
        import torch.distributed as dist

        self._over.set()
        self.connected = False
        if self._tasks is not None:
            self._tasks.put(None)
        for (
            thread
        ) in self._watching:  # one that is in torch's code when Python ends would abort the process
            thread.join(LAST_WORDS)
        if dist.is_initialized():
            with suppress(Exception):  # of a rank that is gone
                dist.destroy_process_group()


ALONE = Ranks()
