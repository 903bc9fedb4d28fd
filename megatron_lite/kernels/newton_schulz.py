"""A matrix with all singular values moved to around 1: U S V^T -> U S' V^T, by products of matrices alone.

    X = G / ||G||        A = X X^T        X = a X + (b A + c A^2) X, a few times

in bf16, on the side on which A is smaller. The quintic's coefficients are those of Jordan et al. (2024, "Muon: An
optimizer for hidden layers in neural networks"): chosen for the steepest slope at zero, so that five steps lift small
singular values far, and leave all of them between about 0.7 and 1.2 instead of at 1 exactly. Operations and their order
are those of torch.optim.Muon: the same bits come out where the same library multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """The matrix (m, n) in bf16, orthogonalized by a number of steps, in new memory; a matrix of zeros stays one.

    For a moment it takes two matrices of that size, and two that are as large as the smaller dimension squared.
    """
    assert matrix.dtype == torch.bfloat16 and matrix.dim() == 2, (matrix.dtype, matrix.shape)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if is_tall else matrix
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if is_tall else x


def orthogonalize_flops(rows: int, columns: int, steps: int) -> int:
    """Multiplications and additions that it takes."""
    small, large = sorted((rows, columns))
    return steps * 2 * small * small * (2 * large + small)
