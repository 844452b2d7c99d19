"""The contrastive loss of several ranks: each computes the rows of its own images and captions.

Summed over ranks, values and gradients are those of the whole batch. Logits are computed block by block and computed
again in the backward pass, so that only one block of them is in memory. The columns of a block are

- gathered: the embeddings of the whole batch, which every rank has;
- in a ring (`train.loss_ring`): the embeddings of one rank, which travel from rank to rank, and their gradients with
  them. A rank then never holds the embeddings of the whole batch.

Shapes: B batch, R rows of this rank, K rows and C columns of a block, E embedding.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lapclip.training.distributed import Ranks

if TYPE_CHECKING:
    from lapclip.training.objectives.base import LossRows

BLOCK_LOGITS = 1 << 21  # numbers in a block: 8 MB in float32, a few times over


class RowLoss(ABC):
    """The loss of some rows whose columns come in blocks, and how many of them put a true column first."""

    def __init__(self, positives_RB: Tensor) -> None:
        self.positives_RB = positives_RB
        rows = len(positives_RB)
        self.best_R = torch.full((rows,), -math.inf, device=positives_RB.device)
        self.is_hit_R = torch.zeros(rows, dtype=torch.bool, device=positives_RB.device)

    def add_block(self, rows: slice, columns: slice, logits_KC: Tensor) -> None:
        """Add a block of logits."""
        best_K, index_K = logits_KC.max(1)
        positives_KC = self.positives_RB[rows, columns]
        is_hit_K = positives_KC.gather(1, index_K[:, None]).squeeze(1)
        is_better_K = best_K > self.best_R[rows]
        self.is_hit_R[rows] = torch.where(is_better_K, is_hit_K, self.is_hit_R[rows])
        self.best_R[rows] = torch.where(is_better_K, best_K.float(), self.best_R[rows])

    @abstractmethod
    def total(self) -> Tensor:
        """Return the sum of the losses of all rows, after all blocks."""

    @abstractmethod
    def logit_gradient(self, rows: slice, columns: slice, logits_KC: Tensor) -> Tensor:
        """Return the gradient of `total` with respect to a block of logits, in their memory."""

    def hits(self) -> Tensor:
        """Return how many rows have a true column first."""
        return self.is_hit_R.sum()


class SoftmaxRows(RowLoss):
    """Cross-entropy of rows, each with its positives as targets. A row without positives adds nothing."""

    def __init__(self, positives_RB: Tensor, smoothing: float, dtype: torch.dtype) -> None:
        super().__init__(positives_RB)
        self.smoothing = smoothing
        rows, device = len(positives_RB), positives_RB.device
        self.log_sum_R = torch.full((rows,), -math.inf, dtype=dtype, device=device)
        self.count_R = torch.zeros(rows, dtype=dtype, device=device)
        self.positive_sum_R = torch.zeros(rows, dtype=dtype, device=device)
        self.logit_sum_R = torch.zeros(rows, dtype=dtype, device=device)

    def add_block(self, rows: slice, columns: slice, logits_KC: Tensor) -> None:
        super().add_block(rows, columns, logits_KC)
        positives_KC = self.positives_RB[rows, columns].to(logits_KC.dtype)
        self.log_sum_R[rows] = torch.logaddexp(self.log_sum_R[rows], logits_KC.logsumexp(1))
        self.count_R[rows] += positives_KC.sum(1)
        self.logit_sum_R[rows] += logits_KC.sum(1)
        self.positive_sum_R[rows] += positives_KC.mul_(logits_KC).sum(1)

    def total(self) -> Tensor:
        positive_share_R, uniform_share_R, has_positives_R = self._shares()
        target_R = positive_share_R * self.positive_sum_R + uniform_share_R * self.logit_sum_R
        return (has_positives_R * self.log_sum_R - target_R).sum()

    def logit_gradient(self, rows: slice, columns: slice, logits_KC: Tensor) -> Tensor:
        shares = self._shares()
        positive_share_K1, uniform_share_K1, has_positives_K1 = (
            share_R[rows, None] for share_R in shares
        )
        positives_KC = self.positives_RB[rows, columns].to(logits_KC.dtype)
        gradient_KC = logits_KC.sub_(self.log_sum_R[rows, None]).exp_().mul_(has_positives_K1)
        return gradient_KC.sub_(positives_KC.mul_(positive_share_K1)).sub_(uniform_share_K1)

    def _shares(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the target of each positive of a row, that of every column, and 0 for rows without positives."""
        has_positives_R = (self.count_R > 0).to(self.count_R.dtype)
        positive_share_R = (1 - self.smoothing) / self.count_R.clamp(min=1)
        uniform_share_R = self.smoothing / self.positives_RB.shape[1] * has_positives_R
        return positive_share_R, uniform_share_R, has_positives_R


class SigmoidRows(RowLoss):
    """Binary cross-entropy of every pair of a row and a column."""

    def __init__(self, positives_RB: Tensor, dtype: torch.dtype) -> None:
        super().__init__(positives_RB)
        self.sum = torch.zeros((), dtype=dtype, device=positives_RB.device)

    def add_block(self, rows: slice, columns: slice, logits_KC: Tensor) -> None:
        super().add_block(rows, columns, logits_KC)
        positives_KC = self.positives_RB[rows, columns]
        self.sum += F.softplus(torch.where(positives_KC, -logits_KC, logits_KC)).sum()

    def total(self) -> Tensor:
        return self.sum

    def logit_gradient(self, rows: slice, columns: slice, logits_KC: Tensor) -> Tensor:
        return logits_KC.sigmoid_().sub_(self.positives_RB[rows, columns].to(logits_KC.dtype))


@dataclass(frozen=True)
class Columns:
    """Where the columns of a batch come from: all from memory, or rank after rank around a ring."""

    ranks: Ranks
    rows: Sequence[int]
    """Rows of each rank, which are columns for the others."""
    is_ring: bool

    @property
    def turns(self) -> int:
        return self.ranks.count if self.is_ring else 1

    def slice_at(self, turn: int) -> slice:
        """Return which columns of the batch this rank has at a turn."""
        if not self.is_ring:
            return slice(0, sum(self.rows))
        owner = self._owner(turn)
        first = sum(self.rows[:owner])
        return slice(first, first + self.rows[owner])

    def pass_on(self, tensors: Sequence[Tensor], turn: int) -> list[Tensor]:
        """Exchange the columns of a turn, and what travels with them, for those of the next turn."""
        return self.ranks.pass_on(tensors, self.rows[self._owner(turn + 1)])

    def _owner(self, turn: int) -> int:
        return (self.ranks.rank - turn) % self.ranks.count


class _BlockwiseLoss(torch.autograd.Function):
    """`RowLoss.total` of scaled similarities of rows and columns."""

    @staticmethod
    def forward(
        ctx: Any,
        row_RE: Tensor,
        column_CE: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        loss: RowLoss,
        columns: Columns,
    ) -> Tensor:
        block_CE = column_CE
        for turn in range(columns.turns):
            column_slice = columns.slice_at(turn)
            for rows in _row_blocks(len(row_RE), len(block_CE)):
                logits_KC = (row_RE[rows] @ block_CE.T).mul_(scale)
                if bias is not None:
                    logits_KC += bias
                loss.add_block(rows, column_slice, logits_KC)
            if turn + 1 < columns.turns:
                (block_CE,) = columns.pass_on([block_CE], turn)
        ctx.save_for_backward(row_RE, column_CE, scale, bias)
        ctx.loss, ctx.columns = loss, columns
        return loss.total()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        row_RE, block_CE, scale, bias = ctx.saved_tensors
        loss, columns = cast(RowLoss, ctx.loss), cast(Columns, ctx.columns)
        row_gradient_RE = torch.zeros_like(row_RE)
        block_gradient_CE = torch.zeros_like(block_CE)
        scale_gradient = torch.zeros_like(scale)
        bias_gradient = None if bias is None else torch.zeros_like(bias)
        for turn in range(columns.turns):
            column_slice = columns.slice_at(turn)
            for rows in _row_blocks(len(row_RE), len(block_CE)):
                cosine_KC = row_RE[rows] @ block_CE.T
                logits_KC = cosine_KC * scale
                if bias is not None:
                    logits_KC += bias
                logit_gradient_KC = loss.logit_gradient(rows, column_slice, logits_KC)
                scale_gradient += torch.dot(logit_gradient_KC.view(-1), cosine_KC.view(-1))
                if bias_gradient is not None:
                    bias_gradient += logit_gradient_KC.sum()
                logit_gradient_KC.mul_(scale)
                row_gradient_RE[rows].addmm_(logit_gradient_KC, block_CE)
                block_gradient_CE.addmm_(logit_gradient_KC.T, row_RE[rows])
            if columns.turns > 1:
                block_CE, block_gradient_CE = columns.pass_on([block_CE, block_gradient_CE], turn)
        if bias_gradient is not None:
            bias_gradient = bias_gradient * gradient
        return (
            row_gradient_RE.mul_(gradient),
            block_gradient_CE.mul_(gradient),
            scale_gradient * gradient,
            bias_gradient,
            None,
            None,
        )


def _row_blocks(rows: int, columns: int) -> list[slice]:
    """Cut rows so that a block has at most `BLOCK_LOGITS` logits."""
    size = max(1, BLOCK_LOGITS // max(1, columns))
    return [slice(first, min(rows, first + size)) for first in range(0, rows, size)]


class ContrastiveRows(NamedTuple):
    """What the rows of this rank add to the loss and to the accuracies of the batch."""

    loss: Tensor
    t2i_accuracy: Tensor
    i2t_accuracy: Tensor


def contrastive_rows(
    rows: LossRows,
    other: str,
    positives: str,
    name: str,
    scale: Tensor,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
) -> ContrastiveRows:
    """Return this rank's part of the contrastive loss `name` of images and another pass.

    `positives` names the pairs that belong together.
    """
    assert rows.columns is not None
    image_RE, other_RE = rows.own["image"], rows.own[other]
    image_CE, other_CE = rows.gathered["image"], rows.gathered[other]
    pairs, columns, dtype = rows.pairs[positives], rows.columns, image_RE.dtype
    if name == "softmax":
        by_image = SoftmaxRows(pairs.by_image_RB, smoothing, dtype)
        by_other = SoftmaxRows(pairs.by_text_RB, smoothing, dtype)
    else:
        by_image = SigmoidRows(pairs.by_image_RB, dtype)
        by_other = SigmoidRows(pairs.by_text_RB, dtype)
    image_sum = _blockwise(image_RE, other_CE, scale, bias, by_image, columns)
    if name == "softmax":
        other_sum = _blockwise(other_RE, image_CE, scale, bias, by_other, columns)
        loss = (image_sum + other_sum) / (2 * rows.size)
    else:
        # Rows of images have every pair once. The other rows serve their accuracy alone.
        with torch.no_grad():
            _blockwise(other_RE, image_CE, scale, bias, by_other, columns)
        loss = image_sum / rows.size
    return ContrastiveRows(loss, by_other.hits() / rows.size, by_image.hits() / rows.size)


def _blockwise(
    row_RE: Tensor,
    column_CE: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    loss: RowLoss,
    columns: Columns,
) -> Tensor:
    return cast(Tensor, _BlockwiseLoss.apply(row_RE, column_CE, scale, bias, loss, columns))
