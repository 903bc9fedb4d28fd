"""A table of Hugging Face architectures, and the choice of one that can express a model. Imports no
torch.

Keys and defaults of config.json follow the configuration classes of transformers 5.23; version 4 is
the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megatron_lite.config import Config, JsonObject, ModelConfig, Options
from megatron_lite.config.values import written
from megatron_lite.errors import UsageError

# Our activations -> Hugging Face's names for each; exports write the first.
_SPELLINGS = {
    "gelu": "gelu_pytorch_tanh gelu_new gelu_fast gelu_python_tanh gelu_accurate",
    "gelu_exact": "gelu gelu_python",
    "silu": "silu swish",
    "squared_relu": "relu2",
    "identity": "linear",
    **{name: name for name in ("relu", "quick_gelu", "tanh")},
}
ACTIVATIONS = MappingProxyType(
    {theirs: ours for ours, names in _SPELLINGS.items() for theirs in names.split()}
)

# Our options of biases; files of some architectures always have them, or one key states several.
_BIASES = ("add_linear_biases", "add_qkv_biases", "add_mlp_biases")
_ATTENTION_BIAS = {"attention_bias": _BIASES[:2]}
# Our options that no architecture supports.
_PLAIN: Options = {
    "hybrid_norm": False,
    "input_embedding_norm": False,
    "qk_layernorm": False,
    "logit_soft_cap": 0.0,
    "scale_attn_by_inverse_layer_idx": False,
}
_ROTARY = _PLAIN | {
    "use_rotary_embeddings": True,
    "use_position_embeddings": False,
    "rotary_percent": 1.0,
}
_LLAMA = _ROTARY | {"normalization_type": "rms_norm", "gated": True}
_LEARNED: Options = (
    _PLAIN
    | dict(
        use_rotary_embeddings=False,
        use_position_embeddings=True,
        normalization_type="layer_norm",
        gated=False,
    )
    | {"window_size": None}
)

# Key of config.json -> our option, and transformers' value if the key is missing (None: derived
# from other keys, as in our options). config_file.py handles keys that need more than renaming.
_LLAMA_KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 32000),
    "hidden_size": ("hidden_size", 4096),
    "num_hidden_layers": ("num_layers", 32),
    "num_attention_heads": ("num_attention_heads", 32),
    "num_key_value_heads": ("head_groups", None),
    "head_dim": ("kv_channels", None),
    "intermediate_size": ("ffn_hidden_size", 11008),
    "hidden_act": ("activation_type", "silu"),
    "max_position_embeddings": ("max_position_embeddings", 2048),
    "initializer_range": ("init_method_std", 0.02),
    "attention_dropout": ("attention_dropout", 0.0),
    "tie_word_embeddings": ("tie_word_embeddings", False),
    "rms_norm_eps": ("layer_norm_eps", 1e-6),
}
_GPT2_KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 50257),
    "n_embd": ("hidden_size", 768),
    "n_layer": ("num_layers", 12),
    "n_head": ("num_attention_heads", 12),
    "n_inner": ("ffn_hidden_size", None),
    "activation_function": ("activation_type", "gelu_new"),
    "n_positions": ("max_position_embeddings", 1024),
    "initializer_range": ("init_method_std", 0.02),
    "layer_norm_epsilon": ("layer_norm_eps", 1e-5),
    "attn_pdrop": ("attention_dropout", 0.1),
    "resid_pdrop": ("hidden_dropout", 0.1),
    "embd_pdrop": ("embedding_dropout", 0.1),
    "tie_word_embeddings": ("tie_word_embeddings", True),
    "scale_attn_by_inverse_layer_idx": ("scale_attn_by_inverse_layer_idx", False),
    "reorder_and_upcast_attn": ("attention_softmax_in_fp32", False),
}
_GPT2_ONLY = ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
_BIGCODE_KEYS = {key: value for key, value in _GPT2_KEYS.items() if key not in _GPT2_ONLY}
_STARCODER2_KEYS = {key: value for key, value in _LLAMA_KEYS.items() if key != "rms_norm_eps"} | {
    "norm_epsilon": ("layer_norm_eps", 1e-5),
    "residual_dropout": ("hidden_dropout", 0.0),
    "embedding_dropout": ("embedding_dropout", 0.0),
}

# Other defaults: values that differ from Llama's or GPT-2's, and keys that are not one option.
_MISTRAL_DEFAULTS = dict(
    num_key_value_heads=8,
    intermediate_size=14336,
    max_position_embeddings=131072,
    sliding_window=4096,
)
_STARCODER2_DEFAULTS: JsonObject = (
    dict(
        vocab_size=49152,
        hidden_size=3072,
        num_hidden_layers=30,
        num_attention_heads=24,
        num_key_value_heads=2,
    )
    | dict(intermediate_size=12288, hidden_act="gelu_pytorch_tanh", max_position_embeddings=4096)
    | dict(initializer_range=0.018042, tie_word_embeddings=True, use_bias=True, sliding_window=None)
)
_QWEN_DEFAULTS: JsonObject = dict(
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    max_position_embeddings=32768,
) | dict(sliding_window=4096, use_sliding_window=False, max_window_layers=28)


@dataclass(frozen=True)
class Architecture:
    """One `model_type`."""

    class_name: str
    fixed: JsonObject  # our options that have only one value in this architecture
    options: Mapping[str, tuple[str, Any]]  # key of config.json -> our option, value if missing
    other_defaults: JsonObject = field(default_factory=dict)
    # other keys -> the only value we can express
    constants: JsonObject = field(default_factory=dict)
    # key -> the options that it states
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    always_biased: tuple[str, ...] = ()  # options of biases that every file has, perhaps as zeros

    @property
    def keys(self) -> dict[str, str]:
        """Map keys of config.json to our options."""
        return {key: option for key, (option, _) in self.options.items()}

    @property
    def defaults(self) -> JsonObject:
        """Map keys of config.json to values if missing; includes keys that are not a single
        option."""
        return {key: default for key, (_, default) in self.options.items()} | dict(
            self.other_defaults
        )


_GPT_CONSTANTS = {"scale_attn_weights": True, "add_cross_attention": False}
# In order of preference for exports.
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            "LlamaForCausalLM",
            _LLAMA | {"window_size": None},
            _LLAMA_KEYS,
            {"attention_bias": False, "mlp_bias": False},
            {"rope_interleaved": False},
            _ATTENTION_BIAS | {"mlp_bias": ("add_mlp_biases",)},
        ),
        "mistral": Architecture(
            "MistralForCausalLM",
            _LLAMA | dict.fromkeys(_BIASES, False),
            _LLAMA_KEYS,
            _MISTRAL_DEFAULTS,
        ),
        "gpt2": Architecture(
            "GPT2LMHeadModel",
            {
                key: value
                for key, value in _LEARNED.items()
                if key != "scale_attn_by_inverse_layer_idx"
            },
            _GPT2_KEYS,
            constants=_GPT_CONSTANTS,
            always_biased=_BIASES,
        ),
        "gpt_bigcode": Architecture(
            "GPTBigCodeForCausalLM",
            _LEARNED,
            _BIGCODE_KEYS,
            {"multi_query": True, "activation_function": "gelu_pytorch_tanh"},
            _GPT_CONSTANTS,
            always_biased=_BIASES,
        ),
        "starcoder2": Architecture(
            "Starcoder2ForCausalLM",
            _ROTARY | {"normalization_type": "layer_norm", "gated": False},
            _STARCODER2_KEYS,
            _STARCODER2_DEFAULTS,
            {"norm_type": "layer_norm", "mlp_type": "default"},
            {"use_bias": _BIASES},
        ),
        "qwen2": Architecture(
            "Qwen2ForCausalLM",
            _LLAMA | {"add_linear_biases": False, "add_mlp_biases": False},
            _LLAMA_KEYS,
            _QWEN_DEFAULTS,
            {"use_mrope": False},
            always_biased=("add_qkv_biases",),
        ),
        "qwen3": Architecture(
            "Qwen3ForCausalLM",
            _LLAMA | {"qk_layernorm": True, "add_mlp_biases": False},
            _LLAMA_KEYS,
            _QWEN_DEFAULTS | {"head_dim": 128, "attention_bias": False},
            biases=_ATTENTION_BIAS,
        ),
    }
)


def biases_of(architecture: str, model: ModelConfig) -> Options:
    """Return the options of biases of a model exported as this architecture: its own, and biases
    written as zeros."""
    table = ARCHITECTURES[architecture]
    found = {option: option in table.always_biased for option in _BIASES}
    for options in table.biases.values():
        found |= dict.fromkeys(options, any(getattr(model, option) for option in options))
    return found


def check_exportable(model: ModelConfig, model_type: str | None = None) -> str:
    """Return the `model_type` that expresses a resolved model, preferring the one with the fewest
    zero biases.

    Args:
        model_type: the requested one; None: any.

    Raises:
        UsageError: if no architecture can express the model; lists the flags that each would need.
    """
    needs = {architecture: _needs(architecture, model) for architecture in ARCHITECTURES}
    if model_type is not None:
        if not needs[model_type]:
            return model_type
        raise UsageError(
            f"--export_model_type={model_type} cannot express this model; leave the flag out, or train with the "
            f"flags that {ARCHITECTURES[model_type].class_name} needs: {', '.join(needs[model_type])}"
        )
    able = [architecture for architecture, missing in needs.items() if not missing]
    if able:
        return min(able, key=lambda architecture: sum(biases_of(architecture, model).values()))
    nearest = sorted(needs.items(), key=lambda item: len(item[1]))
    raise UsageError(
        "--export_format=huggingface: no Hugging Face architecture can express this model. Use "
        "--export_format=distributed, leave out --export_interval, or train with the flags of one of these:\n  "
        + "\n  ".join(
            f"{ARCHITECTURES[name].class_name}: {', '.join(missing)}" for name, missing in nearest
        )
    )


def check_exports(config: Config) -> str | None:
    """Return the `model_type` of the Hugging Face exports of a resolved configuration; None if
    there are none.

    Checks --export_model_type even without exports, because checkpoints store it for later
    conversions.

    Raises:
        UsageError: as `check_exportable`.
    """
    training = config.training
    exports = training.export_interval is not None or config.checkpoint.keep_best is not None
    exports = exports and training.export_format == "huggingface"
    if not exports and training.export_model_type is None:
        return None
    model_type = check_exportable(config.model, training.export_model_type)
    return model_type if exports else None


def _needs(architecture: str, model: ModelConfig) -> list[str]:
    """List the flags that the model would have to change, with the required values."""
    needs = []
    for name, value in ARCHITECTURES[architecture].fixed.items():
        actual = getattr(model, name)
        assert actual is not None or name == "window_size", f"{name} is not resolved"
        if actual != value:
            needs.append(f"--{name}={written(value)} (not {written(actual)})")
    heads = model.num_attention_heads
    groups = model.head_groups
    channels = model.kv_channels
    width = model.hidden_size
    learned = architecture in ("gpt2", "gpt_bigcode")
    if learned and groups not in ((heads,) if architecture == "gpt2" else (1, heads)):
        needs.append(f"--head_groups={heads if architecture == 'gpt2' else 1} (not {groups})")
    if learned and heads * channels != width:
        needs.append(
            f"--kv_channels * --num_attention_heads={heads} = --hidden_size={width} (not {channels})"
        )
    if architecture == "llama" and width % heads:
        needs.append(f"a multiple of --num_attention_heads={heads} as --hidden_size (not {width})")
    return needs


def shown(value: Any) -> str:
    """Return a value of config.json shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:70] + "..."
