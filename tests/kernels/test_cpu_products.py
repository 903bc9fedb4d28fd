"""fp32 products on a CPU: exact through oneDNN, in place, and without a trace in the process's settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.kernels import cpu_products
from megatron_lite.kernels.cpu_products import SMALLEST, onednn_is_exact, through_onednn
from megatron_lite.kernels.linear import accumulate_product, affine, product
from megatron_lite.parameter import Parameter

T, O, I = 256, 384, 320  # noqa: E741
assert T * O * I >= SMALLEST
needs_the_switch = pytest.mark.skipif(not onednn_is_exact(), reason="oneDNN rounds fp32 factors on this processor")


def precision() -> Any:
    return torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(ours: Tensor, exact: Tensor) -> None:
    assert float((ours.double() - exact).abs().max()) <= 2e-6 * float(exact.abs().max())


def test_large_products_are_fp32_throughout() -> None:
    """Against fp64: with bf16 factors the error would be 4e-3."""
    x, w, b, dy = draw(T, I), draw(O, I), draw(O), draw(T, O)
    close(product(x, w), x.double() @ w.double().t())
    close(product(dy, w.t()), dy.double() @ w.double())
    close(affine(x.view(2, -1, I), w, b).view(T, O), x.double() @ w.double().t() + b.double())


def test_weight_gradients_are_written_then_added_in_place() -> None:
    weight = Parameter(draw(O, I))
    weight.main_grad, weight.gradient_is_empty = torch.full((O, I), torch.nan), True
    x, dy = draw(T, I), draw(T, O)
    address, exact = weight.main_grad.data_ptr(), dy.double().t() @ x.double()
    for count in (1, 2, 3):
        accumulate_product(weight, dy, x)
        close(weight.main_grad, count * exact)
    assert weight.main_grad.data_ptr() == address


@needs_the_switch
def test_the_switch_is_set_for_large_fp32_products_only_and_set_back() -> None:
    before = precision()
    for factor, columns, switched in (
        (draw(T, I), O, True),
        (draw(T, I), 8, False),
        (draw(T, I).bfloat16(), O, False),
        (torch.empty(T, I, device="meta"), O, False),
    ):
        with through_onednn(factor, columns):
            assert precision() == ("bf16" if switched else before)
        assert precision() == before
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        product(draw(T, I), draw(O, I + 1))
    assert precision() == before


def test_a_processor_that_rounds_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the matrix units of some processors do: then products stay with the BLAS."""

    class Rounding:
        fp32_precision = "none"

    class Backend:
        matmul = Rounding()

        def is_available(self) -> bool:
            return True

    real = torch.eye
    monkeypatch.setattr(torch.backends, "mkldnn", Backend())
    monkeypatch.setattr(torch, "eye", lambda n: real(n) * (1 - 2.0**-9))
    cpu_products.onednn_is_exact.cache_clear()
    try:
        assert not onednn_is_exact() and Rounding.fp32_precision == "none"
    finally:
        cpu_products.onednn_is_exact.cache_clear()
