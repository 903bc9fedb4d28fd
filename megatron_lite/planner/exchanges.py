"""Exchanges of hidden states over a tensor-parallel group: what the passes of a rank send, counted without tensors.

The functions of `kernels/` start them (`kernels/exchange.py`, `kernels/vocabulary.py`); the tests compare every byte
with what the groups of real ranks count. Replicated parameters exchange their gradients once a step, in `zero/`, which
`plan.count_traffic` replays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_lite.distributed.traffic import Total
from megatron_lite.kernels.exchange import GATHER, REDUCE, SUM
from megatron_lite.planner.activations import FP32_BYTES, Sizes


class Exchanges(NamedTuple):
    """Exchanges by kind, as `Traffic` counts them."""

    every: dict[str, Total]
    beside: dict[str, Total]  # of these, those with products of the same function beside them


def exchanges_of_step(sizes: Sizes) -> Exchanges:
    """Return the exchanges of all micro-batches of a step."""
    micro_batches = sizes.config.batch.sequential_micro_batches
    assert micro_batches is not None, "resolved"
    if sizes.ranks == 1:
        return Exchanges({}, {})
    counts = _Counts(sizes)
    reached = _embedding(counts)
    alike: dict[Any, tuple[_Counts, bool]] = {}
    for index, level in enumerate(sizes.levels):
        is_recomputed = index < sizes.recompute_layers
        key = level, sizes.trained.in_blocks[index], reached, is_recomputed
        if key not in alike:
            block = _Counts(sizes)
            alike[key] = block, _block(block, f"blocks.{index}.", level, reached, is_recomputed)
        block, reached = alike[key]
        counts.add_all(block)
    _head(counts, reached)
    every, beside = (
        {kind: _times(total, micro_batches) for kind, total in totals.items()}
        for totals in (counts.totals, counts.beside)
    )
    return Exchanges(every, beside)


def traffic_sum(left: Mapping[str, Total], right: Mapping[str, Total]) -> dict[str, Total]:
    """Return the traffic of both, by kind."""
    return {kind: _plus(left.get(kind, Total()), right.get(kind, Total())) for kind in {**left, **right}}


def _plus(left: Total, right: Total) -> Total:
    return Total(*(a + b for a, b in zip(dataclasses.astuple(left), dataclasses.astuple(right), strict=True)))


def _times(total: Total, times: int) -> Total:
    return Total(*(times * value for value in dataclasses.astuple(total)))


class _Counts:
    """Exchanges so far, with those of `kernels/exchange.py` as methods."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.totals, self.beside = dict[str, Total](), dict[str, Total]()

    def gather(self, itemsize: int, beside: bool = False) -> None:
        """All tokens, from a residual stream of elements of this size. beside: products."""
        if self.sizes.splits_tokens:
            self.add(GATHER, self._hidden, itemsize, beside=beside)

    def reduce(self, itemsize: int, beside: bool = False) -> None:
        """The residual stream of a sum over ranks: an all-reduce or, for a part of the tokens, a reduce-scatter."""
        self.add(REDUCE, self._hidden, itemsize, passes=1 if self.sizes.splits_tokens else 2, beside=beside)

    def add(
        self, kind: str, elements: int, itemsize: int, passes: int = 1, times: int = 1, beside: bool = False
    ) -> None:
        """Collectives, each as `Traffic.started` counts it."""
        ranks, num_bytes = self.sizes.ranks, elements * itemsize
        one = Total(1, elements, num_bytes, passes * num_bytes * (ranks - 1) // ranks)
        for totals in (self.totals, self.beside) if beside else (self.totals,):
            totals[kind] = _plus(totals.get(kind, Total()), _times(one, times))

    def add_all(self, other: _Counts) -> None:
        """Exchanges counted elsewhere."""
        self.totals, self.beside = traffic_sum(self.totals, other.totals), traffic_sum(self.beside, other.beside)

    @property
    def _hidden(self) -> int:
        return self.sizes.tokens * self.sizes.model.hidden_size


def _embedding(counts: _Counts) -> bool:
    """Rows that other ranks have, and the gradient of all tokens; return whether the backward pass gets here."""
    sizes = counts.sizes
    is_trained = sizes.trains("embedding.word.")
    if sizes.splits_vocabulary:
        counts.reduce(sizes.itemsize)
        if is_trained:
            counts.gather(sizes.residual_itemsize)
    return is_trained or sizes.trains("embedding.")


def _block(counts: _Counts, name: str, level: str, reached: bool, is_recomputed: bool) -> bool:
    """Both passes of a block. `reached` and the result: whether the backward pass reaches input and output."""
    trains = counts.sizes.trains
    _block_forward(counts)
    before = reached or trains(f"{name}attention_norm.")
    heads = before or any(
        trains(f"{name}attention.{part}") for part in ("query_key_value.", "query_norm.", "key_norm.")
    )
    of_attention = heads or trains(f"{name}attention.output.")
    between = reached or of_attention or trains(f"{name}attention_output_norm.")
    into_mlp = between or trains(f"{name}mlp_norm.")
    of_mlp = into_mlp or trains(f"{name}mlp.")
    after = between or of_mlp or trains(f"{name}mlp_output_norm.")
    if is_recomputed and after:
        _block_forward(counts)
    if of_mlp:
        _mlp_backward(counts, f"{name}mlp.", level, into_mlp)
    if of_attention:
        _attention_backward(counts, f"{name}attention.", before)
    return after


def _block_forward(counts: _Counts) -> None:
    """The inputs of attention and MLP are gathered, their outputs summed."""
    for _ in range(2):
        counts.gather(counts.sizes.itemsize)
        counts.reduce(counts.sizes.itemsize)


def _mlp_backward(counts: _Counts, name: str, level: str, reached: bool) -> None:
    """The output's gradient is gathered; the input again, for the weight's gradient; the input's gradient is summed."""
    sizes = counts.sizes
    counts.gather(sizes.itemsize)
    up, down = (sizes.trains(f"{name}{weight}.weight") for weight in ("up", "down"))
    reads_u = reached or sizes.trains(f"{name}up.") or (down and level != "none")
    if up or (reads_u and level == "full"):
        counts.gather(sizes.itemsize, beside=level != "full")
    if reached:
        counts.reduce(sizes.itemsize, beside=up)


def _attention_backward(counts: _Counts, name: str, reached: bool) -> None:
    """As in the MLP."""
    sizes = counts.sizes
    counts.gather(sizes.itemsize)
    is_trained = sizes.trains(f"{name}query_key_value.weight")
    if is_trained:
        counts.gather(sizes.itemsize, beside=reached)
    if reached:
        counts.reduce(sizes.itemsize, beside=is_trained)


def _head(counts: _Counts, reached: bool) -> None:
    """With a split vocabulary: all tokens, two numbers of each, and its gradient. Otherwise the sum of the loss."""
    sizes = counts.sizes
    if sizes.splits_vocabulary:
        counts.gather(sizes.itemsize)
        chunks, rest = divmod(sizes.tokens, sizes.chunk_tokens)
        for tokens, times in ((sizes.chunk_tokens, chunks), (rest, int(rest > 0))):
            counts.add(SUM, sizes.ranks * 2 * tokens, FP32_BYTES, times=times)
        if reached or sizes.trains("head.norm."):
            counts.reduce(sizes.itemsize)
    elif sizes.splits_tokens:
        counts.add(SUM, 1, 8, passes=2)
