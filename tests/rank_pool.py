"""Ranks for tests: four processes on gloo that stay, and run functions as 1, 2, 3 or 4 ranks."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MOST_RANKS = 4
TIMEOUT = timedelta(seconds=60)


class RankPool:
    """Processes that run the same function together. After a failure they are started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starts = 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what `function(ranks, *arguments)` returns on each of so many ranks."""
        if not self._processes:
            self._start()
        for pipe in self._pipes[:ranks]:
            pipe.send((ranks, function, arguments))
        results = []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            is_done, result = pipe.recv()
            if not is_done:
                self.close()
                raise AssertionError(f"rank {rank} of {ranks}:\n{result}")
            results.append(result)
        return results

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        methods = multiprocessing.get_all_start_methods()
        method = "forkserver" if "forkserver" in methods else "spawn"
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["torch.distributed.fsdp", __name__])
        self._starts += 1
        store = self._folder / f"store-{self._starts}"
        for rank in range(MOST_RANKS):
            here, there = context.Pipe()
            arguments = (rank, str(store), there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(here)


def _serve(rank: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from lapclip.training.distributed import Ranks

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, MOST_RANKS),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=MOST_RANKS,
        timeout=TIMEOUT,
    )
    groups = {
        count: dist.new_group(list(range(count)), timeout=TIMEOUT)
        for count in range(1, MOST_RANKS + 1)
    }
    while True:
        count, function, arguments = pipe.recv()
        try:
            pipe.send((True, function(Ranks(groups[count]), *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
