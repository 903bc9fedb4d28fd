"""Products: exact on every library, rounded once, accumulated in place, leaving no setting changed.

Also from fp32 copies of the factors, which a CPU without instructions for bf16 or fp16 needs to be
fast.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.errors import UsageError
from megatron_lite.kernels import converted_products, matmul_library
from megatron_lite.kernels import products as module
from megatron_lite.kernels.attention import attention as attention_module
from megatron_lite.kernels.converted_products import computes_in_fp32
from megatron_lite.kernels.linear import accumulate_product
from megatron_lite.kernels.matmul_library import (
    SMALLEST_ONEDNN_PRODUCT,
    in_its_library,
    library_for,
    onednn_is_exact,
    use_library,
)
from megatron_lite.kernels.products import (
    FEWEST_ROWS,
    ProductAccumulation,
    add_product,
    affine,
    product,
    product_accumulation,
    scaled_product,
)
from tests.support.kernel_checks import empty_gradient, products_in_fp32, randn
from tests.support.memory_meters import PeakMeter

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
T, O, I = 256, 384, 320  # noqa: E741
assert T * O * I >= SMALLEST_ONEDNN_PRODUCT
needs_the_switch = pytest.mark.skipif(
    not onednn_is_exact(), reason="oneDNN rounds fp32 factors on this processor"
)


def precision() -> Any:
    return torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]


def close(ours: Tensor, exact: Tensor, tolerance: float = 2e-6) -> None:
    assert float((ours.double() - exact).abs().max()) <= tolerance * float(exact.abs().max())


def test_large_products_are_fp32_throughout() -> None:
    """Compare with fp64: bf16 factors would give an error of 4e-3."""
    x = randn(T, I)
    w = randn(O, I)
    b = randn(O)
    dy = randn(T, O)
    close(product(x, w), x.double() @ w.double().t())
    close(product(dy, w.t()), dy.double() @ w.double())
    close(affine(x.view(2, -1, I), w, b).view(T, O), x.double() @ w.double().t() + b.double())


def test_weight_gradients_are_written_then_added_in_place() -> None:
    weight = empty_gradient(randn(O, I))
    x, dy = randn(T, I), randn(T, O)
    address, exact = weight.main_grad.data_ptr(), dy.double().t() @ x.double()
    for count in (1, 2, 3):
        accumulate_product(weight, dy, x)
        close(weight.main_grad, count * exact)
    assert weight.main_grad.data_ptr() == address


@needs_the_switch
def test_the_switch_is_set_for_large_fp32_products_only_and_restored() -> None:
    use_library("onednn")
    before = precision()
    for factor, columns, switched in (
        (randn(T, I), O, True),
        (randn(T, I), 8, False),
        (randn(T, I).bfloat16(), O, False),
        (torch.empty(T, I, device="meta"), O, False),
    ):
        cost = factor.device, factor.dtype, factor.numel() * columns
        assert in_its_library(precision, *cost)() == ("bf16" if switched else before)
        assert precision() == before
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        product(randn(T, I), randn(O, I + 1))
    assert precision() == before


AMD, INTEL = (
    f"processor\t: 0\nvendor_id\t: {vendor}\n" for vendor in ("AuthenticAMD", "GenuineIntel")
)


@pytest.mark.parametrize(
    ("maker", "torch_uses", "onednn_has_avx512", "is_exact", "has_mkl", "expected"),
    [
        (AMD, "AVX512", True, True, True, "onednn"),
        (INTEL, "AVX512", True, True, True, "blas"),
        (None, "AVX512", True, True, True, "blas"),  # not Linux
        (AMD, "AVX2", True, True, True, "blas"),
        (AMD, "AVX512", False, True, True, "blas"),
        (AMD, "AVX512", True, False, True, "blas"),
        (AMD, "AVX512", True, True, False, "blas"),
    ],
)
def test_onednn_is_chosen_where_mkl_leaves_avx512_unused(
    maker: str | None,
    torch_uses: str,
    onednn_has_avx512: bool,
    is_exact: bool,
    has_mkl: bool,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By facts, never by a clock, which is not even read; the user's word counts first."""
    if maker is not None:
        (tmp_path / "cpuinfo").write_text(maker)
    monkeypatch.setattr(matmul_library, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: torch_uses)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    monkeypatch.setattr(matmul_library, "onednn_supports", lambda name: onednn_has_avx512)
    monkeypatch.setattr(matmul_library, "onednn_is_exact", lambda: is_exact)
    for clock in ("perf_counter", "monotonic", "time"):
        monkeypatch.setattr(time, clock, None)
    assert library_for("auto") == expected and library_for("blas") == "blas"
    if is_exact:
        assert library_for("onednn") == "onednn"
    else:
        with pytest.raises(UsageError, match="--cpu_matmul=onednn: oneDNN rounds fp32 factors"):
            library_for("onednn")


@needs_the_switch
def test_large_products_follow_the_chosen_library() -> None:
    before = precision()
    try:
        for name, during in (("blas", "ieee"), ("onednn", "bf16")):
            use_library(name)
            assert in_its_library(precision, CPU, torch.float32, T * I * O)() == during
    finally:
        use_library("blas" if before == "ieee" else "onednn")


@pytest.mark.parametrize("rounds_from", [1, 256])
def test_a_processor_that_rounds_is_noticed(
    rounds_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products stay with the BLAS where the processor's matrix units round fp32 factors, if only of
    large products."""

    class Rounding:
        fp32_precision = "none"

    class Backend:
        matmul = Rounding()

        def is_available(self) -> bool:
            return True

    real = torch.eye
    monkeypatch.setattr(torch.backends, "mkldnn", Backend())
    monkeypatch.setattr(torch, "eye", lambda n: real(n) * (1 - 2.0**-9 if n >= rounds_from else 1))
    onednn_is_exact.cache_clear()
    try:
        assert not onednn_is_exact() and Rounding.fp32_precision == "none"
    finally:
        onednn_is_exact.cache_clear()


def test_matrix_units_alone_rule_onednn_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX oneDNN rounds the factors of some shapes, which no product of one shape shows."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    onednn_is_exact.cache_clear()
    try:
        assert not onednn_is_exact()
    finally:
        onednn_is_exact.cache_clear()


def test_a_method_that_does_not_add_or_rounds_is_rejected() -> None:
    """The check that chooses how products reach fp32 accepts an exact method and rejects three
    wrong ones."""
    device = torch.device("cpu")

    def wide(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
        total.copy_(a.float() @ b.float() + (0 if first else total))

    def writes(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
        total.copy_(a.float() @ b.float())

    def adds(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
        total.add_(a.float() @ b.float())

    def rounds(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
        total.copy_((a @ b) + (0 if first else total))

    def is_exact(run: Callable[..., None], dtype: torch.dtype) -> bool:
        return module._is_exact(ProductAccumulation("", run), device, dtype, torch.float32)

    for dtype in (torch.bfloat16, torch.float16):
        assert is_exact(wide, dtype)
        assert not any(is_exact(run, dtype) for run in (writes, adds, rounds))
        with products_in_fp32(False):
            name = product_accumulation(device, dtype, torch.float32).name
        assert name == f"through {module.NAMES[dtype]} temporary"
    assert (
        product_accumulation(device, torch.float32, torch.float32).name == "by the product itself"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_added_in_fp32_on_a_gpu(dtype: torch.dtype) -> None:
    """PyTorch 2.11 writes and adds products in fp32 without a temporary, closer to fp64 than
    rounding first.

    Views of a flat buffer and inputs that are not contiguous work, too.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    method = product_accumulation(device, dtype, torch.float32)
    assert method.name == "by the product itself"
    for t, o, i in ((1024, 384, 640), (1000, 96, 40), (77, 51, 33)):
        generator = torch.Generator(device).manual_seed(t)
        grad = torch.randn(t, o + 8, device=device, generator=generator).to(dtype)[:, :o]
        input_ = torch.randn(i, t, device=device, generator=generator).to(dtype).t()
        weight = empty_gradient(torch.empty(o, i, dtype=dtype, device=device))
        flat = torch.full((3 * o * i,), torch.nan, device=device)
        weight.main_grad = flat[o * i : 2 * o * i].view(o, i)
        exact, narrow = grad.double().t() @ input_.double(), torch.zeros(o, i, device=device)
        accumulate_product(weight, grad, input_)
        contiguous = grad.contiguous(), input_.contiguous()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            accumulate_product(weight, *contiguous)
        assert torch.cuda.max_memory_allocated() == before
        for _ in range(4):
            narrow.add_(grad.t() @ input_)
        error, rounded = (
            (total.double() - 4 * exact).abs().max() for total in (weight.main_grad, narrow)
        )
        assert error < 8e-5 * exact.abs().max() and error < rounded / 4
        assert flat[: o * i].isnan().all() and flat[2 * o * i :].isnan().all()


def test_large_narrow_temporaries_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a few rows at a time are multiplied and added, with the values of one product."""
    monkeypatch.setattr(converted_products, "TEMPORARY_ELEMENTS", 50)  # 7 rows of 7
    grad, input_ = randn(5, 24).bfloat16(), randn(5, 7).bfloat16()
    weight = empty_gradient(torch.empty(24, 7, dtype=torch.bfloat16))
    once = (grad.t() @ input_).float()
    for count in (1, 2):
        with products_in_fp32(False):
            accumulate_product(weight, grad, input_)
        close(weight.main_grad, count * once.double(), 1e-6)


# -- from fp32 copies of the factors
# ---------------------------------------------------------------------------------


def whole(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Draw whole numbers from -8 to 8: any sum of their products is exact in fp32, so only
    roundings differ."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@halves
@pytest.mark.parametrize(
    "elements", [converted_products.TEMPORARY_ELEMENTS, 100], ids=["one block", "many blocks"]
)
@pytest.mark.parametrize(("t", "i", "o"), [(9, 5, 3), (31, 64, 33), (8, 1, 70)])
def test_products_from_fp32_copies_are_rounded_once(
    t: int, i: int, o: int, elements: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every product equals the exact one rounded to its dtype; an fp32 total is not rounded at all.

    Blocks, transposed and strided factors, biases and results in given memory change nothing.
    """
    monkeypatch.setattr(converted_products, "TEMPORARY_ELEMENTS", elements)
    monkeypatch.setattr(converted_products, "SMALLEST_BLOCK", 3)
    x = whole(t, i, dtype=dtype)
    weight = whole(o, i, dtype=dtype, seed=1)
    bias = whole(o, dtype=dtype, seed=2)
    dy = whole(t, o + 4, dtype=dtype, seed=3)[:, 4:]
    forward = x.double() @ weight.double().t()
    dx = dy.double() @ weight.double()
    dw = dy.double().t() @ x.double()
    with products_in_fp32(True):
        assert torch.equal(
            affine(x.view(1, t, i), weight, bias)[0], (forward + bias.double()).to(dtype)
        )
        assert torch.equal(affine(x, weight), forward.to(dtype))
        memory = torch.zeros(t, o + 2, dtype=dtype)
        assert product(x, weight, out=memory[:, :o]).data_ptr() == memory.data_ptr()
        assert torch.equal(memory[:, :o], forward.to(dtype)) and not memory[:, o:].any()
        assert torch.equal(product(dy, weight.t()), dx.to(dtype))
        scaled = scaled_product(product(x, weight), x, weight.t(), beta=2.0, alpha=-0.5)
        assert torch.equal(scaled, (2 * forward.to(dtype).double() - 0.5 * forward).to(dtype))
        wide = torch.full((2, o, i), torch.nan)[1]
        narrow = torch.full((o, i), torch.nan, dtype=dtype)
        for count in (1, 2):
            add_product(wide, dy.t(), x, count == 1)
            add_product(narrow, dy.t(), x, count == 1)
            assert torch.equal(wide, (count * dw).float())
        assert torch.equal(narrow, (dw.to(dtype).double() + dw).to(dtype))
    assert product_accumulation(CPU, torch.float32, torch.float32).name == "by the product itself"


def test_a_few_tokens_are_multiplied_without_converting_the_weight() -> None:
    """Reading a weight takes as long as multiplying one token with it: generation must not convert
    it every time."""
    weight = randn(512, 512).bfloat16()
    for rows in (1, FEWEST_ROWS - 1, FEWEST_ROWS):
        with products_in_fp32(True), PeakMeter() as meter:
            product(randn(rows, 512).bfloat16(), weight)
        assert (meter.peak >= 4 * weight.numel()) == (rows == FEWEST_ROWS)


def test_fp32_copies_take_three_blocks_at_most() -> None:
    x, weight = randn(3000, 2048).bfloat16(), randn(4000, 2048).bfloat16()
    out = torch.empty(3000, 4000, dtype=torch.bfloat16)
    with products_in_fp32(True), PeakMeter() as meter:
        product(x, weight, out=out)
    assert 0 < meter.peak <= 3 * 4 * converted_products.TEMPORARY_ELEMENTS


def test_attention_multiplies_halves_in_fp32_on_every_cpu() -> None:
    """Gradients in bf16 are near float64's, and have the same bits with and without instructions
    for bf16."""
    q, k, v, do = (
        torch.randn(2, 3, 70, 16, generator=torch.Generator().manual_seed(n)).bfloat16()
        for n in range(4)
    )
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True).backward(do.double())
    gradients = []
    for in_fp32 in (False, True):
        ours = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        with products_in_fp32(in_fp32):
            attention_module.attention(*ours, None, 0.0, None, backend="math").backward(do)
        gradients.append([tensor.grad for tensor in ours])
    for native, in_fp32_too, expected in zip(
        *gradients, [tensor.grad for tensor in exact], strict=True
    ):
        assert native is not None and in_fp32_too is not None and expected is not None
        assert torch.equal(native, in_fp32_too)
        assert float((native - expected).norm() / expected.norm()) < 0.004


REPORT = """
import json, torch
from megatron_lite.kernels.matmul_library import library_for
from megatron_lite.kernels.converted_products import computes_in_fp32
from megatron_lite.kernels.products import product
result = {"library": [library_for("auto")]}
for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
    a, b = (torch.randn(64, 96, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    rounded = torch.equal(product(a, b), (a.float() @ b.float().t()).to(dtype))
    result[name] = [computes_in_fp32(torch.device("cpu"), dtype), rounded]
print(json.dumps(result))
"""


def report_of(**variables: str) -> dict[str, tuple[Any, ...]]:
    """What a fresh process does: the library of fp32 products; by dtype, whether it computes in
    fp32, rounded once."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ONEDNN_", "ATEN_"))
    }
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", REPORT]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return {name: tuple(values) for name, values in json.loads(done.stdout).items()}


@pytest.mark.parametrize(
    "variables",
    [
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        pytest.param(
            {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, marks=pytest.mark.slow
        ),  # oneDNN calls bf16 supported there, and imitates it
    ],
    ids=lambda variables: variables["ONEDNN_MAX_CPU_ISA"],
)
def test_a_processor_without_the_instructions_is_noticed(variables: dict[str, str]) -> None:
    """The process of a CPU without instructions for bf16 and fp16 computes their products in fp32,
    bit for bit.

    Without AVX-512 the BLAS computes fp32 products, whoever made the processor.
    """
    report = report_of(**variables)
    assert report.pop("library") == ("blas",) or variables["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE"
    assert report == {"bf16": (True, True), "fp16": (True, True), "fp32": (False, True)}


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists()
    or " avx512_bf16 " not in Path("/proc/cpuinfo").read_text("ascii", "ignore"),
    reason="this processor has no instructions for bf16",
)
def test_a_processor_with_the_instructions_uses_them() -> None:
    assert not computes_in_fp32(CPU, torch.bfloat16) or "avx2" in os.environ.get(
        "ATEN_CPU_CAPABILITY", ""
    )


def test_only_a_cpu_computes_in_fp32() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert not any(computes_in_fp32(torch.device(name), dtype) for name in ("cuda:0", "meta"))
    assert not computes_in_fp32(CPU, torch.float32) and not computes_in_fp32(CPU, torch.float64)
