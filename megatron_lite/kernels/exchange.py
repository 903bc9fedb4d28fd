"""Hidden states on the ranks of a tensor-parallel group, and the two ways they are exchanged around products.

Inside attention and MLP every rank has all tokens and its part of the channels; between them the residual stream has
all channels. A product that splits its outputs (by columns) begins with `gather`, and one that splits its inputs (by
rows) ends with `reduce`; their backward passes are each other (Shoeybi et al. 2019, figure 3):

    gather    residual stream -> all tokens        backward: reduce
    reduce    parts of a sum, of all tokens -> their sum, in the residual stream        backward: gather

With `Replicated` every rank has the whole residual stream (b, s, h): gathers do nothing, reductions are all-reduces.
With `TokenSplit` (sequence parallelism, Korthikanti et al. 2022, section 4.2.2) it has one of T equal runs of the
flattened tokens, (1, b s / T, h): all-gathers and reduce-scatters, which send as many bytes as the all-reduces, and
norms, dropout and residual sums cost 1 / T of the memory and time.

Only these classes know how many ranks there are. A group of one exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from megatron_lite.distributed.cpu_collectives import Done
from megatron_lite.distributed.rank_group import Group
from megatron_lite.distributed.traffic import Handle
from megatron_lite.parameter import Parameter
from megatron_lite.seeds import derive_seed

GATHER, REDUCE, SUM = "tensor gather", "tensor reduce", "tensor sum"  # kinds of traffic


class Pending:
    """A tensor whose exchange is under way."""

    def __init__(self, work: Handle, result: Callable[[], Tensor]) -> None:
        self._work, self._result = work, result

    def wait(self) -> Tensor:
        """Return the exchanged tensor."""
        self._work.wait()
        return self._result()


def ready(tensor: Tensor) -> Pending:
    """Return a tensor that needs no exchange."""
    return Pending(Done(), lambda: tensor)


class Exchange(Protocol):
    """Exchanges between a product and what is before or after it."""

    splits_tokens: bool  # a rank's residual stream has only some of the tokens

    def gather(self, residual: Tensor) -> Pending:
        """Return all tokens (..., h)."""

    def reduce(self, parts: Tensor) -> Pending:
        """Return the residual stream of the sum over ranks of `parts` (..., h), whose memory may be overwritten."""

    def own(self, values: Tensor) -> Tensor:
        """Return those of the values (b, s) that belong to the tokens of this rank's residual stream."""

    def total(self, loss: Tensor) -> Tensor:
        """Return the sum over all tokens, (), of the sum over those of this rank's residual stream."""

    def bias(self, bias: Parameter | None) -> Parameter | None:
        """Return the bias on the rank whose product adds it to the sum, else None."""

    def seed(self, seed: int | None) -> int | None:
        """Return the seed of a dropout mask of the residual stream, equal where its values are."""


class Inside:
    """No exchange: every rank goes on with the channels that it has."""

    splits_tokens = False

    def gather(self, residual: Tensor) -> Pending:
        return ready(residual)

    def reduce(self, parts: Tensor) -> Pending:
        return ready(parts)

    def own(self, values: Tensor) -> Tensor:
        return values

    def total(self, loss: Tensor) -> Tensor:
        return loss

    def bias(self, bias: Parameter | None) -> Parameter | None:
        return bias

    def seed(self, seed: int | None) -> int | None:
        return seed


INSIDE = Inside()


class Replicated(Inside):
    """Every rank has the whole residual stream."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def reduce(self, parts: Tensor) -> Pending:
        parts = parts.contiguous()
        return Pending(self._group.all_reduce(parts, REDUCE), lambda: parts)

    def bias(self, bias: Parameter | None) -> Parameter | None:
        return bias if self._group.rank == 0 else None


class TokenSplit(Replicated):
    """Every rank has one of T equal runs of the tokens."""

    splits_tokens = True

    def gather(self, residual: Tensor) -> Pending:
        ranks = self._group.world_size
        if ranks == 1:
            return ready(residual)
        channels = residual.shape[-1]
        whole = residual.new_empty(1, ranks * (residual.numel() // channels), channels)
        whole.view(ranks, -1)[self._group.rank] = residual.reshape(-1)
        return Pending(self._group.all_gather(whole.view(-1), GATHER), lambda: whole)

    def reduce(self, parts: Tensor) -> Pending:
        if self._group.world_size == 1:
            return ready(parts)
        parts = parts.contiguous()
        work = self._group.reduce_scatter(parts.view(-1), REDUCE)
        # A copy, so that nothing keeps the memory of all tokens.
        return Pending(work, lambda: self._run(parts.flatten(0, -2)).clone())

    def own(self, values: Tensor) -> Tensor:
        return self._run(values.reshape(-1))

    def _run(self, values: Tensor) -> Tensor:
        """Return this rank's run of the tokens: (b s, ...) -> (1, b s / T, ...)."""
        return values.view(self._group.world_size, 1, -1, *values.shape[1:])[self._group.rank]

    def total(self, loss: Tensor) -> Tensor:
        loss = loss.clone()
        self._group.all_reduce(loss, SUM).wait()
        return loss

    def seed(self, seed: int | None) -> int | None:
        return split_seed(seed, self._group.rank)


def split_seed(seed: int | None, rank: int) -> int | None:
    """Return the seed of a dropout mask of values that only one rank of a tensor-parallel group has."""
    return derive_seed(seed, "tensor", rank) if seed is not None and rank else seed
