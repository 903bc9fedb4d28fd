"""Cross-entropy and the fused head against float64 through autograd, by the Triton kernel and by
the torch reference.

Runs on a GPU if there is one, else on the CPU in Triton's interpreter.
"""

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.kernels import cross_entropy
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.cross_entropy import (
    LARGEST_BLOCK,
    REFERENCE_ELEMENTS,
    Sums,
    capped,
    held_logits,
    linear_cross_entropy,
    sweep,
)
from megatron_lite.kernels.products import add_product
from megatron_lite.kernels.triton_support import runs_on
from megatron_lite.model.embedding_and_head import chunk_tokens
from megatron_lite.model.gpt import build_gpt
from megatron_lite.parameter import Parameter, padded
from tests.support.harness import parameters_of, tiny_config
from tests.support.kernel_checks import (
    DEVICE,
    DTYPES,
    IMPLEMENTATIONS,
    TOLERANCE,
    covering,
    empty_gradient,
    implementations,
    products_in_fp32,
)
from tests.support.kernel_checks import randn as random_values
from tests.support.memory_meters import PeakMeter, a_model, micro_batches

SCALE = 0.37
# The interpreter's NumPy warns of garbage in the padding behind a block, which no test reads.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def randn(*shape: int) -> Tensor:
    return random_values(*shape).to(DEVICE)


def some_labels(t: int, v: int) -> Tensor:
    """Return labels that include the first and the last entry; every fourth token is masked."""
    labels = torch.arange(t, device=DEVICE) * 7 % v
    labels[-1] = v - 1
    return labels.masked_fill(torch.arange(t, device=DEVICE) % 4 == 3, -100)


def exact_loss(logits: Tensor, labels: Tensor, z_loss: float, soft_cap: float = 0.0) -> Tensor:
    """Compute the formula, summed over tokens."""
    kept = labels >= 0
    logits = soft_cap * (logits / soft_cap).tanh() if soft_cap else logits
    entropy = functional.cross_entropy(logits[kept], labels[kept], reduction="sum")
    return entropy + z_loss * logits[kept].logsumexp(-1).square().sum()


def make_padded_parameter(values: Tensor, padding_rows: int) -> Parameter:
    """Return a parameter with zeros behind it and its gradient, as in a stage, and NaN behind the
    zeros."""
    v, h = values.shape
    memory = functional.pad(
        functional.pad(values, (0, 0, 0, padding_rows)), (0, 0, 0, 3), value=torch.nan
    )
    made = cast(Parameter, Parameter(memory[:v]))
    made.main_grad = torch.full(memory.shape, torch.nan, device=DEVICE)[:v]
    made.gradient_is_empty = True
    padded(made.main_grad, padding_rows)[v:] = 0.0
    return made


def close(ours: Tensor | None, exact: Tensor | None, tolerance: float) -> None:
    assert ours is not None and exact is not None and ours.shape == exact.shape
    assert float((ours.detach().double() - exact.detach()).abs().max()) <= tolerance * float(
        exact.detach().abs().max()
    )


def scale() -> Tensor:
    return torch.tensor(SCALE, device=DEVICE)


def run(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *cuts: Any,
    trained: tuple[bool, bool] = (True, True),
    **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss and the gradients of hidden states and weight."""
    ours = hidden.clone().requires_grad_(trained[0])
    parameter = empty_gradient(weight.clone(), trained=trained[1])
    loss = linear_cross_entropy(ours, parameter, labels, scale(), *cuts, **options)
    if trained[0] or trained[1]:
        loss.backward()
    return loss.detach(), ours.grad, parameter.main_grad if trained[1] else None


# t, h, v, chunk of tokens, block of the vocabulary, z-loss, soft cap
SIZES = [
    (11, 6, 13, 1000, None, 0.0, 0.0),
    (11, 6, 13, 1000, None, 0.0, 2.5),
    (11, 6, 13, 4, 5, 0.1, 0.0),
    (11, 6, 13, 4, 5, 0.1, 2.5),
    (12, 5, 300, 5, None, 0.02, 2.5),
    (6, 16, 128, 3, 64, 0.0, 0.0),
    (5, 33, 1031, 5, 250, 0.01, 0.0),
    (2, 3, 5, 1, 1, 0.0, 0.0),
    (1, 1, 2, 1, 1000, 0.0, 0.0),
]


@pytest.mark.parametrize(("size", "dtype", "triton"), covering(SIZES, DTYPES, IMPLEMENTATIONS))
def test_head_against_float64(size: tuple[Any, ...], dtype: torch.dtype, triton: bool) -> None:
    """Check loss and both gradients, with masked labels, odd sizes, and chunks and blocks that do
    not divide.

    Logits lie far within a soft cap and far beyond it; the z-loss takes the capped ones. An
    evaluation computes the same bits and no gradient.
    """
    t, h, v, chunk, block, z_loss, cap = size
    spread = 2 if cap else 1
    hidden = randn(t, h).to(dtype)
    weight = (spread * randn(v, h) / h**0.5).to(dtype)
    labels = some_labels(t, v)
    exact_hidden, exact_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    exact = exact_loss(exact_hidden @ exact_weight.t(), labels, z_loss, cap)
    (exact * SCALE).backward()
    options: dict[str, Any] = dict(z_loss=z_loss, soft_cap=cap, triton=triton)
    loss, grad_hidden, grad_weight = run(hidden, weight, labels, chunk, block, **options)
    assert loss.dtype == torch.float64
    close(loss, exact, TOLERANCE[dtype])
    close(grad_hidden, exact_hidden.grad, TOLERANCE[dtype])
    close(grad_weight, exact_weight.grad, TOLERANCE[dtype])
    parameter = empty_gradient(weight)
    with torch.no_grad():
        evaluated = linear_cross_entropy(hidden, parameter, labels, None, chunk, block, **options)
    assert torch.equal(evaluated, loss)
    assert parameter.gradient_is_empty and bool(parameter.main_grad.isnan().all())


@implementations
def test_soft_cap_of_extreme_logits(triton: bool) -> None:
    """Infinities become the cap, NaN stays NaN, and sampling sees the same logits."""
    logits = (
        torch.tensor([[torch.inf, -torch.inf, 1e30, -1e30, 0.0, 1e-3, 0.29, 0.31]], device=DEVICE)
        * 30
    )
    labels = torch.tensor([4], device=DEVICE)
    exact = exact_loss(logits.double(), labels, 0.1, 30.0)
    sums, grad = Sums.empty(1, DEVICE), logits.clone()
    sweep(grad, labels, sums, scale(), 0.1, soft_cap=30.0, triton=triton)
    close(sums.loss(labels, 0.1), exact, 1e-6)
    assert bool(grad.isfinite().all()) and not bool(grad[0, :4].any()), (
        "a logit far beyond the cap gets no gradient"
    )
    close(capped(logits, 30.0), 30 * (logits.double() / 30).tanh(), 1e-6)
    assert capped(logits, 0.0) is logits
    broken = torch.tensor([[torch.nan, 1.0]], device=DEVICE)
    sweep(broken, labels.fill_(1), sums, scale(), soft_cap=30.0, triton=triton)
    assert bool(sums.loss(labels).isnan())


@implementations
@pytest.mark.parametrize(
    ("block", "padding_rows", "dtype"),
    [
        (None, 1, torch.bfloat16),
        (None, 200, torch.float32),
        (5, 1, torch.float32),
        (5, 20, torch.bfloat16),
    ],
)
def test_rows_of_zeros_behind_the_weight_change_nothing(
    block: int | None, padding_rows: int, dtype: torch.dtype, triton: bool
) -> None:
    """Loss, z-loss and gradients do not change, and the rows get zero gradients. A second backward
    pass adds."""
    t = 5
    h = 6
    v = 13
    hidden = randn(t, h).to(dtype)
    weight = randn(v, h).to(dtype)
    labels = some_labels(t, v)
    options: dict[str, Any] = dict(z_loss=0.1, soft_cap=4.0, triton=triton)
    loss, grad_hidden, grad_weight = run(hidden, weight, labels, 3, block, **options)
    ours, parameter = hidden.clone().requires_grad_(), make_padded_parameter(weight, padding_rows)
    for times in (1, 2):
        ours.grad = None
        found = linear_cross_entropy(
            ours, parameter, labels, scale(), 3, block, padding_rows=padding_rows, **options
        )
        found.backward()
        close(found, loss, 1e-6)
        close(
            ours.grad,
            cast(Tensor, grad_hidden).double(),
            1e-5 if dtype == torch.float32 else TOLERANCE[dtype],
        )
        exact = times * cast(Tensor, grad_weight).double()
        close(parameter.main_grad, exact, 1e-5 if dtype == torch.float32 else TOLERANCE[dtype])
        assert not bool(padded(parameter.main_grad, padding_rows)[v:].any())


@implementations
@pytest.mark.parametrize("block", [None, 9])
def test_frozen_sides_leave_the_other_gradient_as_it_is(block: int | None, triton: bool) -> None:
    sizes = randn(5, 6), randn(17, 6), some_labels(5, 17)
    loss, grad_hidden, grad_weight = run(*sizes, 3, block, triton=triton)
    for trained in ((True, False), (False, True), (False, False)):
        partly = run(*sizes, 3, block, triton=triton, trained=trained)
        assert torch.equal(partly[0], loss)
        for grad, whole, needed in zip(
            partly[1:], (grad_hidden, grad_weight), trained, strict=True
        ):
            assert (
                grad is None if not needed else torch.equal(cast(Tensor, grad), cast(Tensor, whole))
            )


@implementations
@pytest.mark.parametrize("block", [None, 9])
def test_masked_tokens_change_nothing(block: int | None, triton: bool) -> None:
    """If all are masked, loss and gradients are exactly zero; if some are, the result is that of
    the others."""
    hidden, weight = randn(6, 6), randn(17, 6)
    none = torch.full((6,), -1, device=DEVICE)
    for result in run(hidden, weight, none, 4, block, 0.1, triton):
        assert not bool(cast(Tensor, result).any())
    labels = some_labels(6, 17)
    kept = labels >= 0
    loss, grad_hidden, grad_weight = run(hidden, weight, labels, 6, block, 0.1, triton)
    fewer = run(hidden[kept], weight, labels[kept], 6, block, 0.1, triton)
    close(loss, fewer[0], 1e-5)
    close(cast(Tensor, grad_hidden)[kept], cast(Tensor, fewer[1]).double(), 1e-5)
    close(grad_weight, cast(Tensor, fewer[2]).double(), 1e-5)
    assert not bool(cast(Tensor, grad_hidden)[~kept].any())


def sweep_blocks(
    logits: Tensor, labels: Tensor, z_loss: float, triton: bool, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return loss and gradient of logits, in blocks as the head visits them, with garbage behind
    every block."""
    t, v = logits.shape
    size, sums = block or v, Sums.empty(t, logits.device)
    padded = [functional.pad(part, (0, 5), value=torch.nan) for part in logits.split(size, dim=1)]
    starts = range(0, v, size)
    options: dict[str, Any] = dict(z_loss=z_loss, triton=triton)
    for part, start in zip(padded, starts, strict=True):
        begun = part.clone() if block else part
        factor = None if block else scale()
        sweep(begun, labels, sums, factor, columns=part.shape[1] - 5, start=start, **options)
    if block:
        for part, start in zip(padded, starts, strict=True):
            sweep(
                part,
                labels,
                sums,
                scale(),
                columns=part.shape[1] - 5,
                start=start,
                accumulate=False,
                **options,
            )
    return sums.loss(labels, z_loss), torch.cat([part[:, :-5] for part in padded], dim=1)


def check_sweep(
    logits: Tensor, labels: Tensor, triton: bool, block: int | None, tolerance: float
) -> None:
    exact = logits.double().requires_grad_()
    loss = exact_loss(exact, labels, 1e-4)
    (loss * SCALE).backward()
    ours, grad = sweep_blocks(logits, labels, 1e-4, triton, block)
    assert grad.dtype == logits.dtype
    close(ours, loss, tolerance)
    close(grad, exact.grad, tolerance)
    assert torch.equal(sweep_blocks(logits, labels, 1e-4, triton, block)[1], grad), (
        "other bits the second time"
    )


@implementations
@pytest.mark.parametrize("block", [None, 100])
def test_extreme_logits(block: int | None, triton: bool) -> None:
    """Nothing overflows: logits thousands apart, minus infinity for entries and for whole blocks,
    all equal."""
    logits = randn(8, 300)
    logits[0] *= 1e4
    logits[1] += 1e4
    logits[2] -= 1e4
    logits[3] = 1e4
    logits[4, 1::2] = -torch.inf
    logits[5, :200] = -torch.inf
    logits[6, 1:] = -torch.inf
    logits[7, :299] = -3e38
    labels = torch.tensor([5, 299, 0, 7, 100, 250, 0, 299], device=DEVICE)
    check_sweep(logits, labels, triton, block, 1e-3)  # 1e4 in fp32 is exact to 1e-3
    check_sweep(logits[4:], labels[4:], triton, block, 1e-5)


@implementations
def test_non_finite_logits_reach_loss_and_gradient(triton: bool) -> None:
    """Any bad token must show in the loss and in its gradient."""
    for bad in (torch.nan, torch.inf):
        logits = randn(4, 40)
        logits[2, 7] = bad
        loss, grad = sweep_blocks(logits, some_labels(4, 40), 0.0, triton)
        assert not bool(loss.isfinite()) and not bool(grad[2].isfinite().any())
        assert bool(grad[:2].isfinite().all())


@pytest.mark.parametrize(
    ("size", "dtype", "triton"),
    covering([(2, 256_000), (3, LARGEST_BLOCK + 1), (2, 50_257)], DTYPES[:2], IMPLEMENTATIONS),
)
def test_large_vocabularies(size: tuple[int, int], dtype: torch.dtype, triton: bool) -> None:
    t, v = size
    logits, labels = (3 * randn(t, v)).to(dtype), torch.arange(t, device=DEVICE) * (v // t)
    check_sweep(logits, labels, triton, None, 1e-5 if dtype == torch.float32 else 5e-3)
    check_sweep(logits, labels, triton, v // 3 + 1, 1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU takes too many rows at a time for a test")
def test_reference_in_more_than_one_part() -> None:
    """More rows than the reference takes at a time give the results of single rows.

    Not their bits: with several threads torch shares a single row's sum among them.
    """
    v = REFERENCE_ELEMENTS["cpu"] // 4 + 1
    logits, labels = randn(7, v), some_labels(7, v)
    _, grad = sweep_blocks(logits, labels, 0.1, False)
    for row in range(7):
        single = sweep_blocks(logits[row : row + 1], labels[row : row + 1], 0.1, False)[1][0]
        torch.testing.assert_close(single, grad[row], rtol=2e-6, atol=0)


@pytest.mark.parametrize("block", [None, 40])
def test_rows_of_logits_end_in_numbers(block: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product may read beyond a row of its first factor (oneDNN does with AMX, in bf16) and
    multiply by zero what it finds there, which must not be NaN."""
    seen = []

    def add(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
        rows = a if a.stride(1) == 1 else a.t()
        whole = (len(rows), rows.stride(0))
        seen.append(bool(rows.as_strided(whole, rows.stride()).isfinite().all()))
        add_product(total, a, b, first)

    def poisoned(like: Tensor, *shape: Any, **options: Any) -> Tensor:
        options = {"dtype": like.dtype} | options
        return torch.empty(*shape, **options).fill_(torch.nan)

    monkeypatch.setattr(cross_entropy, "add_product", add)
    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    hidden, weight = randn(32, 64).bfloat16(), randn(67, 64).bfloat16()
    run(hidden, weight, some_labels(32, 67), 32, block)
    assert seen == [True] * (2 if block is None else 4)


def test_blocks_cost_no_precision() -> None:
    """The bf16 hidden gradient of fifty blocks is as accurate as that of one product over the whole
    vocabulary."""
    hidden = randn(16, 32).bfloat16()
    weight = randn(3200, 32).bfloat16()
    labels = some_labels(16, 3200)
    exact = hidden.double().requires_grad_()
    (exact_loss(exact @ weight.double().t(), labels, 0.0) * SCALE).backward()
    whole, cut = (run(hidden, weight, labels, 16, block)[1] for block in (None, 64))
    errors = [
        float((cast(Tensor, grad).double() - cast(Tensor, exact.grad)).norm())
        for grad in (whole, cut)
    ]
    assert errors[1] < 1.2 * errors[0]


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="counts what CPU operations allocate; see the test below"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [None, 1024])
@pytest.mark.parametrize("trains", [True, False])
def test_no_more_logits_live_than_a_chunk_and_a_block(
    trains: bool, block: int | None, dtype: torch.dtype
) -> None:
    """Logits live in the training dtype, plus an fp32 copy of what the reference works on at a
    time."""
    t = 512
    h = 4
    v = 8192
    chunk = 128
    hidden = randn(t, h).to(dtype).requires_grad_(trains)
    parameter = empty_gradient(randn(v, h).to(dtype), trained=trains)
    labels = some_labels(t, v)
    rows, columns = held_logits(t, v, chunk, block)
    assert (rows, columns) == (chunk, block or v)
    copied = min(REFERENCE_ELEMENTS["cpu"], rows * columns) * 4 if dtype != torch.float32 else 0
    gradients = (
        t * h * dtype.itemsize
        + chunk * h * 4
        + (v * h * dtype.itemsize if dtype != torch.float32 else 0)
    )
    # sums, their loss in fp64, and a few vectors of the chunk
    vectors = t * (2 * 4 + 4 * 8) + chunk * 64
    with products_in_fp32(False), PeakMeter() as meter:
        loss = linear_cross_entropy(
            hidden, parameter, labels, scale() if trains else None, chunk, block
        )
    held = rows * columns * dtype.itemsize
    assert held <= meter.peak <= held + copied + gradients + vectors
    del loss


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device")
@pytest.mark.parametrize("block", [None, 32_064])
def test_memory_on_a_gpu(block: int | None) -> None:
    """8,192 tokens and 128,256 entries in bf16 take at most 0.8 GB besides weight and gradients."""
    t = 8192
    h = 256
    v = 128_256
    hidden, labels = randn(t, h).bfloat16().requires_grad_(), some_labels(t, v)
    parameter = empty_gradient(randn(v, h).bfloat16())
    chunk = chunk_tokens(None, t, DEVICE, 2)
    # libraries' workspaces
    linear_cross_entropy(hidden, parameter, labels, scale(), chunk, block, triton=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, parameter, labels, scale(), chunk, block, triton=True)
    assert torch.cuda.max_memory_allocated() - before <= (8e8 if block is None else 2.5e8)


def test_chunk_of_tokens() -> None:
    """Splits follow the flag; defaults bound the logits and leave no small last chunk."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [chunk_tokens(splits, 10, cpu, 4) for splits in (1, 3, 10)] == [10, 4, 1]
    assert [chunk_tokens(None, 8192, cpu, itemsize) for itemsize in (4, 2)] == [256, 512]
    assert chunk_tokens(None, 8192, gpu, 2) * 128_256 * 2 <= 8e8
    for tokens in (1, 100, 1024, 3072, 3073, 4096, 8192, 16384, 100_000):
        chunk = chunk_tokens(None, tokens, gpu, 2)
        assert chunk <= 3072 and (tokens % chunk or chunk) > chunk - 128 * -(-tokens // chunk)


@pytest.mark.skipif(not runs_on(torch.device("cpu")), reason="this test runs models on the CPU")
def test_head_uses_the_chosen_kernels() -> None:
    """The Triton kernel in three chunks and blocks of the vocabulary give the default's step.

    A chunk or block that is left out or counted twice changes a gradient by a large part of its
    norm, and an order of additions by a millionth.
    """
    config = tiny_config(1)
    results = []
    for kernels in (
        Kernels(),
        Kernels(cross_entropy="triton", cross_entropy_splits=3),
        Kernels(cross_entropy_splits=2, cross_entropy_block_size=50),
    ):
        model = a_model(config, build_gpt(config.model, config.batch.sequence_length, kernels))
        loss = model.forward_backward(micro_batches(config))
        grads = [p.main_grad.clone() for _, p in parameters_of(model)]
        results.append((torch.as_tensor(loss), grads))
    (loss, grads), *others = results
    for other, other_grads in others:
        assert float(other) == pytest.approx(float(loss), rel=1e-4)
        for one, two in zip(other_grads, grads, strict=True):
            assert float((one - two).norm()) <= 1e-3 * float(two.norm())
