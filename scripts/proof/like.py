"""The model and options of a user's command, at the size of a proof."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from megatron_lite.cli.parse import parse
from megatron_lite.config import Draft, flatten, unflatten
from megatron_lite.config.dimensions import OF_A_SAMPLE
from megatron_lite.config.values import FLAGS, written
from megatron_lite.validation import examine
from scripts.proof.cases import LAYOUT, LEAST_LIMIT, SIZES, Case, Layout
from scripts.proof.ranks import MASK

AREAS = ("model", "adapters", "optimizer", "averaging", "performance", "multi_stage")
OTHERS = (
    "training_dtype",
    "loss_reduction",
    "logit_z_loss",
    "cross_document_attention",
    "truncate_documents",
    "reset_position_ids",
    "mask_document_starts",
    "shuffle_documents",
)
# Sizes, and choices for a device.
LEFT_OUT = (
    *SIZES,
    "kv_channels",
    "max_position_embeddings",
    "rope_original_max_position_embeddings",
    "init_method_std",
    "adam_eps",
    "weight_decay_modules",
    "cross_entropy_splits",
    "throttle_cpu",
    "enable_triton_kernels",
    "cpu_matmul",
    "attention_backend",
    "cross_entropy_impl",
)
DROPOUT = ("attention_dropout", "hidden_dropout", "embedding_dropout")


def shrunk(flags: Sequence[str], most_ranks: int, **more: Any) -> tuple[Case, list[str]]:
    """Return a case with the options and the layout of a command, and remarks on what is not in it.

    more: options that override.

    Raises:
        UsageError, CheckpointError: if the program refuses the flags.
    """
    values = flatten(parse(flags).config) | more
    changed = Draft(**values).changed(*values)
    names = [name for name in changed if FLAGS[name].area in AREAS or name in OTHERS]
    options = {name: values[name] for name in names if name not in (*LEFT_OUT, *DROPOUT, *LAYOUT)}
    options |= _sizes(Draft(**values))
    layout = {name: values[name] for name in LAYOUT if name in changed and values[name] != "auto"}
    several = [row.option for row in OF_A_SAMPLE if row.option in layout]
    for name in several:
        layout[name] = min(
            layout[name], most_ranks if len(several) == 1 else math.isqrt(most_ranks)
        )
    remarks = (
        ["dropout is 0, because its masks depend on the layout"] if {*DROPOUT} & {*changed} else []
    )
    small = {name: int(value) for name, value in SIZES.items() if name != "batch_size"}
    for found, before, ranks in ((options, small, 1), (layout, {**small, **options}, most_ranks)):
        while problems := examine(unflatten({**before, **found}), ranks)[1]:
            wrong = next((name for name in problems[0].names if name in found), None)
            if wrong is None:
                break
            remarks.append(f"left out --{wrong}={written(found.pop(wrong))}: {problems[0].message}")
    own, split = (
        {name: written(value).replace(" ", ",") for name, value in some.items()}
        for some in (options, layout)
    )
    return Case(own, Layout(most_ranks, split)), remarks


def _sizes(asked: Draft) -> dict[str, Any]:
    """Return small sizes with the ratios of the command's: groups of heads, MLP, window; and other
    values that a proof needs."""
    heads = asked.num_attention_heads
    hidden = asked.hidden_size
    found = dict[str, Any]()
    if asked.head_groups not in (None, heads):
        found["head_groups"] = min(asked.head_groups, 4)
    if asked.kv_channels not in (None, hidden // heads):
        found["kv_channels"] = 6
    if asked.ffn_hidden_size is not None:
        found["ffn_hidden_size"] = max(1, round(4 * asked.ffn_hidden_size / hidden)) * 12
    if asked.window_size is not None:
        share = min(1.0, asked.window_size / asked.sequence_length)
        found["window_size"] = max(1, round(int(SIZES["sequence_length"]) * share))
    if asked.make_vocab_size_divisible_by > 1:
        found["make_vocab_size_divisible_by"] = 8
    if asked.cross_entropy_block_size is not None:
        found["cross_entropy_block_size"] = 7
    if asked.batch_size_schedule:
        found["batch_size_schedule"] = ("0:12", "1:24")
    if 0 < asked.activation_limit < LEAST_LIMIT:
        found["activation_limit"] = LEAST_LIMIT
    if asked.loss_mask:
        found["loss_mask"] = (MASK,)
    for name in ("freeze", "lr_scales"):
        if patterns := getattr(asked, name):
            found[name] = tuple(
                re.sub(r"(?<=blocks\.)\d+", _own_block, pattern) for pattern in patterns
            )
    return found


def _own_block(number: re.Match[str]) -> str:
    return str(int(number[0]) % int(SIZES["num_layers"]))
