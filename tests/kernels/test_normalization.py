"""Norms of a tensor and of a sum against their formulas in float64, and the memory that they
keep."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.kernels.normalization import LARGEST_ROW, Kind, _resident_programs, add_norm
from megatron_lite.parameter import Parameter
from tests.support.kernel_checks import (
    DEVICE,
    DTYPES,
    IMPLEMENTATIONS,
    close,
    compare,
    covering,
    dtypes,
    empty_gradient,
    implementations,
    needs_triton,
    randn,
    saved_tensors,
)

EPS = 1e-5
KINDS = ("layer", "rms")
kinds = pytest.mark.parametrize("kind", KINDS)
# One row, rows for several rounds of all programs, columns of one block and of more, odd and even.
SHAPES = [(1, 2), (2, 3, 5), (70, 33), (1, 7, 128), (30, 300), (2, 1030)]


def formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None:
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, EPS)
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def kind_of(bias: Tensor | None) -> Kind:
    return Kind(EPS, centered=bias is not None)


def values_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all inputs: summands, weights and incoming gradients."""
    h = shape[-1]
    shapes = {
        "hidden": shape,
        "branch": shape,
        "weight": (h,),
        "bias": (h,),
        "grad_sum": shape,
        "grad": shape,
    }
    made = {
        name: randn(*shapes[name], seed=seed).to(DEVICE, dtype) for seed, name in enumerate(shapes)
    }
    return (
        made if kind == "layer" else {name: value for name, value in made.items() if name != "bias"}
    )


def run(
    values: dict[str, Tensor], triton: bool, grad_dtype: torch.dtype | None, times: int = 1
) -> dict[str, Tensor]:
    """Return sum, norm and all gradients after a number of passes."""
    hidden, branch = (values[name].clone().requires_grad_() for name in ("hidden", "branch"))
    buffers = dict(grad_dtype=grad_dtype or torch.float32, trained=grad_dtype is not None)
    weight, bias = (
        empty_gradient(values[name].clone(), **buffers) if name in values else None
        for name in ("weight", "bias")
    )
    for _ in range(times):
        total, output = add_norm(
            hidden, branch * 1, cast(Parameter, weight), bias, kind_of(bias), triton
        )
        torch.autograd.backward([total, output], [values["grad_sum"], values["grad"]])
    results = {"sum": total, "output": output, "hidden": hidden.grad, "branch": branch.grad}
    if grad_dtype is not None:
        results |= {
            name: p.main_grad for name, p in (("weight", weight), ("bias", bias)) if p is not None
        }
    return cast(dict[str, Tensor], results)


def exact(values: dict[str, Tensor], times: int = 1) -> dict[str, Tensor]:
    """Compute the same by autograd in fp64."""
    leaves = {
        name: t.double().requires_grad_()
        for name, t in values.items()
        if not name.startswith("grad")
    }
    total = leaves["hidden"] + leaves["branch"]
    output = formula(total, leaves["weight"], leaves.get("bias"))
    torch.autograd.backward([total, output], [values["grad_sum"].double(), values["grad"].double()])
    return {"sum": total, "output": output} | {
        name: times * cast(Tensor, t.grad) for name, t in leaves.items()
    }


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "triton"), covering(KINDS, SHAPES, DTYPES, IMPLEMENTATIONS)
)
def test_norms(kind: str, shape: tuple[int, ...], dtype: torch.dtype, triton: bool) -> None:
    h = shape[-1]
    weights = [randn(h, seed=3).to(DEVICE), randn(h, seed=4).to(DEVICE)][
        : 2 if kind == "layer" else 1
    ]
    compare(
        lambda x, w, b=None: add_norm(x, None, w, b, kind_of(b), triton)[1],
        lambda x, w, b=None: formula(x, w, b),
        [randn(*shape).to(DEVICE)],
        weights,
        dtype,
    )


@implementations
@kinds
def test_gradients_in_a_buffer_of_bf16(kind: str, triton: bool) -> None:
    values = values_of(kind, (5, 33), torch.bfloat16)
    reference = exact(values, times=2)
    for name, result in run(values, triton, torch.bfloat16, times=2).items():
        assert result.dtype == torch.bfloat16
        close(result, reference[name], torch.bfloat16)


@implementations
@kinds
def test_frozen_weights_change_no_gradient_of_the_summands(kind: str, triton: bool) -> None:
    values = values_of(kind, (5, 33), torch.float32)
    whole, part = run(values, triton, torch.float32), run(values, triton, None)
    assert part.keys() == {"sum", "output", "hidden", "branch"}
    assert all(torch.equal(result, whole[name]) for name, result in part.items())


@implementations
@kinds
def test_each_output_may_be_left_unused(kind: str, triton: bool) -> None:
    """Tensors that need no gradient get none, such as a frozen embedding below the first norm."""
    values = values_of(kind, (4, 6), torch.float32)
    for used, grad in ((0, "grad_sum"), (1, "grad")):
        hidden, branch = values["hidden"].clone(), values["branch"].clone().requires_grad_()
        weight = empty_gradient(values["weight"])
        bias = None if kind == "rms" else empty_gradient(values["bias"], trained=False)
        add_norm(hidden, branch * 1, weight, bias, kind_of(bias), triton)[used].backward(
            values[grad]
        )
        zero = torch.zeros_like(values["grad"])
        reference = exact(values | {name: zero for name in ("grad_sum", "grad") if name != grad})
        assert hidden.grad is None and branch.grad is not None
        close(branch.grad, reference["branch"], torch.float32)
        assert weight.gradient_is_empty == (used == 0)


@implementations
@kinds
def test_weights_of_zero_keep_their_gradient(kind: str, triton: bool) -> None:
    """A weight of exactly zero must still learn, which dividing the output by it would prevent."""
    values = values_of(kind, (4, 6), torch.float32)
    values["weight"].zero_()
    reference = exact(values)
    for name, result in run(values, triton, torch.float32).items():
        close(result, reference[name], torch.float32)


@implementations
@kinds
def test_statistics_are_in_fp32(kind: str, triton: bool) -> None:
    """Squares of large fp16 values do not overflow, and many small bf16 summands are not lost."""
    large = values_of(kind, (3, 50), torch.float16)
    large["hidden"] *= 3000
    many = values_of(kind, (300, 20), torch.bfloat16)
    many["grad"].fill_(1.0).add_(many["grad_sum"], alpha=0.01)
    for values, tolerance in ((large, 2e-3), (many, 1e-2)):
        reference = exact(values)
        for name, result in run(values, triton, torch.float32).items():
            error = (result.double() - reference[name]).abs().max() / reference[name].abs().max()
            assert error < tolerance, name


@implementations
@kinds
def test_inputs_that_are_not_contiguous(kind: str, triton: bool) -> None:
    """Transposed or expanded summands and gradients give the bits of contiguous ones."""
    values = values_of(kind, (6, 4, 10), torch.float32)
    values["grad_sum"] = values["grad_sum"][:1].expand(6, 4, 10)
    other = {
        name: v.transpose(0, 1).contiguous().transpose(0, 1) if v.dim() > 1 else v
        for name, v in values.items()
    }
    values = {name: value.contiguous() for name, value in values.items()}
    ours = run(other, triton, torch.float32)
    assert all(
        torch.equal(result, ours[name])
        for name, result in run(values, triton, torch.float32).items()
    )


@implementations
@kinds
def test_only_the_sum_is_kept_in_the_memory_of_the_branch(kind: str, triton: bool) -> None:
    """Keep the sum, or the input without a branch, and one or two numbers per row."""
    values = values_of(kind, (2, 3, 50), torch.bfloat16)
    weight = empty_gradient(values["weight"])
    bias = None if kind == "rms" else empty_gradient(values["bias"])
    for branch in (values["branch"].clone().requires_grad_() * 1, None):
        hidden = values["hidden"].clone().requires_grad_()
        with saved_tensors() as kept:
            total, _ = add_norm(hidden, branch, weight, bias, kind_of(bias), triton)
        memory = (hidden if branch is None else branch).data_ptr()
        assert total.data_ptr() == memory and memory in {tensor.data_ptr() for tensor in kept}
        assert sum(tensor.nbytes for tensor in kept) == 2 * 300 + 6 * 4 * (
            1 if kind == "rms" else 2
        )


@needs_triton
@kinds
def test_kernels_give_the_same_bits_every_time(kind: str) -> None:
    values = values_of(kind, (70, 33), torch.float32)
    first, second = (run(values, True, torch.float32) for _ in range(2))
    assert all(torch.equal(result, second[name]) for name, result in first.items())


@pytest.mark.slow
@dtypes
@implementations
@kinds
@pytest.mark.parametrize("h", [8192, 16384, 20001, LARGEST_ROW, LARGEST_ROW + 1])
def test_wide_rows(kind: str, h: int, dtype: torch.dtype, triton: bool) -> None:
    """Rows up to the widest that a kernel takes, and wider ones, which the reference handles."""
    values = values_of(kind, (3, h), dtype)
    reference = exact(values)
    for name, result in run(values, triton, torch.float32).items():
        close(result, reference[name], dtype)


def test_programs_of_the_backward_kernel_fill_the_device_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 warps a multiprocessor unless a caller asks for others; at least one program each."""
    device = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    x: Any = SimpleNamespace(device=torch.device("cuda"), is_meta=False)
    counts = [
        _resident_programs(x, warps, most) // 132
        for warps, most in ((8, 16), (8, 32), (16, 16), (32, 16))
    ]
    assert counts == [2, 4, 1, 1]
