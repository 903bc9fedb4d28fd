"""Rules for tensor parallelism: what --tensor_parallel must divide."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_lite.config import Draft
from megatron_lite.validation.messages import Problem, nearest_multiples, problem

CLIPPING_ALIGNMENT = 64  # elements: `kernels.adamw.ALIGNMENT`


def data_ranks(draft: Draft, world_size: int) -> int:
    """Return the number of data-parallel ranks."""
    return max(1, world_size // draft.tensor_parallel)


def tensor_parallel(draft: Draft, world_size: int) -> Iterator[Problem]:
    """Check that heads, channels, vocabulary, tokens and ranks divide by --tensor_parallel."""
    ranks = draft.tensor_parallel
    fitting = _fitting(draft, world_size)
    if world_size % ranks:
        have = f"the run has {world_size} rank{'s' * (world_size > 1)}"
        rule = f"{have}, which must be a multiple; start more with torchrun, or write --tensor_parallel={fitting}"
        yield problem(draft, "tensor_parallel", rule, also="world_size dry_run")
    heads, groups = draft.num_attention_heads, draft.head_groups or draft.num_attention_heads
    if heads % ranks:
        few = "there are more ranks than query heads, of which " if ranks > heads else ""
        nearest = nearest_multiples(heads, ranks)
        rule = (
            f"{few}each rank takes equally many{'' if few else ' query heads'}; write --tensor_parallel={fitting}, or "
            f"nearest heads: {nearest}"
        )
        yield problem(draft, "tensor_parallel num_attention_heads", rule)
    elif groups % ranks and ranks % groups:
        rule = f"key/value heads must divide by the ranks or the ranks by them; write --tensor_parallel={fitting}"
        yield problem(draft, "tensor_parallel head_groups", rule, also="num_attention_heads")
    elif groups < ranks and (draft.update_rms_clip or draft.clip_update_norm_sigma) is not None:
        yield from _clipped_updates(draft, heads // ranks)
    if draft.ffn_hidden_size and draft.ffn_hidden_size % ranks:
        nearest = nearest_multiples(draft.ffn_hidden_size, ranks)
        rule = (
            f"each rank takes equally many channels of the MLP; nearest ffn_hidden_size: {nearest}; or write "
            f"--tensor_parallel={fitting}"
        )
        yield problem(draft, "tensor_parallel ffn_hidden_size", rule)
    if draft.sequence_tensor_parallel and draft.sequence_length % ranks:
        nearest = nearest_multiples(draft.sequence_length, ranks)
        rule = (
            f"each rank takes equally many positions; nearest sequence_length: {nearest}; or leave "
            "sequence_tensor_parallel out"
        )
        yield problem(draft, "sequence_tensor_parallel tensor_parallel sequence_length", rule)
    unit = draft.make_vocab_size_divisible_by
    rows = -(-draft.vocab_size // (unit * ranks)) * unit
    if draft.parallel_embeddings and rows * (ranks - 1) >= draft.vocab_size:
        rule = (
            f"with {rows} rows of the vocabulary per rank, some of the {ranks} ranks would have none; write a smaller "
            "--tensor_parallel or --make_vocab_size_divisible_by, or --parallel_embeddings=0"
        )
        yield problem(
            draft, "tensor_parallel vocab_size", rule, also="make_vocab_size_divisible_by parallel_embeddings"
        )


def _fitting(draft: Draft, world_size: int) -> int:
    """Return a divisor of --tensor_parallel that satisfies all rules except the vocabulary's."""
    heads, groups = draft.num_attention_heads, draft.head_groups or draft.num_attention_heads
    positions = draft.sequence_length if draft.sequence_tensor_parallel else 0
    fitting = math.gcd(draft.tensor_parallel, world_size, heads, draft.ffn_hidden_size or 0, positions)
    return fitting if groups % fitting == 0 or fitting % groups == 0 else math.gcd(fitting, groups)


def _clipped_updates(draft: Draft, heads: int) -> Iterator[Problem]:
    """Check that replicated key/value heads start at an optimizer block boundary. heads: query heads per rank."""
    if draft.kv_channels is None:  # the heads are wrong
        return
    channels = heads * draft.kv_channels
    if (channels if draft.add_qkv_biases else channels * draft.hidden_size) % CLIPPING_ALIGNMENT:
        clip = "update_rms_clip" if draft.update_rms_clip is not None else "clip_update_norm_sigma"
        rule = (
            f"several ranks hold the same key/value heads, after {channels} query channels; clipping needs a multiple "
            f"of {CLIPPING_ALIGNMENT}; write another --tensor_parallel or leave --{clip} out"
        )
        yield problem(draft, f"tensor_parallel {clip}", rule, also="head_groups num_attention_heads kv_channels")
