"""A table of Hugging Face architectures, and the choice of one that can express a model. Imports no
torch.

Keys and defaults of config.json follow the configuration classes of transformers 5.23; version 4 is
the same.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megatron_lite.config import Config, JsonObject, ModelConfig, Options
from megatron_lite.config.values import written
from megatron_lite.errors import UsageError

# Our activations -> Hugging Face's names; exports write the first.
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

# Our options that have only one value in an architecture; "-": it supports all.
_FIXED = """
                                 llama     mistral   starcoder2  qwen2     qwen3
hybrid_norm                      false     false     false       false     false
input_embedding_norm             false     false     false       false     false
qk_layernorm                     false     false     false       false     true
logit_soft_cap                   0.0       0.0       0.0         0.0       0.0
scale_attn_by_inverse_layer_idx  false     false     false       false     false
use_rotary_embeddings            true      true      true        true      true
use_position_embeddings          false     false     false       false     false
rotary_percent                   1.0       1.0       1.0         1.0       1.0
normalization_type               rms_norm  rms_norm  layer_norm  rms_norm  rms_norm
gated                            true      true      false       true      true
window_size                      null      -         -           -         -
add_linear_biases                -         false     -           false     -
add_qkv_biases                   -         false     -           -         -
add_mlp_biases                   -         false     -           false     false

                                 gpt2        gpt_bigcode
hybrid_norm                      false       false
input_embedding_norm             false       false
qk_layernorm                     false       false
logit_soft_cap                   0.0         0.0
scale_attn_by_inverse_layer_idx  -           false
use_rotary_embeddings            false       false
use_position_embeddings          true        true
normalization_type               layer_norm  layer_norm
gated                            false       false
window_size                      null        null
"""
# Keys of config.json, our option, and the value that transformers takes if the key is missing (null:
# derived from other keys, as in our options); "-": no single option, or no key of this
# architecture. config_file.py handles keys that need more than renaming.
_KEYS = """
                         option                   llama  mistral  starcoder2         qwen2   qwen3
vocab_size               vocab_size               32000  32000    49152              151936  151936
hidden_size              hidden_size              4096   4096     3072               4096    4096
num_hidden_layers        num_layers               32     32       30                 32      32
num_attention_heads      num_attention_heads      32     32       24                 32      32
num_key_value_heads      head_groups              null   8        2                  32      32
head_dim                 kv_channels              null   null     null               null    128
intermediate_size        ffn_hidden_size          11008  14336    12288              22016   22016
hidden_act               activation_type          silu   silu     gelu_pytorch_tanh  silu    silu
max_position_embeddings  max_position_embeddings  2048   131072   4096               32768   32768
initializer_range        init_method_std          0.02   0.02     0.018042           0.02    0.02
attention_dropout        attention_dropout        0.0    0.0      0.0                0.0     0.0
tie_word_embeddings      tie_word_embeddings      false  false    true               false   false
rms_norm_eps             layer_norm_eps           1e-6   1e-6     -                  1e-6    1e-6
norm_epsilon             layer_norm_eps           -      -        1e-5               -       -
residual_dropout         hidden_dropout           -      -        0.0                -       -
embedding_dropout        embedding_dropout        -      -        0.0                -       -
use_bias                 -                        -      -        true               -       -
sliding_window           -                        -      4096     null               4096    4096
use_sliding_window       -                        -      -        -                  false   false
max_window_layers        -                        -      -        -                  28      28
attention_bias           -                        false  -        -                  -       false
mlp_bias                 -                        false  -        -                  -       -

                                 option                           gpt2      gpt_bigcode
vocab_size                       vocab_size                       50257     50257
n_embd                           hidden_size                      768       768
n_layer                          num_layers                       12        12
n_head                           num_attention_heads              12        12
n_inner                          ffn_hidden_size                  null      null
activation_function              activation_type                  gelu_new  gelu_pytorch_tanh
n_positions                      max_position_embeddings          1024      1024
initializer_range                init_method_std                  0.02      0.02
layer_norm_epsilon               layer_norm_eps                   1e-5      1e-5
attn_pdrop                       attention_dropout                0.1       0.1
resid_pdrop                      hidden_dropout                   0.1       0.1
embd_pdrop                       embedding_dropout                0.1       0.1
tie_word_embeddings              tie_word_embeddings              true      true
scale_attn_by_inverse_layer_idx  scale_attn_by_inverse_layer_idx  false     -
reorder_and_upcast_attn          attention_softmax_in_fp32        false     -
multi_query                      -                                -         true
"""


def _columns(text: str) -> Mapping[str, JsonObject]:
    """Return the columns of tables by their heads: first word of a row -> value."""
    found: dict[str, JsonObject] = {}
    for table in text.strip("\n").split("\n\n"):
        heads, *rows = map(str.split, table.splitlines())
        for column, head in enumerate(heads, start=1):
            found.setdefault(head, {}).update(
                {row[0]: _value(row[column]) for row in rows if row[column] != "-"}
            )
    return MappingProxyType(found)


def _value(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


_FIXED_OPTIONS, _COLUMNS = _columns(_FIXED), _columns(_KEYS)
# Our options of biases; files of some architectures always have them, or one key states several.
_BIASES = ("add_linear_biases", "add_qkv_biases", "add_mlp_biases")


@dataclass(frozen=True)
class Architecture:
    """One `model_type`."""

    name: str
    class_name: str
    # Keys of config.json -> the only value that we can express.
    constants: JsonObject = field(default_factory=dict)
    # Key -> the options that it states.
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    always_biased: tuple[str, ...] = ()  # options of biases that every file has, perhaps as zeros

    @property
    def fixed(self) -> JsonObject:
        """Our options that have only one value."""
        return _FIXED_OPTIONS[self.name]

    @property
    def defaults(self) -> JsonObject:
        """Map keys of config.json to values if missing; includes keys that are no single option."""
        return _COLUMNS[self.name]

    @property
    def keys(self) -> dict[str, str]:
        """Map the keys of config.json that are a single option to that option."""
        options = _COLUMNS["option"]
        return {key: options[key] for key in self.defaults if key in options}

    def key_of(self, option: str) -> str:
        """Return the key of an option, or the option itself if no single key states it."""
        return next((key for key, name in self.keys.items() if name == option), option)


_ATTENTION_BIAS = {"attention_bias": _BIASES[:2]}
_GPT_CONSTANTS = {"scale_attn_weights": True, "add_cross_attention": False}
# In order of preference for exports.
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        architecture.name: architecture
        for architecture in (
            Architecture(
                "llama",
                "LlamaForCausalLM",
                {"rope_interleaved": False},
                _ATTENTION_BIAS | {"mlp_bias": ("add_mlp_biases",)},
            ),
            Architecture("mistral", "MistralForCausalLM"),
            Architecture("gpt2", "GPT2LMHeadModel", _GPT_CONSTANTS, always_biased=_BIASES),
            Architecture(
                "gpt_bigcode", "GPTBigCodeForCausalLM", _GPT_CONSTANTS, always_biased=_BIASES
            ),
            Architecture(
                "starcoder2",
                "Starcoder2ForCausalLM",
                {"norm_type": "layer_norm", "mlp_type": "default"},
                {"use_bias": _BIASES},
            ),
            Architecture(
                "qwen2",
                "Qwen2ForCausalLM",
                {"use_mrope": False},
                always_biased=("add_qkv_biases",),
            ),
            Architecture("qwen3", "Qwen3ForCausalLM", biases=_ATTENTION_BIAS),
        )
    }
)


def biases_of(architecture: str, model: ModelConfig) -> Options:
    """Return the bias options of a model exported as this architecture: its own, and biases written
    as zeros."""
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
    """Return the `model_type` for a resolved configuration's Hugging Face exports; None without
    any.

    Checks --export_model_type even without exports, because checkpoints store it for later
    conversions.

    Raises:
        UsageError: like `check_exportable`.
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
    """Return a value of config.json, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:70] + "..."
