"""Tensor-parallel hidden states, and the two collectives around products.

Inside attention and MLP every rank has all tokens and its share of the channels; between them the residual stream has
all channels. A product with split outputs (column-parallel) begins with `gather`, and one with split inputs
(row-parallel) ends with `reduce`; each is the backward pass of the other (Shoeybi et al. 2019, figure 3):

    gather    residual stream -> all tokens
    reduce    partial sums of all tokens -> their sum, in the residual stream

`start_gather` and `start_reduce` return while the collective is in flight. A product of gathered tokens begins with the
rank's own tokens while the others are in flight.

With `Replicated` every rank has the whole residual stream (b, s, h): gathers do nothing, reductions are all-reduces.
With `SequenceParallel` (Korthikanti et al. 2022, section 4.2.2) it has one of T equal slices of the flattened tokens,
(1, b s / T, h). All-gathers and reduce-scatters send as many bytes as the all-reduces; norms, dropout and residual sums
cost 1 / T of the memory and time.

Only these classes know how many ranks there are. A group of one does not communicate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_lite.distributed.rank_group import Group
from megatron_lite.distributed.traffic import Handle
from megatron_lite.kernels.products import affine, product
from megatron_lite.parameter import Parameter
from megatron_lite.seeds import derive_seed

GATHER, REDUCE, SUM = "tensor gather", "tensor reduce", "tensor sum"  # kinds of traffic


class Pending:
    """A tensor whose collective may be in flight; this base class, for a single rank, is always complete.

    Products are split into the same rows every time, so recomputation gives the same bits.
    """

    __slots__ = ("_tensor",)  # each layer makes ten of these

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        """Return the complete tensor."""
        return self._tensor

    def affine(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product of (..., i) with weight (o, i)^T plus bias (o,), (..., o)."""
        return affine(self.wait(), weight, bias)

    def product(self, matrix: Tensor) -> Tensor:
        """Return the product of (t, i) with matrix (o, i)^T, (t, o)."""
        return product(self.wait(), matrix)


class Reducing(Pending):
    """A tensor that is available once its reduction is done."""

    def __init__(self, work: Handle, result: Callable[[], Tensor]) -> None:
        self._work, self._result = work, result

    def wait(self) -> Tensor:
        self._work.wait()
        return self._result()


class Gathering(Pending):
    """All tokens, (t, h) or (1, t, h), of which this rank has rows [start, end)."""

    def __init__(self, work: Handle, whole: Tensor, start: int, end: int) -> None:
        self._whole, self._start, self._end = whole, start, end
        self._work: Handle | None = work

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._whole

    def affine(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._multiplied(lambda rows, out: affine(rows, weight, bias, out), weight.shape[0])

    def product(self, matrix: Tensor) -> Tensor:
        return self._multiplied(lambda rows, out: product(rows, matrix, out), matrix.shape[0])

    def _multiplied(self, multiply: Callable[[Tensor, Tensor], Tensor], channels: int) -> Tensor:
        """Return `multiply(rows, out)` for all tokens, this rank's first."""
        rows, start, end = self._whole.flatten(0, -2), self._start, self._end
        result = rows.new_empty(len(rows), channels)
        multiply(rows[start:end], result[start:end])
        self.wait()
        for others in (slice(0, start), slice(end, None)):
            if len(rows[others]):
                multiply(rows[others], result[others])
        return result.view(*self._whole.shape[:-1], channels)


class Collectives:
    """The collectives before and after products; on a single rank, no communication."""

    def start_gather(self, residual: Tensor) -> Pending:
        """Start to gather all tokens: (t, h) if the residual stream is (t, h), else (b, s, h) or (1, b s, h)."""
        return Pending(residual)

    def start_reduce(self, parts: Tensor) -> Pending:
        """Start to sum `parts` (..., h) over ranks into the residual stream; may overwrite `parts`."""
        return Pending(parts)

    def gather(self, residual: Tensor) -> Tensor:
        """Return all tokens, as `start_gather` does."""
        return self.start_gather(residual).wait()

    def reduce(self, parts: Tensor) -> Tensor:
        """Return the sum over ranks in the residual stream, as `start_reduce` does."""
        return self.start_reduce(parts).wait()

    def own(self, values: Tensor) -> Tensor:
        """Return the values, of (b, s), for the tokens of this rank's residual stream."""
        return values

    def positions(self, positions: Tensor | None, tokens: Tensor) -> Tensor | None:
        """Return the positions of this rank's tokens, given those of all tokens (b, s); None: 0, 1, ... per sample."""
        return positions

    def total(self, loss: Tensor) -> Tensor:
        """Return the loss over all tokens, (), given the loss over this rank's residual stream."""
        return loss

    def bias(self, bias: Parameter | None) -> Parameter | None:
        """Return the bias on the rank that adds it, else None."""
        return bias

    def seed(self, seed: int | None) -> int | None:
        """Return the seed of a residual-stream dropout mask: equal on ranks with equal values."""
        return seed


ONE_RANK = Collectives()


class Replicated(Collectives):
    """Every rank of a group has the whole residual stream."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def start_reduce(self, parts: Tensor) -> Pending:
        parts = parts.contiguous()
        return Reducing(self._group.all_reduce(parts, REDUCE), lambda: parts)

    def bias(self, bias: Parameter | None) -> Parameter | None:
        return bias if self._group.rank == 0 else None


class SequenceParallel(Replicated):
    """Every rank of a group has one of T equal slices of the tokens."""

    def start_gather(self, residual: Tensor) -> Pending:
        ranks, channels = self._group.world_size, residual.shape[-1]
        tokens = residual.numel() // channels
        shape = (ranks * tokens, channels) if residual.dim() == 2 else (1, ranks * tokens, channels)
        start, whole = self._group.rank * tokens, residual.new_empty(shape)
        whole.view(-1, channels)[start : start + tokens] = residual.reshape(-1, channels)
        return Gathering(self._group.all_gather(whole.view(-1), GATHER), whole, start, start + tokens)

    def start_reduce(self, parts: Tensor) -> Pending:
        parts = parts.contiguous()
        work = self._group.reduce_scatter(parts.view(-1), REDUCE)
        # A copy, so that the memory of all tokens can be freed.
        return Reducing(work, lambda: self._slice(parts.flatten(0, -2)).clone())

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


def collectives_over(group: Group, splits_tokens: bool) -> Collectives:
    """Return the collectives of a group. splits_tokens: use sequence parallelism."""
    if group.world_size == 1:
        return ONE_RANK
    return SequenceParallel(group) if splits_tokens else Replicated(group)


def split_seed(seed: int | None, rank: int) -> int | None:
    """Return the seed of a dropout mask for values that differ among tensor-parallel ranks."""
    return derive_seed(seed, "tensor", rank) if seed is not None and rank else seed
