"""A small problem that tests whether an attention backend works on a device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron_lite.kernels.attention.attention import Documents, attention
from megatron_lite.kernels.attention.choice import Work

SAMPLES, LENGTH, WINDOW = 2, 200, 64
DOCUMENTS = (90, 110, 200)  # tokens; a border within a sample and one between samples
GROUPS = 2


@functools.cache
def failure(backend: str, device: torch.device, work: Work) -> str | None:
    """Return why a backend fails to match "math" on a small problem, forward and backward; None if it matches.

    The problem has the dtype, head size, heads per group, window and documents of `work`. Waits for the device. A
    library may refuse for reasons unknown to `choice.py`.
    """
    try:
        found, expected = (_small_problem(name, device, work) for name in (backend, "math"))
    except Exception as error:  # whatever the reason, another backend may work
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    for name, a, b in zip(("output", "gradient"), found, expected, strict=True):
        difference, largest = float((a - b).abs().max()), float(b.abs().max())
        if not difference <= 0.05 * largest:  # NaN fails, too
            return (
                f"its {name} differs from the formula's by {difference:.3g}, where the largest number is {largest:.3g}"
            )
    return None


def _small_problem(backend: str, device: torch.device, work: Work) -> tuple[Tensor, Tensor]:
    """Return output and gradient in fp32."""
    heads = GROUPS * work.heads_per_group
    generator = torch.Generator(device).manual_seed(0)
    size = (SAMPLES, LENGTH, heads + 2 * GROUPS, work.head_size)
    numbers = torch.randn(size, dtype=torch.float32, device=device, generator=generator)
    projection = numbers.to(work.dtype).requires_grad_()
    query, key, value = (part.transpose(1, 2) for part in projection.split([heads, GROUPS, GROUPS], dim=2))
    documents = None
    if work.documents:
        starts = torch.tensor([0, *DOCUMENTS], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        documents = Documents(starts, DOCUMENTS)
    window = WINDOW if work.windowed else None
    output = attention(query, key, value, window, 0.0, None, backend=backend, documents=documents)
    output.backward(torch.ones_like(output))
    assert projection.grad is not None
    return output.detach().float(), projection.grad.float()
