"""The peers of scripts/benchmark.py: a plain torch.nn model under DistributedDataParallel and under FSDP2.

The model computes what `megatron_lite.gpt` computes for a Llama shape, with parameters of the same names, the same
attention and the same loss function; everything else is written as one writes it in plain torch, in the variant that
measured fastest (docs/benchmarks.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from megatron_lite.config import Config, ModelConfig
from megatron_lite.distributed import Distributed
from megatron_lite.kernels.attention import attention
from megatron_lite.kernels.cross_entropy import _LinearCrossEntropy
from megatron_lite.kernels.linear import _Linear
from megatron_lite.kernels.rotary import rotary_table
from megatron_lite.layers.ends import chunk_tokens
from megatron_lite.parameter import Parameter

LOSSES = ("chunked", "full")
LINEARS = ("plain", "engine")


class ChunkedLoss(torch.autograd.Function):
    """The engine's own head and loss, with its weight gradient handed to autograd as any peer needs it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, chunk: int) -> Tensor:
        plain = Parameter(weight.detach())
        ctx.grad_weight = plain.main_grad = torch.empty_like(weight)
        plain.gradient_is_empty = True
        return scale * _LinearCrossEntropy.forward(ctx, hidden, plain, labels, scale, chunk)

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
        self.loss, self.splits = loss, config.cross_entropy_splits

    def forward(self, hidden: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        hidden, labels = self.norm(hidden).flatten(0, 1), labels.flatten()
        if self.loss == "full":
            return scale * functional.cross_entropy(self.output(hidden).float(), labels, reduction="sum")
        chunk = chunk_tokens(self.splits, labels.shape[0], hidden.device)
        return ChunkedLoss.apply(hidden, self.output.weight, labels, scale, chunk)


class PlainGPT(nn.Module):
    """Tokens and labels (b, s) -> summed cross-entropy times `scale`, ()."""

    def __init__(self, config: Config, loss: str, linear: str, device: torch.device) -> None:
        super().__init__()
        model = config.model
        assert model.kv_channels
        base = model.rotary_base
        table = rotary_table(config.batch.sequence_length, model.kv_channels, base, device)
        self.embedding = nn.ModuleDict({"word": nn.Embedding(model.vocab_size, model.hidden_size)})
        self.blocks = nn.ModuleList(Block(model, table, linear) for _ in range(model.num_layers))
        self.head = Head(model, loss)

    def forward(self, tokens: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        hidden = self.embedding["word"](tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden, labels, scale)


class Peer:
    """One peer ready to train: the usual loop of zero_grad, backward per micro-batch, clip, step."""

    def __init__(
        self, config: Config, distributed: Distributed, module: nn.Module, keep_gradients: bool = False
    ) -> None:
        self._config, self._distributed, self._module = config, distributed, module
        self._keep_gradients = keep_gradients  # FSDP2: whole gradients until the last micro-batch
        named = list(module.named_parameters())
        decayed = [parameter for name, parameter in named if "norm" not in name]
        exempt = [parameter for name, parameter in named if "norm" in name]
        options = config.optimizer
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": options.weight_decay}, {"params": exempt, "weight_decay": 0.0}],
            lr=options.lr, betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_eps, fused=True,
        )  # fmt: skip

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """One update from micro-batches (b, s + 1); returns this rank's mean loss over its own tokens, ()."""
        tokens = sum(part.shape[0] * (part.shape[1] - 1) for part in micro_batches)
        scale = torch.tensor(1.0 / tokens, device=self._distributed.device)  # DDP and FSDP2 average over ranks
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self._distributed.device)
        for index, part in enumerate(micro_batches):
            part = part.to(self._distributed.device)
            with self._synchronized(index == len(micro_batches) - 1):
                value = self._module(part[:, :-1].contiguous(), part[:, 1:].contiguous(), scale)
                value.backward()
            loss += value.detach()
        torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._config.optimizer.clip_grad)
        self.optimizer.step()
        return loss

    @contextlib.contextmanager
    def _synchronized(self, last: bool) -> Iterator[None]:
        """Gradients are exchanged after the last micro-batch only, where the peer can do that."""
        if isinstance(self._module, DistributedDataParallel) and not last:
            with self._module.no_sync():
                yield
            return
        if isinstance(self._module, FSDPModule) and self._keep_gradients:
            self._module.set_requires_gradient_sync(last)
        yield

    def memory_bytes(self) -> dict[str, int]:
        """State that this rank holds between steps, by kind; what a step allocates for a while is not in it."""
        parameters = list(self._module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        moments = [value for state in self.optimizer.state.values() for value in state.values() if value.dim() > 0]
        return {
            "weights": sum(local_bytes(parameter) for parameter in parameters),
            "gradients": sum(local_bytes(gradient) for gradient in gradients),
            "Adam moments": sum(local_bytes(value) for value in moments),
        }


def local_bytes(tensor: Tensor) -> int:
    """Bytes of the part of a tensor that lies on this rank."""
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def plain_model(
    config: Config,
    loss: str,
    linear: str,
    distributed: Distributed,
    weights: Callable[[], Iterator[tuple[str, Tensor]]],
) -> PlainGPT:
    """The plain model on the device of this rank, with a copy of `weights` (global name, full tensor)."""
    model = PlainGPT(config, loss, linear, distributed.device).to(distributed.device)
    left = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in weights():
            left.pop(name).copy_(value)
    assert not left, f"no initial values for {sorted(left)}"
    return model


def ddp(config: Config, distributed: Distributed, model: PlainGPT) -> Peer:
    """DistributedDataParallel as its documentation recommends: gradients live in the buckets."""
    module = DistributedDataParallel(model, process_group=distributed.group, gradient_as_bucket_view=True)
    return Peer(config, distributed, module)


def fsdp(
    config: Config, distributed: Distributed, model: PlainGPT, reshard: bool = True, keep_gradients: bool = False
) -> Peer:
    """FSDP2, as its documentation recommends: one group per block, the rest in the root's."""
    mesh = DeviceMesh.from_group(distributed.group, distributed.device.type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    return Peer(config, distributed, model, keep_gradients)
