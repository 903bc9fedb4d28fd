"""Attention by its formula, one block of queries after the other: any device and dtype, memory linear in s.

With the queries of a block in rows and the keys that any of them may look at in columns:

    S = Q K^T / sqrt(d),   P = softmax(S) over the keys that a row may look at,   O = P V
    dV += P^T dO,   dP = dO V^T,   dS = P (dP - rowsum(P dP)),   dQ = dS K / sqrt(d),   dK += dS^T Q / sqrt(d)

The query heads that share a key head are rows of one product with it, so that nothing is repeated. Keys to the right of
a block, left of its window or of another document are never touched. A given scale stands for 1 / sqrt(d). Scores and
softmax are in fp32; what comes after is multiplied in the inputs' dtype (fp16 on a CPU, which has no fast products of
it, in fp32) and added up in fp32. `in_fp32` keeps the way back to the scores in fp32, too: P in dS, dS itself and its
products dQ and dK, which are in the inputs' dtype otherwise.

Query, key and value alone are kept: the backward makes P again, by the same operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.seeds import derive_seed


@dataclass(frozen=True)
class Block:
    """Queries [start, end) of a sample; they look at keys from `low` on, each at `window` of them at most."""

    start: int
    end: int
    low: int
    window: int

    @property
    def scores(self) -> int:
        """Elements of one head's scores."""
        return (self.end - self.start) * (self.end - self.low)


def rows_of_a_block(on_gpu: bool) -> int:
    """Queries in a block: on a CPU their scores stay in the cache, on a GPU fewer and larger kernels are faster."""
    return 256 if on_gpu else 64


def blocks_of_a_sample(lengths: Sequence[int], window: int | None, rows: int) -> list[Block]:
    """In order, for documents of these lengths. No block reaches over the border of a document."""
    blocks, begin = [], 0
    for length in lengths:
        reach = min(window or length, length)
        for start in range(begin, begin + length, rows):
            blocks.append(Block(start, min(start + rows, begin + length), max(begin, start - reach + 1), reach))
        begin += length
    return blocks


def split_samples(lengths: Sequence[int], samples: int, length: int) -> list[list[int]]:
    """The lengths of a flattened micro-batch's documents, sample by sample of `length` tokens."""
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


class _Arithmetic:
    """What both passes do with one sample's heads: q (n, s, d), k (g, s, d)."""

    def __init__(
        self, query: Tensor, key: Tensor, dropout_p: float, dropout_seed: int, scale: float, in_fp32: bool
    ) -> None:
        self.groups, self.scale = key.shape[1], scale
        self.wide = torch.promote_types(query.dtype, torch.float32)
        self.narrow = self.wide if query.dtype == torch.float16 and not query.is_cuda else query.dtype
        rows = min(rows_of_a_block(query.is_cuda), query.shape[2])
        self._later = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu_(1)
        self.dropout_p, self._seed = dropout_p, dropout_seed
        self._generator = torch.Generator(query.device) if dropout_p > 0 else None
        self.slopes = self.wide if in_fp32 else self.narrow  # the dtype of dS, and of its products

    def rows(self, heads: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
        """(n, s, d) -> (g, n / g * rows, d): the block's rows of all heads that share a key head."""
        return heads[:, block.start : block.end].reshape(self.groups, -1, heads.shape[-1]).to(dtype)

    def probabilities(self, query: Tensor, key: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
        """query (n, s, d), key (g, s, d) in fp32 -> (g, n / g * rows, keys)."""
        count, keys = block.end - block.start, key[:, block.low : block.end].transpose(1, 2)
        rows = torch.empty(query.shape[0], count, query.shape[2], dtype=self.wide, device=query.device)
        rows.copy_(query[:, block.start : block.end]).mul_(self.scale)
        scores = torch.bmm(rows.view(self.groups, -1, query.shape[2]), keys)
        del rows
        square = scores.view(self.groups, -1, count, block.end - block.low)
        square[..., block.start - block.low :].masked_fill_(self._later[:count, :count], -math.inf)
        # Row i, with `seen` more keys before the first row's window begins: keys left of i - seen are out of its reach.
        seen = block.low - (block.start - block.window + 1)
        if count > seen + 1:
            out_of_reach = self._later[: count - seen, : count - seen].t()
            square[:, :, seen:, : count - seen].masked_fill_(out_of_reach, -math.inf)
        torch.softmax(scores, dim=-1, out=scores)
        return scores.to(dtype)

    def mask(self, probabilities: Tensor, sample: int, block: Block) -> Tensor:
        """What dropout multiplies the block's probabilities with: 0 or 1 / (1 - p); the same in both passes."""
        assert self._generator is not None
        self._generator.manual_seed(derive_seed(self._seed, sample, block.start))
        mask = torch.empty_like(probabilities).bernoulli_(1.0 - self.dropout_p, generator=self._generator)
        return mask.div_(1.0 - self.dropout_p)

    def scores_backward(
        self, weights: Tensor, grad_output: Tensor, values: Tensor, sum_value: Tensor, sample: int, block: Block
    ) -> Tensor:
        """From the gradient of the output (n, s, d) to that of the scores, (g, n / g * rows, keys), before scaling.

        Adds the gradient of the values (g, keys, d) to `sum_value` on the way.
        """
        rows, kept = self.rows(grad_output, block, self.narrow), weights.to(self.narrow)
        mask = self.mask(kept, sample, block) if self.dropout_p > 0 else None
        _add_product(sum_value, kept if mask is None else kept * mask, rows)
        del kept
        grad = torch.bmm(rows, values.transpose(1, 2))
        if mask is not None:
            grad.mul_(mask)
        grad = grad.to(self.slopes)
        return torch.ops.aten._softmax_backward_data.out(grad, weights, -1, grad.dtype, grad_input=grad)


def _add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target (g, k, d) += a^T b for a (g, m, k) and b (g, m, d), whose dtype may be narrower."""
    if target.dtype == a.dtype:
        target.baddbmm_(a.transpose(1, 2), b)
    else:
        target.add_(torch.bmm(a.transpose(1, 2), b))


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, samples: list[list[Block]], *how: Any) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.samples, ctx.how = samples, how
        b, n, s, d = query.shape
        do = _Arithmetic(query, key, *how)
        output = query.new_empty(b, s, n, d)
        for i, blocks in enumerate(samples):
            wide_key, narrow_value = key[i].to(do.wide), value[i].to(do.narrow)
            for block in blocks:
                weights = do.probabilities(query[i], wide_key, block, do.narrow)
                if do.dropout_p > 0:
                    weights.mul_(do.mask(weights, i, block))
                weights = torch.bmm(weights, narrow_value[:, block.low : block.end])  # the context
                output[i, block.start : block.end] = weights.view(n, -1, d).transpose(0, 1)
                del weights
        return output.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        (b, n, s, d), g = query.shape, key.shape[1]
        do = _Arithmetic(query, key, *ctx.how)
        # Side by side as in the projection that they came from, so that its gradient need not be put together.
        grads = query.new_empty(b, s, n + 2 * g, d)
        grad_query, grad_key, grad_value = grads.split([n, g, g], dim=2)
        sum_key, sum_value = (torch.empty(g, s, d, dtype=do.wide, device=query.device) for _ in range(2))
        for i, blocks in enumerate(ctx.samples):
            wide_key, narrow_value = key[i].to(do.wide), value[i].to(do.narrow)
            slopes_key = wide_key if do.slopes == do.wide else key[i].to(do.slopes)
            sum_key.zero_()
            sum_value.zero_()
            for block in blocks:
                keys = slice(block.low, block.end)
                weights = do.probabilities(query[i], wide_key, block, do.slopes)
                grad = do.scores_backward(weights, grad_output[i], narrow_value[:, keys], sum_value[:, keys], i, block)
                del weights
                _add_product(sum_key[:, keys], grad, do.rows(query[i], block, do.slopes))
                grad = torch.bmm(grad, slopes_key[:, keys]).view(n, -1, d).transpose(0, 1)
                torch.mul(grad, do.scale, out=grad_query[i, block.start : block.end])
                del grad
            torch.mul(sum_key.transpose(0, 1), do.scale, out=grad_key[i])
            grad_value[i] = sum_value.transpose(0, 1)
        return grad_query.transpose(1, 2), grad_key.transpose(1, 2), grad_value.transpose(1, 2), *[None] * 5


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    lengths: Sequence[int] | None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    scale: float | None = None,
    in_fp32: bool = False,
) -> Tensor:
    """query (b, n, s, d), key and value (b, g, s, d) -> (b, n, s, d), causal, over `window` keys at most.

    `lengths`: of the documents of the flattened (b s,) micro-batch, each inside a sample; None: samples are documents.
    Probabilities are dropped with `dropout_p` if there is a seed. `scale` None: 1 / sqrt(d).
    """
    b, _, s, _ = query.shape
    rows = rows_of_a_block(query.is_cuda)
    documents = [[s]] * b if lengths is None else split_samples(lengths, b, s)
    samples = [blocks_of_a_sample(each, window, rows) for each in documents]
    drops = dropout_seed is not None and dropout_p > 0
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    dropout_p, seed = (dropout_p, dropout_seed) if drops else (0.0, 0)
    return _BlockAttention.apply(query, key, value, samples, dropout_p, seed, scale, in_fp32)
