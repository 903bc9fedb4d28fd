"""Rates with a fake clock; the time left is right to a few percent after 50 iterations, whatever came between."""

import random
from datetime import datetime

import pytest

from megatron_lite.config import BatchConfig, Config, ModelConfig, PerformanceConfig, TrainingConfig
from megatron_lite.monitor.metrics import Forecast, StepTimer, hardware_flops, model_flops

TRAIN_ITERS = 2000


def simulate(step_s, pauses=lambda iteration: {}, samples=lambda iteration: 8, start=0):
    """Return (iteration, time left as forecast, time left in truth without stalls) of some iterations.

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
        if iteration % 50 in (0, 1, 2):  # 2 is the first step that counts
            forecasts.append((iteration, forecast.remaining_s(iteration), left))
        before = pauses(iteration)
        left -= sum(before.values())
    return forecasts


def worst(forecasts, after=50):
    """Return the largest relative error from iteration `after` to 90 % of the run."""
    return max(abs(shown / true - 1) for iteration, shown, true in forecasts if after <= iteration <= 1800)


def noisy(seed, mean_s=1.0, spread=0.1, stalls=()):
    """Return the seconds of an iteration with noise, and of the stall in it: 30 for some iterations."""
    generator = random.Random(seed)
    return lambda iteration: (max(generator.gauss(mean_s, spread), 0.01), 30.0 * (iteration in stalls))


def every(**due):
    """Return the pauses after an iteration; each kind has its interval and its seconds."""
    return lambda iteration: {kind: seconds for kind, (interval, seconds) in due.items() if iteration % interval == 0}


def test_the_time_left_is_right_to_five_percent():
    """After 50 iterations, or as many as a change takes to show."""
    for run, after in (
        *((dict(step_s=noisy(seed)), 50) for seed in range(5)),
        # A save of five steps' length every few iterations.
        *((dict(step_s=noisy(1), pauses=every(save=(interval, 5.0))), 50) for interval in (10, 20, 45)),
        # Each kind has a period of its own: between saves, validations do not stand for them.
        (dict(step_s=noisy(2), pauses=every(validation=(10, 2.0), save=(100, 10.0))), 101),
        # A network that hangs for 30 s leaves the forecast as it was.
        (dict(step_s=noisy(3, stalls=(30, 300))), 50),
        # A node that becomes slower for good shows after a thousand steps.
        (dict(step_s=lambda iteration: (1.0 if iteration <= 500 else 2.0, 0.0)), 1500),
        # A resumed run counts its own steps.
        (dict(step_s=noisy(4), pauses=every(save=(20, 5.0)), start=1000), 1050),
    ):
        assert worst(simulate(**run), after=after) < 0.05, run


def test_the_first_step_does_not_count():
    forecasts = simulate(lambda iteration: (60.0 if iteration == 1 else 1.0, 0.0))
    assert forecasts[0][1] is None
    assert worst(forecasts, after=2) < 1e-9


def test_a_step_grows_with_its_batch():
    """The batch quadruples halfway, and with it the time of a step."""
    forecasts = simulate(
        lambda iteration: (1.0 if iteration <= 1000 else 4.0, 0.0),
        samples=lambda iteration: 8 if iteration <= 1000 else 32,
    )
    assert worst(forecasts) < 1e-9


class Clock:
    """A clock that moves only when set."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


MODEL = ModelConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, head_groups=4, kv_channels=16, ffn_hidden_size=256
)


def make_timer(peak_tflops=None, train_iters=100, iteration=0, **batch):
    config = Config(
        model=MODEL,
        batch=BatchConfig(batch_size=8, sequence_length=128, **batch),
        training=TrainingConfig(train_iters=train_iters),
    )
    clock = Clock()
    return StepTimer(config, world_size=2, iteration=iteration, peak_tflops=peak_tflops, clock=clock), clock


def steps(timer, clock, first, last, seconds):
    for iteration in range(first, last + 1):
        clock.now += seconds
        timer.end_step(iteration)


def test_timer_reports_the_lap_and_forecasts_from_all_but_the_first():
    timer, clock = make_timer(peak_tflops=1e-3)
    steps(timer, clock, 1, 1, 30.0)  # the first iteration compiles
    record, console = timer.lap(1, datetime(2030, 1, 1))
    assert record["step_time_ms"] == pytest.approx(30_000)
    assert "remaining_seconds" not in console and "completion_date" not in console
    steps(timer, clock, 2, 11, 0.5)
    record, console = timer.lap(11, datetime(2030, 1, 1))
    assert record["step_time_ms"] == pytest.approx(500)
    assert record["tokens_per_sec_per_gpu"] == pytest.approx(8 * 128 / 0.5 / 2)
    assert record["model_tflops"] == pytest.approx(model_flops(MODEL, 128, 1024) / 0.5 / 2 / 1e12)
    assert record["mfu"] == pytest.approx(record["model_tflops"] / 1e-3)
    assert console["average_step_time_ms"] == pytest.approx(500)
    assert console["remaining_seconds"] == pytest.approx(89 * 0.5)
    assert console["completion_date"] == datetime(2030, 1, 1, 0, 0, 44, 500_000)


def test_timer_follows_the_batch_size():
    """Rates count the samples of the lap, the forecast the remaining samples."""
    timer, clock = make_timer(train_iters=10, iteration=1, batch_size_schedule=("0:2", "3:8"))
    for iteration, seconds in ((2, 0.4), (3, 0.4), (4, 1.6), (5, 1.6)):  # of 2, 2, 8 and 8 samples
        steps(timer, clock, iteration, iteration, seconds)
    record, console = timer.lap(5)
    assert record["step_time_ms"] == pytest.approx(1000)
    assert record["tokens_per_sec_per_gpu"] == pytest.approx(20 * 128 / 4.0 / 2)
    assert record["model_tflops"] == pytest.approx(model_flops(MODEL, 128, 20 * 128) / 4.0 / 2 / 1e12)
    assert record["hardware_tflops"] == pytest.approx(
        hardware_flops(MODEL, PerformanceConfig(), 128, 20 * 128) / 4.0 / 2 / 1e12
    )
    assert console["remaining_seconds"] == pytest.approx(40 * 4.0 / 20)


def test_glances_leave_the_laps_alone():
    """Rates are those since the last glance; laps are the same without them."""
    (timer, clock), (plain, plain_clock) = make_timer(), make_timer()
    shown = {}
    for iteration in range(1, 21):
        for some in (clock, plain_clock):
            some.now += 30.0 if iteration == 1 else 0.5 if iteration <= 15 else 1.0
        timer.end_step(iteration)
        plain.end_step(iteration)
        if iteration in (1, 2, 4, 10, 16, 20):
            shown[iteration] = timer.glance(iteration)
        if iteration == 3:
            with timer.excluded():
                clock.now += 1000.0
        if iteration in (10, 20):
            for with_glances, without in zip(timer.lap(iteration), plain.lap(iteration), strict=True):
                dates = {"completion_date": None}
                assert {**with_glances, **dates} == pytest.approx({**without, **dates})
    times = [glance["step_time_ms"] for glance in shown.values()]
    assert times == pytest.approx([30_000, 500, 500, 500, 3500 / 6, 1000])
    assert shown[2]["tokens_per_sec"] == pytest.approx(8 * 128 / 0.5)
    assert "mfu" not in shown[2]  # no peak, no mfu
    assert "remaining_seconds" not in shown[1] and shown[4]["remaining_seconds"] == pytest.approx(96 * 0.5)


def test_pace_of_the_bar():
    """Speed of all ranks, MFU and time left at the usual pace; nothing before a step that counts."""
    timer, clock = make_timer(peak_tflops=1e-3)
    steps(timer, clock, 1, 1, 30.0)
    assert timer.pace(1) == {}
    steps(timer, clock, 2, 11, 0.5)
    mfu = model_flops(MODEL, 128, 1024) / 0.5 / 2 / 1e12 / 1e-3
    assert timer.pace(11) == pytest.approx({"tokens_per_sec": 2048, "mfu": mfu, "remaining_seconds": 44.5})
    with timer.excluded(), timer.pause("save"):
        clock.now += 22.0
    steps(timer, clock, 12, 12, 0.5)
    assert timer.pace(12) == pytest.approx({"tokens_per_sec": 2048, "mfu": mfu, "remaining_seconds": 88 * 2.5})


def test_timer_without_an_iteration_says_nothing_and_survives_endless_runs():
    timer, clock = make_timer()
    assert timer.lap(0) == ({}, {})
    clock.now += 1e12
    _, console = timer.lap(1)
    assert "completion_date" not in console  # beyond the year 9999
