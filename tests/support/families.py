"""Tiny random models of every Hugging Face family, made by transformers: the oracle of imports and
exports.

All weights, biases and norms are random, so that a tensor in the wrong place, a missing bias or a
norm taken for ones shows in the logits. Head counts are odd where the family allows it, rotary
scaling is tried beyond the original length, windows are shorter than `SEQUENCE_LENGTH`, and every
family has a tied and an untied head where it can.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

EAGER = dict(attn_implementation="eager", experts_implementation="eager")
SEQUENCE_LENGTH = 24  # longer than every window and original length below, shorter than every max_position_embeddings
VOCAB_SIZE = 61

_LLAMA: dict[str, Any] = dict(
    model_type="llama",
    vocab_size=VOCAB_SIZE,
    hidden_size=30,
    intermediate_size=44,
    num_hidden_layers=2,
) | dict(
    num_attention_heads=5,
    max_position_embeddings=64,
    rms_norm_eps=1e-4,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,  # transformers gives the embedding of this token no gradient
)
_GPT2: dict[str, Any] = dict(
    model_type="gpt2", vocab_size=VOCAB_SIZE, n_embd=24, n_layer=3, n_head=3, n_positions=40
) | dict(
    layer_norm_epsilon=1e-4,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=1,
    eos_token_id=2,
)
_LAYER_NORMS = {key: value for key, value in _LLAMA.items() if key != "rms_norm_eps"}
_NEOX = _LAYER_NORMS | dict(model_type="gpt_neox", hidden_size=40, layer_norm_eps=1e-4)
_STARCODER2 = _LAYER_NORMS | dict(model_type="starcoder2", norm_epsilon=1e-4)
_LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0
) | dict(original_max_position_embeddings=16)
_YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=16)
_SEED_OSS = _LLAMA | dict(
    model_type="seed_oss",
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=10,
    attention_dropout=0.0,
    residual_dropout=0.0,
)
_DEFAULT_ROPE = dict(rope_type="default", rope_theta=200.0)
_GEMMA2: dict[str, Any] = (
    _LLAMA
    | dict(model_type="gemma2", hidden_size=36, num_attention_heads=6, num_key_value_heads=3)
    | dict(head_dim=10, query_pre_attn_scalar=12, sliding_window=7)
    | dict(final_logit_softcapping=5.0, attn_logit_softcapping=2.0)
)
_LONGROPE = dict(
    rope_type="longrope",
    partial_rotary_factor=0.75,
    short_factor=[1.0, 1.1, 1.2],
    long_factor=[1.5, 2.0, 4.0],
)
_LINEAR = dict(rope_type="linear", rope_theta=500.0, factor=4.0)

# Name -> what the transformers config of its `model_type` is made with. Names begin with the
# family's.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA
    | dict(num_key_value_heads=5, rope_parameters=dict(rope_type="default", rope_theta=100.0)),
    "llama, llama3 rope, tied, attention biases": _LLAMA
    | dict(num_attention_heads=6, num_key_value_heads=3, head_dim=10, tie_word_embeddings=True)
    | dict(attention_bias=True, rope_parameters=_LLAMA3_ROPE),
    "llama, linear rope, MLP biases": _LLAMA
    | dict(num_key_value_heads=1, mlp_bias=True, hidden_act="gelu", rope_parameters=_LINEAR),
    "mistral, window": _LLAMA
    | dict(
        model_type="mistral",
        hidden_size=22,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=7,
    ),
    "mistral, yarn, tied": _LLAMA
    | dict(
        model_type="mistral",
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=10,
        sliding_window=None,
    )
    | dict(
        tie_word_embeddings=True, rope_parameters=_YARN | dict(truncate=False, attention_factor=1.3)
    ),
    "gpt2": _GPT2,
    "gpt2, untied, inverse layer scale": _GPT2
    | dict(
        tie_word_embeddings=False,
        scale_attn_by_inverse_layer_idx=True,
        n_inner=40,
        activation_function="relu",
    ),
    "gpt_bigcode, multi-query": _GPT2 | dict(model_type="gpt_bigcode"),
    "gpt_bigcode, multi-head, untied": _GPT2
    | dict(
        model_type="gpt_bigcode",
        multi_query=False,
        n_embd=30,
        n_head=5,
        n_inner=44,
        tie_word_embeddings=False,
    ),
    "starcoder2, window": _STARCODER2
    | dict(hidden_size=36, num_attention_heads=6, num_key_value_heads=3, sliding_window=7)
    | dict(rope_parameters=dict(rope_type="default", rope_theta=999.4420358813)),
    "starcoder2, yarn, untied, no biases": _STARCODER2
    | dict(num_key_value_heads=1, use_bias=False, tie_word_embeddings=False)
    | dict(rope_parameters=_YARN | dict(mscale=1.2, mscale_all_dim=0.7)),
    "qwen2, yarn": _LLAMA
    | dict(model_type="qwen2", hidden_size=36, num_attention_heads=6, num_key_value_heads=3)
    | dict(rope_parameters=_YARN | dict(beta_fast=20.0, beta_slow=2.0)),
    "qwen2, window, tied": _LLAMA
    | dict(model_type="qwen2", num_key_value_heads=5, use_sliding_window=True, sliding_window=7)
    | dict(max_window_layers=0, tie_word_embeddings=True),
    "qwen3": _LLAMA
    | dict(model_type="qwen3", hidden_size=22, num_key_value_heads=5, head_dim=8)
    | dict(rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    "qwen3, linear rope, window, biases, tied": _LLAMA
    | dict(
        model_type="qwen3",
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=10,
        attention_bias=True,
    )
    | dict(use_sliding_window=True, sliding_window=7, max_window_layers=0, tie_word_embeddings=True)
    | dict(rope_parameters=_LINEAR),
    "olmo2, yarn": _LLAMA
    | dict(model_type="olmo2", hidden_size=36, num_attention_heads=6, num_key_value_heads=3)
    | dict(rope_parameters=_YARN),
    "olmo2, biases, tied": _LLAMA
    | dict(
        model_type="olmo2", num_key_value_heads=1, attention_bias=True, tie_word_embeddings=True
    ),
}

FAMILIES |= {
    "nemotron, linear rope": _LAYER_NORMS
    | dict(model_type="nemotron", num_key_value_heads=1, head_dim=16, hidden_act="relu2")
    | dict(norm_eps=1e-4, rope_parameters=_LINEAR | dict(partial_rotary_factor=0.75)),
    "nemotron, biases, tied": _LAYER_NORMS
    | dict(model_type="nemotron", hidden_size=40, num_key_value_heads=5)
    | dict(attention_bias=True, mlp_bias=True, hidden_act="gelu")
    | dict(tie_word_embeddings=True),
    "stablelm": _LAYER_NORMS
    | dict(model_type="stablelm", hidden_size=40, num_key_value_heads=1, layer_norm_eps=1e-4),
    "stablelm, biases, tied": _LAYER_NORMS
    | dict(model_type="stablelm", num_key_value_heads=5, hidden_size=60, use_qkv_bias=True)
    | dict(tie_word_embeddings=True, rope_parameters=dict(partial_rotary_factor=0.5)),
    "stablelm, parallel branches": _LAYER_NORMS
    | dict(model_type="stablelm", hidden_size=40, num_key_value_heads=5, layer_norm_eps=1e-4)
    | dict(use_parallel_residual=True),
    "gpt_neox": _NEOX,
    "gpt_neox, linear rope, one after the other, tied": _NEOX
    | dict(use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True)
    | dict(rope_parameters=_LINEAR | dict(partial_rotary_factor=0.5)),
    "phi3": _LLAMA | dict(model_type="phi3", num_key_value_heads=5, pad_token_id=None),
    "phi3, partial rope, window, tied": _LLAMA
    | dict(model_type="phi3", hidden_size=60, num_attention_heads=6, num_key_value_heads=3)
    | dict(sliding_window=7, pad_token_id=None, tie_word_embeddings=True)
    | dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.6)),
    "phi3, longrope": _LLAMA
    | dict(model_type="phi3", hidden_size=40, num_key_value_heads=1, pad_token_id=None)
    | dict(original_max_position_embeddings=48, rope_parameters=_LONGROPE),
    "glm4": _LLAMA | dict(model_type="glm4", num_key_value_heads=5, head_dim=8, pad_token_id=None),
    "glm4, linear rope, no biases, tied": _LLAMA
    | dict(model_type="glm4", num_attention_heads=6, num_key_value_heads=3, head_dim=10)
    | dict(attention_bias=False, tie_word_embeddings=True, pad_token_id=None)
    | dict(rope_parameters=_LINEAR | dict(partial_rotary_factor=0.6)),
    "cohere2": _LAYER_NORMS
    | dict(model_type="cohere2", hidden_size=40, num_hidden_layers=5, num_key_value_heads=1)
    | dict(layer_norm_eps=1e-4, logit_scale=0.3, sliding_window=7, pad_token_id=None),
    "cohere2, untied, biases": _LAYER_NORMS
    | dict(model_type="cohere2", hidden_size=40, num_key_value_heads=5, pad_token_id=None)
    | dict(attention_bias=True, tie_word_embeddings=False, sliding_window=7)
    | dict(layer_types=["full_attention", "sliding_attention"]),
    "granite": _LLAMA
    | dict(model_type="granite", num_key_value_heads=1, embedding_multiplier=3.0)
    | dict(residual_multiplier=0.7, attention_multiplier=0.3, logits_scaling=1.7),
    "granite, usual factors, biases, tied": _LLAMA
    | dict(model_type="granite", num_key_value_heads=5, tie_word_embeddings=True)
    | dict(attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3_ROPE),
    "olmo3, yarn in full blocks": _LLAMA
    | dict(model_type="olmo3", hidden_size=36, num_attention_heads=6, num_key_value_heads=3)
    | dict(num_hidden_layers=3, sliding_window=7)
    | dict(layer_types=["sliding_attention", "full_attention", "full_attention"])
    | dict(rope_parameters=dict(full_attention=_YARN, sliding_attention=_DEFAULT_ROPE)),
    "olmo3, every fourth block full, biases, tied": _LLAMA
    | dict(model_type="olmo3", num_hidden_layers=4, num_key_value_heads=5, sliding_window=5)
    | dict(attention_bias=True, tie_word_embeddings=True),
    "exaone4": _LLAMA
    | dict(model_type="exaone4", num_attention_heads=6, num_key_value_heads=3, head_dim=10)
    | dict(num_hidden_layers=3, sliding_window=7, rope_parameters=_LLAMA3_ROPE)
    | dict(layer_types=["sliding_attention", "full_attention", "full_attention"]),
    "exaone4, no window, tied": _LLAMA
    | dict(model_type="exaone4", num_key_value_heads=1, sliding_window=None)
    | dict(layer_types=["full_attention"] * 2, tie_word_embeddings=True),
    "seed_oss": _SEED_OSS,
    "seed_oss, bias of the output, no others, tied": _SEED_OSS
    | dict(attention_bias=False, attention_out_bias=True, tie_word_embeddings=True),
    "seed_oss, biases of the MLP": _SEED_OSS | dict(num_key_value_heads=2, mlp_bias=True),
    "smollm3": _LLAMA
    | dict(model_type="smollm3", num_hidden_layers=4, num_key_value_heads=1)
    | dict(rope_parameters=_DEFAULT_ROPE),
    "smollm3, window where none rotates, biases, untied": _LLAMA
    | dict(
        model_type="smollm3", num_hidden_layers=3, num_key_value_heads=5, no_rope_layers=[0, 1, 1]
    )
    | dict(use_sliding_window=True, sliding_window=7, attention_bias=True, mlp_bias=True)
    | dict(tie_word_embeddings=False, rope_parameters=_LINEAR),
    "gemma": _LLAMA | dict(model_type="gemma", num_key_value_heads=1, head_dim=8),
    "gemma, untied, biases": _LLAMA
    | dict(model_type="gemma", num_attention_heads=4, num_key_value_heads=2, head_dim=10)
    | dict(attention_bias=True, tie_word_embeddings=False, rope_parameters=_DEFAULT_ROPE),
    "gemma2": _GEMMA2 | dict(num_hidden_layers=3),
    "gemma2, no caps, untied": _GEMMA2
    | dict(final_logit_softcapping=None, attn_logit_softcapping=None, tie_word_embeddings=False)
    | dict(layer_types=["full_attention", "sliding_attention"], query_pre_attn_scalar=20),
    "gemma3_text": _GEMMA2
    | dict(model_type="gemma3_text", num_hidden_layers=3, attn_logit_softcapping=None)
    | dict(layer_types=["sliding_attention", "sliding_attention", "full_attention"])
    | dict(rope_parameters=dict(full_attention=_LINEAR, sliding_attention=_DEFAULT_ROPE)),
    "gemma3_text, one base, biases": _GEMMA2
    | dict(model_type="gemma3_text", attn_logit_softcapping=None, final_logit_softcapping=None)
    | dict(layer_types=["sliding_attention", "full_attention"], attention_bias=True)
    | dict(rope_parameters=dict(full_attention=_DEFAULT_ROPE, sliding_attention=_DEFAULT_ROPE)),
}


_EXPERTS = dict(num_local_experts=5, num_experts_per_tok=2)
_GLM4_MOE: dict[str, Any] = (
    _LLAMA
    | dict(model_type="glm4_moe", num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    | dict(num_hidden_layers=3, moe_intermediate_size=14, num_experts_per_tok=3)
)

FAMILIES |= {
    "mixtral": _LLAMA | _EXPERTS | dict(model_type="mixtral", num_key_value_heads=5),
    "mixtral, window, tied": _LLAMA
    | dict(model_type="mixtral", num_attention_heads=6, num_key_value_heads=3, head_dim=10)
    | dict(num_local_experts=12, num_experts_per_tok=3, sliding_window=7, tie_word_embeddings=True),
    "qwen3_moe": _LLAMA
    | dict(model_type="qwen3_moe", num_key_value_heads=5, head_dim=8, num_experts=6)
    | dict(num_experts_per_tok=3, moe_intermediate_size=14, norm_topk_prob=True),
    "qwen3_moe, dense blocks, biases, window, tied": _LLAMA
    | dict(model_type="qwen3_moe", num_key_value_heads=1, num_hidden_layers=4, num_experts=5)
    | dict(num_experts_per_tok=2, moe_intermediate_size=14, decoder_sparse_step=2)
    | dict(mlp_only_layers=[0, 1], attention_bias=True, tie_word_embeddings=True)
    | dict(use_sliding_window=True, sliding_window=7),
    "olmoe": _LLAMA
    | dict(model_type="olmoe", num_key_value_heads=1, num_experts=7, num_experts_per_tok=3),
    "olmoe, one choice, biases, tied": _LLAMA
    | dict(model_type="olmoe", num_key_value_heads=5, num_experts=4, num_experts_per_tok=1)
    | dict(norm_topk_prob=False, attention_bias=True, tie_word_embeddings=True),
    "granitemoe": _LLAMA
    | _EXPERTS
    | dict(model_type="granitemoe", num_key_value_heads=1, embedding_multiplier=3.0)
    | dict(residual_multiplier=0.7, attention_multiplier=0.3, logits_scaling=1.7),
    "granitemoe, scores without a factor, biases, tied": _LLAMA
    | _EXPERTS
    | dict(model_type="granitemoe", num_key_value_heads=5, tie_word_embeddings=True)
    | dict(attention_bias=True, rope_parameters=_LLAMA3_ROPE),
    "gpt_oss": _LLAMA
    | _EXPERTS
    | dict(model_type="gpt_oss", num_attention_heads=6, num_key_value_heads=3, head_dim=10)
    | dict(sliding_window=7, swiglu_limit=0.7)
    | dict(rope_parameters=_YARN | dict(truncate=False)),
    "gpt_oss, windows at the end, no biases of attention, tied": _LLAMA
    | _EXPERTS
    | dict(model_type="gpt_oss", num_key_value_heads=1, head_dim=8, attention_bias=False)
    | dict(layer_types=["full_attention", "sliding_attention"], sliding_window=5)
    | dict(tie_word_embeddings=True, rope_parameters=_DEFAULT_ROPE),
    "glm4_moe": _GLM4_MOE
    | dict(n_routed_experts=12, n_group=4, topk_group=2, routed_scaling_factor=1.5)
    | dict(n_shared_experts=2, use_qk_norm=True),
    "glm4_moe, one group, no dense blocks, biases, tied": _GLM4_MOE
    | dict(n_routed_experts=5, first_k_dense_replace=0, norm_topk_prob=False)
    | dict(attention_bias=True, tie_word_embeddings=True, num_hidden_layers=2),
}

# For tests of one case a family: by default the first of each architecture.
FIRST = tuple({name.partition(",")[0]: name for name in reversed(FAMILIES)}.values())
FIRST_BY_DEFAULT = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in FIRST)) for name in FAMILIES
]


def make_config(name: str, **changes: Any) -> Any:
    """Return the transformers config of `FAMILIES[name]`; `changes` override its keys."""
    from transformers import AutoConfig

    values = FAMILIES[name] | changes
    return AutoConfig.for_model(
        values["model_type"], **{k: v for k, v in values.items() if k != "model_type"}
    )


def make_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a transformers model with random fp32 weights, in evaluation mode, with eager
    attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(make_config(name, **changes), **EAGER)
    randomize(model, seed)
    return model.float().eval()


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Draw weights large enough for a mistake in any parameter to show in the logits, which stay
    below 10."""
    # Gemma stores the weights of norms minus 1.
    middle = 0.0 if str(model.config.model_type).startswith("gemma") else 1.0
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [pair for pair in model.named_buffers() if pair[0].endswith("correction_bias")]
        for name, parameter in [*model.named_parameters(), *biases]:
            value = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(value * 0.2)
            else:
                parameter.copy_(value * 0.3 + (0.0 if name.endswith("bias") else middle))


def write_folder(
    name: str, folder: Path, seed: int = 0, max_shard_size: str = "5GB", **changes: Any
) -> Path:
    """Write such a model with transformers' `save_pretrained`; return the folder."""
    make_model(name, seed, **changes).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def random_tokens(batch: int = 2, length: int = SEQUENCE_LENGTH, seed: int = 1) -> Tensor:
    """(batch, length) int64."""
    return torch.randint(VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(seed))


def load_model(folder: Path) -> Any:
    """Load a folder with transformers, in fp32 and evaluation mode, with eager attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **EAGER)
    return model.eval()


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """(b, s) tokens -> (b, s, v) logits of a transformers model."""
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def write_with_images(folder: Path, seed: int = 0) -> Path:
    """Write a Gemma 3 of texts and images, whose text part is `gemma3_text`."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {k: v for k, v in FAMILIES["gemma3_text"].items() if k != "model_type"}
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    vision |= dict(image_size=28, patch_size=14)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config)
    randomize(model, seed)
    model.save_pretrained(folder)
    return folder
