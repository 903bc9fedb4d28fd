"""Options of the model and of how it is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.config.option import (
    LONGEST_WINDOW,
    Area,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    ProperFraction,
    Rule,
    idle_unless,
    low_precision_option,
    option,
    optional,
)

ACTIVATIONS = (
    "gelu",
    "gelu_exact",
    "quick_gelu",
    "silu",
    "relu",
    "squared_relu",
    "tanh",
    "identity",
)
ACTIVATION_ALIASES = {
    "gelu_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu_erf": "gelu_exact",
    "gelu_python": "gelu_exact",
    "swish": "silu",
    "relu2": "squared_relu",
    "relu_squared": "squared_relu",
    "linear": "identity",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
RECOMPUTE_LEVELS = ("none", "activation", "full")
ATTENTION_BACKENDS = ("auto", "flash", "flash3", "flash4", "cudnn", "varlen", "flex", "math")

LARGEST_BASE = 1e44  # of rotary wavelengths
ROTATED = (Rule("use_rotary_embeddings", "there are no rotary positions"),)
ONE_SUM = "the outputs of both branches are one sum"
WINDOWED = (Rule("window_size", "no block has a window"),)


def _read_by(*types: str) -> tuple[Rule]:
    """Return the rule that --rope_type must be one of the types that use an option."""
    return (Rule(f"rope_type={'|'.join(types)}", "this type does not use it"),)


YARN, LLAMA3 = _read_by("yarn"), _read_by("llama3")
LONGROPE = _read_by("longrope")
norm_weight_option = idle_unless("use_layer_norm_weight")
mup_option = idle_unless("mup")


@dataclass
class DenseConfig(Area):
    """Model"""

    num_layers: int = option(
        12, "number of transformer blocks", minimum=1, maximum=10_000, basic=True
    )
    hidden_size: PositiveInt = option(
        1024, "width of the residual stream", basic=True, aliases="hidden_dim"
    )
    num_attention_heads: PositiveInt = option(
        8, "number of query heads", basic=True, aliases="num_heads"
    )
    head_groups: PositiveInt = optional(
        "number of key/value heads (1: multi-query attention)",
        "num_attention_heads",
        basic=True,
        aliases="num_query_groups num_key_value_heads num_kv_heads",
    )
    kv_channels: PositiveInt = optional(
        "channels per head", "hidden_size / num_attention_heads", aliases="head_dim"
    )
    ffn_hidden_size: PositiveInt = optional(
        "MLP width (of each half if gated)",
        "4 * hidden_size",
        basic=True,
        aliases="intermediate_size intermediate_dim",
    )
    vocab_size: int = option(49152, "vocabulary size", minimum=2, basic=True)
    make_vocab_size_divisible_by: int = option(
        1,
        "pad the vocabulary to a multiple of this; the padding never affects a result",
        minimum=1,
        maximum=65536,
    )
    max_position_embeddings: PositiveInt = optional(
        "number of learned positions, and the context length that exports state",
        "sequence_length; with llama3 and yarn at least 2048",
    )
    use_position_embeddings: bool = optional("add learned positions", "not use_rotary_embeddings")
    use_rotary_embeddings: bool = option(False, "use rotary positions (RoPE)", basic=True)
    rotary_embedding_scale: float = optional(
        "minus the natural logarithm of rotary_base", "-log(rotary_base)", below=0.0, minimum=-100.0
    )
    rotary_base: float = optional(
        "base of the rotary wavelengths (theta); alternative to --rotary_embedding_scale",
        "10000",
        above=1.0,
        maximum=LARGEST_BASE,
        idle_unless="use_rotary_embeddings",
    )
    rotary_pattern: tuple[str, ...] = option(
        (),
        "which blocks rotate queries and keys, repeated over the blocks: rotary,rotary,rotary,nope",
        choices=("rotary", "nope"),
        repeats=True,
        unset="all",
        needs=ROTATED,
    )
    window_rotary_base: float | None = optional(
        "rotary base of blocks with a window, which are then not scaled by --rope_type",
        "like other blocks",
        above=1.0,
        maximum=LARGEST_BASE,
        needs=(*ROTATED, *WINDOWED),
    )
    rotary_percent: PositiveFraction = option(
        1.0, "fraction of each head's channels to rotate, counted from the first", needs=ROTATED
    )
    rope_type: str = option(
        "default",
        "how to scale rotary frequencies for longer contexts",
        choices=ROPE_TYPES,
        needs=ROTATED,
    )
    rope_factor: float | None = optional(
        "linear, llama3, yarn, longrope: factor by which the context grows",
        "yarn, longrope: max_position_embeddings / rope_original_max_position_embeddings",
        minimum=1.0,
        needs=_read_by("linear", "llama3", "yarn", "longrope"),
    )
    rope_original_max_position_embeddings: PositiveInt | None = optional(
        "llama3, yarn, longrope: context length before scaling",
        "llama3, yarn, longrope: max_position_embeddings",
        needs=_read_by("llama3", "yarn", "longrope"),
    )
    rope_short_factor: tuple[PositiveFloat, ...] = option(
        (),
        "longrope: factor on each wavelength, with a sequence_length up to the original length",
        needs=LONGROPE,
    )
    rope_long_factor: tuple[PositiveFloat, ...] = option(
        (),
        "longrope: factor on each wavelength, with a sequence_length beyond the original length",
        needs=LONGROPE,
    )
    rope_low_freq_factor: PositiveFloat | None = optional(
        "llama3: fully scale wavelengths above original length / this", "llama3: 1", needs=LLAMA3
    )
    rope_high_freq_factor: PositiveFloat | None = optional(
        "llama3: do not scale wavelengths below original length / this", "llama3: 4", needs=LLAMA3
    )
    rope_beta_fast: PositiveFloat | None = optional(
        "yarn: do not scale frequencies with more turns than this in the original length",
        "yarn: 32",
        needs=YARN,
    )
    rope_beta_slow: PositiveFloat | None = optional(
        "yarn: fully scale frequencies with fewer turns than this in the original length",
        "yarn: 1",
        needs=YARN,
    )
    rope_attention_factor: PositiveFloat | None = optional(
        "yarn, longrope: factor on cos and sin",
        "yarn, longrope: from rope_factor, original length and any mscales",
        needs=_read_by("yarn", "longrope"),
    )
    rope_mscale: PositiveFloat | None = optional(
        "yarn: scale of log(rope_factor) in the numerator of the attention factor",
        "not used",
        needs=YARN,
    )
    rope_mscale_all_dim: PositiveFloat | None = optional(
        "yarn: scale of log(rope_factor) in the denominator; set both mscales or neither",
        "not used",
        needs=YARN,
    )
    rope_truncate: bool | None = optional(
        "yarn: round the ends of the ramp to whole channels", "yarn: 1", needs=YARN
    )
    tie_word_embeddings: bool = option(
        True, "share one matrix between input embedding and output head", basic=True
    )
    add_linear_biases: bool = option(True, "add biases to the linear layers", basic=True)
    add_qkv_biases: bool = optional(
        "add biases to query, key and value", "add_linear_biases", aliases="add_qkv_bias"
    )
    add_mlp_biases: bool = optional("add biases to the MLP", "add_linear_biases")
    gated: bool = option(False, "use a gated MLP: activation(gate) * up", basic=True)
    activation_type: str = optional(
        "MLP activation (gelu: tanh form)",
        "silu if gated, else gelu",
        choices=ACTIVATIONS,
        value_aliases=ACTIVATION_ALIASES,
        basic=True,
    )
    activation_limit: NonNegativeFloat = option(
        0.0,
        "cut off gates above this and their factors beyond it on both sides, and add 1 to the factors, as in gpt-oss "
        "(with quick_gelu); 0: do not",
        needs=(Rule("gated", "there is no gate"),),
    )
    normalization_type: str = option(
        "layer_norm", "normalization", choices=("layer_norm", "rms_norm"), basic=True
    )
    layer_norm_eps: PositiveFraction = option(
        1e-5,
        "epsilon added to the variance",
        aliases="norm_epsilon layernorm_epsilon layer_norm_epsilon",
    )
    zero_centered_normalization: bool = norm_weight_option(
        False, "store norm weights minus 1", aliases="apply_layernorm_1p"
    )
    use_layer_norm_weight: bool = option(True, "give norms weights (and layer norms biases)")
    use_layer_norm_bias: bool = norm_weight_option(True, "give layer norms biases")
    input_embedding_norm: bool = option(False, "normalize the output of the embedding")
    norm_placement: str = optional(
        "normalize the inputs of attention and MLP (pre), their outputs before the residual addition (post), or both",
        "both with hybrid_norm, else pre",
        choices=("pre", "post", "both"),
    )
    hybrid_norm: bool = optional(
        "also normalize the outputs of attention and MLP before the residual addition: --norm_placement=both",
        "norm_placement=both",
    )
    parallel_branches: str = option(
        "none",
        "compute attention and MLP from the same hidden states and add both: with one norm, or a norm for each",
        choices=("none", "one_norm", "two_norms"),
        needs=(Rule("norm_placement=pre", ONE_SUM), Rule("hidden_dropout=0", ONE_SUM)),
    )
    qk_layernorm: bool = option(False, "normalize queries and keys", aliases="use_qk_norm")
    qk_norm_scope: str = option(
        "head",
        "normalize the queries of each head, or of all heads together; likewise the keys",
        choices=("head", "all"),
        idle_unless="qk_layernorm",
        needs=(Rule("normalization_type=rms_norm", "layer norms take one head at a time"),),
    )
    full_precision_residual: bool = low_precision_option(
        False, "keep the residual stream in fp32", aliases="fp32_residual_connection"
    )
    scale_attn_by_inverse_layer_idx: bool = option(
        False, "divide attention scores by the block's number, from 1"
    )
    attention_softmax_in_fp32: bool = low_precision_option(
        False,
        "compute attention with the plain formula, scores and their gradients in fp32",
        aliases="upcast_attn",
        needs=(
            Rule(
                "attention_backend=auto|math", "only the math backend computes the softmax in fp32"
            ),
        ),
    )
    embedding_scale: PositiveFloat = option(
        1.0, "factor on the embeddings of tokens, rounded to the training dtype"
    )
    residual_scale: PositiveFloat = option(
        1.0, "factor on the outputs of attention and MLP before the residual addition"
    )
    attention_scale: PositiveFloat | None = optional(
        "factor on attention scores", "1 / sqrt(kv_channels)"
    )
    attention_soft_cap: NonNegativeFloat = option(
        0.0,
        "cap attention scores to cap * tanh(scores / cap), which only the backends flex and math compute; 0: no cap",
    )
    attention_sinks: bool = option(
        False,
        "give each head a learned score that joins its softmax without a value, as in gpt-oss",
    )
    logit_scale: PositiveFloat = option(1.0, "factor on logits")
    logit_soft_cap: NonNegativeFloat = option(
        0.0, "cap logits to cap * tanh(logits / cap); 0: no cap"
    )
    window_size: PositiveInt | None = optional(
        "sliding attention window, in tokens", "full causal attention"
    )
    attention_pattern: tuple[str, ...] = option(
        (),
        "which blocks have the window, repeated over the blocks: window,window,window,full",
        choices=("window", "full"),
        repeats=True,
        unset="all",
        needs=WINDOWED,
    )
    attention_dropout: ProperFraction = option(0.0, "dropout on attention probabilities")
    hidden_dropout: ProperFraction = option(0.0, "dropout on each residual branch")
    embedding_dropout: ProperFraction = optional("dropout on embeddings", "hidden_dropout")
    init_method_std: NonNegativeFloat = optional(
        "standard deviation of initial weights", "hidden_size ** -0.5"
    )
    init_method_std_embed: NonNegativeFloat = optional(
        "standard deviation of initial embeddings", "init_method_std"
    )
    init_method_std_qkv: NonNegativeFloat = optional(
        "standard deviation of initial query, key and value weights", "init_method_std"
    )
    init_method_std_attn_proj: NonNegativeFloat = optional(
        "standard deviation of initial attention output weights",
        "init_method_std / sqrt(2 * num_layers)",
    )
    init_method_std_mlp_1: NonNegativeFloat = optional(
        "standard deviation of initial weights of the first MLP layer", "init_method_std"
    )
    init_method_std_mlp_2: NonNegativeFloat = optional(
        "standard deviation of initial weights of the second MLP layer",
        "init_method_std / sqrt(2 * num_layers)",
    )
    mup: bool = option(
        False,
        "muP: fit learning rates, initial weights, attention scores and logits, as set for a narrower base model, to "
        "this width",
        needs=(
            Rule("mup_base_hidden_size", "the width of the base model is missing"),
            Rule("optimizer=adamw|muon|lion", "clipping changes SGD's factors"),
        ),
    )
    mup_base_hidden_size: PositiveInt | None = mup_option(
        None,
        "hidden_size of the base model, whose heads together and MLP are narrower by the same factor",
        unset="required by mup",
    )
    mup_base_kv_channels: PositiveInt | None = mup_option(
        None,
        "channels per head of the base model",
        unset="kv_channels: wider models have more heads",
    )
    layer_norm_init_range: Fraction = norm_weight_option(
        0.0, "draw initial norm weights uniformly from 1 +- this (zero-centered: 0 +- this)"
    )
    random_bias_init: bool = option(
        False,
        "initialize biases like the weights of their layer, not to zero",
        idle_unless="add_linear_biases or add_qkv_biases or add_mlp_biases",
    )

    @property
    def rotated_channels(self) -> int:
        """Number of rotated channels per head, counted from the first."""
        return int(self.kv_channels * self.rotary_percent)

    @property
    def longrope_length(self) -> int | None:
        """Length of a text beyond which longrope takes the long factors; None: another rope_type."""
        return self.rope_original_max_position_embeddings if self.rope_short_factor else None

    def window(self, block: int) -> int | None:
        """Return a block's attention window; None: full causal attention."""
        return None if _repeated(self.attention_pattern, block) == "full" else self.window_size

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Every block's `window`."""
        return tuple(self.window(block) for block in range(self.num_layers))

    def rotates(self, block: int) -> bool:
        """Return whether a block rotates queries and keys."""
        return self.use_rotary_embeddings and _repeated(self.rotary_pattern, block) != "nope"

    def vocabulary_rows(self, ranks: int) -> int:
        """Return the rows of embedding and head per tensor-parallel rank: the vocabulary, padded
        with zeros."""
        unit = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // (unit * ranks)) * unit


def _repeated(pattern: tuple[str, ...], block: int) -> str:
    """Return a block's entry of a pattern that is repeated over the blocks; "" if it is empty."""
    return pattern[block % len(pattern)] if pattern else ""


def repeating(kinds: Sequence[str], usual: str) -> tuple[str, ...]:
    """Return the shortest pattern with these kinds of blocks; empty if all are the usual one."""
    if {*kinds} <= {usual}:
        return ()
    numbers = range(len(kinds))
    length = next(n + 1 for n in numbers if all(kinds[i] == kinds[i % (n + 1)] for i in numbers))
    return tuple(kinds[:length])


def rotary_base(rotary_embedding_scale: float) -> float:
    """Return exp(-rotary_embedding_scale), rounded to an integer if the relative difference is at
    most 1e-9."""
    base = math.exp(-rotary_embedding_scale)
    return float(round(base)) if abs(base - round(base)) <= 1e-9 * base else base


UNMEASURED = (Rule("machine_speeds", "its products were measured without rounding"),)


@dataclass
class PerformanceConfig(Area):
    """Performance"""

    mlp_recompute_level: str = option(
        "none",
        "what to recompute in the MLPs' backward pass to save memory; activation,full:8: full in the first 8 blocks, "
        "else activation",
        choices=RECOMPUTE_LEVELS,
        by_block=True,
        basic=True,
    )
    recompute_layers: NonNegativeInt = option(
        0, "recompute the first N blocks in the backward pass, saving only their inputs"
    )
    enable_triton_kernels: bool | None = optional(
        "use fused Triton kernels instead of the same formulas in torch", "1 on a GPU"
    )
    attention_backend: str = option(
        "auto",
        "implementation of attention (auto: the fastest that the device supports)",
        choices=ATTENTION_BACKENDS,
    )
    cpu_matmul: str = option(
        "auto",
        "library for large fp32 products on a CPU; auto: oneDNN on AMD processors with AVX-512, else PyTorch's BLAS",
        choices=("auto", "blas", "onednn"),
        idle_unless="device!=cuda",
    )
    cross_entropy_impl: str = option(
        "auto",
        "implementation of the loss on a chunk of logits; auto: follow enable_triton_kernels",
        choices=("auto", "torch", "triton"),
        value_aliases={"fused": "torch"},
    )
    cross_entropy_splits: PositiveInt | None = optional(
        "split a micro-batch's loss into N chunks of tokens",
        "256 tokens each (CPU; 512 in 16 bits), up to 3072 (GPU)",
    )
    cross_entropy_block_size: PositiveInt | None = optional(
        "compute logits for this many vocabulary entries at a time; costs a second product with the head's weights",
        "the whole vocabulary",
    )

    fp8: str = option(
        "none",
        "round the factors of products in the blocks' linear layers to 8-bit floats, scaled by tensor or by row; "
        "delayed: by tensor, as of earlier iterations",
        choices=("none", "tensorwise", "rowwise", "delayed"),
        value_aliases={"hybrid": "delayed"},
        excludes=UNMEASURED,
    )
    int8: bool = option(
        False,
        "round the factors of products in the blocks' linear layers to 8-bit integers; not those of weight gradients",
        excludes=(Rule("fp8=tensorwise|rowwise|delayed", "a product has one format"), *UNMEASURED),
    )
    quantization_targets: tuple[str, ...] = idle_unless("fp8=tensorwise|rowwise|delayed or int8")(
        (),
        "linear layers of blocks to round: patterns as in --weight_decay_modules (mlp, *.attention.output, regex:...)",
        unset="all",
    )
    amax_history_length: int = idle_unless("fp8=delayed")(
        1024,
        "iterations whose largest magnitudes give a scale",
        minimum=1,
        maximum=LONGEST_WINDOW,
        aliases="fp8_amax_history_len",
    )

    @property
    def eight_bit(self) -> str:
        """The format of rounded factors; empty without any."""
        return "int8" if self.int8 else self.fp8 if self.fp8 != "none" else ""

    def mlp_levels(self, num_layers: int) -> tuple[str, ...]:
        """Return each block's level of MLP recomputation."""
        return by_block(self.mlp_recompute_level, num_layers)


# Values that differ between blocks: `activation,full:8` is full in the first 8 blocks and
# activation in the others. Parts with a number apply to that many blocks each, in order from the
# first; the part without a number applies to the rest, and comes first in the canonical form.
# `values.parse_by_block` checks such a text.


def block_parts(text: str) -> list[tuple[str, str | None]]:
    """Return each part's value and number, None without a number."""
    parts = (part.partition(":") for part in text.split(","))
    return [(value.strip(), number.strip() if colon else None) for value, colon, number in parts]


def join_block_parts(parts: list[tuple[str, str | None]]) -> str:
    """Join parts, the one without a number first."""
    ordered = sorted(parts, key=lambda part: part[1] is not None)
    return ",".join(value if number is None else f"{value}:{number}" for value, number in ordered)


def numbered_blocks(text: str) -> int:
    """Return the number of blocks in the numbered parts."""
    return sum(int(number or 0) for _, number in block_parts(text))


def by_block(text: str, blocks: int) -> tuple[str, ...]:
    """Return each block's value."""
    parts = block_parts(text)
    (others,) = (value for value, number in parts if number is None)
    first = [value for value, number in parts for _ in range(int(number or 0))]
    return (*first, *[others] * (blocks - len(first)))
