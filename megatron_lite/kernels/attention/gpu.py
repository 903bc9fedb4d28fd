"""Attention by the GPU kernels of torch, cuDNN and FlashAttention's packages.

Every function takes query (b, n, s, d) and key and value (b, g, s, d) without copies, as views of
one projection with stride 1 along d, and returns (b, n, s, d) with the memory layout (b, s, n, d).
`scale` None means 1 / sqrt(d).

Nothing here waits for the device: document boundaries are a tensor, and the longest length is a
number.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import attention, functional

from megatron_lite.kernels.attention.blocks import add_sinks, sinks_gradient
from megatron_lite.parameter import Function, Parameter

aten = torch.ops.aten
FLEX_BLOCK = 128  # positions per side of a block in flex_attention's masks


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, backend: str, scale: float | None = None
) -> Tensor:
    """Compute full causal attention with "cudnn" or "flash"; torch raises rather than use another
    kernel."""
    if backend == "flash":
        use_flash(2)
    grouped = query.shape[1] != key.shape[1]
    kernels = {
        "flash": attention.SDPBackend.FLASH_ATTENTION,
        "cudnn": attention.SDPBackend.CUDNN_ATTENTION,
    }
    with attention.sdpa_kernel(kernels[backend]):
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )


class _Planned(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        b, n, s, d = query.shape
        output = query.new_empty(b, s, n, d).transpose(1, 2)
        ctx.save_for_backward(
            query, key, value, output, query.new_empty(b, n, s, dtype=torch.float32)
        )
        return output

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        gradients = tuple(torch.empty_like(heads) for heads in (query, key, value))
        total, per_head = torch.empty_like(query, dtype=torch.float32), list[Tensor]()
        if key.shape[1] != query.shape[1]:
            per_head = [torch.empty_like(query) for _ in (key, value)]
        del total, per_head
        return gradients


def planned_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Allocate what any library's kernels would, for a plan, because none of them runs on the meta
    device.

    Forward: the output and one fp32 number per row. Backward: also the query gradient in fp32 and,
    if query heads share keys, key and value gradients per query head.
    """
    return _Planned.apply(query, key, value)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    starts: Tensor | None,
    longest: int,
    scale: float | None,
    version: int,
    sinks: Parameter | None = None,
) -> Tensor:
    """Compute attention within documents: `starts` (documents + 1,) int32 in the flattened (b s,);
    None: samples.

    version: FlashAttention's version. After 2 or 3 the backward pass must run before a call with
    the other.
    """
    b, n, s, _ = query.shape
    longest = s if starts is None else longest
    # keys before a query's own; None: all
    before = None if window is None or window >= longest else window - 1
    if version == 4:
        return _flash4(query, key, value, before, starts, longest, scale)
    use_flash(version)
    if starts is None:
        starts = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=query.device)
    if sinks is not None:
        options = _VarlenOptions(starts, longest, scale, -1 if before is None else before)
        return _VarlenWithSinks.apply(query, key, value, sinks, options)
    varlen_attn, has_enable_gqa = _varlen()
    grouped = {"enable_gqa": n != key.shape[1]} if has_enable_gqa else {}
    rows = _rows(query, key, value)
    reach = (-1 if before is None else before, 0)  # keys before and after
    output: Tensor = varlen_attn(
        *rows, starts, starts, longest, longest, scale=scale, window_size=reach, **grouped
    )
    return output.unflatten(0, (b, s)).transpose(1, 2)


class _VarlenOptions(NamedTuple):
    starts: Tensor
    longest: int
    scale: float | None
    before: int  # keys before a query's own; -1: all


class _VarlenWithSinks(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Parameter,
        options: _VarlenOptions,
    ) -> Tensor:
        starts, longest, scale, before = options
        rows = _rows(query, key, value)
        output, sums, *states, _ = aten._flash_attention_forward(
            *(*rows, starts, starts, longest, longest, 0.0, before < 0, False),
            scale=scale,
            window_size_left=before,
            window_size_right=0,
        )  # (b s, n, d), (n, b s)
        sums = add_sinks(output.transpose(0, 1), sums, sinks.detach())
        ctx.save_for_backward(query, key, value, output, sums, *states)
        ctx.sinks, ctx.options = sinks, options
        return output.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums, *states = ctx.saved_tensors
        starts, longest, scale, before = ctx.options
        (do,) = _rows(do)
        if ctx.sinks.requires_grad:
            do_by_head, by_head = do.transpose(0, 1), output.transpose(0, 1)
            ctx.sinks.accumulate(sinks_gradient(do_by_head, by_head, sums, ctx.sinks.detach()))
        found = aten._flash_attention_backward(
            *(do, *_rows(query, key, value), output, sums, starts, starts, longest, longest),
            *(0.0, before < 0, *states),
            scale=scale,
            window_size_left=before,
            window_size_right=0,
        )
        shape = (query.shape[0], query.shape[2])
        return *(rows.unflatten(0, shape).transpose(1, 2) for rows in found), None, None


def _rows(*parts: Tensor) -> list[Tensor]:
    """View heads (b, any, s, d) as (b s, any, d)."""
    return [heads.transpose(1, 2).flatten(0, 1) for heads in parts]


def _flash4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    before: int | None,
    starts: Tensor | None,
    longest: int,
    scale: float | None,
) -> Tensor:
    """Compute `varlen_attention` with flash-attn-4's functions, which also return the rows'
    sums."""
    package = importlib.import_module("flash_attn.cute")
    rows = [heads.transpose(1, 2) for heads in (query, key, value)]  # (b, s, heads, d), views
    options: dict[str, Any] = {
        "softmax_scale": scale,
        "causal": True,
        "window_size": (before, 0),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if starts is None:
        output: Tensor = package.flash_attn_func(*rows, **options)[0]
    else:
        borders = {
            "cu_seqlens_q": starts,
            "cu_seqlens_k": starts,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
        }
        flat = (heads.flatten(0, 1) for heads in rows)
        output = package.flash_attn_varlen_func(*flat, **borders, **options)[0].unflatten(
            0, rows[0].shape[:2]
        )
    return output.transpose(1, 2)


def use_flash(version: int) -> None:
    """Make torch's flash attention operators call version 2, built into torch, or 3, from a
    package.

    The choice is per process; calls that change nothing take 1 us.
    """
    if (attention.current_flash_attention_impl() == "FA3") == (version == 3):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its own kernel is replaced
        if version == 3:
            attention.activate_flash_attention_impl("FA3")
        else:
            attention.restore_flash_attention_impl()


@functools.cache
def _varlen() -> tuple[Callable[..., Any], bool]:
    """Return torch's function and whether it has the flag `enable_gqa`; without it (2.11) groups
    just work."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    starts: Tensor | None,
    scale: float | None,
    soft_cap: float = 0.0,
) -> Tensor:
    """Compute `varlen_attention` with torch's compiled flex_attention, which can cap scores."""
    b, n, s, _ = query.shape
    lowest = lowest_keys(starts, b, s, window, query.device)

    def allowed(sample: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column <= row) & (column >= lowest[sample, row])

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    from torch.nn.attention.flex_attention import BlockMask

    counts, columns, full_counts, full_columns = block_columns(lowest, FLEX_BLOCK)
    mask = BlockMask.from_kv_blocks(
        counts,
        columns,
        full_counts,
        full_columns,
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=allowed,
        seq_lengths=(s, s),
    )
    return _compiled_flex()(
        query,
        key,
        value,
        score_mod=capped if soft_cap else None,
        block_mask=mask,
        scale=scale,
        enable_gqa=n != key.shape[1],
    )


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention import flex_attention as module

    return torch.compile(module.flex_attention, dynamic=False)


def lowest_keys(
    starts: Tensor | None, b: int, s: int, window: int | None, device: torch.device
) -> Tensor:
    """Return the first key of its sample that each position attends to, (b, s) int32."""
    positions = torch.arange(s, dtype=torch.int32, device=device).expand(b, s)
    lowest = torch.zeros_like(positions)
    if starts is not None:
        flat = torch.arange(b * s, dtype=torch.int32, device=device)
        # where each position's document begins
        own = starts[torch.searchsorted(starts, flat, right=True) - 1]
        lowest = (own - flat).view(b, s) + positions
    return lowest if window is None else torch.maximum(lowest, positions - (window - 1))


def block_columns(lowest: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the key blocks that each block of rows attends to, partially and fully, from the lowest
    keys (b, s).

    Returns counts (b, 1, blocks) and columns (b, 1, blocks, blocks) of partial blocks, then of full
    ones, int32. Only the first `count` columns of a row are used. In a full block every row attends
    to every key.
    """
    b, s = lowest.shape
    blocks = -(-s // size)
    index = torch.arange(blocks, dtype=torch.int32, device=lowest.device)
    # Lowest keys never decrease from row to row, so the first and last rows determine a block.
    first = lowest[:, ::size] // size
    last = lowest[:, (index.long() * size + size - 1).clamp_(max=s - 1)]
    # first block that the last row attends to in full
    full_first = torch.minimum((last + size - 1) // size, index)
    columns = index.expand(b, blocks, blocks)
    # Partial: from `first` up to `full_first`, and the diagonal. Full: the blocks between.
    before = full_first - first
    partial = torch.where(columns < before[..., None], first[..., None] + columns, index[:, None])
    full = torch.minimum(full_first[..., None] + columns, index[-1:])
    parts = (before + 1, partial, index - full_first, full)
    return tuple(part.to(torch.int32).unsqueeze(1).contiguous() for part in parts)  # type: ignore[return-value]
