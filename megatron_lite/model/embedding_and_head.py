"""Both ends of the model: the embedding, and the head with final norm and loss."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_lite.config import ModelConfig
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.cross_entropy import capped, linear_cross_entropy
from megatron_lite.kernels.embedding import add_positions, embedding
from megatron_lite.kernels.products import affine
from megatron_lite.kernels.triton_support import cdiv
from megatron_lite.model.layer import Layer, MicroBatch, Norm, dropout
from megatron_lite.model.tensor_parallel import TensorParallel
from megatron_lite.parameter import Initializer, Parameter, ParameterSpec, declare


class Embedding(Layer):
    """Token and learned position embeddings: tokens (b, s) -> (b, s, h)."""

    name = "embedding"

    def __init__(self, config: ModelConfig, kernels: Kernels, parallel: TensorParallel) -> None:
        super().__init__()
        self.kernels, self.parallel = kernels, parallel
        self.vocabularies = {
            length: parallel.vocabulary(config, length) for length in (False, True)
        }  # any length?
        weights = Initializer("normal", config.init_method_std_embed)
        self.scale, self.dropout = config.embedding_scale, config.embedding_dropout
        # residual stream's dtype
        self.dtype = torch.float32 if config.full_precision_residual else None
        self.word = declare(_vocabulary("embedding.word.weight", config, parallel, embedding=True))
        self.position = None
        if config.use_position_embeddings:
            shape = (config.max_position_embeddings, config.hidden_size)
            name, split = "embedding.position.weight", parallel.replicated()
            self.position = declare(
                ParameterSpec(name, shape, weights, embedding=True, split=split)
            )
        self.norm: Norm | None = None
        if config.input_embedding_norm:
            self.norm = Norm("embedding.norm", config, kernels, parallel.replicated())
        self.backward_needs_weights = self.norm is not None and self.norm.weight is not None

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """Embed the tokens, at the micro-batch's positions or counting from 0."""
        assert hidden is None
        any_length, triton = micro_batch.cache is not None, self.kernels.triton
        collectives = self.parallel.collectives[any_length]
        vocabulary = self.vocabularies[any_length]
        hidden = embedding(self.word, micro_batch.tokens, triton, self.dtype, vocabulary)
        if self.scale != 1.0:
            hidden = hidden * torch.tensor(self.scale, dtype=self.word.dtype).item()
        positions = collectives.positions(micro_batch.positions, micro_batch.tokens)
        if self.position is not None and positions is None:
            hidden = add_positions(hidden, self.position)
        elif self.position is not None and positions is not None:
            hidden = hidden + embedding(self.position, positions, triton, self.dtype)
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.dropout == 0.0:
            return hidden
        return dropout(
            hidden, self.dropout, collectives.seed(micro_batch.site_seed("embedding", self.dropout))
        )

    def boundary(self, micro_batch: MicroBatch) -> tuple[tuple[int, ...], torch.dtype | None]:
        """See `zero.messages.FirstLayer`; (1, b s / T, h) with sequence parallelism."""
        own = self.parallel.collectives[micro_batch.cache is not None].own(micro_batch.tokens)
        return (*own.shape, self.word.shape[-1]), self.dtype


class Head(Layer):
    """Final norm, output projection and summed cross-entropy: (b, s, h) -> ().

    In training, each token's loss includes `logit_z_loss` times the squared log-sum-exp of its
    logits.
    """

    name = "head"
    gradients_in_forward = True

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        kernels: Kernels,
        parallel: TensorParallel,
        logit_z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.vocabulary = parallel.vocabulary(config)
        self.vocabulary_of_any_length = parallel.vocabulary(config, any_length=True)
        self.norm = Norm("head.norm", config, kernels, parallel.replicated())
        self.output: Parameter | None = None
        if config.tie_word_embeddings:
            # a tuple, so that torch does not count it as part of this module
            self.borrows_from = (embedding,)
            self.borrowed = (embedding.word.spec.name,)
        else:
            self.output = declare(
                _vocabulary("head.output.weight", config, parallel, embedding=False)
            )
        self.kernels = kernels
        self.logit_z_loss = logit_z_loss
        self.scale, self.soft_cap = config.logit_scale, config.logit_soft_cap
        self.padding_rows = self.weight.spec.padding_rows

    @property
    def weight(self) -> Parameter:
        """The output projection (v, h); the embedding's if tied."""
        if self.output is not None:
            return self.output
        (embedding,) = self.borrows_from
        assert isinstance(embedding, Embedding)
        return embedding.word

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """Return the summed loss or, with a cache, logits (t, v). Without a gradient scale, no
        gradients."""
        assert hidden is not None
        if micro_batch.cache is not None:
            return self.logits(hidden[:, micro_batch.cache.answered])[0]
        normalized = self._normalized(hidden)
        kernels, tokens = self.kernels, micro_batch.labels.numel()
        loss = linear_cross_entropy(
            normalized,
            self.weight,
            micro_batch.labels,
            micro_batch.gradient_scale,
            chunk_tokens(kernels.cross_entropy_splits, tokens, hidden.device, normalized.itemsize),
            kernels.cross_entropy_block_size,
            self.logit_z_loss if micro_batch.gradient_scale is not None else 0.0,
            triton=kernels.cross_entropy == "triton",
            soft_cap=self.soft_cap,
            padding_rows=self.padding_rows,
            vocabulary=self.vocabulary,
        )
        return loss if micro_batch.loss_weight == 1.0 else loss * micro_batch.loss_weight

    def _normalized(self, hidden: Tensor) -> Tensor:
        """Return the norm of (b, s, h) times the factor on logits, which costs least here."""
        normalized = self.norm(hidden, self.weight.dtype)
        return normalized if self.scale == 1.0 else normalized * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (b, s, v) of (b, s, h) for generation, without vocabulary padding."""
        rows = affine(self._normalized(hidden), self.weight)
        return capped(self.vocabulary_of_any_length.whole(rows), self.soft_cap)


def _vocabulary(
    name: str, config: ModelConfig, parallel: TensorParallel, embedding: bool
) -> ParameterSpec:
    """Declare one row per vocabulary entry, padded with zero rows in memory."""
    spec = ParameterSpec(
        name,
        (config.vocab_size, config.hidden_size),
        Initializer("normal", config.init_method_std_embed),
        embedding=embedding,
        split=parallel.vocabulary_split(config),
    )
    return replace(spec, padding_rows=parallel.vocabulary_rows(config) - spec.local_shape[0])


def chunk_tokens(splits: int | None, tokens: int, device: torch.device, itemsize: int) -> int:
    """Return how many tokens' logits, of `itemsize` bytes, exist at a time; this bounds their
    memory.

    Every chunk reads and writes the head's whole weight gradient, which costs a GPU as much as the
    products of a few hundred tokens. The default on a GPU is equal chunks of up to 3072 tokens, in
    multiples of 128: 0.8 GB of bf16 logits at 128,256 entries. On a CPU it is 1 KiB per vocabulary
    entry: longer chunks only pay off in 16-bit training, where a weight gradient is computed in a
    temporary before it is added.
    """
    if splits is not None:
        return cdiv(tokens, splits)
    if device.type == "cpu":
        return 1024 // itemsize
    return cdiv(cdiv(tokens, cdiv(tokens, 3072)), 128) * 128
