"""The work of a training step on one rank: products, attention, and passes over tensors, with their sizes.

The products are those that `stage_costs.py` has seen. What a fused kernel does at once counts once as a pass; views and
tables count nothing. See `work_time.py` for the time that the work takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_lite.config import Config
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.model.embedding_and_head import chunk_tokens
from megatron_lite.parameter import DTYPES

FP32_BYTES = 4
NEWTON_SCHULZ_STEPS = 5
# Bytes that an update reads and writes per element of a shard, without the weights in another dtype: gradient, weight,
# moments.
UPDATE_BYTES = {"adamw": 28, "muon": 20, "lion": 20, "sgd": 20}
# Tensors that an activation reads and writes, in elements per element of its output: forward, backward.
ACTIVATION_TENSORS = {False: (2, 3), True: (3, 5)}


class Product(NamedTuple):
    """One of the three products of a linear layer, `times` times: x W^T, dy W or dy^T x."""

    kind: str  # "forward", "input gradient" or "weight gradient"
    tokens: int
    inputs: int
    outputs: int
    times: float = 1

    @property
    def flops(self) -> float:
        """Additions and multiplications, of all of them."""
        return 2.0 * self.times * self.tokens * self.inputs * self.outputs


class Attention(NamedTuple):
    """Scores and context of one block and micro-batch, in one direction."""

    backward: bool
    backend: str  # of `kernels/attention/choice.py`
    heads: int  # of all samples
    length: int  # positions
    channels: int
    window: int  # at most `length`

    @property
    def flops(self) -> float:
        """Additions and multiplications that the causal mask and the window leave; the backward pass has 5 products."""
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


@dataclass(frozen=True)
class StepWork:
    """The work of one rank in a step."""

    micro_batch: tuple[Item, ...]  # of one
    update: tuple[Item, ...]  # once a step
    micro_batches: int
    blocks: int  # passes through blocks in a micro-batch; a recomputed block counts a third more


def work_of_step(
    config: Config, products: Iterable[Product], trained: Collection[str], numel: int, world_size: int, device_type: str
) -> StepWork:
    """Return the work of one rank.

    products: of a micro-batch. trained: names of the parameters that are not frozen. numel: elements of the rank's
    trained shards.
    """
    walk = _Walk(config, trained, device_type)
    recomputed = config.performance.recompute_layers
    assert config.batch.sequential_micro_batches, "resolved"
    return StepWork(
        (*products, *walk.embedding(), *walk.blocks(), *walk.head()),
        tuple(_update(config, numel, world_size)),
        config.batch.sequential_micro_batches,
        config.model.num_layers + recomputed // 3,
    )


def parts_of(names: Iterable[str]) -> set[str]:
    """Return the names, and the parts of the model they belong to: `blocks.0.mlp.`, `blocks.0.` and `blocks.`."""
    parts = set(names)
    for name in [*parts]:
        end = name.rfind(".") + 1
        while end and name[:end] not in parts:  # with a part, those around it are there, too
            parts.add(name[:end])
            end = name.rfind(".", 0, end - 1) + 1
    return parts


class _Walk:
    """A micro-batch on its way through the layers."""

    def __init__(self, config: Config, trained: Collection[str], device_type: str) -> None:
        assert config.batch.micro_batch_size, "resolved"
        self.config, self.model = config, config.model
        self.device = torch.device(device_type)
        self.samples, self.length = config.batch.micro_batch_size, config.batch.sequence_length
        options, self.ranks = config.distributed, config.distributed.tensor_parallel
        self.tokens = self.samples * self.length
        # Of a rank of a tensor-parallel group: in the residual stream, and with a loss.
        self.residual_tokens = self.tokens // self.ranks if options.sequence_tensor_parallel else self.tokens
        self.loss_tokens = self.tokens if options.parallel_embeddings else self.residual_tokens
        self.vocabulary_rows = self.model.vocabulary_rows(self.ranks if options.parallel_embeddings else 1)
        self.itemsize = DTYPES[config.distributed.training_dtype].itemsize
        self.residual_itemsize = FP32_BYTES if config.model.full_precision_residual else self.itemsize
        self.kernels = choose_kernels(config, self.device, planned=True)
        self.hidden = self.residual_tokens * self.model.hidden_size
        self.heads = self.model.num_attention_heads // self.ranks
        self.query = self.heads * self.model.kv_channels
        self.key = max(1, self.model.head_groups // self.ranks) * self.model.kv_channels
        assert self.model.ffn_hidden_size, "resolved"
        self.ffn = self.model.ffn_hidden_size // self.ranks
        self.trained = parts_of(trained)
        first = [index for index in range(self.model.num_layers) if f"blocks.{index}." in self.trained]
        self.first = -1 if "embedding." in self.trained else first[0] if first else self.model.num_layers

    # -- the three parts -------------------------------------------------------------------------------------------

    def embedding(self) -> Iterator[Item]:
        """Rows of the table, positions, norm and dropout."""
        model, stream = self.model, self.residual_itemsize
        backward = "embedding." in self.trained
        rows = self.loss_tokens * model.hidden_size  # the table is split as the head's is
        yield Pass("embedding forward", rows, self.itemsize + stream)
        if backward:
            yield Pass("embedding backward", rows, stream + 2 * FP32_BYTES)
        if model.use_position_embeddings:
            yield Pass("sum", self.hidden, 2 * stream)
            if backward:
                yield Pass("bias gradient", self.hidden, stream)
        if model.input_embedding_norm:
            yield from self._norm(self.hidden, backward)
        yield from self._dropout(model.embedding_dropout, backward)

    def blocks(self) -> Iterator[Item]:
        """Forward and backward passes of all blocks, with what is recomputed."""
        levels = self.config.performance.mlp_levels(self.model.num_layers)
        for index, level in enumerate(levels):
            forward = list(self._block_forward())
            yield from forward
            if index >= self.first:
                if index < self.config.performance.recompute_layers:
                    yield from forward
                yield from self._block_backward(index, level)

    def head(self) -> Iterator[Item]:
        """Norm, logits and loss, chunk by chunk, with the gradients that the forward pass computes."""
        model, e = self.model, self.itemsize
        h, v = model.hidden_size, self.vocabulary_rows
        block = min(self.kernels.cross_entropy_block_size or v, v)
        chunk = min(chunk_tokens(self.kernels.cross_entropy_splits, self.tokens, self.device, e), self.loss_tokens)
        chunks = self.loss_tokens / chunk
        backward = self.first < model.num_layers or "head." in self.trained
        yield from self._norm(self.hidden, backward)
        yield Pass("cross entropy", self.loss_tokens * v * (1 if block == v else 1.5), 2 * e)
        weight = "embedding.word." if model.tie_word_embeddings else "head.output."
        if weight in self.trained and not self._adds_in_products:
            yield Pass("sum", (chunks - 1) * v * h, FP32_BYTES)

    # -- a block -----------------------------------------------------------------------------------------------------

    def _block_forward(self) -> Iterator[Item]:
        model, e, stream = self.model, self.itemsize, self.residual_itemsize
        yield from self._norm(self.hidden, backward=False)
        yield from self._norm(self.hidden, backward=False)
        if model.hybrid_norm:
            yield from self._norm(2 * self.hidden, backward=False)
        yield from self._heads("forward")
        yield self._attention(backward=False)
        yield from self._activation("forward")
        yield Pass("sum", 2 * self.hidden, 2 * stream + e)
        for _ in range(2):
            yield from self._dropout(model.hidden_dropout, backward=False)

    def _block_backward(self, index: int, level: str) -> Iterator[Item]:
        model, part = self.model, f"blocks.{index}."
        for name, outputs in self._outputs():
            if f"{part}{name}.bias" in self.trained:
                yield Pass("bias gradient", self.tokens * outputs, self.itemsize)
        if level != "none":
            yield from self._activation("again")
        for count in [2, *([2] if model.hybrid_norm else [])]:
            yield self._norm_pass("backward", count * self.hidden)
        yield from self._heads("backward")
        yield self._attention(backward=True)
        yield from self._activation("backward")
        for _ in range(2):
            if model.hidden_dropout:
                yield Pass("dropout backward", self.hidden, 3 * self.itemsize)

    def _outputs(self) -> Iterator[tuple[str, int]]:
        """Yield names and output channels of a block's linear layers."""
        yield "attention.query_key_value", self.query + 2 * self.key
        yield "attention.output", self.model.hidden_size
        yield "mlp.up", 2 * self.ffn if self.model.gated else self.ffn
        yield "mlp.down", self.model.hidden_size

    def _attention(self, backward: bool) -> Attention:
        model = self.model
        backend = "math" if model.attention_dropout else self.kernels.attention
        window = min(model.window_size or self.length, self.length)
        return Attention(backward, backend, self.samples * self.heads, self.length, model.kv_channels, window)

    def _heads(self, direction: str) -> Iterator[Item]:
        """Rotation of queries and keys, and their norms; backward, gradients join in one tensor."""
        model, e = self.model, self.itemsize
        turned = self.tokens * (self.query + self.key)
        if model.qk_layernorm:
            yield self._norm_pass(direction, turned)
        if model.use_rotary_embeddings:
            yield Pass(f"rotation {direction}", turned * model.rotated_channels / model.kv_channels, 2 * e)
        if direction == "backward":
            still = 0.0 if model.use_rotary_embeddings else float(turned)
            yield Pass("copy", still + self.tokens * self.key, 2 * e)

    def _activation(self, direction: str) -> Iterator[Item]:
        """`again`: recomputed on the way through the backward pass."""
        model, e = self.model, self.itemsize
        forward, backward = ACTIVATION_TENSORS[model.gated]
        tensors = {"forward": forward, "backward": backward, "again": 1}[direction]
        name = f"{'gated ' if model.gated else ''}{model.activation_type}"
        elements = self.tokens * self.ffn
        if direction == "again":
            yield Pass("copy", elements, e)
        else:
            yield Pass(f"{name} {direction}", elements, tensors * e)

    def _norm(self, elements: int, backward: bool) -> Iterator[Item]:
        yield self._norm_pass("forward", elements)
        if backward:
            yield self._norm_pass("backward", elements)

    def _norm_pass(self, direction: str, elements: float) -> Pass:
        stream, e = self.residual_itemsize, self.itemsize
        sizes = {"forward": stream + e, "backward": 3 * stream + e}
        return Pass(f"{self.model.normalization_type} {direction}", elements, sizes[direction])

    def _dropout(self, probability: float, backward: bool) -> Iterator[Item]:
        if probability:
            yield Pass("dropout forward", self.hidden, 4 * self.residual_itemsize)
            if backward:
                yield Pass("dropout backward", self.hidden, 3 * self.residual_itemsize)

    @property
    def _adds_in_products(self) -> bool:
        """Whether a product adds to fp32 gradients without another pass: fp32, or a GPU."""
        return self.itemsize == FP32_BYTES or self.device.type == "cuda"


def _update(config: Config, numel: int, world_size: int) -> Iterator[Item]:
    """Norm of the gradients, the optimizer's rule, averages."""
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
