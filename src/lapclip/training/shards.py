"""A batch as a fixed number of shards, so that what is learnt does not depend on how many processes share the work.

A shard goes through the towers by itself, the same way whichever rank computes it. Its gradients are added to those of
the others pairwise, in a tree that the number of shards alone decides: floating point sums depend on their order, and
this order is the same on one rank and on many. A rank has whole shards that follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lapclip.machine.ranks import Ranks

UNDER_TORCHRUN = 8
"""Shards of a run that torchrun starts, unless it asks for others: they can be shared by 2, 4 and 8 ranks equally."""
BUCKET = 4_000_000
"""Numbers that are exchanged at once."""

Node = tuple[int, int]
"""Shards that are added up to one sum: the first, and the one after the last."""


def own_shards(rank: int, ranks: int, shards: int) -> range:
    """The shards of a rank. Where there are fewer than ranks, some have none."""
    return range(rank * shards // ranks, (rank + 1) * shards // ranks)


def add_in_tree(node: Node, value: Callable[[Node], list[Tensor] | None]) -> list[Tensor]:
    """The sum over the shards of a node: that of its first half, with that of the rest added in place.

    `value` gives a sum that is known, and None where it has to be made from halves.
    """
    known = value(node)
    if known is not None:
        return known
    first, second = halves(node)
    total = add_in_tree(first, value)
    torch._foreach_add_(total, add_in_tree(second, value))  # pyright: ignore[reportPrivateImportUsage]
    return total


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


def sum_over_shards(
    shards: int, of_shard: Callable[[int], list[Tensor]], like: Sequence[Tensor], ranks: Ranks
) -> list[Tensor]:
    """The sum of what each shard gives, the same on every rank. A rank computes its own shards, in their order.

    `like` has the shapes of what a shard gives, for ranks without one.
    """
    whole = (0, shards)
    own = {
        node: add_in_tree(node, lambda node: of_shard(node[0]) if node[1] - node[0] == 1 else None)
        for node in whole_nodes(whole, own_shards(ranks.rank, ranks.count, shards))
    }
    if not ranks.many:
        return own[whole]
    total = next(iter(own.values())) if own else [torch.empty_like(tensor) for tensor in like]
    for bucket in buckets(like):
        flat = {node: _flat(tensors[bucket]) for node, tensors in own.items()}
        summed = _sum_between(flat, shards, like[bucket], ranks)
        views = summed.split([tensor.numel() for tensor in like[bucket]])
        # Into tensors of their own: where numbers lie in memory may decide how a kernel rounds.
        for into, view in zip(total[bucket], views, strict=True):
            into.copy_(view.view_as(into))
    return total


def buckets(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Slices of a list of tensors that are exchanged together."""
    first, held = 0, 0
    for at, tensor in enumerate(tensors):
        held += tensor.numel()
        if held >= BUCKET or at == len(tensors) - 1:
            yield slice(first, at + 1)
            first, held = at + 1, 0


def _sum_between(own: dict[Node, Tensor], shards: int, like: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """The sum of all nodes of all ranks. Each rank adds up a share of the numbers, in the order of the tree, and gives
    it to the others: so every number crosses the network as often as in the best of collectives."""
    size = sum(tensor.numel() for tensor in like)
    shares = [slice(rank * size // ranks.count, (rank + 1) * size // ranks.count) for rank in range(ranks.count)]
    nodes = [whole_nodes((0, shards), own_shards(rank, ranks.count, shards)) for rank in range(ranks.count)]
    empty, mine = ranks.ready(like[0].new_empty(0)), shares[ranks.rank]
    held = {node: ranks.ready(flat) for node, flat in own.items()}
    outgoing = {rank: torch.cat([empty, *(flat[shares[rank]] for flat in held.values())]) for rank in ranks.others}
    length = mine.stop - mine.start
    incoming = {rank: empty.new_empty(len(nodes[rank]) * length) for rank in ranks.others}
    ranks.exchange(outgoing, incoming, "gradients")
    known: dict[Node, Tensor] = {node: flat[mine] for node, flat in held.items()}
    for rank in ranks.others:
        known |= zip(nodes[rank], incoming[rank].split(length) if nodes[rank] else (), strict=True)
    total = add_in_tree((0, shards), lambda node: [known[node]] if node in known else None)[0]
    rows = [share.stop - share.start for share in shares]
    return ranks.gathered(total, rows, "gradients").to(like[0].device)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def total_of_ranks(tensors: list[Tensor], ranks: Ranks) -> list[Tensor]:
    """The sum over ranks in any order, which `train.shards=0` leaves to the collective."""
    for bucket in buckets(tensors):
        flat = ranks.reduced(_flat(tensors[bucket])).to(tensors[0].device)
        for into, view in zip(tensors[bucket], flat.split([t.numel() for t in tensors[bucket]]), strict=True):
            into.copy_(view.view_as(into))
    return tensors
