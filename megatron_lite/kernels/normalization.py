"""Layer norm (Ba et al. 2016) and RMS norm (Zhang & Sennrich 2019) of x, or of a sum x = hidden +
branch; fp32 inside.

    layer norm: n = (x - mean) r,  r = 1 / sqrt(var + eps)        RMS norm: n = x r,  r = 1 / sqrt(mean(x^2) + eps)
    y = n w (+ b)

Backward, with g = dy w:   dw = sum of dy n,   db = sum of dy,
    RMS norm: dx = (g - n mean(g n)) r        layer norm: dx = (g - mean(g) - n mean(g n)) r

and then dx += dsum, the gradient of the sum, which both summands receive. x is saved instead of y,
because a weight may be zero. The weight (and with it the bias) is optional, and may be stored as w
- 1. The sum has the dtype of `hidden`, which may be wider than that of the branch and y: a residual
stream in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.kernels.triton_support import cdiv, jit, next_power_of_2, tl
from megatron_lite.parameter import Function, Parameter

aten = torch.ops.aten
LARGEST_ROW = 32768  # elements per row that one program of a kernel supports
PLANNED_MULTIPROCESSORS = 132  # of an H100; plans query no device
# Shared memory for prefetched tiles of the backward kernel: every GPU from Ampere has this much.
SHARED_BYTES = 98304


@dataclass(frozen=True)
class Kind:
    """Which norm to compute."""

    eps: float
    centered: bool  # layer norm; False: RMS norm
    zero_centered: bool = False  # w is stored as w - 1

    def mean(self, sums: Tensor, size: int) -> Tensor:
        """Return the means of rows from the sums of their `size` elements, in place."""
        return sums.div_(size)

    def scale(self, weight: Tensor | None) -> Tensor | None:
        """Return w in fp32."""
        if weight is None:
            return None
        return weight.float() + 1.0 if self.zero_centered else weight.float()


class Weights(NamedTuple):
    """A norm's weight w and bias b, (h,) each; an RMS norm has no bias."""

    weight: Parameter | None
    bias: Parameter | None


class Statistics(NamedTuple):
    """Row statistics of x for the backward pass, (..., 1) in fp32."""

    mean: Tensor | None  # None: RMS norm
    r: Tensor


# -- by torch
# --------------------------------------------------------------------------------------------------------


def reference_forward(
    x: Tensor, weights: Weights, kind: Kind, dtype: torch.dtype
) -> tuple[Tensor, Statistics]:
    """Normalize x (..., h) -> y (..., h) in `dtype`; also return the statistics."""
    single = x.float()
    w = kind.scale(weights.weight)
    b = weights.bias
    if kind.centered:
        y, mean, r = torch.native_layer_norm(
            single, x.shape[-1:], w, None if b is None else b.float(), kind.eps
        )
        return y.to(dtype), Statistics(mean, r)
    squares = torch.linalg.vector_norm(single, dim=-1, keepdim=True).square_()
    r = kind.mean(squares, x.shape[-1]).add_(kind.eps).rsqrt_()
    n = single * r if single is x else single.mul_(r)
    return (n if w is None else n.mul_(w)).to(dtype), Statistics(None, r)


def reference_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    statistics: Statistics,
    weights: Weights,
    kind: Kind,
    needs_dx: bool,
) -> Tensor | None:
    """Return dx, if needed, and add dw and db to their gradients.

    Computes in fp32: with a bf16 input torch would sum a layer norm's gradients in bf16 on a CPU.
    """
    dtype = x.dtype
    x = x.float()
    dy = dy.float()
    if not kind.centered:
        dx = _reference_rms_backward(dy, dsum, x, statistics.r, weights.weight, kind, needs_dx)
        return None if dx is None else dx.to(dtype)
    dx, *sums = aten.native_layer_norm_backward.default(
        dy,
        x,
        x.shape[-1:],
        *statistics,
        kind.scale(weights.weight),
        None if weights.bias is None else weights.bias.float(),
        [needs_dx, *[parameter is not None and parameter.requires_grad for parameter in weights]],
    )
    for parameter, total in zip(weights, sums, strict=True):
        if parameter is not None and parameter.requires_grad:
            parameter.accumulate(total)
    if not needs_dx:
        return None
    return (dx if dsum is None else dx.add_(dsum.float())).to(dtype)


def _reference_rms_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    r: Tensor,
    weight: Parameter | None,
    kind: Kind,
    needs_dx: bool,
) -> Tensor | None:
    """Compute the RMS norm's gradients in a single new tensor, because memory costs more than
    arithmetic; multiply by r last."""
    w, size = kind.scale(weight), x.shape[-1]
    products = dy * x
    if weight is not None and weight.requires_grad:
        weight.accumulate(r.view(-1) @ products.view(-1, size))
    if not needs_dx:
        return None
    projection = products.sum(-1) if w is None else products @ w
    # mean(g n) r, (..., 1)
    projection = kind.mean(projection.unsqueeze(-1).mul_(r).mul_(r), size)
    g = products.copy_(dy) if w is None else torch.mul(dy, w, out=products)
    g.addcmul_(x, projection, value=-1)
    return g.mul_(r) if dsum is None else torch.addcmul(dsum.float(), g, r, out=g)


# -- by Triton
# -------------------------------------------------------------------------------------------------------


@jit
def _offsets(row, column, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr):
    """Return offsets of HEADS contiguous rows at the start of every STRIDE elements."""
    start = (row // HEADS).to(tl.int64) * STRIDE + row % HEADS * COLUMNS
    return start[:, None] + column[None, :]


@jit
def _load_weight(w_ptr, column, COLUMNS: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    w = tl.load(w_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        w += 1.0
    return w[None, :]


@jit
def _forward_kernel(
    hidden_ptr,
    branch_ptr,
    sum_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    r_ptr,
    rows,
    eps,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalize ROWS full rows per program. The sum may overwrite the branch. Branch, weight and
    mean may be None."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    offsets = _offsets(row, column, STRIDE, COLUMNS, HEADS)
    x = tl.load(hidden_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if branch_ptr is not None:
        x += tl.load(branch_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        x = x.to(sum_ptr.dtype.element_ty)  # normalize the sum as it is stored
        tl.store(sum_ptr + offsets, x, mask=inside)
        x = x.to(tl.float32)
    if mean_ptr is not None:
        mean = tl.sum(x, axis=1) / COLUMNS
        tl.store(mean_ptr + row, mean, mask=row < rows)
        x = tl.where(inside, x - mean[:, None], 0.0)
    r = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / COLUMNS + eps)
    y = x * r[:, None]
    if w_ptr is not None:
        y *= _load_weight(w_ptr, column, COLUMNS, ZERO_CENTERED)
        if b_ptr is not None:
            y += tl.load(b_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    offsets = _offsets(row, column, Y_STRIDE, COLUMNS, HEADS)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)
    # last: earlier, fp32 rows of 4096 would spill a register
    tl.store(r_ptr + row, r, mask=row < rows)


@jit
def _backward_kernel(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    r_ptr,
    dx_ptr,
    dbranch_ptr,
    dw_sums_ptr,
    db_sums_ptr,
    rows,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    STRIDE: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Process every num_programs-th tile of ROWS rows per program, which sums its share of dw and
    db in fp32.

    dx may overwrite dy. Outputs that are None are not computed.
    """
    column = tl.arange(0, BLOCK)
    if w_ptr is not None:
        w = _load_weight(w_ptr, column, COLUMNS, ZERO_CENTERED)
    dw, db = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
        offsets = _offsets(row, column, STRIDE, COLUMNS, HEADS)
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        # zero outside, for dw and db
        dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + row, mask=row < rows, other=0.0)[:, None]
        if mean_ptr is not None:
            x -= tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        n = x * r
        if dw_sums_ptr is not None:
            dw += dy * n
        if db_sums_ptr is not None:
            db += dy
        if dx_ptr is not None:
            g = dy
            if w_ptr is not None:
                g *= w
            dx = g - n * (tl.sum(g * n, axis=1) / COLUMNS)[:, None]
            if mean_ptr is not None:
                dx -= (tl.sum(g, axis=1) / COLUMNS)[:, None]
            dx *= r
            if dsum_ptr is not None:
                dx += tl.load(dsum_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)
            if dbranch_ptr is not None:
                tl.store(dbranch_ptr + offsets, dx.to(dbranch_ptr.dtype.element_ty), mask=inside)
    sums = tl.program_id(0) * COLUMNS + column
    if dw_sums_ptr is not None:
        tl.store(dw_sums_ptr + sums, tl.sum(dw, axis=0), mask=column < COLUMNS)
    if db_sums_ptr is not None:
        tl.store(db_sums_ptr + sums, tl.sum(db, axis=0), mask=column < COLUMNS)


@jit
def _add_sums_kernel(
    sums_ptr,
    main_grad_ptr,
    count,
    COLUMNS: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write or add the sum of sums (count, h) to main_grad (h,), in a fixed order."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < COLUMNS)[None, :]
        total += tl.sum(
            tl.load(sums_ptr + row[:, None] * COLUMNS + column[None, :], mask=inside, other=0.0),
            axis=0,
        )
    if not FIRST:
        total += tl.load(main_grad_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    tl.store(
        main_grad_ptr + column, total.to(main_grad_ptr.dtype.element_ty), mask=column < COLUMNS
    )


def _tile(columns: int) -> tuple[int, int, int]:
    """Return rows and columns of a program's tile, about 4096 values, and its warps, for 16 or 32
    values per thread."""
    block = next_power_of_2(columns)
    rows = min(max(1, 4096 // block), 16)
    return rows, block, min(max(rows * block // 512, 1), 32 if block > 16384 else 16)


def _heads_and_stride(x: Tensor) -> tuple[int, int]:
    """Return heads per token and the stride between tokens of (b, s, heads, d), or of contiguous
    rows."""
    return (x.shape[2], x.stride(1)) if x.dim() == 4 else (1, x.shape[-1])


def triton_forward(
    hidden: Tensor, branch: Tensor | None, total: Tensor, weights: Weights, kind: Kind, y: Tensor
) -> Statistics:
    """Write y and, with a branch, the sum `total`; return the statistics.

    All are contiguous, except that hidden and y (b, s, heads, d) may be a subset of each token's
    heads.
    """
    r = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
    mean = torch.empty_like(r) if kind.centered else None
    columns, rows = hidden.shape[-1], r.numel()
    tile_rows, block, warps = _tile(columns)
    heads, stride = _heads_and_stride(hidden)
    _forward_kernel[(cdiv(rows, tile_rows),)](
        hidden,
        branch,
        total,
        *weights,
        y,
        mean,
        r,
        rows,
        kind.eps,
        COLUMNS=columns,
        HEADS=heads,
        STRIDE=stride,
        Y_STRIDE=_heads_and_stride(y)[1],
        ZERO_CENTERED=kind.zero_centered,
        ROWS=tile_rows,
        BLOCK=block,
        num_warps=warps
        if tile_rows == 1
        else max(1, warps // 2),  # sums across fewer warps: 0.8 of the time at 768
    )
    return Statistics(mean, r)


def triton_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    statistics: Statistics,
    weights: Weights,
    kind: Kind,
    dx: Tensor | None,
    dbranch: Tensor | None = None,
    warps_per_multiprocessor: int = 16,
) -> None:
    """Write dx, and dbranch if the branch has another dtype; add dw and db to the gradients of
    trained parameters.

    dy and dx have the layout of x: see `triton_forward`. More warps hide more memory latency if
    their registers fit, and sum dw and db in more parts.
    """
    columns, rows = x.shape[-1], statistics.r.numel()
    heads, stride = _heads_and_stride(x)
    tile_rows, block, warps = _tile(columns)
    programs = min(_resident_programs(x, warps, warps_per_multiprocessor), cdiv(rows, tile_rows))
    sums = [
        x.new_empty((programs, columns), dtype=torch.float32)
        if parameter is not None and parameter.requires_grad
        else None
        for parameter in weights
    ]
    loaded_bytes = (3 if dsum is not None else 2) * tile_rows * block * x.element_size()
    _backward_kernel[(programs,)](
        dy,
        dsum,
        x,
        weights.weight,
        *statistics,
        dx,
        dbranch,
        *sums,
        rows,
        COLUMNS=columns,
        HEADS=heads,
        STRIDE=stride,
        ZERO_CENTERED=kind.zero_centered,
        ROWS=tile_rows,
        BLOCK=block,
        STAGES=max(1, min(3, SHARED_BYTES // loaded_bytes)),
        num_warps=warps,
    )
    for parameter, part in zip(weights, sums, strict=True):
        if parameter is not None and part is not None:
            first, grid = parameter.begin_gradient(), (cdiv(columns, 32),)
            _add_sums_kernel[grid](
                part,
                parameter.main_grad,
                programs,
                COLUMNS=columns,
                FIRST=first,
                ROWS=64,
                BLOCK=32,
                num_warps=4,
            )


def _resident_programs(x: Tensor, warps: int, warps_per_multiprocessor: int) -> int:
    """Return how many programs fill the device; a few for the interpreter, which runs them one by
    one."""
    if x.device.type != "cuda":
        return 3
    count = PLANNED_MULTIPROCESSORS
    if not x.is_meta:
        count = torch.cuda.get_device_properties(x.device).multi_processor_count
    return count * max(1, warps_per_multiprocessor // warps)


# -- the norm of a sum
# -----------------------------------------------------------------------------------------------


class _AddNorm(Function):
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
        hidden, weights = hidden.contiguous(), Weights(weight, bias)
        branch = None if branch is None else branch.contiguous()
        total = hidden
        if branch is not None:
            # Detached: autograd would reject a write to the branch.
            total = branch.detach() if branch.dtype == hidden.dtype else torch.empty_like(hidden)
        ctx.triton = triton and hidden.shape[-1] <= LARGEST_ROW
        if ctx.triton:
            y = torch.empty_like(hidden, dtype=dtype)
            statistics = triton_forward(hidden, branch, total, weights, kind, y)
        else:
            if branch is not None:
                torch.add(hidden, branch, out=total)
            y, statistics = reference_forward(total, weights, kind, dtype)
        ctx.save_for_backward(total, *statistics)
        ctx.weights, ctx.kind = weights, kind
        ctx.branch_dtype = total.dtype if branch is None else branch.dtype
        return total, y

    @staticmethod
    def backward(ctx: Any, dsum: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_needs, branch_needs = ctx.needs_input_grad[:2]
        dx, dbranch = dsum, None
        if dy is not None:
            x, *saved = ctx.saved_tensors
            needs_dx = hidden_needs or branch_needs
            dy = dy.contiguous()
            statistics = Statistics(*saved)
            if ctx.triton:
                dsum = None if dsum is None else dsum.contiguous()
                dx = torch.empty_like(x) if needs_dx else None
                if branch_needs and ctx.branch_dtype != x.dtype:
                    dbranch = torch.empty_like(x, dtype=ctx.branch_dtype)
                triton_backward(dy, dsum, x, statistics, ctx.weights, ctx.kind, dx, dbranch)
            else:
                dx = reference_backward(dy, dsum, x, statistics, ctx.weights, ctx.kind, needs_dx)
        if branch_needs and dx is not None and dbranch is None:
            dbranch = dx.to(ctx.branch_dtype)
        return dx if hidden_needs else None, dbranch, *(None,) * 5


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
    """Return hidden + branch and its norm, both (..., h); the norm is in `dtype`, by default
    `hidden`'s.

    The sum overwrites the branch, which must not be read afterwards, unless the dtypes differ.
    Without a branch the sum is `hidden`; use the returned sum from then on, so that the norm's
    backward pass adds its gradient.
    """
    assert bias is None or (kind.centered and weight is not None)
    return _AddNorm.apply(hidden, branch, weight, bias, kind, dtype or hidden.dtype, triton)
