"""A foreign network run in two parts, without knowing how it is written.

Its blocks are the members of its largest list of modules of one kind. What enters a block is caught on its way; to go
on from there, the blocks before are made to pass on what they are given, and the block is handed what was caught. What
runs before a block, and so may be frozen with it, is seen by watching one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

CLOSE = 1e-4
"""How much two ways to compute the same may differ, as a share of the largest value."""


class _Reached(Exception):
    """Carries what enters a block out of the network."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Blocks:
    """The blocks of a network."""

    def __init__(self, network: nn.Module) -> None:
        self._network, self._blocks = network, find_blocks(network)
        self._gives_tuples = False
        self._seen: list[tuple[int, nn.Module]] = []
        """Each module that was called, in order, and how many blocks had begun by then."""

    def __len__(self) -> int:
        return len(self._blocks)

    @torch.no_grad()
    def watch(self, run: Callable[[], Tensor]) -> Tensor:
        """Run the network once and see which modules are called when."""
        begun = 0
        handles = []

        def begins(module: nn.Module, args: Any) -> None:
            nonlocal begun
            begun = 1 + next(at for at, block in enumerate(self._blocks) if block is module)

        def called(module: nn.Module, args: Any) -> None:
            self._seen.append((begun, module))

        def ended(module: nn.Module, args: Any, result: Any) -> None:
            self._gives_tuples = isinstance(result, tuple)

        for block in self._blocks:
            handles += [block.register_forward_pre_hook(begins), block.register_forward_hook(ended)]
        for module in self._network.modules():
            if next(module.parameters(recurse=False), None) is not None:
                handles.append(module.register_forward_pre_hook(called))
        try:
            return run()
        finally:
            for handle in handles:
                handle.remove()

    def block_of_parameters(self) -> dict[int, int]:
        """How many blocks had begun when each parameter, by its id, was first used; unused ones are not there."""
        found: dict[int, int] = {}
        for begun, module in self._seen:
            for parameter in module.parameters(recurse=False):
                found.setdefault(id(parameter), begun)
        return found

    def begin(self, run: Callable[[], Tensor], block: int) -> Tensor:
        """What enters a block; after the last, what the network gives."""
        if block == len(self._blocks):
            return run()

        def stop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            raise _Reached(args[0] if args else next(iter(kwargs.values())))

        handle = self._blocks[block].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            run()
        except _Reached as reached:
            return reached.hidden
        finally:
            handle.remove()
        raise AssertionError("the network did not reach its block")

    def finish(self, run: Callable[[], Tensor], hidden: Tensor, block: int) -> Tensor:
        """What the network gives from a block on; `run` may give it any input of the right form."""
        if block == len(self._blocks):
            return hidden

        def take(
            module: nn.Module, args: Any, kwargs: dict[str, Any]
        ) -> tuple[Any, dict[str, Any]]:
            if args:
                return (hidden, *args[1:]), kwargs
            return args, {**kwargs, next(iter(kwargs)): hidden}

        handle = self._blocks[block].register_forward_pre_hook(take, with_kwargs=True)
        try:
            with self._passing(block):
                return run()
        finally:
            handle.remove()

    @contextmanager
    def tapping(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Catch what has passed so many blocks while the network runs."""
        caught: dict[int, Tensor] = {}

        def enters(tap: int) -> Callable[..., None]:
            def catch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
                caught[tap] = args[0] if args else next(iter(kwargs.values()))

            return catch

        def leaves(module: nn.Module, args: Any, result: Any) -> None:
            caught[len(self._blocks)] = result[0] if isinstance(result, tuple) else result

        handles = [
            self._blocks[-1].register_forward_hook(leaves)
            if tap == len(self._blocks)
            else self._blocks[tap].register_forward_pre_hook(enters(tap), with_kwargs=True)
            for tap in taps
        ]
        try:
            yield caught
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _passing(self, stop: int) -> Iterator[None]:
        """Make the blocks before one give back what they are given."""

        def passed(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else next(iter(kwargs.values()))
            return (hidden,) if self._gives_tuples else hidden

        for block in self._blocks[:stop]:
            block.forward = passed
        try:
            yield
        finally:
            for block in self._blocks[:stop]:
                del block.forward  # the class's own appears again


def find_blocks(network: nn.Module) -> list[nn.Module]:
    """The members of the list or sequence, all of one class, that hold the most parameters; none if there is none."""
    best: list[nn.Module] = []
    most = 0
    for module in network.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        members = list(module)
        size = sum(p.numel() for p in module.parameters())
        if len({type(member) for member in members}) == 1 and size > most:
            best, most = members, size
    return best


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two results are equal up to rounding."""
    return one.shape == other.shape and float((one - other).abs().max()) <= CLOSE * float(
        other.abs().max()
    )
