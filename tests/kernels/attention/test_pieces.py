"""Torch's flash kernel for CPUs in pieces: the scores that it computes, and the memory of the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.kernels.attention.attention import attention
from megatron_lite.kernels.heads import split_heads


class KernelCalls(TorchDispatchMode):
    """Queries times keys in each call of the flash kernel, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: dict[bool, list[int]] = {False: [], True: []}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
            query, key = args[1:3] if name.endswith("_backward") else args[:2]
            self.scores[name.endswith("_backward")].append(query.shape[2] * key.shape[2])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("s", "forward", "backward"), [(256, 0.63, 0.75), (512, 0.57, 0.63), (1024, 1.0, 0.57)])
def test_flash_attention_on_a_cpu_leaves_out_much_of_the_future(s: int, forward: float, backward: float) -> None:
    """Pieces compute this share of the scores of all queries and keys; causal attention needs half of them."""
    heads = split_heads(torch.randn(1, s, 3 * 8 * 64, requires_grad=True) * 1, 8, 8, None)
    with KernelCalls() as calls:
        attention(*heads, None, 0.0, None, backend="flash").sum().backward()
    assert 0.5 < sum(calls.scores[False]) / s**2 <= forward
    assert 0.5 < sum(calls.scores[True]) / s**2 <= backward


@pytest.mark.parametrize("shape", [(2, 8, 2, 256, 64), (1, 2, 2, 40, 8)], ids=str)
def test_gradients_of_flash_attention_on_a_cpu_are_joined(shape: tuple[int, ...]) -> None:
    """The gradient of the projection holds those of query, key and value, computed in pieces or not."""
    b, n, g, s, d = shape
    projection = torch.randn(b, s, (n + 2 * g) * d, requires_grad=True)
    heads = split_heads(projection * 1, n, g, None)
    output = attention(*heads, None, 0.0, None, backend="flash")
    (grad,) = torch.autograd.grad(output, projection, torch.ones_like(output))
    leaves = [head.detach().requires_grad_() for head in heads]
    again = attention(*leaves, None, 0.0, None, backend="flash")
    parts = torch.autograd.grad(again, leaves, torch.ones_like(again))
    assert torch.equal(grad.view(b, s, -1, d), torch.cat([part.transpose(1, 2) for part in parts], dim=2))
