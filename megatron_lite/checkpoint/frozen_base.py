"""The digest of a frozen model whose adapters are trained: checkpoints name it instead of holding
its weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_lite.config import JsonObject
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import CheckpointError
from megatron_lite.seeds import derive_seed
from megatron_lite.tiles import Tile
from megatron_lite.zero.multi_stage import MultiStage

CHUNK_NUMEL = 2**20
_BITS = {2: torch.int16, 4: torch.int32}


def digest_of(model: MultiStage, distributed: Distributed) -> str:
    """Return the digest of the weights that checkpoints omit, equal in every layout; "" if there
    are none. Collective.

    The sum, over elements, of the bits times an odd number that depends on name and position:
    integer sums do not depend on their order.
    """
    total, parts = 0, [part for _, part in model.parts() if not part.is_saved]
    for part in parts:
        shard = part.read("weights")
        for spec, tile in part.layout.tiles(part.rank):
            if tile.holders[0] == part.split_over.rank:
                total += (2 * derive_seed(spec.name) + 1) * _sum(shard, tile)
    found = distributed.gather_objects((total % 2**64, bool(parts)))
    return f"{sum(one for one, _ in found) % 2**64:016x}" if any(has for _, has in found) else ""


def digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return the same of full weights by name, as they are kept in training."""
    total = 0
    for name, values in weights:
        flat = values.view(-1)
        total += (2 * derive_seed(name) + 1) * _sum(flat, Tile.run(0, flat.numel()))
    return f"{total % 2**64:016x}"


def _sum(shard: Tensor, tile: Tile) -> int:
    total = torch.zeros((), dtype=torch.int64, device=shard.device)
    for start in range(tile.offset, tile.end, CHUNK_NUMEL):
        for piece in tile.cut(start, start + CHUNK_NUMEL):
            bits = shard[piece.offset : piece.end].view(_BITS[shard.element_size()])
            column = torch.arange(1, 2 * piece.width, 2, device=shard.device)
            row = torch.arange(piece.rows, device=shard.device) * piece.pitch + piece.first
            positions = 2 * row[:, None] + column
            total += (bits.view(piece.rows, piece.width) * positions).sum()
    return int(total)


def check_base(saved: JsonObject, found: str, where: str, fix: str) -> None:
    """Refuse a checkpoint of adapters to another model. saved: its state. found: the digest of this
    one.

    Raises:
        CheckpointError: if the digests differ.
    """
    if saved.get("base", "") != found:
        raise CheckpointError(
            f"checkpoint {where} holds adapters to a model of digest {saved.get('base') or 'none'}, and this one has "
            f"{found or 'none'}; {fix}"
        )
