"""Bytes that layers need for a moment, beyond what they save: the peaks of their forward and backward passes.

Each function walks through a pass in the order in which `kernels/` allocates and frees large tensors, those inside of
torch's operations included. Small tensors and the workspaces of libraries are left out, so the result is close, not
exact: within 0.5 percent of a step's peak, or 3 percent where attention is most of a block.

Why formulas: a step on tensors without values gives the same peaks exactly on a CPU, but takes 0.2 s for 4 blocks, 30
times as long as a plan, and does not know what Triton kernels allocate unless each gets a stand-in: formulas again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.kernels.attention.blocks import chunks_of, last_blocks, rows_of_a_block, scores_at_a_time
from megatron_lite.kernels.attention.cpu import piece_length
from megatron_lite.kernels.cross_entropy import held_logits, reference_rows
from megatron_lite.kernels.products import block_rows, temporary_rows
from megatron_lite.planner.activations import FP32_BYTES, INT64_BYTES, Saved, Sizes, statistics_bytes


class Walk:
    """Bytes that a pass has allocated beyond those that were there at its start: `live` now, `peak` so far."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def allocate(self, size: int, temporary: int = 0) -> None:
        """Allocate a tensor of `size` bytes; `temporary` bytes exist only while it is computed."""
        self.peak = max(self.peak, self.live + size + temporary)
        self.live += size

    def free(self, *sizes: int) -> None:
        """Free tensors of these sizes, those from before the pass included."""
        self.live -= sum(sizes)


@dataclass(frozen=True)
class Peaks:
    """Bytes of one layer and one micro-batch beyond what all layers keep."""

    forward: int
    backward: int  # beyond the gradient of the layer's output, too


def peaks_by_layer(sizes: Sizes, saved: Sequence[Saved], adds: bool) -> list[Peaks]:
    """Peaks of the embedding, each block and the head, as if all their parameters were trained.

    saved: the bytes of each layer without block recomputation (`saved_by_layer`). adds: the buffers hold gradients of
    an earlier micro-batch.
    """
    blocks, alike = list[Peaks](), dict[tuple[str, int, bool], Peaks]()
    for index, (level, block) in enumerate(zip(sizes.levels, saved[1:-1], strict=True)):
        is_recomputed = index < sizes.recompute_layers
        key = level, id(block), is_recomputed
        if key not in alike:
            plain = Peaks(_block_forward(sizes, level, block), _block_backward(sizes, level, block, adds))
            alike[key] = _recomputed(sizes, block, plain) if is_recomputed else plain
        blocks.append(alike[key])
    return [_embedding(sizes), *blocks, _head(sizes, adds)]


def evaluation_peaks(sizes: Sizes) -> list[int]:
    """Peaks of the embedding, each block and the head, beyond their input, in a pass that saves nothing."""
    head = Walk()
    head.allocate(sizes.hidden, temporary=_norm_temporaries(sizes, sizes.stream, sizes.hidden))
    head.allocate(_gathered_for_loss(sizes))
    head.allocate(*_logits(sizes))
    return [_embedding_forward(sizes).peak, *[_block_evaluation(sizes)] * sizes.model.num_layers, head.peak]


def largest_temporaries(sizes: Sizes) -> int:
    """Bytes of the largest tensors of a micro-batch that come and go: u and z of an MLP, or the logits of a chunk."""
    return max(sizes.u + sizes.z, _logits(sizes)[0])


def _recomputed(sizes: Sizes, saved: Saved, plain: Peaks) -> Peaks:
    """A recomputed block: its backward pass saves all but the input again, and holds a second output.

    The temporaries of its first forward pass never make the peak: the backward pass has the same, and more.
    """
    saved_again = saved.total() - sizes.stream if saved else 0
    return Peaks(plain.forward, saved_again + max(plain.forward, sizes.stream + plain.backward))


def _embedding(sizes: Sizes) -> Peaks:
    """Lookup, positions, norm and dropout; backward down to the rows' gradient in the dtype of the gradient buffer."""
    model, stream = sizes.model, sizes.stream
    dropped = stream if model.embedding_dropout else 0
    saved = stream if model.input_embedding_norm else 0
    forward, backward = _embedding_forward(sizes), Walk()
    forward.allocate(dropped)
    if model.input_embedding_norm:
        backward.allocate(dropped)
        backward.free(dropped)  # the mask
        _norm_backward(backward, sizes, stream, stream)
        backward.free(dropped, saved)
    tokens = sizes.tokens if sizes.splits_vocabulary else sizes.residual_tokens
    if sizes.splits_vocabulary:  # the gradient of all tokens, then without those of other ranks
        whole = tokens * model.hidden_size * sizes.residual_itemsize
        backward.allocate(whole, temporary=whole if sizes.splits_tokens else 0)
    if sizes.grad_itemsize != sizes.residual_itemsize and not sizes.kernels.triton:
        backward.allocate(tokens * model.hidden_size * sizes.grad_itemsize)
    return Peaks(forward.peak - saved, backward.peak)


def _embedding_forward(sizes: Sizes) -> Walk:
    """The embedding up to its dropout."""
    model, stream, walk = sizes.model, sizes.stream, Walk()
    rows = sizes.of_loss  # of the table of tokens, which is split as the head's is
    walk.allocate(rows)
    if rows != sizes.hidden:
        walk.allocate(sizes.hidden)
    if stream != sizes.hidden:
        walk.allocate(stream)
        walk.free(sizes.hidden)
    walk.free(rows if rows != sizes.hidden else 0)
    if model.use_position_embeddings:
        walk.allocate(stream, temporary=sizes.hidden if sizes.splits_tokens else 0)
        walk.free(stream)
    if model.input_embedding_norm:
        walk.allocate(stream, temporary=_norm_temporaries(sizes, stream, stream))
    return walk


def _head(sizes: Sizes, adds: bool) -> Peaks:
    """The norm, then logits and their gradient chunk by chunk: see `kernels/cross_entropy.py`."""
    model, forward, backward = sizes.model, Walk(), Walk()
    forward.allocate(sizes.hidden, temporary=_norm_temporaries(sizes, sizes.stream, sizes.hidden))
    forward.allocate(_gathered_for_loss(sizes))
    forward.allocate(*_logits(sizes))
    entries, chunk = _entries_of_a_block(sizes), min(sizes.chunk_tokens, sizes.loss_tokens)
    if sizes.is_half and entries < sizes.vocabulary_entries:  # several blocks: fp32 sum of the hidden states' gradient
        forward.allocate(chunk * model.hidden_size * FP32_BYTES)
    into_hidden = _copies(sizes, chunk, entries, model.hidden_size, results=int(entries == sizes.vocabulary_rows))
    again = adds or chunk < sizes.loss_tokens
    into_weight = _weight_gradient(sizes, entries, model.hidden_size, again, tokens=chunk)
    forward.allocate(0, temporary=max(into_hidden, into_weight))
    if sizes.of_loss != sizes.hidden:
        backward.allocate(sizes.hidden)
        backward.free(sizes.of_loss)
    _norm_backward(backward, sizes, sizes.stream, sizes.hidden)
    return Peaks(forward.peak, backward.peak)


def _gathered_for_loss(sizes: Sizes) -> int:
    """Bytes of the head's input of all tokens, beside that of the rank's own, and of labels as rows of its table."""
    return sizes.gathered + sizes.tokens * INT64_BYTES if sizes.splits_vocabulary else 0


def _logits(sizes: Sizes) -> tuple[int, int]:
    """Bytes of the logits of a chunk, and of the temporaries of the loss."""
    model, kernels = sizes.model, sizes.kernels
    rows, columns = held_logits(
        sizes.loss_tokens, sizes.vocabulary_rows, sizes.chunk_tokens, kernels.cross_entropy_block_size
    )
    logits = rows * columns * sizes.itemsize
    product = _copies(sizes, rows, model.hidden_size, _entries_of_a_block(sizes))
    if kernels.cross_entropy != "torch":
        return logits, product
    entries = min(_entries_of_a_block(sizes), sizes.vocabulary_entries)
    fp32_rows = min(rows, reference_rows(entries, "cuda" if sizes.on_gpu else "cpu"))
    # The logits in fp32, also to keep them for the gradient, which waits for other ranks; and the capped logits.
    keeps = sizes.splits_vocabulary and entries == sizes.vocabulary_entries
    copies = int(sizes.is_half or keeps) + bool(model.logit_soft_cap)
    return logits, max(product, copies * fp32_rows * entries * FP32_BYTES)


def _entries_of_a_block(sizes: Sizes) -> int:
    """Entries of the vocabulary, padding included, whose logits exist at a time."""
    return min(sizes.kernels.cross_entropy_block_size or sizes.vocabulary_rows, sizes.vocabulary_rows)


def _block_forward(sizes: Sizes, level: str, saved: Saved) -> int:
    """Tensors that the level of recomputation does not save, the output of a branch, and the output of the block."""
    hidden, stream, hybrid, walk = sizes.hidden, sizes.stream, sizes.model.hybrid_norm, Walk()
    hidden_size = sizes.model.hidden_size
    if level == "full":
        walk.allocate(sizes.u)
    up = sizes.gathered + _copies(sizes, sizes.tokens, hidden_size, sizes.u_channels)
    walk.allocate(0, temporary=max(0, up - saved["MLP activations"]))  # which do not exist yet
    if level != "none":
        walk.allocate(sizes.z)
    down = _copies(sizes, sizes.tokens, sizes.z_channels, hidden_size)
    # The output, unless the branch norm saves it, beside the parts of its sum if these have more tokens.
    walk.allocate(0 if hybrid else hidden, temporary=sizes.gathered)
    walk.allocate(0, temporary=down + max(0, sizes.gathered - hidden))
    walk.free(walk.live)
    walk.allocate(hidden, temporary=_norm_temporaries(sizes, hidden, hidden) if hybrid else 0)
    walk.allocate(stream)
    if sizes.attention != "math":
        return walk.peak
    # During attention, what the layer saves later does not exist yet.
    later = sum(saved[kind] for kind in ("MLP up outputs", "MLP activations", "dropout masks")) + stream
    later += (saved["linear inputs"] + saved["norm statistics"]) // 2  # those of the MLP
    return max(walk.peak, _attention_temporaries(sizes, backward=False) - later)


def _block_evaluation(sizes: Sizes) -> int:
    """A block that saves nothing: a function's input lives until its output is there."""
    model, hidden, stream, walk = sizes.model, sizes.hidden, sizes.stream, Walk()
    into_norm = _norm_temporaries(sizes, stream, hidden)
    rotation = _rotation_temporaries(sizes, sizes.heads + sizes.key_heads)
    context = sizes.of(sizes.query_channels)
    normalized = sizes.of(sizes.query_channels, sizes.key_channels) if model.qk_layernorm else 0
    walk.allocate(hidden, temporary=into_norm)
    walk.allocate(sizes.gathered)
    projected = _copies(sizes, sizes.tokens, model.hidden_size, sizes.query_channels + 2 * sizes.key_channels)
    walk.allocate(sizes.query_key_value, temporary=projected)
    walk.free(sizes.gathered)
    walk.allocate(0, temporary=0 if normalized else rotation)
    if normalized:
        walk.allocate(normalized, temporary=max(rotation, _head_norm_temporaries(sizes)))
    math = sizes.attention == "math"
    pieces = 0 if sizes.on_gpu else _pieces(sizes, backward=False)
    walk.allocate(context, temporary=_attention_temporaries(sizes, backward=False) if math else pieces)
    # The branch, which becomes the sum if its dtype is the stream's.
    walk.allocate(sizes.gathered, temporary=_copies(sizes, sizes.tokens, sizes.query_channels, model.hidden_size))
    walk.allocate(hidden)
    walk.free(sizes.query_key_value, normalized, context, sizes.gathered)
    _branch_norm(walk, sizes)
    if stream != hidden:
        walk.allocate(stream)
    walk.allocate(hidden, temporary=into_norm)
    walk.free(hidden, hidden if stream != hidden else 0)
    walk.allocate(sizes.gathered)
    walk.allocate(sizes.u, temporary=_copies(sizes, sizes.tokens, model.hidden_size, sizes.u_channels))
    walk.free(sizes.gathered)
    walk.allocate(sizes.z)
    walk.allocate(sizes.gathered, temporary=_copies(sizes, sizes.tokens, sizes.z_channels, model.hidden_size))
    walk.allocate(hidden)
    walk.free(sizes.u, sizes.z, sizes.gathered)
    _branch_norm(walk, sizes)
    walk.allocate(stream)
    return walk.peak


def _branch_norm(walk: Walk, sizes: Sizes) -> None:
    """The norm at the end of a branch: its output replaces its input."""
    if sizes.model.hybrid_norm:
        walk.allocate(sizes.hidden, temporary=_norm_temporaries(sizes, sizes.hidden, sizes.hidden))
        walk.free(sizes.hidden)


def _block_backward(sizes: Sizes, level: str, saved: Saved, adds: bool) -> int:
    hidden, stream, walk = sizes.hidden, sizes.stream, Walk()
    cast = hidden if stream != hidden else 0  # the gradient of a branch, a copy where the stream has another dtype
    walk.allocate(cast)
    gradient = _end_of_branch_backward(walk, sizes, cast)
    _mlp_backward(walk, sizes, level, adds)
    half_of_inputs = saved["linear inputs"] // 2  # those of the MLP; the other half is the attention's
    walk.free(gradient, saved["MLP up outputs"], saved["MLP activations"], half_of_inputs)
    _norm_backward(walk, sizes, stream, hidden, adds=True, branch=cast)
    walk.free(saved["norm inputs"] // 2)
    gradient = _end_of_branch_backward(walk, sizes, cast)
    _attention_backward(walk, sizes, saved, gradient, adds)
    _norm_backward(walk, sizes, stream, hidden, adds=True)
    return walk.peak


def _end_of_branch_backward(walk: Walk, sizes: Sizes, gradient: int) -> int:
    """Dropout and norm of a branch. `gradient` and the result: bytes of its gradient, 0 while it is the stream's."""
    hidden = sizes.hidden
    if sizes.model.hidden_dropout > 0:
        walk.allocate(hidden)
        walk.free(hidden, gradient)  # the mask
        gradient = hidden
    if sizes.model.hybrid_norm:
        _norm_backward(walk, sizes, hidden, 0)
        walk.free(gradient, hidden)  # the saved input of the norm
        gradient = hidden
    return gradient


def _mlp_backward(walk: Walk, sizes: Sizes, level: str, adds: bool) -> None:
    """See `kernels/mlp.py` for u and z; the gradient of the MLP's input remains."""
    hidden_size, in_place = sizes.model.hidden_size, sizes.kernels.triton
    recomputes_z = level != "none"
    walk.allocate(2 * sizes.gathered)  # the gradient of the output, and the input
    if level == "full":
        walk.allocate(sizes.u, temporary=_copies(sizes, sizes.tokens, hidden_size, sizes.u_channels))
    walk.allocate(sizes.z, temporary=_copies(sizes, sizes.tokens, hidden_size, sizes.z_channels))  # dz
    du_temporary = sizes.z if sizes.model.gated and not in_place else 0
    walk.allocate(sizes.z if recomputes_z and not in_place else 0, temporary=du_temporary)
    if not (recomputes_z and in_place):  # otherwise z is written over dz
        walk.free(sizes.z)
    biased = sizes.model.add_mlp_biases
    walk.allocate(0, temporary=_weight_gradient(sizes, hidden_size, sizes.z_channels, adds))
    walk.allocate(0, temporary=_bias_gradient(sizes, hidden_size, biased))
    if recomputes_z:
        walk.free(sizes.z)
    product = _copies(sizes, sizes.tokens, sizes.u_channels, hidden_size)
    weight = _weight_gradient(sizes, sizes.u_channels, hidden_size, adds)
    _input_gradient(walk, sizes, product, max(weight, _bias_gradient(sizes, sizes.u_channels, biased)))
    walk.free(2 * sizes.gathered)
    if level == "full":
        walk.free(sizes.u)


def _input_gradient(walk: Walk, sizes: Sizes, product: int, weight: int) -> None:
    """The gradient of a layer's input, then of its weight, then the sum of the former over ranks.

    product, weight: bytes of temporaries.
    """
    walk.allocate(sizes.whole_hidden, temporary=product)
    walk.allocate(0, temporary=weight)
    if sizes.splits_tokens:
        walk.allocate(sizes.hidden)
        walk.free(sizes.whole_hidden)


def _attention_backward(walk: Walk, sizes: Sizes, saved: Saved, gradient: int, adds: bool) -> None:
    """See `kernels/attention/` and `kernels/rotary.py`; the gradient of the attention's input remains."""
    model, query, key = sizes.model, sizes.query_channels, sizes.key_channels
    context, gradients = sizes.of(query), sizes.query_key_value
    weight = _weight_gradient(sizes, model.hidden_size, query, adds)
    bias = _bias_gradient(sizes, model.hidden_size, model.add_linear_biases)
    walk.allocate(sizes.gathered)
    walk.allocate(context, temporary=_copies(sizes, sizes.tokens, model.hidden_size, query))  # its gradient
    walk.allocate(0, temporary=max(weight, bias))
    walk.free(gradient, sizes.gathered)  # of the branch
    if sizes.attention == "math":
        walk.free(saved["attention outputs"])
        walk.allocate(gradients, temporary=_attention_temporaries(sizes, backward=True))
    else:
        # GPU kernels sum the queries' gradients in fp32, and compute the keys' and values' per query head.
        per_head = sizes.of(query, query) if key != query else 0
        on_gpu = per_head + sizes.tokens * query * FP32_BYTES
        walk.allocate(gradients, temporary=on_gpu if sizes.on_gpu else _pieces(sizes, backward=True))
        walk.free(saved["attention outputs"])
    walk.free(context, saved["query, key, value"], saved["attention statistics"])
    # Also counted where `kernels/attention/cpu.py` has joined the gradients, and no second memory is needed.
    walk.allocate(gradients, temporary=_rotation_temporaries(sizes, sizes.heads))
    if model.qk_layernorm:
        walk.allocate(0, temporary=_query_norm_backward_temporaries(sizes))
        walk.free(saved["normalized query, key"])
    walk.free(gradients)
    weight = _weight_gradient(sizes, query + 2 * key, model.hidden_size, adds)
    bias = _bias_gradient(sizes, query + 2 * key, model.add_qkv_biases)
    walk.allocate(sizes.gathered)
    product = _copies(sizes, sizes.tokens, query + 2 * key, model.hidden_size)
    _input_gradient(walk, sizes, product, max(weight, bias))
    walk.free(gradients, sizes.gathered)


def _pieces(sizes: Sizes, backward: bool) -> int:
    """Bytes of a piece of `kernels/attention/cpu.py`: its output and a mask, backward the gradients from its keys."""
    channels, length = sizes.model.kv_channels, sizes.length
    piece = piece_length(sizes.batch * sizes.heads * length**2, length, channels, backward)
    if piece == length:
        return 0
    if backward:  # the first piece's, which all queries see
        return sizes.of(sizes.query_channels) + sizes.of(2 * sizes.key_channels) * piece // length
    return sizes.of(sizes.query_channels) * piece // length + piece * length * FP32_BYTES


def _attention_temporaries(sizes: Sizes, backward: bool) -> int:
    """Temporaries of `kernels/attention/blocks.py` at the block with the most scores, in its letters."""
    model, rows = sizes.model, rows_of_a_block(sizes.on_gpu)
    last = last_blocks(sizes.length, model.window_size, rows)
    at_a_time = scores_at_a_time(sizes.on_gpu)
    most = 1 + at_a_time // max(block.scores for block in last)  # samples in a chunk; more make chunks like the first
    lengths = [sizes.length] * min(sizes.batch, most)
    chunks = chunks_of(lengths, model.window_size, sizes.heads, sizes.key_heads, rows, at_a_time)
    chunk = max(chunks, key=lambda chunk: chunk.pairs)
    heads, rows = chunk.pairs * (sizes.heads // sizes.key_heads), min(rows, sizes.length)
    narrow = sizes.itemsize if sizes.on_gpu else FP32_BYTES  # bytes per element of the later products
    scores, queries = heads * max(block.scores for block in last), heads * rows * model.kv_channels
    keys = chunk.pairs * sizes.length * model.kv_channels
    part = chunk.pairs * max(block.end - block.low for block in last) * model.kv_channels  # of dK or dV
    s_bytes, p_bytes = scores * FP32_BYTES, scores * narrow
    gathers = chunk.pairs > chunk.documents > 1
    always = rows**2 * FP32_BYTES  # the triangle, then keys and values
    always += keys * FP32_BYTES * (gathers or sizes.is_half) + keys * narrow * (gathers or narrow != sizes.itemsize)
    regroups = chunk.documents > 1 or heads != chunk.pairs
    q_bytes = queries * FP32_BYTES * (regroups or sizes.is_half)
    do_bytes = queries * narrow * (regroups or narrow != sizes.itemsize)
    mask = p_bytes if model.attention_dropout > 0 else 0
    cast = p_bytes if narrow != FP32_BYTES else 0  # P beside S
    if not backward:
        return always + max(s_bytes + max(q_bytes, cast), p_bytes + max(mask, queries * narrow))
    always += 2 * keys * FP32_BYTES + q_bytes  # dK and dV
    if cast:
        always += keys * narrow * (gathers and not model.attention_softmax_in_fp32)
    kept = s_bytes if model.attention_softmax_in_fp32 else p_bytes  # P in the way back to the scores, and dS
    dropped = mask + (p_bytes if mask else 0)
    casts = kept + p_bytes if kept != p_bytes else 0
    products = kept + do_bytes + max(dropped + part * narrow, mask + max(p_bytes + casts, kept))
    return always + max(s_bytes + cast, products, kept + max(part, queries) * narrow)


def _norm_temporaries(sizes: Sizes, read: int, written: int) -> int:
    """Bytes beside the output of a norm, whose reference computes in fp32. `read`, `written`: of input and output."""
    fp32 = sizes.hidden_fp32
    if not sizes.is_half or sizes.kernels.triton or written == fp32:
        return 0
    return fp32 if read == fp32 or sizes.model.normalization_type == "rms_norm" else 2 * fp32


def _norm_backward(walk: Walk, sizes: Sizes, read: int, written: int, adds: bool = False, branch: int = 0) -> None:
    """Replace the gradient of a norm's output (`written` bytes) by the gradient of its input (`read` bytes).

    adds: the gradient of the residual stream is added. branch: bytes of another gradient, which remains.
    """
    fp32, temporary = sizes.hidden_fp32, 0
    if sizes.is_half and not sizes.kernels.triton:
        if read != fp32:
            temporary = 4 * fp32 - read if adds else 3 * fp32
        elif written != fp32:
            temporary = fp32
    walk.allocate(read, temporary)
    walk.allocate(branch)
    walk.free(written)


def _head_norm_temporaries(sizes: Sizes) -> int:
    """Bytes beside the outputs of the norms of queries, then of keys, whose reference computes in fp32."""
    if sizes.kernels.triton:
        return 0
    copies = 1 if sizes.model.normalization_type == "rms_norm" else 2
    element = copies * FP32_BYTES + (sizes.itemsize if sizes.is_half else 0)
    queries, keys = (sizes.tokens * channels * element for channels in (sizes.query_channels, sizes.key_channels))
    of_queries, of_both = (
        statistics_bytes(sizes, sizes.tokens * heads) for heads in (sizes.heads, sizes.heads + sizes.key_heads)
    )
    return max(queries + of_queries, keys + of_both)


def _query_norm_backward_temporaries(sizes: Sizes) -> int:
    """Bytes of the norm of the queries, whose reference computes in fp32."""
    if sizes.kernels.triton:
        return 0
    fp32 = sizes.tokens * sizes.query_channels * FP32_BYTES
    if sizes.is_half:
        return 3 * fp32 + sizes.of(sizes.query_channels)
    return fp32 if sizes.model.normalization_type == "rms_norm" else 3 * fp32


def _rotation_temporaries(sizes: Sizes, heads: int) -> int:
    """Bytes while `heads` heads are rotated: one half of the rotated channels, or three in fp32 from another dtype."""
    if not sizes.model.use_rotary_embeddings or sizes.kernels.triton:
        return 0
    half = sizes.tokens * heads * (sizes.model.rotated_channels // 2) * FP32_BYTES
    return 3 * half if sizes.is_half else half


def _weight_gradient(sizes: Sizes, rows: int, columns: int, adds: bool, tokens: int | None = None) -> int:
    """Bytes of the temporary for a weight gradient whose buffer has another dtype: see `kernels/products.py`.

    adds: the gradient is added to an earlier one, for which torch copies the temporary in the buffer's dtype.
    """
    is_narrow = sizes.itemsize == sizes.grad_itemsize
    if sizes.copies_factors:
        return _copies(sizes, rows, tokens or sizes.tokens, columns, results=(1 + adds) if is_narrow else 0)
    if sizes.on_gpu or is_narrow:
        return 0
    itemsize = sizes.itemsize + (sizes.grad_itemsize if adds else 0)
    return min(rows, temporary_rows(columns)) * columns * itemsize


def _copies(sizes: Sizes, rows: int, inner: int, columns: int, results: int = 1) -> int:
    """Bytes of the fp32 copies for a product (rows, inner) (inner, columns) where a CPU computes it from such copies.

    results: copies of a block of the result.
    """
    if not sizes.copies_factors:
        return 0
    wide = min(columns, block_rows(inner))
    long = min(rows, block_rows(max(inner, wide)))
    factors = inner * wide * (1 + (wide < columns)) + long * inner  # the next block beside the one before
    return FP32_BYTES * (factors + results * long * wide)


def _bias_gradient(sizes: Sizes, channels: int, biased: bool) -> int:
    """Bytes of torch's copy for the sum over tokens of a gradient in another dtype."""
    if sizes.on_gpu or not biased or sizes.itemsize == sizes.grad_itemsize:
        return 0
    return sizes.tokens * channels * sizes.grad_itemsize
