"""The plain torch.nn model of the peers, in the shapes of Llama and GPT-2.

The model computes the same function as `megatron_lite.model.gpt` from parameters of the same names,
in ordinary torch, with the fastest variants measured (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

from megatron_lite.config import Config, ModelConfig
from megatron_lite.kernels.rotary import angle_table, wavelengths
from megatron_lite.model.gpt import build_gpt
from megatron_lite.model.tensor_parallel import ALONE, TensorParallel
from megatron_lite.parameter import Parameter, ParameterSpec
from megatron_lite.seeds import derive_seed

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": nn.GELU(approximate="tanh"),
}
Table = tuple[Tensor, Tensor]


def loss_and_gradient(
    logits: Tensor, labels: Tensor, scale: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Logits (t, v), labels (t,) -> summed cross-entropy, (), and the gradient of `scale` times it,
    (t, v)."""
    labels = labels[:, None]
    # cast and softmax in one pass
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    at_label = probabilities.gather(-1, labels)
    loss = -at_label.log().sum(dtype=torch.float64)
    gradient = probabilities.mul_(scale).scatter_add_(
        -1, labels, torch.zeros_like(at_label).sub_(scale)
    )
    return loss, gradient.to(logits.dtype)


class ChunkedLoss(torch.autograd.Function):
    """Output projection and loss in chunks of tokens, with all gradients computed in the forward
    pass.

    Liger's fused linear cross-entropy and torchtitan's chunked loss work the same way.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        scale: Tensor | float,
        function: Callable[..., Any],
    ) -> Tensor:
        """Hidden (t, h), weight (v, h), labels (t,) -> `scale` times the summed loss; `function`
        computes one chunk."""
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        tokens = chunk_tokens(hidden.shape[0], hidden.device)
        for start in range(0, hidden.shape[0], tokens):
            chunk = hidden[start : start + tokens]
            summed, gradient = function(chunk @ weight.t(), labels[start : start + tokens], scale)
            loss += summed
            grad_hidden[start : start + tokens] = gradient @ weight
            if grad_weight is None:
                grad_weight = gradient.t() @ chunk
            else:
                grad_weight.addmm_(gradient.t(), chunk)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss * scale

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # Backward starts here, so grad_output is 1.
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden, grad_weight, None, None, None


def chunk_tokens(tokens: int, device: torch.device) -> int:
    """Return the tokens per chunk: 256 on a CPU; on a GPU an eighth of all (as in torchtitan), at
    least 1024."""
    return 256 if device.type == "cpu" else max(1024, -(-tokens // 8))


class Attention(nn.Module):
    """Grouped-query causal attention, with rotary positions if given a table: (b, s, h) -> (b, s,
    h)."""

    def __init__(self, config: ModelConfig, table: Table | None) -> None:
        super().__init__()
        assert config.head_groups and config.kv_channels and config.window_size is None
        self.sizes = (config.num_attention_heads, config.head_groups, config.head_groups)
        self.table, biases = table, bool(config.add_qkv_biases)
        query_size = config.num_attention_heads * config.kv_channels
        self.query_key_value = nn.Linear(
            config.hidden_size, sum(self.sizes) * config.kv_channels, bias=biases
        )
        self.output = nn.Linear(query_size, config.hidden_size, bias=config.add_linear_biases)

    def forward(self, hidden: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)."""
        # (b, n + 2 g, s, d)
        heads = self.query_key_value(hidden).unflatten(-1, (sum(self.sizes), -1)).transpose(1, 2)
        query, key, value = heads.split(self.sizes, dim=1)
        if self.table is not None:
            query, key = rotate(query, self.table), rotate(key, self.table)
        grouped = key.shape[1] != query.shape[1]
        context = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=grouped
        )
        return self.output(context.transpose(1, 2).flatten(2))


def rotate(heads: Tensor, table: Table) -> Tensor:
    """Rotate (b, n, s, d) by cos and sin (s, d / 2), half-split layout."""
    cos, sin = table
    a, b = heads.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(heads)


class MLP(nn.Module):
    """Plain or gated MLP: (b, s, h) -> (b, s, h)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.ffn_hidden_size and config.activation_type
        self.gated, self.activation = config.gated, ACTIVATIONS[config.activation_type]
        width = config.ffn_hidden_size * (2 if config.gated else 1)  # gate rows first
        self.up = nn.Linear(config.hidden_size, width, bias=bool(config.add_mlp_biases))
        self.down = nn.Linear(
            config.ffn_hidden_size, config.hidden_size, bias=bool(config.add_mlp_biases)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.gated:
            return self.down(self.activation(self.up(hidden)))
        gate, up = self.up(hidden).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


def norm(config: ModelConfig) -> nn.Module:
    """Return a normalization layer of the model's kind."""
    kind = nn.RMSNorm if config.normalization_type == "rms_norm" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.layer_norm_eps)


class Block(nn.Module):
    """A pre-norm transformer block: (b, s, h) -> (b, s, h)."""

    def __init__(self, config: ModelConfig, table: Table | None) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(config), Attention(config, table)
        self.mlp_norm, self.mlp = norm(config), MLP(config)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Embedding(nn.Module):
    """Token embedding, plus learned positions if the model has them: (b, s) -> (b, s, h)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.max_position_embeddings
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = None
        if config.use_position_embeddings:
            self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.word(tokens)
        return hidden if self.position is None else hidden + self.position.weight[: tokens.shape[1]]


class Head(nn.Module):
    """Final norm, output projection and loss: (b, s, h) -> ()."""

    def __init__(self, config: ModelConfig, loss: str) -> None:
        super().__init__()
        self.norm, self.loss = norm(config), loss
        self.output = None
        if not config.tie_word_embeddings:
            self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.function = loss_and_gradient  # for one chunk; compile_model replaces it

    def forward(
        self, hidden: Tensor, labels: Tensor, tied: Tensor | None, scale: Tensor | float
    ) -> Tensor:
        """Hidden (b, s, h) -> `scale` times the summed loss, (); `tied` (v, h): the embedding of a
        tied model."""
        hidden, labels = self.norm(hidden).flatten(0, 1), labels.flatten()
        weight = tied if self.output is None else self.output.weight
        assert weight is not None
        if self.loss == "full":
            logits = functional.linear(hidden, weight).float()
            return functional.cross_entropy(logits, labels, reduction="sum") * scale
        # autocast does not reach into ChunkedLoss
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        return ChunkedLoss.apply(hidden, weight, labels, scale, self.function)


class PlainGPT(nn.Module):
    """Tokens and labels (b, s) -> this micro-batch's share of the rank's mean loss in a step, ().

    Parameters start on the meta device.
    """

    def __init__(self, config: Config, loss: str, device: torch.device) -> None:
        super().__init__()
        model, length = config.model, config.batch.sequence_length
        assert model.kv_channels and model.rotary_base
        table = angle_table(1.0 / wavelengths(model.kv_channels, model.rotary_base, device), length)
        self.scale = 1.0 / tokens_per_rank(config)
        with torch.device("meta"):
            self.embedding = Embedding(model)
            blocks = (
                Block(model, table if model.use_rotary_embeddings else None)
                for _ in range(model.num_layers)
            )
            self.blocks = nn.ModuleList(blocks)
            self.head = Head(model, loss)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        tied = self.embedding.word.weight if self.head.output is None else None
        return self.head(hidden, labels, tied, self.scale)


def tokens_per_rank(config: Config) -> int:
    """Return the tokens that one rank trains on in one step."""
    batch = config.batch
    assert batch.micro_batch_size and batch.sequential_micro_batches
    return batch.sequential_micro_batches * batch.micro_batch_size * batch.sequence_length


def parameter_specs(config: Config, parallel: TensorParallel = ALONE) -> dict[str, ParameterSpec]:
    """Return the engine's declarations for this model by global name: shape, initial values, weight
    decay, split."""
    layers = build_gpt(config.model, config.batch.sequence_length, parallel=parallel)
    declared = [parameter for layer in layers for parameter in layer.parameters()]
    return {
        parameter.spec.name: parameter.spec
        for parameter in declared
        if isinstance(parameter, Parameter)
    }


def initial_value(spec: ParameterSpec, config: Config, device: torch.device) -> Tensor:
    """Return the engine's initial values of one parameter, in fp32."""
    generator = torch.Generator(device=device).manual_seed(
        derive_seed(config.distributed.seed, spec.name)
    )
    value = torch.empty(spec.shape, device=device)
    spec.initializer.fill(value, generator)
    return value


def initialize(
    module: nn.Module,
    config: Config,
    device: torch.device,
    arrange: Callable[[str, Tensor], Tensor] = lambda _, value: value,
) -> None:
    """Allocate a plain model, whole or sharded, and fill it with the engine's initial values.

    Only one full parameter exists at a time, so that initialization needs no more memory than
    training. arrange: reorders a named parameter's values.
    """
    specs = parameter_specs(config)
    module.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = arrange(name, initial_value(specs.pop(name), config, device))
            if isinstance(parameter, DTensor):
                value = distribute_tensor(
                    value, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.copy_(value)
    assert not specs, f"the plain model lacks {sorted(specs)}"
