"""The plain torch.nn model of scripts/benchmark.py.

It computes what `megatron_lite.gpt` computes for a Llama shape, with parameters of the same names, the same attention
and the same loss function; everything else is written as one writes it in plain torch, in the variant that measured
fastest (docs/benchmarks.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

from megatron_lite.config import Config, ModelConfig
from megatron_lite.gpt import build_gpt
from megatron_lite.kernels.attention import attention
from megatron_lite.kernels.linear import _Linear
from megatron_lite.kernels.linear_cross_entropy import _LinearCrossEntropy
from megatron_lite.kernels.rotary import rotary_table
from megatron_lite.layers.ends import chunk_tokens
from megatron_lite.parameter import Parameter, ParameterSpec
from megatron_lite.seeds import derive_seed

LOSSES = ("chunked", "full")
LINEARS = ("plain", "engine")


class ChunkedLoss(torch.autograd.Function):
    """The engine's own head and loss, with its weight gradient handed to autograd as any peer needs it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, chunk: int) -> Tensor:
        plain = Parameter(weight.detach())
        ctx.grad_weight = plain.main_grad = torch.empty_like(weight)
        plain.gradient_is_empty = True
        return scale * _LinearCrossEntropy.forward(ctx, hidden, plain, labels, scale, chunk, None, 0.0, False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        # grad_output is 1: backward starts here.
        gradients = ctx.grad_hidden, ctx.grad_weight, None, None, None
        ctx.grad_hidden = ctx.grad_weight = None
        return gradients


class EngineLinear(torch.autograd.Function):
    """The engine's own linear layer, with its weight gradient handed to autograd."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor) -> Tensor:
        return _Linear.forward(ctx, input_, Parameter(weight.detach()), None)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor]:
        ctx.weight.main_grad, ctx.weight.gradient_is_empty = torch.empty_like(ctx.weight), True
        return _Linear.backward(ctx, grad_output)[0], ctx.weight.main_grad


class PeerLinear(nn.Linear):
    """nn.Linear without bias, computed by torch ("plain") or by the engine's function ("engine")."""

    def __init__(self, in_features: int, out_features: int, kind: str) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.kind = kind

    def forward(self, input_: Tensor) -> Tensor:
        return super().forward(input_) if self.kind == "plain" else EngineLinear.apply(input_, self.weight)


class Attention(nn.Module):
    """Grouped-query causal attention with rotary positions: (b, s, h) -> (b, s, h)."""

    def __init__(self, config: ModelConfig, table: tuple[Tensor, Tensor], linear: str) -> None:
        super().__init__()
        assert config.head_groups and config.kv_channels
        self.sizes = (config.num_attention_heads, config.head_groups, config.head_groups)
        self.table, self.window = table, config.window_size
        query_size = config.num_attention_heads * config.kv_channels
        self.query_key_value = PeerLinear(config.hidden_size, sum(self.sizes) * config.kv_channels, linear)
        self.output = PeerLinear(query_size, config.hidden_size, linear)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.query_key_value(hidden).unflatten(-1, (sum(self.sizes), -1)).transpose(1, 2)  # (b, n + 2 g, s, d)
        query, key, value = heads.split(self.sizes, dim=1)
        query, key = rotate(query, self.table), rotate(key, self.table)
        context = attention(query, key, value, self.window, 0.0, None)
        return self.output(context.transpose(1, 2).flatten(2))


def rotate(heads: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """(b, n, s, d) rotated by cos and sin (s, d / 2), half-split layout."""
    cos, sin = table
    a, b = heads.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class MLP(nn.Module):
    """SwiGLU: (b, s, h) -> (b, s, h)."""

    def __init__(self, config: ModelConfig, linear: str) -> None:
        super().__init__()
        assert config.ffn_hidden_size
        self.up = PeerLinear(config.hidden_size, 2 * config.ffn_hidden_size, linear)  # gate rows first
        self.down = PeerLinear(config.ffn_hidden_size, config.hidden_size, linear)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.up(hidden).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    """A pre-norm transformer block: (b, s, h) -> (b, s, h)."""

    def __init__(self, config: ModelConfig, table: tuple[Tensor, Tensor], linear: str) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = Attention(config, table, linear)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config, linear)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Head(nn.Module):
    """Final norm, output projection and loss: (b, s, h) -> ()."""

    def __init__(self, config: ModelConfig, loss: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss, self.splits = loss, None

    def forward(self, hidden: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        hidden, labels = self.norm(hidden).flatten(0, 1), labels.flatten()
        if self.loss == "full":
            return scale * functional.cross_entropy(self.output(hidden).float(), labels, reduction="sum")
        chunk = chunk_tokens(self.splits, labels.shape[0], hidden.device, hidden.itemsize)
        return ChunkedLoss.apply(hidden, self.output.weight, labels, scale, chunk)


class PlainGPT(nn.Module):
    """Tokens and labels (b, s) -> summed cross-entropy times `scale`, (). Parameters have no memory at first."""

    def __init__(self, config: Config, loss: str, linear: str, device: torch.device) -> None:
        super().__init__()
        model = config.model
        assert model.kv_channels
        base = model.rotary_base
        table = rotary_table(config.batch.sequence_length, model.kv_channels, base, device)
        with torch.device("meta"):
            self.embedding = nn.ModuleDict({"word": nn.Embedding(model.vocab_size, model.hidden_size)})
            self.blocks = nn.ModuleList(Block(model, table, linear) for _ in range(model.num_layers))
            self.head = Head(model, loss)

    def forward(self, tokens: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        hidden = self.embedding["word"](tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden, labels, scale)


def parameter_specs(config: Config) -> dict[str, ParameterSpec]:
    """What the engine declares for this model, by global name: shape, initial values, weight decay."""
    layers = build_gpt(config.model, config.batch.sequence_length)
    declared = [parameter for layer in layers for parameter in layer.parameters()]
    return {parameter.spec.name: parameter.spec for parameter in declared if isinstance(parameter, Parameter)}


def initialize(module: nn.Module, config: Config, device: torch.device) -> None:
    """Give a plain model, whole or sharded, memory and the values with which the engine starts.

    One parameter at a time is drawn in full, so that the start needs no more memory than training.
    """
    specs = parameter_specs(config)
    module.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spec, generator = specs.pop(name), torch.Generator(device=device)
            value: Tensor = torch.empty(spec.shape, device=device)
            spec.initializer.fill(value, generator.manual_seed(derive_seed(config.distributed.seed, name)))
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(value)
    assert not specs, f"the plain model lacks {sorted(specs)}"
