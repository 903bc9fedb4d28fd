"""Gradients and weights of whole parameters, put into and read from the shards of an engine's
ranks."""

import functools

import numpy as np
import torch
from torch import Tensor

from megatron_lite.parameter import ParameterSpec
from megatron_lite.seeds import derive_seed
from tests.support.engine_runs import Engine

Weights = dict[str, np.ndarray]  # name -> all elements


def gradient(spec: ParameterSpec, step: int) -> Tensor:
    """Return a gradient (numel,) of the full parameter, the same on every rank and in every
    layout."""
    generator = torch.Generator().manual_seed(derive_seed(7, spec.name, step))
    return torch.randn(spec.numel, generator=generator)


def fill_gradients(engine: Engine, step: int, scale: float = 1.0) -> None:
    """Fill this rank's gradient shards."""
    for _, part in engine.model.parts():
        if part.has_state:
            part.grad_shard.zero_()
            rank = engine.ranks.data.rank
            low = rank * part.layout.shard_numel
            for slot, start, end in part.layout.pieces(rank):
                place = slice(slot.offset + start - low, slot.offset + end - low)
                own = slot.spec.local(gradient(slot.spec, step).view(slot.spec.shape)).flatten()
                part.grad_shard[place] = own[start:end] * scale


def masters(engine: Engine, kind: str = "weights") -> Weights:
    """Return the full parameters with the fp32 elements of this rank, and NaN elsewhere; of a kind
    of `FlatShard`."""
    found, rank = {}, engine.ranks.data.rank
    for _, part in engine.model.parts():
        if kind not in part.kinds():
            continue
        shard, low = part.read(kind).float(), rank * part.layout.shard_numel
        for slot in part.layout.slots:
            found[slot.spec.name] = np.full(slot.spec.numel, np.nan, np.float32)
        for slot, start, end in part.layout.pieces(rank):
            own = torch.full((slot.numel,), torch.nan)
            own[start:end] = shard[slot.offset + start - low : slot.offset + end - low]
            whole = torch.from_numpy(found[slot.spec.name]).view(slot.spec.shape)
            slot.spec.place(own.view(slot.spec.local_shape), whole)
    return found


def together(of_ranks: list[Weights]) -> Weights:
    """Return the full parameters from the elements of all ranks."""
    return {
        name: functools.reduce(np.fmax, (weights[name] for weights in of_ranks))
        for name in of_ranks[0]
    }
