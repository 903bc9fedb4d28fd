"""Sum the squares of the gradient shards, for the global gradient norm.

Kernel: every program sums the squares of one piece of a shard in fp64, whatever the dtype, so
nothing overflows under a loss scale and no small square is lost; torch sums the pieces of all
shards. This is as fast as fp32 sums. The order depends only on the sizes of the shards, so the
result has the same bits on all devices of a kind and at every ZeRO stage.

Reference: sums over short rows in fp32, in one call at memory speed, then their sum in fp64. One
fp32 sum over a full shard would lose small squares (0.1 % of the norm at 16 million elements on a
CPU) and overflow under a loss scale. Rows with a norm above 1.8e19 overflow, and rows with a norm
below 1e-19 are lost.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lite.kernels.triton_support import cdiv, jit, tl

PIECE_NUMEL = 2**16  # elements that one program sums
ROW_NUMEL = 2**12  # elements that the reference sums in fp32
BLOCK = 4096  # on an H200 at the speed of a copy; 2,048 reach 0.8 of it


def squared_norm(shard: Tensor) -> Tensor:
    """Return the sum of squares of a flat tensor of any floating dtype, by the reference: (),
    fp64."""
    rows = shard.numel() // ROW_NUMEL * ROW_NUMEL
    norms = torch.linalg.vector_norm(shard[:rows].view(-1, ROW_NUMEL), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(shard[rows:], dtype=torch.float32)
    return torch.cat([norms, rest[None]]).double().square_().sum()


@jit
def _piece_kernel(
    shard_ptr, sums_ptr, numel, PIECE_NUMEL: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Sum the squares of one piece per program."""
    piece = tl.program_id(0)
    offsets = piece.to(tl.int64) * PIECE_NUMEL + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, PIECE_NUMEL, BLOCK):
        inside = offsets + start < numel
        values = (
            tl.load(shard_ptr + offsets + start, mask=inside, other=0.0)
            .to(tl.float32)
            .to(tl.float64)
        )
        total += values * values
    tl.store(sums_ptr + piece, tl.sum(total, axis=0))


def squared_norms(
    groups: Sequence[Sequence[Tensor]], device: torch.device, triton: bool = False
) -> Tensor:
    """Return the sum of squares of each group of flat tensors of any floating dtype: (groups,),
    fp64."""
    if not triton:
        sums = [[squared_norm(shard) for shard in shards] for shards in groups]
        none = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([torch.stack(own).sum() if own else none for own in sums])
    counts = [[cdiv(shard.numel(), PIECE_NUMEL) for shard in shards] for shards in groups]
    pieces = torch.zeros(len(groups), max(map(sum, counts)), dtype=torch.float64, device=device)
    for shards, own, row in zip(groups, counts, pieces, strict=True):
        for shard, count, sums in zip(shards, own, row[: sum(own)].split(own), strict=True):
            if count:
                assert shard.is_contiguous()
                _piece_kernel[(count,)](shard, sums, shard.numel(), PIECE_NUMEL, BLOCK, num_warps=4)
    return pieces.sum(dim=1)
