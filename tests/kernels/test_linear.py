"""The linear layer and its products: exact on every library, accumulated in place, leaving no setting changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from megatron_lite.kernels import linear as module
from megatron_lite.kernels.linear import (
    SMALLEST_ONEDNN_PRODUCT,
    ProductAccumulation,
    accumulate_product,
    affine,
    linear,
    onednn_is_exact,
    product,
    product_accumulation,
    through_onednn,
)
from megatron_lite.parameter import Parameter
from tests.support.kernel_checks import compare, dtypes, randn

T, O, I = 256, 384, 320  # noqa: E741
assert T * O * I >= SMALLEST_ONEDNN_PRODUCT
needs_the_switch = pytest.mark.skipif(not onednn_is_exact(), reason="oneDNN rounds fp32 factors on this processor")


def precision() -> Any:
    return torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]


def make_parameter(values: Tensor, grad_dtype: torch.dtype = torch.float32) -> Parameter:
    """Return a trainable parameter with garbage in its gradient buffer."""
    made = cast(Parameter, Parameter(values))
    made.main_grad = torch.full(values.shape, torch.nan, dtype=grad_dtype, device=values.device)
    made.gradient_is_empty = True
    return made


def close(ours: Tensor, exact: Tensor, tolerance: float = 2e-6) -> None:
    assert float((ours.double() - exact).abs().max()) <= tolerance * float(exact.abs().max())


@dtypes
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 1, 64, 33), (3, 17, 1, 1)])
def test_linear(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    b, s, i, o = shape
    compare(linear, functional.linear, [randn(b, s, i)], [randn(o, i), randn(o)], dtype)
    compare(linear, functional.linear, [randn(b, s, i)], [randn(o, i)], dtype)


@pytest.mark.parametrize("frozen", [(), ("bias",), ("weight",), ("weight", "bias")], ids=str)
def test_linear_keeps_its_input_for_a_trained_weight_only(frozen: tuple[str, ...]) -> None:
    kept: list[Tensor] = []
    weight, bias = (
        make_parameter(randn(*shape)).requires_grad_(name not in frozen)
        for name, shape in (("weight", (4, 5)), ("bias", (4,)))
    )
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        linear(randn(3, 5).requires_grad_(), cast(Parameter, weight), cast(Parameter, bias))
    assert [tuple(tensor.shape) for tensor in kept] == ([] if "weight" in frozen else [(3, 5)])


def test_large_products_are_fp32_throughout() -> None:
    """Compare with fp64: bf16 factors would give an error of 4e-3."""
    x, w, b, dy = randn(T, I), randn(O, I), randn(O), randn(T, O)
    close(product(x, w), x.double() @ w.double().t())
    close(product(dy, w.t()), dy.double() @ w.double())
    close(affine(x.view(2, -1, I), w, b).view(T, O), x.double() @ w.double().t() + b.double())


def test_weight_gradients_are_written_then_added_in_place() -> None:
    weight = make_parameter(randn(O, I))
    x, dy = randn(T, I), randn(T, O)
    address, exact = weight.main_grad.data_ptr(), dy.double().t() @ x.double()
    for count in (1, 2, 3):
        accumulate_product(weight, dy, x)
        close(weight.main_grad, count * exact)
    assert weight.main_grad.data_ptr() == address


@needs_the_switch
def test_the_switch_is_set_for_large_fp32_products_only_and_restored() -> None:
    before = precision()
    for factor, columns, switched in (
        (randn(T, I), O, True),
        (randn(T, I), 8, False),
        (randn(T, I).bfloat16(), O, False),
        (torch.empty(T, I, device="meta"), O, False),
    ):
        with through_onednn(factor, columns):
            assert precision() == ("bf16" if switched else before)
        assert precision() == before
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        product(randn(T, I), randn(O, I + 1))
    assert precision() == before


def test_a_processor_that_rounds_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products stay with the BLAS where the processor's matrix units round fp32 factors."""

    class Rounding:
        fp32_precision = "none"

    class Backend:
        matmul = Rounding()

        def is_available(self) -> bool:
            return True

    real = torch.eye
    monkeypatch.setattr(torch.backends, "mkldnn", Backend())
    monkeypatch.setattr(torch, "eye", lambda n: real(n) * (1 - 2.0**-9))
    onednn_is_exact.cache_clear()
    try:
        assert not onednn_is_exact() and Rounding.fp32_precision == "none"
    finally:
        onednn_is_exact.cache_clear()


def test_a_method_that_does_not_add_or_rounds_is_rejected() -> None:
    """The check that chooses how products reach fp32 accepts an exact method and rejects three wrong ones."""
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
        assert product_accumulation(device, dtype, torch.float32).name == f"through {module.NAMES[dtype]} temporary"
    assert product_accumulation(device, torch.float32, torch.float32).name == "by the product itself"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_added_in_fp32_on_a_gpu(dtype: torch.dtype) -> None:
    """PyTorch 2.11 writes and adds products in fp32 without a temporary, closer to fp64 than rounding first.

    Views of a flat buffer and inputs that are not contiguous work, too.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    method = product_accumulation(device, dtype, torch.float32)
    assert method.name == "by the product itself"
    for t, o, i in ((1024, 384, 640), (1000, 96, 40), (77, 51, 33)):
        generator = torch.Generator(device).manual_seed(t)
        grad = torch.randn(t, o + 8, device=device, generator=generator).to(dtype)[:, :o]
        input_ = torch.randn(i, t, device=device, generator=generator).to(dtype).t()
        weight = make_parameter(torch.empty(o, i, dtype=dtype, device=device))
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
        error, rounded = ((total.double() - 4 * exact).abs().max() for total in (weight.main_grad, narrow))
        assert error < 8e-5 * exact.abs().max() and error < rounded / 4
        assert flat[: o * i].isnan().all() and flat[2 * o * i :].isnan().all()


def test_large_narrow_temporaries_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a few rows at a time are multiplied and added, with the values of one product."""
    monkeypatch.setattr(module, "TEMPORARY_ELEMENTS", 50)  # 7 rows of 7
    grad, input_ = randn(5, 24).bfloat16(), randn(5, 7).bfloat16()
    weight = make_parameter(torch.empty(24, 7, dtype=torch.bfloat16))
    once = (grad.t() @ input_).float()
    for count in (1, 2):
        accumulate_product(weight, grad, input_)
        close(weight.main_grad, count * once.double(), 1e-6)
