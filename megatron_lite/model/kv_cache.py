"""Key-value cache for generation: one pass over each prompt, then passes over many texts' next
tokens.

Texts share one sample, (1, t), each token at its own position. Only attention and positions differ
from training, and no text is padded. Texts are independent: attention takes one text at a time, and
every other operation treats tokens separately. Because the number of tokens in a pass can change
the last bits of a product, every pass over next tokens has the same number of tokens, some of which
may belong to no text. For the same reason prompts of equal length do not share a pass, which would
take 0.79 of the CPU time of eight short texts: the library of a product is chosen by its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_lite.kernels.attention.attention import attention, cached_attention
from megatron_lite.parameter import Parameter

Heads = tuple[Tensor, Tensor, Tensor]  # query (1, n, t, d), key and value (1, g, t, d)


class KeyValueCache:
    """Keys and values, (g, slots, d) each, per block and text, for `rows` texts of at most
    `capacity` tokens.

    A position's slot is the position modulo the number of slots; with a sliding window there are
    only as many slots as visible keys. The first pass allocates the memory. Each text has its own
    tensors, because the summation order in libraries depends on memory addresses.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        assert rows >= 1 and capacity >= 1, (rows, capacity)
        self.rows, self.capacity = rows, capacity
        self._blocks: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def of(self, block: str, like: Tensor, window: int | None) -> list[tuple[Tensor, Tensor]]:
        """Return every text's keys and values in a block; `like` (1, g, t, d) determines size and
        dtype."""
        if block not in self._blocks:
            shape = (like.shape[1], min(self.capacity, window or self.capacity), like.shape[3])
            self._blocks[block] = [
                (like.new_zeros(shape), like.new_zeros(shape)) for _ in range(self.rows)
            ]
        return self._blocks[block]


@dataclass(frozen=True)
class Beginning:
    """The pass over one text's whole prompt, (1, t), which fills `row` of the cache."""

    cache: KeyValueCache
    row: int
    backend: str = "math"
    answered: ClassVar = slice(-1, None)  # tokens whose logits are computed

    def attend(
        self,
        block: str,
        heads: Heads,
        window: int | None,
        scale: float | None,
        soft_cap: float,
        softmax_in_fp32: bool,
        sinks: Parameter | None,
    ) -> Tensor:
        """Store a block's keys and values, and return its attention output (1, n, t, d)."""
        query, key, value = heads
        length = key.shape[2]
        assert length <= self.cache.capacity, (length, self.cache.capacity)
        for saved, new in zip(
            self.cache.of(block, key, window)[self.row], (key, value), strict=True
        ):
            slots = saved.shape[1]
            first = max(0, length - slots)
            # Store the newest keys from the slot of position `first` on, wrapping around to slot 0.
            count = min(length - first, slots - first % slots)
            saved[:, first % slots : first % slots + count] = new[0, :, first : first + count]
            saved[:, : length - first - count] = new[0, :, first + count :]
        backend = "math" if softmax_in_fp32 else self.backend
        return attention(
            query,
            key,
            value,
            window,
            0.0,
            None,
            backend=backend,
            scale=scale,
            soft_cap=soft_cap,
            softmax_in_fp32=softmax_in_fp32,
            sinks=sinks,
        )


class NextTokens:
    """A pass over every text's next token, (1, t), at `positions` (t,), in order of cache rows; -1:
    no text."""

    answered = slice(None)

    def __init__(self, cache: KeyValueCache, positions: Sequence[int]) -> None:
        assert len(positions) >= cache.rows and max(positions) < cache.capacity, (
            positions,
            cache.rows,
            cache.capacity,
        )
        assert max(positions[cache.rows :], default=-1) < 0, positions
        self._cache, self._positions = cache, tuple(positions)

    def attend(
        self,
        block: str,
        heads: Heads,
        window: int | None,
        scale: float | None,
        soft_cap: float,
        softmax_in_fp32: bool,
        sinks: Parameter | None,
    ) -> Tensor:
        """See `Beginning.attend`."""
        query, key, value = heads
        context = torch.zeros_like(query)
        for row, (keys, values) in enumerate(self._cache.of(block, key, window)):
            position = self._positions[row]
            if position < 0:
                continue
            slots = keys.shape[1]
            keys[:, position % slots] = key[0, :, row]
            values[:, position % slots] = value[0, :, row]
            # All stored keys are visible, and softmax does not depend on their order.
            seen = slice(min(position + 1, slots))
            own = query[:, :, row : row + 1].contiguous()
            saved = keys[None, :, seen], values[None, :, seen]
            context[:, :, row : row + 1] = cached_attention(own, *saved, scale, soft_cap, sinks)
        return context


CachePass = Beginning | NextTokens  # the cache as seen by one pass
