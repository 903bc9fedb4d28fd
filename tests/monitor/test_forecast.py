"""The time left is right to a few percent after 50 iterations, whatever saves and stalls came between."""

import random

import pytest

from megatron_lite.monitor.forecast import Forecast

TRAIN_ITERS = 2000


def simulate(step_s, pauses=lambda iteration: {}, samples=lambda iteration: 8, start=0):
    """Return (iteration, time left as forecast, time left in truth without stalls) of every iteration.

    step_s: seconds of an iteration, and of the stall in it. pauses: seconds of those after an iteration, by kind.
    """
    consumed = [0]
    for iteration in range(1, TRAIN_ITERS + 1):
        consumed.append(consumed[-1] + samples(iteration))
    times = {iteration: step_s(iteration) for iteration in range(start + 1, TRAIN_ITERS + 1)}
    forecast = Forecast(consumed.__getitem__, TRAIN_ITERS, start)
    forecasts = []
    left = sum(seconds + sum(pauses(iteration).values()) for iteration, (seconds, _) in times.items())
    before = {"validation": 100.0}  # of the weights that the run starts from
    for iteration, (seconds, stall) in times.items():
        forecast.add(iteration, seconds + stall, before)
        left -= seconds
        forecasts.append((iteration, forecast.remaining_s(iteration), left))
        before = pauses(iteration)
        left -= sum(before.values())
    return forecasts


def worst(forecasts, after=50):
    """Return the largest relative error from iteration `after` to 90 % of the run."""
    return max(abs(shown / true - 1) for iteration, shown, true in forecasts if after <= iteration <= 1800)


def noisy(seed, mean_s=1.0, spread=0.1):
    generator = random.Random(seed)
    return lambda iteration: (max(generator.gauss(mean_s, spread), 0.01), 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_steps_alone(seed):
    assert worst(simulate(noisy(seed))) < 0.05


def test_the_first_step_does_not_count():
    compiling = lambda iteration: (60.0 if iteration == 1 else 1.0, 0.0)  # noqa: E731
    forecasts = simulate(compiling)
    assert forecasts[0][1] is None
    assert worst(forecasts, after=2) < 1e-9


@pytest.mark.parametrize("interval", [10, 20, 45])
def test_saves_count_as_often_as_they_come(interval):
    """A save of five steps' length every few iterations."""
    saves = lambda iteration: {"save": 5.0} if iteration % interval == 0 else {}  # noqa: E731
    assert worst(simulate(noisy(1), saves)) < 0.05


def test_validations_and_rare_saves():
    """Each kind has a period of its own: between saves, validations do not stand for them."""
    due = {"validation": (10, 2.0), "save": (100, 10.0)}

    def pauses(iteration):
        return {kind: seconds for kind, (interval, seconds) in due.items() if iteration % interval == 0}

    assert worst(simulate(noisy(2), pauses), after=101) < 0.05


def test_a_stall_is_not_expected_again():
    """A network that hangs for 30 s leaves the forecast as it was."""
    steps = noisy(3)
    stalling = lambda iteration: (steps(iteration)[0], 30.0 * (iteration in (30, 300)))  # noqa: E731
    assert worst(simulate(stalling)) < 0.05


def test_a_step_grows_with_its_batch():
    """The batch quadruples halfway, and with it the time of a step."""
    samples = lambda iteration: 8 if iteration <= 1000 else 32  # noqa: E731
    forecasts = simulate(lambda iteration: (samples(iteration) / 8, 0.0), samples=samples)
    assert worst(forecasts) < 1e-9


def test_the_pace_follows_the_last_thousand_steps():
    """A node that becomes slower for good shows after a thousand steps."""
    forecasts = simulate(lambda iteration: (1.0 if iteration <= 500 else 2.0, 0.0))
    assert worst(forecasts, after=1500) < 0.05


def test_a_resumed_run_counts_its_own_steps():
    saves = lambda iteration: {"save": 5.0} if iteration % 20 == 0 else {}  # noqa: E731
    assert worst(simulate(noisy(4), saves, start=1000), after=1050) < 0.05
