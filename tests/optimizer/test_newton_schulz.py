"""Orthogonalization equals torch.optim.Muon's bit for bit and brings singular values near 1."""

from __future__ import annotations

import pytest
import torch
from torch.optim import _muon

from megatron_lite.optimizer.rules.muon import COEFFICIENTS, SMALLEST_NORM, orthogonalize, orthogonalize_flops
from tests.support.kernel_checks import products_in_fp32
from tests.support.memory_meters import PeakMeter

SHAPES = [(48, 48), (32, 128), (128, 32), (96, 36), (1, 7), (7, 1), (1, 1), (5, 3)]


def draw(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_are_those_of_torch(shape: tuple[int, int], steps: int) -> None:
    for scale in (1e-6, 1.0, 1e6):
        matrix = draw(shape) * scale
        before = matrix.bfloat16()
        with products_in_fp32(False):
            ours = orthogonalize(before, steps)
        theirs = _muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, steps, SMALLEST_NORM)
        assert torch.equal(ours, theirs) and ours.shape == shape
        assert torch.equal(before, matrix.bfloat16()), "the input changed"


@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_end_near_one_and_directions_stay(shape: tuple[int, int], in_fp32: bool) -> None:
    """Start from singular values between 0.1 and 1 of the largest; rounding to bf16 costs a few percent."""
    u, _, v = torch.linalg.svd(draw(shape).double(), full_matrices=False)
    values = torch.linspace(1.0, 0.1, min(shape), dtype=torch.float64)
    with products_in_fp32(in_fp32):
        result = orthogonalize((100 * u @ torch.diag(values) @ v).bfloat16(), 5).double()
    coordinates = u.t() @ result @ v.t()
    found = coordinates.diagonal()
    assert ((found > 0.6) & (found < 1.3)).all(), found
    assert (coordinates - torch.diag(found)).abs().max() < 0.05


def test_zeros_stay_zeros_and_nothing_finite_overflows() -> None:
    assert not orthogonalize(torch.zeros(8, 12, dtype=torch.bfloat16), 5).any()
    assert orthogonalize(torch.full((8, 12), 1e30, dtype=torch.bfloat16), 5).isfinite().all()


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_temporaries_are_as_large_as_documented(shape: tuple[int, int]) -> None:
    """At most 4 (m n + m^2) bytes with m <= n, as docs/multi_stage.md says."""
    small, large = sorted(shape)
    matrix = draw(shape).bfloat16()
    with products_in_fp32(False), PeakMeter() as meter:
        orthogonalize(matrix, 5)
    assert meter.peak == 4 * (small * large + small * small)


def test_the_work_counts_every_product() -> None:
    """X X^T, A A and (b A + c A^2) X of 3 x 7 matrices: 2 * (3*7*3 + 3*3*3 + 3*3*7) a step, the same for 7 x 3."""
    assert orthogonalize_flops(3, 7, 4) == orthogonalize_flops(7, 3, 4) == 4 * 2 * (63 + 27 + 63)
