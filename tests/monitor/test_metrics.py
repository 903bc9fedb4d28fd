"""FLOPs against published numbers, peaks, step times with a fake clock, and the log line."""

import dataclasses
from datetime import datetime

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_lite.config import BatchConfig, Config, ModelConfig, PerformanceConfig, TrainingConfig
from megatron_lite.monitor.metrics import (
    LogWindow,
    StepTimer,
    format_duration,
    format_record,
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


@pytest.mark.parametrize(
    "model, sequence_length, gflops", [(LLAMA, 4096, 48.25), (MISTRAL, 8192, 49.10), (MISTRAL_WINDOW, 8192, 47.49)]
)
def test_model_flops_per_token_match_the_published_numbers(model, sequence_length, gflops):
    assert model_flops(model, sequence_length, 1) / 1e9 == pytest.approx(gflops, abs=0.005)


def test_model_flops_against_published_throughput():
    """487 TFLOP/s at 10,100 tokens/s (Llama-3.1-8B), 440 at about 9,000 (Mistral-7B without window)."""
    assert model_flops(LLAMA, 4096, 10_100) / 1e12 == pytest.approx(487, rel=1e-3)
    assert model_flops(MISTRAL, 8192, 9_000) / 1e12 == pytest.approx(440, rel=5e-3)


def test_model_flops_are_linear_in_tokens():
    assert model_flops(LLAMA, 4096, 4096) == pytest.approx(4096 * model_flops(LLAMA, 4096, 1))


def test_a_window_as_long_as_the_sequence_changes_nothing():
    for window in (8192, 100_000):
        assert model_flops(dataclasses.replace(MISTRAL, window_size=window), 8192, 7) == model_flops(MISTRAL, 8192, 7)


def test_window_flops_count_the_keys_that_a_causal_window_leaves():
    """A brute-force count of (query, key) pairs approaches the formula's w (1 - w / 2s) keys per query."""
    model = ModelConfig(
        num_layers=1,
        hidden_size=1,
        num_attention_heads=1,
        head_groups=1,
        kv_channels=1,
        ffn_hidden_size=1,
        vocab_size=2,
        window_size=300,
    )
    sequence_length = 1000
    pairs = sum(min(query + 1, 300) for query in range(sequence_length))
    dense = model_flops(dataclasses.replace(model, num_attention_heads=0, head_groups=1), sequence_length, 1000)
    attention = model_flops(model, sequence_length, 1000) - dense - 6 * 1000 * 2  # minus query and output projections
    assert attention == pytest.approx(12 * pairs, rel=5e-3)  # 2 products, 2 FLOPs, forward and twice backward


def test_the_full_square_of_attention_is_twice_the_causal_half():
    """The second convention: 12 L heads d s per token, with or without windows."""
    square = 12 * 32 * 4096 * 8192
    for model in (MISTRAL, MISTRAL_WINDOW):
        dense = model_flops(MISTRAL, 8192, 1) - square / 2
        assert model_flops(model, 8192, 1, full_attention=True) == pytest.approx(dense + square)


def test_hardware_flops_repeat_the_scores():
    """One of the six products of attention, once more."""
    plain, attention = model_flops(LLAMA, 4096, 1), 6 * 32 * 4096 * 4096
    assert hardware_flops(LLAMA, PerformanceConfig(), 4096, 1) - plain == pytest.approx(attention / 6)


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
    assert more(mlp_recompute_level="full,none:2,activation:1") == pytest.approx(29 * 2 * 4096 * 2 * 14336)
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
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if op.__name__ in products)
    model, length = config.model, config.batch.sequence_length
    tokens = config.batch.batch_size * length
    whole = hardware_flops(model, config.performance, length, tokens)
    passes = 3.5 + config.performance.recompute_layers / 3  # through attention
    attention = 4 * tokens * 3 * model.num_attention_heads * model.kv_channels * length / 2
    assert counted == pytest.approx(whole - passes * attention)


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("Tesla T4", 65.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce GTX 1080", None),
        ("AMD EPYC 7B13", None),
        ("", None),
    ],
)
def test_peaks_by_device_name(name, peak):
    assert known_peak_tflops(name) == peak


class Clock:
    """A clock that moves only when set."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make_timer(peak_tflops=None):
    model = ModelConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, head_groups=4, kv_channels=16, ffn_hidden_size=256
    )
    config = Config(
        model=model, batch=BatchConfig(batch_size=8, sequence_length=128), training=TrainingConfig(train_iters=100)
    )
    clock = Clock()
    return StepTimer(config, world_size=2, iteration=0, peak_tflops=peak_tflops, clock=clock), clock, model


def steps(timer, clock, first, last, seconds):
    for iteration in range(first, last + 1):
        clock.now += seconds
        timer.end_step(iteration)


def test_timer_reports_the_lap_and_forecasts_from_all_but_the_first():
    timer, clock, model = make_timer(peak_tflops=1e-3)
    steps(timer, clock, 1, 1, 30.0)  # the first iteration compiles
    record, console = timer.lap(1, datetime(2030, 1, 1))
    assert record["step_time_ms"] == pytest.approx(30_000)
    assert "remaining_seconds" not in console and "completion_date" not in console
    steps(timer, clock, 2, 11, 0.5)
    record, console = timer.lap(11, datetime(2030, 1, 1))
    assert record["step_time_ms"] == pytest.approx(500)
    assert record["tokens_per_sec_per_gpu"] == pytest.approx(8 * 128 / 0.5 / 2)
    assert record["model_tflops"] == pytest.approx(model_flops(model, 128, 1024) / 0.5 / 2 / 1e12)
    assert record["mfu"] == pytest.approx(record["model_tflops"] / 1e-3)
    assert console["average_step_time_ms"] == pytest.approx(500)
    assert console["remaining_seconds"] == pytest.approx(89 * 0.5)
    assert console["completion_date"] == datetime(2030, 1, 1, 0, 0, 44, 500_000)


def test_timer_follows_the_batch_size():
    """Rates count the samples of the lap, the forecast the remaining samples."""
    model = ModelConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, head_groups=4, kv_channels=16, ffn_hidden_size=256
    )
    batch = BatchConfig(batch_size=8, batch_size_schedule=("0:2", "3:8"), sequence_length=128)
    clock = Clock()
    timer = StepTimer(Config(model=model, batch=batch, training=TrainingConfig(train_iters=10)), 2, 1, None, clock)
    for iteration, seconds in ((2, 0.4), (3, 0.4), (4, 1.6), (5, 1.6)):  # of 2, 2, 8 and 8 samples
        steps(timer, clock, iteration, iteration, seconds)
    record, console = timer.lap(5)
    assert record["step_time_ms"] == pytest.approx(1000)
    assert record["tokens_per_sec_per_gpu"] == pytest.approx(20 * 128 / 4.0 / 2)
    assert record["model_tflops"] == pytest.approx(model_flops(model, 128, 20 * 128) / 4.0 / 2 / 1e12)
    assert record["hardware_tflops"] == pytest.approx(
        hardware_flops(model, PerformanceConfig(), 128, 20 * 128) / 4.0 / 2 / 1e12
    )
    assert console["remaining_seconds"] == pytest.approx(40 * 4.0 / 20)


def test_timer_leaves_out_validation_and_saves():
    timer, clock, _ = make_timer()
    clock.now += 1.0
    with timer.excluded():
        clock.now += 1000.0
    clock.now += 1.0
    record, _ = timer.lap(4)
    assert record["step_time_ms"] == pytest.approx(500)
    assert "mfu" not in record  # no peak, no mfu


def test_glances_leave_the_laps_alone():
    """Rates are those since the last glance; laps are the same without them."""
    (timer, clock, _), (plain, plain_clock, _) = make_timer(), make_timer()
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
    assert "remaining_seconds" not in shown[1] and shown[4]["remaining_seconds"] == pytest.approx(96 * 0.5)


def test_pace_of_the_bar():
    """Speed of all ranks, MFU and time left at the usual pace; nothing before a step that counts."""
    timer, clock, model = make_timer(peak_tflops=1e-3)
    steps(timer, clock, 1, 1, 30.0)
    assert timer.pace(1) == {}
    steps(timer, clock, 2, 11, 0.5)
    mfu = model_flops(model, 128, 1024) / 0.5 / 2 / 1e12 / 1e-3
    assert timer.pace(11) == pytest.approx({"tokens_per_sec": 2048, "mfu": mfu, "remaining_seconds": 44.5})
    with timer.excluded(), timer.pause("save"):
        clock.now += 22.0
    steps(timer, clock, 12, 12, 0.5)
    assert timer.pace(12) == pytest.approx({"tokens_per_sec": 2048, "mfu": mfu, "remaining_seconds": 88 * 2.5})


def test_a_look_at_the_mean_loss_leaves_the_window_alone():
    """The next line is the mean of all updates since the last line."""
    window = LogWindow(torch.device("cpu"))
    for loss in (20.0, 40.0):
        window.add(torch.tensor(loss), 10, torch.tensor(False), 0.0)
    assert window.mean_loss() == 3.0
    window.add(torch.tensor(60.0), 10, torch.tensor(False), 0.0)
    assert window.close()["loss"] == 4.0 and window.mean_loss() is None


def test_timer_without_an_iteration_says_nothing_and_survives_endless_runs():
    timer, clock, _ = make_timer()
    assert timer.lap(0) == ({}, {})
    clock.now += 1e12
    _, console = timer.lap(1)
    assert "completion_date" not in console  # beyond the year 9999


def test_log_line_of_a_training_record():
    record = {
        "phase": "training",
        "iteration": 20,
        "train_iters": 1000,
        "loss": 3.123456,
        "learning_rate": 3e-4,
        "grad_norm": 1.25,
        "loss_scale": 1.0,
        "batch_size": 32,
        "consumed_samples": 640,
        "consumed_tokens": 81920,
        "step_time_ms": 12.345,
        "tokens_per_sec_per_gpu": 12345.678,
        "model_tflops": 440.126,
        "hardware_tflops": 0.01234,
        "mfu": 0.4321,
        "skipped_iters": 0,
        "nan_iters": 0,
        "max_allocated_mib": 1024.0,
        "max_reserved_mib": 2048.0,
        "run": 0,
        "time": 0.0,
    }
    console = {
        "average_step_time_ms": 12.0,
        "remaining_seconds": 3725.0,
        "completion_date": datetime(2030, 1, 2, 3, 4, 5),
        "allocated_mib": 512.0,
    }
    assert format_record(record, console) == (
        "training @ iteration   20/1000 | consumed samples: 640 | consumed tokens: 81,920 | batch size: 32"
        " | step time: 12.35 ms | throughput: 440.13 tflop/s (model) | 0.0123 tflop/s (hardware) | mfu: 43.2%"
        " | 12,345.68 tokens/s/gpu | Memory allocated: 512 MiB | max allocated: 1,024 MiB | max reserved: 2,048 MiB"
        " | learning rate: 3.000e-04 | loss scale: 1 | grad norm: 1.2500 | skipped iterations: 0 | nan iterations: 0"
        " | average step time: 12.00 ms | remaining: 1:02:05 | completion: 2030-01-02 03:04:05 (2.00%)"
        " | language model loss: 3.12346"
    )


def test_log_line_shows_only_what_the_record_has():
    record = {"phase": "validation", "iteration": 5, "train_iters": 10, "loss": 2.5}
    assert format_record(record) == "validation @ iteration  5/10 | language model loss: 2.50000"
    assert format_record({"phase": "test", "loss": float("nan")}) == "test @ iteration | language model loss: nan"
    assert format_record({**record, "loss": None}) == "validation @ iteration  5/10"


def test_durations():
    assert [format_duration(seconds) for seconds in (0, 59.6, 3600, 360_000)] == [
        "0:00:00",
        "0:01:00",
        "1:00:00",
        "100:00:00",
    ]
