"""Routing: a token's scores for all experts, its choice of K, and losses of the router.

    l = x W^T + b        p = softmax(l) or sigmoid(l)        e_1 .. e_K: the K largest of p + c
    s_k = p[e_k], divided by their sum if normalized, times a factor

all in fp32. Of equal values the lowest index is chosen. The choice bias c affects the choice alone.
With groups, experts compete only within the groups whose two largest p + c have the largest sums
(DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

Sinkhorn's algorithm (Clark et al. 2022, arXiv:2202.01169, appendix B) scales the rows and columns of
exp(l) in turn until each expert has an equal share of the tokens; a token chooses by the result.

The losses of E experts, over the t tokens of a batch without padding, are

    balance  E sum_e f_e mean_t q[e],  f_e = tokens that chose e / t,  q = p / sum_e p
    z        mean_t log(sum_e exp(l[e]))^2

f has no gradient, so d balance / d q[e] = E f_e / t: the gradient is linear in f, which may come
from other tokens. Gradients of the losses begin at the scores' backward pass; the values are summed
for metrics. These sums, and thus the counts of tokens, are added in the backward pass: once for each
micro-batch of a training step, however often a block is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.kernels.linear import PLAIN
from megatron_lite.kernels.products import affine, product
from megatron_lite.parameter import Function, Parameter

SINKHORN_STEPS = 30
SMALLEST_SUM = 1e-20  # of chosen scores


class _Logits(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
        ctx.weights = weight, bias
        ctx.save_for_backward(x)
        return affine(x.float(), weight.float(), None if bias is None else bias.float())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, bias = ctx.weights
        PLAIN.add_gradients(weight, bias, dy, x.float() if weight.requires_grad else None)
        dx = product(dy, weight.float().t()).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None


def router_logits(x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
    """Compute x (t, h), weight (E, h), bias (E,) -> logits (t, E) in fp32."""
    return _Logits.apply(x, weight, bias)


# -- the choice
# --------------------------------------------------------------------------------------------------


def best(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest values in each row of (t, E), the largest first;
    of equal ones the lowest."""
    return values.sort(dim=1, descending=True, stable=True)[1][:, :count]


class Choice(NamedTuple):
    """How a token's experts are chosen from its scores; see above."""

    number: int  # K
    score: str = "softmax"
    normalized: bool = True
    factor: float = 1.0
    groups: int = 1
    top_groups: int = 1

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return p (t, E)."""
        if self.score == "softmax":
            return logits.softmax(1)
        assert self.score == "sigmoid", self.score
        return logits.sigmoid()

    def experts(self, values: Tensor) -> Tensor:
        """Return the chosen experts (t, K), the best first, given p + c (t, E)."""
        if self.groups > 1:
            grouped = values.unflatten(1, (self.groups, -1))  # (t, groups, E / groups)
            sums = grouped.topk(2, dim=2).values.sum(2)
            kept = torch.zeros_like(sums, dtype=torch.bool)
            kept.scatter_(1, best(sums, self.top_groups), True)
            values = grouped.masked_fill(~kept.unsqueeze(2), -torch.inf).flatten(1)
        return best(values, self.number)

    def scores(self, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """Return the scores of chosen experts, (t, K)."""
        scores = probabilities.gather(1, chosen)
        if self.normalized:
            scores = scores / (scores.sum(1, keepdim=True) + SMALLEST_SUM)
        return scores if self.factor == 1.0 else scores * self.factor


def sinkhorn(logits: Tensor, steps: int = SINKHORN_STEPS) -> Tensor:
    """Return the logarithms (t, E) of exp(logits) with rows and then columns scaled `steps` times to
    sums of 1 / t and 1 / E."""
    scaled = logits
    for _ in range(steps):
        scaled = scaled - scaled.logsumexp(1, keepdim=True)
        scaled = scaled - scaled.logsumexp(0, keepdim=True)
    return scaled


# -- the losses
# --------------------------------------------------------------------------------------------------


class Sums:
    """Sums over the tokens of a step for one router, in fp64, which holds counts exactly.

    values: (2 E + 3,): tokens by expert, sums of q by expert, and of the z-loss and q's entropy, number
    of tokens.
    """

    def __init__(self, values: Tensor) -> None:
        experts = (len(values) - 3) // 2
        self._counts, self._shares, others = values.split((experts, experts, 3))
        self._z, self._entropy, self._tokens = others

    def add(self, counts: Tensor, shares: Tensor, lse: Tensor) -> None:
        """Add a micro-batch: counts (E,), shares q (t, E), lse (t,)."""
        self._counts += counts
        self._shares += shares.sum(0, dtype=torch.float64)
        self._z += lse.double().square().sum()
        self._entropy += torch.special.entr(shares).sum(dtype=torch.float64)
        self._tokens += len(lse)


class RouterSummary(NamedTuple):
    """A router in a step."""

    load: float  # the largest, over the mean
    entropy: float  # of a token's scores, in nats, on average
    dead: float  # experts without a token


def summarized(values: Tensor) -> Tensor:
    """Return the summaries of routers with tokens, (routers, 3), from their `Sums.values`."""
    counts = values[:, : (values.shape[1] - 3) // 2]
    entropy, dead = values[:, -2] / values[:, -1], (counts == 0).sum(1)
    return torch.stack([counts.amax(1) / counts.mean(1), entropy, dead], 1)


class Losses(NamedTuple):
    """The losses of a router in a micro-batch of training.

    loads gives f, (E,) or (t, E), as a factor of q's gradient. It is called in the backward pass
    with the tokens' experts: 1 where chosen, else 0, (t, E).
    """

    tokens: int  # without padding, which comes last
    scale: Tensor  # loss scale / tokens of the global batch, ()
    balance: float  # coefficients
    z: float
    loads: Callable[[Tensor], Tensor | None]
    sums: Sums | None


class _WithLosses(Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, logits: Tensor, shares: Tensor, chosen: Tensor, losses: Losses
    ) -> Tensor:
        ctx.losses = losses
        ctx.save_for_backward(logits, shares, chosen)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor | None, ...]:
        losses, (logits, shares, chosen) = ctx.losses, ctx.saved_tensors
        real = slice(losses.tokens)
        lse, experts = logits[real].logsumexp(1), shares.shape[1]
        mask = torch.zeros_like(shares[real]).scatter_(1, chosen[real], 1.0)
        if losses.sums is not None:
            losses.sums.add(mask.sum(0, dtype=torch.float64), shares[real], lse)
        dlogits = dshares = None
        if losses.z:
            dlogits = torch.zeros_like(logits)
            factors = (2.0 * losses.z * losses.scale) * lse.unsqueeze(1)
            dlogits[real] = logits[real].softmax(1).mul_(factors)
        if losses.balance and (loads := losses.loads(mask)) is not None:
            dshares = torch.zeros_like(shares)
            dshares[real] = (losses.balance * experts * losses.scale) * loads
        return dscores, dlogits, dshares, None, None


def with_losses(
    scores: Tensor, logits: Tensor, shares: Tensor, chosen: Tensor, losses: Losses
) -> Tensor:
    """Return the scores (t, K); their backward pass adds the gradients of the losses to logits and
    q (t, E), and their values to the sums."""
    return _WithLosses.apply(scores, logits, shares, chosen, losses)
