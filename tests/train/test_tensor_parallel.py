"""Tensor parallelism against one rank: the same initial weights, and the same losses and weights after twenty steps."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from megatron_lite.distributed.process_group import Distributed
from tests.support.harness import Trajectory, run_distributed, same_weights, train_tiny

Options = dict[str, Any]
LLAMA: Options = {
    "normalization_type": "rms_norm",
    "use_rotary_embeddings": True,
    "gated": True,
    "add_linear_biases": False,
    "tie_word_embeddings": False,
    "head_groups": 2,
    "ffn_hidden_size": 96,
}
MODELS: dict[str, Options] = {
    "gpt2": {"vocab_size": 61},
    "llama": LLAMA,
    "multi-query": {**LLAMA, "head_groups": 1, "add_qkv_biases": True, "window_size": 5},
    "qwen3": {**LLAMA, "qk_layernorm": True, "logit_z_loss": 1e-2, "tie_word_embeddings": True},
}
LAYOUTS: dict[str, tuple[int, int, Options]] = {
    "2": (2, 2, {}),
    "2 with tokens split": (2, 2, {"sequence_tensor_parallel": True}),
    "4": (4, 4, {"zero_stage": 3}),
    "2 x 2 with tokens split": (4, 2, {"sequence_tensor_parallel": True, "zero_stage": 2}),
}
COMMON: Options = {"batch_size": 4, "lr": 1e-3, "clip_grad": 0.5, "random_bias_init": True}


def train_all(distributed: Distributed, layout: Options) -> dict[str, Trajectory]:
    return {name: train_tiny(distributed, {**COMMON, **model, **layout}) for name, model in MODELS.items()}


@functools.cache
def on_one_rank() -> dict[str, Trajectory]:
    (found,) = run_distributed(1, train_all, {})
    return found


@functools.cache
def trained(layout: str) -> list[dict[str, Trajectory]]:
    ranks, tensor_parallel, options = LAYOUTS[layout]
    options = {**options, "tensor_parallel": tensor_parallel}
    return run_distributed(ranks, train_all, options, tensor_parallel=tensor_parallel)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_trains_as_one_rank(layout: str, model: str) -> None:
    """Initial weights to the bit; losses and norms to 1e-6 relative; weights to 1e-5, but those of key biases."""
    one, ranks = on_one_rank()[model], [rank[model] for rank in trained(layout)]
    for rank in ranks:
        assert same_weights(rank.initial, one.initial)
        assert rank.losses == ranks[0].losses and rank.grad_norms == ranks[0].grad_norms
        assert same_weights(rank.weights, ranks[0].weights)
    np.testing.assert_allclose(ranks[0].losses, one.losses, rtol=1e-6)
    np.testing.assert_allclose(ranks[0].grad_norms, one.grad_norms, rtol=1e-5)
    for name, weight in one.weights.items():
        if name.endswith("query_key_value.bias"):  # keys' biases change no loss: Adam divides rounding by rounding
            keys = slice(32, -(len(weight) - 32) // 2)
            weight[keys] = ranks[0].weights[name][keys]
        np.testing.assert_allclose(ranks[0].weights[name], weight, atol=1e-5, err_msg=name)
