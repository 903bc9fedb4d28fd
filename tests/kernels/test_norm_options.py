"""Norms without weights, with zero-centered weights, of a wider sum and of heads, against
float64."""

from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.distributed.rank_group import alone
from megatron_lite.kernels.heads import HeadKind, split_heads
from megatron_lite.kernels.normalization import Kind, Weights, add_norm
from megatron_lite.parameter import Parameter
from tests.support.kernel_checks import (
    DEVICE,
    DTYPES,
    IMPLEMENTATIONS,
    close,
    covering,
    empty_gradient,
    implementations,
    randn,
    rotary_table,
    saved_tensors,
)

EPS = 1e-3  # large enough to reveal a wrong one
kinds = pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])
WEIGHTED = ("none", "no bias", "around one", "around zero")


def parameters(
    centered: bool, weighted: str, size: int, dtype: torch.dtype
) -> list[Parameter | None]:
    """Return weight and bias with garbage in their gradient buffers; None for those that the norm
    does not have."""
    made: list[Parameter | None] = [None, None]
    for i in range(0 if weighted == "none" else 2 if centered and weighted != "no bias" else 1):
        made[i] = empty_gradient(randn(size, seed=5 + i).to(DEVICE, dtype))
    return made


def doubles(given: list[Parameter | None]) -> list[Tensor | None]:
    return [None if one is None else one.detach().double().requires_grad_() for one in given]


def formula(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: Kind) -> Tensor:
    scale = None if weight is None else weight + 1 if kind.zero_centered else weight
    if kind.centered:
        return functional.layer_norm(x, x.shape[-1:], scale, bias, kind.eps)
    return functional.rms_norm(x, x.shape[-1:], scale, kind.eps)


def check_gradients(
    ours: list[Parameter | None], exact: list[Tensor | None], dtype: torch.dtype
) -> None:
    for mine, reference in zip(ours, exact, strict=True):
        if mine is not None and reference is not None:
            close(mine.main_grad, cast(Tensor, reference.grad), dtype)


@pytest.mark.parametrize(
    ("wide", "weighted", "centered", "dtype", "triton"),
    covering([False, True], WEIGHTED, [True, False], DTYPES, IMPLEMENTATIONS),
)
def test_norm_of_a_sum(
    wide: bool, weighted: str, centered: bool, dtype: torch.dtype, triton: bool
) -> None:
    """The sum has the dtype of the stream, the norm that of the branch, every gradient that of its
    tensor."""
    shape, stream = (5, 7, 33), torch.float32 if wide else dtype
    hidden, grad_sum = (randn(*shape, seed=i).to(DEVICE, stream) for i in (0, 1))
    branch, grad = (randn(*shape, seed=i).to(DEVICE, dtype) for i in (2, 3))
    ours = parameters(centered, weighted, 33, dtype)
    exact, kind = doubles(ours), Kind(EPS, centered, zero_centered=weighted == "around zero")
    exact_hidden, exact_branch = (tensor.double().requires_grad_() for tensor in (hidden, branch))
    total = exact_hidden + exact_branch
    output = formula(total, *exact, kind)
    torch.autograd.backward([total, output], [grad_sum.double(), grad.double()])

    hidden.requires_grad_()
    branch.requires_grad_()
    our_total, our_output = add_norm(hidden, branch * 1, *ours, kind, triton, dtype=dtype)
    torch.autograd.backward([our_total, our_output], [grad_sum, grad])
    assert (our_total.dtype, our_output.dtype) == (stream, dtype)
    close(our_total, total, stream)
    close(our_output, output, dtype)
    assert hidden.grad is not None and branch.grad is not None
    assert (hidden.grad.dtype, branch.grad.dtype) == (stream, dtype)
    close(hidden.grad, cast(Tensor, exact_hidden.grad), stream)
    close(branch.grad, cast(Tensor, exact_branch.grad), dtype)
    check_gradients(ours, exact, dtype)


@implementations
@kinds
def test_only_a_wide_sum_is_kept(centered: bool, triton: bool) -> None:
    """An fp32 stream with bf16 branches keeps the new sum: neither the branch nor the previous
    stream."""
    hidden, branch = (randn(6, 50, seed=i).to(DEVICE).requires_grad_() for i in (0, 1))
    narrow = branch.to(torch.bfloat16)
    before = hidden.detach().clone(), narrow.detach().clone()
    with saved_tensors() as kept:
        total, _ = add_norm(
            hidden, narrow, None, None, Kind(EPS, centered), triton, dtype=torch.bfloat16
        )
    assert torch.equal(hidden, before[0]) and torch.equal(narrow, before[1])
    assert sum(tensor.nbytes for tensor in kept) == 4 * 300 + 6 * 4 * (2 if centered else 1)
    assert total.data_ptr() in {tensor.data_ptr() for tensor in kept}


@implementations
def test_each_output_of_a_wide_sum_may_be_left_unused(triton: bool) -> None:
    grad_sum, grad = randn(4, 6, seed=8).to(DEVICE), randn(4, 6, seed=9).to(DEVICE, torch.bfloat16)
    for used, incoming in ((0, grad_sum), (1, grad)):
        hidden, branch = (randn(4, 6, seed=i).to(DEVICE).requires_grad_() for i in (0, 1))
        narrow = branch.to(torch.bfloat16).detach().requires_grad_()
        outputs = add_norm(
            hidden, narrow * 1, None, None, Kind(EPS, False), triton, dtype=torch.bfloat16
        )
        outputs[used].backward(incoming)
        exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, narrow)]
        total = exact[0] + exact[1]
        (total if used == 0 else formula(total, None, None, Kind(EPS, False))).backward(
            incoming.double()
        )
        for ours, reference in zip((hidden.grad, narrow.grad), exact, strict=True):
            close(cast(Tensor, ours), cast(Tensor, reference.grad), torch.bfloat16)


# Samples, positions, query heads, key heads, channels: one of everything, odd numbers, several
# programs.
HEADS = [(1, 1, 1, 1, 2), (2, 3, 3, 1, 6), (1, 5, 4, 2, 20), (2, 11, 6, 3, 128)]


def exact_heads(
    projection: Tensor,
    shape: tuple[int, ...],
    table: tuple[Tensor, Tensor] | None,
    exact: list[Tensor | None],
    kind: HeadKind,
) -> list[Tensor]:
    b, s, n, g, d = shape
    parts = projection.view(b, s, n + 2 * g, d).split([n, g, g], dim=2)
    made = []
    for part, *pair in ((parts[0], *exact[:2]), (parts[1], *exact[2:])):
        x = formula(part if kind.group is None else part.flatten(2), *pair, kind).view_as(part)
        if table is not None:
            turn = torch.complex(table[0].double(), table[1].double())[:s, None]
            turned = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn
            x = torch.cat([turned.real, turned.imag], dim=-1)
        made.append(x)
    return [part.transpose(1, 2) for part in (*made, parts[2])]


@pytest.mark.parametrize(
    ("shape", "weighted", "centered", "together", "rotated", "dtype", "triton"),
    covering(HEADS, WEIGHTED, [True, False], [True, False], [True, False], DTYPES, IMPLEMENTATIONS),
)
def test_norms_of_heads(
    shape: tuple[int, ...],
    weighted: str,
    centered: bool,
    together: bool,
    rotated: bool,
    dtype: torch.dtype,
    triton: bool,
) -> None:
    """Queries and keys are normalized by separate weights, by head or together, then rotated;
    values do not change; check every gradient."""
    b, s, n, g, d = shape
    sizes = (n * d, g * d) if together else (d, d)
    ours = [one for size in sizes for one in parameters(centered, weighted, size, dtype)]
    for one in ours[2:]:
        if one is not None:
            one.data.neg_()
    group = alone(torch.device(DEVICE)) if together else None
    kind = HeadKind(EPS, centered, zero_centered=weighted == "around zero", group=group)
    exact = doubles(ours)
    projection = randn(b, s, (n + 2 * g) * d).to(DEVICE, dtype)
    exact_projection = projection.double().requires_grad_()
    table = rotary_table(s + 3, d, 1e4, DEVICE) if rotated else None
    expected = exact_heads(exact_projection, shape, table, exact, kind)
    grads = [randn(*part.shape, seed=i).to(DEVICE, dtype) for i, part in enumerate(expected)]
    torch.autograd.backward(expected, [grad.double() for grad in grads])

    projection.requires_grad_()
    made = split_heads(
        projection * 1, n, g, table, triton, (Weights(*ours[:2]), Weights(*ours[2:])), kind
    )
    torch.autograd.backward(made, grads)
    for mine, reference in zip(made, expected, strict=True):
        assert mine.dtype == dtype and mine.shape == reference.shape
        close(mine, reference, dtype)
    close(cast(Tensor, projection.grad), cast(Tensor, exact_projection.grad), dtype)
    check_gradients(ours, exact, dtype)


@implementations
@kinds
def test_memory_kept_by_norms_of_heads(centered: bool, triton: bool) -> None:
    """Keep the projection, which the values are a view of, and the statistics; queries and keys
    have new memory."""
    b = 2
    s = 3
    n = 4
    g = 2
    d = 6
    norms = tuple(Weights(*parameters(centered, "around one", d, torch.float32)) for _ in range(2))
    projection = randn(b, s, (n + 2 * g) * d).to(DEVICE).requires_grad_() * 1
    before = projection.detach().clone()
    with saved_tensors() as kept:
        table = rotary_table(s, d, 1e4, DEVICE)
        query, key, value = split_heads(
            projection, n, g, table, triton, norms, HeadKind(EPS, centered)
        )
    assert torch.equal(projection, before)
    memory = projection.untyped_storage().data_ptr()
    assert value.untyped_storage().data_ptr() == memory != query.untyped_storage().data_ptr()
    assert query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    assert query.untyped_storage().nbytes() == 4 * b * s * (n + g) * d
    assert sum(tensor.nbytes for tensor in kept) == projection.nbytes + 4 * b * s * (n + g) * (
        2 if centered else 1
    )


@implementations
@kinds
def test_frozen_norms_of_heads(centered: bool, triton: bool) -> None:
    """A frozen weight changes no other gradient; a frozen projection does not change the weights'
    gradients."""
    b = 2
    s = 3
    n = 4
    g = 2
    d = 6
    grads = [randn(b, heads, s, d, seed=i).to(DEVICE) for i, heads in enumerate((n, g, g))]
    results = []
    for projection_needs, query_needs in ((True, True), (True, False), (False, True)):
        norms = tuple(
            Weights(*parameters(centered, "around one", d, torch.float32)) for _ in range(2)
        )
        for one in norms[0]:
            if one is not None:
                one.requires_grad_(query_needs)
        projection = randn(b, s, (n + 2 * g) * d).to(DEVICE).requires_grad_(projection_needs)
        made = split_heads(projection, n, g, None, triton, norms, HeadKind(EPS, centered))
        wanted = [
            (part, grad) for part, grad in zip(made, grads, strict=True) if part.requires_grad
        ]
        torch.autograd.backward(*zip(*wanted, strict=True))
        found = [None if one is None else one.main_grad for pair in norms for one in pair]
        results.append((projection.grad, found))
    (grad, whole), (without_query, part), (nothing, of_weights) = results
    assert torch.equal(grad, without_query) and nothing is None
    for everything, some, others, is_query in zip(
        whole, part, of_weights, (True, True, False, False), strict=True
    ):
        if everything is not None:
            assert torch.equal(everything, others)
            assert bool(some.isnan().all()) if is_query else torch.equal(everything, some)
