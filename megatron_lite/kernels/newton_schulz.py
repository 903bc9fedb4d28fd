"""Orthogonalization by matrix products alone: U S V^T -> U S' V^T with all singular values S' near 1.

    X = G / ||G||        A = X X^T        X = a X + (b A + c A^2) X, a few times

in bf16, transposed if that makes A smaller. The coefficients of the quintic are from Jordan et al. (2024, "Muon: An
optimizer for hidden layers in neural networks"). They maximize the slope at zero, so five steps lift small
singular values quickly but leave all between about 0.7 and 1.2 instead of exactly at 1. Operations and their order
match torch.optim.Muon: the bits are the same if the same library multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.kernels.products import product, scaled_product

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return the bf16 matrix (m, n) orthogonalized in `steps` steps, in new memory; zeros stay zeros.

    Temporaries: two matrices of this size and two square ones of the smaller dimension.
    """
    assert matrix.dtype == torch.bfloat16 and matrix.dim() == 2, (matrix.dtype, matrix.shape)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if is_tall else matrix
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = product(x, x)
        x = scaled_product(x, scaled_product(gram, gram, gram, beta=b, alpha=c), x, beta=a, alpha=1.0)
    return x.t() if is_tall else x


def orthogonalize_flops(rows: int, columns: int, steps: int) -> int:
    """Return the FLOPs of `orthogonalize`."""
    small, large = sorted((rows, columns))
    return steps * 2 * small * small * (2 * large + small)
