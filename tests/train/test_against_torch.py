"""Training equals an independent loop of torch.nn, autograd, torch.optim.AdamW and clip_grad_norm_
on the same data."""

from typing import Any

import numpy as np
import pytest

from megatron_lite.data.open_data import open_data
from tests.support.harness import (
    LLAMA,
    ROTARY_GATED,
    run_distributed,
    tiny_config,
    train_several,
    train_tiny,
)
from tests.support.plain_gpt import PlainGPT, plain_adamw

ITERATIONS = 20

EXPERTS = {"num_experts": 6, "num_experts_per_token": 2, "moe_ffn_hidden_size": 24}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "mistral": {
        **ROTARY_GATED,
        "head_groups": 1,
        "window_size": 5,
        "kv_channels": 12,
        "tie_word_embeddings": True,
    },
    "qwen2": {
        **ROTARY_GATED,
        "add_qkv_biases": True,
        "head_groups": 2,
        "logit_soft_cap": 5.0,
        "make_vocab_size_divisible_by": 100,
    },
    "starcoder2": {
        "use_rotary_embeddings": True,
        "head_groups": 2,
        "window_size": 7,
        "random_bias_init": True,
    },
    "factors": {
        **LLAMA,
        "embedding_scale": 5.0,
        "residual_scale": 0.3,
        "attention_scale": 0.7,
        "attention_soft_cap": 0.5,
        "logit_scale": 1.7,
        "hybrid_norm": True,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "sinks": {
        **LLAMA,
        "head_groups": 2,
        "attention_sinks": True,
        "window_size": 7,
        "attention_pattern": ("window", "full"),
        "activation_type": "quick_gelu",
        "activation_limit": 0.01,
    },
    "parallel branches": {
        **LLAMA,
        "parallel_branches": "one_norm",
        "residual_scale": 0.7,
        "head_groups": 2,
    },
    "parallel branches, two norms": {"parallel_branches": "two_norms", "random_bias_init": True},
    "relu_squared": {
        "activation_type": "squared_relu",
        "layer_norm_init_range": 0.2,
        "gated": True,
    },
    "every norm": {
        "qk_layernorm": True,
        "hybrid_norm": True,
        "input_embedding_norm": True,
        "zero_centered_normalization": True,
        "layer_norm_init_range": 0.3,
        "use_rotary_embeddings": True,
        "use_position_embeddings": True,
    },
    "norms without weights": {
        "qk_layernorm": True,
        "hybrid_norm": True,
        "use_layer_norm_weight": False,
        "normalization_type": "rms_norm",
        "head_groups": 2,
        "kv_channels": 12,
    },
    "norms of outputs and of all heads": {
        **ROTARY_GATED,
        "head_groups": 2,
        "norm_placement": "post",
        "qk_layernorm": True,
        "qk_norm_scope": "all",
        "layer_norm_init_range": 0.3,
    },
    "patterns": {
        **ROTARY_GATED,
        "normalization_type": "layer_norm",
        "use_layer_norm_bias": False,
        "num_layers": 4,
        "window_size": 5,
        "attention_pattern": ("window", "window", "full"),
        "rotary_pattern": ("rotary", "nope", "rotary", "rotary"),
        "window_rotary_base": 50.0,
        "rope_type": "linear",
        "rope_factor": 3.0,
    },
    "experts": {
        **LLAMA,
        **EXPERTS,
        "num_shared_experts": 2,
        "moe_router_bias_update_rate": 0.01,
        "expert_z_loss_coefficient": 0.01,
    },
    "experts, losses of samples": {
        **EXPERTS,
        "random_bias_init": True,
        "moe_router_bias": True,
        "moe_normalize_top_k": False,
        "moe_balance": "sequence",
        "expert_auxiliary_loss_coefficient": 0.1,
    },
    "experts, losses of batches": {
        **LLAMA,
        **EXPERTS,
        "moe_first_dense_layers": 1,
        "expert_auxiliary_loss_coefficient": 0.1,
    },
    "experts, losses of micro-batches": {
        **EXPERTS,
        "moe_balance": "micro_batch",
        "expert_auxiliary_loss_coefficient": 0.1,
    },
    "experts in groups": {
        **LLAMA,
        **EXPERTS,
        "moe_router_score": "sigmoid",
        "moe_router_groups": 3,
        "moe_router_top_groups": 2,
        "moe_routed_scaling_factor": 0.5,
        "moe_router_bias_update_rate": 0.01,
        "expert_auxiliary_loss_coefficient": 0.1,
    },
    "exact, biases in attention alone": {
        "activation_type": "gelu_exact",
        "hidden_size": 36,
        "vocab_size": 61,
        "num_attention_heads": 3,
        "add_mlp_biases": False,
        "random_bias_init": True,
    },
}

SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "cosine": {"lr_decay_style": "cosine", "min_lr": 1e-4, "lr_warmup": 5, "lr_decay_iters": 15},
}


def plain_loop(
    options: dict[str, Any], initial: dict[str, np.ndarray]
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return losses and final weights of the oracle from the given initial weights."""
    config = tiny_config(**options)
    model = PlainGPT(config.model)
    model.load(initial)
    update = plain_adamw(model, config.optimizer, dict.fromkeys(initial, 1.0))
    losses = []
    batches = open_data(config, 0, 1).batches("training", 0, ITERATIONS)
    for iteration, ((tokens, *_),) in enumerate(batches, start=1):
        loss = model.loss(tokens)
        update(loss + model.expert_losses(), plain_learning_rate(options, iteration))
        losses.append(loss.item())
        for experts in model.experts:
            experts.after_update()
    return losses, {name: weight.numpy() for name, weight in model.state_dict().items()}


def plain_learning_rate(options: dict[str, Any], iteration: int) -> float:
    """Learning rate 1e-3 after a linear warmup that starts at lr / warmup; then constant, or cosine
    to min_lr."""
    warmup = options.get("lr_warmup", 10)
    if iteration <= warmup:
        return 1e-3 * iteration / warmup
    if "lr_decay_style" not in options:
        return 1e-3
    progress = min(1.0, (iteration - warmup) / (options["lr_decay_iters"] - warmup))
    return options["min_lr"] + (1e-3 - options["min_lr"]) * 0.5 * (1 + np.cos(np.pi * progress))


TWO_RANKS = ("llama", "every norm", "factors", "experts", "experts, losses of batches")
# depends on the samples of a micro-batch
ONE_RANK = "experts, losses of micro-batches"


# Every architecture by default, in one layout or the other; in both with -m slow.
@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        pytest.param(
            name,
            layout,
            id=f"{name}, {words}",
            marks=[pytest.mark.slow] * ((layout[0] == 2) != (name in TWO_RANKS)),
        )
        for name in ARCHITECTURES
        for layout, words in {(2, 3): "two ranks, ZeRO 3", (1, 1): "one rank"}.items()
        if (name, layout) != (ONE_RANK, (2, 3))
    ],
)
def test_training_equals_plain_torch(architecture: str, layout: tuple[int, int]) -> None:
    """Losses agree to 1e-6 relative, weights to 1e-5 absolute, except key biases: their exact
    gradient is zero."""
    ranks, zero_stage = layout
    schedule = "cosine" if architecture == "llama" else "constant"
    options = {**ARCHITECTURES[architecture], **SCHEDULES[schedule], "zero_stage": zero_stage}
    ours = run_distributed(ranks, train_tiny, options, ITERATIONS)[0]
    losses, weights = plain_loop(options, ours.initial)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(ours.losses, losses, rtol=1e-6)
    assert weights.keys() == ours.weights.keys()
    model = tiny_config(**options).model
    for name, weight in weights.items():
        difference = np.abs(ours.weights[name] - weight)
        if name.endswith("query_key_value.bias"):
            first_key = model.num_attention_heads * model.kv_channels
            difference[first_key : first_key + model.head_groups * model.kv_channels] = 0
        assert difference.max() < 1e-5, name


def test_clipping_is_active_in_these_runs() -> None:
    """Some gradients are clipped, or the comparison could not see a wrong clip coefficient."""
    options = {"clip_grad": 0.3}
    ours = run_distributed(2, train_tiny, options, ITERATIONS)[0]
    assert min(ours.grad_norms) > 0.3
    losses, _ = plain_loop(options, ours.initial)
    np.testing.assert_allclose(ours.losses, losses, rtol=1e-6)


@pytest.mark.parametrize("architecture", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_recomputation_changes_no_bit_of_a_run(architecture: str) -> None:
    """Losses, gradient norms and weights of 2 ranks with ZeRO 3, dropout and accumulation are equal
    at every level."""
    options = {
        **ARCHITECTURES[architecture],
        "zero_stage": 3,
        "hidden_dropout": 0.1,
        "micro_batch_size": 1,
        "lr_warmup": 2,
    }
    levels = (
        "none",
        "activation",
        "full",
        "activation,full:1",
        "full,none:1",
        "none,full:1,activation:1",
    )
    runs = [{**options, "mlp_recompute_level": level} for level in levels]
    plain, *others = run_distributed(2, train_several, runs, 2)[0]
    for recomputed in others:
        assert recomputed.losses == plain.losses and recomputed.grad_norms == plain.grad_norms
        for name, weight in plain.weights.items():
            np.testing.assert_array_equal(recomputed.weights[name], weight, err_msg=name)
