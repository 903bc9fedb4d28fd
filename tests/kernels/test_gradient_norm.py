"""The sum of squares against fp64, for shards and values of all sizes, with the same bits every
time."""

import pytest
import torch
from torch import Tensor

from megatron_lite.kernels.gradient_norm import BLOCK, PIECE_NUMEL, squared_norms
from tests.support.kernel_checks import DEVICE, DTYPES, IMPLEMENTATIONS, covering, dtypes

SIZES = [(1,), (63, BLOCK), (PIECE_NUMEL,), (PIECE_NUMEL + 1, 5, 2 * PIECE_NUMEL - 3)]


def shards(sizes: tuple[int, ...], scale: float, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, generator=generator).double() * scale).to(dtype).to(DEVICE)
        for size in sizes
    ]


def exact(tensors: list[Tensor]) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors))


@pytest.mark.parametrize(
    ("sizes", "dtype", "scale"), covering(SIZES, DTYPES, ["usual", "tiny", "huge"])
)
def test_the_kernel_loses_nothing_and_overflows_nowhere(
    sizes: tuple[int, ...], scale: str, dtype: torch.dtype
) -> None:
    """As exact as fp64, even where fp32 squares would be zero or infinite, and for mixed shards."""
    tiny, huge = (1e-6, 1e4) if dtype == torch.float16 else (1e-38, 1e30)
    tensors = [
        *shards(sizes, {"usual": 1.0, "tiny": tiny, "huge": huge}[scale], dtype),
        *shards((3,), 1.0, dtype),
    ]
    (total,) = squared_norms([tensors], tensors[0].device, triton=True)
    assert total.shape == () and total.dtype == torch.float64
    assert float(total) == pytest.approx(exact(tensors), rel=1e-13)
    assert torch.equal(squared_norms([tensors], tensors[0].device, triton=True)[0], total), (
        "different bits the second time"
    )


@dtypes
def test_the_reference_is_exact_to_fp32_and_survives_loss_scales(dtype: torch.dtype) -> None:
    """A million small squares are not lost next to a large one, and scaled gradients do not
    overflow."""
    for scale in (1.0, 1e-6, 1e4) if dtype == torch.float16 else (1.0, 1e-15, 1e15):
        tensors = shards((2**20 + 77, 1000), scale, dtype)
        tensors[0][:PIECE_NUMEL] *= 5.0
        assert float(squared_norms([tensors], tensors[0].device)) == pytest.approx(
            exact(tensors), rel=1e-6
        )


@pytest.mark.parametrize(
    ("dtype", "poison", "triton"),
    covering(DTYPES, [torch.inf, -torch.inf, torch.nan], IMPLEMENTATIONS),
)
def test_one_bad_element_shows(dtype: torch.dtype, poison: float, triton: bool) -> None:
    tensors = shards((100, PIECE_NUMEL + 10), 1.0, dtype)
    tensors[1][-1] = poison
    assert not torch.isfinite(squared_norms([tensors], tensors[0].device, triton))


def test_memory_behind_a_shard_is_not_read() -> None:
    memory = torch.full((2 * PIECE_NUMEL,), torch.nan, device=DEVICE)
    shard = memory[: PIECE_NUMEL + 3].fill_(2.0)
    assert float(squared_norms([[shard]], shard.device, triton=True)) == 4.0 * (PIECE_NUMEL + 3)
