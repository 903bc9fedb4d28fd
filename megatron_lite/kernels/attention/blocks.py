"""Attention by its formula, one block of queries at a time, on any device and in any dtype, with
memory linear in s.

Rows are the queries of a block, columns the keys that any of them may attend to:

    S = scale Q K^T,   P = softmax(S) over the keys that a row may attend to,   O = P V
    dV += P^T dO,   dP = dO V^T,   dS = P (dP - rowsum(P dP)),   dQ = scale dS K,   dK += scale dS^T Q

With a soft cap c the softmax is of c tanh(S / c), and dS is times the slope, 1 - tanh(S / c)^2
(Gemma 2, 2024, section 2).

A sink is one learned score per head that joins its softmax, but has no value (Xiao et al. 2023;
gpt-oss 2025):

    L = log(sum exp(S) + exp(sink)),   P = exp(S - L) = softmax(S) s(lse(S) - sink)
    dS = P (dP - rowsum(dO O)),   dsink = -sum(exp(sink - L) rowsum(dO O)) = -sum(dS)

with the sigmoid s. Other kernels' backward passes compute P and dS from the output and log-sum-exp
of their forward passes: given O and L instead, they return the gradients with sinks.

Each operation takes the same block of many heads, samples and documents: a chunk, whose scores fit
the caches and occupy every thread. Query heads that share a key head are rows of one product with
it. Keys right of a block, left of its window or in another document are never read. Scores and
softmax are in fp32. The later products are in fp32 on a CPU, which multiplies small bf16 and fp16
matrices slower, even with instructions for them. A GPU computes them in the inputs' dtype and sums
in fp32; there `softmax_in_fp32` also keeps the backward pass of the scores in fp32: P in dS, dS
itself and its products dQ and dK.

Only query, key and value are saved: the backward pass recomputes P with the same operations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.kernels.triton_support import generator_for, turns
from megatron_lite.parameter import Function, Parameter
from megatron_lite.seeds import derive_seed

# -- blocks of queries, chunks of heads and documents
# ------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Queries [start, end) of a document; each attends to up to `window` keys, none before
    `low`."""

    start: int
    end: int
    low: int
    window: int

    @property
    def scores(self) -> int:
        """Number of elements in one head's scores."""
        return (self.end - self.start) * (self.end - self.low)


@dataclass(frozen=True)
class Chunk:
    """Adjacent documents of one length, and some key heads: the work of one operation."""

    start: int  # first position of the first document in the flattened (b s,)
    documents: int
    length: int  # positions in each document
    heads: slice  # of the key heads

    @property
    def pairs(self) -> int:
        """Number of pairs of a document and a key head."""
        return self.documents * (self.heads.stop - self.heads.start)


def rows_of_a_block(on_gpu: bool) -> int:
    """Return the number of queries per block: small blocks waste less on masked keys; GPUs prefer
    large kernels."""
    return 256 if on_gpu else 64


def scores_at_a_time(on_gpu: bool) -> int:
    """Return the number of scores per operation, over many heads: 2 MiB in fp32 per thread on a
    CPU.

    It never changes the result, bit for bit.
    """
    return 2**24 if on_gpu else 2**19 * max(2, torch.get_num_threads())


def blocks_of_a_document(length: int, window: int | None, rows: int, last: int = 0) -> list[Block]:
    """List a document's blocks, or its `last` ones, in order; the largest is among the last two."""
    reach = min(window or length, length)
    starts = range(0, length, rows)[-last:]  # -0: all
    return [
        Block(start, min(start + rows, length), max(0, start - reach + 1), reach)
        for start in starts
    ]


def chunks_of(
    lengths: Sequence[int], window: int | None, heads: int, groups: int, rows: int, scores: int
) -> list[Chunk]:
    """Divide documents and key heads into chunks of at most `scores` scores, or of one document and
    key head."""
    chunks: list[Chunk] = []
    start = 0
    for length, neighbours in itertools.groupby(lengths):
        count = len(list(neighbours))
        if length == 0:
            continue
        largest = max(block.scores for block in blocks_of_a_document(length, window, rows, last=2))
        pairs = max(1, scores // (heads // groups * largest))
        documents = max(1, min(count, pairs // groups))
        parts = 1 if pairs >= groups else -(-groups // pairs)
        borders = [groups * part // parts for part in range(parts + 1)]
        for first in range(0, count, documents):
            number = min(documents, count - first)
            for i in range(parts):
                chunks.append(
                    Chunk(start + first * length, number, length, slice(borders[i], borders[i + 1]))
                )
        start += count * length
    return chunks


# -- the formula
# -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    """Arguments of `_BlockAttention` that are not tensors."""

    lengths: tuple[int, ...]
    window: int | None
    dropout_p: float
    dropout_seed: int
    scale: float
    softmax_in_fp32: bool
    soft_cap: float


def capped(x: Tensor, soft_cap: float) -> Tensor:
    """Return c tanh(x / c) in the memory of x; without a cap (0), x itself."""
    return x.div_(soft_cap).tanh_().mul_(soft_cap) if soft_cap else x


def sums_dtype(inputs: Tensor) -> torch.dtype:
    """Return the dtype of scores and sums: at least fp32."""
    return torch.promote_types(inputs.dtype, torch.float32)


def dtype_of_products(inputs: Tensor) -> torch.dtype:
    """Return the dtype of the products after the softmax: at least fp32 on a CPU."""
    return inputs.dtype if inputs.is_cuda else sums_dtype(inputs)


def add_sinks(output: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Scale a kernel's output (..., n, s, d) in place, and return L (..., n, s).

    sums: the log-sum-exp of the scores, (..., n, s) in fp32. sinks: (n,).
    """
    every = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
    output.mul_((sums - every).exp_()[..., None])
    return every


def sinks_gradient(do: Tensor, output: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks (n,) for do and output (..., n, s, d). sums: L (..., n, s)."""
    of_rows = (do * output).sum(-1, dtype=sums.dtype)
    of_rows.mul_((sinks.to(sums.dtype)[:, None] - sums).exp_())
    return of_rows.sum(-1).reshape(-1, len(sinks)).sum(0).neg_()


def _documents(heads: Tensor, chunk: Chunk) -> Tensor:
    """View heads (b, any, s, d) as the documents of a chunk: (documents, any, length, d)."""
    tokens = heads.transpose(1, 2).flatten(0, 1)[
        chunk.start : chunk.start + chunk.documents * chunk.length
    ]
    return tokens.unflatten(0, (chunk.documents, chunk.length)).transpose(1, 2)


class _Pass:
    """One chunk in the forward or backward pass, with p pairs and r query heads per key head."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        options: _Options,
        chunk: Chunk,
        later: Tensor,
        sinks: Tensor | None,
    ) -> None:
        self.options = options
        self.chunk = chunk
        self._later = later
        self.shared_by = query.shape[1] // key.shape[1]
        self.wide, self.narrow = later.dtype, dtype_of_products(query)
        self._sinks: Tensor | None = None
        if sinks is not None:  # (p, r, 1)
            own = sinks.detach().to(self.wide).view(-1, self.shared_by)[chunk.heads]
            self._sinks = own.repeat(chunk.documents, 1)[..., None]
        # of dS and its products
        self.ds_dtype = self.wide if options.softmax_in_fp32 else self.narrow
        last = 2 if query.is_meta else 0  # a plan needs only the largest
        self.blocks = blocks_of_a_document(
            chunk.length, options.window, rows_of_a_block(query.is_cuda), last
        )

    def keys(self, heads: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy the chunk's heads of (b, g, s, d) into (p, length, d), in `dtype`."""
        return _converted(_documents(heads, self.chunk)[:, self.chunk.heads], dtype).flatten(0, 1)

    def queries(self, heads: Tensor) -> Tensor:
        """View (b, n, s, d) as (documents, heads, length, d): the query heads of the chunk's key
        heads."""
        some = self.chunk.heads
        return _documents(heads, self.chunk)[
            :, some.start * self.shared_by : some.stop * self.shared_by
        ]

    def rows(self, queries: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
        """Gather a block's rows for all heads that share a key head: (documents, heads, length, d)
        -> (p, r rows, d)."""
        rows = _converted(queries[:, :, block.start : block.end], dtype)
        return rows.reshape(self.chunk.pairs, -1, rows.shape[-1])

    def write(
        self, result: Tensor, queries: Tensor, block: Block, factor: float | None = None
    ) -> None:
        """Write a block's rows (p, r rows, d) to (documents, heads, length, d)."""
        target = queries[:, :, block.start : block.end]
        if factor is None:
            target.copy_(result.view(target.shape))
        else:
            torch.mul(result.view(target.shape), factor, out=target)

    def scores(self, q: Tensor, k: Tensor, block: Block) -> Tensor:
        """Return S (p, r rows, keys) in fp32, capped, for rows q (p, r rows, d) and keys k (p,
        length, d)."""
        scores = q.new_empty(q.shape[0], q.shape[1], block.end - block.low)
        scores.baddbmm_(
            q, k[:, block.low : block.end].transpose(1, 2), beta=0, alpha=self.options.scale
        )
        return capped(scores, self.options.soft_cap)

    def slopes(self, scores: Tensor) -> Tensor | None:
        """Return the cap's slopes at capped scores; None without a cap."""
        cap = self.options.soft_cap
        return (scores / cap).square_().neg_().add_(1.0) if cap else None

    def probabilities(self, scores: Tensor, block: Block) -> Tensor:
        """Return P (p, r rows, keys), without dropout, in the memory of the scores."""
        count = block.end - block.start
        square = scores.view(len(scores), -1, count, scores.shape[-1])
        square[..., block.start - block.low :].add_(self._later[:count, :count])
        # Row i attends to keys from i - seen on: the first row's window extends `seen` keys before
        # `low`.
        seen = block.low - (block.start - block.window + 1)
        if count > seen + 1:
            square[:, :, seen:, : count - seen].add_(
                self._later[: count - seen, : count - seen].t()
            )
        sums = None if self._sinks is None else square.logsumexp(-1)
        torch.softmax(scores, dim=-1, out=scores)
        if sums is not None and self._sinks is not None:
            square.mul_(sums.sub_(self._sinks).sigmoid_()[..., None])
        return scores

    def sinks_gradient(self, ds: Tensor) -> Tensor:
        """Return the gradient of the sinks of the chunk's heads, (heads, r), for dS before a cap's
        slopes."""
        by_head = ds.view(self.chunk.documents, -1, self.shared_by, ds[0].numel() // self.shared_by)
        return by_head.sum((0, 3), dtype=self.wide).neg_()

    def dropout_mask(self, p: Tensor, block: Block) -> Tensor:
        """Return the factors that dropout applies to P: 0 or 1 / (1 - dropout_p), the same in both
        passes."""
        generator, kept = generator_for(p), 1.0 - self.options.dropout_p
        mask, chunk = torch.empty_like(p), self.chunk
        for document, part in enumerate(mask.view(chunk.documents, -1, *p.shape[1:])):
            start = chunk.start + document * chunk.length
            for head, factors in enumerate(part, chunk.heads.start):
                generator.manual_seed(
                    derive_seed(self.options.dropout_seed, start, head, block.start)
                )
                factors.bernoulli_(kept, generator=generator)
        return mask.div_(kept)

    def scores_backward(self, p: Tensor, do: Tensor, v: Tensor, dv: Tensor, block: Block) -> Tensor:
        """Return dS (p, r rows, keys), before scaling, for do (p, r rows, d), and add to dv (p,
        keys, d)."""
        kept = p.to(self.narrow)
        mask = self.dropout_mask(kept, block) if self.options.dropout_p > 0 else None
        _add_product(dv, kept if mask is None else kept * mask, do)
        del kept
        dp = torch.bmm(do, v.transpose(1, 2))
        if mask is not None:
            dp.mul_(mask)
        dp = dp.to(self.ds_dtype)
        return torch.ops.aten._softmax_backward_data.out(dp, p, -1, dp.dtype, grad_input=dp)


def _converted(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Return heads (documents, heads, length, d) in `dtype`; a converted copy is contiguous."""
    return heads if heads.dtype == dtype else heads.to(dtype, memory_format=torch.contiguous_format)


def _add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute target (p, k, d) += a^T b for a (p, m, k) and b (p, m, d), whose dtype may be
    narrower.

    `baddbmm_` would compute the products one by one if `target` is not contiguous.
    """
    target.add_(torch.bmm(a.transpose(1, 2), b))


class _BlockAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: _Options,
        sinks: Parameter | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.options, ctx.sinks = options, sinks
        b, n, s, d = query.shape
        output = query.new_empty(b, s, n, d).transpose(1, 2)
        for part in _passes(query, key, options, sinks):
            k, v = part.keys(key, part.wide), part.keys(value, part.narrow)
            q, o = part.queries(query), part.queries(output)
            for block in part.blocks:
                scores = part.scores(part.rows(q, block, part.wide), k, block)
                p = part.probabilities(scores, block).to(part.narrow)
                del scores
                if options.dropout_p > 0:
                    p.mul_(part.dropout_mask(p, block))
                part.write(torch.bmm(p, v[:, block.low : block.end]), o, block)
                del p
        return output

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        (b, n, s, d), g = query.shape, key.shape[1]
        options, sinks = ctx.options, ctx.sinks
        trains_sinks = sinks is not None and sinks.requires_grad
        dsinks = query.new_zeros(g if trains_sinks else 0, n // g, dtype=sums_dtype(query))
        dquery, dkey, dvalue = (
            query.new_empty(b, s, heads, d).transpose(1, 2) for heads in (n, g, g)
        )
        for part in _passes(query, key, options, sinks):
            wide_k, v = part.keys(key, part.wide), part.keys(value, part.narrow)
            k = wide_k if part.ds_dtype == part.wide else part.keys(key, part.ds_dtype)
            q = part.queries(query)
            rows_of_do = part.queries(do)
            dq = part.queries(dquery)
            dk, dv = torch.zeros_like(wide_k), torch.zeros_like(wide_k)
            for block in part.blocks:
                keys = slice(block.low, block.end)
                rows = part.rows(q, block, part.wide)
                scores = part.scores(rows, wide_k, block)
                slopes = part.slopes(scores)
                p = part.probabilities(scores, block).to(part.ds_dtype)
                del scores
                grad = part.rows(rows_of_do, block, part.narrow)
                ds = part.scores_backward(p, grad, v[:, keys], dv[:, keys], block)
                if trains_sinks:
                    dsinks[part.chunk.heads] += part.sinks_gradient(ds)
                if slopes is not None:
                    ds.mul_(slopes)
                del p, grad, slopes
                if part.ds_dtype != part.wide:
                    rows = part.rows(q, block, part.ds_dtype)
                _add_product(dk[:, keys], ds, rows)
                part.write(torch.bmm(ds, k[:, keys]), dq, block, options.scale)
                del ds, rows
            dkeys, dvalues = (
                _documents(heads, part.chunk)[:, part.chunk.heads] for heads in (dkey, dvalue)
            )
            torch.mul(dk.view(dkeys.shape), options.scale, out=dkeys)
            dvalues.copy_(dv.view(dvalues.shape))
        if trains_sinks:
            sinks.accumulate(dsinks.view(n))
        return dquery, dkey, dvalue, None, None


def _passes(query: Tensor, key: Tensor, options: _Options, sinks: Tensor | None) -> Iterator[_Pass]:
    """Yield the chunks of a micro-batch."""
    rows = rows_of_a_block(query.is_cuda)
    limit = scores_at_a_time(query.is_cuda)
    chunks = chunks_of(options.lengths, options.window, query.shape[1], key.shape[1], rows, limit)
    rows = min(rows, query.shape[2])
    later = torch.full((rows, rows), -math.inf, dtype=sums_dtype(query), device=query.device)
    later = later.triu_(1)
    loop = range(len(chunks))
    for index in turns(loop, query) if query.is_meta else loop:
        yield _Pass(query, key, options, chunks[index], later, sinks)


def attention_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[int, ...],
    window: int | None,
    dropout: tuple[float, int],
    scale: float,
    softmax_in_fp32: bool,
    soft_cap: float = 0.0,
    sinks: Parameter | None = None,
) -> Tensor:
    """Compute attention of query (b, n, s, d) to key and value (b, g, s, d) -> (b, n, s, d).

    Args:
        lengths: tokens of each document in the flattened micro-batch, b s in total.
        dropout: probability of dropping an attention weight, and the seed.
    """
    b, _, s, _ = query.shape
    begin = 0
    for length in lengths:
        assert begin % s + length <= s, (
            f"a document of {length} tokens crosses a border of samples of {s}"
        )
        begin += length
    assert begin == b * s, f"documents of {begin} tokens in {b} x {s}"
    options = _Options(lengths, window, *dropout, scale, softmax_in_fp32, soft_cap)
    return _BlockAttention.apply(query, key, value, options, sinks)
