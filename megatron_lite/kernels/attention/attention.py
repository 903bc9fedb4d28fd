"""Causal attention: softmax(scale q k^T) v over the positions up to the query's own; scale is 1 / sqrt(d) by default.

It may be limited to the last `window` positions or to the query's own document. Grouped queries share keys without
copies of them. `choice.py` lists the implementations. The one here, "math", computes the formula for one block of
queries at a time, on any device and in any dtype, with memory linear in s. With the queries of a block in rows and
the keys that any of them may look at in columns:

    S = scale Q K^T,   P = softmax(S) over the keys that a row may look at,   O = P V
    dV += P^T dO,   dP = dO V^T,   dS = P (dP - rowsum(P dP)),   dQ = scale dS K,   dK += scale dS^T Q

Query heads that share a key head are rows of one product with it. Keys to the right of a block, left of its window or
in another document are never read. Scores and softmax are in fp32. The later products are in the inputs' dtype and
summed in fp32; a CPU computes them in fp32 from fp16, which it multiplies slowly, and from bf16 where it has no
instructions for bf16. `softmax_in_fp32` also keeps the way back to the scores in fp32, P in dS, dS itself and its
products dQ and dK, which are in the inputs' dtype otherwise.

Only query, key and value are kept: the backward pass recomputes P with the same operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.kernels.attention.choice import Work, choose_attention
from megatron_lite.kernels.attention.gpu import flex_attention, fused_attention, varlen_attention
from megatron_lite.kernels.products import computes_in_fp32
from megatron_lite.seeds import derive_seed


@dataclass(frozen=True)
class Documents:
    """Borders of a micro-batch's documents if attention must not cross them. No document spans two samples."""

    starts: Tensor  # (documents + 1,) int32 on the device: first position in the flattened (b s,), at the end b s
    lengths: tuple[int, ...]  # the same as lengths, on the host


# -- blocks of queries -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Queries [start, end) of a sample; each looks at up to `window` keys, none of them before `low`."""

    start: int
    end: int
    low: int
    window: int

    @property
    def scores(self) -> int:
        """Number of elements in one head's scores."""
        return (self.end - self.start) * (self.end - self.low)


def rows_of_a_block(on_gpu: bool) -> int:
    """Return the number of queries in a block: on a CPU the scores stay in the cache, a GPU prefers larger kernels."""
    return 256 if on_gpu else 64


def blocks_of_a_sample(lengths: Sequence[int], window: int | None, rows: int) -> list[Block]:
    """List the blocks of documents of these lengths, in order. No block crosses the border of a document."""
    blocks, begin = [], 0
    for length in lengths:
        blocks += [_block(start, begin, length, window, rows) for start in range(begin, begin + length, rows)]
        begin += length
    return blocks


def last_blocks(length: int, window: int | None, rows: int) -> list[Block]:
    """List the last two blocks of one document, or the only one."""
    last = (length - 1) // rows * rows
    return [_block(start, 0, length, window, rows) for start in (last - rows, last) if start >= 0]


def _block(start: int, begin: int, length: int, window: int | None, rows: int) -> Block:
    """The block from `start` on, of a document that begins at `begin`."""
    reach = min(window or length, length)
    return Block(start, min(start + rows, begin + length), max(begin, start - reach + 1), reach)


def split_samples(lengths: Sequence[int], samples: int, length: int) -> list[list[int]]:
    """Split the document lengths of a flattened micro-batch into samples of `length` tokens."""
    split: list[list[int]] = []
    rest = 0
    for document in filter(None, lengths):
        if rest == 0:
            split.append([])
            rest = length
        split[-1].append(document)
        rest -= document
        assert rest >= 0, f"a document of {document} tokens crosses a border of samples of {length}"
    assert rest == 0 and len(split) == samples, f"documents of {sum(lengths)} tokens in {samples} x {length}"
    return split


# -- the formula -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    """Arguments of `_BlockAttention` that are not tensors."""

    samples: list[list[Block]]
    dropout_p: float
    dropout_seed: int
    scale: float
    softmax_in_fp32: bool


def dtype_of_products(inputs: Tensor) -> torch.dtype:
    """Return the dtype of the products behind the softmax: fp32 on a CPU where small products of halves are slow."""
    slow = inputs.dtype == torch.float16 and not inputs.is_cuda
    return torch.float32 if slow or computes_in_fp32(inputs.device, inputs.dtype) else inputs.dtype


class _Pass:
    """Dtypes, masks and products shared by the forward and the backward pass: q (n, s, d), k and v (g, s, d)."""

    def __init__(self, query: Tensor, key: Tensor, options: _Options) -> None:
        self.options, self.groups = options, key.shape[1]
        self.wide = torch.promote_types(query.dtype, torch.float32)
        self.narrow = dtype_of_products(query)
        self.ds_dtype = self.wide if options.softmax_in_fp32 else self.narrow  # of dS and its products
        rows = min(rows_of_a_block(query.is_cuda), query.shape[2])
        self._later = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu_(1)
        self._generator = torch.Generator(query.device) if options.dropout_p > 0 else None

    def rows(self, heads: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
        """(n, s, d) -> (g, n / g * rows, d): the block's rows of all heads that share a key head."""
        return heads[:, block.start : block.end].reshape(self.groups, -1, heads.shape[-1]).to(dtype)

    def probabilities(self, q: Tensor, k: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
        """Return P (g, n / g * rows, keys) for q (n, s, d) and k (g, s, d) in fp32, without dropout."""
        count, keys = block.end - block.start, k[:, block.low : block.end].transpose(1, 2)
        rows = torch.empty(q.shape[0], count, q.shape[2], dtype=self.wide, device=q.device)
        rows.copy_(q[:, block.start : block.end]).mul_(self.options.scale)
        scores = torch.bmm(rows.view(self.groups, -1, q.shape[2]), keys)
        del rows
        square = scores.view(self.groups, -1, count, block.end - block.low)
        square[..., block.start - block.low :].masked_fill_(self._later[:count, :count], -math.inf)
        # Row i sees keys from i - seen on: the first row's window has room for `seen` keys before `low`.
        seen = block.low - (block.start - block.window + 1)
        if count > seen + 1:
            out_of_reach = self._later[: count - seen, : count - seen].t()
            square[:, :, seen:, : count - seen].masked_fill_(out_of_reach, -math.inf)
        torch.softmax(scores, dim=-1, out=scores)
        return scores.to(dtype)

    def dropout_mask(self, p: Tensor, sample: int, block: Block) -> Tensor:
        """Return the factors that dropout applies to P: 0 or 1 / (1 - dropout_p), the same in both passes."""
        assert self._generator is not None
        self._generator.manual_seed(derive_seed(self.options.dropout_seed, sample, block.start))
        kept = 1.0 - self.options.dropout_p
        return torch.empty_like(p).bernoulli_(kept, generator=self._generator).div_(kept)

    def scores_backward(self, p: Tensor, do: Tensor, v: Tensor, dv: Tensor, sample: int, block: Block) -> Tensor:
        """Return dS (g, n / g * rows, keys), before scaling, for do (n, s, d), and add to dv (g, keys, d)."""
        rows, kept = self.rows(do, block, self.narrow), p.to(self.narrow)
        mask = self.dropout_mask(kept, sample, block) if self.options.dropout_p > 0 else None
        _add_product(dv, kept if mask is None else kept * mask, rows)
        del kept
        dp = torch.bmm(rows, v.transpose(1, 2))
        if mask is not None:
            dp.mul_(mask)
        dp = dp.to(self.ds_dtype)
        return torch.ops.aten._softmax_backward_data.out(dp, p, -1, dp.dtype, grad_input=dp)


def _add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target (g, k, d) += a^T b for a (g, m, k) and b (g, m, d), whose dtype may be narrower."""
    if target.dtype == a.dtype:
        target.baddbmm_(a.transpose(1, 2), b)
    else:
        target.add_(torch.bmm(a.transpose(1, 2), b))


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, options: _Options) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.options = options
        b, n, s, d = query.shape
        shared = _Pass(query, key, options)
        output = query.new_empty(b, s, n, d)
        for i, blocks in enumerate(options.samples):
            wide_k, v = key[i].to(shared.wide), value[i].to(shared.narrow)
            for block in blocks:
                p = shared.probabilities(query[i], wide_k, block, shared.narrow)
                if options.dropout_p > 0:
                    p.mul_(shared.dropout_mask(p, i, block))
                o = torch.bmm(p, v[:, block.low : block.end])
                del p
                output[i, block.start : block.end] = o.view(n, -1, d).transpose(0, 1)
                del o
        return output.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        (b, n, s, d), g, options = query.shape, key.shape[1], ctx.options
        shared = _Pass(query, key, options)
        # Side by side as in the projection that they are views of, so that its gradient needs no copy.
        grads = query.new_empty(b, s, n + 2 * g, d)
        dquery, dkey, dvalue = grads.split([n, g, g], dim=2)
        dk, dv = (torch.empty(g, s, d, dtype=shared.wide, device=query.device) for _ in range(2))
        for i, blocks in enumerate(options.samples):
            wide_k, v = key[i].to(shared.wide), value[i].to(shared.narrow)
            k = wide_k if shared.ds_dtype == shared.wide else key[i].to(shared.ds_dtype)
            dk.zero_()
            dv.zero_()
            for block in blocks:
                keys = slice(block.low, block.end)
                p = shared.probabilities(query[i], wide_k, block, shared.ds_dtype)
                ds = shared.scores_backward(p, do[i], v[:, keys], dv[:, keys], i, block)
                del p
                _add_product(dk[:, keys], ds, shared.rows(query[i], block, shared.ds_dtype))
                dq = torch.bmm(ds, k[:, keys]).view(n, -1, d).transpose(0, 1)
                del ds
                torch.mul(dq, options.scale, out=dquery[i, block.start : block.end])
                del dq
            torch.mul(dk.transpose(0, 1), options.scale, out=dkey[i])
            dvalue[i] = dv.transpose(0, 1)
        return dquery.transpose(1, 2), dkey.transpose(1, 2), dvalue.transpose(1, 2), None


def cached_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Attend from one new token to all keys so far, in any order, in the dtypes of "math"; without gradients.

    query (b, n, 1, d), key and value (b, g, k, d) -> (b, n, 1, d). `scale` None: 1 / sqrt(d).
    """
    (b, n, _, d), g = query.shape, key.shape[1]
    scale = 1 / math.sqrt(d) if scale is None else scale
    wide = torch.promote_types(query.dtype, torch.float32)
    narrow = dtype_of_products(query)
    scores = (query.to(wide) * scale).reshape(b, g, n // g, d) @ key.to(wide).transpose(2, 3)
    context = scores.softmax(dim=-1).to(narrow) @ value.to(narrow)
    return context.reshape(b, n, 1, d).to(query.dtype)


# -- every implementation --------------------------------------------------------------------------------------------


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    dropout_p: float,
    dropout_seed: int | None,
    *,
    backend: str = "auto",
    documents: Documents | None = None,
    scale: float | None = None,
    softmax_in_fp32: bool = False,
) -> Tensor:
    """query (b, n, s, d), key and value (b, g, s, d) -> (b, n, s, d); head i uses key/value head i // (n / g).

    Args:
        window: number of keys that a query looks at; None: all.
        dropout_p: probability of dropping a probability, if there is a seed.
        backend: a name of `choice.py`. Dropout and single positions always use "math".
        scale: None: 1 / sqrt(d).
        softmax_in_fp32: keep the scores in fp32 in the backward pass, too; only for "math".

    Raises:
        UsageError: if the backend cannot do the work.
    """
    b, _, s, d = query.shape
    window = None if window is None or window >= s else window
    drops = dropout_p > 0.0 and dropout_seed is not None
    if backend == "auto":
        deterministic = torch.are_deterministic_algorithms_enabled()
        work = Work(query.dtype, d, window is not None, documents is not None, deterministic, drops)
        backend = choose_attention("auto", query.device, work)
    if backend == "math" or drops or s == 1:
        lengths = [[s]] * b if documents is None else split_samples(documents.lengths, b, s)
        samples = [blocks_of_a_sample(each, window, rows_of_a_block(query.is_cuda)) for each in lengths]
        p, seed = (dropout_p, dropout_seed or 0) if drops else (0.0, 0)
        options = _Options(samples, p, seed, 1 / math.sqrt(d) if scale is None else scale, softmax_in_fp32)
        return _BlockAttention.apply(query, key, value, options)
    assert not softmax_in_fp32, f"{backend} attention has no option for its softmax"
    starts = documents.starts if documents is not None else None
    if backend in ("varlen", "flash3"):
        longest = max(documents.lengths) if documents is not None else s
        version = 3 if backend == "flash3" else 2
        return varlen_attention(query, key, value, window, starts, longest, scale, version)
    if backend == "flex":
        return flex_attention(query, key, value, window, starts, scale)
    assert window is None and documents is None, f"{backend} attention takes neither windows nor documents"
    return fused_attention(query, key, value, backend, scale)
