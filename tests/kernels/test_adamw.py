"""AdamW on a flat shard, in one pass and in two, against the formula in fp64, in every form of the
weights.

Dropped updates change no bit.
"""

import itertools
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.kernels import adamw as module
from megatron_lite.kernels.adamw import (
    ALIGNMENT,
    BLOCK,
    Control,
    Hyperparameters,
    Range,
    Ranges,
    Shard,
    StepNumbers,
    adamw,
    adamw_moments,
    adamw_weights,
)
from megatron_lite.kernels.weight_shard import WeightShard, split
from tests.support.kernel_checks import covering

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Ranges shorter and longer than the kernel's block, none a multiple of it.
ROWS = (
    Range(0, 64, 1.0, 0.0),
    Range(64, BLOCK + 256, 0.5, 1.0),
    Range(BLOCK + 256, 3 * BLOCK + 64, 2.0, 1.0),
)
NUMEL = ROWS[-1].end
NUMBERS = Hyperparameters(beta1=0.9, beta2=0.95, eps=1e-8)
RATE, DECAY = 0.02, 0.1
MARGIN, MARK = 64, 7.0  # elements around the shard, and their value

FACTORS = (0.25, 1.0, 0.5)  # on the update of each range, in two passes

FORMS = ["master alone", "bf16 in place", "fp16 in place", "split"]
GRADIENTS = [torch.float32, torch.bfloat16, torch.float16]
TRITON = (False, True)


def inside(values: Tensor) -> Tensor:
    """Return a copy in the middle of a larger memory full of marks."""
    memory = torch.full((len(values) + 2 * MARGIN,), MARK, dtype=values.dtype, device=DEVICE)
    memory[MARGIN:-MARGIN] = values.to(DEVICE)
    return memory[MARGIN:-MARGIN]


def around(tensor: Tensor) -> Tensor:
    memory = torch.empty(0, dtype=tensor.dtype, device=DEVICE).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    return torch.cat([memory[:MARGIN], memory[-MARGIN:]])


def draw(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def make_shard(form: str, gradient_dtype: torch.dtype, numel: int = NUMEL) -> Shard:
    weights, zeros = draw(0, numel), torch.zeros(numel)
    rounded = remainder = None
    if form == "split":
        rounded = inside(torch.zeros(numel, dtype=torch.bfloat16))
        remainder = inside(torch.zeros(numel, dtype=torch.int16))
        split(weights.to(DEVICE), rounded, remainder)
    elif form != "master alone":
        rounded = inside(weights.to(torch.bfloat16 if form == "bf16 in place" else torch.float16))
    master = None if form == "split" else inside(weights)
    return Shard(
        WeightShard(master, rounded, remainder),
        inside(zeros.to(gradient_dtype)),
        inside(zeros),
        inside(zeros),
    )


def forms_of(shard: Shard) -> list[Tensor]:
    """Return the weights in every form that is kept."""
    return [one for one in vars(shard.weights).values() if isinstance(one, Tensor)]


def master_of(shard: Shard) -> Tensor:
    return shard.weights.read()


def control_of(
    divisor: float,
    updates: int,
    skipped: bool = False,
    numbers: Hyperparameters = NUMBERS,
    rate: float = RATE,
    decay: float = DECAY,
) -> Control:
    scalars = (torch.tensor(float(value), device=DEVICE) for value in (divisor, skipped, updates))
    return Control(StepNumbers(rate, decay, *scalars), numbers)


def update(
    shard: Shard, gradient: Tensor, control: Control, triton: bool, rows: Sequence[Range] = ROWS
) -> None:
    shard.gradient.copy_(gradient)
    adamw(shard, Ranges(rows, DEVICE), control, triton)


class Exact:
    """The formula, in fp64."""

    def __init__(self) -> None:
        self.weights = draw(0).double()
        self.m = torch.zeros(NUMEL).double()
        self.v = torch.zeros(NUMEL).double()

    def update(
        self, gradient: Tensor, divisor: float, control: Control, factors: Sequence[float]
    ) -> list[float]:
        """Update, and return the sum of squares of the step in each range, before factors and
        learning rates."""
        numbers = control.numbers
        step = control.step
        updates = int(control.step.updates)
        g = gradient.double() / divisor
        squares = []
        beta = numbers.beta1
        self.m = beta * self.m + (1 - beta) * g
        self.v = numbers.beta2 * self.v + (1 - numbers.beta2) * g.square()
        m, v = self.m / (1 - beta**updates), self.v / (1 - numbers.beta2**updates)
        if numbers.nesterov:
            m = beta * self.m / (1 - beta ** (updates + 1)) + (1 - beta) * g / (1 - beta**updates)
        for (start, end, lr_scale, decay_scale, *_), factor in zip(ROWS, factors, strict=True):
            rate, own = step.learning_rate * lr_scale, slice(start, end)
            u = (
                m[own] / (v[own].sqrt() + numbers.eps)
                + step.weight_decay * decay_scale * self.weights[own]
            )
            self.weights[own] -= rate * factor * u
            squares.append(float(u.square().sum()))
        return squares


def bits(shard: Shard) -> list[bytes]:
    return [t.cpu().view(torch.int16).numpy().tobytes() for t in (*forms_of(shard), *shard[2:])]


# in the dropped update
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")
@pytest.mark.parametrize(
    ("form", "dtype", "nesterov", "triton"), covering(FORMS, GRADIENTS, [False, True], TRITON)
)
def test_several_updates_equal_the_formula(
    form: str, dtype: torch.dtype, nesterov: bool, triton: bool
) -> None:
    """Scaled and clipped gradients, changing learning rates, three ranges; rounded weights equal
    the master.

    Updates with infinite and NaN gradients are dropped in between and change no bit.
    """
    compare(form, dtype, nesterov, triton, passes=1)


# in the dropped update
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")
@pytest.mark.parametrize(
    ("form", "dtype", "nesterov", "triton"),
    covering(["master alone", "bf16 in place", "split"], GRADIENTS[:2], [False, True], TRITON),
)
def test_updates_in_two_passes_equal_the_formula(
    form: str, dtype: torch.dtype, nesterov: bool, triton: bool
) -> None:
    """The same with factors on the updates; sums of squares are exact, and zero for a dropped
    update."""
    compare(form, dtype, nesterov, triton, passes=2)


def compare(form: str, dtype: torch.dtype, nesterov: bool, triton: bool, passes: int) -> None:
    shard = make_shard(form, dtype)
    exact = Exact()
    factors = FACTORS if passes == 2 else (1.0,) * 3

    def update(gradient: Tensor, control: Control) -> list[float]:
        shard.gradient.copy_(gradient)
        ranges = Ranges(ROWS, DEVICE)
        if passes == 1:
            adamw(shard, ranges, control, triton)
            return []
        sums = adamw_moments(shard, ranges, control, triton)
        assert sums.shape == (3,) and sums.dtype == torch.float64
        adamw_weights(shard, ranges, torch.tensor(factors, device=DEVICE), control, triton)
        return sums.tolist()

    def drop(updates: int) -> None:
        before, poison = bits(shard), torch.full((NUMEL,), torch.inf)
        poison[::2] = torch.nan
        assert not any(
            update(poison, control_of(torch.nan, updates, skipped=True, numbers=numbers))
        )
        assert bits(shard) == before, "a dropped update changed something"

    numbers = Hyperparameters(0.9, 0.95, 1e-8, nesterov)
    drop(0)
    for updates, divisor in enumerate((1.0, 512.0, 65536.0), start=1):
        control = control_of(divisor, updates, numbers=numbers, rate=RATE / updates)
        scale = min(divisor, 2048.0)  # fp16 holds 65504 at most
        gradient = (draw(updates) * scale).to(dtype)
        squares = exact.update(gradient, divisor, control, factors)
        assert update(gradient, control) == pytest.approx(squares if passes == 2 else [], rel=1e-6)
        for ours, formula in ((master_of(shard), exact.weights), (shard.m, exact.m)):
            assert torch.allclose(ours.cpu().double(), formula, rtol=2e-6, atol=2e-6), updates
        assert torch.allclose(shard.v.cpu().double(), exact.v, rtol=1e-5, atol=0), updates
        if form.endswith("in place"):
            rounded = shard.weights.rounded
            assert rounded is not None and torch.equal(rounded, master_of(shard).to(rounded.dtype))
    drop(updates)
    for tensor in (*forms_of(shard), *shard[1:]):
        assert (around(tensor) == MARK).all(), "memory around the shard changed"


@pytest.mark.parametrize(
    ("dtype", "triton"), list(zip(GRADIENTS, (True, False, True), strict=True)), ids=str
)
def test_split_weights_equal_unsplit_ones_bit_for_bit(dtype: torch.dtype, triton: bool) -> None:
    plain, halves = make_shard("master alone", dtype), make_shard("split", dtype)
    for updates in (1, 2, 3):
        gradient = draw(updates).to(dtype)
        for shard in (plain, halves):
            update(shard, gradient, control_of(1.5, updates), triton)
        assert torch.equal(master_of(halves), master_of(plain))
        assert torch.equal(halves.m, plain.m) and torch.equal(halves.v, plain.v)


@pytest.mark.parametrize("count", [1, 2, 6, 19])
def test_any_number_of_ranges(count: int) -> None:
    """Compare the kernels' table with the reference's loop, in one pass and two, with ranges
    shorter than a block."""
    borders = [0, 64, 128, BLOCK + 128, BLOCK + 192, *range(2 * BLOCK + 192, NUMEL, ALIGNMENT)]
    starts = [0, *borders[1:count]]
    rows = [
        Range(a, b, 1.0 + i, float(i % 2))
        for i, (a, b) in enumerate(zip(starts, [*starts[1:], NUMEL], strict=True))
    ]
    reference, kernel = (make_shard("bf16 in place", torch.float32) for _ in range(2))
    update(reference, draw(1), control_of(3.0, 1), False, rows)
    update(kernel, draw(1), control_of(3.0, 1), True, rows)
    assert torch.allclose(master_of(reference), master_of(kernel), rtol=1e-6, atol=1e-6)
    assert not torch.equal(master_of(kernel).cpu(), draw(0))

    before = master_of(kernel).clone()
    ranges = Ranges(rows, DEVICE)
    factors = draw(3, count).to(DEVICE)
    for shard in (reference, kernel):
        shard.gradient.copy_(draw(2))
    sums = adamw_moments(reference, ranges, control_of(3.0, 2))
    assert torch.allclose(
        adamw_moments(kernel, ranges, control_of(3.0, 2), triton=True), sums, rtol=1e-6
    )
    adamw_weights(reference, ranges, factors, control_of(3.0, 2))
    adamw_weights(kernel, ranges, factors, control_of(3.0, 2), triton=True)
    assert torch.allclose(master_of(reference), master_of(kernel), rtol=1e-6, atol=1e-5)
    assert not torch.equal(master_of(kernel), before)


@pytest.mark.parametrize("triton", [False, True])
def test_sums_do_not_depend_on_the_place_of_a_range(triton: bool) -> None:
    """A range in a shard of its own and the same range between others have the same sum, bit for
    bit."""
    rows = [
        Range(0, 64, 1.0, 1.0),
        Range(64, 64 + BLOCK + 128, 1.0, 1.0),
        Range(64 + BLOCK + 128, NUMEL, 1.0, 1.0),
    ]
    whole = make_shard("master alone", torch.float32)
    whole.gradient.copy_(draw(1))
    own = slice(rows[1].start, rows[1].end)
    alone = Shard(
        WeightShard(master_of(whole)[own].clone()), *(tensor[own].clone() for tensor in whole[1:])
    )
    sums = adamw_moments(whole, Ranges(rows, DEVICE), control_of(3.0, 1), triton)
    again = adamw_moments(
        alone, Ranges([Range(0, BLOCK + 128, 1.0, 1.0)], DEVICE), control_of(3.0, 1), triton
    )
    assert torch.equal(sums[1:2], again) and float(again) > 0.0


@pytest.mark.parametrize(
    ("form", "triton"), list(zip(FORMS, (False, True, False, True), strict=True))
)
def test_tiny_and_huge_gradients(form: str, triton: bool) -> None:
    """Finite gradients keep weights and moments finite; zeros (padding) stay zero."""
    shard = make_shard(form, torch.float32)
    gradient = draw(1) * 10.0 ** torch.linspace(-38, 18, NUMEL)
    gradient[::5] = 0.0
    for updates in (1, 2):
        update(shard, gradient, control_of(1.0, updates), triton)
    for tensor in (master_of(shard), shard.m, shard.v):
        assert torch.isfinite(tensor).all()
    assert not shard.m[::5].any() and not shard.v[::5].any()


@pytest.mark.parametrize("triton", [False, True])
def test_betas_of_zero_are_legal(triton: bool) -> None:
    """beta = 0 gives w - lr * sign(g) at any t."""
    control = control_of(1.0, 7, numbers=Hyperparameters(0.0, 0.0, 1e-30), rate=0.5, decay=0.0)
    shard = make_shard("master alone", torch.float32, 64)
    update(shard, draw(1, 64), control, triton, [Range(0, 64, 1.0, 1.0)])
    assert torch.allclose(master_of(shard).cpu(), draw(0, 64) - 0.5 * draw(1, 64).sign(), atol=1e-6)


def test_borders_must_be_aligned() -> None:
    with pytest.raises(AssertionError):
        Ranges([Range(0, 65, 1.0, 1.0)], DEVICE)


class NewMemory(TorchDispatchMode):
    """Counts the bytes of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.bytes += tensor.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize(("form", "dtype"), list(itertools.product(FORMS, GRADIENTS)), ids=str)
def test_the_kernel_allocates_nothing(form: str, dtype: torch.dtype) -> None:
    """One launch on the shard itself, without temporaries for narrow gradients or split weights.

    The reference shows that temporaries would be counted.
    """
    shard = make_shard(form, dtype)
    ranges = Ranges(ROWS, DEVICE)
    control = control_of(1.0, 1)
    launches = mock.MagicMock()  # keeps the interpreter's own copies out of the count
    with mock.patch.object(module, "_adamw_kernel", launches), NewMemory() as memory:
        adamw(shard, ranges, control, triton=True)
    assert memory.bytes == 0
    launches.__getitem__.assert_called_once_with((5,))
    pointers, *_ = launches[(5,)].call_args.args
    given = {tensor.data_ptr() for tensor in pointers[:6] if tensor is not None}
    assert given == {tensor.data_ptr() for tensor in (*forms_of(shard), *shard[1:])}, (
        "the kernel gets copies"
    )
    with NewMemory() as memory:
        adamw(shard, ranges, control)
    assert (memory.bytes > 0) == (form == "split" or dtype != torch.float32)
