"""A small problem that shows whether an implementation of attention works on a device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron_lite.kernels.attention.attention import attention


@functools.cache
def works(backend: str, device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether a backend computes a small problem like "math", forward and backward; waits for the device.

    A library may refuse for reasons that `choice.py` does not know.
    """
    try:
        found, expected = (_small_problem(name, device, dtype, head_size) for name in (backend, "math"))
    except Exception:  # whatever the reason, another backend may work
        return False
    return all(bool(((a - b).abs() <= 0.05 * b.abs().max()).all()) for a, b in zip(found, expected, strict=True))


def _small_problem(backend: str, device: torch.device, dtype: torch.dtype, head_size: int) -> tuple[Tensor, Tensor]:
    """Return output and gradient in fp32 for 200 tokens and two heads that share their keys."""
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randn(1, 200, 4, head_size, dtype=torch.float32, device=device, generator=generator)
    projection = numbers.to(dtype).requires_grad_()
    query, key, value = (heads.transpose(1, 2) for heads in projection.split([2, 1, 1], dim=2))
    output = attention(query, key, value, None, 0.0, None, backend=backend)
    output.backward(torch.ones_like(output))
    assert projection.grad is not None
    return output.detach().float(), projection.grad.float()
