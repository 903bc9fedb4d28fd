"""Scales, rounding and products of 8 bits are checked as they are defined, and each mistake in them
is named."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from megatron_lite.config import Config
from megatron_lite.kernels.eight_bit import Rounded
from scripts.proof.cases import case_of, flags_of
from scripts.proof.eight_bits import OF_SUM, Scales, Use, _fault_of_product, nearest

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_nearest_number_is_that_of_a_search(dtype: torch.dtype) -> None:
    """Among all finite numbers of the format, ties to the even code; beyond the largest, the
    largest."""
    codes = torch.arange(128, dtype=torch.uint8)
    numbers = codes.view(dtype).float()
    numbers = numbers[numbers.isfinite()]
    middles = (numbers[1:] + numbers[:-1]) / 2
    dice = torch.Generator().manual_seed(0)
    drawn = torch.randn(2000, generator=dice) * 10 ** (torch.rand(2000, generator=dice) * 12 - 8)
    values = torch.cat(
        [numbers, middles, middles.nextafter(torch.tensor(0.0)), drawn.abs(), numbers[-1:] * 3]
    )
    distances = (values[:, None].double() - numbers.double()).abs()
    nearest_two = distances == distances.amin(1, keepdim=True)
    places = torch.where(nearest_two.sum(1) == 2, 0, distances.argmin(1))
    ties = nearest_two & (torch.arange(len(numbers)) % 2 == 0)
    places = torch.where(nearest_two.sum(1) == 2, ties.float().argmax(1), places)
    for sign in (1, -1):
        assert torch.equal(nearest(sign * values, dtype), sign * numbers[places])


def test_integers_round_to_the_nearest() -> None:
    """Ties to even, and no further than 127."""
    values = torch.tensor([-200.0, -2.5, -0.4, 0.5, 1.5, 126.6, 127.5])
    assert nearest(values, torch.int8).tolist() == [-127, -2, 0, 0, 2, 127, 127]


def test_a_product_may_differ_by_its_sum_in_fp32_only() -> None:
    """A difference of four times that, in one element, is a fault; bf16 may round once more."""
    dice = torch.Generator().manual_seed(0)
    a, b = (
        Rounded(torch.randn(6, 40, generator=dice).to(torch.float8_e4m3fn), torch.tensor([[scale]]))
        for scale in (0.01, 3.0)
    )
    exact = (a.numbers.double() * 0.01) @ (b.numbers.double() * 3.0).t()
    limit = OF_SUM * 40 * (a.numbers.double().abs() * 0.01) @ (b.numbers.double().abs() * 3.0).t()
    assert not _fault_of_product(a, b, exact.float()) and not _fault_of_product(
        a, b, exact.bfloat16()
    )
    wrong = exact.clone()
    wrong[2, 3] += 4 * limit[2, 3]
    assert _fault_of_product(a, b, wrong.float())
    assert _fault_of_product(a, b, (exact * 1.02).bfloat16())


def config_of(flags: str) -> Config:
    return case_of(flags_of(flags), 2, None).parts({"device": "cpu"})[0].config


def use_of(largest: float, scale: float, **changes: object) -> Use:
    """Return a use of a weight whose rows ranks split."""
    numbers = (np.full(1, number, np.float32) for number in (largest, scale))
    return Use("blocks.0.mlp.up", 1, "i", "o", False, True, *numbers, "")._replace(**changes)  # type: ignore[arg-type]


def fault_of(flags: str, *iterations: Sequence[Use]) -> str:
    """Return the first fault of iterations, each with a use of each rank."""
    scales, config = Scales(), config_of(flags)
    return next(
        (
            fault
            for uses in iterations
            if (fault := scales.fault(config, [[use] for use in uses], True))
        ),
        "",
    )


def test_a_scale_is_that_of_the_whole_factor() -> None:
    """The largest magnitude of tensor-parallel ranks; by row, only along the dimension of the
    sum."""
    of_all, own = np.float32(2) / np.float32(448), np.float32(1) / np.float32(448)
    tensor = "--tensor_parallel=2 --fp8="
    assert not fault_of(f"{tensor}tensorwise", [use_of(1, of_all), use_of(2, of_all)])
    fault = fault_of(f"{tensor}tensorwise", [use_of(1, own), use_of(2, of_all)])
    assert fault.startswith(
        "the weight of blocks.0.mlp.up, summed over i, on tensor-parallel rank 0 has the scale"
    )
    assert not fault_of(f"{tensor}rowwise", [use_of(1, own), use_of(2, of_all)])
    assert not fault_of(
        f"{tensor}rowwise", [use_of(1, of_all, over="o"), use_of(2, of_all, over="o")]
    )
    assert fault_of(f"{tensor}rowwise", [use_of(1, own, over="o"), use_of(2, of_all, over="o")])
    assert fault_of(
        "--fp8=tensorwise", [use_of(1, np.nextafter(own, np.float32(1))), use_of(2, of_all)]
    )
    assert fault_of(
        "--fp8=tensorwise", [use_of(1, own, fault="is wrong"), use_of(2, of_all)]
    ).endswith("0 is wrong")


def test_a_delayed_scale_follows_from_the_iterations_before() -> None:
    """Of all ranks, and no more of them than the history has; a frozen weight has its own."""

    def delayed(magnitude: float) -> np.float32:
        return np.float32(1) / (np.float32(448) / np.float32(magnitude))

    def run(length: int, *scales: float) -> str:
        magnitudes = [(5, 1), (2, 3), (1, 1)]
        flags = f"--fp8=delayed --amax_history_length={length}"
        return fault_of(
            flags, *([use_of(m, s) for m in of] for of, s in zip(magnitudes, scales, strict=True))
        )

    assert not run(1, 1.0, delayed(5), delayed(3)) and not run(2, 1.0, delayed(5), delayed(5))
    assert (
        run(1, 1.0, delayed(5), delayed(5))
        and run(2, 1.0, delayed(5), delayed(3))
        and run(2, 1.0, delayed(1), 1.0)
    )
    own = np.float32(5) / np.float32(448)
    assert not fault_of("--fp8=delayed", *[[use_of(5, own, frozen=True)] * 2] * 2)
    assert fault_of("--fp8=delayed", *[[use_of(5, 1.0, frozen=True)] * 2] * 2)


def test_evaluations_do_not_count_in_histories() -> None:
    """They have the scale of the next iteration."""
    scales, config = Scales(), config_of("--fp8=delayed")
    first, later = use_of(5, 1.0), np.float32(1) / (np.float32(448) / np.float32(5))
    assert not scales.fault(config, [[first], [first]], ends_iteration=True)
    use = use_of(9, later, trains=False)
    assert not scales.fault(config, [[use], [use]], ends_iteration=False)
    assert not scales.fault(config, [[use_of(1, later)]] * 2, ends_iteration=True)
