"""Which Hugging Face architecture expresses a model, and its config.json. Imports neither torch nor transformers."""

from __future__ import annotations

from typing import Any

from megatron_lite.config import Config, ModelConfig
from megatron_lite.errors import UsageError

# For each architecture, in order of preference, the options that it fixes.
_FIXED: dict[str, dict[str, Any]] = {
    "llama": {
        "normalization_type": "rms_norm", "use_rotary_embeddings": True, "use_position_embeddings": False,
        "gated": True, "window_size": None,
    },
    "mistral": {
        "normalization_type": "rms_norm", "use_rotary_embeddings": True, "use_position_embeddings": False,
        "gated": True, "add_linear_biases": False,
    },
    "gpt2": {
        "normalization_type": "layer_norm", "use_rotary_embeddings": False, "use_position_embeddings": True,
        "gated": False, "add_linear_biases": True, "window_size": None,
    },
    "starcoder2": {
        "normalization_type": "layer_norm", "use_rotary_embeddings": True, "use_position_embeddings": False,
        "gated": False,
    },
}  # fmt: skip
_CLASS_NAMES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "gpt2": "GPT2LMHeadModel",
    "starcoder2": "Starcoder2ForCausalLM",
}  # fmt: skip
_ACTIVATIONS = {
    "gelu": "gelu_pytorch_tanh", "gelu_exact": "gelu", "silu": "silu", "relu": "relu", "squared_relu": "relu2",
    "identity": "linear",
}  # fmt: skip
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def check_exportable(model: ModelConfig) -> str:
    """The `model_type` that expresses a resolved model: llama, mistral, gpt2 or starcoder2.

    Raises:
        UsageError: if none does, listing for each the flags that it would need.
    """
    needs = {architecture: _needs(architecture, model) for architecture in _FIXED}
    for architecture, missing in needs.items():
        if not missing:
            return architecture
    lines = [
        f"  {_CLASS_NAMES[architecture]}: {', '.join(missing)}"
        for architecture, missing in sorted(needs.items(), key=lambda item: len(item[1]))
    ]
    raise UsageError(
        "--export_format=huggingface: no Hugging Face architecture can express this model. Use "
        "--export_format=distributed, leave out --export_interval, or train with what one of these needs:\n"
        + "\n".join(lines)
    )


def _needs(architecture: str, model: ModelConfig) -> list[str]:
    """The flags, with values, that the model would have to change."""
    needs = []
    for name, value in _FIXED[architecture].items():
        actual = getattr(model, name)
        assert actual is not None or name == "window_size", f"{name} is not resolved"
        if actual != value:
            needs.append(f"--{name}={_as_flag(value)} (not {_as_flag(actual)})")
    heads, groups, channels, width = model.num_attention_heads, model.head_groups, model.kv_channels, model.hidden_size
    if architecture == "gpt2" and groups != heads:
        needs.append(f"--head_groups={heads} (not {groups})")
    if architecture == "gpt2" and heads * (channels or 0) != width:
        needs.append(f"--kv_channels * --num_attention_heads={heads} = --hidden_size={width} (not {channels})")
    if architecture == "llama" and width % heads:
        needs.append(f"a multiple of --num_attention_heads={heads} as --hidden_size (not {width})")
    return needs


def _as_flag(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else "none" if value is None else str(value)


def hugging_face_config(config: Config, special_tokens: dict[str, int | None]) -> dict[str, Any]:
    """config.json of a resolved config. `special_tokens` are bos_token_id and eos_token_id, None where unknown.

    Both spellings of the dtype and of the rotary base are given: transformers 5 reads `dtype` and `rope_parameters`,
    older ones `torch_dtype` and `rope_theta`.

    Raises:
        UsageError: if no architecture can express the model.
    """
    model = config.model
    architecture = check_exportable(model)
    dtype = _DTYPES[config.distributed.training_dtype]
    common = {
        "architectures": [_CLASS_NAMES[architecture]], "model_type": architecture, "dtype": dtype,
        "torch_dtype": dtype, "vocab_size": model.vocab_size, "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": min(1.0, _init_std(model)), "bos_token_id": special_tokens.get("bos_token_id"),
        "eos_token_id": special_tokens.get("eos_token_id"), "pad_token_id": None, "use_cache": True,
    }  # fmt: skip
    return common | (_gpt2(model) if architecture == "gpt2" else _rotary(architecture, config))


def _init_std(model: ModelConfig) -> float:
    return model.hidden_size**-0.5 if model.init_method_std is None else model.init_method_std


def _activation(model: ModelConfig) -> str:
    assert model.activation_type is not None, "activation_type is not resolved"
    return _ACTIVATIONS[model.activation_type]


def _gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_positions": model.max_position_embeddings, "n_embd": model.hidden_size, "n_layer": model.num_layers,
        "n_head": model.num_attention_heads, "n_inner": model.ffn_hidden_size,
        "activation_function": "gelu_new" if model.activation_type == "gelu" else _activation(model),
        "layer_norm_epsilon": model.layer_norm_eps, "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout, "attn_pdrop": model.attention_dropout,
    }  # fmt: skip


def _rotary(architecture: str, config: Config) -> dict[str, Any]:
    """What Llama, Mistral and StarCoder2 share, and what each adds."""
    model, theta = config.model, config.model.rotary_base
    shared = {
        "max_position_embeddings": max(model.max_position_embeddings or 0, config.batch.sequence_length),
        "hidden_size": model.hidden_size, "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads, "num_key_value_heads": model.head_groups,
        "head_dim": model.kv_channels, "intermediate_size": model.ffn_hidden_size, "hidden_act": _activation(model),
        "attention_dropout": model.attention_dropout, "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }  # fmt: skip
    if architecture == "llama":
        biases = model.add_linear_biases
        return shared | {"rms_norm_eps": model.layer_norm_eps, "attention_bias": biases, "mlp_bias": biases}
    if architecture == "mistral":
        return shared | {"rms_norm_eps": model.layer_norm_eps, "sliding_window": model.window_size}
    return shared | {
        "norm_epsilon": model.layer_norm_eps, "use_bias": model.add_linear_biases,
        "sliding_window": model.window_size, "residual_dropout": model.hidden_dropout,
        "embedding_dropout": model.hidden_dropout,
    }  # fmt: skip
