"""Layer norm (Ba et al. 2016) and RMS norm (Zhang & Sennrich 2019) of x, or of a sum x = hidden + branch; fp32 inside.

    layer norm: n = (x - mean) / sqrt(var + eps)        RMS norm: n = x / sqrt(mean(x^2) + eps)        y = n * w (+ b)

Backward, with g = dy * w and r the reciprocal root:   dw = sum of dy * n,   db = sum of dy,
    RMS norm: dx = (g - n mean(g n)) r        layer norm: dx = (g - mean(g) - n mean(g n)) r

and then dx += the gradient of the sum, which goes on to both summands. x is kept, not y: a weight may be zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.kernels.gradients import accumulate
from megatron_lite.kernels.jit import cdiv, jit, next_power_of_2, tl
from megatron_lite.parameter import Parameter

LARGEST_ROW = 32768  # elements that one program of a kernel can hold


def _reference_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """x (..., h) -> y, mean of a layer norm and r, (..., 1)."""
    single = x.float()
    if bias is not None:
        output, mean, rstd = torch.native_layer_norm(single, weight.shape, weight.float(), bias.float(), eps)
        return output.to(x.dtype), mean, rstd
    rstd = torch.linalg.vector_norm(single, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normalized = single * rstd if single is x else single.mul_(rstd)
    return normalized.mul_(weight).to(x.dtype), None, rstd


def _reference_backward(
    grad_output: Tensor, grad_sum: Tensor | None, x: Tensor, mean: Tensor | None, rstd: Tensor,
    weight: Parameter, bias: Parameter | None, needs_input: bool,
) -> Tensor | None:  # fmt: skip
    """In fp32 throughout: torch sums up a layer norm's gradients in bf16, on a CPU, where its input is that."""
    dtype, x, grad_output = x.dtype, x.float(), grad_output.float()
    if bias is None:
        grad = _reference_rms_backward(grad_output, grad_sum, x, rstd, weight, needs_input)
        return None if grad is None else grad.to(dtype)
    wanted = [needs_input, weight.requires_grad, bias.requires_grad]
    grad, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
        grad_output, x, weight.shape, mean, rstd, weight.float(), bias.float(), wanted
    )
    if weight.requires_grad:
        accumulate(weight, grad_weight)
    if bias.requires_grad:
        accumulate(bias, grad_bias)
    if not needs_input:
        return None
    return (grad if grad_sum is None else grad.add_(grad_sum.float())).to(dtype)


def _reference_rms_backward(
    grad_output: Tensor, grad_sum: Tensor | None, x: Tensor, rstd: Tensor, weight: Parameter, needs_input: bool
) -> Tensor | None:
    """In one tensor of new memory, which costs more time than arithmetic does; r is multiplied by last."""
    scale, size = weight.float(), x.shape[-1]
    products = grad_output * x
    if weight.requires_grad:
        accumulate(weight, rstd.view(-1) @ products.view(-1, size))
    if not needs_input:
        return None
    projection = (products @ scale).unsqueeze(-1).mul_(rstd).mul_(rstd).div_(size)  # mean(g n) r, (..., 1)
    grad = torch.mul(grad_output, scale, out=products).addcmul_(x, projection, value=-1)
    return grad.mul_(rstd) if grad_sum is None else torch.addcmul(grad_sum.float(), grad, rstd, out=grad)


@jit
def _forward_kernel(
    hidden, branch, weight, bias, output, mean, rstd, rows, eps,
    COLUMNS: tl.constexpr, CENTERED: tl.constexpr, ADDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows in a program. The sum goes where the branch was."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    offsets = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    x = tl.load(hidden + offsets, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(branch + offsets, mask=inside, other=0.0).to(tl.float32)
        x = x.to(branch.dtype.element_ty)  # what is normalized is the sum as it is kept
        tl.store(branch + offsets, x, mask=inside)
        x = x.to(tl.float32)
    if CENTERED:
        average = tl.sum(x, axis=1) / COLUMNS
        tl.store(mean + row, average, mask=row < rows)
        x = tl.where(inside, x - average[:, None], 0.0)
    r = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / COLUMNS + eps)
    tl.store(rstd + row, r, mask=row < rows)
    w = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    y = x * r[:, None] * w[None, :]
    if CENTERED:
        y += tl.load(bias + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    tl.store(output + offsets, y.to(output.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    grad_output, grad_sum, inputs, weight, mean, rstd, grad_input, weight_sums, bias_sums, rows,
    COLUMNS: tl.constexpr, CENTERED: tl.constexpr, ADDS: tl.constexpr, TO_INPUT: tl.constexpr,
    TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes every so many tiles of ROWS rows, and sums up its part of the weights' gradients in fp32."""
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    weight_sum, bias_sum = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
        offsets = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
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
            g = dy * w
            dx = g - n * (tl.sum(g * n, axis=1) / COLUMNS)[:, None]
            if CENTERED:
                dx -= (tl.sum(g, axis=1) / COLUMNS)[:, None]
            dx *= r
            if ADDS:
                dx += tl.load(grad_sum + offsets, mask=inside, other=0.0).to(tl.float32)
            tl.store(grad_input + offsets, dx.to(grad_input.dtype.element_ty), mask=inside)
    sums = tl.program_id(0) * COLUMNS + column
    if TO_WEIGHT:
        tl.store(weight_sums + sums, tl.sum(weight_sum, axis=0), mask=column < COLUMNS)
    if TO_BIAS:
        tl.store(bias_sums + sums, tl.sum(bias_sum, axis=0), mask=column < COLUMNS)


@jit
def _add_sums_kernel(
    sums, main_grad, count, COLUMNS: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
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


def _triton_forward(
    hidden: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    output = torch.empty_like(hidden)
    rstd = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
    mean = torch.empty_like(rstd) if bias is not None else None
    columns, rows = hidden.shape[-1], rstd.numel()
    tile_rows, block, warps = _tile(columns)
    _forward_kernel[(cdiv(rows, tile_rows),)](
        hidden, branch, weight, bias, output, mean, rstd, rows, eps,
        COLUMNS=columns, CENTERED=bias is not None, ADDS=branch is not None, ROWS=tile_rows, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    return output, mean, rstd


def _triton_backward(
    grad_output: Tensor, grad_sum: Tensor | None, x: Tensor, mean: Tensor | None, rstd: Tensor,
    weight: Parameter, bias: Parameter | None, needs_input: bool,
) -> Tensor | None:  # fmt: skip
    columns, rows = x.shape[-1], rstd.numel()
    tile_rows, block, warps = _tile(columns)
    programs = min(_resident_programs(x.device, warps), cdiv(rows, tile_rows))
    to_weight, to_bias = weight.requires_grad, bias is not None and bias.requires_grad
    grad_input = torch.empty_like(x) if needs_input else None
    weight_sums, bias_sums = (
        x.new_empty((programs, columns), dtype=torch.float32) if wanted else None for wanted in (to_weight, to_bias)
    )
    loaded = (3 if grad_sum is not None else 2) * tile_rows * block * x.element_size()
    _backward_kernel[(programs,)](
        grad_output, None if grad_sum is None else grad_sum.contiguous(), x, weight, mean, rstd,
        grad_input, weight_sums, bias_sums, rows,
        COLUMNS=columns, CENTERED=bias is not None, ADDS=grad_sum is not None, TO_INPUT=needs_input,
        TO_WEIGHT=to_weight, TO_BIAS=to_bias, ROWS=tile_rows, BLOCK=block,
        STAGES=2 if loaded <= 49152 else 1,  # what is loaded ahead waits in shared memory
        num_warps=warps,
    )  # fmt: skip
    for parameter, sums in ((weight, weight_sums), (bias, bias_sums)):
        if parameter is not None and sums is not None:
            _add_sums_kernel[(cdiv(columns, 32),)](
                sums, parameter.main_grad, programs, COLUMNS=columns, FIRST=parameter.begin_gradient(), ROWS=64,
                BLOCK=32, num_warps=4,
            )  # fmt: skip
    return grad_input


def _resident_programs(device: torch.device, warps: int) -> int:
    """A number that fills the device once; the interpreter, one program after another, gets a few."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count * max(1, 16 // warps)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, branch: Tensor | None, weight: Parameter, bias: Parameter | None, eps: float,
        triton: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        hidden, branch = hidden.contiguous(), None if branch is None else branch.contiguous()
        # The branch's memory, but not its history, which knows nothing of being written to.
        total = hidden if branch is None else branch.detach()
        ctx.triton = triton and hidden.shape[-1] <= LARGEST_ROW
        if ctx.triton:
            output, mean, rstd = _triton_forward(hidden, branch, weight, bias, eps)
        else:
            if branch is not None:
                torch.add(hidden, branch, out=branch)
            output, mean, rstd = _reference_forward(total, weight, bias, eps)
        ctx.save_for_backward(total, mean, rstd)
        ctx.weight, ctx.bias = weight, bias
        return total, output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor | None, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_needs, branch_needs = ctx.needs_input_grad[:2]
        grad = grad_sum
        if grad_output is not None:
            total, mean, rstd = ctx.saved_tensors
            needs_input, grad_output = hidden_needs or branch_needs, grad_output.contiguous()
            run = _triton_backward if ctx.triton else _reference_backward
            grad = run(grad_output, grad_sum, total, mean, rstd, ctx.weight, ctx.bias, needs_input)
        return grad if hidden_needs else None, grad if branch_needs else None, None, None, None, None


def layer_norm(input_: Tensor, weight: Parameter, bias: Parameter, eps: float, triton: bool = False) -> Tensor:
    """(..., h), weight and bias (h,) -> (..., h)."""
    return _AddNorm.apply(input_, None, weight, bias, eps, triton)[1]


def rms_norm(input_: Tensor, weight: Parameter, eps: float, triton: bool = False) -> Tensor:
    """(..., h), weight (h,) -> (..., h)."""
    return _AddNorm.apply(input_, None, weight, None, eps, triton)[1]


def add_norm(
    hidden: Tensor, branch: Tensor | None, weight: Parameter, bias: Parameter | None, eps: float, triton: bool = False
) -> tuple[Tensor, Tensor]:
    """hidden + branch and its norm, both (..., h): a layer norm with weight and bias (h,), an RMS norm without bias.

    The sum takes the branch's memory, which nothing else may read any more. Without a branch it is `hidden`: whoever
    goes on with this sum, and not with `hidden` itself, has its gradient added in the norm's own backward pass.
    """
    return _AddNorm.apply(hidden, branch, weight, bias, eps, triton)
