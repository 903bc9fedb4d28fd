"""Expert parallelism: rows on their way to the ranks of their experts, and results on the way back.

    counts      each rank sends the others the numbers of rows for each of their experts
    rows        an all-to-all of the rows, which are sorted by expert and thus by rank
    results     the same all-to-all the other way

A rank sorts what it receives by expert, then by the rank that sent it, then by token, so that sums
over an expert's rows have one order. The host reads the counts once a layer and pass, because they
are the sizes of what it receives. A rank may send or receive nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_lite.distributed.cpu_collectives import Works
from megatron_lite.distributed.expert_group import ExpertGroup
from megatron_lite.distributed.traffic import Handle

# A plan expects that a rank receives at most this many times the mean number of rows.
PLANNED_LOAD = 2
ALL = slice(None)
# waits for rows that are on their way, and returns them
Arrival = Callable[[], Sequence[Tensor]]


class Segments:
    """Rows (r, ...) sorted by expert, each of which has consecutive ones.

    experts: of each row, (r,), ascending. counts: each expert's rows, if the host knows them.
    """

    def __init__(
        self, experts: Tensor, num_experts: int, counts: Sequence[int] | None = None
    ) -> None:
        self.experts, self._counts = experts, counts
        self.num_experts = num_experts
        every = torch.arange(num_experts, device=experts.device)
        self.ends = torch.searchsorted(experts, every, right=True, out_int32=True)  # (E,)

    @cached_property
    def spans(self) -> list[slice]:
        """Each expert's rows (reads the device). A plan expects equally many."""
        rows, count = len(self.experts), self.num_experts
        if self._counts is not None:
            ends = [*itertools.accumulate(self._counts)]
        elif self.ends.is_meta:
            ends = [rows * (expert + 1) // count for expert in range(count)]
        else:
            ends = self.ends.tolist()
        return [slice(*pair) for pair in itertools.pairwise([0, *ends])]


class Dispatch:
    """The way of a micro-batch's rows to their experts: all on this rank.

    home: the rows of this rank's tokens. work: those that it computes.
    """

    sends = False

    def __init__(self, home: Any, work: Segments) -> None:
        self.home, self.work = home, work

    def begin(self, x: Tensor) -> None:
        """Start sending the tokens x (t, h), which the next `rows_of` returns."""

    def rows_of(self, x: Tensor, span: slice = ALL) -> Tensor:
        """Return each row's token of all ranks' x (t, h). span: of these rows; all if it sends."""
        return x.index_select(0, self.home.tokens[span])

    def out(self, *values: Tensor) -> Arrival:
        """Start sending rows, (r, ...) each, to the ranks of their experts."""
        return lambda: values

    def back(self, *values: Tensor) -> Arrival:
        """Start sending rows, (r, ...) each, to the ranks of their tokens."""
        return lambda: values


class Exchange(Dispatch):
    """The way over a group, each rank of which has equally many neighbouring experts."""

    sends = True
    _arriving: tuple[Tensor, Handle] | None = None

    def __init__(self, home: Any, group: ExpertGroup) -> None:
        self._group, ranks = group, group.world_size
        count, counts = home.num_experts // ranks, home.ends.diff(prepend=home.ends.new_zeros(1))
        received, work = group.all_to_all(counts, [count] * ranks, [count] * ranks)
        work.wait()
        if counts.is_meta:
            rows = len(home.tokens)
            numbers = [
                [_even(size, count) for size in _even(total, ranks)]
                for total in (rows, PLANNED_LOAD * rows)
            ]
        else:
            numbers = group.read(torch.stack([counts, received]).view(2, ranks, count))
        self._sent, self._received = ([sum(row) for row in some] for some in numbers)
        by_expert = [sum(column) for column in zip(*numbers[1], strict=True)]
        experts = torch.arange(count, device=counts.device).repeat(ranks)
        experts = experts.repeat_interleave(received, output_size=sum(by_expert))
        experts, self._order = experts.sort(stable=True)
        super().__init__(home, Segments(experts, count, by_expert))

    def begin(self, x: Tensor) -> None:
        self._arriving = self._start(super().rows_of(x))

    def rows_of(self, x: Tensor, span: slice = ALL) -> Tensor:
        arriving, self._arriving = self._arriving, None
        rows, work = arriving or self._start(super().rows_of(x))
        work.wait()
        return rows.index_select(0, self._order)

    def out(self, *values: Tensor) -> Arrival:
        arriving = [self._start(rows) for rows in values]
        return lambda: [rows.index_select(0, self._order) for rows in _arrived(arriving)]

    def back(self, *values: Tensor) -> Arrival:
        in_order = [torch.empty_like(rows).index_copy_(0, self._order, rows) for rows in values]
        arriving = [self._group.all_to_all(rows, self._received, self._sent) for rows in in_order]
        return lambda: _arrived(arriving)

    def _start(self, rows: Tensor) -> tuple[Tensor, Handle]:
        return self._group.all_to_all(rows, self._sent, self._received)


def _arrived(arriving: Sequence[tuple[Tensor, Handle]]) -> list[Tensor]:
    Works([work for _, work in arriving]).wait()
    return [rows for rows, _ in arriving]


def _even(total: int, parts: int) -> list[int]:
    return [total * (part + 1) // parts - total * part // parts for part in range(parts)]
