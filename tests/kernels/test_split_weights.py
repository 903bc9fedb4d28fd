"""Copies and sums with a change of dtype equal torch's bit for bit and write nothing behind the end."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megatron_lite.kernels.split_weights import BLOCK, add, copy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# No denormal bf16 numbers: the interpreter misreads them.
SPECIAL = [0.0, -0.0, 1.2e-38, -6e-8, 65504.0, 65519.9, 65520.0, 3.39e38, 3.4e38, torch.inf, -torch.inf, torch.nan]
PAIRS = list(itertools.product(DTYPES, DTYPES))


# The interpreter computes in NumPy, which warns of overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def values(numel: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return values of all sizes, including ties of bf16 and, if there is room, the special ones."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(numel, generator=generator) * torch.exp(torch.randn(numel, generator=generator) * 8)
    bits = drawn.view(torch.int32)
    bits[::3] = (bits[::3] & -0x10000) | 0x8000
    if numel > len(SPECIAL):
        drawn[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return drawn.to(dtype).to(DEVICE)


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Whether all bits are equal, apart from the payload of NaN."""
    assert ours.dtype == theirs.dtype
    integers = torch.int32 if ours.itemsize == 4 else torch.int16
    return bool(((ours.view(integers) == theirs.view(integers)) | (ours.isnan() & theirs.isnan())).all())


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("numel", [1, 63, BLOCK, 3 * BLOCK + 17])
def test_copies_and_sums_are_those_of_torch(pair: tuple[torch.dtype, torch.dtype], numel: int, triton: bool) -> None:
    target_dtype, source_dtype = pair
    source = values(numel, 0, source_dtype)
    memory = torch.full((numel + 7,), 3.0, dtype=target_dtype, device=DEVICE)
    copy(memory[:numel], source, triton)
    assert same_bits(memory[:numel], source.to(target_dtype))
    more = values(numel, 1, source_dtype)
    exact = (memory[:numel].float() + more.float()).to(target_dtype)
    add(memory[:numel], more, triton)
    assert same_bits(memory[:numel], exact)
    assert (memory[numel:] == 3.0).all(), "memory behind the end changed"
    assert same_bits(more, values(numel, 1, source_dtype)), "the source changed"


def test_every_tie_is_rounded_to_the_even_neighbour() -> None:
    """fp32 with every upper half, and lower halves around zero, ties and carries, into bf16."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    low = torch.tensor([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    source = (high[:, None] | low).flatten().to(DEVICE).view(torch.float32)
    target = torch.empty(source.shape, dtype=torch.bfloat16, device=DEVICE)
    copy(target, source, triton=True)
    assert same_bits(target, source.bfloat16())


def test_nothing_of_size_zero_is_copied() -> None:
    empty = torch.empty(0, device=DEVICE)
    copy(empty, empty.bfloat16(), triton=True)
    add(empty, empty.bfloat16(), triton=True)
