"""SGD, Lion and the elementwise parts of Muon against fp64 and torch's SGD, in every form of the
weights.

Dropped updates change no bit.
"""

import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_lite.kernels import adamw
from megatron_lite.kernels.adamw import Range, StepNumbers
from megatron_lite.kernels.weight_shard import WeightShard, split
from megatron_lite.optimizer.rules.momentum import descend, lion, muon_momentum, sgd

NUMEL, DECAY = 640, 0.1
ROWS = (Range(0, 64, 1.0, 0.0), Range(64, 320, 0.5, 1.0), Range(320, NUMEL, 2.0, 1.0))
FORMS = ["master alone", "bf16 in place", "fp16 in place", "split"]
GRADIENTS = [torch.float32, torch.bfloat16, torch.float16]
Exact = tuple[Tensor, Tensor]  # weights, moment


def draw(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def make_weights(form: str, values: Tensor) -> WeightShard:
    if form == "split":
        rounded = torch.zeros_like(values).bfloat16()
        remainder = torch.zeros_like(values, dtype=torch.int16)
        split(values, rounded, remainder)
        return WeightShard(None, rounded, remainder)
    dtypes = {"master alone": None, "bf16 in place": torch.bfloat16, "fp16 in place": torch.float16}
    dtype = dtypes[form]
    return WeightShard(values.clone(), None if dtype is None else values.to(dtype), None)


def numbers_of(rate: float, divisor: float, skipped: bool = False) -> StepNumbers:
    return StepNumbers(
        rate, DECAY, torch.tensor(divisor), torch.tensor(float(skipped)), torch.zeros(())
    )


def scales() -> tuple[Tensor, Tensor]:
    """Return the factors of learning rate and weight decay for every element."""
    rate, decay = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    for start, end, lr_scale, decay_scale, *_ in ROWS:
        rate[start:end], decay[start:end] = lr_scale, decay_scale
    return rate, decay


def sgd_in_fp64(w: Tensor, m: Tensor, g: Tensor, rate: float) -> Exact:
    lr_scale, decay_scale = scales()
    m = 0.9 * m + g
    return w - rate * lr_scale * (m + DECAY * decay_scale * w), m


def lion_in_fp64(w: Tensor, m: Tensor, g: Tensor, rate: float) -> Exact:
    lr_scale, decay_scale = scales()
    step = torch.sign(0.8 * m + 0.2 * g)
    return w - rate * lr_scale * (step + DECAY * decay_scale * w), 0.95 * m + 0.05 * g


def muon_in_fp64(w: Tensor, m: Tensor, g: Tensor, rate: float) -> Exact:
    """The Nesterov update, rounded to bf16, times 1, 3 and 0.5, without orthogonalization."""
    lr_scale, decay_scale = scales()
    m = 0.7 * m + 0.3 * g
    update = (0.7 * m + 0.3 * g).bfloat16().double()
    for (start, end, *_), factor in zip(ROWS, (1.0, 3.0, 0.5), strict=True):
        update[start:end] *= factor
    return w - rate * lr_scale * (update + DECAY * decay_scale * w), m


def ours_sgd(weights: WeightShard, gradient: Tensor, exp_avg: Tensor, numbers: StepNumbers) -> None:
    sgd(weights, gradient, exp_avg, ROWS, numbers, 0.9)


def ours_lion(
    weights: WeightShard, gradient: Tensor, exp_avg: Tensor, numbers: StepNumbers
) -> None:
    lion(weights, gradient, exp_avg, ROWS, numbers, 0.8, 0.95)


def ours_muon(
    weights: WeightShard, gradient: Tensor, exp_avg: Tensor, numbers: StepNumbers
) -> None:
    update = torch.full((NUMEL,), torch.nan, dtype=torch.bfloat16)
    muon_momentum(gradient, exp_avg, update, slice(0, NUMEL), numbers, 0.7, True)
    descend(weights, update, ROWS, numbers, (1.0, 3.0, 0.5))


RULES = {
    "sgd": (ours_sgd, sgd_in_fp64),
    "lion": (ours_lion, lion_in_fp64),
    "muon": (ours_muon, muon_in_fp64),
}


def bits(*tensors: object) -> list[bytes]:
    found = [one for one in tensors if isinstance(one, Tensor)]
    return [tensor.view(torch.int16).numpy().tobytes() for tensor in found]


CASES = [*itertools.product(RULES, FORMS, GRADIENTS[:2]), ("sgd", FORMS[2], GRADIENTS[2])]


@pytest.mark.parametrize(("rule", "form", "dtype"), CASES, ids=str)
def test_several_updates_equal_the_formula(rule: str, form: str, dtype: torch.dtype) -> None:
    """Scaled gradients, changing rates, three ranges, chunks that do not divide; rounded weights
    equal the master.

    After every update one with infinite and NaN gradients is dropped: no bit changes, not even of a
    negative zero.
    """
    update, formula = RULES[rule]
    exact_weights, exact_moment = draw(0).double(), torch.zeros(NUMEL).double()
    weights, exp_avg = make_weights(form, draw(0)), torch.zeros(NUMEL)
    for count, divisor in enumerate((1.0, 512.0, 2.75, 128.0), start=1):
        gradient, rate = (draw(count) * divisor).to(dtype), 0.02 / count
        exact_weights, exact_moment = formula(
            exact_weights, exact_moment, gradient.double() / divisor, rate
        )
        with mock.patch.object(adamw, "CPU_CHUNK_NUMEL", 100):
            update(weights, gradient.clone(), exp_avg, numbers_of(rate, divisor))
        master = weights.read()
        tolerance = 2e-4 if rule == "muon" else 2e-6  # a tie may round to the other bf16 neighbour
        assert torch.allclose(master.double(), exact_weights, rtol=2e-6, atol=tolerance), count
        assert torch.allclose(exp_avg.double(), exact_moment, rtol=2e-6, atol=2e-6), count
        if form.endswith("in place"):
            assert weights.rounded is not None and torch.equal(
                weights.rounded, master.to(weights.rounded.dtype)
            )
        if weights.master is not None:
            weights.master[7] = -0.0
            exact_weights[7] = 0.0
            weights.write(weights.master)
        exp_avg[9], exact_moment[9] = -0.0, 0.0
        before = bits(*vars(weights).values(), exp_avg)
        poison = torch.full_like(gradient, torch.inf)
        poison[::2] = torch.nan
        update(weights, poison, exp_avg, numbers_of(rate, torch.nan, skipped=True))
        assert bits(*vars(weights).values(), exp_avg) == before, (
            "a dropped update changed something"
        )


@pytest.mark.parametrize("rule", RULES)
def test_split_weights_equal_unsplit_ones_bit_for_bit(rule: str) -> None:
    update, _ = RULES[rule]
    plain, halves = (make_weights(form, draw(0)) for form in ("master alone", "split"))
    moments = torch.zeros(2, NUMEL)
    for count in (1, 2, 3):
        for weights, exp_avg in zip((plain, halves), moments, strict=True):
            update(weights, draw(count), exp_avg, numbers_of(0.1, 1.5))
        assert torch.equal(halves.read(slice(0, NUMEL)), plain.read(slice(0, NUMEL)))
        assert torch.equal(*moments)


def test_lion_does_not_move_padding() -> None:
    """Zeros without a gradient stay zero, because sign(0) = 0."""
    weights, exp_avg = make_weights("master alone", torch.zeros(NUMEL)), torch.zeros(NUMEL)
    ours_lion(weights, torch.zeros(NUMEL), exp_avg, numbers_of(0.1, 1.0))
    assert not weights.read(slice(0, NUMEL)).any() and not exp_avg.any()
