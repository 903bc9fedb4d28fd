"""Rules about the architecture and how it is computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megatron_lite.validation.messages import Problem, fill, nearest_multiples, typed
from megatron_lite.validation.rotary import rotary


def model(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """The shape of the model, and how its weights begin."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    fill(values, "head_groups", heads)
    if heads % values["head_groups"]:
        yield Problem(
            ("num_attention_heads", "head_groups"),
            f"{typed(values, 'num_attention_heads', 'head_groups')}: every key/value head serves equally many query "
            f"heads; make head_groups a divisor of {heads}",
        )
    if values["kv_channels"] is None:
        if hidden % heads:
            yield Problem(
                ("hidden_size", "num_attention_heads", "kv_channels"),
                f"{typed(values, 'hidden_size', 'num_attention_heads')}: the heads share hidden_size equally; "
                f"nearest hidden sizes: {nearest_multiples(hidden, heads)}; or set --kv_channels",
            )
            return
        values["kv_channels"] = hidden // heads
    fill(values, "ffn_hidden_size", 4 * hidden)
    fill(values, "activation_type", "silu" if values["gated"] else "gelu")
    fill(values, "use_position_embeddings", not values["use_rotary_embeddings"])
    sequence_length = values["sequence_length"]
    fill(values, "max_position_embeddings", max(2048, sequence_length))
    if values["use_position_embeddings"] and sequence_length > values["max_position_embeddings"]:
        yield Problem(
            ("sequence_length", "max_position_embeddings", "use_position_embeddings"),
            f"{typed(values, 'sequence_length', 'max_position_embeddings')}: positions beyond the last learned one; "
            f"write --sequence_length={values['max_position_embeddings']}, or --max_position_embeddings="
            f"{sequence_length} for a model that is not trained yet",
        )
    for name in ("add_qkv_biases", "add_mlp_biases"):
        fill(values, name, values["add_linear_biases"])
    fill(values, "embedding_dropout", values["hidden_dropout"])
    yield from rotary(values)
    _fill_initialization(values)


def _fill_initialization(values: dict[str, Any]) -> None:
    fill(values, "init_method_std", values["hidden_size"] ** -0.5)
    std, depth = values["init_method_std"], 2 * values["num_layers"]
    for name in ("embed", "qkv", "mlp_1"):
        fill(values, f"init_method_std_{name}", std)
    for name in ("attn_proj", "mlp_2"):  # the two outputs of every block that add up in the residual stream
        fill(values, f"init_method_std_{name}", std / math.sqrt(depth))


def performance(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """How it is computed."""
    if values["attention_softmax_in_fp32"] and values["attention_backend"] not in ("auto", "math"):
        yield Problem(
            ("attention_softmax_in_fp32", "attention_backend"),
            f"{typed(values, 'attention_softmax_in_fp32', 'attention_backend')}: only math computes so; leave one of "
            "them out",
        )
    for name, limit in (("recompute_layers", "num_layers"), ("cross_entropy_block_size", "vocab_size")):
        if values[name] is not None and values[name] > values[limit]:
            yield Problem((name, limit), f"{typed(values, name, limit)}: write at most {values[limit]}")
