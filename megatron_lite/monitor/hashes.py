"""Hash tensors and everything else that must match across ranks, and describe the differences.

Weights are hashed as the layers compute with them, in the memory of the step, on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_lite.errors import shorten
from megatron_lite.parameter import ParameterSpec

CHUNK_NUMEL = 2**20  # elements hashed at a time: 24 MiB of temporary integers
# Integers by width in bytes, for reading the bits of floating-point numbers.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Fingerprint = dict[str, str]  # hash by name of a weight's tile, or of a counter
# expert-parallel ranks, and those of the ranks with a whole parameter that store the same
Holders = tuple[int, tuple[int, ...]]


def bit_hash(flat: Tensor, prepare: Callable[[Tensor], Tensor] = lambda chunk: chunk) -> Tensor:
    """Return the hash of a tensor (n,), () int64 on its device: the sum of each element's bits
    times 2 * position + 1.

    Integer sums (modulo 2**64) do not depend on their order, and changing one element always
    changes the sum, because the factors are odd. prepare: maps each chunk to the values to hash.
    """
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), CHUNK_NUMEL):
        chunk = prepare(flat[start : start + CHUNK_NUMEL])
        positions = torch.arange(start, start + chunk.numel(), device=flat.device)
        total += (
            chunk.view(BITS[chunk.element_size()]).to(torch.int64) * (2 * positions + 1)
        ).sum()
    return total


def weight_hashes(weights: Iterator[tuple[ParameterSpec, Tensor]]) -> dict[Holders, Fingerprint]:
    """Return the hash of each weight tile, by the ranks that store it; the host reads the device
    once.

    weights: this tensor-parallel rank's part of each parameter, with its spec.
    """
    # Hash each before the next: stages share the memory of their weights.
    hashed = [
        (
            (spec.split.expert_ranks, tile.holders),
            tile.name,
            bit_hash(local.view(-1)[tile.offset : tile.end]),
        )
        for spec, local in weights
        for tile in spec.tiles
    ]
    found: dict[Holders, Fingerprint] = {}
    values = torch.stack([value for *_, value in hashed]).tolist()
    for (holders, name, _), value in zip(hashed, values, strict=True):
        found.setdefault(holders, {})[name] = f"{value:x}"
    return found


def describe_differences(by_rank: Sequence[Fingerprint]) -> str:
    """Describe which names differ on which ranks; empty if all ranks match.

    Ranks without a name do not count. A value on more than half of the ranks counts as right;
    without such a majority all ranks are named.
    """
    found: dict[str, list[str]] = {}  # ranks in words -> names
    for name in dict.fromkeys(name for fingerprint in by_rank for name in fingerprint):
        values = {
            rank: fingerprint[name]
            for rank, fingerprint in enumerate(by_rank)
            if name in fingerprint
        }
        common, count = Counter(values.values()).most_common(1)[0]
        if count == len(values):
            continue
        odd = [str(rank) for rank, value in values.items() if value != common]
        if 2 * count > len(values):
            where = f"rank{'s' * (len(odd) > 1)} {', '.join(odd[:10])}{', ...' * (len(odd) > 10)}"
        else:
            numbers = f" ({', '.join(map(str, values))})" if len(values) < len(by_rank) else ""
            where = (
                f"{len(set(values.values()))} of {len(values)} ranks{numbers}, without a majority"
            )
        found.setdefault(where, []).append(name)
    return "; ".join(f"{shorten(names, 3)} on {where}" for where, names in found.items())
