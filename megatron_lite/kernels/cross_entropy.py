"""Output head and loss in one: the logits of a chunk of tokens at a time, forward and backward together.

    loss = sum over tokens of log(sum exp(logits)) - logits[label],   logits = x W^T in the training dtype, then fp32
    dlogits = (softmax(logits) - onehot(label)) * scale,   dx = dlogits W,   W.main_grad += dlogits^T x

The gradient is computed in the forward pass, where the logits are at hand, so that never more than one chunk of them
exists. `scale` therefore has to be known then: loss scale / tokens of the global batch. Where hidden states or weight
need no gradient, their product is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.kernels.linear import accumulate_product, product
from megatron_lite.parameter import Parameter


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Parameter, labels: Tensor, scale: Tensor | None, chunk_tokens: int
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)  # many chunks add up
        grad_hidden = torch.empty_like(hidden) if scale is not None and ctx.needs_input_grad[0] else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            chunk, label = hidden[start : start + chunk_tokens], labels[start : start + chunk_tokens, None]
            logits = product(chunk, weight).float()  # (t, v)
            logits.sub_(logits.amax(dim=-1, keepdim=True))
            at_label = logits.gather(-1, label)
            exponentials = logits.exp_()  # in place, once
            total = exponentials.sum(dim=-1, keepdim=True)
            loss += (total.log() - at_label).sum(dtype=torch.float64)
            if scale is None or (grad_hidden is None and not weight.requires_grad):
                continue
            grad = exponentials.mul_(scale / total)
            grad = grad.scatter_add_(-1, label, -scale.expand(label.shape)).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[start : start + chunk_tokens] = product(grad, weight.t())
            if weight.requires_grad:
                accumulate_product(weight, grad, chunk)
        ctx.grad_hidden = grad_hidden
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        # grad_output is the one that backward starts from: `scale` holds every factor already.
        grad_hidden, ctx.grad_hidden = ctx.grad_hidden, None
        return grad_hidden, None, None, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Parameter, labels: Tensor, scale: Tensor | None, chunk_tokens: int
) -> Tensor:
    """Summed cross-entropy of hidden (t, h) against weight (v, h) and labels (t,): a scalar in fp64.

    With `scale` (), the gradient of scale * loss goes into `weight.main_grad` now and to `hidden` in backward, each
    where it is required.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, scale, chunk_tokens)
