"""Delayed scales against a plain re-implementation of Levanter's (haliax), and what a checkpoint
keeps of them."""

import dataclasses
import json
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_lite.distributed.rank_group import alone
from megatron_lite.kernels.eight_bit import E4M3, E5M2, RECIPES, WEIGHT, EightBit
from megatron_lite.kernels.linear import linear
from megatron_lite.optimizer.delayed_scaling import DelayedScales
from megatron_lite.parameter import Parameter
from megatron_lite.zero.stage import Stage
from tests.kernels.test_eight_bit import dequantized, nearest, weight_of
from tests.kernels.test_eight_bit import scales as scales_of
from tests.support.kernel_checks import randn

CPU = torch.device("cpu")
KEPT = torch.tensor(False)  # not skipped
Numbers = NDArray[np.float64]


class LevanterState:
    """One factor's scale and history: scale from the history, then the magnitude of now enters the
    history."""

    def __init__(self, dtype: torch.dtype, length: int) -> None:
        self.dtype, self.largest = dtype, np.float32({E4M3: 448.0, E5M2: 57344.0}[dtype])
        self.scale, self.history = np.float32(1), np.zeros(length, np.float32)

    def rounded(self, values: Numbers) -> Numbers:
        """Quantize and dequantize with the scale of this step."""
        amax = self.history.max()
        if amax > 0 and np.isfinite(amax):
            self.scale = np.float32(1) / (self.largest / amax)
        # overwrites what would be second: the oldest one, as it turns out
        self.history = np.roll(self.history, -1)
        self.history[0] = np.abs(values).max()
        scaled = (values.astype(np.float32) / self.scale).astype(np.float64)
        return nearest(np.clip(scaled, -self.largest, self.largest), self.dtype) * np.float64(
            self.scale
        )


class Layer(torch.nn.Module):
    """What `eight_bit_of` looks at."""

    def __init__(self, eight_bit: EightBit) -> None:
        super().__init__()
        self.eight_bit = eight_bit


def a_layer(length: int, weight: Any) -> tuple[EightBit, DelayedScales]:
    eight_bit = EightBit(RECIPES["delayed"], weight.spec, alone(CPU), ())
    stage = cast(Stage, type("AStage", (), {"layers": [Layer(eight_bit)]})())
    return eight_bit, DelayedScales([stage], length, alone(CPU))


@pytest.mark.parametrize("length", [1, 7, 64])
def test_fifty_steps_are_those_of_levanter(length: int) -> None:
    """Scales to the bit, outputs and gradients to rounding: magnitudes grow, shrink and vanish, and
    are clipped."""
    weight = weight_of(0.05 * randn(32, 48))
    eight_bit, scales = a_layer(length, weight)
    states = [LevanterState(dtype, length) for dtype in (E4M3, E4M3, E5M2)]
    for step in range(50):
        x = randn(16, 48, seed=step) * 3.0 ** (step % 5)
        dy = randn(16, 32, seed=100 + step) * 0.1 ** (step % 7)
        if step in (20, 21, 22):
            dy.zero_()
        weight.data.mul_(1 + 0.1 * (-1) ** step)
        weight.casts.clear()
        weight.gradient_is_empty = True
        source = x.clone().requires_grad_()
        y = linear(source, weight, products=eight_bit.at(step))
        y.backward(dy)
        q_x, q_w, q_dy = (
            state.rounded(values.detach().double().numpy())
            for state, values in zip(states, (x, weight, dy), strict=True)
        )
        used = [float(eight_bit.delayed[0][kind]) for kind in range(3)] if eight_bit.delayed else []
        assert used == [float(state.scale) for state in states], step
        assert source.grad is not None
        for found, expected in (
            (y, q_x @ q_w.T),
            (source.grad, q_dy @ q_w),
            (weight.main_grad, q_dy.T @ q_x),
        ):
            np.testing.assert_allclose(
                found.detach().numpy(),
                expected,
                rtol=1e-5,
                atol=1e-5 * float(np.abs(expected).max() + 1e-30),
            )
        scales.end_step(KEPT)


def test_an_iteration_counts_the_largest_of_its_micro_batches_and_no_evaluation() -> None:
    weight = weight_of(randn(32, 48))
    eight_bit, scales = a_layer(8, weight)
    for seed, factor in ((1, 1.0), (2, 5.0), (None, 100.0), (3, 2.0)):
        linear(torch.full((16, 48), factor), weight, products=eight_bit.at(seed))
    assert eight_bit.delayed is not None
    assert float(eight_bit.delayed[1][0]) == 5.0
    scales.end_step(KEPT)
    assert float(eight_bit.delayed[0][0]) == float(
        np.float32(1) / (np.float32(448) / np.float32(5))
    )
    # The first use of a weight after a gather may be an evaluation: the next step still sees its
    # magnitude.
    weight.casts.clear()
    for seed in (None, 1):
        linear(torch.ones(16, 48), weight, products=eight_bit.at(seed))
    assert float(eight_bit.delayed[1][1]) == float(weight.detach().abs().max())


def test_magnitudes_that_are_not_finite_do_not_count() -> None:
    weight = weight_of(randn(32, 48))
    eight_bit, scales = a_layer(4, weight)
    assert eight_bit.delayed is not None
    for bad in (torch.nan, torch.inf):
        linear(torch.full((16, 48), bad), weight, products=eight_bit.at(0))
        scales.end_step(KEPT)
        assert float(eight_bit.delayed[0][0]) == 1.0


def test_restored_scales_continue_as_if_never_stopped() -> None:
    """From JSON, at every point of the ring; a longer history keeps what there is, a shorter one
    the newest."""
    generator = np.random.default_rng(0)
    seen = torch.from_numpy(generator.lognormal(size=(40, 3))).float()
    weight = weight_of(randn(32, 48))

    def advanced(scales: DelayedScales, eight_bit: EightBit, steps: range) -> list[list[float]]:
        assert eight_bit.delayed is not None
        results = []
        for step in steps:
            eight_bit.delayed[1].copy_(seen[step])
            scales.end_step(KEPT)
            results.append(eight_bit.delayed[0].tolist())
        return results

    for stop in (1, 3, 6, 7, 8, 20):
        eight_bit, scales = a_layer(7, weight)
        advanced(scales, eight_bit, range(stop))
        saved = json.loads(json.dumps(scales.state()))
        expected = advanced(scales, eight_bit, range(stop, 40))
        again, restored = a_layer(7, weight)
        restored.load_state(saved)
        assert advanced(restored, again, range(stop, 40)) == expected
        for length in (3, 20):
            again, other = a_layer(length, weight)
            other.load_state(saved)
            (found,) = advanced(other, again, range(stop, stop + 1))
            window = seen[max(0, stop + 1 - min(length, 7 + 1)) : stop + 1].amax(0)
            assert found == (1.0 / (torch.tensor([448.0, 448.0, 57344.0]) / window)).tolist(), (
                stop,
                length,
            )


def test_a_checkpoint_keeps_only_magnitudes_that_may_become_the_largest() -> None:
    weight = weight_of(randn(32, 48))
    eight_bit, scales = a_layer(1000, weight)
    assert eight_bit.delayed is not None
    for step in range(500):
        eight_bit.delayed[1].fill_(float(1 + step % 10))
        scales.end_step(KEPT)
    ((name, ((scale, magnitudes), *_)),) = scales.state().items()
    assert name == "layer" and magnitudes == [[0, 10.0]] and np.isclose(scale, 10 / 448)


# -- weights that do not change
# ---------------------------------------------------------------------------------------


def frozen(values: torch.Tensor) -> Parameter:
    weight = weight_of(values).requires_grad_(False)
    weight.spec = dataclasses.replace(weight.spec, lr_scale=0.0)
    return cast(Parameter, weight)


@pytest.mark.parametrize("gathered", ["never again", "in each iteration", "after an evaluation"])
def test_a_frozen_weight_has_its_own_scale_in_all_iterations(gathered: str) -> None:
    """To the bit, for longer than the history, and also for an evaluation; what is saved is the
    weight's magnitude.

    A layer that is thawed begins with that scale, whatever the layout; one that was always trained
    has the same.
    """
    values = 0.05 * randn(32, 48)
    weight, largest = frozen(values), np.float32(values.abs().max())
    eight_bit, scales = a_layer(2, weight)
    x_state, forms = LevanterState(E4M3, 2), list[Any]()
    q_w, x = dequantized(values, E4M3, False), randn(16, 48)
    for step in range(6):
        if gathered == "in each iteration":
            weight.casts.clear()
        if gathered == "after an evaluation":
            linear(x, weight, products=eight_bit.at(None))
        y = linear(x.clone().requires_grad_(), weight, products=eight_bit.at(step))
        y.sum().backward()
        np.testing.assert_allclose(
            y.detach().numpy(), x_state.rounded(x.double().numpy()) @ q_w.T, rtol=1e-5, atol=1e-5
        )
        forms.append(weight.casts["layer"])
        for form in forms:
            assert (
                float(form[0].scale)
                == float(form[1].scale)
                == scales_of(values.double().numpy(), E4M3, False)
            ), step
        scales.end_step(KEPT)
    assert len({id(form) for form in forms}) == (6 if gathered == "in each iteration" else 1)
    expected = float(np.float32(1) / (np.float32(448) / largest))
    state = json.loads(json.dumps(scales.state()))
    assert state["layer"][WEIGHT] == [expected, [[0, float(largest)]]]
    thawed, restored = a_layer(2, weight_of(values))
    restored.load_state(state)
    assert thawed.delayed is not None and float(thawed.delayed[0][WEIGHT]) == expected


def test_a_form_that_is_kept_keeps_its_scale() -> None:
    """A trained weight's form, which the next gather drops, has the scale that it was rounded with
    until then."""
    values = 0.05 * randn(32, 48)
    weight = weight_of(values)
    eight_bit, scales = a_layer(4, weight)
    linear(randn(16, 48), weight, products=eight_bit.at(1))
    scales.end_step(KEPT)
    scales.load_state(scales.state())
    kept = weight.casts["layer"][0]
    assert float(kept.scale) == 1.0 != float(eight_bit.delayed[0][WEIGHT])  # type: ignore[index]
    assert np.array_equal(kept.numbers.double().numpy(), nearest(values.double().numpy(), E4M3))


def test_other_recipes_are_pure_functions_of_a_weight() -> None:
    """Of its values alone, whether it is frozen and whatever was multiplied before: kept forms are
    made anew alike."""
    values = 0.05 * randn(32, 48)
    for name in ("tensorwise", "rowwise", "int8"):
        for weight in (weight_of(values), frozen(values)):
            eight_bit, forms = EightBit(RECIPES[name], weight.spec, alone(CPU), ()), list[Any]()
            for seed in (None, 1, 2):
                weight.casts.clear()
                linear(randn(16, 48, seed=seed or 0), weight, products=eight_bit.at(seed))
                forms.append(weight.casts["layer"])
            for form, transposed in forms:
                for found, source in ((form, values), (transposed, values.t())):
                    exact = found.numbers.double().numpy() * found.scale.double().numpy()
                    assert np.array_equal(
                        exact, dequantized(source, RECIPES[name].values, RECIPES[name].by_row)
                    )
