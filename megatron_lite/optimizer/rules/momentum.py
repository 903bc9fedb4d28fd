"""SGD with momentum, Lion, and the elementwise parts of Muon on shards: one moment.

    g = gradient / divisor                     divisor = loss scale / clipping factor

    SGD     m = mu * m + g                     w = w - lr * decay * w - lr * m
    Lion    u = sign(b1 * m + (1 - b1) * g)    w = w - lr * decay * w - lr * u          m = b2 * m + (1 - b2) * g
    Muon    m = mu * m + (1 - mu) * g          u = m, or mu * m + (1 - mu) * g (Nesterov), to be orthogonalized
            w = w - lr * decay * w - lr * f * u                                         f by the shape of the matrix

Lion: Chen et al. (2023), algorithm 2; its betas are --adam_beta1 and --adam_beta2. SGD:
torch.optim.SGD with decoupled weight decay (Loshchilov & Hutter 2019). Muon: Jordan et al. (2024),
as in torch.optim.Muon. All in fp32, for gradients of any dtype and every form of weights in a
`WeightShard`. If `skipped` is set, no bit changes. The shard is updated in chunks, to bound
temporaries, and without synchronizing with the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_lite.config import OptimizerConfig
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.adamw import Range, StepNumbers, chunks
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.weight_shard import WeightShard
from megatron_lite.optimizer.rules.rule import Rule, Trained, ranges_of
from megatron_lite.zero.flat_shard import Moment, OptimizerState


class Momentum(Rule):
    """SGD or Lion in one pass over each shard."""

    declared = OptimizerState((Moment("exp_avg"),))

    def __init__(
        self,
        config: OptimizerConfig,
        trained: Sequence[Trained],
        distributed: Distributed,
        kernels: Kernels,
    ) -> None:
        rules: dict[str, Callable[..., None]] = {
            "lion": partial(lion, beta1=config.adam_beta1, beta2=config.adam_beta2),
            "sgd": partial(sgd, momentum=config.sgd_momentum),
        }
        self._update = rules[config.optimizer]
        self._ranges = {part: ranges_of(part, distributed) for _, part in trained}

    def apply(self, trained: Trained, numbers: StepNumbers) -> None:
        """See `Rule`."""
        part, rows = trained.part, self._ranges[trained.part].rows
        self._update(part.weights, part.grad_shard, part.moments["exp_avg"], rows, numbers)


def sgd(
    weights: WeightShard,
    gradient: Tensor,
    exp_avg: Tensor,
    rows: Sequence[Range],
    step: StepNumbers,
    momentum: float,
) -> None:
    """Update a shard in place with SGD."""
    for _, row, bounds in chunks(rows, gradient.device):
        m = exp_avg[bounds]
        _keep(m, torch.add(_unscaled(gradient, bounds, step), m, alpha=momentum), step)
        _descend(weights, m, row, bounds, step)


def lion(
    weights: WeightShard,
    gradient: Tensor,
    exp_avg: Tensor,
    rows: Sequence[Range],
    step: StepNumbers,
    beta1: float,
    beta2: float,
) -> None:
    """Update a shard in place with Lion."""
    for _, row, bounds in chunks(rows, gradient.device):
        g, m = _unscaled(gradient, bounds, step), exp_avg[bounds]
        _descend(weights, m.lerp(g, 1 - beta1).sign_(), row, bounds, step)
        _keep(m, m.lerp(g, 1 - beta2), step)


def muon_momentum(
    gradient: Tensor,
    exp_avg: Tensor,
    update: Tensor,
    bounds: slice,
    step: StepNumbers,
    momentum: float,
    nesterov: bool,
) -> None:
    """Update the momentum within `bounds` and write u, the input of Newton-Schulz, to `update` in
    its dtype."""
    for _, _, chunk in chunks([Range(bounds.start, bounds.stop, 1.0, 1.0)], gradient.device):
        g, m = _unscaled(gradient, chunk, step), exp_avg[chunk]
        new = m.lerp(g, 1 - momentum)
        update[chunk].copy_(g.lerp(new, momentum) if nesterov else new)
        _keep(m, new, step)


def descend(
    weights: WeightShard,
    update: Tensor,
    rows: Sequence[Range],
    step: StepNumbers,
    factors: Sequence[float],
) -> None:
    """Decay each row's weights and subtract learning rate * f * update, with the row's factor f."""
    for index, row, bounds in chunks(rows, update.device):
        _descend(weights, update[bounds], row, bounds, step, factors[index])


def _descend(
    weights: WeightShard,
    u: Tensor,
    row: Range,
    bounds: slice,
    step: StepNumbers,
    factor: float = 1.0,
) -> None:
    rate = step.learning_rate * row.lr_scale
    values = weights.read(bounds)
    decayed = values * (1 - rate * step.weight_decay * row.decay_scale)
    _keep(values, decayed.add_(u, alpha=-rate * factor), step)
    weights.write(values, bounds)


def _keep(old: Tensor, new: Tensor, step: StepNumbers) -> None:
    """Set old = new, unless the step is skipped; selects, because multiplying by 0 would propagate
    NaN."""
    old.copy_(torch.where(step.skipped.bool(), old, new))


def _unscaled(gradient: Tensor, bounds: slice, step: StepNumbers) -> Tensor:
    return gradient[bounds].float() / step.divisor
