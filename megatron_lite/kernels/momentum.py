"""SGD, Lion and the elementwise parts of Muon over a flat shard.

    g = gradient / divisor                     divisor = loss scale / clipping factor

    SGD     m = mu * m + g                     w = w - lr * decay * w - lr * m
    Lion    u = sign(b1 * m + (1 - b1) * g)    w = w - lr * decay * w - lr * u          m = b2 * m + (1 - b2) * g
    Muon    m = mu * m + (1 - mu) * g          u = m, or mu * m + (1 - mu) * g (Nesterov), to be orthogonalized
            w = w - lr * decay * w - lr * f * u                                         f by the shape of the matrix

Lion: Chen et al. (2023), algorithm 2. SGD: torch.optim.SGD with decoupled weight decay (Loshchilov & Hutter 2019).
Muon: Jordan et al. (2024), as in torch.optim.Muon. All in fp32, for gradients of any dtype and every form of weights
that a `WeightShard` has. If `skipped` is set, no bit changes. The shard is updated in chunks, to bound temporaries, and
without synchronizing with the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.kernels.adamw import Range, chunks
from megatron_lite.kernels.weight_shard import WeightShard


@dataclass(frozen=True)
class Numbers:
    """One step's numbers. Tensors are () in fp32 on the device."""

    learning_rate: float
    weight_decay: float
    divisor: Tensor  # gradients are divided by it
    skipped: Tensor  # 1 to change nothing, else 0


def _descend(
    weights: WeightShard, u: Tensor, row: Range, bounds: slice, numbers: Numbers, skipped: Tensor, factor: float = 1.0
) -> None:
    rate = numbers.learning_rate * row.lr_scale
    values = weights.read(bounds)
    decayed = values * (1 - rate * numbers.weight_decay * row.decay_scale)
    _keep(values, decayed.add_(u, alpha=-rate * factor), skipped)
    weights.write(values, bounds)


def _keep(old: Tensor, new: Tensor, skipped: Tensor) -> None:
    """old = new, unless the step is skipped; a select, because multiplying by 0 would propagate NaN."""
    old.copy_(torch.where(skipped, old, new))


def _unscaled(gradient: Tensor, bounds: slice, numbers: Numbers) -> Tensor:
    return gradient[bounds].float() / numbers.divisor


def sgd(
    weights: WeightShard, gradient: Tensor, exp_avg: Tensor, rows: Sequence[Range], numbers: Numbers, momentum: float
) -> None:
    """Update a shard in place with SGD."""
    skipped = numbers.skipped.bool()
    for _, row, bounds in chunks(rows, gradient.device):
        m = exp_avg[bounds]
        _keep(m, torch.add(_unscaled(gradient, bounds, numbers), m, alpha=momentum), skipped)
        _descend(weights, m, row, bounds, numbers, skipped)


def lion(
    weights: WeightShard,
    gradient: Tensor,
    exp_avg: Tensor,
    rows: Sequence[Range],
    numbers: Numbers,
    beta1: float,
    beta2: float,
) -> None:
    """Update a shard in place with Lion."""
    skipped = numbers.skipped.bool()
    for _, row, bounds in chunks(rows, gradient.device):
        g, m = _unscaled(gradient, bounds, numbers), exp_avg[bounds]
        _descend(weights, m.lerp(g, 1 - beta1).sign_(), row, bounds, numbers, skipped)
        _keep(m, m.lerp(g, 1 - beta2), skipped)


def muon_momentum(
    gradient: Tensor, exp_avg: Tensor, update: Tensor, bounds: slice, numbers: Numbers, momentum: float, nesterov: bool
) -> None:
    """Update the momentum within `bounds` and write u, the input of Newton-Schulz, to `update` in its dtype."""
    skipped = numbers.skipped.bool()
    for _, _, chunk in chunks([Range(bounds.start, bounds.stop, 1.0, 1.0)], gradient.device):
        g, m = _unscaled(gradient, chunk, numbers), exp_avg[chunk]
        new = m.lerp(g, 1 - momentum)
        update[chunk].copy_(g.lerp(new, momentum) if nesterov else new)
        _keep(m, new, skipped)


def descend(
    weights: WeightShard, update: Tensor, rows: Sequence[Range], numbers: Numbers, factors: Sequence[float]
) -> None:
    """Decay each row's weights and subtract learning rate times the row's factor f times the update."""
    skipped = numbers.skipped.bool()
    for row, factor in zip(rows, factors, strict=True):
        for _, _, bounds in chunks([row], update.device):
            _descend(weights, update[bounds], row, bounds, numbers, skipped, factor)
