"""Tensor-parallel hidden states: the two collectives around products, and tables with a row per
vocabulary entry.

Inside attention and MLP every rank has all tokens and its share of the channels; between them the
residual stream has all channels. A product with split outputs (column-parallel) begins with a
gather, and one with split inputs (row-parallel) ends with a reduction; each is the backward pass of
the other (Shoeybi et al. 2019, figure 3):

    gather    residual stream -> all tokens
    reduce    partial sums of all tokens -> their sum, in the residual stream

`start_gather` and `start_reduce` return while the collective is in flight. A product of gathered
tokens begins with the rank's own tokens while the others are in flight. A product that is reduced
may be computed in two halves.

With `Replicated` every rank has the whole residual stream (b, s, h): gathers do nothing, reductions
are all-reduces. With `SequenceParallel` (Korthikanti et al. 2022, section 4.2.2) it has one of T
equal slices of the flattened tokens, (1, b s / T, h). All-gathers and reduce-scatters send as many
bytes as the all-reduces; norms, dropout and residual sums cost 1 / T of the memory and time.

With `SplitVocabulary` each rank has a range of the rows of embedding and head (Shoeybi et al. 2019,
section 3). The embedding looks up its own tokens, and a reduction completes the hidden states. The
head computes the logits of its own rows for all tokens; ranks reduce only each token's log-sum-exp
and label logit, so that no rank stores the whole vocabulary's logits:

    lse = log sum_r exp(lse_r)        x[label] = sum_r x_r[label], which is 0 on all ranks but one

With `Vocabulary` each rank has all rows and processes the tokens of its residual stream.

Only these classes know how many ranks there are. A group of one does not communicate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lite.distributed.rank_group import Group
from megatron_lite.kernels.linear import Arriving, Exchange, Forward, Pending, complete
from megatron_lite.kernels.products import affine
from megatron_lite.parameter import Function
from megatron_lite.seeds import derive_seed

# Kinds of traffic.
GATHER = "tensor gather"
REDUCE = "tensor reduce"
SUM = "tensor sum"
SCALE = "tensor scale"
# Tokens from which halves pay off: with fewer, products are slower and the second collective takes
# longer than it hides.
FEWEST_TOKENS = 256


class Collectives(Exchange):
    """The collectives of the residual stream; on a single rank, no communication."""

    @property
    def unreduced(self) -> Collectives:
        """The collectives after a product whose sums over ranks are left to `joined`."""
        return self

    def joined(self, parts: Tensor) -> Tensor:
        """Return `parts` (b, s, h), which `unreduced` left, summed over ranks into the residual
        stream, with autograd."""
        return parts

    def own(self, values: Tensor) -> Tensor:
        """Return the values, out of (b, s), for the tokens of this rank's residual stream."""
        return values

    def positions(self, positions: Tensor | None, tokens: Tensor) -> Tensor | None:
        """Return the positions of this rank's tokens, given all tokens' (b, s); None: 0, 1, ... per
        sample."""
        return positions

    def total(self, loss: Tensor) -> Tensor:
        """Return the loss over all tokens, (), given the loss over this rank's residual stream."""
        return loss

    def seed(self, seed: int | None) -> int | None:
        """Return the seed for a residual-stream dropout mask: equal on ranks with equal values."""
        return seed


ONE_RANK = Collectives()


class _Unreduced(Collectives):
    """Every rank has its share of a sum over ranks, the first rank's with the bias."""

    def __init__(self, has_bias: bool) -> None:
        self._has_bias = has_bias

    def reduced_product(
        self, forward: Forward, x: Arriving, weight: Any, bias: Tensor | None
    ) -> Tensor:
        return forward(x, weight, bias if self._has_bias else None)


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives, ctx.shape = collectives, parts.shape
        return complete(collectives.start_reduce(parts.clone()))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        gathered = ctx.collectives.start_gather(dy.reshape(-1, dy.shape[-1]))
        return complete(gathered).view(ctx.shape), None


class Replicated(Collectives):
    """Collectives for a group whose ranks all have the whole residual stream. in_halves: see
    `reduced_product`."""

    splits_tokens = False

    def __init__(self, group: Group, in_halves: bool = False) -> None:
        self._group, self._in_halves = group, in_halves

    @property
    def unreduced(self) -> Collectives:
        return _Unreduced(self._group.rank == 0)

    def joined(self, parts: Tensor) -> Tensor:
        return _Joined.apply(parts, self)

    def start_reduce(self, parts: Tensor) -> Pending:
        parts = parts.contiguous()
        return Pending(parts, self._group.all_reduce(parts, REDUCE))

    def reduced_product(
        self, forward: Forward, x: Arriving, weight: Any, bias: Tensor | None
    ) -> Tensor:
        """See `Exchange`. With halves, the first half's sums are in flight while the second is
        multiplied."""
        tokens, bias = complete(x), bias if self._group.rank == 0 else None
        if not self._in_halves or tokens[..., 0].numel() < FEWEST_TOKENS:
            return self.start_reduce(forward(x, weight, bias)).wait()
        slices = tokens.reshape(
            self._group.world_size if self.splits_tokens else 1, -1, tokens.shape[-1]
        )
        halves = slices.tensor_split(2, dim=1)  # of each rank's tokens
        result = tokens.new_empty(*tokens.shape[:-1], weight.shape[0])
        places = result.flatten(0, -2).split([half[..., 0].numel() for half in halves])
        pairs = zip(halves, places, strict=True)
        reducing = [self.start_reduce(affine(half, weight, bias, out)) for half, out in pairs]
        reduced = [half.wait(copies=False) for half in reducing]
        return result if len(slices) == 1 else torch.cat(reduced, dim=1)


class SequenceParallel(Replicated):
    """Collectives for a group whose ranks have one of T equal slices of the tokens."""

    splits_tokens = True

    def start_gather(self, residual: Tensor) -> Pending:
        ranks, channels = self._group.world_size, residual.shape[-1]
        tokens = residual.numel() // channels
        shape = (ranks * tokens, channels) if residual.dim() == 2 else (1, ranks * tokens, channels)
        start, whole = self._group.rank * tokens, residual.new_empty(shape)
        whole.view(-1, channels)[start : start + tokens] = residual.reshape(-1, channels)
        return Pending(
            whole, self._group.all_gather(whole.view(-1), GATHER), own=slice(start, start + tokens)
        )

    def start_reduce(self, parts: Tensor) -> Pending:
        parts = parts.contiguous()
        work = self._group.reduce_scatter(parts.view(-1), REDUCE)
        return Pending(self._slice(parts.flatten(0, -2)), work, is_slice=True)

    def own(self, values: Tensor) -> Tensor:
        return self._slice(values.reshape(-1))

    def positions(self, positions: Tensor | None, tokens: Tensor) -> Tensor | None:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.own(positions)

    def _slice(self, values: Tensor) -> Tensor:
        """Return this rank's slice of the tokens: (b s, ...) -> (1, b s / T, ...)."""
        return values.view(self._group.world_size, 1, -1, *values.shape[1:])[self._group.rank]

    def total(self, loss: Tensor) -> Tensor:
        loss = loss.clone()
        self._group.all_reduce(loss, SUM).wait()
        return loss

    def seed(self, seed: int | None) -> int | None:
        return split_seed(seed, self._group.rank)


def collectives_over(group: Group, splits_tokens: bool, in_halves: bool = False) -> Collectives:
    """Return a group's collectives. splits_tokens: use sequence parallelism. in_halves: reduce
    products so."""
    if group.world_size == 1:
        return ONE_RANK
    return (SequenceParallel if splits_tokens else Replicated)(group, in_halves)


def split_seed(seed: int | None, rank: int) -> int | None:
    """Return a dropout seed for values that differ among tensor-parallel ranks."""
    return derive_seed(seed, "tensor", rank) if seed is not None and rank else seed


# -- the vocabulary
# ---------------------------------------------------------------------------------------------------


class Vocabulary:
    """A table with one row per vocabulary entry, whole on every rank."""

    is_split = False

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def rows(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rows to look up for tokens (b, s), and other ranks' tokens, which read zeros;
        None: none."""
        return self._collectives.own(tokens), None

    def embedded(self, rows: Tensor) -> Tensor:
        """Return the residual stream from looked-up rows (..., h)."""
        return rows

    def of_residual(self, residual: Tensor) -> Tensor:
        """All-gather the sequence-sharded input (..., h) of a vocabulary-parallel table or of its
        gradient."""
        return residual

    def start_into_residual(self, gradient: Tensor) -> Arriving:
        """Start to reduce the head's input gradient (t, h) into the residual stream; overwrites
        it."""
        return gradient

    def labels(self, labels: Tensor) -> Tensor:
        """Return labels (b, s) as rows of this rank's table, (t,); below zero: masked; beyond:
        another rank's."""
        return self._collectives.own(labels).flatten()

    def join(self, lse: Tensor, at_label: Tensor) -> None:
        """Turn sums over this rank's entries, (t,) in fp32, into sums over the vocabulary, in
        place."""

    def total(self, loss: Tensor) -> Tensor:
        """Return the loss summed over all tokens, ()."""
        return self._collectives.total(loss)

    def whole(self, logits: Tensor) -> Tensor:
        """All-gather the logits (..., v) from each rank's part of the table."""
        return logits


WHOLE = Vocabulary(ONE_RANK)


class SplitVocabulary(Vocabulary):
    """A table with `size` consecutive rows on each rank of a group, including padding."""

    is_split = True

    def __init__(self, collectives: Collectives, group: Group, vocab_size: int, size: int) -> None:
        super().__init__(collectives)
        self._group = group
        self._vocab_size = vocab_size
        self._size = size
        self._start = group.rank * size

    def rows(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        absent = (tokens < self._start) | (tokens >= self._start + self._size)
        # Spread other ranks' tokens over different rows, because one program sums the gradient of
        # one row.
        present = min(self._size, self._vocab_size - self._start)
        return torch.where(absent, tokens % present, tokens - self._start), absent

    def embedded(self, rows: Tensor) -> Tensor:
        return complete(self._collectives.start_reduce(rows))

    def of_residual(self, residual: Tensor) -> Tensor:
        return complete(self._collectives.start_gather(residual))

    def start_into_residual(self, gradient: Tensor) -> Arriving:
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


def vocabulary_over(
    group: Group, collectives: Collectives, vocab_size: int, size: int
) -> Vocabulary:
    """Return a vocabulary-parallel table with `size` consecutive rows on each rank of a group."""
    if group.world_size == 1:
        return Vocabulary(collectives)
    return SplitVocabulary(collectives, group, vocab_size, size)
