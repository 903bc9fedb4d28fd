"""The two ends of the chain: the embedding, and the head with final norm and loss."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.config import ModelConfig
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.cross_entropy import capped, linear_cross_entropy
from megatron_lite.kernels.embedding import add_positions, embedding
from megatron_lite.kernels.products import affine
from megatron_lite.kernels.triton_support import cdiv
from megatron_lite.model.layer import Layer, MicroBatch, Norm, dropout
from megatron_lite.parameter import Initializer, Parameter, ParameterSpec, declare


class Embedding(Layer):
    """Token and learned position embeddings: tokens (b, s) -> (b, s, h)."""

    name = "embedding"

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        weights = Initializer("normal", config.init_method_std_embed)
        self.dropout = config.embedding_dropout
        self.dtype = torch.float32 if config.full_precision_residual else None  # of the residual stream
        self.word = declare(_vocabulary("embedding.word.weight", config, embedding=True))
        self.position = None
        if config.use_position_embeddings:
            shape = (config.max_position_embeddings, config.hidden_size)
            self.position = declare(ParameterSpec("embedding.position.weight", shape, weights, embedding=True))
        self.norm = Norm("embedding.norm", config, kernels) if config.input_embedding_norm else None
        self.backward_needs_weights = self.norm is not None and self.norm.weight is not None

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """Embed the tokens, at the micro-batch's positions or counting from 0."""
        assert hidden is None
        hidden = embedding(self.word, micro_batch.tokens, self.kernels.triton, self.dtype)
        positions = micro_batch.positions
        if self.position is not None and positions is None:
            hidden = add_positions(hidden, self.position)
        elif self.position is not None and positions is not None:
            hidden = hidden + embedding(self.position, positions, self.kernels.triton, self.dtype)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return dropout(hidden, self.dropout, micro_batch.site_seed("embedding", self.dropout))


class Head(Layer):
    """Final norm, output projection and summed cross-entropy: (b, s, h) -> ().

    In training, each token's loss includes `logit_z_loss` times the squared log-sum-exp of its logits.
    """

    name = "head"
    gradients_in_forward = True

    def __init__(self, config: ModelConfig, embedding: Embedding, kernels: Kernels, logit_z_loss: float = 0.0) -> None:
        super().__init__()
        self.norm = Norm("head.norm", config, kernels)
        self.output: Parameter | None = None
        if config.tie_word_embeddings:
            self.borrows_from = (embedding,)  # a tuple, so that torch does not count it as part of this module
        else:
            self.output = declare(_vocabulary("head.output.weight", config, embedding=False))
        self.kernels, self.logit_z_loss, self.soft_cap = kernels, logit_z_loss, config.logit_soft_cap
        self.padding_rows = config.padded_vocab_size - config.vocab_size

    @property
    def weight(self) -> Parameter:
        """The output projection (v, h); if tied, the embedding's."""
        if self.output is not None:
            return self.output
        (embedding,) = self.borrows_from
        assert isinstance(embedding, Embedding)
        return embedding.word

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """Return the summed loss or, with a cache, logits (t, v). Without a gradient scale compute no gradients."""
        if micro_batch.cache is not None:
            assert hidden is not None
            return self.logits(hidden[:, micro_batch.cache.answered])[0]
        loss = self._summed_loss(hidden, micro_batch)
        return loss if micro_batch.loss_weight == 1.0 else loss * micro_batch.loss_weight

    def _summed_loss(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        assert hidden is not None
        normalized = self.norm(hidden, self.weight.dtype).flatten(0, 1)  # (t, h), t = b s
        labels = micro_batch.labels.flatten()
        kernels = self.kernels
        return linear_cross_entropy(
            normalized,
            self.weight,
            labels,
            micro_batch.gradient_scale,
            chunk_tokens(kernels.cross_entropy_splits, labels.shape[0], hidden.device, normalized.itemsize),
            kernels.cross_entropy_block_size,
            self.logit_z_loss if micro_batch.gradient_scale is not None else 0.0,
            triton=kernels.cross_entropy == "triton",
            soft_cap=self.soft_cap,
            padding_rows=self.padding_rows,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, v) for generation, without the padding of the vocabulary."""
        return capped(affine(self.norm(hidden, self.weight.dtype), self.weight), self.soft_cap)


def _vocabulary(name: str, config: ModelConfig, embedding: bool) -> ParameterSpec:
    """Declare one row per vocabulary entry; in memory, rows of zeros follow."""
    return ParameterSpec(
        name,
        (config.vocab_size, config.hidden_size),
        Initializer("normal", config.init_method_std_embed),
        embedding=embedding,
        padding_rows=config.padded_vocab_size - config.vocab_size,
    )


def chunk_tokens(splits: int | None, tokens: int, device: torch.device, itemsize: int) -> int:
    """Return the number of tokens whose logits, of `itemsize` bytes, exist at a time; this bounds their memory.

    Every chunk reads and writes the head's whole weight gradient, which takes a GPU as long as the products of a few
    hundred tokens. The default on a GPU is equal chunks, in steps of 128, of up to 3072 tokens: 0.8 GB of bf16 logits
    at 128,256 entries. On a CPU it is 1 KiB per vocabulary entry: in 16-bit training, where a weight gradient is
    computed in a temporary before it is added, longer chunks pay.
    """
    if splits is not None:
        return cdiv(tokens, splits)
    if device.type == "cpu":
        return 1024 // itemsize
    return cdiv(cdiv(tokens, cdiv(tokens, 3072)), 128) * 128
