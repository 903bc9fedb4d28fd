"""Bytes that layers save between the forward and the backward pass of one micro-batch: exact, computed without tensors.

The functions of `kernels/` save these tensors; a tensor that several of them save views of counts once. The tests
compare every byte with the memory that autograd holds. For temporary tensors see `peaks.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lite.config import Config
from megatron_lite.config.model import by_block
from megatron_lite.kernels import products
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.model.embedding_and_head import chunk_tokens
from megatron_lite.zero.flat_shard import Precision

FP32_BYTES, INT64_BYTES = 4, 8


@dataclass
class Sizes:
    """Sizes of the tensors of one micro-batch, in bytes unless the name says otherwise."""

    config: Config
    precision: Precision
    trained: Trained
    device: torch.device  # of the planned type
    level: str  # mlp_recompute_level, of all blocks or by block
    batch: int  # samples

    def __post_init__(self) -> None:
        """Derive the sizes of tensors; (b, s, channels) in the training dtype unless the comment says otherwise."""
        config, model = self.config, self.config.model
        self.model, self.length = model, config.batch.sequence_length  # tokens per sample
        self.kernels = choose_kernels(config, self.device, planned=True)
        self.levels = by_block(self.level, model.num_layers)
        self.recompute_layers = config.performance.recompute_layers
        self.on_gpu = self.device.type == "cuda"
        # Per element, in the training dtype, in the gradient buffers, and in the residual stream.
        self.itemsize, self.grad_itemsize = self.precision.training.itemsize, self.precision.gradients.itemsize
        self.residual_itemsize = FP32_BYTES if model.full_precision_residual else self.itemsize
        self.tokens, splits = self.batch * self.length, config.performance.cross_entropy_splits
        self.chunk_tokens = chunk_tokens(
            splits, self.tokens, self.device, self.itemsize
        )  # whose logits exist at a time
        # Of a rank of a tensor-parallel group: heads, channels, rows of the vocabulary, tokens of the residual stream.
        options = self.config.distributed
        self.ranks = options.tensor_parallel
        self.splits_tokens = self.ranks > 1 and options.sequence_tensor_parallel
        self.splits_vocabulary = self.ranks > 1 and options.parallel_embeddings
        self.vocabulary_rows = model.vocabulary_rows(self.ranks if self.splits_vocabulary else 1)  # with padding
        self.vocabulary_entries = min(self.vocabulary_rows, model.vocab_size)
        self.residual_tokens = self.tokens // self.ranks if self.splits_tokens else self.tokens
        self.heads, self.key_heads = model.num_attention_heads // self.ranks, max(1, model.head_groups // self.ranks)
        self.query_channels, self.key_channels = self.heads * model.kv_channels, self.key_heads * model.kv_channels
        self.query_key_value = self.of(self.query_channels, self.key_channels, self.key_channels)
        self.z_channels = model.ffn_hidden_size // self.ranks  # u and z are those of `kernels/mlp.py`
        self.u_channels = 2 * self.z_channels if model.gated else self.z_channels
        self.u, self.z = self.of(self.u_channels), self.of(self.z_channels)
        # Of all tokens, gathered or in a sum over ranks; `gathered` is 0 if a rank has them anyway.
        self.whole_hidden = self.of(model.hidden_size)
        self.gathered = self.whole_hidden if self.splits_tokens else 0
        # Of the tokens in the rank's residual stream, in its dtype: `stream`.
        self.hidden = self.residual_tokens * model.hidden_size * self.itemsize
        self.hidden_fp32 = self.residual_tokens * model.hidden_size * FP32_BYTES
        self.stream = self.residual_tokens * model.hidden_size * self.residual_itemsize
        # Of the tokens whose loss the rank computes.
        self.loss_tokens = self.tokens if self.splits_vocabulary else self.residual_tokens
        self.of_loss = self.whole_hidden if self.splits_vocabulary else self.hidden
        self.is_half = self.itemsize != FP32_BYTES  # computing in fp32 makes copies
        self.copies_factors = products.computes_in_fp32(self.device, self.precision.training)

    def of(self, *channels: int) -> int:
        """Return the bytes of (b, s, channels) tensors in the training dtype."""
        return self.tokens * sum(channels) * self.itemsize

    @property
    def attention(self) -> str:
        """The backend of attention; separate documents take the same memory."""
        return "math" if self.length == 1 else self.kernels.attention

    def trains(self, part: str) -> bool:
        """Whether any parameter of a part of the model (`blocks.0.`), or the one of this name, is trained."""
        return part in self.trained.parts


class Trained:
    """The parameters that are not frozen: the parts of the model that have any, and which blocks are alike."""

    def __init__(self, names: Collection[str], num_blocks: int) -> None:
        self.parts = parts_of(names)
        of_blocks: list[list[str]] = [[] for _ in range(num_blocks)]
        for name in names:
            room, _, rest = name.partition(".")
            if room == "blocks":
                index, _, part = rest.partition(".")
                of_blocks[int(index)].append(part)
        self.in_blocks = [tuple(parts) for parts in of_blocks]


def parts_of(names: Iterable[str]) -> set[str]:
    """Return the names, and the parts of the model they belong to: `blocks.0.mlp.`, `blocks.0.` and `blocks.`."""
    parts = set(names)
    for name in [*parts]:
        end = name.rfind(".") + 1
        while end and name[:end] not in parts:  # with a part, those around it are there, too
            parts.add(name[:end])
            end = name.rfind(".", 0, end - 1) + 1
    return parts


class Saved(Counter[str]):
    """Bytes of one layer by kind of tensor."""

    def add(self, kind: str, size: int, condition: bool = True) -> None:
        """Count `size` bytes if `condition` holds."""
        if condition and size:
            self[kind] += size


def kept_by_layer(sizes: Sizes, saved: Sequence[Saved]) -> list[Saved]:
    """`saved`, with only the input of each of the first `recompute_layers` blocks (see `zero/layer.py`), and angles."""
    kept = list(saved)
    for index in range(1, sizes.recompute_layers + 1):
        kept[index] = Saved()
        runs_backward = bool(saved[index]) or sizes.trains(f"blocks.{index - 1}.")
        kept[index].add("block inputs", sizes.stream, runs_backward)
    if sizes.model.use_rotary_embeddings and sizes.config.data.reset_position_ids:  # made by the first block for all
        kept[1] = Saved(kept[1])
        kept[1].add("rotary angles", sizes.tokens * sizes.model.rotated_channels * FP32_BYTES)
    return kept


def saved_by_layer(sizes: Sizes) -> list[Saved]:
    """Bytes that embedding, blocks and head save without block recomputation; none before the first trained layer.

    Blocks that are alike share one object.
    """
    model = sizes.model
    embedding, reached = Saved(), sizes.trains("embedding.word.") or sizes.trains("embedding.position.")
    _looked_up(embedding, sizes)
    if model.input_embedding_norm:
        reached = _norm(embedding, sizes, "embedding.norm.", reached, sizes.stream)
    embedding.add("dropout masks", sizes.stream, reached and bool(model.embedding_dropout))
    layers = [embedding]
    alike: dict[Any, tuple[Saved, bool]] = {}
    for index in range(model.num_layers):
        key = sizes.levels[index], sizes.trained.in_blocks[index], reached
        if key not in alike:
            alike[key] = _block(sizes, f"blocks.{index}.", sizes.levels[index], reached)
        block, reached = alike[key]
        layers.append(block)
    head = Saved()
    reached = _norm(head, sizes, "head.norm.", reached, sizes.stream)
    head.add("gradient made by the loss", sizes.of_loss, reached)  # of the hidden states, in the forward pass
    return [*layers, head]


def _looked_up(saved: Saved, sizes: Sizes) -> None:
    """Numbers of the rows that a rank looks up: its own, and of positions those of its tokens."""
    by_rank = sizes.tokens * (INT64_BYTES + 1)  # and whether the row is another rank's
    saved.add("rows looked up", by_rank, sizes.splits_vocabulary and sizes.trains("embedding.word."))
    of_positions = sizes.splits_tokens and sizes.trains("embedding.position.")
    saved.add("rows looked up", sizes.tokens * INT64_BYTES, of_positions)


# In the functions below `reached` says whether the backward pass reaches the input of a part, because something before
# it is trained. Each function returns the same about its output.


def _block(sizes: Sizes, name: str, level: str, reached: bool) -> tuple[Saved, bool]:
    saved = Saved()
    branch = _norm(saved, sizes, f"{name}attention_norm.", reached, sizes.stream)
    branch = _attention(saved, sizes, f"{name}attention.", branch)
    branch = _end_of_branch(saved, sizes, f"{name}attention_output_norm.", branch)
    reached = reached or branch
    branch = _norm(saved, sizes, f"{name}mlp_norm.", reached, sizes.stream)
    branch = _mlp(saved, sizes, f"{name}mlp.", level, branch)
    branch = _end_of_branch(saved, sizes, f"{name}mlp_output_norm.", branch)
    return saved, reached or branch


def _norm(saved: Saved, sizes: Sizes, name: str, reached: bool, size: int, kind: str = "norm inputs") -> bool:
    """A norm saves its input of `size` bytes and its statistics."""
    reached = reached or sizes.trains(name)
    saved.add(kind, size, reached)
    saved.add("norm statistics", statistics_bytes(sizes, sizes.residual_tokens), reached)
    return reached


def statistics_bytes(sizes: Sizes, rows: int) -> int:
    """1 / rms, or mean and 1 / deviation, of each row (a token, or a head of one), in fp32."""
    return rows * FP32_BYTES * (1 if sizes.model.normalization_type == "rms_norm" else 2)


def _end_of_branch(saved: Saved, sizes: Sizes, norm: str, reached: bool) -> bool:
    """Norm and dropout between the last product of a branch and the residual stream."""
    if sizes.model.hybrid_norm:
        reached = _norm(saved, sizes, norm, reached, sizes.hidden, kind="branch norm inputs")
    saved.add("dropout masks", sizes.hidden, reached and sizes.model.hidden_dropout > 0)
    return reached


def _attention(saved: Saved, sizes: Sizes, name: str, reached: bool) -> bool:
    """Attention saves its input, query, key and value, and its output; GPU kernels add one fp32 number per row.

    With norms of queries and keys the whole projection is saved, for its values, and the normalized queries and keys.
    """
    saved.add("linear inputs", sizes.hidden, sizes.trains(f"{name}query_key_value.weight"))
    reached = reached or sizes.trains(f"{name}query_key_value.")
    if sizes.model.qk_layernorm:
        reached = reached or sizes.trains(f"{name}query_norm.") or sizes.trains(f"{name}key_norm.")
        saved.add("normalized query, key", sizes.of(sizes.query_channels, sizes.key_channels), reached)
        saved.add("norm statistics", statistics_bytes(sizes, sizes.tokens * (sizes.heads + sizes.key_heads)), reached)
    fused = reached and sizes.attention != "math"
    saved.add("query, key, value", sizes.query_key_value, reached)
    saved.add("attention outputs", sizes.of(sizes.query_channels), fused or sizes.trains(f"{name}output.weight"))
    saved.add("attention statistics", sizes.tokens * sizes.heads * FP32_BYTES, fused)
    return reached or sizes.trains(f"{name}output.")


def _mlp(saved: Saved, sizes: Sizes, name: str, level: str, reached: bool) -> bool:
    """The MLP saves x, u and z, as far as its level of recomputation does: see `kernels/mlp.py`."""
    up, down = (sizes.trains(f"{name}{weight}.weight") for weight in ("up", "down"))
    reached = reached or sizes.trains(f"{name}up.")
    reads_u = reached or (down and level != "none")
    saved.add("linear inputs", sizes.hidden, up or (reads_u and level == "full"))
    saved.add("MLP up outputs", sizes.u, reads_u and level != "full")
    saved.add("MLP activations", sizes.z, down and level == "none")
    return reached or sizes.trains(f"{name}down.")
