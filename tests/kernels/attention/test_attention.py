"""Attention against the explicit softmax in float64: every backend, windows, documents, leaks and
kept memory."""

import contextlib
import dataclasses
import importlib.util
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.config.model import ATTENTION_BACKENDS
from megatron_lite.errors import UsageError
from megatron_lite.kernels.attention import blocks as attention_blocks
from megatron_lite.kernels.attention import choice as attention_choice
from megatron_lite.kernels.attention import cpu as attention_cpu
from megatron_lite.kernels.attention import gpu as attention_gpu
from megatron_lite.kernels.attention.attention import Documents, attention, cached_attention
from megatron_lite.kernels.attention.choice import DESCRIPTIONS, Machine, Work, choose_attention
from megatron_lite.kernels.choice import failure
from megatron_lite.kernels.heads import split_heads
from megatron_lite.kernels.linear import linear
from megatron_lite.monitor import banner
from megatron_lite.monitor.banner import device_warnings
from megatron_lite.parameter import Parameter
from tests.support.harness import tiny_config
from tests.support.kernel_checks import (
    close,
    dtypes,
    empty_gradient,
    randn,
    rotary_table,
    saved_tensors,
)
from tests.support.memory_meters import PeakMeter

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
HOPPER, AMPERE = Machine((9, 0), 91501), Machine((8, 0), 91501)
BF16_CPU = Machine(None, has_bf16=True)
HOPPER_3 = Machine((9, 0), 91501, flash3=True)
BF16, FP32 = torch.bfloat16, torch.float32


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a problem; `lengths` are those of the documents in the flattened micro-batch, b s
    tokens in all."""

    b: int
    n: int
    g: int
    s: int
    d: int
    window: int | None = None
    lengths: tuple[int, ...] | None = None
    scale: float | None = None
    soft_cap: float = 0.0
    sinks: bool = False

    def sink_scores(self, dtype: torch.dtype, device: str = "cpu") -> Parameter | None:
        """Return each head's sink, (n,), from far below the scores to far above them."""
        values = torch.linspace(-9.0, 9.0, self.n, device=device) if self.n > 1 else randn(1)
        grad_dtype = torch.promote_types(dtype, torch.float32)
        return empty_gradient(values.to(device, dtype), grad_dtype) if self.sinks else None

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
        """Return query, key and value (b, n or g, s, d) as views of one projection, and a gradient
        of the output."""
        generator = torch.Generator().manual_seed(seed)
        projection = torch.randn(
            self.b, self.s, self.n + 2 * self.g, self.d, generator=generator
        ).to(dtype)
        grad = torch.randn(self.b, self.n, self.s, self.d, generator=generator).to(dtype)
        return [
            *(part.transpose(1, 2) for part in projection.split([self.n, self.g, self.g], dim=2)),
            grad,
        ]

    def documents(self, device: str = "cpu") -> Documents | None:
        if self.lengths is None:
            return None
        starts = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return Documents(starts.to(device), self.lengths)

    def allowed(self) -> Tensor:
        """Return which position looks at which, (b, s, s)."""
        document = torch.repeat_interleave(torch.tensor(self.lengths or [self.s] * self.b)).view(
            self.b, self.s
        )
        distance = torch.arange(self.s)[:, None] - torch.arange(self.s)
        causal = (distance >= 0) & (distance < (self.window or self.s))
        return causal & (document[:, :, None] == document[:, None])

    def attend(
        self,
        inputs: Sequence[Tensor],
        backend: str,
        *dropout: Any,
        device: str = "cpu",
        sinks: Parameter | None = None,
        **more: Any,
    ) -> Tensor:
        """Compute attention of query, key and value; `dropout`: probability and seed."""
        p, seed = dropout or (0.0, None)
        documents = self.documents(device)
        if sinks is None:
            sinks = self.sink_scores(inputs[0].dtype, device)
        more |= {"scale": self.scale, "soft_cap": self.soft_cap, "sinks": sinks}
        return attention(
            *inputs, self.window, p, seed, backend=backend, documents=documents, **more
        )

    def formula(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kept: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return attention (b, n, s, d); `kept` (b, n, s, s) are the factors of dropout on the
        probabilities.

        Sinks are one more column of scores, without a value.
        """
        if sinks is None and (own := self.sink_scores(q.dtype)) is not None:
            sinks = own.detach()
        repeats = self.n // self.g
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = q @ k.transpose(-1, -2) * (self.scale or self.d**-0.5)
        if self.soft_cap:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        scores = scores.masked_fill(~self.allowed()[:, None], float("-inf"))
        if sinks is not None:
            column = sinks.view(1, -1, 1, 1).expand(self.b, -1, self.s, -1)
            scores = torch.cat((scores, column), -1)
        probabilities = scores.softmax(-1)[..., : self.s]
        return probabilities.mul(1.0 if kept is None else kept) @ v


CASES = [
    Case(1, 4, 4, 9, 8),
    Case(2, 6, 2, 5, 7),
    Case(1, 2, 1, 300, 8),
    Case(2, 4, 2, 128, 1),
    Case(1, 3, 3, 1, 5),
    *(Case(2, 2, 1, 300, 8, window) for window in (1, 3, 63, 64, 65, 150, 299, 300, 1000)),
    Case(2, 4, 2, 130, 6, lengths=(1, 1, 128, 130)),
    Case(1, 2, 2, 200, 8, lengths=(200,)),
    Case(2, 6, 3, 75, 8, lengths=(0, 70, 1, 0, 4, *[3] * 25, 0)),
    Case(2, 2, 1, 200, 5, window=70, lengths=(130, 70, 1, 199)),
    Case(1, 4, 1, 200, 8, window=2, lengths=(1, 2, 3, 66, 128)),
    Case(2, 4, 2, 100, 8, scale=0.05),
    Case(1, 2, 1, 100, 8, 30, (60, 40), scale=0.7),
    Case(2, 4, 2, 130, 8, 70, (100, 30, 130), scale=0.7, soft_cap=0.9),
    Case(1, 2, 2, 100, 8, 99, soft_cap=50.0),
]
SINKS = [
    Case(2, 6, 2, 75, 7, sinks=True),
    Case(1, 4, 1, 300, 8, 70, (100, 200), soft_cap=0.9, sinks=True),
]


def compare(
    case: Case, dtype: torch.dtype, backend: str, device: str = "cpu", softmax_in_fp32: bool = False
) -> None:
    """Compare output and gradients with the formula in float64 on the same rounded values."""
    *inputs, grad = case.inputs(dtype)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    sinks = case.sink_scores(dtype, device)
    exact_sinks = None if sinks is None else sinks.detach().cpu().double().requires_grad_()
    formula = case.formula(*exact, sinks=exact_sinks)
    formula.backward(grad.double())
    ours = [tensor.to(device).requires_grad_() for tensor in inputs]
    output = case.attend(ours, backend, device=device, softmax_in_fp32=softmax_in_fp32, sinks=sinks)
    assert output.shape == formula.shape and output.dtype == dtype
    output.backward(grad.to(device))
    for mine, reference in zip(
        [output, *(t.grad for t in ours)], [formula, *(t.grad for t in exact)], strict=True
    ):
        close(cast(Tensor, mine), cast(Tensor, reference), dtype)
    if sinks is not None and exact_sinks is not None:
        close(sinks.main_grad, cast(Tensor, exact_sinks.grad), dtype)


@dtypes
@pytest.mark.parametrize("case", [*CASES, *SINKS], ids=str)
def test_blocks_equal_the_formula(case: Case, dtype: torch.dtype) -> None:
    """Grouped queries, odd sizes, windows and documents across, at and near the borders of
    blocks."""
    compare(case, dtype, "math")
    if dtype != torch.float32:
        compare(case, dtype, "math", softmax_in_fp32=True)


# Sequences at the borders of those that `cpu.py` computes in pieces, with the last piece full or
# not.
IN_PIECES = [
    Case(1, 4, 2, 255, 16),
    Case(2, 4, 2, 256, 5, scale=0.3),
    Case(1, 3, 3, 257, 8),
    Case(1, 4, 2, 300, 16),
    Case(1, 2, 2, 511, 8),
    Case(1, 2, 1, 512, 16),
    Case(1, 2, 1, 513, 8),
    Case(1, 2, 1, 1024, 8),
    Case(1, 2, 1, 1025, 8),
    Case(2, 6, 2, 75, 7, sinks=True),
    Case(2, 4, 2, 300, 8, sinks=True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "case", [*(case for case in CASES if not (case.window or case.lengths)), *IN_PIECES], ids=str
)
def test_flash_attention_on_a_cpu_equals_the_formula(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, with grouped queries, odd sizes and another scale, whole and in
    pieces."""
    monkeypatch.setattr(attention_cpu, "LEAST_WORK", 0)
    compare(case, dtype, "flash")


@pytest.mark.parametrize(
    "case",
    [Case(2, 4, 2, 300, 16, sinks=True), Case(1, 4, 2, 1024, 8), Case(1, 2, 2, 1100, 16)],
    ids=str,
)
def test_flash_attention_on_a_cpu_rounds_bf16_as_the_formula_does(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At lengths that fp32 computes in pieces and at longer ones; its bits repeat."""
    monkeypatch.setattr(attention_cpu, "LEAST_WORK", 0)
    compare(case, BF16, "flash")
    first, second = (results(case, "flash", dtype=BF16) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


DROPOUT_CASES = [
    Case(1, 4, 4, 9, 8),
    Case(2, 6, 2, 130, 16),
    Case(2, 4, 2, 131, 16, 40),
    Case(2, 4, 1, 100, 8, lengths=(60, 40, 1, 99), scale=0.05),
    Case(1, 4, 2, 200, 32, 90, (100, 7, 93)),
    Case(1, 4, 2, 100, 32, 30, sinks=True),
]


@dtypes
@pytest.mark.parametrize("softmax_in_fp32", [False, True])
@pytest.mark.parametrize("case", DROPOUT_CASES, ids=str)
def test_dropout_equals_the_formula_with_the_same_mask(
    case: Case, softmax_in_fp32: bool, dtype: torch.dtype
) -> None:
    """Zero queries look at their keys alike, and values that are the rows of a unit matrix show who
    was dropped."""
    dropout_p, seed = 0.3, 5
    zeros = [torch.zeros(case.b, heads, case.s, case.s) for heads in (case.n, case.g)]
    seen = case.attend([*zeros, torch.eye(case.s).expand_as(zeros[1])], "math", dropout_p, seed)
    kept = (seen > 0).double() / (1 - dropout_p)
    allowed = case.allowed()[:, None].expand_as(seen)
    assert not kept[~allowed].any() and 0.6 < float((kept[allowed] > 0).double().mean()) < 0.8
    *inputs, grad = case.inputs(dtype)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    formula = case.formula(*exact, kept)
    ours = [tensor.requires_grad_() for tensor in inputs]
    output = case.attend(ours, "auto", dropout_p, seed, softmax_in_fp32=softmax_in_fp32)
    gradients = torch.autograd.grad(output, ours, grad)
    expected = torch.autograd.grad(formula, exact, grad.double())
    for mine, reference in zip([output, *gradients], [formula, *expected], strict=True):
        close(mine, reference, dtype)


THREADED_CASES = [
    Case(2, 4, 4, 256, 64),
    Case(2, 6, 2, 257, 32),
    Case(2, 4, 2, 131, 16, 40),
    Case(1, 4, 2, 400, 32, 90, (100, 7, 100, 7, 186)),
    Case(1, 2, 1, 700, 16),
]


def results(
    case: Case, backend: str, dropout_p: float = 0.0, dtype: torch.dtype = FP32
) -> list[Tensor]:
    """Return output and gradients."""
    *inputs, grad = case.inputs(dtype)
    ours = [tensor.requires_grad_() for tensor in inputs]
    output = case.attend(ours, backend, dropout_p, 5)
    return [output.detach(), *torch.autograd.grad(output, ours, grad)]


@contextlib.contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let torch compute with a number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("case", THREADED_CASES, ids=str)
@pytest.mark.parametrize("backend", ["math", "flash"])
def test_attention_with_threads(backend: str, case: Case) -> None:
    """Both implementations equal the formula with 2 and 3 threads, and repeat their bits with as
    many threads."""
    if backend == "flash" and (case.window or case.lengths):
        pytest.skip("flash takes neither windows nor documents")
    for threads in (2, 3):
        with torch_threads(threads):
            for dtype in (FP32, BF16, torch.float16) if backend == "math" else (FP32,):
                compare(case, dtype, backend)
            first, second = (results(case, backend) for _ in range(2))
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("case", THREADED_CASES, ids=str)
def test_the_bits_do_not_depend_on_the_size_of_a_chunk(
    case: Case, dropout_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head of one document at a time gives the bits, dropout masks included, of everything at
    once.

    With several threads the BLAS shares a product by its size, which changes the last bits.
    """
    with torch_threads(1):
        expected = results(case, "math", dropout_p)
        for scores in (1, 30_000, 2**30):
            monkeypatch.setattr(
                attention_blocks, "scores_at_a_time", lambda on_gpu, scores=scores: scores
            )
            for one, other in zip(expected, results(case, "math", dropout_p), strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("groups", [1, 3, 8])
def test_chunks_cover_every_document_and_head_once(groups: int) -> None:
    """Samples form one chunk, as do neighbouring documents of equal length, if their scores are few
    enough."""
    chunks_of = attention_blocks.chunks_of
    assert len(chunks_of([256] * 4, None, 24, groups, 64, 2**30)) == 1
    for lengths in ([256] * 5, [3, 3, 7, 3, 0, 90, 7, 3, 90, 50]):
        for scores in (1, 5000, 60_000, 2**30):
            chunks = chunks_of(lengths, 50, 24, groups, 64, scores)
            found = [
                (chunk.start + i * chunk.length, chunk.length, head)
                for chunk in chunks
                for i in range(chunk.documents)
                for head in range(chunk.heads.start, chunk.heads.stop)
            ]
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
            pieces = zip(starts, lengths, strict=True)
            assert sorted(found) == sorted(
                (s, n, head) for s, n in pieces if n for head in range(groups)
            )
            for chunk in chunks:
                largest = max(
                    block.scores
                    for block in attention_blocks.blocks_of_a_document(chunk.length, 50, 64)
                )
                assert chunk.pairs == 1 or chunk.pairs * (24 // groups) * largest <= scores


def upcast(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Attention as in models that cast queries and keys to fp32 for scores and softmax,
    differentiated by torch."""
    scores = (q.float() @ k.float().transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(
        ~allowed, float("-inf")
    )
    return scores.softmax(-1).to(v.dtype) @ v


def test_softmax_in_fp32_on_a_cpu() -> None:
    """It changes no bit of the math backend there, and a run with it says so."""
    *inputs, grad = Case(1, 2, 2, 60, 16).inputs(BF16)
    results = []
    for in_fp32 in (False, True):
        ours = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        attention(*ours, None, 0.0, None, backend="math", softmax_in_fp32=in_fp32).backward(grad)
        results.append([cast(Tensor, tensor.grad) for tensor in ours])
    assert all(map(torch.equal, *results))
    for dtype, said in (("bf16", True), ("fp32", False)):
        config = tiny_config(training_dtype=dtype, attention_softmax_in_fp32=True)
        found = "\n".join(device_warnings(config, torch.device("cpu")))
        assert ("--attention_softmax_in_fp32 only chooses the math backend" in found) == said


@pytest.mark.parametrize(
    ("options", "capability", "said"),
    [
        ({}, (9, 0), ["--training_dtype=fp32: .* write --training_dtype=bf16, or --tf32=1"]),
        ({"attention_dropout": 0.1}, (9, 0), ["--training_dtype=fp32: "]),
        ({"tf32": True}, (8, 0), []),
        ({"tf32": True}, (7, 0), ["--tf32=1 has no effect on a GPU"]),
        ({"tf32": True}, None, ["--tf32=1 has no effect on a GPU"]),
        ({"training_dtype": "bf16"}, (9, 0), []),
        (
            {"training_dtype": "bf16", "attention_dropout": 0.1},
            (9, 0),
            [
                "--attention_dropout=0.1: only the math .* 10 to 50 times .* write --attention_dropout=0"
            ],
        ),
        ({"attention_dropout": 0.1}, None, []),
    ],
)
def test_what_is_slow_on_a_gpu_is_said(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    capability: tuple[int, int] | None,
    said: list[str],
) -> None:
    """With the flag to write instead; on a CPU (None) these cost little."""
    monkeypatch.setattr(banner, "free_bytes", lambda device: 2**40)
    monkeypatch.setattr(banner, "describe_device", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cpu" if capability is None else "cuda")
    found = list(device_warnings(tiny_config(device="auto", **options), device))
    assert len(found) == len(said) and all(map(re.search, said, found)), found


def test_softmax_in_fp32_is_fp32_backward_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With products in bf16, as on a GPU, the output does not change, because its scores are always
    in fp32. The gradients of queries and keys equal the formula with casts and are twice as close
    to float64 as with score gradients rounded to bf16.
    """
    case = Case(1, 2, 2, 60, 16)
    *inputs, grad = case.inputs(BF16)
    inputs[0] *= 20  # sharp probabilities, in which dP - rowsum(P dP) cancels
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    case.formula(*exact).backward(grad.double())
    outputs, gradients = [], []
    monkeypatch.setattr(attention_blocks, "dtype_of_products", lambda inputs: inputs.dtype)
    for function in (
        lambda q, k, v: attention(q, k, v, None, 0.0, None, backend="math"),
        lambda q, k, v: attention(q, k, v, None, 0.0, None, backend="math", softmax_in_fp32=True),
        lambda q, k, v: upcast(q, k, v, case.allowed()[:, None]),
    ):
        ours = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        outputs.append(function(*ours))
        outputs[-1].backward(grad)
        gradients.append([cast(Tensor, tensor.grad).double() for tensor in ours])
    assert torch.equal(outputs[0], outputs[1])
    for rounded, precise, reference, formula in zip(*gradients, exact, strict=True):
        assert float((precise - reference).norm()) <= 2e-3 * float(reference.norm())
        if formula is not exact[2]:
            error, half = (
                float((found - cast(Tensor, formula.grad)).norm()) for found in (rounded, precise)
            )
            assert half < 0.6 * error


def test_softmax_in_fp32_changes_nothing_in_fp32() -> None:
    case = Case(1, 4, 2, 70, 8, 30)
    runs = []
    for in_fp32 in (False, True):
        inputs = [tensor.requires_grad_() for tensor in case.inputs(FP32)[:3]]
        output = attention(*inputs, 30, 0.2, 3, softmax_in_fp32=in_fp32)
        runs.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_gradients_of_float64_are_derivatives() -> None:
    """Forward and backward must draw the same dropout mask for that."""
    case = Case(1, 4, 2, 5, 3, window=3, lengths=(4, 1))
    inputs = [tensor.requires_grad_() for tensor in case.inputs(torch.float64)[:3]]
    for dropout_p, seed in ((0.0, None), (0.4, 7)):
        assert torch.autograd.gradcheck(
            lambda q, k, v, p=dropout_p, seed=seed: attention(
                q, k, v, 3, p, seed, documents=case.documents()
            ),
            inputs,
        )


@pytest.mark.parametrize(
    "backend", ["math", *(pytest.param(b, marks=gpu) for b in ("varlen", "flex"))]
)
@pytest.mark.parametrize("window", [None, 50])
def test_nothing_leaks_between_documents(backend: str, window: int | None) -> None:
    """Changing one document, even to NaN, changes no bit of another document's outputs and
    gradients."""
    device = "cpu" if backend == "math" else "cuda"
    case = Case(2, 4, 2, 200, 16, window, (90, 3, 107, 150, 50))
    changed = slice(90, 93)  # of the first sample

    def run(content: float | None) -> list[Tensor]:
        *inputs, grad = case.inputs(torch.bfloat16)
        if content is not None:
            for tensor in (*inputs, grad):
                tensor[0, :, changed] = content
        ours = [tensor.to(device).requires_grad_() for tensor in inputs]
        output = case.attend(ours, backend, device=device)
        output.backward(grad.to(device))
        return [cast(Tensor, tensor).detach().cpu() for tensor in (output, *(t.grad for t in ours))]

    plain = run(None)
    for content in (3.0, float("nan")):
        for before, after in zip(plain, run(content), strict=True):
            assert not torch.equal(before[0, :, changed], after[0, :, changed])
            before[0, :, changed] = after[0, :, changed] = 0.0
            assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("window", "lengths"), [(None, None), (3, None), (None, (2, 5, 7)), (2, (6, 1, 7))]
)
@pytest.mark.parametrize("rotary", [True, False])
def test_one_copy_of_query_key_and_value_is_all_that_is_kept(
    rotary: bool, window: int | None, lengths: tuple[int, ...] | None
) -> None:
    """Keep the projection's (n + 2 g) d values per token: no rotated or repeated heads, masks or
    probabilities."""
    b = 2
    s = 7
    n = 4
    g = 2
    d = 8
    weight = cast(Parameter, Parameter(torch.ones((n + 2 * g) * d, 5)))
    weight.main_grad = torch.zeros_like(weight)
    documents = Case(b, n, g, s, d, lengths=lengths).documents()
    with saved_tensors() as kept:
        table = rotary_table(s, d, 100.0, torch.device("cpu")) if rotary else None
        query, key, value = split_heads(linear(torch.ones(b, s, 5), weight), n, g, table)
        output = attention(
            query, key, value, window, 0.0, None, backend="math", documents=documents
        )
    memories = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept
    }
    assert query.untyped_storage().data_ptr() in memories
    assert sum(memories.values()) == 4 * (b * s * 5 + b * s * (n + 2 * g) * d)
    output.sum().backward()
    assert torch.isfinite(weight.main_grad).all()


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_memory_is_linear_in_the_sequence(dropout_p: float) -> None:
    """Memory never reaches one byte per pair of positions, so there is no mask and no
    probabilities."""
    s = 5000
    inputs = [tensor.requires_grad_() for tensor in Case(1, 1, 1, s, 8).inputs(torch.float32)[:3]]
    with PeakMeter() as meter:
        attention(*inputs, None, dropout_p, 1).sum().backward()
    assert 0 < meter.peak < s * s // 2


def test_dropout_drops_probabilities() -> None:
    """p -> 0 equals no dropout; the same seed gives the same result, another seed another one."""
    q, k, v = Case(2, 4, 2, 9, 8).inputs(torch.float32)[:3]
    exact = attention(q, k, v, 4, 0.0, None)
    torch.testing.assert_close(attention(q, k, v, 4, 1e-9, 1), exact)
    assert torch.equal(attention(q, k, v, 4, 0.5, 1), attention(q, k, v, 4, 0.5, 1))
    assert not torch.equal(attention(q, k, v, 4, 0.5, 1), attention(q, k, v, 4, 0.5, 2))
    assert torch.equal(attention(q, k, v, 4, 0.5, None), exact), "evaluation drops nothing"
    q = torch.zeros(2, 1, 200, 4)
    k = torch.zeros(2, 1, 200, 4)
    v = torch.ones(2, 1, 200, 4)
    # kept share of each row's equal probabilities, / 0.75
    kept = attention(q, k, v, None, 0.25, 3)[:, 0, :, 0]
    assert abs(float(kept[:, 100:].mean()) - 1) < 0.01 and not torch.equal(kept[0], kept[1])


@pytest.mark.parametrize(
    ("choice", "machine", "work"),
    [
        ("cudnn", HOPPER, {}),
        ("cudnn", HOPPER, dict(dtype=torch.float16, head_size=64)),
        ("flash", HOPPER, dict(deterministic=True)),
        ("flash", HOPPER, dict(head_size=256)),
        ("flash", Machine((9, 0), 91002), {}),
        ("flash", AMPERE, {}),
        ("varlen", HOPPER, dict(windowed=True)),
        ("varlen", HOPPER, dict(documents=True)),
        ("varlen", AMPERE, dict(windowed=True, documents=True, deterministic=True)),
        ("cudnn", HOPPER_3, {}),
        ("flash3", HOPPER_3, dict(windowed=True)),
        ("flash3", HOPPER_3, dict(documents=True)),
        ("flash3", HOPPER_3, dict(head_size=256)),
        ("flash3", Machine((9, 0), 91002, flash3=True), {}),
        ("varlen", HOPPER_3, dict(windowed=True, deterministic=True)),
        ("varlen", Machine((8, 0), 91501, flash3=True), dict(windowed=True)),
        ("flash", Machine((10, 0), 91501), {}),
        ("varlen", Machine((10, 0), 91501, flash3=True), dict(documents=True)),
        ("math", HOPPER, dict(dtype=FP32)),
        ("math", HOPPER, dict(head_size=68)),
        ("math", HOPPER, dict(dropout=True)),
        ("math", Machine((8, 6), 91501), dict(head_size=256)),
        ("math", Machine((7, 0), 91501), dict(dtype=torch.float16)),
        ("math", Machine(None), dict(windowed=True, documents=True)),
        ("math", Machine(None), dict(dtype=BF16, length=2048)),
        ("math", BF16_CPU, dict(length=1023)),
        ("flash", BF16_CPU, dict(length=1024, deterministic=True)),
        ("math", BF16_CPU, dict(length=2048, windowed=True)),
        ("math", BF16_CPU, dict(length=2048, documents=True)),
        ("math", BF16_CPU, dict(length=2048, dropout=True)),
        ("math", HOPPER, dict(soft_cap=50.0)),
        ("math", BF16_CPU, dict(length=2048, dtype=torch.float16)),
        ("flash", BF16_CPU, dict(length=16, dtype=FP32)),
        ("math", Machine(None), dict(dtype=FP32, dropout=True)),
        ("flash", Machine(None), dict(dtype=FP32)),
        ("flash", Machine(None), dict(dtype=FP32, head_size=7, deterministic=True)),
    ],
)
def test_automatic_choice(choice: str, machine: Machine, work: dict[str, Any]) -> None:
    assert chosen("auto", machine, **work) == choice
    assert chosen(choice, machine, **work) == choice
    assert choice in DESCRIPTIONS


def chosen(wanted: str, machine: Machine, **work: Any) -> str:
    device = torch.device("cuda" if machine.capability else "cpu")
    return choose_attention(
        wanted, device, Work(**(dict(dtype=BF16, head_size=128) | work)), machine
    )


@pytest.mark.parametrize(
    ("wanted", "machine", "work", "reason"),
    [
        *((backend, Machine(None), {}, "needs a GPU") for backend in ("cudnn", "varlen", "flex")),
        ("flash", Machine(None), dict(dtype=BF16), "fp32 on this CPU, not in bfloat16"),
        ("flash", BF16_CPU, dict(dtype=torch.float16), "fp32 on this CPU, not in float16"),
        ("flash", Machine(None), dict(dtype=FP32, windowed=True), "--window_size"),
        ("flash", Machine(None), dict(dtype=FP32, documents=True), "--cross_document_attention"),
        ("flash", Machine(None), dict(dtype=FP32, dropout=True), "--attention_dropout"),
        ("flash", Machine((7, 5)), {}, "8.0, and this one has 7.5"),
        ("flash", HOPPER, dict(windowed=True), "--window_size"),
        ("cudnn", HOPPER, dict(documents=True), "--cross_document_attention"),
        ("cudnn", HOPPER, dict(deterministic=True), "--deterministic"),
        ("cudnn", AMPERE, {}, "Hopper"),
        ("cudnn", Machine((9, 0), 91002), {}, "91002"),
        ("cudnn", Machine((10, 0), 92500), {}, "wrong results on B200 .*issue 193893"),
        ("cudnn", HOPPER, dict(head_size=136), "not of 136"),
        ("varlen", HOPPER, dict(dtype=FP32), "not in float32"),
        ("flash3", HOPPER, {}, "needs the package flash_attn_interface"),
        ("flash3", Machine((10, 0), 91501, flash3=True), {}, "needs compute capability 9"),
        ("flash3", HOPPER_3, dict(deterministic=True), "--deterministic=1"),
        ("flash3", HOPPER_3, dict(head_size=264), "up to 256"),
        ("varlen", HOPPER, dict(head_size=12), "not of 12"),
        ("varlen", HOPPER, dict(dropout=True), "--attention_dropout"),
        ("flex", Machine((9, 0), 91501, flex=False), {}, "Triton"),
        ("flex", HOPPER, dict(head_size=8), "not of 8"),
        ("varlen", HOPPER, dict(soft_cap=50.0), "--attention_soft_cap"),
        ("flash", Machine(None), dict(dtype=FP32, soft_cap=50.0), "--attention_soft_cap"),
    ],
)
def test_a_backend_that_cannot_do_it_is_refused(
    wanted: str, machine: Machine, work: dict[str, Any], reason: str
) -> None:
    """The message names flag, value, reason and fix."""
    with pytest.raises(
        UsageError, match=f"^--attention_backend={wanted}: .*{reason}.*; leave the flag out"
    ):
        chosen(wanted, machine, **work)


def test_a_plan_looks_at_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attention_choice, "machine_of", lambda device: pytest.fail("looked at the device")
    )
    assert chosen("auto", attention_choice.PLANNED_GPU) == "cudnn"
    assert chosen("auto", attention_choice.PLANNED_GPU, windowed=True) == "varlen"


FUSED_CASES = [case for case in CASES if case.s > 1 and not case.soft_cap]


@pytest.mark.parametrize("says_grouped", [True, False])
@pytest.mark.parametrize("case", FUSED_CASES, ids=str)
def test_varlen_gets_the_right_arguments(
    case: Case, says_grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A varlen_attn written in torch stands in for the real one, which needs a GPU."""

    def written_out(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts_q: Tensor,
        starts_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        **more: bool,
    ) -> Tensor:
        assert starts_q.dtype == torch.int32 and torch.equal(starts_q, starts_k) and max_q == max_k
        assert more == ({"enable_gqa": case.n != case.g} if says_grouped else {})
        assert q.data_ptr() == inputs[0].data_ptr(), "no copy"
        left, right = window_size
        parts = []
        for start, end in zip(starts_q.tolist(), starts_q.tolist()[1:], strict=False):
            assert end - start <= max_q
            whole = Case(
                1, case.n, case.g, end - start, case.d, None if left < 0 else left + 1, scale=scale
            )
            assert right == 0
            parts.append(
                whole.formula(*(t[start:end].transpose(0, 1)[None] for t in (q, k, v)))[
                    0
                ].transpose(0, 1)
            )
        return torch.cat(parts)

    monkeypatch.setattr(attention_gpu, "_varlen", lambda: (written_out, says_grouped))
    inputs = case.inputs(torch.float64)[:3]
    output = case.attend(inputs, "varlen")
    torch.testing.assert_close(output, case.formula(*inputs))


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 4, 2, 30, 8, sinks=True),
        Case(1, 6, 2, 40, 8, 7, lengths=(13, 1, 26), scale=0.3, sinks=True),
    ],
    ids=str,
)
def test_sinks_need_only_the_output_and_sums_of_the_flash_kernels(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels written out in float64, whose backward pass takes P from the sums that it is
    given, the gradients are those of the formula."""

    def scores(q: Tensor, k: Tensor, starts: Tensor, scale: float | None, left: int) -> Tensor:
        """Return the scores of all tokens (n, t, t)."""
        repeats = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(repeats, 1)
        product = torch.einsum("qnd,knd->nqk", q, k) * (scale or q.shape[-1] ** -0.5)
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        document = torch.bucketize(torch.arange(len(q)), starts[1:], right=True)
        allowed = (distance >= 0) & (distance <= (left if left >= 0 else len(q)))
        allowed &= document[:, None] == document
        return product.masked_fill(~allowed, float("-inf"))

    class Written:
        @staticmethod
        def _flash_attention_forward(
            *args: Any, scale: float | None, window_size_left: int, window_size_right: int
        ) -> tuple[Tensor, ...]:
            q, k, v, starts, again, *numbers = args
            assert torch.equal(starts, again) and window_size_right == 0
            assert numbers[2:] == [0.0, window_size_left < 0, False]
            s = scores(q, k, starts, scale, window_size_left)
            v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
            output = torch.einsum("nqk,knd->qnd", s.softmax(-1), v)
            return output, s.logsumexp(-1), torch.tensor(1), torch.tensor(2), torch.tensor(3)

        @staticmethod
        def _flash_attention_backward(
            *args: Any, scale: float | None, window_size_left: int, window_size_right: int
        ) -> tuple[Tensor, ...]:
            do, q, k, v, output, sums, starts, again, *numbers = args
            assert torch.equal(starts, again) and window_size_right == 0
            assert numbers[2:4] == [0.0, window_size_left < 0]
            assert list(map(int, numbers[4:])) == [1, 2], "the states of the forward pass"
            groups = k.shape[1]
            p = (scores(q, k, starts, scale, window_size_left) - sums[..., None]).exp()
            repeats = q.shape[1] // groups
            wide_k, wide_v = (x.repeat_interleave(repeats, 1) for x in (k, v))
            dp = torch.einsum("qnd,knd->nqk", do, wide_v)
            ds = p * (dp - (do * output).sum(-1).t()[..., None]) * (scale or q.shape[-1] ** -0.5)
            dq = torch.einsum("nqk,knd->qnd", ds, wide_k)
            dk, dv = (
                torch.einsum("nqk,qnd->knd", *both).unflatten(1, (groups, repeats)).sum(2)
                for both in ((ds, q), (p, do))
            )
            return dq, dk, dv

    monkeypatch.setattr(attention_gpu, "aten", Written)
    compare(case, torch.float64, "varlen")


def test_flash3_takes_the_place_of_the_flash_kernels_only_while_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The switch of the process is set once for a run of calls, and set back for the next
    backend."""
    calls: list[str] = []
    active: list[str | None] = [None]

    def switch(name: str | None) -> None:
        calls.append(name or "restore")
        active[0] = name
        warnings.warn("another kernel takes the place of torch's", UserWarning, stacklevel=1)

    fakes = dict(
        current_flash_attention_impl=lambda: active[0],
        activate_flash_attention_impl=switch,
        restore_flash_attention_impl=lambda: switch(None),
    )
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.nn.attention, name, fake, raising=False)
    case, seen = Case(1, 4, 2, 40, 8, 7), []
    inputs = case.inputs(torch.float64)[:3]

    def written_out(q: Tensor, *rest: Any, **more: Any) -> Tensor:
        seen.append((active[0], more["window_size"]))
        return case.formula(*inputs)[0].transpose(0, 1)

    monkeypatch.setattr(attention_gpu, "_varlen", lambda: (written_out, True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for backend in ("varlen", "flash3", "flash3", "varlen", "flash3"):
            output = case.attend(inputs, backend)
            torch.testing.assert_close(output, case.formula(*inputs))
    assert [name for name, _ in seen] == [None, "FA3", "FA3", None, "FA3"]
    assert {reach for _, reach in seen} == {(6, 0)}
    assert calls == ["FA3", "restore", "FA3"]


@pytest.mark.parametrize(
    ("listed", "installed"), [(["FA3"], True), (["FA3"], False), (["FA4"], True)]
)
def test_flash3_is_offered_where_torch_and_the_package_have_it(
    listed: list[str], installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are needed; neither is imported to find out."""
    monkeypatch.setattr(
        torch.nn.attention, "list_flash_attention_impls", lambda: listed, raising=False
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    assert attention_choice._has_flash3() == ("FA3" in listed and installed)


@pytest.mark.skipif(
    importlib.util.find_spec("torch.nn.attention.varlen") is None, reason="older torch"
)
@pytest.mark.parametrize(
    "case", [Case(2, 8, 2, 256, 64, 100), Case(2, 8, 2, 256, 64, None, (100, 156, 256))], ids=str
)
def test_varlen_keeps_query_key_value_output_and_a_number_per_row(case: Case) -> None:
    """torch's own function accepts our arguments and is differentiable, on tensors without
    memory."""
    b = case.b
    n = case.n
    g = case.g
    s = case.s
    d = case.d
    projection = torch.empty(
        b, s, n + 2 * g, d, dtype=torch.bfloat16, device="meta", requires_grad=True
    )
    with saved_tensors() as kept:
        parts = [part.transpose(1, 2) for part in projection.split([n, g, g], dim=2)]
        output = case.attend(parts, "varlen", device="meta")
    assert output.shape == (b, n, s, d) and output.transpose(1, 2).is_contiguous(), (
        "(b, s, n d) must be a view"
    )
    views = [tensor for tensor in kept if tensor._base is projection]  # three views of one memory
    others = [tensor for tensor in kept if tensor._base is not projection and tensor.numel() > 4]
    assert len(views) == 3 and sum(tensor.nbytes for tensor in others) == b * s * (
        n * d * 2 + n * 4
    )
    output.sum().backward()
    assert projection.grad is not None and projection.grad.shape == projection.shape


@pytest.mark.parametrize("case", FUSED_CASES, ids=str)
def test_blocks_of_flex_attention_cover_what_is_allowed(case: Case) -> None:
    """Full blocks hold only allowed pairs; full and partial blocks hold all of them; each block is
    listed once."""
    starts = getattr(case.documents(), "starts", None)
    lowest = attention_gpu.lowest_keys(starts, case.b, case.s, case.window, torch.device("cpu"))
    allowed = case.allowed()
    row, column = torch.arange(case.s)[:, None], torch.arange(case.s)
    assert torch.equal((column <= row) & (column >= lowest[:, :, None]), allowed)
    size = 16
    counts, columns, full_counts, full_columns = attention_gpu.block_columns(lowest, size)
    blocks = -(-case.s // size)
    padded = torch.nn.functional.pad(allowed, [0, blocks * size - case.s] * 2)
    pairs = padded.view(case.b, blocks, size, blocks, size).sum(dim=(2, 4))
    for b in range(case.b):
        for i in range(blocks):
            partial = columns[b, 0, i, : counts[b, 0, i]].tolist()
            full = full_columns[b, 0, i, : full_counts[b, 0, i]].tolist()
            assert sorted(partial + full) == pairs[b, i].nonzero().flatten().tolist()
            assert all(int(pairs[b, i, j]) == size * min(size, case.s - i * size) for j in full)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_takes_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run uncompiled and forward only, because flex_attention has no backward pass on a CPU."""
    from torch.nn.attention import flex_attention as module

    monkeypatch.setattr(attention_gpu, "_compiled_flex", lambda: module.flex_attention)
    for case in (
        Case(2, 4, 2, 300, 16, 150, scale=0.1),
        Case(2, 4, 2, 300, 16, None, (100, 200, 300)),
        Case(2, 4, 2, 300, 16, 150, soft_cap=0.5),
    ):
        inputs = case.inputs(torch.float32)[:3]
        with torch.no_grad():
            output = case.attend(inputs, "flex")
        close(output, case.formula(*(tensor.double() for tensor in inputs)), torch.float32)


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize("fails", [False, True])
def test_fused_attention_allows_one_kernel_and_restores_the_switches(
    monkeypatch: pytest.MonkeyPatch, backend: str, fails: bool
) -> None:
    """Only the wanted kernel may run, and other code of the process finds the switches as they
    were."""
    cuda = torch.backends.cuda
    seen: list[tuple[bool, ...]] = []

    def enabled() -> tuple[bool, ...]:
        fused = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
        return *fused, cuda.math_sdp_enabled()

    def record(*_: Any, **__: Any) -> str:
        seen.append(enabled())
        if fails:
            raise RuntimeError("No available kernel")
        return "output"

    monkeypatch.setattr(attention_gpu.functional, "scaled_dot_product_attention", record)
    before, was = enabled(), cuda.math_sdp_enabled()
    cuda.enable_math_sdp(not was)
    try:
        with contextlib.suppress(RuntimeError):
            attention_gpu.fused_attention(*torch.ones(3, 1, 1, 2, 8), backend)
        assert enabled() == (*before[:3], not was)
    finally:
        cuda.enable_math_sdp(was)
    assert seen == [(backend == "cudnn", backend == "flash", False, False)]


@pytest.mark.parametrize(
    "case", [case for case in FUSED_CASES if not (case.window or case.lengths)], ids=str
)
def test_fused_attention_handles_groups(case: Case) -> None:
    """torch's flash kernel for a CPU stands in for that of a GPU."""
    inputs = case.inputs(torch.float32)[:3]
    output = attention_gpu.fused_attention(*inputs, "flash", case.scale)
    close(output, case.formula(*(tensor.double() for tensor in inputs)), torch.float32)


GPU_CASES = [
    Case(1, 4, 4, 9, 64),
    Case(2, 8, 2, 1500, 64),
    Case(2, 4, 1, 300, 128),
    Case(2, 6, 2, 256, 32),
    *(Case(2, 4, 2, 1500, 64, window) for window in (1, 37, 128, 700, 1499, 2000)),
    Case(2, 4, 2, 1000, 128, lengths=(1, 499, 500, 1000)),
    Case(1, 4, 2, 300, 64, lengths=(*[3] * 50, 150)),
    Case(2, 4, 2, 700, 64, window=100, lengths=(700, 1, 130, 569)),
    Case(1, 2, 1, 200, 7, window=9),
    Case(2, 4, 2, 300, 64, scale=0.03),
    Case(2, 4, 2, 300, 64, 100, scale=0.3),
    Case(2, 4, 2, 300, 64, 100, (300, 130, 170), sinks=True),
    Case(1, 8, 1, 520, 64, sinks=True),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", [pytest.param(b, marks=gpu) for b in ATTENTION_BACKENDS[1:]])
def test_backends_on_a_gpu_equal_the_formula(backend: str, dtype: torch.dtype) -> None:
    """Compare every backend with float64 on the CPU, forward and backward, in what it claims to
    support."""
    refusals = []
    for case in GPU_CASES:
        window = None if (case.window or case.s) >= case.s else case.window
        documents = case.lengths is not None
        work = Work(dtype, case.d, window is not None, documents, sinks=case.sinks)
        try:
            choose_attention(backend, torch.device("cuda"), work)
        except UsageError as error:
            refusals.append(str(error))
        else:
            compare(case, dtype, backend, "cuda")
    if len(refusals) == len(GPU_CASES):
        pytest.skip(refusals[0])


@pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=gpu) for b in ("flash4", "flash", "varlen", "flex", "math")]
)
def test_deterministic_backends_repeat_their_bits_on_a_gpu(backend: str) -> None:
    machine = attention_choice.machine_of(torch.device("cuda"))
    work = Work(BF16, 64, deterministic=True)
    if (reason := attention_choice.obstacle(backend, machine, work)) is not None:
        pytest.skip(reason)
    case = Case(2, 8, 2, 1000, 64, None if backend == "flash" else 300)
    *inputs, grad = (tensor.cuda() for tensor in case.inputs(torch.bfloat16))
    runs = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            ours = [tensor.detach().requires_grad_() for tensor in inputs]
            output = case.attend(ours, backend)
            runs.append([output, *torch.autograd.grad(output, ours, grad)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(
        torch.equal(one, other) for run in runs[1:] for one, other in zip(runs[0], run, strict=True)
    )


@pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=gpu) for b in ("varlen", "flex", "auto")]
)
def test_windowed_attention_keeps_no_probabilities_on_a_gpu(backend: str) -> None:
    """Mistral's attention, window 4096 over 8192 tokens, keeps query, key, value, output and a
    number per row."""
    n = 32
    g = 8
    s = 8192
    d = 128
    projection = torch.randn(1, s, n + 2 * g, d, device="cuda", dtype=torch.bfloat16)
    parts = [part.transpose(1, 2).requires_grad_() for part in projection.split([n, g, g], dim=2)]
    attention(*parts, 4096, 0.0, None, backend=backend).sum().backward()  # compiles
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = attention(*parts, 4096, 0.0, None, backend=backend)
    theory = s * n * d * 2 + s * n * 4
    assert theory <= torch.cuda.memory_allocated() - before < theory + 2**21
    output.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**30, (
        "all probabilities in fp32 would take 6.4 GB"
    )


def test_a_candidate_that_does_not_work_is_passed_over() -> None:
    """A library may refuse for a reason unknown to the table: `auto` tries the next one and takes
    "math" untried."""
    tried: list[str] = []

    def works(backend: str) -> bool:
        tried.append(backend)
        return backend == "varlen"

    asked = (torch.device("cuda"), Work(BF16, 128))
    assert choose_attention("auto", *asked, machine=HOPPER, works=works) == "varlen"
    assert tried == ["cudnn", "flash", "varlen"]
    assert choose_attention("auto", *asked, machine=HOPPER, works=lambda backend: False) == "math"
    assert choose_attention("math", *asked, machine=HOPPER, works=lambda backend: False) == "math"
    with pytest.raises(UsageError, match="^--attention_backend=flash: .* small problem"):
        choose_attention("flash", *asked, machine=HOPPER, works=lambda backend: False)


def test_the_trial_tells_what_works() -> None:
    """ "math" works everywhere; cuDNN does not work on a CPU."""
    cpu = torch.device("cpu")
    assert failure("math", cpu, Work(BF16, 16)) is None
    reason = failure("cudnn", cpu, Work(BF16, 16))
    assert reason is not None and reason.startswith("RuntimeError: ")


# -- one new token
# --------------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(
    ("n", "g", "k", "scale"), [(4, 2, 9, None), (6, 6, 1, None), (4, 1, 200, 0.1), (9, 3, 70, None)]
)
def test_cached_attention_equals_the_formula(
    n: int, g: int, k: int, scale: float | None, dtype: torch.dtype
) -> None:
    """Grouped heads, one and many keys, another scale."""
    query, key, value = (
        randn(3, heads, length, 8).to(dtype) for heads, length in ((n, 1), (g, k), (g, k))
    )
    output = cached_attention(query, key, value, scale)
    keys, values = (heads.double().repeat_interleave(n // g, 1) for heads in (key, value))
    exact = (query.double() @ keys.transpose(2, 3) * (scale or 8**-0.5)).softmax(-1) @ values
    assert output.dtype == dtype and output.shape == exact.shape
    close(output, exact, dtype)


@pytest.mark.parametrize("window", [None, 3])
def test_token_by_token_equals_all_at_once(window: int | None) -> None:
    """Training's attention over 20 tokens equals attention token by token over the keys that each
    may look at."""
    query, key, value = (randn(2, heads, 20, 8, seed=heads) for heads in (4, 2, 2))
    how: dict[str, Any] = {"scale": 0.2, "soft_cap": 0.5}
    how["sinks"] = Parameter(torch.tensor([-1.0, 0.0, 0.3, 2.0])) if window else None
    whole = attention(query, key, value, window, 0.0, None, backend="math", **how)
    for i in range(20):
        seen = slice(max(0, i + 1 - (window or 20)), i + 1)
        one = cached_attention(query[:, :, i : i + 1], key[:, :, seen], value[:, :, seen], **how)
        close(one, whole[:, :, i : i + 1], torch.float32)


# -- pieces on a CPU
# ------------------------------------------------------------------------------------------------


class KernelCalls(TorchDispatchMode):
    """Queries times keys in each call of the flash kernel, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: dict[bool, list[int]] = {False: [], True: []}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
            query, key = args[1:3] if name.endswith("_backward") else args[:2]
            self.scores[name.endswith("_backward")].append(query.shape[2] * key.shape[2])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("s", "forward", "backward"), [(256, 0.63, 0.75), (512, 0.57, 0.63), (1024, 1.0, 0.57)]
)
def test_flash_attention_on_a_cpu_leaves_out_much_of_the_future(
    s: int, forward: float, backward: float
) -> None:
    """Pieces compute this share of the scores of all queries and keys; causal attention needs half
    of them."""
    heads = split_heads(torch.randn(1, s, 3 * 8 * 64, requires_grad=True) * 1, 8, 8, None)
    with KernelCalls() as calls:
        attention(*heads, None, 0.0, None, backend="flash").sum().backward()
    assert 0.5 < sum(calls.scores[False]) / s**2 <= forward
    assert 0.5 < sum(calls.scores[True]) / s**2 <= backward


@pytest.mark.parametrize("shape", [(2, 8, 2, 256, 64), (1, 2, 2, 40, 8)], ids=str)
def test_gradients_of_flash_attention_on_a_cpu_are_joined(shape: tuple[int, ...]) -> None:
    """The gradient of the projection holds those of query, key and value, computed in pieces or
    not."""
    b, n, g, s, d = shape
    projection = torch.randn(b, s, (n + 2 * g) * d, requires_grad=True)
    heads = split_heads(projection * 1, n, g, None)
    output = attention(*heads, None, 0.0, None, backend="flash")
    (grad,) = torch.autograd.grad(output, projection, torch.ones_like(output))
    leaves = [head.detach().requires_grad_() for head in heads]
    again = attention(*leaves, None, 0.0, None, backend="flash")
    parts = torch.autograd.grad(again, leaves, torch.ones_like(again))
    assert torch.equal(
        grad.view(b, s, -1, d), torch.cat([part.transpose(1, 2) for part in parts], dim=2)
    )
