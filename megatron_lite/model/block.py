"""A transformer block: x += attention(norm(x)); x += mlp(norm(x)).

With `norm_placement` post, each branch's output is normalized before dropout and the residual sum,
x += norm(attention(x)); with both, input and output are. With `parallel_branches` both branches are
of the same x (GPT-NeoX, Black et al. 2022), x += attention(norm(x)) + mlp(norm(x)), with two norms
or the same one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.config import ModelConfig, PerformanceConfig
from megatron_lite.kernels.attention.attention import attention
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.heads import HeadKind, split_heads
from megatron_lite.kernels.rotary import Table
from megatron_lite.kernels.tensor_collectives import ONE_RANK, Collectives, split_seed
from megatron_lite.model.experts import Experts
from megatron_lite.model.layer import MLP, Layer, Linear, MicroBatch, Norm, dropout
from megatron_lite.model.rotary import Rotary, Tables
from megatron_lite.model.tensor_parallel import TensorParallel
from megatron_lite.parameter import Initializer, Parameter, ParameterSpec, declare


class Attention(torch.nn.Module):
    """Causal attention, multi-head, grouped-query or multi-query: (b, s, h) -> (b, s, h).

    index: the block's number. Each tensor-parallel rank computes some of the heads, n and g below.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        rotary: Rotary | None,
        kernels: Kernels,
        index: int,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.parallel, ranks = parallel, parallel.group.world_size
        self.num_heads = config.num_attention_heads // ranks
        self.head_groups = max(1, config.head_groups // ranks)
        self.window = config.window(index)
        self.dropout = config.attention_dropout
        self.rotary = rotary
        self.name = name
        self.softmax_in_fp32 = config.attention_softmax_in_fp32
        self.scale = config.attention_scale  # None: 1 / sqrt(d)
        if config.scale_attn_by_inverse_layer_idx:
            self.scale = (self.scale or config.kv_channels**-0.5) / (index + 1)
        self.soft_cap = config.attention_soft_cap
        self.kernels = kernels
        self.sinks: Parameter | None = None
        if config.attention_sinks:
            size, heads = config.num_attention_heads, parallel.parts(config.num_attention_heads)
            split, values = parallel.split(0, heads), Initializer("normal", config.init_method_std)
            self.sinks = declare(
                ParameterSpec(f"{name}.sinks", (size,), values, weight_decay=0.0, split=split)
            )
        channels = config.kv_channels
        query_size = config.num_attention_heads * channels
        group_size = config.head_groups * channels
        queries = parallel.parts(query_size)
        keys = parallel.parts(group_size, most=config.head_groups)
        self.query_key_value = Linear(
            f"{name}.query_key_value",
            config.hidden_size,
            (query_size, group_size, group_size),
            config.init_method_std_qkv,
            config,
            config.add_qkv_biases,
            parallel.split(0, queries, keys, keys),
        )
        self.norm_kind: HeadKind | None = None
        self.query_norm = self.key_norm = None
        if config.qk_layernorm:
            together = config.qk_norm_scope == "all"
            one = (channels, parallel.replicated(inside=True))
            size, split = (query_size, parallel.split(0, queries)) if together else one
            self.query_norm = Norm(f"{name}.query_norm", config, kernels, split, size)
            size, split = (group_size, parallel.split(0, keys)) if together else one
            self.key_norm = Norm(f"{name}.key_norm", config, kernels, split, size)
            kind = vars(self.query_norm.kind)
            self.norm_kind = HeadKind(**kind, group=parallel.group if together else None)
        self.output = Linear(
            f"{name}.output",
            query_size,
            (config.hidden_size,),
            config.init_method_std_attn_proj,
            config,
            config.add_linear_biases,
            parallel.split(1, queries),
        )

    def forward(
        self,
        hidden: Tensor,
        micro_batch: MicroBatch,
        collectives: Collectives = ONE_RANK,
        after: Collectives | None = None,
    ) -> Tensor:
        """Compute the branch from norm to residual sum: (b, s, h) -> (b, s, h). after: other
        collectives of the output."""
        projection = self.query_key_value(hidden, before=collectives, seed=micro_batch.dropout_seed)
        projection = projection.view(*micro_batch.tokens.shape, -1)  # (b, s, (n + 2 g) d)
        heads = self.heads(projection, self._angles(hidden, micro_batch))
        if micro_batch.cache is not None:
            context = micro_batch.cache.attend(
                *(self.name, heads, self.window, self.scale, self.soft_cap),
                *(self.softmax_in_fp32, self.sinks),
            )
        else:
            seed = None
            if self.dropout != 0.0:
                seed = micro_batch.site_seed(self.name, self.dropout)
                seed = split_seed(seed, self.parallel.group.rank)
            context = attention(
                *heads,
                self.window,
                self.dropout,
                seed,
                backend=self.kernels.attention,
                documents=micro_batch.documents,
                scale=self.scale,
                soft_cap=self.soft_cap,
                softmax_in_fp32=self.softmax_in_fp32,
                sinks=self.sinks,
            )
        context = context.transpose(1, 2).flatten(2)  # (b, s, n d)
        after = collectives if after is None else after
        return self.output(context, after=after, seed=micro_batch.dropout_seed)  # (b, s, h)

    def _angles(self, hidden: Tensor, micro_batch: MicroBatch) -> Table | None:
        """Return the rotary table; with per-micro-batch positions, all blocks share it."""
        if self.rotary is None:
            return None
        grows = micro_batch.cache is not None
        if micro_batch.positions is None:
            length = micro_batch.tokens.shape[1] if grows else None
            return self.rotary.tables(hidden, length).of(self.window)
        if "angles" not in micro_batch.shared:
            micro_batch.shared["angles"] = self.rotary.at(micro_batch.positions, grows)
        tables: Tables = micro_batch.shared["angles"]
        return tables.of(self.window)

    def heads(self, projection: Tensor, table: Table | None) -> tuple[Tensor, Tensor, Tensor]:
        """Split (b, s, (n + 2 g) d) into query (b, n, s, d), key and value (b, g, s, d), normalized
        and rotated as configured."""
        norms = None
        if self.query_norm is not None and self.key_norm is not None:
            norms = (self.query_norm.weights, self.key_norm.weights)
        sizes = (self.num_heads, self.head_groups)
        return split_heads(projection, *sizes, table, self.kernels.triton, norms, self.norm_kind)


class Block(Layer):
    """One transformer block."""

    def __init__(
        self,
        index: int,
        config: ModelConfig,
        rotary: Rotary | None,
        kernels: Kernels,
        performance: PerformanceConfig,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.name = f"blocks.{index}"
        self.hidden_dropout, self.residual_scale = config.hidden_dropout, config.residual_scale
        self.parallel = parallel
        split = parallel.replicated()

        def norm(name: str, place: str) -> Norm | None:
            if config.norm_placement not in (place, "both"):
                return None
            return Norm(f"{self.name}.{name}", config, kernels, split)

        self.attention_norm = norm("attention_norm", "pre")
        self.attention = Attention(
            f"{self.name}.attention", config, rotary, kernels, index, parallel
        )
        self.attention_output_norm = norm("attention_output_norm", "post")
        self.parallel_branches = config.parallel_branches != "none"
        has_norms = config.parallel_branches != "one_norm"
        self.mlp_norm = norm("mlp_norm", "pre") if has_norms else None
        mlp, width = f"{self.name}.mlp", config.ffn_hidden_size
        self.mlp = (
            Experts(mlp, config, kernels, parallel)
            if config.has_experts(index)
            else MLP(mlp, width, config, kernels, parallel)
        )
        self.mlp_output_norm = norm("mlp_output_norm", "post")
        self.variant = (self.attention.window, rotary is None)
        self.recompute(
            performance.mlp_levels(config.num_layers)[index], index < performance.recompute_layers
        )

    def recompute(self, level: str, whole: bool) -> None:
        """Set what the backward pass recomputes: the MLP at a level, or the whole block from its
        input."""
        self.mlp.recompute_level, self.recomputed = level, whole

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """Compute (b, s, h) -> (b, s, h), in the residual stream's dtype."""
        assert hidden is not None
        # everything but the residual stream, whose dtype the embedding chooses
        dtype = self.attention.output.weight.dtype
        collectives = self.parallel.collectives[micro_batch.cache is not None]
        hidden, normalized = _normalized(self.attention_norm, hidden, None, dtype)
        if self.parallel_branches:
            branch = self._both_branches(hidden, normalized, micro_batch, collectives)
            return hidden.add(branch, alpha=self.residual_scale)
        branch = self._branch(
            self.attention(normalized, micro_batch, collectives),
            self.attention_output_norm,
            micro_batch,
            "attention_branch",
        )
        hidden, normalized = _normalized(self.mlp_norm, hidden, branch, dtype)
        del branch
        branch = self.mlp(normalized, micro_batch, collectives)
        return hidden + self._branch(branch, self.mlp_output_norm, micro_batch, "mlp_branch")

    def _both_branches(
        self, hidden: Tensor, normalized: Tensor, micro_batch: MicroBatch, collectives: Collectives
    ) -> Tensor:
        """Return attention and MLP of the same hidden states, summed before they are reduced; validation
        refuses dropout, which is of each branch."""
        attended = self.attention(normalized, micro_batch, collectives, collectives.unreduced)
        if self.mlp_norm is not None:
            normalized = self.mlp_norm(hidden, normalized.dtype)
        branch = self.mlp(normalized, micro_batch, collectives, collectives.unreduced)
        return collectives.joined(attended.view_as(branch) + branch)

    def _branch(
        self, branch: Tensor, norm: Norm | None, micro_batch: MicroBatch, site: str
    ) -> Tensor:
        """Return the branch after its norm, factor and dropout, as added to the residual stream."""
        if norm is not None:
            branch = norm(branch)
        if self.residual_scale != 1.0:
            branch = branch * self.residual_scale
        if self.hidden_dropout == 0.0:
            return branch
        seed = micro_batch.site_seed(f"{self.name}.{site}", self.hidden_dropout)
        return dropout(branch, self.hidden_dropout, self.parallel.collectives[False].seed(seed))


def _normalized(
    norm: Norm | None, hidden: Tensor, branch: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return hidden + branch, and the next branch's input in `dtype`: its norm, or without one the
    sum itself."""
    if norm is not None:
        return norm.add(hidden, branch, dtype)
    hidden = hidden if branch is None else hidden + branch
    return hidden, hidden.to(dtype)
