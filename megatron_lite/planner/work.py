"""The work of a training step on one rank: products, attention, and passes over tensors, with their sizes.

Products are measured (`stage_costs.py`). A fused kernel is one pass; views and tables are free. `work_time.py`
predicts the time of this work.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch

from megatron_lite.config import Config
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.model.embedding_and_head import chunk_tokens
from megatron_lite.parameter import DTYPES

FP32_BYTES = 4
NEWTON_SCHULZ_STEPS = 5
# Bytes that an update reads and writes per element of a shard: gradient, weight and moments, without rounded weights.
UPDATE_BYTES = {"adamw": 28, "muon": 20, "lion": 20, "sgd": 20}
# Elements that a plain or gated activation reads and writes for each element of its output.
ACTIVATION_TENSORS = {"forward": (2, 3), "backward": (3, 5)}


class Product(NamedTuple):
    """One of a linear layer's three products, `times` times: x W^T, dy W or dy^T x."""

    kind: str  # "forward", "input gradient" or "weight gradient"
    tokens: int
    inputs: int
    outputs: int
    times: float = 1

    @property
    def flops(self) -> float:
        """Total FLOPs."""
        return 2.0 * self.times * self.tokens * self.inputs * self.outputs


class Attention(NamedTuple):
    """Attention of one block and micro-batch, in one direction."""

    backward: bool
    backend: str  # of `kernels/attention/choice.py`
    heads: int  # of all samples
    length: int  # positions
    channels: int
    window: int  # at most `length`

    @property
    def flops(self) -> float:
        """FLOPs within causal mask and window; the backward pass has 5 products."""
        keys = self.window * (1 - self.window / (2 * self.length))
        return (10.0 if self.backward else 4.0) * self.heads * self.length * self.channels * keys


class Pass(NamedTuple):
    """One pass over tensors."""

    kind: str
    elements: float
    bytes_per_element: float  # read and written

    @property
    def num_bytes(self) -> float:
        """Bytes read and written."""
        return self.elements * self.bytes_per_element


Item = Product | Attention | Pass


class MicroBatchWork:
    """Attention and passes of a micro-batch on one rank.

    trained: names of the trainable parameters.
    """

    def __init__(self, config: Config, trained: Collection[str], device_type: str) -> None:
        assert config.batch.micro_batch_size and config.model.ffn_hidden_size, "resolved"
        self.config, self.model, self.device = config, config.model, torch.device(device_type)
        self.samples, self.length = config.batch.micro_batch_size, config.batch.sequence_length
        options, ranks = config.distributed, config.distributed.tensor_parallel
        self.tokens = self.samples * self.length
        # Tokens per tensor-parallel rank, in the residual stream and in the loss.
        residual_tokens = self.tokens // ranks if options.sequence_tensor_parallel else self.tokens
        self.loss_tokens = self.tokens if options.parallel_embeddings else residual_tokens
        self.vocabulary_rows = self.model.vocabulary_rows(ranks if options.parallel_embeddings else 1)
        self.itemsize = DTYPES[options.training_dtype].itemsize
        self.residual_itemsize = FP32_BYTES if self.model.full_precision_residual else self.itemsize
        self.kernels = choose_kernels(config, self.device, planned=True)
        self.hidden = residual_tokens * self.model.hidden_size
        self.heads = self.model.num_attention_heads // ranks
        self.query = self.heads * self.model.kv_channels
        self.key = max(1, self.model.head_groups // ranks) * self.model.kv_channels
        self.ffn = self.model.ffn_hidden_size // ranks
        parts = (itertools.accumulate(name.split("."), "{}.{}".format) for name in trained)
        self.trained = {*trained, *(f"{part}." for part in itertools.chain(*parts))}  # and their layers
        first = [index for index in range(self.model.num_layers) if f"blocks.{index}." in self.trained]
        self.first = -1 if "embedding." in self.trained else first[0] if first else self.model.num_layers

    def items(self) -> Iterator[Item]:
        """Yield the work of all layers, forward and backward."""
        yield from self._embedding()
        forward, backward = list(self._block("forward")), list(self._block("backward"))
        for index, level in enumerate(self.config.performance.mlp_levels(self.model.num_layers)):
            yield from forward
            if index < self.first:
                continue
            if index < self.config.performance.recompute_layers:
                yield from forward
            if level != "none":
                yield Pass("copy", self.tokens * self.ffn, self.itemsize)
            for name, outputs in self._outputs():
                if f"blocks.{index}.{name}.bias" in self.trained:
                    yield Pass("bias gradient", self.tokens * outputs, self.itemsize)
            yield from backward
        yield from self._head()

    def _embedding(self) -> Iterator[Item]:
        """Yield the look-up, positions, norm and dropout."""
        model, stream = self.model, self.residual_itemsize
        rows = self.loss_tokens * model.hidden_size  # the table is split as the head's is
        yield Pass("embedding forward", rows, self.itemsize + stream)
        if model.use_position_embeddings:
            yield Pass("sum", self.hidden, 2 * stream)
        if "embedding." in self.trained:
            yield Pass("embedding backward", rows, stream + 2 * FP32_BYTES)
            if model.use_position_embeddings:
                yield Pass("bias gradient", self.hidden, stream)
        for direction in ("forward", "backward")[: 1 + ("embedding." in self.trained)]:
            if model.input_embedding_norm:
                yield self._norm(direction, self.hidden)
            if model.embedding_dropout:
                yield self._dropout(direction, self.hidden, stream)

    def _block(self, direction: str) -> Iterator[Item]:
        """Yield one pass through a block, without products and what depends on its index."""
        model, e = self.model, self.itemsize
        yield self._norm(direction, (4 if model.hybrid_norm else 2) * self.hidden)
        rotated = self.tokens * (self.query + self.key)
        if model.qk_layernorm:
            yield self._norm(direction, rotated)
        if model.use_rotary_embeddings:
            yield Pass(f"rotation {direction}", rotated * model.rotated_channels / model.kv_channels, 2 * e)
        if direction == "forward":
            yield Pass("sum", 2 * self.hidden, 2 * self.residual_itemsize + e)
        else:  # the heads' gradients are joined in one tensor
            copied = 0 if model.use_rotary_embeddings else rotated
            yield Pass("copy", copied + self.tokens * self.key, 2 * e)
        backend = "math" if model.attention_dropout else self.kernels.attention
        window = min(model.window_size or self.length, self.length)
        heads = self.samples * self.heads
        yield Attention(direction == "backward", backend, heads, self.length, model.kv_channels, window)
        activation = f"{'gated ' if model.gated else ''}{model.activation_type} {direction}"
        yield Pass(activation, self.tokens * self.ffn, ACTIVATION_TENSORS[direction][model.gated] * e)
        if model.hidden_dropout:
            yield self._dropout(direction, 2 * self.hidden, self.residual_itemsize if direction == "forward" else e)

    def _head(self) -> Iterator[Item]:
        """Yield norm, logits and loss, chunk by chunk, with the gradients that the forward pass computes."""
        v, e = self.vocabulary_rows, self.itemsize
        yield self._norm("forward", self.hidden)
        if self.first < self.model.num_layers or "head." in self.trained:
            yield self._norm("backward", self.hidden)
        in_blocks = (self.kernels.cross_entropy_block_size or v) < v
        yield Pass("cross entropy", self.loss_tokens * v * (1.5 if in_blocks else 1), 2 * e)
        weight = "embedding.word." if self.model.tie_word_embeddings else "head.output."
        adds_in_products = e == FP32_BYTES or self.device.type == "cuda"
        if weight in self.trained and not adds_in_products:
            chunk = chunk_tokens(self.kernels.cross_entropy_splits, self.tokens, self.device, e)
            chunks = self.loss_tokens / min(chunk, self.loss_tokens)
            yield Pass("sum", (chunks - 1) * v * self.model.hidden_size, FP32_BYTES)

    def _outputs(self) -> Iterator[tuple[str, int]]:
        """Yield names and output channels of a block's linear layers."""
        yield "attention.query_key_value", self.query + 2 * self.key
        yield "attention.output", self.model.hidden_size
        yield "mlp.up", 2 * self.ffn if self.model.gated else self.ffn
        yield "mlp.down", self.model.hidden_size

    def _norm(self, direction: str, elements: float) -> Pass:
        reads = 1 if direction == "forward" else 3
        bytes_per_element = reads * self.residual_itemsize + self.itemsize
        return Pass(f"{self.model.normalization_type} {direction}", elements, bytes_per_element)

    def _dropout(self, direction: str, elements: int, itemsize: int) -> Pass:
        return Pass(f"dropout {direction}", elements, (4 if direction == "forward" else 3) * itemsize)


def update_work(config: Config, numel: int, world_size: int) -> Iterator[Item]:
    """Yield gradient norm, optimizer rule and weight averaging for a rank's `numel` trained elements."""
    name, e = config.optimizer.optimizer, DTYPES[config.distributed.training_dtype].itemsize
    yield Pass("gradient norm", numel, FP32_BYTES)
    yield Pass(f"update {name}", numel, UPDATE_BYTES[name] + (e if e != FP32_BYTES else 0))
    if config.averaging.enabled:
        yield Pass("averages", numel, 3 * FP32_BYTES)
    if name == "muon":
        model = config.model
        channels = (model.num_attention_heads + 2 * model.head_groups) * model.kv_channels
        h, f = model.hidden_size, model.ffn_hidden_size
        shapes = [(h, channels), (h, h), *[(h, f)] * (3 if model.gated else 2)]
        for rows, columns in shapes:
            r, c, count = min(rows, columns), max(rows, columns), NEWTON_SCHULZ_STEPS * model.num_layers / world_size
            yield Product("forward", r, c, r, count)
            yield Product("forward", r, r, r, count)
            yield Product("forward", r, r, c, count)
