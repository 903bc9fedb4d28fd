"""Known models by name: the flags that make their architectures, each the public configuration of its publisher.

A preset is a shorthand: `--model=mistral-7b` means the flags below, as if they had been typed before all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_GPT2 = {
    "vocab_size": 50257, "max_position_embeddings": 1024, "normalization_type": "layer_norm", "layer_norm_eps": 1e-5,
    "add_linear_biases": True, "gated": False, "activation_type": "gelu", "tie_word_embeddings": True,
    "use_rotary_embeddings": False,
}  # fmt: skip
_LLAMA = {
    "normalization_type": "rms_norm", "layer_norm_eps": 1e-5, "add_linear_biases": False, "gated": True,
    "activation_type": "silu", "tie_word_embeddings": False, "use_rotary_embeddings": True,
}  # fmt: skip

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "gpt2": {**_GPT2, "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
    "mistral-7b": {
        **_LLAMA, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "head_groups": 8,
        "ffn_hidden_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768, "rotary_base": 10000.0,
        "window_size": 4096,
    },
})  # fmt: skip
