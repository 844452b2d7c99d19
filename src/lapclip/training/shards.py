"""A batch as a fixed number of shards, so that what is learnt does not depend on how many processes share the work.

A shard goes through the towers by itself, the same way whichever rank computes it. Its gradients are added to those of
the others pairwise, in a tree that the number of shards alone decides: floating point sums depend on their order, and
this order is the same on one rank and on many. A rank has whole shards that follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from lapclip.data.batches import BatchPlan
from lapclip.machine.ranks import Ranks

UNDER_TORCHRUN = 8
"""Shards of a run that torchrun starts, unless it asks for others: they can be shared by 2, 4 and 8 ranks equally."""
LARGE_GRADIENT = 1 << 18
"""Numbers from which on a gradient travels from where it is; smaller ones are copied together first."""
TOGETHER, MOST_TOGETHER = 1 << 20, 1 << 23
"""Numbers of small gradients that travel together, on a CPU and on a GPU."""
WORTH_ROWS = 0.5
"""Share of a table's rows up to which only those that were used travel."""

Node = tuple[int, int]
"""Shards that are added up to one sum: the first, and the one after the last."""


def own_shards(ranks: Ranks, shards: int, rank: int | None = None) -> range:
    """The shards of a rank, by default of this one. Where there are fewer than ranks, some have none."""
    speeds, rank = ranks.speeds, ranks.rank if rank is None else rank
    first, last = sum(speeds[:rank]), sum(speeds[: rank + 1])
    return range(first * shards // sum(speeds), last * shards // sum(speeds))


def own_batches(plan: BatchPlan, shards: int, ranks: Ranks) -> BatchPlan:
    """The batches as a rank reads them: the pixels and features of its own shards alone."""
    if not ranks.many:
        return plan
    shards = min(shards or ranks.count, plan.batch_size)
    return plan.for_shards(shards, own_shards(ranks, shards))


def add_in_tree(
    node: Node, value: Callable[[Node], Tensor | None], into: Tensor | None = None
) -> Tensor:
    """The sum over the shards of a node: that of its first half and that of the rest, added in place.

    `value` gives a sum that is known, and None where it has to be made from halves. `into` is the one of them whose
    place the sum takes, where there is a choice: which of two numbers is added to which changes nothing.
    """
    known = value(node)
    if known is not None:
        return known
    first, second = (add_in_tree(half, value, into) for half in halves(node))
    return second.add_(first) if second is into else first.add_(second)


def halves(node: Node) -> tuple[Node, Node]:
    """A node of several shards in two; the first half is a power of two."""
    first, last = node
    middle = first + (1 << ((last - first - 1).bit_length() - 1))
    return (first, middle), (middle, last)


def whole_nodes(node: Node, own: range) -> list[Node]:
    """The largest nodes of a tree that lie within some shards: what a rank can add up without the others."""
    first, last = node
    if last <= own.start or own.stop <= first:
        return []
    if own.start <= first and last <= own.stop:
        return [node]
    return [found for half in halves(node) for found in whole_nodes(half, own)]


def nodes_ended(node: Node) -> dict[int, int]:
    """How many sums of two are complete with each shard of a node."""
    if node[1] - node[0] == 1:
        return {node[0]: 0}
    first, second = halves(node)
    found = nodes_ended(first) | nodes_ended(second)
    found[node[1] - 1] += 1
    return found


class GradientSum:
    """The gradients of one batch, summed over its shards and over all ranks.

    Those of a rank's last shard may come one by one, while the backward pass still runs: what is complete then travels
    meanwhile. Every rank sends and receives in the same order.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        shards: int,
        ranks: Ranks,
        *,
        ordered: bool = True,
        table: int | None = None,
        rows: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`like` has the shapes of what a shard gives, in the order of the forward pass. `table` is the one of which
        only `rows` are not zero, on any rank. Without `ordered` each rank has one shard, and the collective adds them
        up in the order that it likes. Gradients travel as `dtype`."""
        self._like, self._shards, self._ranks, self._ordered = like, shards, ranks, ordered
        self._dtype = dtype
        few = table is not None and rows is not None and len(rows) < WORTH_ROWS * len(like[table])
        self._table, self._rows = (table, rows) if few else (None, None)
        self.own = own_shards(ranks, shards)
        self._nodes = [
            whole_nodes((0, shards), own_shards(ranks, shards, rank)) for rank in range(ranks.count)
        ]
        self._ended = {
            shard: n for node in self._nodes[ranks.rank] for shard, n in nodes_ended(node).items()
        }
        self._ends = {last - 1 for _, last in self._nodes[ranks.rank]}
        self._begun: list[list[Tensor]] = []
        """Sums that still miss a half, the largest first."""
        self._sums: list[list[Tensor]] = []
        """Of whole nodes."""
        self._last: dict[int, Tensor] = {}
        """Of the node that the last shard ends, as they come."""
        self._dense: Tensor | None = None
        self.groups = self._together()
        """Which gradients travel together, those that the backward pass makes first before the others."""
        self._complete: set[int] = set()
        self._sent: list[Future[None]] = []
        self._under_way: list[tuple[SumBetween | None, list[Tensor], Tensor]] = []

    def _together(self) -> list[list[int]]:
        # A GPU copies faster than it takes up work, a CPU does not.
        large, together = (
            (LARGE_GRADIENT, TOGETHER) if self._like[0].is_cpu else (MOST_TOGETHER, MOST_TOGETHER)
        )
        groups: list[list[int]] = []
        small: list[int] = []
        for at in reversed(range(len(self._like))):
            if self._like[at].numel() >= large and at != self._table:
                groups.append([at])
            else:
                small.append(at)
            if sum(self._like[one].numel() for one in small if one != self._table) >= together:
                groups.append(small)
                small = []
        groups += [small] if small else []
        return groups

    def add(self, shard: int, gradients: Sequence[Tensor]) -> None:
        """Take all gradients of a shard. Shards come in their order."""
        self._begun.append([self._used_rows(at, gradient) for at, gradient in enumerate(gradients)])
        for _ in range(self._ended[shard]):
            second = self._begun.pop()
            torch._foreach_add_(self._begun[-1], second)  # pyright: ignore[reportPrivateImportUsage]
        if shard in self._ends:
            self._sums.append(self._begun.pop())

    def add_group(self, number: int, gradients: Sequence[Tensor]) -> None:
        """Take those gradients of this rank's last shard that travel together."""
        for at, gradient in zip(self.groups[number], gradients, strict=True):
            found = self._used_rows(at, gradient)
            for begun in reversed(self._begun):
                found = begun[at].add_(found)
            self._last[at] = found
        self._complete.add(number)
        while len(self._sent) in self._complete:
            self._send(self.groups[len(self._sent)])

    def total(self, *, failed: bool = False) -> tuple[list[Tensor], bool]:
        """The sum, the same on every rank, and whether any rank has failed: what that one still owes the others is
        not a number then."""
        if not self._ranks.connected:
            return [self._with_zeros(at, summed) for at, summed in enumerate(self._sums[0])], failed
        if failed or not self.own:
            self._fill(math.nan if failed else 0.0)
        for group in self.groups[len(self._sent) :]:
            self._send(group)
        self._finish()
        sums = self._sums[0] if self._sums else [self._last[at] for at in range(len(self._like))]
        marks = self._ranks.gathered(
            torch.tensor([failed]), [1] * self._ranks.count, "word of how it went"
        )
        return [self._with_zeros(at, summed) for at, summed in enumerate(sums)], bool(marks.any())

    def _fill(self, value: float) -> None:
        """Have something to send of all that has not been sent."""
        self._begun.clear()
        for group in self.groups[len(self._sent) :]:
            for at in group:
                filled = torch.full_like(self._like[at], value, requires_grad=False)
                self._last[at] = self._used_rows(at, filled)
        filled = [self._last[at] for at in range(len(self._like))]
        self._sums = [filled] * (len(self._nodes[self._ranks.rank]) - 1)

    def _used_rows(self, at: int, gradient: Tensor) -> Tensor:
        if at != self._table:
            return gradient
        assert self._rows is not None
        self._dense = gradient
        return gradient.index_select(0, self._rows)

    def _with_zeros(self, at: int, summed: Tensor) -> Tensor:
        if at != self._table:
            return summed
        assert self._rows is not None
        assert self._dense is not None
        return self._dense.index_copy_(
            0, self._rows, summed
        )  # the other rows are zero in every shard

    def _send(self, group: list[int]) -> None:
        sums = [[summed[at] for at in group] for summed in self._sums]
        if self._last:
            sums.append([self._last[at] for at in group])
        flat = [_flat(tensors) for tensors in sums]
        if self._ordered:
            own = flat if self.own else []
            under_way = SumBetween(
                own, flat[0], self._nodes, self._shards, self._ranks, self._dtype, len(self._sent)
            )
            self._sent.append(self._ranks.in_background(under_way.add))
        else:
            under_way = None
            self._sent.append(
                self._ranks.in_background(lambda: self._ranks.reduce(flat[0], self._dtype))
            )
        self._under_way.append((under_way, sums[0], flat[0]))

    def _finish(self) -> None:
        """Wait for what is under way, and put the sums where gradients lay: where numbers are in memory may decide how
        a kernel rounds."""
        self._ranks.wait_for(self._sent)
        for under_way, tensors, summed in self._under_way:
            if under_way is not None:
                under_way.finish()
            if len(tensors) > 1:
                parts = summed.split([tensor.numel() for tensor in tensors])
                shaped = [part.view_as(into) for into, part in zip(tensors, parts, strict=True)]
                torch._foreach_copy_(tensors, shaped)  # pyright: ignore[reportPrivateImportUsage]
            elif summed.data_ptr() != tensors[0].data_ptr():
                tensors[0].copy_(summed.view_as(tensors[0]))


class SumBetween:
    """The sum of all nodes of all ranks. Each rank adds up a share of the numbers, in the order of the tree, and gives
    it to the others: so every number crosses the network as often as in the best of collectives."""

    def __init__(
        self,
        own: list[Tensor],
        into: Tensor,
        nodes: list[list[Node]],
        shards: int,
        ranks: Ranks,
        dtype: torch.dtype,
        number: int,
    ) -> None:
        """Begin to give each rank its share. `number` tells sums apart that are under way at the same time."""
        size = into.numel()
        self._into, self._nodes, self._shards, self._ranks, self._number = (
            into,
            nodes,
            shards,
            ranks,
            number,
        )
        self._shares = [
            slice(rank * size // ranks.count, (rank + 1) * size // ranks.count)
            for rank in range(ranks.count)
        ]
        mine = self._shares[ranks.rank]
        self._held = [ranks.sendable(flat.to(dtype)) for flat in own]
        self._buffer = ranks.sendable(into.to(dtype))
        self._incoming = {
            rank: [self._buffer.new_empty(mine.stop - mine.start) for _ in nodes[rank]]
            for rank in ranks.others
        }
        outgoing = {
            rank: [flat[self._shares[rank]] for flat in self._held] for rank in ranks.others
        }
        self._wait = ranks.post(outgoing, self._incoming, "gradients", 2 * number + 1)

    def add(self) -> None:
        """Add up this rank's share as soon as it is there, and begin to give it to the others."""
        self._wait()
        ranks, mine, dtype = self._ranks, self._shares[self._ranks.rank], self._into.dtype
        known = dict(
            zip(self._nodes[ranks.rank], (flat[mine].to(dtype) for flat in self._held), strict=True)
        )
        own_sum = known[self._nodes[ranks.rank][0]] if known else None
        for rank in ranks.others:
            known |= zip(
                self._nodes[rank], (flat.to(dtype) for flat in self._incoming[rank]), strict=True
            )
        total, place = add_in_tree((0, self._shards), known.get, own_sum), self._buffer[mine]
        if total.data_ptr() != place.data_ptr():
            place.copy_(total)
        incoming = {rank: [self._buffer[self._shares[rank]]] for rank in ranks.others}
        self._wait = ranks.post(
            {rank: [place] for rank in ranks.others}, incoming, "gradients", 2 * self._number + 2
        )

    def finish(self) -> None:
        """Wait for the shares of the others."""
        self._wait()
        if self._buffer.data_ptr() != self._into.data_ptr():
            self._into.copy_(self._buffer)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
