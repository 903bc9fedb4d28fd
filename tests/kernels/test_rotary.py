"""Queries and keys are rotated in the projection's memory, and the three gradients are joined in
one tensor."""

import pytest
import torch
from torch import Tensor

from megatron_lite.kernels.heads import split_heads
from megatron_lite.kernels.rotary import Table, angle_table
from tests.support.kernel_checks import (
    DEVICE,
    DTYPES,
    IMPLEMENTATIONS,
    close,
    compare,
    covering,
    implementations,
    randn,
    rotary_table,
)

B, S = 2, 3
# Query heads, key heads, channels, rotated channels: groups, odd numbers, more heads than one
# program takes.
WHOLLY = [(4, 4, 6, 6), (6, 2, 8, 8), (3, 1, 2, 2), (20, 5, 128, 128)]
SIZES = [*WHOLLY, (4, 4, 6, 2), (6, 2, 8, 6), (3, 1, 7, 4), (2, 1, 9, 2), (5, 5, 80, 32)]


def formula(
    x: Tensor, n: int, g: int, r: int | None = None, positions: Tensor | None = None
) -> Tensor:
    """Rotate the first r channels by complex multiplication: (b, s, (n + 2 g) d) -> (b, s, n + 2 g,
    d)."""
    parts = x.unflatten(-1, (n + 2 * g, -1))
    r = parts.shape[-1] if r is None else r
    positions = torch.arange(S, device=x.device) if positions is None else positions
    angles = positions[..., None] * 100.0 ** (-torch.arange(0, r, 2, device=x.device) / r)
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[..., None, :]
    heads = parts[:, :, : n + g]
    turned = torch.complex(heads[..., : r // 2], heads[..., r // 2 : r]) * turn
    return torch.cat(
        [torch.cat([turned.real, turned.imag, heads[..., r:]], -1), parts[:, :, n + g :]], 2
    )


@implementations
@pytest.mark.parametrize("rotary", [True, False])
def test_gradients_may_have_any_strides(rotary: bool, triton: bool) -> None:
    """Gradients may be laid out by position, by head, by channel, or be expanded, as attention or a
    sum leave them."""
    n = 4
    g = 2
    d = 6
    x = randn(B, S, (n + 2 * g) * d).to(DEVICE).requires_grad_()
    grads = [
        randn(B, S, n, d).to(DEVICE).transpose(1, 2),
        randn(B, g, d, S, seed=1).to(DEVICE).transpose(2, 3),
        torch.full((), 0.7, device=DEVICE).expand(B, g, S, d),
    ]
    table = rotary_table(S, d, 100.0, x.device) if rotary else None
    torch.autograd.backward(split_heads(x * 1, n, g, table, triton), grads)
    exact = x.detach().double().requires_grad_()
    parts = formula(exact, n, g) if rotary else exact.unflatten(-1, (n + 2 * g, d))
    torch.autograd.backward(
        [part.transpose(1, 2) for part in parts.split([n, g, g], 2)], [t.double() for t in grads]
    )
    assert x.grad is not None and exact.grad is not None
    close(x.grad, exact.grad, torch.float32)


@implementations
def test_queries_keys_and_values_are_views_of_the_projection(triton: bool) -> None:
    """There is no rotated copy; without a table nothing changes."""
    x = randn(B, S, 6 * 8).to(DEVICE)
    untouched = x.clone()
    for table in (None, rotary_table(S, 8, 100.0, x.device)):
        parts = split_heads(x, 4, 1, table, triton)
        assert {part.untyped_storage().data_ptr() for part in parts} == {
            x.untyped_storage().data_ptr()
        }
        assert torch.equal(x, untouched) == (table is None)


def in_one(x: Tensor, n: int, g: int, table: Table, triton: bool) -> Tensor:
    """(b, s, (n + 2 g) d) -> (b, s, n + 2 g, d)."""
    parts = split_heads(x * 1, n, g, table, triton)
    assert [part.shape[1] for part in parts] == [n, g, g]
    return torch.cat(parts, dim=1).transpose(1, 2)


@pytest.mark.parametrize(("sizes", "dtype", "triton"), covering(SIZES, DTYPES, IMPLEMENTATIONS))
def test_split_heads_rotates_queries_and_keys(
    sizes: tuple[int, ...], dtype: torch.dtype, triton: bool
) -> None:
    """Compare with complex multiplication, forward and backward; GPT-NeoX rotates only the first
    channels."""
    n, g, d, r = sizes
    x, table = randn(B, S, (n + 2 * g) * d).to(DEVICE), rotary_table(9, r, 100.0, DEVICE)
    compare(lambda x: in_one(x, n, g, table, triton), lambda x: formula(x, n, g, r), [x], [], dtype)


@implementations
@pytest.mark.parametrize("r", [8, 4])
def test_tokens_may_be_at_any_positions(r: int, triton: bool) -> None:
    """A table may have a row for every token of a batch, or begin at a later position, as in
    generation."""
    n = 3
    g = 1
    d = 8
    x = randn(B, S, (n + 2 * g) * d).to(DEVICE)
    cos, sin = angle_table(100.0 ** (-torch.arange(0, r, 2, device=DEVICE) / r), 50)
    positions = torch.tensor([[7, 8, 49], [0, 3, 1]], device=DEVICE)
    table = (cos[positions], sin[positions])
    compare(
        lambda x: in_one(x, n, g, table, triton),
        lambda x: formula(x, n, g, r, positions),
        [x],
        [],
        torch.float32,
    )
    late, later = (cos[11:], sin[11:]), torch.arange(11, 11 + S, device=DEVICE)
    compare(
        lambda x: in_one(x, n, g, late, triton),
        lambda x: formula(x, n, g, r, later),
        [x],
        [],
        torch.float32,
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@implementations
def test_infinite_unrotated_channels_stay_infinite(triton: bool) -> None:
    """They must not be multiplied by 0, forward or backward."""
    table = rotary_table(S, 4, 100.0, DEVICE)
    x = randn(B, S, 3 * 8).to(DEVICE)
    x.view(B, S, 3, 8)[..., 4:] = torch.inf
    x.requires_grad_()
    parts = split_heads(x * 1, 1, 1, table, triton)
    torch.autograd.backward(parts, [part.detach() for part in parts])
    assert x.grad is not None
    for found in (torch.cat(parts, 1)[..., :4], x.grad.view(B, S, 3, 8)[..., :4]):
        assert torch.isfinite(found).all()
    assert x.grad.view(B, S, 3, 8)[..., 4:].isposinf().all()
