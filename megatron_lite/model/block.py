"""A pre-norm transformer block: x += attention(norm(x)); x += mlp(norm(x)).

With `hybrid_norm` each branch is normalized once more, before it is dropped from and added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.config import ModelConfig
from megatron_lite.kernels.attention.attention import attention
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.head_norm import normalized_heads
from megatron_lite.kernels.mlp import mlp
from megatron_lite.kernels.rotary import Table, split_heads
from megatron_lite.model.layer import Layer, Linear, MicroBatch, dropout
from megatron_lite.model.norm import Norm
from megatron_lite.model.rotary import Rotary


class Attention(torch.nn.Module):
    """Multi-head, grouped-query or multi-query causal attention: (b, s, h) -> (b, s, h). `index` is its block's."""

    def __init__(self, name: str, config: ModelConfig, rotary: Rotary | None, kernels: Kernels, index: int) -> None:
        super().__init__()
        assert config.head_groups and config.kv_channels
        assert config.init_method_std_qkv is not None and config.init_method_std_attn_proj is not None
        self.num_heads, self.head_groups = config.num_attention_heads, config.head_groups
        self.window = config.window_size
        self.dropout, self.rotary, self.name = config.attention_dropout, rotary, name
        self.softmax_in_fp32 = config.attention_softmax_in_fp32
        self.scale = None  # 1 / sqrt(d)
        if config.scale_attn_by_inverse_layer_idx:
            self.scale = config.kv_channels**-0.5 / (index + 1)
        self.kernels = kernels
        query_size, group_size = self.num_heads * config.kv_channels, self.head_groups * config.kv_channels
        self.query_key_value = Linear(
            f"{name}.query_key_value",
            config.hidden_size,
            (query_size, group_size, group_size),
            config.init_method_std_qkv,
            config,
            bool(config.add_qkv_biases),
        )
        self.query_norm: Norm | None = None
        self.key_norm: Norm | None = None
        if config.qk_layernorm:
            self.query_norm = Norm(f"{name}.query_norm", config, kernels, config.kv_channels)
            self.key_norm = Norm(f"{name}.key_norm", config, kernels, config.kv_channels)
        std = config.init_method_std_attn_proj
        self.output = Linear(f"{name}.output", query_size, (config.hidden_size,), std, config, config.add_linear_biases)

    def forward(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        """(b, s, h) -> (b, s, h), from the norm to the residual sum."""
        positions, table = micro_batch.positions, None
        if self.rotary is not None:
            table = self.rotary.table(hidden) if positions is None else self.rotary.at(positions)
        projection = self.query_key_value(hidden)  # (b, s, (n + 2 g) d)
        heads = self.heads(projection, table)
        seed = micro_batch.site_seed(self.name)
        documents, backend = micro_batch.documents, self.kernels.attention
        if micro_batch.cache is not None:
            context = micro_batch.cache.attend(self.name, *heads, self.window, self.scale, self.softmax_in_fp32)
            return self.output(context.transpose(1, 2).flatten(2))
        context = attention(
            *heads,
            self.window,
            self.dropout,
            seed,
            backend=backend,
            documents=documents,
            scale=self.scale,
            softmax_in_fp32=self.softmax_in_fp32,
        )
        return self.output(context.transpose(1, 2).flatten(2))  # (b, s, n d) -> (b, s, h)

    def heads(self, projection: Tensor, table: Table | None) -> tuple[Tensor, Tensor, Tensor]:
        """(b, s, (n + 2 g) d) -> query (b, n, s, d), key and value (b, g, s, d), normalized and rotated if they are."""
        query, key, shape = self.query_norm, self.key_norm, (self.num_heads, self.head_groups, table)
        if query is None or key is None:
            return split_heads(projection, *shape, self.kernels.triton)
        parameters = (query.weight, query.bias), (key.weight, key.bias)
        return normalized_heads(projection, *shape, *parameters, query.kind, self.kernels.triton)


class MLP(torch.nn.Module):
    """Plain or gated two-layer MLP: (b, s, h) -> (b, s, h)."""

    def __init__(self, name: str, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        assert config.ffn_hidden_size and config.activation_type
        assert config.init_method_std_mlp_1 is not None and config.init_method_std_mlp_2 is not None
        self.activation_type, self.gated = config.activation_type, config.gated
        self.kernels = kernels
        up_sizes = (config.ffn_hidden_size,) * (2 if config.gated else 1)  # gate rows first
        biased = bool(config.add_mlp_biases)
        self.up = Linear(f"{name}.up", config.hidden_size, up_sizes, config.init_method_std_mlp_1, config, biased)
        self.down = Linear(
            f"{name}.down", config.ffn_hidden_size, (config.hidden_size,), config.init_method_std_mlp_2, config, biased
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)."""
        up, down = self.up, self.down
        return mlp(
            hidden,
            up.weight,
            up.bias,
            down.weight,
            down.bias,
            self.activation_type,
            self.gated,
            self.kernels.mlp_recompute_level,
            self.kernels.triton,
        )


class Block(Layer):
    """One transformer block."""

    def __init__(self, index: int, config: ModelConfig, rotary: Rotary | None, kernels: Kernels) -> None:
        super().__init__()
        self.name, self.hidden_dropout = f"blocks.{index}", config.hidden_dropout
        self.recomputed = index < kernels.recompute_layers
        self.attention_norm = Norm(f"{self.name}.attention_norm", config, kernels)
        self.attention = Attention(f"{self.name}.attention", config, rotary, kernels, index)
        self.attention_output_norm = self.mlp_output_norm = None
        if config.hybrid_norm:
            self.attention_output_norm = Norm(f"{self.name}.attention_output_norm", config, kernels)
        self.mlp_norm = Norm(f"{self.name}.mlp_norm", config, kernels)
        self.mlp = MLP(f"{self.name}.mlp", config, kernels)
        if config.hybrid_norm:
            self.mlp_output_norm = Norm(f"{self.name}.mlp_output_norm", config, kernels)

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """(b, s, h) -> (b, s, h), in the residual stream's dtype."""
        assert hidden is not None
        dtype = self.mlp.up.weight.dtype  # of everything but the residual stream, which the embedding decides about
        hidden, normalized = self.attention_norm.add(hidden, None, dtype)
        branch = self._branch(
            self.attention(normalized, micro_batch), self.attention_output_norm, micro_batch, "attention_branch"
        )
        hidden, normalized = self.mlp_norm.add(hidden, branch, dtype)
        del branch
        return hidden + self._branch(self.mlp(normalized), self.mlp_output_norm, micro_batch, "mlp_branch")

    def _branch(self, branch: Tensor, norm: Norm | None, micro_batch: MicroBatch, site: str) -> Tensor:
        """What is added to the residual stream."""
        if norm is not None:
            branch = norm(branch)
        return dropout(branch, self.hidden_dropout, micro_batch.site_seed(f"{self.name}.{site}"))
