"""Functions that kernels share: a change of dtype equals torch's bit for bit."""

import pytest
import torch
from torch import Tensor

from megatron_lite.kernels.triton_support import cdiv, jit, narrow, tl
from tests.support.kernel_checks import DEVICE, needs_triton

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# No denormal bf16 numbers: the interpreter misreads them.
SPECIAL = [
    0.0,
    -0.0,
    1.2e-38,
    -6e-8,
    65504.0,
    65519.9,
    65520.0,
    3.39e38,
    3.4e38,
    torch.inf,
    -torch.inf,
    torch.nan,
]
BLOCK = 1024


# The interpreter computes in NumPy, which warns of overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def values(numel: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return values of all sizes, including ties of bf16 and, if there is room, the special
    ones."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(numel, generator=generator) * torch.exp(
        torch.randn(numel, generator=generator) * 8
    )
    bits = drawn.view(torch.int32)
    bits[::3] = (bits[::3] & -0x10000) | 0x8000
    if numel > len(SPECIAL):
        drawn[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return drawn.to(dtype).to(DEVICE)


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Whether all bits are equal, apart from the payload of NaN."""
    assert ours.dtype == theirs.dtype
    integers = torch.int32 if ours.itemsize == 4 else torch.int16
    return bool(
        ((ours.view(integers) == theirs.view(integers)) | (ours.isnan() & theirs.isnan())).all()
    )


@jit
def _narrow_kernel(target_ptr, source_ptr, numel, BLOCK: tl.constexpr) -> None:  # noqa: N803
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    values = tl.load(source_ptr + offsets, mask=mask).to(tl.float32)
    tl.store(target_ptr + offsets, narrow(values, target_ptr.dtype.element_ty), mask=mask)


@needs_triton
def test_kernels_fuse_products_and_sums_whatever_the_version_of_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A changed default would change results."""
    launched: list[dict[str, object]] = []
    monkeypatch.setattr(
        type(_narrow_kernel), "run", lambda *_, **options: launched.append(options), raising=False
    )
    narrowed(torch.ones(1, device=DEVICE), torch.bfloat16)
    assert [options["enable_fp_fusion"] for options in launched] == [True]


def narrowed(source: Tensor, dtype: torch.dtype) -> Tensor:
    """Return fp32 values in another dtype, converted by a kernel."""
    target = torch.empty(source.shape, dtype=dtype, device=source.device)
    _narrow_kernel[(cdiv(source.numel(), BLOCK),)](target, source, source.numel(), BLOCK)
    return target


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 63, BLOCK, 3 * BLOCK + 17])
def test_narrow_rounds_as_torch_does(dtype: torch.dtype, numel: int) -> None:
    """Values of all sizes, ties, infinities and NaN, into every dtype of training."""
    source = values(numel, 0, torch.float32)
    assert same_bits(narrowed(source, dtype), source.to(dtype))


@needs_triton
def test_every_tie_is_rounded_to_the_even_neighbour() -> None:
    """fp32 with every upper half, and lower halves around zero, ties and carries, into bf16."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    low = torch.tensor([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    source = (high[:, None] | low).flatten().to(DEVICE).view(torch.float32)
    assert same_bits(narrowed(source, torch.bfloat16), source.bfloat16())
