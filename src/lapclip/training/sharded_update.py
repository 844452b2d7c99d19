"""The gradients of a batch that is cut in shards, of which each rank computes its own.

A part of `training/step.py`, which calls `take_by_shards`: what goes through the towers, and the loss, are the step's.
How gradients are added up is `training/shards.py`.

Shapes: B batch, L tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lapclip.data.batches import Batch
from lapclip.errors import RankFailed
from lapclip.machine.device import DTYPES
from lapclip.measure.phases import Stopwatch
from lapclip.model.towers import TextTower
from lapclip.training.caption_chunks import chunk_lengths
from lapclip.training.inputs import Inputs
from lapclip.training.objectives import Loss
from lapclip.training.recovery import cause_of
from lapclip.training.shards import GradientSum, own_shards

if TYPE_CHECKING:
    from lapclip.training.step import TrainStep

LARGE_BATCH = 4096
"""Pairs from which on ranks may divide the loss: its logits then take 64 MB, several times over."""


def shard_count(step: TrainStep) -> int:
    """Return how many parts of a batch go through the towers by themselves."""
    return step.config.shards or step.ranks.count


def has_shards(step: TrainStep) -> bool:
    """Return whether a step takes its batch by shards.

    A single rank that leaves sums to the collective does what it would do beside others.
    """
    return shard_count(step) != 1 or (step.ranks.connected and not step.config.shards)


def deal_shards(step: TrainStep, inputs: Inputs, batch: Batch) -> Inputs:
    """Return a batch in the order of its shards. All draws were made for the batch before."""
    dealt, longest = batch.dealt(shard_count(step)), inputs.tokens_BL.shape[1]
    lengths = []
    for rows in dealt:
        own_lengths = None if batch.lengths_B is None else batch.lengths_B[rows]
        lengths.append(chunk_lengths(own_lengths, longest, step.config, step.device))
    ordered = replace(inputs, own_shards=batch.own_shards)
    if len(dealt) > 1:
        ordered = ordered.in_order(torch.from_numpy(np.concatenate(dealt)))
    return replace(ordered, lengths=(), shards=tuple(map(len, dealt)), shard_lengths=tuple(lengths))


def take_by_shards(step: TrainStep, inputs: Inputs, watch: Stopwatch) -> Loss:
    """Losses and gradients by shards, of which each rank computes its own.

    The embeddings of all shards are gathered as leaves; every rank computes the loss over all pairs and takes the
    gradients of its own shards, which it carries through their towers. So no gradient crosses the gather, and those
    of the scale and the bias, which every rank has, are never summed. Where the batch is cut in micro-batches, what
    was computed for the embeddings is computed again, as in gradient caching.
    """
    again = step.is_cut(inputs)
    summing = _gradient_sum(step, inputs)
    encoded: dict[int, dict[str, Tensor]] = {}
    failures: list[Exception] = []
    with _held_back(step, failures):
        for number in summing.own:
            with torch.set_grad_enabled(not again):
                shard = inputs.shard(number)
                parts = [
                    step.encode(part, watch)
                    for part in (step.micro_batches(shard) if again else [shard])
                ]
            encoded[number] = parts[0]
            if len(parts) > 1:
                encoded[number] = {
                    name: torch.cat([part[name] for part in parts]) for name in parts[0]
                }
    with watch.phase("exchange") if step.ranks.many else nullcontext():
        embeddings = _gathered(step, inputs, {} if failures else encoded)
    losses = (
        _loss_in_shares(step, inputs, embeddings, summing.own, failures, watch)
        if _divides_loss(step, inputs)
        else None
    )
    with _held_back(step, failures):
        if failures:  # the others need something of this rank, but not that
            raise failures[0]
        if losses is None:
            losses = step.take_loss(inputs, embeddings, watch)
        by_shard = {
            name: embedding.grad.split(inputs.shards)
            for name, embedding in embeddings.items()
            if embedding.grad is not None
        }
        assert by_shard.keys() == embeddings.keys()
        for number in summing.own:
            gradients = {name: parts[number] for name, parts in by_shard.items()}
            _carry_shard(step, inputs, number, gradients, encoded, summing, watch)
    encoded.clear()
    with watch.phase("exchange") if step.ranks.many else nullcontext():
        total, failed = summing.total(failed=bool(failures))
    if losses is None or failed:
        raise RankFailed("A rank could not take this step.") from (
            failures[0] if failures else None
        )
    for parameter, gradient in zip(step.learnt_in_towers, total, strict=True):
        parameter.grad = gradient
    return losses


def _divides_loss(step: TrainStep, inputs: Inputs) -> bool:
    """Whether each rank computes only its own rows of the loss: where the order of sums is left open, and the
    square of logits is large. What is learnt beside whole captions needs no such square, and stays as it is."""
    open_order = step.config.shards == 0 and step.ranks.many
    is_contrastive = len(step.objectives.in_batch(inputs)) == 1
    return open_order and len(inputs) >= LARGE_BATCH and is_contrastive


def _loss_in_shares(
    step: TrainStep,
    inputs: Inputs,
    embeddings: dict[str, Tensor],
    own: range,
    failures: list[Exception],
    watch: Stopwatch,
) -> Loss | None:
    """The loss and the gradients of the embeddings, scale and bias, each rank from its own rows, summed. One that
    fails gives no numbers."""
    first, size = sum(inputs.shards[: own.start]), sum(inputs.shards[number] for number in own)
    outside = [
        found for found in (step.model.logit_scale, step.model.logit_bias) if found is not None
    ]
    leaves = [*embeddings.values(), *(found for found in outside if found.requires_grad)]
    loss, summed_metrics = None, ("loss", "t2i_accuracy", "i2t_accuracy")
    flat = torch.full(
        (3 + sum(leaf.numel() for leaf in leaves),), math.nan, device=step.device.torch
    )
    with _held_back(step, failures):
        loss = step.take_loss(inputs, embeddings, watch, slice(first, first + size))
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        numbers = torch.stack([loss.metrics[name] for name in summed_metrics])
        flat = torch.cat([numbers, *(gradient.reshape(-1) for gradient in gradients)])
    step.ranks.reduce(flat, flat.dtype)
    numbers, *summed = flat.split([3, *(leaf.numel() for leaf in leaves)])
    for leaf, gradient in zip(leaves, summed, strict=True):
        leaf.grad = gradient.view_as(leaf).clone()
    if loss is None:
        return None
    sums = dict(zip(summed_metrics, numbers, strict=True))
    return Loss(sums["loss"], loss.metrics | sums)


def exchanged_numbers(step: TrainStep, batch: Batch) -> int:
    """How many numbers of gradients ranks add up for such a batch."""
    numbers = sum(parameter.numel() for parameter in step.learnt_in_towers)
    at = _token_table(step)
    if at is None:
        return numbers
    table = step.learnt_in_towers[at]
    return numbers - table.numel() + len(np.unique(batch.tokens_BL)) * table.shape[1]


def _token_table(step: TrainStep) -> int | None:
    """Which of the parameters that learn has a row for each token, where it learns: a batch uses few."""
    text = step.model.text
    table = text.token_embedding.weight if isinstance(text, TextTower) else None
    return next((at for at, found in enumerate(step.learnt_in_towers) if found is table), None)


def _gradient_sum(step: TrainStep, inputs: Inputs) -> GradientSum:
    """What adds up the gradients of the towers."""
    rows, table = None, _token_table(step)
    if table is not None and (
        step.ranks.many or step.device.is_cpu
    ):  # else nothing is gained by it
        texts = [other.source for other in step.passes(inputs) if other.tower == "text"]
        tokens = [inputs.tokens_BL, *(inputs.extras[name] for name in texts)]
        rows = torch.cat([found.reshape(-1) for found in tokens]).unique()
    return GradientSum(
        step.learnt_in_towers,
        len(inputs.shards),
        step.ranks,
        ordered=step.config.shards > 0,
        table=table,
        rows=rows,
        dtype=DTYPES[step.config.exchange],
    )


def _carry_shard(
    step: TrainStep,
    inputs: Inputs,
    number: int,
    gradients: dict[str, Tensor],
    encoded: dict[int, dict[str, Tensor]],
    summing: GradientSum,
    watch: Stopwatch,
) -> None:
    """Carry the gradients of one shard's embeddings to its weights. Those of the last shard are handed on as they
    come, so that they travel while the others are still computed, unless that would only get in the way."""
    last = step.ranks.connected and step.ranks.overlaps and number == summing.own[-1]
    around_last = handing_on(step, summing) if last else None
    if step.is_cut(inputs):
        step.carry(inputs.shard(number), gradients, watch, around_last)
    else:
        with watch.phase("backward"), around_last or nullcontext():
            embeddings = encoded.pop(number)
            torch.autograd.backward(
                list(embeddings.values()), [gradients[name] for name in embeddings]
            )
            if step.rounded and not last:
                step.rounded.hand_over()
    if not last:
        found = [
            parameter.grad for parameter in step.learnt_in_towers if parameter.grad is not None
        ]
        assert len(found) == len(step.learnt_in_towers), "what learns has a gradient"
        summing.add(number, found)
    for parameter in step.learnt_in_towers:
        parameter.grad = None


@contextmanager
def handing_on(step: TrainStep, summing: GradientSum) -> Iterator[None]:
    """While a backward pass runs, give away gradients that travel together as soon as all of them are there. On a
    GPU, which may compute them in less time than it takes to be told of all, only the one that is made last of each
    group is watched; gradients that micro-batches have begun are there from the start, so then all are."""
    groups = summing.groups
    members = [[step.learnt_in_towers[at] for at in group] for group in groups]
    leaves = [
        [step.rounded.leaf_of(one) if step.rounded else one for one in group] for group in members
    ]
    begun = any(leaf.grad is not None for group in leaves for leaf in group)
    watched = leaves if begun or step.device.is_cpu else [group[-1:] for group in leaves]
    missing, handed = [len(group) for group in watched], set[int]()

    def hand_on(number: int) -> None:
        handed.add(number)
        if step.rounded:
            step.rounded.hand_over_some(members[number])
        found = [parameter.grad for parameter in members[number] if parameter.grad is not None]
        summing.add_group(number, found)

    def when_there(number: int) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            missing[number] -= 1
            # A bias whose gradient a later kernel takes may complete its group after the one that is watched.
            for earlier in range(number + 1):
                there = not missing[earlier] and all(
                    leaf.grad is not None for leaf in leaves[earlier]
                )
                if there and earlier not in handed:
                    hand_on(earlier)

        return note

    hooks = [
        leaf.register_post_accumulate_grad_hook(when_there(number))
        for number, group in enumerate(watched)
        for leaf in group
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for number in set(range(len(groups))) - handed:
        hand_on(number)


@contextmanager
def _held_back(step: TrainStep, failures: list[Exception]) -> Iterator[None]:
    """A failure that other settings may cure is raised only when all ranks know of it: until then they wait for
    what this one has to give."""
    try:
        yield
    except Exception as error:
        if not step.ranks.many or cause_of(error) is None:
            raise
        failures.append(error.with_traceback(None))  # whose frames hold memory


def _gathered(
    step: TrainStep, inputs: Inputs, encoded: Mapping[int, dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the embeddings of all shards for each pass, as leaves."""
    names = ["image", "text", *(other.name for other in step.passes(inputs))]
    ranks, width = step.ranks, step.model.shape.embedding
    counts = [own_shards(ranks, len(inputs.shards), rank) for rank in range(ranks.count)]
    rows = [sum(inputs.shards[number] for number in numbers) for numbers in counts]
    shards = [
        torch.cat([embeddings[name].detach() for name in names], 1)
        for embeddings in encoded.values()
    ]
    # No numbers where this rank has failed, nor where it has no shards.
    none = torch.full((rows[ranks.rank], len(names) * width), math.nan, device=step.device.torch)
    own = torch.cat(shards) if shards else none
    together = ranks.gathered(own, rows, "embeddings").to(step.device.torch)
    return {
        name: side.clone(memory_format=torch.contiguous_format).requires_grad_()
        for name, side in zip(names, together.split(width, 1), strict=True)
    }
