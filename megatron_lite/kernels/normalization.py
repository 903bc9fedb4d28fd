"""Layer norm (Ba et al. 2016) and RMS norm (Zhang & Sennrich 2019) of x, or of a sum x = hidden + branch; fp32 inside.

    layer norm: n = (x - mean) / sqrt(var + eps)        RMS norm: n = x / sqrt(mean(x^2) + eps)        y = n * w (+ b)

Backward, with g = dy * w and r the reciprocal root:   dw = sum of dy * n,   db = sum of dy,
    RMS norm: dx = (g - n mean(g n)) r        layer norm: dx = (g - mean(g) - n mean(g n)) r

and then dx += the gradient of the sum, which goes on to both summands. x is kept, not y: a weight may be zero.

There may be no weights (then no bias, either), or w may be stored as its difference from 1. The sum has the dtype of
`hidden`, which may be wider than that of the branch and of y: a residual stream in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.kernels.linear import accumulate
from megatron_lite.kernels.triton_support import cdiv, jit, next_power_of_2, tl
from megatron_lite.parameter import Parameter

LARGEST_ROW = 32768  # elements that one program of a kernel can hold


@dataclass(frozen=True)
class Kind:
    """Which norm."""

    eps: float
    centered: bool  # a layer norm; else an RMS norm
    zero_centered: bool = False  # the weight w stands for 1 + w

    def scale(self, weight: Tensor | None) -> Tensor | None:
        """What is multiplied by, in fp32."""
        if weight is None:
            return None
        return weight.float() + 1.0 if self.zero_centered else weight.float()


def reference_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: Kind, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor]:
    """x (..., h) -> y in dtype, mean of a layer norm and r, (..., 1)."""
    single, scale = x.float(), kind.scale(weight)
    if kind.centered:
        bias = None if bias is None else bias.float()
        output, mean, rstd = torch.native_layer_norm(single, x.shape[-1:], scale, bias, kind.eps)
        return output.to(dtype), mean, rstd
    rstd = torch.linalg.vector_norm(single, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(kind.eps).rsqrt_()
    normalized = single * rstd if single is x else single.mul_(rstd)
    return (normalized if scale is None else normalized.mul_(scale)).to(dtype), None, rstd


def reference_backward(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Parameter | None,
    bias: Parameter | None,
    kind: Kind,
    needs_input: bool,
) -> Tensor | None:
    """In fp32 throughout: torch sums up a layer norm's gradients in bf16, on a CPU, where its input is that."""
    dtype, x, grad_output = x.dtype, x.float(), grad_output.float()
    if not kind.centered:
        grad = _reference_rms_backward(grad_output, grad_sum, x, rstd, weight, kind, needs_input)
        return None if grad is None else grad.to(dtype)
    trained = [parameter is not None and parameter.requires_grad for parameter in (weight, bias)]
    grad, *sums = torch.ops.aten.native_layer_norm_backward(
        grad_output,
        x,
        x.shape[-1:],
        mean,
        rstd,
        kind.scale(weight),
        None if bias is None else bias.float(),
        [needs_input, *trained],
    )
    for parameter, total in zip((weight, bias), sums, strict=True):
        if parameter is not None and parameter.requires_grad:
            accumulate(parameter, total)
    if not needs_input:
        return None
    return (grad if grad_sum is None else grad.add_(grad_sum.float())).to(dtype)


def _reference_rms_backward(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    rstd: Tensor,
    weight: Parameter | None,
    kind: Kind,
    needs_input: bool,
) -> Tensor | None:
    """In one tensor of new memory, which costs more time than arithmetic does; r is multiplied by last."""
    scale, size = kind.scale(weight), x.shape[-1]
    products = grad_output * x
    if weight is not None and weight.requires_grad:
        accumulate(weight, rstd.view(-1) @ products.view(-1, size))
    if not needs_input:
        return None
    projection = products.sum(-1) if scale is None else products @ scale
    projection = projection.unsqueeze(-1).mul_(rstd).mul_(rstd).div_(size)  # mean(g n) r, (..., 1)
    grad = products.copy_(grad_output) if scale is None else torch.mul(grad_output, scale, out=products)
    grad.addcmul_(x, projection, value=-1)
    return grad.mul_(rstd) if grad_sum is None else torch.addcmul(grad_sum.float(), grad, rstd, out=grad)


@jit
def _offsets(row, column, stride, COLUMNS: tl.constexpr, HEADS: tl.constexpr):
    """Of rows that lie one after the other, or HEADS of them at the beginning of every `stride` elements."""
    start = row.to(tl.int64) * COLUMNS
    if HEADS:
        start = (row // HEADS).to(tl.int64) * stride + row % HEADS * COLUMNS
    return start[:, None] + column[None, :]


@jit
def _load_weight(weight, column, COLUMNS: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    w = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        w += 1.0
    return w[None, :]


@jit
def _forward_kernel(
    hidden,
    branch,
    total,
    weight,
    bias,
    output,
    mean,
    rstd,
    rows,
    stride,
    output_stride,
    eps,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    CENTERED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS whole rows in a program. `total` may be the memory of the branch."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    offsets = _offsets(row, column, stride, COLUMNS, HEADS)
    x = tl.load(hidden + offsets, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(branch + offsets, mask=inside, other=0.0).to(tl.float32)
        x = x.to(total.dtype.element_ty)  # what is normalized is the sum as it is kept
        tl.store(total + offsets, x, mask=inside)
        x = x.to(tl.float32)
    if CENTERED:
        average = tl.sum(x, axis=1) / COLUMNS
        tl.store(mean + row, average, mask=row < rows)
        x = tl.where(inside, x - average[:, None], 0.0)
    r = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / COLUMNS + eps)
    tl.store(rstd + row, r, mask=row < rows)
    y = x * r[:, None]
    if WEIGHTED:
        y *= _load_weight(weight, column, COLUMNS, ZERO_CENTERED)
        if CENTERED:
            y += tl.load(bias + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    offsets = _offsets(row, column, output_stride, COLUMNS, HEADS)
    tl.store(output + offsets, y.to(output.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    grad_output,
    grad_sum,
    inputs,
    weight,
    mean,
    rstd,
    grad_input,
    grad_branch,
    weight_sums,
    bias_sums,
    rows,
    stride,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    CENTERED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ADDS: tl.constexpr,
    TO_INPUT: tl.constexpr,
    TO_BRANCH: tl.constexpr,
    TO_WEIGHT: tl.constexpr,
    TO_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program takes every so many tiles of ROWS rows, and sums up its part of the weights' gradients in fp32.

    The gradient of the input may take the memory of that of the output.
    """
    column = tl.arange(0, BLOCK)
    if WEIGHTED:
        w = _load_weight(weight, column, COLUMNS, ZERO_CENTERED)
    weight_sum, bias_sum = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
        offsets = _offsets(row, column, stride, COLUMNS, HEADS)
        x = tl.load(inputs + offsets, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(grad_output + offsets, mask=inside, other=0.0).to(tl.float32)  # zero where nothing is
        r = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        if CENTERED:
            x -= tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        n = x * r
        if TO_WEIGHT:
            weight_sum += dy * n
        if TO_BIAS:
            bias_sum += dy
        if TO_INPUT:
            g = dy
            if WEIGHTED:
                g *= w
            dx = g - n * (tl.sum(g * n, axis=1) / COLUMNS)[:, None]
            if CENTERED:
                dx -= (tl.sum(g, axis=1) / COLUMNS)[:, None]
            dx *= r
            if ADDS:
                dx += tl.load(grad_sum + offsets, mask=inside, other=0.0).to(tl.float32)
            tl.store(grad_input + offsets, dx.to(grad_input.dtype.element_ty), mask=inside)
            if TO_BRANCH:
                tl.store(grad_branch + offsets, dx.to(grad_branch.dtype.element_ty), mask=inside)
    sums = tl.program_id(0) * COLUMNS + column
    if TO_WEIGHT:
        tl.store(weight_sums + sums, tl.sum(weight_sum, axis=0), mask=column < COLUMNS)
    if TO_BIAS:
        tl.store(bias_sums + sums, tl.sum(bias_sum, axis=0), mask=column < COLUMNS)


@jit
def _add_sums_kernel(
    sums, main_grad, count, COLUMNS: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """main_grad (h,), overwritten or added to, takes the sum of sums (count, h), in the same order every time."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < COLUMNS)[None, :]
        total += tl.sum(tl.load(sums + row[:, None] * COLUMNS + column[None, :], mask=inside, other=0.0), axis=0)
    if not FIRST:
        total += tl.load(main_grad + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    tl.store(main_grad + column, total.to(main_grad.dtype.element_ty), mask=column < COLUMNS)


def _tile(columns: int) -> tuple[int, int, int]:
    """Rows and columns that a program holds at a time, about 4096 values, and its warps: 16 values a thread, or 32."""
    block = next_power_of_2(columns)
    rows = min(max(1, 4096 // block), 16)
    return rows, block, min(max(rows * block // 512, 1), 32 if block > 16384 else 16)


def triton_forward(
    hidden: Tensor,
    branch: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: Kind,
    output: Tensor,
    heads: int = 0,
    strides: tuple[int, int] = (0, 0),
) -> tuple[Tensor | None, Tensor]:
    """Writes output and, with a branch, total; mean and r, (..., 1).

    `heads`: so many of each token are normalized, (b, s, heads, d), of memory with `strides` from token to token, of
    the input and of the output. None: everything, contiguous.
    """
    rstd = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
    mean = torch.empty_like(rstd) if kind.centered else None
    columns, rows = hidden.shape[-1], rstd.numel()
    tile_rows, block, warps = _tile(columns)
    _forward_kernel[(cdiv(rows, tile_rows),)](
        hidden,
        branch,
        total,
        weight,
        bias,
        output,
        mean,
        rstd,
        rows,
        *strides,
        kind.eps,
        COLUMNS=columns,
        HEADS=heads,
        CENTERED=kind.centered,
        WEIGHTED=weight is not None,
        ZERO_CENTERED=kind.zero_centered,
        ADDS=branch is not None,
        ROWS=tile_rows,
        BLOCK=block,
        num_warps=warps,
    )
    return mean, rstd


def triton_backward(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Parameter | None,
    bias: Parameter | None,
    kind: Kind,
    grad_input: Tensor | None,
    grad_branch: Tensor | None = None,
    heads: int = 0,
    stride: int = 0,
) -> None:
    """Writes the gradients: of the input, of a branch in another dtype, and of the parameters that are trained."""
    columns, rows = x.shape[-1], rstd.numel()
    tile_rows, block, warps = _tile(columns)
    programs = min(_resident_programs(x.device, warps), cdiv(rows, tile_rows))
    to_weight, to_bias = (parameter is not None and parameter.requires_grad for parameter in (weight, bias))
    weight_sums, bias_sums = (
        x.new_empty((programs, columns), dtype=torch.float32) if wanted else None for wanted in (to_weight, to_bias)
    )
    loaded = (3 if grad_sum is not None else 2) * tile_rows * block * x.element_size()
    _backward_kernel[(programs,)](
        grad_output,
        grad_sum,
        x,
        weight,
        mean,
        rstd,
        grad_input,
        grad_branch,
        weight_sums,
        bias_sums,
        rows,
        stride,
        COLUMNS=columns,
        HEADS=heads,
        CENTERED=kind.centered,
        WEIGHTED=weight is not None,
        ZERO_CENTERED=kind.zero_centered,
        ADDS=grad_sum is not None,
        TO_INPUT=grad_input is not None,
        TO_BRANCH=grad_branch is not None,
        TO_WEIGHT=to_weight,
        TO_BIAS=to_bias,
        ROWS=tile_rows,
        BLOCK=block,
        STAGES=2 if loaded <= 49152 else 1,  # what is loaded ahead waits in shared memory
        num_warps=warps,
    )
    for parameter, sums in ((weight, weight_sums), (bias, bias_sums)):
        if parameter is not None and sums is not None:
            _add_sums_kernel[(cdiv(columns, 32),)](
                sums,
                parameter.main_grad,
                programs,
                COLUMNS=columns,
                FIRST=parameter.begin_gradient(),
                ROWS=64,
                BLOCK=32,
                num_warps=4,
            )


def _resident_programs(device: torch.device, warps: int) -> int:
    """A number that fills the device once; the interpreter, one program after another, gets a few."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count * max(1, 16 // warps)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        branch: Tensor | None,
        weight: Parameter | None,
        bias: Parameter | None,
        kind: Kind,
        dtype: torch.dtype,
        triton: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        hidden, branch = hidden.contiguous(), None if branch is None else branch.contiguous()
        total = hidden
        if branch is not None:
            # The branch's memory, but not its history, which knows nothing of being written to.
            total = branch.detach() if branch.dtype == hidden.dtype else torch.empty_like(hidden)
        ctx.triton = triton and hidden.shape[-1] <= LARGEST_ROW
        if ctx.triton:
            output = torch.empty_like(hidden, dtype=dtype)
            mean, rstd = triton_forward(hidden, branch, total, weight, bias, kind, output)
        else:
            if branch is not None:
                torch.add(hidden, branch, out=total)
            output, mean, rstd = reference_forward(total, weight, bias, kind, dtype)
        ctx.save_for_backward(total, mean, rstd)
        ctx.weight, ctx.bias, ctx.kind = weight, bias, kind
        ctx.branch_dtype = total.dtype if branch is None else branch.dtype
        return total, output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor | None, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_needs, branch_needs = ctx.needs_input_grad[:2]
        grad, grad_branch = grad_sum, None
        if grad_output is not None:
            total, mean, rstd = ctx.saved_tensors
            needs_input, grad_output = hidden_needs or branch_needs, grad_output.contiguous()
            if ctx.triton:
                grad_sum = None if grad_sum is None else grad_sum.contiguous()
                grad = torch.empty_like(total) if needs_input else None
                if branch_needs and ctx.branch_dtype != total.dtype:
                    grad_branch = torch.empty_like(total, dtype=ctx.branch_dtype)
                triton_backward(
                    grad_output, grad_sum, total, mean, rstd, ctx.weight, ctx.bias, ctx.kind, grad, grad_branch
                )
            else:
                grad = reference_backward(
                    grad_output, grad_sum, total, mean, rstd, ctx.weight, ctx.bias, ctx.kind, needs_input
                )
        if branch_needs and grad is not None and grad_branch is None:
            grad_branch = grad.to(ctx.branch_dtype)
        return grad if hidden_needs else None, grad_branch, None, None, None, None, None


def layer_norm(input_: Tensor, weight: Parameter, bias: Parameter, eps: float, triton: bool = False) -> Tensor:
    """(..., h), weight and bias (h,) -> (..., h)."""
    return add_norm(input_, None, weight, bias, Kind(eps, centered=True), triton)[1]


def rms_norm(input_: Tensor, weight: Parameter, eps: float, triton: bool = False) -> Tensor:
    """(..., h), weight (h,) -> (..., h)."""
    return add_norm(input_, None, weight, None, Kind(eps, centered=False), triton)[1]


def add_norm(
    hidden: Tensor,
    branch: Tensor | None,
    weight: Parameter | None,
    bias: Parameter | None,
    kind: Kind,
    triton: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden + branch and its norm, both (..., h), by weight and, of a layer norm, bias (h,), or by neither.

    `dtype`: of the norm, if not that of `hidden`, which is the sum's.
    The sum takes the branch's memory, which nothing else may read any more, unless it has another dtype. Without a
    branch it is `hidden`: whoever goes on with this sum, and not with `hidden` itself, has its gradient added in the
    norm's own backward pass.
    """
    assert weight is None or kind.centered == (bias is not None)
    return _AddNorm.apply(hidden, branch, weight, bias, kind, dtype or hidden.dtype, triton)
