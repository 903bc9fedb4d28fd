"""FlashAttention 4: what its package is called with, where it is chosen, and that a plan counts it.

Functions with the package's signatures, written out in torch, stand in for the real ones, which
need a GPU.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.errors import UsageError
from megatron_lite.kernels import choice
from megatron_lite.kernels.attention import choice as attention_choice
from megatron_lite.kernels.attention.attention import attention
from megatron_lite.kernels.attention.choice import PLANNED_GPU, Machine, Work
from megatron_lite.kernels.choice import choose_kernels, failure
from tests.kernels.attention.test_attention import BF16, FUSED_CASES, Case, chosen
from tests.support.harness import tiny_config

HOPPER_4, B200_4 = Machine((9, 0), 91501, flash4=True), Machine((10, 0), 91501, flash4=True)
CUDA = torch.device("cuda", 0)


class StandIn:
    """The module flash_attn.cute. `wrong`: what it ignores, "window" or "documents"."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.calls: list[dict[str, Any]] = []

    def flash_attn_func(
        self, q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """q (b, s, n, d), k and v (b, s, g, d) -> output (b, s, n, d) and the rows' log-sum-exp."""
        b, s = q.shape[:2]
        flat = (heads.flatten(0, 1) for heads in (q, k, v))
        output, sums = self._attend(*flat, [s] * b, **options)
        self.calls.append({"q": q} | options)
        return output.unflatten(0, (b, s)), sums

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """q (b s, n, d), k and v (b s, g, d) -> output (b s, n, d) and the rows' log-sum-exp."""
        assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        lengths = cu_seqlens_q.diff().tolist()
        assert max_seqlen_q == max_seqlen_k == max(lengths) and sum(lengths) == len(q) == len(k)
        output, sums = self._attend(
            q, k, v, [len(q)] if self.wrong == "documents" else lengths, **options
        )
        self.calls.append({"q": q, "documents": lengths} | options)
        return output, sums

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: list[int],
        *,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int | None, int | None],
        deterministic: bool,
    ) -> tuple[Tensor, Tensor]:
        left, right = window_size
        assert causal and right == 0 and (left is None or left >= 0), (
            "None, never -1, means without limit"
        )
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        window = None if left is None or self.wrong == "window" else left + 1
        (_, n, d), g, parts = q.shape, k.shape[1], []
        wide = [heads.to(torch.promote_types(q.dtype, torch.float32)) for heads in (q, k, v)]
        for part in zip(*(heads.split(lengths) for heads in wide), strict=True):
            whole = Case(1, n, g, len(part[0]), d, window, scale=softmax_scale)
            parts.append(
                whole.formula(*(heads.transpose(0, 1)[None] for heads in part))[0].transpose(0, 1)
            )
        return torch.cat(parts).to(q.dtype), q.new_zeros(n, len(q))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install(monkeypatch, StandIn())


def install(monkeypatch: pytest.MonkeyPatch, stand_in: StandIn) -> StandIn:
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=stand_in))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", stand_in)
    monkeypatch.setattr(choice, "failure", failure.__wrapped__)
    return stand_in


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", FUSED_CASES, ids=str)
def test_the_package_gets_the_right_arguments(
    case: Case, deterministic: bool, package: StandIn
) -> None:
    """Views of the projection, documents only where there are some, a window only where it limits;
    then gradients."""
    *inputs, grad = case.inputs(torch.float64)
    ours = [tensor.requires_grad_() for tensor in inputs]
    torch.use_deterministic_algorithms(deterministic)
    try:
        output = case.attend(ours, "flash4")
    finally:
        torch.use_deterministic_algorithms(False)
    (call,) = package.calls
    longest = max(case.lengths or [case.s])
    assert call["window_size"] == (
        case.window - 1 if case.window and case.window < longest else None,
        0,
    )
    assert call.get("documents") == (None if case.lengths is None else list(case.lengths))
    assert (
        call["deterministic"] == deterministic and call["q"].data_ptr() == inputs[0].data_ptr()
    ), "no copy"
    expected = case.formula(*inputs)
    torch.testing.assert_close(output, expected)
    for mine, exact in zip(
        *(torch.autograd.grad(y, ours, grad) for y in (output, expected)), strict=True
    ):
        torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize(
    ("machine", "work", "expected"),
    [
        (HOPPER_4, dict(windowed=True), "flash4"),
        (HOPPER_4, dict(documents=True, deterministic=True), "flash4"),
        (HOPPER_4, dict(windowed=True, documents=True, head_size=256), "flash4"),
        (HOPPER_4, {}, "cudnn"),
        (HOPPER_4, dict(head_size=256), "flash4"),
        (Machine((9, 0), 91501, flash3=True, flash4=True), dict(windowed=True), "flash3"),
        (
            Machine((9, 0), 91501, flash3=True, flash4=True),
            dict(windowed=True, deterministic=True),
            "flash4",
        ),
        (B200_4, {}, "flash4"),
        (B200_4, dict(windowed=True, head_size=128), "flash4"),
        (B200_4, dict(windowed=True, head_size=136), "varlen"),
        (HOPPER_4, dict(windowed=True, head_size=68), "math"),
        (HOPPER_4, dict(windowed=True, head_size=264), "math"),
        (HOPPER_4, dict(windowed=True, dropout=True), "math"),
        (HOPPER_4, dict(windowed=True, dtype=torch.float32), "math"),
        (Machine((9, 0), 91501), dict(windowed=True), "varlen"),
        (Machine((8, 0), 91501, flash4=True), dict(windowed=True), "varlen"),
        (Machine((12, 0), 91501, flash4=True), dict(documents=True), "varlen"),
        (PLANNED_GPU, dict(documents=True), "varlen"),
    ],
    ids=str,
)
def test_automatic_choice(machine: Machine, work: dict[str, Any], expected: str) -> None:
    """Where it can do the work, after cuDNN and version 3; else the choice of a machine without the
    package."""
    assert chosen("auto", machine, **work) == chosen(expected, machine, **work) == expected


@pytest.mark.parametrize(
    ("machine", "work", "reason"),
    [
        (Machine((9, 0), 91501), {}, "needs the package flash-attn-4"),
        (Machine((12, 0), 91501, flash4=True), {}, "needs compute capability 9 or 10"),
        (HOPPER_4, dict(head_size=264), "up to 256"),
        (B200_4, dict(head_size=192), "up to 128"),
        (HOPPER_4, dict(dropout=True), "--attention_dropout"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused(machine: Machine, work: dict[str, Any], reason: str) -> None:
    with pytest.raises(
        UsageError, match=f"^--attention_backend=flash4: flash4 .*{reason}.*; leave the flag out"
    ):
        chosen("flash4", machine, **work)


@pytest.mark.parametrize(
    ("options", "wrong", "expected"),
    [
        (dict(window_size=4), "", "flash4"),
        (dict(cross_document_attention=False), "", "flash4"),
        (dict(window_size=4), "window", "varlen"),
        (dict(cross_document_attention=False), "documents", "varlen"),
        (dict(window_size=4), "missing", "varlen"),
        ({}, "", "cudnn"),
    ],
    ids=str,
)
def test_a_run_uses_it_where_its_trial_agrees_with_the_formula(
    options: dict[str, Any], wrong: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's own choice with the real trial; a package that ignores the window, or is broken, is
    passed over."""
    install(monkeypatch, StandIn(wrong))
    if wrong == "missing":
        monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    monkeypatch.setattr(attention_choice, "machine_of", lambda device: HOPPER_4)

    def fails(backend: str, device: torch.device, work: Work) -> str | None:
        return choice.failure(backend, torch.device("cpu"), work) if backend == "flash4" else None

    config = tiny_config(
        1, training_dtype="bf16", kv_channels=16, enable_triton_kernels=False, **options
    )
    assert choose_kernels(config, CUDA, fails=fails).attention == expected


def test_the_package_is_found_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder flash_attn, which other versions share and which may fail to import, says
    nothing."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    assert not attention_choice._has_flash4()
    (tmp_path / "flash_attn_4-4.0.0b36.dist-info").mkdir()
    (tmp_path / "flash_attn_4-4.0.0b36.dist-info" / "METADATA").write_text(
        "Name: flash-attn-4\nVersion: 4.0.0b36\n"
    )
    assert attention_choice._has_flash4()


def test_a_plan_counts_it() -> None:
    """Named, it needs no package in a plan; it keeps query, key, value, the output and a number per
    row."""
    options = dict(training_dtype="bf16", kv_channels=16, window_size=4)
    for backend, expected in (("auto", "varlen"), ("flash3", "flash3"), ("flash4", "flash4")):
        config = tiny_config(1, attention_backend=backend, **options)
        assert choose_kernels(config, torch.device("cuda"), planned=True).attention == expected
    kept: list[Tensor] = []
    parts = [
        torch.empty(2, heads, 64, 16, dtype=BF16, device="meta", requires_grad=True)
        for heads in (4, 2, 2)
    ]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        attention(*parts, 8, 0.0, None, backend="flash4")
    assert (
        sum(tensor.nbytes for tensor in kept) == 2 * 64 * 16 * (4 + 2 + 2 + 4) * 2 + 2 * 4 * 64 * 4
    )
