"""Hashes of everything that several ranks must hold alike, and the words for what differs.

Weights are hashed as the layers compute with them, in the memory of the step, on the device.
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
from megatron_lite.monitor.bit_hash import bit_hash
from megatron_lite.parameter import ParameterSpec

Fingerprint = dict[str, str]  # hash by name of a weight, or a piece of one, or a counter
Holders = tuple[int, ...]  # ranks of the tensor-parallel group that hold the same


def weight_hashes(weights: Iterator[tuple[ParameterSpec, Tensor]]) -> dict[Holders, Fingerprint]:
    """Return the hash of each tile of the weights, by the ranks that hold it; the host reads the device once.

    weights: of this rank of a tensor-parallel group, with their specs.
    """
    places, hashes = [], []
    for spec, local in weights:
        for tile in spec.tiles:
            places.append((tile.holders, tile.name))
            hashes.append(bit_hash(local.view(-1)[tile.offset : tile.end]))
    found: dict[Holders, Fingerprint] = {}
    for (holders, name), value in zip(places, torch.stack(hashes).tolist(), strict=True):
        found.setdefault(holders, {})[name] = f"{value:x}"
    return found


def value_hashes(values: Mapping[str, Any]) -> Fingerprint:
    """Return a hash of each JSON-able value."""
    return {name: digest(value) for name, value in values.items()}


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits that stand for a JSON-able value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def describe_differences(by_rank: Sequence[Fingerprint]) -> str:
    """Say which names differ on which ranks, in words; empty if all ranks hold the same.

    A name counts on the ranks that have it. The value of more than half of them counts as right; without such a
    majority all of them are named.
    """
    found: dict[str, list[str]] = {}  # ranks in words -> names
    for name in dict.fromkeys(name for fingerprint in by_rank for name in fingerprint):
        values = {rank: fingerprint[name] for rank, fingerprint in enumerate(by_rank) if name in fingerprint}
        common, count = Counter(values.values()).most_common(1)[0]
        if count == len(values):
            continue
        odd = [str(rank) for rank, value in values.items() if value != common]
        if 2 * count > len(values):
            where = f"rank{'s' * (len(odd) > 1)} {', '.join(odd[:10])}{', ...' * (len(odd) > 10)}"
        else:
            where = f"{len(set(values.values()))} of {_named(values, len(by_rank))}, without a majority"
        found.setdefault(where, []).append(name)
    return "; ".join(f"{shorten(names, 3)} on {where}" for where, names in found.items())


def _named(ranks: Mapping[int, str], world_size: int) -> str:
    """Return "4 ranks" if they are all, else with their numbers."""
    return f"{len(ranks)} ranks" + (f" ({', '.join(map(str, ranks))})" if len(ranks) < world_size else "")
