"""The timed GPU operations: their inputs, calls, and minimum bytes to move.

Shapes are those of Mistral-7B with one sequence of 8192 tokens. Bytes are the minimum: each input
read once, each output written once, without row statistics and rotary tables.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.kernels import adamw as optimizer
from megatron_lite.kernels import weight_shard
from megatron_lite.kernels.attention.attention import attention
from megatron_lite.kernels.attention.choice import machine_of
from megatron_lite.kernels.cross_entropy import Sums, linear_cross_entropy, sweep
from megatron_lite.kernels.embedding import embedding
from megatron_lite.kernels.gradient_norm import squared_norms
from megatron_lite.kernels.heads import split_heads
from megatron_lite.kernels.linear import accumulate_product
from megatron_lite.kernels.mlp import activate, activate_backward
from megatron_lite.kernels.normalization import Kind, add_norm
from megatron_lite.kernels.products import affine, product
from megatron_lite.kernels.rotary import angle_table, wavelengths
from scripts.benchmarks.gpu.operation import (
    Call,
    Op,
    Shape,
    backward,
    both,
    both_backward,
    compiled,
)

EPS = 1e-5
RMS, LAYER = Kind(EPS, centered=False), Kind(EPS, centered=True)
# flash3 and flash4 only if installed; flex takes long to compile.
FULL = ("cudnn", "flash3", "flash4", "flash", "varlen")
WINDOWED = ("flash3", "flash4", "varlen", "flex")


# -- norms
# -----------------------------------------------------------------------------------------------------------


def make_norm(shape: Shape, kind: Kind, with_backward: bool) -> dict[str, Call]:
    """rms_norm(x), or layer_norm(x) with a bias; with_backward: dx and the gradients of the
    parameters instead."""
    x, weight = shape.input(shape.tokens, shape.hidden), shape.parameter(shape.hidden)
    bias = shape.parameter(shape.hidden) if kind.centered else None

    def call(triton: bool) -> Tensor:
        return add_norm(x, None, weight, bias, kind, triton)[1]

    if with_backward:
        return both_backward(call, (x,), shape.random(shape.tokens, shape.hidden))
    if kind.centered:
        return both(call)
    formula = compiled(functional.rms_norm, x.detach(), (shape.hidden,), weight.detach(), EPS)
    return both(call) | {"torch compiled": formula}


def make_add_norm(shape: Shape) -> dict[str, Call]:
    """hidden + branch, and the norm of the sum."""
    hidden, weight = shape.input(shape.tokens, shape.hidden), shape.parameter(shape.hidden)
    branch = shape.random(shape.tokens, shape.hidden)
    return both(lambda triton: add_norm(hidden, branch, weight, None, RMS, triton=triton))


def make_add_norm_backward(shape: Shape) -> dict[str, Call]:
    """The gradient of both summands from the gradients of the sum and the norm."""
    size, weight = (shape.tokens, shape.hidden), shape.parameter(shape.hidden)
    # The sum overwrites the branch, so each variant gets its own copy.
    hidden, grads = shape.input(*size), (shape.random(*size), shape.random(*size))
    return both_backward(
        lambda triton: add_norm(hidden, shape.random(*size), weight, None, RMS, triton=triton),
        (hidden,),
        *grads,
    )


def rows(count: int) -> Callable[[Shape], int]:
    """Return the bytes of `count` tensors of hidden states, (t, h)."""
    return lambda shape: count * shape.tokens * shape.hidden * shape.item


# -- heads
# -----------------------------------------------------------------------------------------------------------


def make_rotary(shape: Shape) -> dict[str, Call]:
    """Rotate queries and keys in place; values stay unchanged."""
    projection = shape.random(1, shape.tokens, (shape.heads + 2 * shape.groups) * shape.head_size)
    table = angle_table(1.0 / wavelengths(shape.head_size, 1e4, projection.device), shape.tokens)
    return both(
        lambda triton: split_heads(projection, shape.heads, shape.groups, table, triton=triton)
    )


def make_rotary_backward(shape: Shape) -> dict[str, Call]:
    """Rotate the gradients of queries and keys back and join them with the values' in one
    tensor."""
    projection = shape.input(1, shape.tokens, (shape.heads + 2 * shape.groups) * shape.head_size)
    table = angle_table(1.0 / wavelengths(shape.head_size, 1e4, projection.device), shape.tokens)
    counts = (shape.heads, shape.groups, shape.groups)
    grads = tuple(
        shape.random(1, shape.tokens, count, shape.head_size).transpose(1, 2) for count in counts
    )

    def split(triton: bool) -> Call:
        # a copy, because it is rotated in place; only its gradient is computed
        fused = projection * 1
        parts = split_heads(fused, shape.heads, shape.groups, table, triton=triton)
        return backward(parts, (fused,), grads)

    return {"triton": split(True), "torch": split(False)}


def make_attention(
    shape: Shape, window: int | None, backends: tuple[str, ...], with_backward: bool = False
) -> dict[str, Call]:
    """Causal attention with several backends; query, key and value are views of one projection."""
    projection = shape.random(1, shape.tokens, shape.heads + 2 * shape.groups, shape.head_size)
    parts = projection.split([shape.heads, shape.groups, shape.groups], dim=2)
    query, key, value = (part.transpose(1, 2).requires_grad_() for part in parts)
    grad = shape.random(1, shape.tokens, shape.heads, shape.head_size).transpose(1, 2)

    def call(backend: str) -> Any:
        output = attention(query, key, value, window, 0.0, None, backend=backend)
        return torch.autograd.grad(output, (query, key, value), grad) if with_backward else output

    machine = machine_of(projection.device)
    installed = {"flash3": machine.flash3, "flash4": machine.flash4}
    return {name: partial(call, name) for name in backends if installed.get(name, True)}


def attention_flops(shape: Shape, window: int | None, factor: float = 1.0) -> int:
    """Return the FLOPs of both products over all attended pairs of positions, times `factor`."""
    reach = min(window or shape.tokens, shape.tokens)
    pairs = shape.tokens * reach - reach * (reach - 1) // 2
    return int(factor * 4 * pairs * shape.heads * shape.head_size)


def attention_op(
    name: str, window: int | None, backends: tuple[str, ...], with_backward: bool
) -> Op:
    """Return an attention operation; forward and backward together take 3.5 times the FLOPs of
    forward."""
    make = partial(make_attention, window=window, backends=backends, with_backward=with_backward)
    return Op(
        name,
        make,
        HEADS,
        flops=partial(attention_flops, window=window, factor=3.5 if with_backward else 1.0),
    )


def make_embedding(shape: Shape) -> dict[str, Call]:
    """Look up the tokens' rows."""
    weight, tokens = shape.parameter(shape.vocab, shape.hidden), shape.labels(shape.vocab)[None]
    return {"torch": lambda: embedding(weight, tokens)}


def make_embedding_backward(shape: Shape) -> dict[str, Call]:
    """Look up the tokens' rows and sum their gradients by row."""
    weight, tokens = shape.parameter(shape.vocab, shape.hidden), shape.labels(shape.vocab)[None]
    grad = shape.random(1, shape.tokens, shape.hidden)
    return both(lambda triton: embedding(weight, tokens, triton=triton).backward(grad))


def heads(queries: int, keys: int) -> Callable[[Shape], int]:
    """Return the bytes to read and write so many times the heads of queries and those of keys."""
    return lambda shape: (
        2
        * (queries * shape.heads + keys * shape.groups)
        * shape.head_size
        * shape.tokens
        * shape.item
    )


# -- the MLP
# ---------------------------------------------------------------------------------------------------------


def make_activation(shape: Shape) -> dict[str, Call]:
    """silu(gate) * up, with gate and up in one tensor (t, 2 f)."""
    before = shape.random(shape.tokens, 2 * shape.ffn)

    def formula(before: Tensor) -> Tensor:
        gate, up = before.chunk(2, dim=-1)
        return functional.silu(gate) * up

    return both(lambda triton: activate(before, "silu", True, triton=triton)) | {
        "torch compiled": compiled(formula, before)
    }


def make_activation_backward(shape: Shape, again: bool) -> dict[str, Call]:
    """The gradient of gate and up, in place: the input of each call is the previous call's
    gradient.

    again: also recompute the output.
    """
    before, grad = shape.random(shape.tokens, 2 * shape.ffn), shape.random(shape.tokens, shape.ffn)
    return both(lambda triton: activate_backward(grad, before, "silu", True, again, triton=triton))


def make_weight_gradient(shape: Shape) -> dict[str, Call]:
    """The weight gradient of half of the MLP's first linear layer, (f, t) (t, h), in fp32 and the
    training dtype."""
    weight, x = shape.parameter(shape.ffn, shape.hidden), shape.random(shape.tokens, shape.hidden)
    grad = shape.random(shape.tokens, shape.ffn)

    def first() -> None:
        weight.gradient_is_empty = True
        accumulate_product(weight, grad, x)

    return {
        "into fp32": first,
        "added to fp32": lambda: accumulate_product(weight, grad, x),
        "training dtype alone": lambda: grad.t() @ x,
        "training dtype, then added": lambda: weight.main_grad.add_(grad.t() @ x),
    }


def make_product(shape: Shape, backward: bool) -> dict[str, Call]:
    """The MLP's first linear layer, (t, h) (h, 2 f), or the gradient of its input, (t, 2 f) (2 f,
    h)."""
    weight = shape.random(2 * shape.ffn, shape.hidden)
    x, grad = shape.random(shape.tokens, shape.hidden), shape.random(shape.tokens, 2 * shape.ffn)
    return {"torch": lambda: product(grad, weight.t()) if backward else affine(x, weight)}


def channels(count: int) -> Callable[[Shape], int]:
    """Return the bytes of `count` tensors with one value per token and MLP channel."""
    return lambda shape: count * shape.tokens * shape.ffn * shape.item


def linear_flops(inner: str, outer: str, products: int) -> Callable[[Shape], int]:
    """Return the FLOPs of so many products of all tokens with a matrix of these two sizes."""
    return lambda shape: 2 * products * shape.tokens * getattr(shape, inner) * getattr(shape, outer)


# -- the loss
# --------------------------------------------------------------------------------------------------------


def make_cross_entropy(shape: Shape, vocab: str) -> dict[str, Call]:
    """Loss and gradient, in place: the logits of each call are the previous call's gradient."""
    logits = shape.random(shape.tokens, getattr(shape, vocab))
    labels = shape.labels(getattr(shape, vocab))
    sums, scale = Sums.empty(shape.tokens, logits.device), torch.ones((), device=shape.device)
    return both(lambda triton: sweep(logits, labels, sums, scale, triton=triton))


def cross_entropy_op(vocab: str, size: str) -> Op:
    """Return the operation over a vocabulary, whose logits are read and overwritten."""
    moved = lambda shape: 2 * shape.tokens * getattr(shape, vocab) * shape.item  # noqa: E731
    return Op(
        f"cross-entropy, {size}",
        partial(make_cross_entropy, vocab=vocab),
        f"{{tokens}} x {{{vocab}}}",
        moved,
    )


def make_linear_cross_entropy(shape: Shape) -> dict[str, Call]:
    """The loss and both gradients from hidden states, and the three matrix products alone."""
    vocab = shape.large_vocab
    hidden, weight = shape.input(shape.tokens, shape.hidden), shape.parameter(vocab, shape.hidden)
    labels, scale = shape.labels(vocab), torch.full((), 1 / shape.tokens, device=shape.device)
    chunk = max(1, shape.tokens // 4)

    def products() -> None:
        with torch.no_grad():
            logits = hidden @ weight.t()
            accumulate_product(weight, logits, hidden)
            torch.mm(logits, weight)

    calls = both(
        lambda triton: linear_cross_entropy(hidden, weight, labels, scale, chunk, triton=triton)
    )
    return calls | {"its three products": products}


# -- the optimizer
# ---------------------------------------------------------------------------------------------------


def make_adamw(shape: Shape, split: bool) -> dict[str, Call]:
    """Update one shard and write its weights in 16 bits in the same pass. split: of master weights
    in two halves."""
    numel, device = shape.shard, torch.device(shape.device)
    exp_avg, gradient, master = (
        shape.random(numel, dtype=torch.float32, scale=1e-3) for _ in range(3)
    )
    exp_avg_sq = shape.random(numel, dtype=torch.float32, scale=1e-3).square_()
    dtype = torch.bfloat16 if split else shape.dtype  # only masters of bf16 weights are split
    rounded = None if dtype == torch.float32 else torch.empty(numel, dtype=dtype, device=device)
    remainder = torch.empty(numel, dtype=torch.int16, device=device) if split else None
    if rounded is not None and remainder is not None:
        weight_shard.split(master, rounded, remainder)
    weights = weight_shard.WeightShard(None if split else master, rounded, remainder)
    shard = optimizer.Shard(weights, gradient, exp_avg, exp_avg_sq)
    # no weight decay beyond it
    border = numel // (4 * optimizer.ALIGNMENT) * 3 * optimizer.ALIGNMENT
    ranges = optimizer.Ranges(
        [optimizer.Range(0, border, 1.0, 1.0), optimizer.Range(border, numel, 1.0, 0.0)], device
    )
    one, none = torch.ones((), device=device), torch.zeros((), device=device)
    step = optimizer.StepNumbers(1e-4, 0.1, one, none, updates=3 * one)
    control = optimizer.Control(step, optimizer.Hyperparameters(0.9, 0.95, 1e-8))
    return both(lambda triton: optimizer.adamw(shard, ranges, control, triton=triton))


def make_gradient_norm(shape: Shape) -> dict[str, Call]:
    """The gradient norm of one shard."""
    gradient = shape.random(shape.shard, dtype=torch.float32, scale=1e-3)
    return both(lambda triton: squared_norms([[gradient]], gradient.device, triton))


HIDDEN = "{tokens} x {hidden}"
HEADS = "{tokens} x ({heads} + 2 x {groups}) x {head_size}"
FFN = "{tokens} x {ffn}"
SHARD = "{shard:,} elements"
UP = linear_flops("hidden", "ffn", 2)
OPS: tuple[Op, ...] = (
    Op("rms_norm", partial(make_norm, kind=RMS, with_backward=False), HIDDEN, rows(2)),
    Op("rms_norm backward", partial(make_norm, kind=RMS, with_backward=True), HIDDEN, rows(3)),
    Op("add + rms_norm", make_add_norm, HIDDEN, rows(4)),
    Op("add + rms_norm backward", make_add_norm_backward, HIDDEN, rows(4)),
    Op("layer_norm", partial(make_norm, kind=LAYER, with_backward=False), HIDDEN, rows(2)),
    Op("layer_norm backward", partial(make_norm, kind=LAYER, with_backward=True), HIDDEN, rows(3)),
    Op("rotary", make_rotary, HEADS, heads(queries=1, keys=1)),
    Op("rotary backward", make_rotary_backward, HEADS, heads(queries=1, keys=2)),
    # Rows read and written.
    Op("embedding", make_embedding, HIDDEN, rows(2), gathers=True),
    # Rows read, written and read again; fp32 gradients read and written.
    Op(
        "embedding, backward and forward",
        make_embedding_backward,
        HIDDEN,
        lambda shape: shape.tokens * shape.hidden * (3 * shape.item + 8),
        gathers=True,
    ),
    Op("silu(gate) * up", make_activation, FFN, channels(3)),
    Op(
        "silu(gate) * up backward", partial(make_activation_backward, again=False), FFN, channels(5)
    ),
    Op(
        "silu(gate) * up backward, output again",
        partial(make_activation_backward, again=True),
        FFN,
        channels(6),
    ),
    cross_entropy_op("vocab", "32,000"),
    cross_entropy_op("large_vocab", "128,256"),
    Op(
        "linear + cross-entropy, 128,256",
        make_linear_cross_entropy,
        "{tokens} x {hidden} x {large_vocab}",
        flops=linear_flops("hidden", "large_vocab", 3),
    ),
    Op(
        "MLP up product",
        partial(make_product, backward=False),
        "{tokens} x {hidden} x 2 {ffn}",
        flops=UP,
    ),
    Op(
        "MLP up product, gradient of its input",
        partial(make_product, backward=True),
        "{tokens} x 2 {ffn} x {hidden}",
        flops=UP,
    ),
    Op(
        "weight gradient",
        make_weight_gradient,
        "{ffn} x {tokens} x {hidden}",
        flops=linear_flops("hidden", "ffn", 1),
    ),
    # Gradient 4, master 4, moments 8 read; master 4, moments 8, bf16 weights 2 written.
    Op("adamw", partial(make_adamw, split=False), SHARD, lambda shape: 30 * shape.shard),
    # Gradient 4, weights in two halves 4, moments 8 read; halves 4, moments 8 written.
    Op(
        "adamw, split master weights",
        partial(make_adamw, split=True),
        SHARD,
        lambda shape: 28 * shape.shard,
    ),
    Op("gradient norm", make_gradient_norm, SHARD, lambda shape: 4 * shape.shard),
    attention_op("attention forward", None, FULL, with_backward=False),
    attention_op("attention forward and backward", None, FULL, with_backward=True),
    attention_op(
        "attention, window 4096, forward and backward", 4096, WINDOWED, with_backward=True
    ),
)
