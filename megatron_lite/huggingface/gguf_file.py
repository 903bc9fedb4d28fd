"""Write a model as one file for llama.cpp, in the format GGUF, one tensor in memory at a time.

Source: docs/gguf.md of ggml and the loader of llama.cpp, whose logits are the oracle of the tests.
llama.cpp ignores what an architecture of its own cannot say, so `_FAMILIES` states all that it
computes, and everything else is refused.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_lite.config import Config, ModelConfig
from megatron_lite.config.mup import with_factors
from megatron_lite.config.values import written
from megatron_lite.errors import NumericsError, UsageError
from megatron_lite.huggingface.architectures import base_of, biases_of, check_exportable
from megatron_lite.huggingface.gguf_tokenizer import tokenizer_keys
from megatron_lite.huggingface.weight_source import Shapes, WeightSource, read_whole
from megatron_lite.model.gpt import build_gpt, shapes_of
from megatron_lite.model.rotary import rotary_frequencies
from megatron_lite.parameter import DTYPES, SAFETENSORS_NAMES
from megatron_lite.run.durable_files import sync_files
from megatron_lite.run.progress_line import ByteProgress
from megatron_lite.zero.finite import are_finite

FILE_NAME = "model.gguf"

# What llama.cpp computes in every family that does not say otherwise: values of our options, or
# others that have the value; !: any but these. windows, rotates: 1 or 0 of each block, repeated over
# the blocks; channels: those whose root divides scores; scaled_windows: whether --rope_type counts in
# blocks with a window, too; width: hidden_size / num_attention_heads.
_USUAL = (
    "activation_type=silu rope_type=default|linear|yarn windows=0 rotates=1 rope_truncate=none|1 "
    "rope_beta_fast=none|32 rope_beta_slow=none|1 rope_attention_factor=none rope_mscale=none "
    "window_rotary_base=none add_linear_biases=0 add_qkv_biases=0 add_mlp_biases=0"
)
# A family: its `model_type`, llama.cpp's name, and what differs. "pairs" rotates channels 2 j and
# 2 j + 1 of a head, which we rotate across halves; module:names replaces a line of `_MODULES`.
_FAMILIES = """
gpt2         gpt2        attention.query_key_value:attn_qkv activation_type=gelu rotates=0
gpt2         -           add_linear_biases=0|1 add_qkv_biases=0|1 add_mlp_biases=0|1
gpt2         -           scale_attn_by_inverse_layer_idx=0
gpt_bigcode  starcoder   attention.query_key_value:attn_qkv activation_type=gelu rotates=0
gpt_bigcode  -           add_linear_biases=0|1 add_qkv_biases=0|1 add_mlp_biases=0|1
llama        llama       pairs rope_type=default|linear|llama3|yarn
llama        -           add_linear_biases=0|1 add_qkv_biases=0|1 add_mlp_biases=0|1
mistral      llama       pairs rope_type=default|linear|llama3|yarn
qwen2        qwen2       kv_channels=width add_qkv_biases=0|1
qwen3        qwen3
starcoder2   starcoder2  kv_channels=width activation_type=gelu add_linear_biases=1 add_qkv_biases=1 add_mlp_biases=1
stablelm     stablelm    embedding.word:token_embd+output add_qkv_biases=0|1
gpt_neox     gptneox     attention.query_key_value:attn_qkv embedding.word:token_embd+output
gpt_neox     -           activation_type=gelu|gelu_exact
gpt_neox     -           add_linear_biases=1 add_qkv_biases=1 add_mlp_biases=0|1
phi3         phi3        kv_channels=width attention.query_key_value:attn_qkv mlp.up:ffn_up
olmo2        olmo2       kv_channels=width embedding.word:token_embd+output
olmo3        olmo2       kv_channels=width embedding.word:token_embd+output windows=1110
olmo3        -           rope_type=default
smollm3      smollm3     pairs rotates=1110
gemma        gemma       activation_type=gelu tie_word_embeddings=1
gemma2       gemma2      activation_type=gelu windows=10 tie_word_embeddings=1 channels=kv_channels
gemma2       -           rope_type=default attention_soft_cap!=0 logit_soft_cap!=0 num_layers!=46
gemma3_text  gemma3      activation_type=gelu windows=111110 channels=kv_channels num_layers!=62
gemma3_text  -           rope_type=default|linear scaled_windows=0 window_rotary_base=window_rotary_base
granite      granite     pairs rope_type=default|linear|llama3|yarn
granite      -           add_linear_biases=0|1 add_qkv_biases=0|1 add_mlp_biases=0|1
nemotron     nemotron    activation_type=squared_relu kv_channels=width
nemotron     -           embedding.word:token_embd+output
nemotron     -           add_linear_biases=0|1 add_qkv_biases=0|1 add_mlp_biases=0|1
seed_oss     seed_oss    mlp_norm:post_attention_norm add_qkv_biases=0|1
exaone4      exaone4     kv_channels=width num_layers!=64 rope_type=default|linear|llama3|yarn
glm4         glm4        pairs mlp.up:ffn_up add_qkv_biases=0|1
cohere2      cohere2     rope_type=default pairs windows=1110 rotates=1110 tie_word_embeddings=1
mixtral      llama       pairs
qwen3_moe    qwen3moe    moe_normalize_top_k=1 moe_first_dense_layers=0 moe_layer_frequency=1
olmoe        olmoe       moe_normalize_top_k=0 head_groups=num_attention_heads
olmoe        -           embedding.word:token_embd+output
granitemoe   granitemoe  pairs rope_type=default|linear|llama3|yarn
granitemoe   -           add_linear_biases=0|1 add_qkv_biases=0|1
"""
# Our modules and llama.cpp's; several share the rows of one, in this order.
_MODULES = """
embedding.word             token_embd
embedding.position         position_embd
head.norm                  output_norm
head.output                output
attention_norm             attn_norm
attention.query_key_value  attn_q attn_k attn_v
attention.query_norm       attn_q_norm
attention.key_norm         attn_k_norm
attention.output           attn_output
attention_output_norm      post_attention_norm
mlp_norm                   ffn_norm
mlp_output_norm            post_ffw_norm
mlp.up                     ffn_gate ffn_up
mlp.down                   ffn_down
mlp.router                 ffn_gate_inp
mlp.experts.up             ffn_gate_exps ffn_up_exps
mlp.experts.down           ffn_down_exps
"""
# Keys of the file and our options.
_KEYS = """
embedding_length                    hidden_size
block_count                         num_layers
feed_forward_length                 ffn_hidden_size
vocab_size                          vocab_size
attention.head_count                num_attention_heads
attention.head_count_kv             head_groups
attention.key_length                kv_channels
attention.value_length              kv_channels
attention.layer_norm_epsilon        layer_norm_eps
attention.layer_norm_rms_epsilon    layer_norm_eps
attention.sliding_window            window_size
attention.scale                     attention_scale
attn_logit_softcapping              attention_soft_cap
final_logit_softcapping             logit_soft_cap
embedding_scale                     embedding_scale
residual_scale                      residual_scale
logit_scale                         logit_scale
rope.dimension_count                rotated_channels
rope.freq_base                      rotary_base
rope.scaling.factor                 rope_factor
rope.scaling.original_context_length  rope_original_max_position_embeddings
expert_count                        num_experts
expert_used_count                   num_experts_per_token
expert_feed_forward_length          moe_ffn_hidden_size
"""


class Family(NamedTuple):
    """How llama.cpp reads a `model_type`; see `_FAMILIES`."""

    name: str  # llama.cpp's
    pairs: bool
    modules: dict[str, list[str]]


def family_of(model_type: str, model: ModelConfig) -> Family:
    """Return how llama.cpp reads a resolved model.

    Raises:
        UsageError: if it has no such family, or computes something else.
    """
    rows = [line.split() for line in _FAMILIES.splitlines() if line]
    words = [*_USUAL.split(), *(word for row in rows if row[0] == model_type for word in row)]
    names = [row[1] for row in rows if row[0] == model_type]
    other = "write --format=huggingface, which transformers and vLLM read"
    if not names:
        supported = ", ".join(dict.fromkeys(row[0] for row in rows))
        raise UsageError(f"--format=gguf: {model_type} is none of {supported}; {other}")
    for option, value in dict(word.split("=") for word in words if "=" in word).items():
        actual, *known = (
            _value(model, word, option) for word in (option.rstrip("!"), *value.split("|"))
        )
        if (actual in known) == option.endswith("!"):
            raise UsageError(
                f"--format=gguf: llama.cpp computes {model_type} with {option}={value}, whatever a file says, and this "
                f"model has {actual}; {other}"
            )
    modules = dict(line.split(maxsplit=1) for line in _MODULES.splitlines() if line)
    modules |= dict(word.split(":") for word in words if ":" in word)
    parts = {module: theirs.replace("+", " ").split() for module, theirs in modules.items()}
    return Family(names[0], "pairs" in words, parts)


def _value(model: ModelConfig, word: str, option: str) -> str:
    """Return the value of an option, or a value to compare with the option's."""
    blocks = range(model.num_layers)
    special = {
        "windows": "".join(str(int(model.window(block) is not None)) for block in blocks),
        "rotates": "".join(str(int(model.rotates(block))) for block in blocks),
        "channels": written(base_of(model.attention_scale or model.kv_channels**-0.5, -0.5)),
        "scaled_windows": str(int(model.rope_type != "default" and not model.window_rotary_base)),
        "width": written(model.hidden_size / model.num_attention_heads),
    }
    if option in ("windows", "rotates") and word not in special:
        return (word * model.num_layers)[: model.num_layers]
    return special.get(word) or written(getattr(model, word, word))


def model_keys(family: Family, model: ModelConfig) -> dict[str, Any]:
    """Return the keys of the file that describe a model, without the name before each."""
    rows = (line.split() for line in _KEYS.splitlines() if line)
    found = {key: getattr(model, option) for key, option in rows}
    found["rope.scaling.type"] = (
        model.rope_type if model.rope_type in ("linear", "yarn") else "none"
    )
    found["use_parallel_residual"] = model.parallel_branches != "none"
    found["rope.freq_base_swa"] = model.window_rotary_base or model.rotary_base
    if family.name.startswith("granite"):
        found["logit_scale"] = 1 / model.logit_scale
    absent = ("expert",) if model.num_experts == 1 else ()
    return {
        key: value
        for key, value in found.items()
        if value is not None and not key.startswith(absent)
    }


def file_tensors(
    name: str, values: Tensor, family: Family, model: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield llama.cpp's names and values of one of our parameters, views where possible."""
    owner, kind = name.rsplit(".", 1)
    _, number, part = owner.split(".", 2) if owner.startswith("blocks.") else ("", "", owner)
    prefix, names = f"blk.{number}." if number else "", family.modules[part]
    if kind == "weight" and part.endswith("norm") and model.zero_centered_normalization:
        values = values + 1
    if part == "mlp.up" and not model.gated:
        names = names[1:]
    if part == "embedding.word":
        parts = [values] * (1 + model.tie_word_embeddings)
    elif part.startswith("mlp.experts."):
        parts = [*values.unflatten(0, (model.num_experts, -1)).chunk(len(names), 1)]
    elif part == "attention.query_key_value" and len(names) == 3:
        heads = (model.num_attention_heads, model.head_groups, model.head_groups)
        parts = [*values.split([count * model.kv_channels for count in heads])]
    else:
        parts = [*values.chunk(len(names))]
    for theirs, rows in zip(names, parts, strict=False):  # untied: fewer parts
        if theirs in ("attn_q", "attn_k") and family.pairs:
            rows = _paired(rows, model)
        yield f"{prefix}{theirs}.{kind}", rows


def _paired(rows: Tensor, model: ModelConfig) -> Tensor:
    """Return rows (heads x channels, ...) with each head's rotated halves taking turns."""
    heads = rows.unflatten(0, (-1, model.kv_channels))
    rotated = heads[:, : model.rotated_channels].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([rotated, heads[:, model.rotated_channels :]], 1).flatten(0, 1)


class GgufFile:
    """A file for llama.cpp to be written; what llama.cpp would not compute is refused at once.

    Raises:
        UsageError: without the package gguf, or if llama.cpp computes something else.
        DataError: if it splits texts otherwise.
    """

    def __init__(self, config: Config, tokenizer_file: Path | None) -> None:
        if importlib.util.find_spec("gguf") is None:
            raise UsageError(
                "--format=gguf needs the package gguf: pip install 'megatron_lite[gguf]' (in a checkout: pip install "
                "-e '.[gguf]')"
            )
        model_type = check_exportable(config.model, config.training.export_model_type)
        self._model = model = with_factors(config.model)
        self._family = family_of(model_type, model)
        self._dtype = DTYPES[config.training.export_dtype]
        length = max(model.max_position_embeddings, config.batch.sequence_length)
        keys = {"context_length": length, **model_keys(self._family, model)}
        self._keys = {f"{self._family.name}.{key}": value for key, value in keys.items()}
        self._keys |= tokenizer_keys(tokenizer_file, model.vocab_size)
        # With norms and biases that only the family has.
        biases = biases_of(model_type, model)
        theirs = dataclasses.replace(model, use_layer_norm_weight=True, **biases)
        self._shapes = shapes_of(build_gpt(theirs, 1))

    def write(self, folder: Path, source: WeightSource, shapes: Shapes) -> int:
        """Write a new folder with the file; return the bytes of its weights.

        Raises:
            NumericsError: if a weight is too large for the dtype.
            OSError: if it cannot be written.
        """
        from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

        folder.mkdir()
        writer = GGUFWriter(folder / FILE_NAME, self._family.name)
        for key, value in self._keys.items():
            is_count = type(value) is int
            kind = GGUFValueType.UINT32 if is_count else GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
        total_bytes = 0
        for name, rows in self._tensors(lambda name, shape: torch.empty(shape, device="meta")):
            dtype = GGMLQuantizationType[SAFETENSORS_NAMES[rows.dtype]]
            writer.add_tensor_info(name, rows.shape, np.dtype("V"), rows.nbytes, dtype)
            total_bytes += rows.nbytes
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()

        def read(name: str, shape: tuple[int, ...]) -> Tensor:
            if name in shapes:
                return read_whole(source, name, shape)
            is_one = name.endswith("norm.weight") and not self._model.zero_centered_normalization
            return torch.full(shape, float(is_one))

        with ByteProgress("writing the file", total_bytes) as progress:
            for name, rows in self._tensors(read):
                if not are_finite([rows])[0]:
                    raise NumericsError(
                        f"{name} is too large for {rows.dtype}: nothing is written; choose bf16 or fp32"
                    )
                writer.write_tensor_data(rows.contiguous().view(torch.uint8).numpy())
                progress.add(rows.nbytes)
        writer.close()
        sync_files(folder)
        return total_bytes

    def _tensors(
        self, read: Callable[[str, tuple[int, ...]], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the file's tensors. read: returns one of our parameters."""
        model = self._model
        if model.rope_type == "llama3":
            plain = dataclasses.replace(model, rope_type="default")
            usual, scaled = (
                rotary_frequencies(each, model.rotated_channels, torch.device("cpu"))
                for each in (plain, model)
            )
            yield "rope_freqs.weight", usual / scaled
        for name, shape in self._shapes.items():
            for theirs, rows in file_tensors(name, read(name, shape), self._family, model):
                # llama.cpp adds and multiplies vectors in fp32 only
                yield theirs, rows.to(torch.float32 if rows.ndim == 1 else self._dtype)
