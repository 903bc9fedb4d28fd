"""What layers need for a moment, beyond what they keep: the peaks of their forward and backward passes. Bytes.

Each pass is walked through in the order in which the functions of `kernels/` make and drop their large tensors. Small
ones, and workspaces inside of a library's kernels, are left out, so that this is close, not exact: within 0.5 percent
of a step's peak, 3 percent where attention is most of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.config import ModelConfig
from megatron_lite.kernels.attention.blocks import blocks_of_a_sample, rows_of_a_block
from megatron_lite.kernels.cross_entropy import reference_rows
from megatron_lite.kernels.linear import temporary_rows
from megatron_lite.kernels.linear_cross_entropy import held_logits
from megatron_lite.planner.activations import FP32_BYTES, Kept, Pass


class Walk:
    """What lives while a pass goes on, beyond what was there at its beginning: `peak` is the most at any time."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def make(self, size: int, moment: int = 0) -> None:
        """Something new of `size`; `moment` bytes live only while it is made."""
        self.peak = max(self.peak, self.live + size + moment)
        self.live += size

    def drop(self, *sizes: int) -> None:
        """Something is no longer needed."""
        self.live -= sum(sizes)


@dataclass(frozen=True)
class Peaks:
    """Of one layer and one micro-batch: beyond what all layers keep."""

    forward: int
    backward: int  # beyond the gradient that it begins with, too


def peaks_by_layer(model: ModelConfig, one: Pass, made: Sequence[Kept]) -> list[Peaks]:
    """Of the embedding, each block and the head, as if everything in them were trained.

    `made`: what their backward passes read (`made_by_layer`).
    """
    blocks = [Peaks(_block_forward(model, one, block), _block_backward(model, one, block)) for block in made[1:-1]]
    for index, plain in enumerate(blocks[: one.kernels.recompute_layers]):
        blocks[index] = _recomputed(model, one, made[index + 1], plain)
    return [_embedding(model, one), *blocks, _head(model, one)]


def _recomputed(model: ModelConfig, one: Pass, made: Kept, plain: Peaks) -> Peaks:
    """In its backward pass, whatever the forward pass makes, beyond the input, and a second output.

    What is made for a moment in its first forward pass is never the most: the same is made again in the backward pass.
    """
    hidden = one.residual(model.hidden_size)
    again = made.total - hidden if made else 0
    return Peaks(plain.forward, again + max(plain.forward, hidden + plain.backward))


def _embedding(model: ModelConfig, one: Pass) -> Peaks:
    """The rows looked up, perhaps with positions, normalized or dropped from; backward, their gradient in the buffer's
    dtype.
    """
    stream, walk, backward = one.residual(model.hidden_size), _embedded(model, one), Walk()
    dropped = stream if model.embedding_dropout else 0
    kept = stream if model.input_embedding_norm else 0
    walk.make(dropped)
    if model.input_embedding_norm:
        backward.make(dropped)
        backward.drop(dropped)  # the mask
        _norm_backward(backward, model, one, stream, stream)
        backward.drop(dropped, kept)
    casts = one.grad_itemsize != one.residual_itemsize and not one.kernels.triton
    backward.make(one.tokens * model.hidden_size * one.grad_itemsize if casts else 0)
    return Peaks(walk.peak - kept, backward.peak)


def _embedded(model: ModelConfig, one: Pass) -> Walk:
    """Up to where its elements are dropped from."""
    walk, stream = Walk(), one.residual(model.hidden_size)
    looked_up = one.size(model.hidden_size)
    walk.make(looked_up)
    if stream != looked_up:
        walk.make(stream)
        walk.drop(looked_up)
    if model.use_position_embeddings:
        walk.make(stream)
        walk.drop(stream)
    if model.input_embedding_norm:
        walk.make(stream, moment=_norm_forward(model, one, stream, stream))
    return walk


def _head(model: ModelConfig, one: Pass) -> Peaks:
    """The norm, then logits and their gradient chunk by chunk; see `kernels/linear_cross_entropy.py`."""
    walk, hidden, stream = Walk(), one.size(model.hidden_size), one.residual(model.hidden_size)
    walk.make(hidden, moment=_norm_forward(model, one, stream, hidden))
    walk.make(*_logits(model, one))
    rows, entries = min(one.chunk_tokens, one.tokens), _block_entries(model, one)
    # Of several blocks, the hidden gradient is summed up in fp32.
    walk.make(rows * model.hidden_size * FP32_BYTES if one.cast_itemsize and entries < model.vocab_size else 0)
    walk.make(0, moment=_weight_gradient(one, entries, model.hidden_size))
    backward = Walk()
    _norm_backward(backward, model, one, stream, hidden)
    return Peaks(walk.peak, backward.peak)


def _logits(model: ModelConfig, one: Pass) -> tuple[int, int]:
    """The memory for logits, and momentary bytes beside it."""
    entries, block = min(_block_entries(model, one), model.vocab_size), one.kernels.cross_entropy_block_size
    rows, columns = held_logits(one.tokens, model.padded_vocab_size, one.chunk_tokens, block)
    copied = min(rows, reference_rows(entries, "cuda" if one.on_gpu else "cpu")) * entries * FP32_BYTES
    copies = bool(one.cast_itemsize) + bool(model.logit_soft_cap)  # in fp32; and of what capping has made of them
    return rows * columns * one.itemsize, copies * copied if one.kernels.cross_entropy == "torch" else 0


def _block_entries(model: ModelConfig, one: Pass) -> int:
    """Entries of the vocabulary, its padding included, whose logits exist at a time."""
    return min(one.kernels.cross_entropy_block_size or model.padded_vocab_size, model.padded_vocab_size)


def _block_forward(model: ModelConfig, one: Pass, kept: Kept) -> int:
    """What the level of recomputation does not keep, the branch and the output."""
    assert model.ffn_hidden_size is not None
    width = model.ffn_hidden_size
    walk, hidden, stream = Walk(), one.size(model.hidden_size), one.residual(model.hidden_size)
    if one.level == "full":
        walk.make(one.size(2 * width if model.gated else width))
    if one.level != "none":
        walk.make(one.size(width))
    walk.make(0 if model.hybrid_norm else hidden)  # else it is what the norm keeps
    walk.drop(walk.live)
    walk.make(hidden, moment=_norm_forward(model, one, hidden, hidden) if model.hybrid_norm else 0)
    walk.make(stream)
    if one.attention != "math":
        return walk.peak
    # While attention goes through its blocks, all that comes later is not there yet.
    later = sum(kept.get(what, 0) for what in ("MLP up outputs", "MLP activations", "dropout masks")) + stream
    return max(walk.peak, _attention_blocks(model, one, backward=False) - later)


def evaluation_peaks(model: ModelConfig, one: Pass) -> list[int]:
    """Of the embedding, each block and the head in a pass that nothing is kept of: beyond their input."""
    head, hidden, stream = Walk(), one.size(model.hidden_size), one.residual(model.hidden_size)
    head.make(hidden, moment=_norm_forward(model, one, stream, hidden))
    head.make(*_logits(model, one))
    return [_embedded(model, one).peak, *[_block_evaluation(model, one)] * model.num_layers, head.peak]


def _block_evaluation(model: ModelConfig, one: Pass) -> int:
    """Its output remains; until then each function holds what it was given."""
    assert model.ffn_hidden_size and model.head_groups and model.kv_channels
    query, group = model.num_attention_heads * model.kv_channels, model.head_groups * model.kv_channels
    walk, hidden, stream = Walk(), one.size(model.hidden_size), one.residual(model.hidden_size)
    heads, context = one.size(query, group, group), one.size(query)
    normalized = one.size(query, group) if model.qk_layernorm else 0
    walk.make(hidden, moment=_norm_forward(model, one, stream, hidden))
    walk.make(heads, moment=_rotation(model, one, query + group) if not normalized else 0)
    walk.make(normalized, moment=_rotation(model, one, query + group) if normalized else 0)
    walk.make(context, moment=_attention_blocks(model, one, backward=False) if one.attention == "math" else 0)
    walk.make(hidden)  # the branch, which then becomes the sum where that has its dtype
    walk.drop(heads, normalized, context)
    _branch_norm(walk, model, one)
    walk.make(stream if stream != hidden else 0)
    walk.make(hidden, moment=_norm_forward(model, one, stream, hidden))
    walk.drop(hidden, hidden if stream != hidden else 0)
    up_output, activated = one.size(model.ffn_hidden_size * (2 if model.gated else 1)), one.size(model.ffn_hidden_size)
    walk.make(up_output)
    walk.make(activated)
    walk.make(hidden)
    walk.drop(up_output, activated)
    _branch_norm(walk, model, one)
    walk.make(stream)
    return walk.peak


def _branch_norm(walk: Walk, model: ModelConfig, one: Pass) -> None:
    """Its output takes the place of its input."""
    if model.hybrid_norm:
        hidden = one.size(model.hidden_size)
        walk.make(hidden, moment=_norm_forward(model, one, hidden, hidden))
        walk.drop(hidden)


def _block_backward(model: ModelConfig, one: Pass, kept: Kept) -> int:
    assert model.ffn_hidden_size and model.head_groups and model.kv_channels
    walk, hidden, stream = Walk(), one.size(model.hidden_size), one.residual(model.hidden_size)
    wide = hidden if stream != hidden else 0
    walk.make(wide)  # the gradient of the MLP's branch
    own = _branch_backward(walk, model, one, wide)
    _mlp_backward(walk, model, one, model.ffn_hidden_size)
    walk.drop(own, kept.get("MLP up outputs", 0), kept.get("MLP activations", 0), kept.get("linear inputs", 0) // 2)
    _norm_backward(walk, model, one, stream, hidden, adds=True, branch=wide)
    walk.drop(kept.get("norm inputs", 0) // 2)
    own = _branch_backward(walk, model, one, wide)
    _attention_backward(walk, model, one, kept)
    walk.drop(own)
    _norm_backward(walk, model, one, stream, hidden, adds=True)
    return walk.peak


def _branch_backward(walk: Walk, model: ModelConfig, one: Pass, own: int) -> int:
    """Through dropout and norm of a branch. `own`, in and out: bytes of its gradient, 0 while it is the stream's."""
    hidden = one.size(model.hidden_size)
    if model.hidden_dropout > 0:
        walk.make(hidden)
        walk.drop(hidden, own)  # the mask
        own = hidden
    if model.hybrid_norm:
        _norm_backward(walk, model, one, hidden, 0)
        walk.drop(own, hidden)  # what the norm has kept
        own = hidden
    return own


def _attention_backward(walk: Walk, model: ModelConfig, one: Pass, kept: Kept) -> None:
    """See `kernels/attention.py` and `kernels/rotary.py`. Its input's gradient remains."""
    assert model.head_groups and model.kv_channels
    query, group = model.num_attention_heads * model.kv_channels, model.head_groups * model.kv_channels
    context, heads = one.size(query), one.size(query, group, group)
    walk.make(context, moment=_weight_gradient(one, model.hidden_size, query))  # gradient of the context
    if one.attention == "math":
        walk.drop(kept.get("attention outputs", 0))
        walk.make(heads, moment=_attention_blocks(model, one, backward=True))
    else:
        # The kernels add up queries' gradients in fp32, and make those of keys and values for each head.
        groups = one.size(query, query) if group != query else 0
        walk.make(heads, moment=groups + one.tokens * query * FP32_BYTES)
        walk.drop(kept.get("attention outputs", 0))
    walk.drop(context, kept.get("query, key, value", 0), kept.get("attention statistics", 0))
    walk.make(heads, moment=_rotation(model, one, query))
    if model.qk_layernorm:
        walk.make(0, moment=_head_norm_backward(model, one, query))
        walk.drop(kept.get("normalized query, key", 0))
    walk.drop(heads)
    walk.make(one.size(model.hidden_size), moment=_weight_gradient(one, query + 2 * group, model.hidden_size))
    walk.drop(heads)


def _attention_blocks(model: ModelConfig, one: Pass, backward: bool) -> int:
    """Momentary bytes of `kernels/attention_blocks.py`, at the block with most scores."""
    assert model.head_groups and model.kv_channels
    heads, channels = model.num_attention_heads, model.kv_channels
    rows = min(rows_of_a_block(one.on_gpu), one.length)
    blocks = blocks_of_a_sample([one.length], model.window_size, rows)
    scores, keys = heads * max(b.scores for b in blocks), max(b.end - b.low for b in blocks)
    single, narrow = scores * FP32_BYTES, scores * one.itemsize
    queries, keys_of_all = heads * rows * channels, model.head_groups * one.length * channels
    always = rows**2 + (keys_of_all * FP32_BYTES if one.cast_itemsize else 0)  # the triangle; keys in fp32
    drops = narrow if model.attention_dropout > 0 else 0  # the mask
    # Scores beside their queries, then probabilities beside the scores or the mask.
    peak = max(single + queries * FP32_BYTES, narrow + max(single if one.cast_itemsize else 0, drops))
    if not backward:
        return always + max(peak, narrow + queries * one.itemsize)
    # Then the gradient of the output's rows, and dropped probabilities or those of the scores beside the probabilities.
    part = model.head_groups * keys * channels * one.itemsize if one.cast_itemsize else 0
    gradients = narrow + drops + queries * one.itemsize + max(narrow, drops + part)
    if model.attention_softmax_in_fp32 and one.cast_itemsize:  # both in fp32, and either one cast for a moment, too
        peak = single + queries * FP32_BYTES
        gradients = single + narrow + drops + queries * one.itemsize + max(drops + part, single)
    return always + 2 * keys_of_all * FP32_BYTES + max(peak, gradients)


def _mlp_backward(walk: Walk, model: ModelConfig, one: Pass, width: int) -> None:
    """See `kernels/mlp.py`. Its input's gradient remains."""
    activated, up_width = one.size(width), 2 * width if model.gated else width
    up_output = one.size(up_width)
    if one.level == "full":
        walk.make(up_output)
    again, in_place = one.level != "none", one.kernels.triton
    walk.make(activated)  # its gradient
    walk.make(0 if in_place or not again else activated, moment=activated if model.gated and not in_place else 0)
    if not (in_place and again):  # the gradient's memory takes what is made again
        walk.drop(activated)
    walk.make(0, moment=_weight_gradient(one, model.hidden_size, width))
    if again:
        walk.drop(activated)
    walk.make(0, moment=_weight_gradient(one, up_width, model.hidden_size))
    walk.make(one.size(model.hidden_size))
    walk.drop(up_output if one.level == "full" else 0)


def _norm_forward(model: ModelConfig, one: Pass, read: int, written: int) -> int:
    """Momentary bytes beside the output: the references compute in fp32 tensors of their own. `read`, `written`: bytes
    of input and output.
    """
    single = one.tokens * model.hidden_size * FP32_BYTES
    if not one.cast_itemsize or one.kernels.triton or written == single:
        return 0
    return single * (1 if read == single or model.normalization_type == "rms_norm" else 2)


def _norm_backward(
    walk: Walk, model: ModelConfig, one: Pass, read: int, written: int, adds: bool = False, branch: int = 0
) -> None:
    """The gradient of its input, of `read` bytes, takes the place of its output's; `adds`: that of the sum is added.

    `branch`: bytes of another gradient, which remains, too.
    """
    single = one.tokens * model.hidden_size * FP32_BYTES
    moment = 0
    if one.cast_itemsize and not one.kernels.triton:
        if read != single:
            moment = 4 * single - read if adds else 3 * single
        elif written != single:
            moment = single
    walk.make(read, moment)
    walk.make(branch)
    walk.drop(written)


def _head_norm_backward(model: ModelConfig, one: Pass, query: int) -> int:
    """Momentary bytes of the norm of the queries; the references compute in fp32 tensors of their own."""
    if one.kernels.triton:
        return 0
    single = one.tokens * query * FP32_BYTES
    if one.cast_itemsize:
        return 3 * single + one.size(query)
    return single if model.normalization_type == "rms_norm" else 3 * single


def _rotation(model: ModelConfig, one: Pass, query: int) -> int:
    """Momentary bytes while the gradient of the queries is rotated back: of one half, in another dtype of all."""
    if not model.use_rotary_embeddings or one.kernels.triton:
        return 0
    assert model.kv_channels is not None
    half = query // model.kv_channels * (model.rotated_channels // 2)
    return (3 if one.cast_itemsize else 1) * one.tokens * half * FP32_BYTES


def _weight_gradient(one: Pass, rows: int, columns: int) -> int:
    """Momentary bytes: a gradient in another dtype than its buffer's is made first and added then."""
    return min(rows, temporary_rows(columns)) * columns * one.itemsize if one.makes_weight_gradients else 0
