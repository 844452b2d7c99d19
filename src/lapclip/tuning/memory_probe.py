"""How many pairs fit at once where arithmetic does not know the model: a few are taken through it and watched.

`training/memory.py` reckons the memory of models of our own that learn wholly. What a foreign network keeps for its
backward pass, and what is left of a model that is partly frozen, is seen by running it: once with some pairs and once
with twice as many, while a ledger follows every tensor. The difference is what so many pairs take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lapclip.data.batches import Batch
from lapclip.errors import ConfigError
from lapclip.machine.devices import Device
from lapclip.training.cuda_graph import AnyStep
from lapclip.training.memory import MARGIN, SHARE_OF_MEMORY
from lapclip.training.step import TrainStep
from lapclip.tuning.memory_ledger import Ledger

PAIRS = 4
"""How many are taken through it first; then twice as many."""
UNSEEN = 1.3
"""What the process takes for each byte that the ledger sees: measured 1.23 with EfficientNet-lite0, whose convolutions
want working space of their own, and gaps between results of different sizes."""


@dataclass(frozen=True)
class Needs:
    """What steps take beside the weights, which are in memory already."""

    learning: int
    """Bytes of weights that learn."""
    pair: int
    """Bytes that a pair takes on its way through the towers and back."""

    def of(self, pairs: int) -> int:
        """Bytes that so many pairs at once need: gradients and AdamW's two averages are as large as what learns."""
        return 3 * self.learning + round(UNSEEN * self.pair * pairs)


def watch(step: TrainStep, batch: Batch) -> Needs:
    """See what a pair takes. The weights stay as they are."""
    some = min(PAIRS, max(1, len(batch.tokens_BL) // 2))
    few, more = (_followed(step, batch, pairs) for pairs in (some, 2 * some))
    # Results on their way may be those of weights, whatever the number of pairs; what is kept grows with it surely.
    pair = max(more.most_kept - few.most_kept, more.most_passing - few.most_passing) // some
    learning = sum(each.numel() * each.element_size() for each in step.model.parameters() if each.requires_grad)
    return Needs(learning, pair)


def pairs_at_once(step: AnyStep, batch: Batch, device: Device) -> tuple[int, str]:
    """The micro-batch to take, 0 for the whole batch wherever that fits, and why; refused if not even one pair fits."""
    assert isinstance(step, TrainStep), "what arithmetic does not know is not recorded as a graph"
    train = step.config
    needs, free = watch(step, batch), device.free_bytes()

    def figures(pairs: int) -> str:
        return f"{pairs:,} at once need {needs.of(pairs) / 1e9:.1f} GB of the {free / 1e9:.1f} GB that are free"

    asked = min(train.micro_batch, train.batch_size)
    if asked and needs.of(asked) <= MARGIN * free:
        return train.micro_batch, "asked for"
    fitting = next((size for size in halvings(train.batch_size) if needs.of(size) <= SHARE_OF_MEMORY * free), None)
    if asked or fitting is None:
        hint = f"--set train.micro_batch={fitting}, which gives the same result in less memory"
        less = "--recipe heads, where less learns, or smaller towers"
        raise ConfigError(f"Pairs do not fit on {device.kind}: {figures(asked or 1)}.", hint=hint if fitting else less)
    whole = fitting == train.batch_size
    return (0 if whole else fitting), f"{'the whole batch fits' if whole else 'what fits'}: {figures(fitting)}"


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
