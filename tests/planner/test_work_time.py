"""Predicted times: the work of a step has the FLOPs that the log counts, and hostile files of speeds are one line."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lite.monitor.metrics import hardware_flops
from megatron_lite.planner.plan import make_plan
from megatron_lite.planner.speeds import DataSheet
from megatron_lite.planner.work import Pass, work_of_step
from megatron_lite.planner.work_time import predict_step
from tests.support.harness import tiny_config

H100 = DataSheet("H100", {"bf16": 989e12, "fp32": 67e12}, 3.35e12, 450e9)

LLAMA: dict[str, Any] = dict(
    use_rotary_embeddings=True, gated=True, normalization_type="rms_norm", add_linear_biases=False, head_groups=2
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        LLAMA,
        dict(mlp_recompute_level="full", depth_first_micro_batches=2, breadth_first_micro_batches=2, num_layers=3),
        dict(recompute_layers=1, tie_word_embeddings=False, window_size=5, **LLAMA),
        dict(cross_entropy_block_size=16, mlp_recompute_level="none,full:1"),
        dict(training_dtype="bf16", qk_layernorm=True, kv_channels=12, cross_entropy_splits=4),
    ],
    ids=str,
)
def test_work_has_the_flops_that_the_log_counts(options: dict[str, Any]) -> None:
    """Products and attention of all micro-batches add up to `hardware_tflops` times the step's time, for one rank."""
    config = tiny_config(1, **options)
    plan = make_plan(config, 1, "cpu")
    names = [name for name, _ in plan.model.parameters()]
    work = work_of_step(config, names, 1000, 1, "cpu")
    flops = sum(item.flops for item in work.micro_batch if not isinstance(item, Pass))
    assert config.batch.batch_size
    tokens = config.batch.batch_size * config.batch.sequence_length
    expected = hardware_flops(config.model, config.performance, config.batch.sequence_length, tokens)
    assert work.micro_batches * flops == pytest.approx(expected, rel=1e-9)


def test_frozen_parameters_make_no_weight_gradients() -> None:
    """A frozen embedding and first block leave their three products a layer to the forward pass alone."""
    whole = tiny_config(1, num_layers=2, tie_word_embeddings=False)
    part = tiny_config(1, num_layers=2, tie_word_embeddings=False, freeze=("embedding", "blocks.0"))
    flops = []
    for config in (whole, part):
        model = make_plan(config, 1, "cpu").model
        trained = [name for name, parameter in model.parameters() if parameter.requires_grad]
        items = work_of_step(config, trained, 0, 1, "cpu").micro_batch
        flops.append(sum(item.flops for item in items if not isinstance(item, Pass)))
    block = hardware_flops(whole.model, whole.performance, 16, 64) - hardware_flops(
        tiny_config(1, num_layers=1, tie_word_embeddings=False).model, whole.performance, 16, 64
    )
    forward = 1 / 3.5  # of its attention; of its products a third
    assert flops[0] - block < flops[1] < flops[0] - (1 - forward) * block * 0.9


def test_more_ranks_expose_more_of_the_link() -> None:
    """One rank waits for no link; a slower link never shortens a step; one buffer hides nothing."""
    seconds = []
    for ranks, link, options in ((1, 450e9, {}), (2, 450e9, {}), (2, 1e9, {}), (2, 1e9, dict(num_weight_buffers=1))):
        config = tiny_config(ranks, zero_stage=3, training_dtype="bf16", batch_size=4 * ranks, **options)
        plan = make_plan(config, ranks, "cuda")
        speeds = DataSheet("GPU", H100.product_flops_per_s, H100.memory_bytes_per_s, link)
        time = predict_step(plan.config, plan.model, plan.traffic, speeds, "cuda")
        assert time.tokens == 4 * ranks * 16 and (time.communication_s > 0) == (ranks > 1)
        seconds.append(time.exposed_s)
    assert seconds[0] == 0 < seconds[1] < seconds[2] < seconds[3]
