"""How tensor parallelism splits a model's layers (Shoeybi et al. 2019; Korthikanti et al. 2022).

Attention splits its heads, the MLP its channels, embedding and head the vocabulary; norms, learned
positions and biases of the residual stream are replicated.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_lite.config import Config, ModelConfig
from megatron_lite.distributed.expert_group import NOT_SHARED, ExpertGroup
from megatron_lite.distributed.rank_group import Group, alone
from megatron_lite.kernels.tensor_collectives import (
    Collectives,
    Vocabulary,
    collectives_over,
    vocabulary_over,
)
from megatron_lite.tiles import Block, Split


@dataclass(frozen=True)
class TensorParallel:
    """The group, and what it splits in addition to heads and channels: tokens (sequence
    parallelism), embedding rows.

    in_halves: see `tensor_collectives.py`.
    """

    group: Group
    splits_tokens: bool = False
    splits_vocabulary: bool = True
    in_halves: bool = False
    experts: ExpertGroup = NOT_SHARED  # the ranks that share out the experts

    @functools.cached_property
    def collectives(self) -> dict[bool, Collectives]:
        """The collectives of a pass, by whether it has any number of tokens, as in generation."""
        over = functools.partial(collectives_over, self.group, in_halves=self.in_halves)
        return {False: over(self.splits_tokens), True: over(False)}

    def vocabulary(self, config: ModelConfig, any_length: bool = False) -> Vocabulary:
        """Return the vocabulary for a pass. any_length: see `collectives`."""
        collectives = self.collectives[any_length]
        if not self.splits_vocabulary:
            return Vocabulary(collectives)
        return vocabulary_over(
            self.group, collectives, config.vocab_size, self.vocabulary_rows(config)
        )

    # -- parameters
    # -------------------------------------------------------------------------------------------------

    def parts(self, size: int, most: int | None = None) -> Block:
        """Return a block in equal parts, one per rank; with fewer parts (`most`), ranks share
        them."""
        ranks = self.group.world_size
        return Block.of(size, ranks if most is None else min(most, ranks))

    def split(self, dim: int, *blocks: Block) -> Split:
        """Return a parameter's split along `dim`; ranks that share a part sum its gradient."""
        return Split(self.group.world_size, self.group.rank, dim, blocks, sums_gradients=True)

    def split_experts(self, dim: int, *blocks: Block) -> Split:
        """Return the split of a parameter of all experts: their rows over the ranks that share them
        out, and then along `dim`."""
        split, group = self.split(dim, *blocks), self.experts
        ranks, rank = group.world_size * split.ranks, group.rank * split.ranks + split.rank
        return replace(split, ranks=ranks, rank=rank, expert_ranks=group.world_size)

    def replicated(self, inside: bool = False) -> Split:
        """Return the split of a replicated parameter.

        inside: it applies to this rank's channels rather than to the residual stream.
        """
        return Split(
            self.group.world_size, self.group.rank, sums_gradients=inside or self.splits_tokens
        )

    def vocabulary_rows(self, config: ModelConfig) -> int:
        """Return the number of rows in a rank's table, including padding."""
        return config.vocabulary_rows(self.group.world_size if self.splits_vocabulary else 1)

    def vocabulary_split(self, config: ModelConfig) -> Split:
        """Return the split of a table with one row per vocabulary entry."""
        if not self.splits_vocabulary:
            return self.replicated()
        return self.split(
            0, Block(config.vocab_size, self.group.world_size, self.vocabulary_rows(config))
        )


ALONE = TensorParallel(alone(torch.device("cpu")))


def tensor_parallel(config: Config, groups: Any) -> TensorParallel:
    """Return how the configured options split the layers over a rank's groups."""
    options = config.distributed
    return TensorParallel(
        groups.tensor,
        options.sequence_tensor_parallel,
        options.parallel_embeddings,
        options.overlap_tensor_reduce,
        groups.expert,
    )
