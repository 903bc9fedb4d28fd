"""config.json of an exported model. Imports no torch."""

from __future__ import annotations

from typing import Any

from megatron_lite.config import Config, ModelConfig
from megatron_lite.config.system import DTYPES
from megatron_lite.huggingface import rope
from megatron_lite.huggingface.architectures import ACTIVATIONS, ARCHITECTURES, biases_of, check_exportable


def hugging_face_config(config: Config, special_tokens: dict[str, int | None]) -> dict[str, Any]:
    """Return config.json for a resolved configuration.

    Has both spellings of the dtype and of rotary positions: transformers 5 reads `dtype` and `rope_parameters`, older
    versions `torch_dtype`, `rope_theta` and `rope_scaling`.

    Args:
        special_tokens: bos_token_id and eos_token_id; None: unknown.

    Raises:
        UsageError: if no architecture can express the model.
    """
    model = config.model
    name = check_exportable(model, config.training.export_model_type)
    architecture = ARCHITECTURES[name]
    dtype = DTYPES[config.training.export_dtype or config.distributed.training_dtype].torch
    content: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": name,
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": special_tokens.get("bos_token_id"),
        "eos_token_id": special_tokens.get("eos_token_id"),
        "pad_token_id": None,
        "use_cache": True,
    }
    content |= {key: getattr(model, option) for key, option in architecture.keys.items()}
    content["initializer_range"] = min(1.0, model.init_method_std)
    activations = [theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation_type]
    activation_key = next(key for key, option in architecture.keys.items() if option == "activation_type")
    content[activation_key] = "gelu_new" if name == "gpt2" and "gelu_new" in activations else activations[0]
    content |= _biases(name, model) | _window(name, model)
    if name == "gpt_bigcode":
        content["multi_query"] = model.head_groups == 1
    if architecture.fixed["use_rotary_embeddings"]:
        # With learned positions, the rows of their table; with rotary ones, the trained length.
        content["max_position_embeddings"] = max(model.max_position_embeddings, config.batch.sequence_length)
        content |= rope.write(model)
    return content


def _biases(name: str, model: ModelConfig) -> dict[str, Any]:
    biases = biases_of(name, model)
    values = {"attention_bias": biases.qkv, "mlp_bias": biases.mlp, "use_bias": biases.mlp}
    return {key: value for key, value in values.items() if key in ARCHITECTURES[name].other_defaults}


def _window(name: str, model: ModelConfig) -> dict[str, Any]:
    """Return the keys for a window in every layer or in none."""
    defaults, window = ARCHITECTURES[name].defaults, model.window_size
    if "sliding_window" not in defaults:
        return {}
    if "use_sliding_window" not in defaults:
        return {"sliding_window": window}
    kind = "full_attention" if window is None else "sliding_attention"
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": model.num_layers if window is None else 0,
        "layer_types": [kind] * model.num_layers,
    }
