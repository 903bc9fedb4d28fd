"""Options of the model, and of how it is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_lite.config.option import Area, option

ACTIVATIONS = ("gelu", "gelu_exact", "quick_gelu", "silu", "relu", "squared_relu", "tanh", "identity")
ACTIVATION_ALIASES = {
    "gelu_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu_erf": "gelu_exact",
    "gelu_python": "gelu_exact",
    "swish": "silu",
    "swiglu": "silu",
    "relu2": "squared_relu",
    "relu_squared": "squared_relu",
    "linear": "identity",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
RECOMPUTE_LEVELS = ("none", "activation", "full")
ATTENTION_BACKENDS = ("auto", "flash", "cudnn", "varlen", "flex", "math")


@dataclass
class ModelConfig(Area):
    """Model"""

    num_layers: int = option(12, "transformer blocks", minimum=1, maximum=10_000, basic=True)
    hidden_size: int = option(1024, "width of the residual stream", minimum=1, basic=True)
    num_attention_heads: int = option(8, "query heads", minimum=1, basic=True)
    head_groups: int | None = option(
        None,
        "key/value heads (1: multi-query)",
        minimum=1,
        unset="num_attention_heads",
        basic=True,
        aliases=("num_query_groups",),
    )
    kv_channels: int | None = option(None, "channels of one head", minimum=1, unset="hidden_size / num_attention_heads")
    ffn_hidden_size: int | None = option(
        None, "width of the MLP (of each half when gated)", minimum=1, unset="4 * hidden_size", basic=True
    )
    vocab_size: int = option(49152, "entries of the vocabulary", minimum=2, basic=True)
    make_vocab_size_divisible_by: int = option(
        1,
        "rows of embedding and head are padded up to a multiple of this; padding never counts",
        minimum=1,
        maximum=65536,
    )
    max_position_embeddings: int | None = option(
        None, "learned positions (and the length an export states)", minimum=1, unset="max(2048, sequence_length)"
    )
    use_position_embeddings: bool | None = option(None, "learned absolute positions", unset="not use_rotary_embeddings")
    use_rotary_embeddings: bool = option(False, "rotary positions (RoPE)", basic=True)
    rotary_embedding_scale: float | None = option(
        None, "minus the logarithm of the rotary base", below=0.0, minimum=-100.0, unset="-log(rotary_base)"
    )
    rotary_base: float | None = option(
        None,
        "base of the rotary wavelengths (theta); or --rotary_embedding_scale",
        above=1.0,
        maximum=1e44,
        unset="10000",
        idle_unless="use_rotary_embeddings",
    )
    rotary_percent: float = option(1.0, "part of a head's channels that rotates, the first", above=0.0, maximum=1.0)
    rope_type: str = option(
        "default", "how rotary frequencies are stretched for long sequences (Hugging Face's)", choices=ROPE_TYPES
    )
    rope_factor: float | None = option(
        None,
        "linear, llama3, yarn: sequences are this many times longer",
        minimum=1.0,
        unset="yarn: max_position_embeddings / rope_original_max_position_embeddings",
    )
    rope_original_max_position_embeddings: int | None = option(
        None,
        "llama3, yarn: the length before it was stretched",
        minimum=1,
        unset="llama3, yarn: max_position_embeddings",
    )
    rope_low_freq_factor: float | None = option(
        None, "llama3: longer waves than the original length / this are stretched whole", above=0.0, unset="llama3: 1"
    )
    rope_high_freq_factor: float | None = option(
        None, "llama3: shorter waves than the original length / this are left alone", above=0.0, unset="llama3: 4"
    )
    rope_beta_fast: float | None = option(
        None, "yarn: frequencies of more turns over the original length are left alone", above=0.0, unset="yarn: 32"
    )
    rope_beta_slow: float | None = option(
        None, "yarn: frequencies of fewer turns are stretched whole", above=0.0, unset="yarn: 1"
    )
    rope_attention_factor: float | None = option(
        None, "yarn: factor on cos and sin", above=0.0, unset="yarn: from rope_factor and, if given, the mscales"
    )
    rope_mscale: float | None = option(
        None, "yarn: scale of log(rope_factor) in the attention factor's numerator", above=0.0, unset="not used"
    )
    rope_mscale_all_dim: float | None = option(
        None, "yarn: the same in its denominator; both or neither", above=0.0, unset="not used"
    )
    rope_truncate: bool | None = option(None, "yarn: round the borders of the ramp to channels", unset="yarn: 1")
    tie_word_embeddings: bool = option(True, "one matrix for input embedding and output head", basic=True)
    add_linear_biases: bool = option(True, "biases in the linear layers", basic=True)
    add_qkv_biases: bool | None = option(
        None, "biases of query, key and value", unset="add_linear_biases", aliases=("add_qkv_bias",)
    )
    add_mlp_biases: bool | None = option(None, "biases of the MLP", unset="add_linear_biases")
    gated: bool = option(False, "gated MLP: activation(gate) * up", basic=True)
    activation_type: str | None = option(
        None,
        "MLP activation; gelu is the tanh form",
        choices=ACTIVATIONS,
        value_aliases=ACTIVATION_ALIASES,
        unset="silu if gated, else gelu",
        basic=True,
    )
    normalization_type: str = option("layer_norm", "normalization", choices=("layer_norm", "rms_norm"), basic=True)
    layer_norm_eps: float = option(
        1e-5, "added to the variance", above=0.0, maximum=1.0, aliases=("norm_epsilon", "layernorm_epsilon")
    )
    zero_centered_normalization: bool = option(
        False,
        "norm weights are stored as their difference from 1",
        aliases=("apply_layernorm_1p",),
        idle_unless="use_layer_norm_weight",
    )
    use_layer_norm_weight: bool = option(True, "norms have weights (and layer norms biases)")
    input_embedding_norm: bool = option(False, "a norm behind the embedding")
    hybrid_norm: bool = option(False, "norms on the outputs of attention and MLP, too, before they are added")
    qk_layernorm: bool = option(False, "norms on each head's queries and keys", aliases=("use_qk_norm",))
    full_precision_residual: bool = option(
        False,
        "the residual stream is fp32 whatever the training dtype",
        aliases=("fp32_residual_connection",),
        idle_unless="training_dtype!=fp32",
    )
    scale_attn_by_inverse_layer_idx: bool = option(
        False, "attention scores are divided by 1, 2, 3 ... from block to block"
    )
    attention_softmax_in_fp32: bool = option(
        False,
        "attention by its formula, its scores and their gradients in fp32",
        aliases=("upcast_attn",),
        idle_unless="training_dtype!=fp32",
    )
    logit_soft_cap: float = option(0.0, "logits become cap * tanh(logits / cap); 0: they are left alone", minimum=0.0)
    window_size: int | None = option(
        None, "sliding attention window in tokens", minimum=1, unset="full causal attention"
    )
    attention_dropout: float = option(0.0, "dropout on attention probabilities", minimum=0.0, below=1.0)
    hidden_dropout: float = option(0.0, "dropout on each residual branch", minimum=0.0, below=1.0)
    embedding_dropout: float | None = option(
        None, "dropout on embeddings", minimum=0.0, below=1.0, unset="hidden_dropout"
    )
    init_method_std: float | None = option(
        None, "standard deviation of initial weights", minimum=0.0, unset="hidden_size ** -0.5"
    )
    init_method_std_embed: float | None = option(None, "the same, embeddings", minimum=0.0, unset="init_method_std")
    init_method_std_qkv: float | None = option(
        None, "the same, query, key and value", minimum=0.0, unset="init_method_std"
    )
    init_method_std_attn_proj: float | None = option(
        None, "the same, attention output", minimum=0.0, unset="init_method_std / sqrt(2 * num_layers)"
    )
    init_method_std_mlp_1: float | None = option(
        None, "the same, first MLP layer", minimum=0.0, unset="init_method_std"
    )
    init_method_std_mlp_2: float | None = option(
        None, "the same, second MLP layer", minimum=0.0, unset="init_method_std / sqrt(2 * num_layers)"
    )
    layer_norm_init_range: float = option(
        0.0,
        "initial norm weights are uniform in 1 +- this (zero-centered: 0 +- this)",
        minimum=0.0,
        maximum=1.0,
        idle_unless="use_layer_norm_weight",
    )
    random_bias_init: bool = option(
        False,
        "biases start like their layer's weights instead of at zero",
        idle_unless="add_linear_biases or add_qkv_biases or add_mlp_biases",
    )

    @property
    def rotated_channels(self) -> int:
        """Of each head, the first; kv_channels is resolved."""
        assert self.kv_channels is not None
        return int(self.kv_channels * self.rotary_percent)

    @property
    def padded_vocab_size(self) -> int:
        """Rows that embedding and head take in memory: those of the vocabulary, and zeros behind them."""
        unit = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // unit) * unit


def rotary_base(rotary_embedding_scale: float) -> float:
    """exp(-rotary_embedding_scale), rounded to the nearest integer when within 1e-9 of it."""
    base = math.exp(-rotary_embedding_scale)
    return float(round(base)) if abs(base - round(base)) <= 1e-9 * base else base


@dataclass
class PerformanceConfig(Area):
    """Performance"""

    mlp_recompute_level: str = option(
        "none", "what backward computes again in MLPs to save memory", choices=RECOMPUTE_LEVELS, basic=True
    )
    recompute_layers: int = option(
        0, "so many blocks, from the first, of which only the input is kept and everything is computed again", minimum=0
    )
    enable_triton_kernels: bool | None = option(
        None, "fused Triton kernels instead of the same formulas in torch", unset="on with a GPU"
    )
    attention_backend: str = option(
        "auto", "how attention is computed; auto: the fastest that the device has for it", choices=ATTENTION_BACKENDS
    )
    cross_entropy_impl: str = option(
        "auto",
        "the loss of a chunk of logits; auto: as enable_triton_kernels",
        choices=("auto", "torch", "triton"),
        value_aliases={"fused": "torch"},
    )
    cross_entropy_splits: int | None = option(
        None,
        "cut the loss of a micro-batch into this many chunks of tokens",
        minimum=1,
        unset="chunks of 256 tokens (CPU; 512 in 16 bits), up to 3072 (GPU)",
    )
    cross_entropy_block_size: int | None = option(
        None,
        "entries of the vocabulary whose logits exist at a time; costs a second product with the head's weights",
        minimum=1,
        unset="the whole vocabulary",
    )
