"""FLOPs against published numbers, peaks, the mean loss, rates and the time left."""

import dataclasses
import random
from datetime import datetime

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_lite.config import BatchConfig, Config, ModelConfig, PerformanceConfig, TrainingConfig
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.eight_bit import eight_bit_of
from megatron_lite.model.gpt import model_layers, parameters_of
from megatron_lite.monitor.metrics import (
    Forecast,
    LogWindow,
    StepTimer,
    hardware_flops,
    known_peak_tflops,
    model_flops,
)
from tests.support.harness import layers_of, tiny_config
from tests.support.memory_meters import a_model, micro_batches

LLAMA = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    head_groups=8,
    kv_channels=128,
    ffn_hidden_size=14336,
    gated=True,
    vocab_size=128256,
)
MISTRAL = dataclasses.replace(LLAMA, vocab_size=32000)
MISTRAL_WINDOW = dataclasses.replace(MISTRAL, window_size=4096)


def test_model_flops_per_token_match_the_published_numbers():
    for model, length, gflops in (
        (LLAMA, 4096, 48.25),
        (MISTRAL, 8192, 49.10),
        (MISTRAL_WINDOW, 8192, 47.49),
    ):
        assert model_flops(model, length, 1) / 1e9 == pytest.approx(gflops, abs=0.005)


def test_model_flops_against_published_throughput():
    """487 TFLOP/s at 10,100 tokens/s (Llama-3.1-8B), 440 at about 9,000 (Mistral-7B without
    window)."""
    assert model_flops(LLAMA, 4096, 10_100) / 1e12 == pytest.approx(487, rel=1e-3)
    assert model_flops(MISTRAL, 8192, 9_000) / 1e12 == pytest.approx(440, rel=5e-3)


def test_model_flops_are_linear_in_tokens_and_need_a_short_window_to_shrink():
    assert model_flops(LLAMA, 4096, 4096) == pytest.approx(4096 * model_flops(LLAMA, 4096, 1))
    for window in (8192, 100_000):
        assert model_flops(
            dataclasses.replace(MISTRAL, window_size=window), 8192, 7
        ) == model_flops(MISTRAL, 8192, 7)


def test_window_flops_count_the_keys_that_a_causal_window_leaves():
    """A brute-force count of (query, key) pairs approaches the formula's w (1 - w / 2s) keys per
    query."""
    sizes = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "head_groups",
        "kv_channels",
        "ffn_hidden_size",
    )
    model = ModelConfig(**dict.fromkeys(sizes, 1), vocab_size=2, window_size=300)
    sequence_length = 1000
    pairs = sum(min(query + 1, 300) for query in range(sequence_length))
    dense = model_flops(
        dataclasses.replace(model, num_attention_heads=0, head_groups=1), sequence_length, 1000
    )
    # minus query and output projections
    attention = model_flops(model, sequence_length, 1000) - dense - 6 * 1000 * 2
    # 2 products, 2 FLOPs, forward and twice backward
    assert attention == pytest.approx(12 * pairs, rel=5e-3)


def test_the_full_square_of_attention_is_twice_the_causal_half():
    """The second convention: 12 L heads d s per token, with or without windows."""
    square = 12 * 32 * 4096 * 8192
    for model in (MISTRAL, MISTRAL_WINDOW):
        dense = model_flops(MISTRAL, 8192, 1) - square / 2
        assert model_flops(model, 8192, 1, full_attention=True) == pytest.approx(dense + square)


def test_hardware_flops_repeat_the_scores():
    """One of the six products of attention, once more."""
    plain, attention = model_flops(LLAMA, 4096, 1), 6 * 32 * 4096 * 4096
    assert hardware_flops(LLAMA, PerformanceConfig(), 4096, 1) - plain == pytest.approx(
        attention / 6
    )


def test_hardware_flops_of_recomputation():
    """A whole forward pass for all layers; the first MLP product of three; the logits once more."""
    plain, head = model_flops(LLAMA, 4096, 1), 2 * 4096 * 128256
    once = hardware_flops(LLAMA, PerformanceConfig(), 4096, 1)

    def more(**options):
        return hardware_flops(LLAMA, PerformanceConfig(**options), 4096, 1) - once

    assert more(recompute_layers=32) == pytest.approx(plain / 3 - head)
    assert more(recompute_layers=8) == pytest.approx((plain / 3 - head) / 4)
    assert more(mlp_recompute_level="full") == pytest.approx(32 * 2 * 4096 * 2 * 14336)
    assert more(mlp_recompute_level="activation") == 0
    assert more(mlp_recompute_level="activation,full:8") == pytest.approx(8 * 2 * 4096 * 2 * 14336)
    assert more(mlp_recompute_level="full,none:2,activation:1") == pytest.approx(
        29 * 2 * 4096 * 2 * 14336
    )
    assert more(cross_entropy_block_size=4096) == pytest.approx(head)
    assert more(cross_entropy_block_size=128256) == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gated": True, "head_groups": 2},
        {"mlp_recompute_level": "full"},
        {"recompute_layers": 2},
        {"gated": True, "recompute_layers": 1, "mlp_recompute_level": "full"},
        {"gated": True, "mlp_recompute_level": "none,full:1,activation:1"},
    ],
    ids=str,
)
def test_products_of_a_real_step_are_those_of_the_formula(options):
    """torch counts the FLOPs of a step, without attention."""
    config = tiny_config(1, num_layers=3, cross_entropy_splits=1, **options)
    engine, batches = a_model(config, layers_of(config)), micro_batches(config)
    with FlopCounterMode(display=False) as counter:
        engine.forward_backward(batches)
    products = {"mm", "addmm", "addmm_"}
    counted = sum(
        n for op, n in counter.get_flop_counts()["Global"].items() if op.__name__ in products
    )
    model, length = config.model, config.batch.sequence_length
    tokens = config.batch.batch_size * length
    whole = hardware_flops(model, config.performance, length, tokens)
    passes = 3.5 + config.performance.recompute_layers / 3  # through attention
    attention = 4 * tokens * 3 * model.num_attention_heads * model.kv_channels * length / 2
    assert counted == pytest.approx(whole - passes * attention)


PEAKS = {
    312.0: "NVIDIA A100-SXM4-80GB, NVIDIA A100 80GB PCIe",
    989.4: "NVIDIA H100 80GB HBM3, NVIDIA H200, NVIDIA GH200 480GB",
    756.0: "NVIDIA H100 PCIe",
    835.5: "NVIDIA H100 NVL",
    2250.0: "NVIDIA B200",
    362.0: "NVIDIA L40S",
    121.0: "NVIDIA L4",
    125.0: "Tesla V100-SXM2-32GB",
    65.0: "Tesla T4",
    165.2: "NVIDIA GeForce RTX 4090",
    209.5: "NVIDIA GeForce RTX 5090",
    154.8: "NVIDIA RTX A6000",
    1307.4: "AMD Instinct MI300X",
    None: "NVIDIA GeForce GTX 1080, AMD EPYC 7B13, ",
}


def test_peaks_by_device_name():
    for peak, names in PEAKS.items():
        for name in names.split(", "):
            assert known_peak_tflops(name) == peak, name


def test_a_look_at_the_mean_loss_leaves_the_window_alone():
    """The next line is the mean of all updates since the last line."""
    window = LogWindow(torch.device("cpu"))
    for loss in (20.0, 40.0):
        window.add(torch.tensor(loss), 10, torch.tensor(False), 0.0)
    assert window.mean_loss() == 3.0
    window.add(torch.tensor(60.0), 10, torch.tensor(False), 0.0)
    assert window.close()["loss"] == 4.0 and window.mean_loss() is None


# -- step times: with a fake clock, the time left is right to a few percent after 50 iterations

TRAIN_ITERS = 2000


def simulate(step_s, pauses=lambda iteration: {}, samples=lambda iteration: 8, start=0):
    """Return (iteration, time left as forecast, time left in truth without stalls) of some
    iterations.

    step_s: seconds of an iteration, and of the stall in it. pauses: seconds of those after an
    iteration, by kind.
    """
    consumed = [0]
    for iteration in range(1, TRAIN_ITERS + 1):
        consumed.append(consumed[-1] + samples(iteration))
    times = {iteration: step_s(iteration) for iteration in range(start + 1, TRAIN_ITERS + 1)}
    forecast = Forecast(consumed.__getitem__, TRAIN_ITERS, start)
    forecasts = []
    left = sum(
        seconds + sum(pauses(iteration).values()) for iteration, (seconds, _) in times.items()
    )
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
    return max(
        abs(shown / true - 1) for iteration, shown, true in forecasts if after <= iteration <= 1800
    )


def noisy(seed, mean_s=1.0, spread=0.1, stalls=()):
    """Return the seconds of an iteration with noise, and of the stall in it: 30 for some
    iterations."""
    generator = random.Random(seed)
    return lambda iteration: (
        max(generator.gauss(mean_s, spread), 0.01),
        30.0 * (iteration in stalls),
    )


def every(**due):
    """Return the pauses after an iteration; each kind has its interval and its seconds."""
    return lambda iteration: {
        kind: seconds for kind, (interval, seconds) in due.items() if iteration % interval == 0
    }


def test_the_time_left_is_right_to_five_percent():
    """After 50 iterations, or as many as a change takes to show."""
    for run, after in (
        *((dict(step_s=noisy(seed)), 50) for seed in range(5)),
        # A save of five steps' length every few iterations.
        *(
            (dict(step_s=noisy(1), pauses=every(save=(interval, 5.0))), 50)
            for interval in (10, 20, 45)
        ),
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
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    head_groups=4,
    kv_channels=16,
    ffn_hidden_size=256,
)


def make_timer(peak_tflops=None, train_iters=100, iteration=0, **batch):
    config = Config(
        model=MODEL,
        batch=BatchConfig(batch_size=8, sequence_length=128, **batch),
        training=TrainingConfig(train_iters=train_iters),
    )
    clock = Clock()
    return StepTimer(
        config, world_size=2, iteration=iteration, peak_tflops=peak_tflops, clock=clock
    ), clock


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
    assert record["tokens_per_sec"] == pytest.approx(8 * 128 / 0.5), "of both ranks"
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
    assert record["model_tflops"] == pytest.approx(
        model_flops(MODEL, 128, 20 * 128) / 4.0 / 2 / 1e12
    )
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
            for with_glances, without in zip(
                timer.lap(iteration), plain.lap(iteration), strict=True
            ):
                dates = {"completion_date": None}
                assert {**with_glances, **dates} == pytest.approx({**without, **dates})
    times = [glance["step_time_ms"] for glance in shown.values()]
    assert times == pytest.approx([30_000, 500, 500, 500, 3500 / 6, 1000])
    assert shown[2]["tokens_per_sec"] == pytest.approx(8 * 128 / 0.5)
    assert "mfu" not in shown[2]  # no peak, no mfu
    assert "remaining_seconds" not in shown[1] and shown[4]["remaining_seconds"] == pytest.approx(
        96 * 0.5
    )


def test_pace_of_the_bar():
    """Speed of all ranks, MFU and time left at the usual pace; nothing before a step that
    counts."""
    timer, clock = make_timer(peak_tflops=1e-3)
    steps(timer, clock, 1, 1, 30.0)
    assert timer.pace(1) == {}
    steps(timer, clock, 2, 11, 0.5)
    mfu = model_flops(MODEL, 128, 1024) / 0.5 / 2 / 1e12 / 1e-3

    def pace(iteration):
        return [
            timer.pace(iteration)[name] for name in ("tokens_per_sec", "mfu", "remaining_seconds")
        ]

    assert pace(11) == pytest.approx([2048, mfu, 44.5])
    with timer.excluded(), timer.pause("save"):
        clock.now += 22.0
    steps(timer, clock, 12, 12, 0.5)
    assert pace(12) == pytest.approx([2048, mfu, 88 * 2.5])


def test_timer_without_an_iteration_says_nothing_and_survives_endless_runs():
    timer, clock = make_timer()
    assert timer.lap(0) == ({}, {})
    clock.now += 1e12
    _, console = timer.lap(1)
    assert "completion_date" not in console  # beyond the year 9999


@pytest.mark.parametrize(("options", "share"), [({"fp8": "rowwise"}, 1), ({"int8": True}, 2 / 3)])
def test_products_in_eight_bits_count_at_twice_the_peak(options, share):
    """Those of all linear layers in blocks, which `model_flops` has without the layers; int8 rounds
    two of three.

    Without units for 8 bits they count as the others.
    """
    config = tiny_config(**options, gated=True, head_groups=2)
    layers = {
        found: model_layers(config, Kernels(eight_bit_units=found))
        for found in ((), (torch.bfloat16,))
    }
    flops = {
        found: sum(each.flops_per_token for each in eight_bit_of(made))
        for found, made in layers.items()
    }
    matrices = [
        parameter.spec.numel
        for parameter in parameters_of(layers[()])
        if parameter.spec.matrix_rows
    ]
    rounded = share * 6.0 * sum(matrices)
    assert list(flops.values()) == pytest.approx([0, rounded])
    clocks = [Clock(), Clock()]
    timers = [
        StepTimer(config, 2, 0, 1e-3, eight_bit_flops=given, clock=clock)
        for given, clock in zip(flops.values(), clocks, strict=True)
    ]
    for timer, clock in zip(timers, clocks, strict=True):
        steps(timer, clock, 1, 1, 0.5)
    plain, fast = (timer.lap(1)[0] for timer in timers)
    assert fast["model_tflops"] == plain["model_tflops"]
    assert fast["mfu"] / plain["mfu"] == pytest.approx(
        1 - 16 * rounded / 2 / model_flops(config.model, 16, 16)
    )
