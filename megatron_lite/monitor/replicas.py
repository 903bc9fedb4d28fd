"""Hashes of everything that all ranks must hold alike, and the words for what differs.

Weights are hashed as the layers compute with them, in the memory of the step, on the device: the sum of each element's
bits times 2 * position + 1, modulo 2**64. Integer sums do not depend on their order, and no change of a single element
keeps the sum, because the factors are odd.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lite.errors import shorten
from megatron_lite.monitor.tensor_log import BITS

CHUNK_NUMEL = 2**20  # elements hashed at a time: 24 MiB of temporary integers
Fingerprint = dict[str, str]  # hash by name of a weight or a counter


def bit_hash(flat: Tensor) -> Tensor:
    """Return the hash of a tensor (n,), () int64 on its device."""
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), CHUNK_NUMEL):
        chunk = flat[start : start + CHUNK_NUMEL]
        positions = torch.arange(start, start + chunk.numel(), device=flat.device)
        total += (chunk.view(BITS[chunk.element_size()]).to(torch.int64) * (2 * positions + 1)).sum()
    return total


def weight_hashes(weights: Iterator[tuple[str, Tensor]]) -> Fingerprint:
    """Return the hash of each full weight; the host reads the device once."""
    names, hashes = [], []
    for name, weight in weights:
        names.append(name)
        hashes.append(bit_hash(weight.reshape(-1)))
    return {name: f"{value:x}" for name, value in zip(names, torch.stack(hashes).tolist(), strict=True)}


def value_hashes(values: Mapping[str, Any]) -> Fingerprint:
    """Return a hash of each JSON-able value."""
    return {name: digest(value) for name, value in values.items()}


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits that stand for a JSON-able value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def describe_differences(by_rank: Sequence[Fingerprint]) -> str:
    """Say which names differ on which ranks, in words; empty if all ranks hold the same.

    The value of more than half of the ranks counts as right; without such a majority all ranks are named.
    """
    found: dict[str, list[str]] = {}  # ranks in words -> names
    for name in by_rank[0]:
        values = [fingerprint.get(name, "") for fingerprint in by_rank]
        common, count = Counter(values).most_common(1)[0]
        if count == len(values):
            continue
        odd = [str(rank) for rank, value in enumerate(values) if value != common]
        if 2 * count > len(values):
            where = f"rank{'s' * (len(odd) > 1)} {', '.join(odd[:10])}{', ...' * (len(odd) > 10)}"
        else:
            where = f"{len(set(values))} of {len(values)} ranks, without a majority"
        found.setdefault(where, []).append(name)
    return "; ".join(f"{shorten(names, 3)} on {where}" for where, names in found.items())
