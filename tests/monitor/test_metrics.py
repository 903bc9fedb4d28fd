"""FLOPs against published numbers, peaks, and the mean loss."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_lite.config import ModelConfig, PerformanceConfig
from megatron_lite.monitor.metrics import LogWindow, hardware_flops, known_peak_tflops, model_flops
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


def test_model_flops_are_linear_in_tokens_and_need_a_short_window_to_shrink():
    assert model_flops(LLAMA, 4096, 4096) == pytest.approx(4096 * model_flops(LLAMA, 4096, 1))
    for window in (8192, 100_000):
        assert model_flops(dataclasses.replace(MISTRAL, window_size=window), 8192, 7) == model_flops(MISTRAL, 8192, 7)


def test_window_flops_count_the_keys_that_a_causal_window_leaves():
    """A brute-force count of (query, key) pairs approaches the formula's w (1 - w / 2s) keys per query."""
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "head_groups", "kv_channels", "ffn_hidden_size")
    model = ModelConfig(**dict.fromkeys(sizes, 1), vocab_size=2, window_size=300)
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
    "peak, names",
    [
        (312.0, "NVIDIA A100-SXM4-80GB, NVIDIA A100 80GB PCIe"),
        (989.4, "NVIDIA H100 80GB HBM3, NVIDIA H200, NVIDIA GH200 480GB"),
        (756.0, "NVIDIA H100 PCIe"),
        (835.5, "NVIDIA H100 NVL"),
        (2250.0, "NVIDIA B200"),
        (362.0, "NVIDIA L40S"),
        (121.0, "NVIDIA L4"),
        (125.0, "Tesla V100-SXM2-32GB"),
        (65.0, "Tesla T4"),
        (165.2, "NVIDIA GeForce RTX 4090"),
        (None, "NVIDIA GeForce GTX 1080, AMD EPYC 7B13, "),
    ],
)
def test_peaks_by_device_name(peak, names):
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
