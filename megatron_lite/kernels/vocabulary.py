"""Embedding and head rows on tensor-parallel ranks (Shoeybi et al. 2019, section 3).

`SplitVocabulary`: each rank has a range of the vocabulary's rows. The embedding looks up its own tokens, and a
reduction completes the hidden states. The head computes the logits of its own rows for all tokens; ranks reduce only
each token's log-sum-exp and label logit, so that no rank holds the logits of the whole vocabulary:

    lse = log sum_r exp(lse_r)        x[label] = sum_r x_r[label], which is 0 on all ranks but one

`Vocabulary`: each rank has all rows and processes the tokens of its residual stream.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.distributed.rank_group import Group
from megatron_lite.kernels.tensor_collectives import ONE_RANK, SUM, Collectives, Pending


class Rows(NamedTuple):
    """Rows of a table to look up."""

    rows: Tensor  # (b, s) int64
    absent: Tensor | None  # (b, s) bool: tokens of other ranks, which read zeros; None: none


class Vocabulary:
    """A table with a row per vocabulary entry, whole on every rank."""

    is_split = False

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def rows(self, tokens: Tensor) -> Rows:
        """Return the rows that this rank looks up for tokens (b, s)."""
        return Rows(self._collectives.own(tokens), None)

    def embedded(self, rows: Tensor) -> Tensor:
        """Return the residual stream of looked-up rows (..., h)."""
        return rows

    def of_residual(self, residual: Tensor) -> Tensor:
        """All-gather the sequence-sharded input (..., h) of a vocabulary-parallel table or of its gradient."""
        return residual

    def start_into_residual(self, gradient: Tensor) -> Pending:
        """Start to reduce the gradient of the head's input (t, h) into the residual stream; overwrites it."""
        return Pending(gradient)

    def labels(self, labels: Tensor) -> Tensor:
        """Return labels (b, s) as rows of this rank's table, (t,); below zero: masked; beyond: another rank's."""
        return self._collectives.own(labels).flatten()

    def join(self, lse: Tensor, at_label: Tensor) -> None:
        """Turn sums over this rank's entries, (t,) in fp32, into sums over the vocabulary, in place."""

    def total(self, loss: Tensor) -> Tensor:
        """Return the loss summed over all tokens, ()."""
        return self._collectives.total(loss)

    def whole(self, logits: Tensor) -> Tensor:
        """Return all logits (..., v), given those of this rank's table."""
        return logits


WHOLE = Vocabulary(ONE_RANK)


class SplitVocabulary(Vocabulary):
    """A table with `size` consecutive rows on each rank of a group, including padding."""

    is_split = True

    def __init__(self, collectives: Collectives, group: Group, vocab_size: int, size: int) -> None:
        super().__init__(collectives)
        self._group, self._vocab_size, self._size = group, vocab_size, size
        self._start = group.rank * size

    def rows(self, tokens: Tensor) -> Rows:
        absent = (tokens < self._start) | (tokens >= self._start + self._size)
        # Spread tokens of other ranks over different rows, because one program sums the gradient of one row.
        present = min(self._size, self._vocab_size - self._start)
        return Rows(torch.where(absent, tokens % present, tokens - self._start), absent)

    def embedded(self, rows: Tensor) -> Tensor:
        return self._collectives.reduce(rows)

    def of_residual(self, residual: Tensor) -> Tensor:
        return self._collectives.gather(residual)

    def start_into_residual(self, gradient: Tensor) -> Pending:
        return self._collectives.start_reduce(gradient)

    def labels(self, labels: Tensor) -> Tensor:
        flat = labels.flatten()
        rows = flat - self._start
        present = (rows >= 0) & (rows < self._size)
        return torch.where(flat < 0, flat, torch.where(present, rows, self._vocab_size))

    def join(self, lse: Tensor, at_label: Tensor) -> None:
        gathered = lse.new_empty(self._group.world_size, 2, lse.shape[0])
        gathered[self._group.rank, 0], gathered[self._group.rank, 1] = lse, at_label
        self._group.all_gather(gathered.view(-1), SUM).wait()
        torch.logsumexp(gathered[:, 0], dim=0, out=lse)
        torch.sum(gathered[:, 1], dim=0, out=at_label)

    def total(self, loss: Tensor) -> Tensor:
        return loss

    def whole(self, logits: Tensor) -> Tensor:
        gathered = logits.new_zeros(self._group.world_size, *logits.shape[:-1], self._size)
        gathered[self._group.rank, ..., : logits.shape[-1]] = logits
        self._group.all_gather(gathered.view(-1), SUM).wait()
        return torch.cat([*gathered], dim=-1)[..., : self._vocab_size]


def vocabulary_over(group: Group, collectives: Collectives, vocab_size: int, size: int) -> Vocabulary:
    """Return a vocabulary-parallel table with `size` consecutive rows on each rank of a group."""
    if group.world_size == 1:
        return Vocabulary(collectives)
    return SplitVocabulary(collectives, group, vocab_size, size)
