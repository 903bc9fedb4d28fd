"""A mixture of experts in place of an MLP: a router, the experts it chooses from, shared experts.

    y = sum of the chosen experts' outputs times their scores + the shared experts' output

With tensor parallelism every rank routes all tokens alike and computes its channels of every
expert. Its gradients of scores are partial sums over channels, and so are those of the router's
weights and of its input; the losses' gradients begin on the first rank alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import ModelConfig
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.experts import ExpertMap, dispatched, experts
from megatron_lite.kernels.linear import complete
from megatron_lite.kernels.routing import (
    Choice,
    Losses,
    Sums,
    router_logits,
    sinkhorn,
    with_losses,
)
from megatron_lite.kernels.tensor_collectives import ONE_RANK, Collectives
from megatron_lite.kernels.triton_support import generator_for
from megatron_lite.model.layer import MLP, Linear, MicroBatch
from megatron_lite.model.tensor_parallel import TensorParallel
from megatron_lite.parameter import Function, Initializer, Parameter, ParameterSpec, declare


class Router(torch.nn.Module):
    """Scores and chooses experts; see `kernels/routing.py`.

    `index`, `sums` and `loads`, set by `optimizer.Balance`: its number among the model's routers,
    sums over the tokens of this step, and each expert's tokens of the previous step divided by all
    tokens, (E,) fp32; None: not counted.
    """

    index = 0
    sums: Sums | None = None
    loads: Tensor | None = None

    def __init__(self, name: str, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.name, self.config = name, config
        self._is_first_rank = parallel.group.rank == 0
        self.choice = Choice(
            config.num_experts_per_token,
            config.moe_router_score,
            config.moe_normalize_top_k,
            config.moe_routed_scaling_factor,
            config.moe_router_groups,
            config.moe_router_top_groups,
        )
        weights, count = Initializer("normal", config.init_method_std), config.num_experts
        biases = weights if config.random_bias_init else Initializer("constant", 0.0)
        split = parallel.replicated(inside=True)
        self.weight = declare(
            ParameterSpec(f"{name}.weight", (count, config.hidden_size), weights, split=split)
        )
        self.bias: Parameter | None = None
        if config.moe_router_bias:
            self.bias = declare(
                ParameterSpec(f"{name}.bias", (count,), biases, weight_decay=0.0, split=split)
            )
        self.balance: Parameter | None = None  # the choice bias
        if config.moe_router_choice_bias:
            zeros, split = Initializer("constant", 0.0), parallel.replicated()
            self.balance = declare(
                ParameterSpec(
                    f"{name}.balance",
                    (count,),
                    zeros,
                    weight_decay=0.0,
                    split=split,
                    is_state=True,
                )
            )

    def forward(self, tokens: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the scores, fp32, and the chosen experts, ascending, of tokens (t, h): (t, K)
        each."""
        routing = micro_batch.routing
        if routing is not None and self.config.moe_jitter_eps:
            tokens = self._jittered(tokens, micro_batch)
        logits = router_logits(tokens, self.weight, self.bias)  # (t, E)
        probabilities = self.choice.probabilities(logits)
        with torch.no_grad():
            values = probabilities if self.balance is None else probabilities + self.balance
            chosen = self.choice.experts(values)
            if routing is not None:
                real = slice(routing.samples * micro_batch.tokens.shape[1])  # padding comes last
                if self.config.expert_routing_type == "sinkhorn":
                    chosen[real] = self.choice.experts(sinkhorn(logits[real]))
                if routing.replay is not None:
                    chosen[real] = routing.replay(self.name, chosen[real])
        scores = self.choice.scores(probabilities, chosen)
        chosen, order = chosen.sort(dim=1)
        scores = scores.gather(1, order)
        if routing is None:
            return scores, chosen
        shares = probabilities
        if self.choice.score == "sigmoid":
            shares = probabilities / probabilities.sum(1, keepdim=True)
        return with_losses(
            scores, logits, shares, chosen, self._losses(chosen, micro_batch)
        ), chosen

    def _jittered(self, tokens: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Return tokens (t, h) in fp32 times random factors."""
        eps = self.config.moe_jitter_eps
        seed = micro_batch.site_seed(self.name, eps)
        assert seed is not None, "training has seeds"
        factors = torch.empty_like(tokens, dtype=torch.float32)
        return tokens * factors.uniform_(
            1.0 - eps, 1.0 + eps, generator=generator_for(tokens).manual_seed(seed)
        )

    def _losses(self, chosen: Tensor, micro_batch: MicroBatch) -> Losses:
        """Return the losses of a micro-batch."""
        config, routing = self.config, micro_batch.routing
        assert routing is not None
        length = micro_batch.tokens.shape[1]
        tokens = routing.samples * length
        balance, z = config.expert_auxiliary_loss_coefficient, config.expert_z_loss_coefficient
        if routing.counts is not None:
            ones = torch.ones_like(chosen[:tokens], dtype=torch.float32)
            mask = ones.new_zeros(tokens, config.num_experts).scatter_(1, chosen[:tokens], ones)
            routing.counts[self.index] = mask.sum(0)

        def loads(mask: Tensor) -> Tensor | None:
            if config.moe_balance == "global":
                return self.loads
            if config.moe_balance == "sequence":
                samples = mask.view(-1, length, config.num_experts)
                return samples.mean(1, keepdim=True).expand_as(samples).reshape(mask.shape)
            assert config.moe_balance == "micro_batch", config.moe_balance
            assert routing.counts is not None, "complete after the model's forward pass"
            return routing.counts.sum(0) / (len(routing.counts) ** 2 * tokens)

        if not self._is_first_rank:
            balance = z = 0.0
        return Losses(tokens, routing.scale, balance, z, loads, self.sums)


class _Gathered(Function):
    """All tokens of a residual stream (..., h); their gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives, ctx.shape = collectives, residual.shape
        gathered = complete(collectives.start_gather(residual))
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return complete(ctx.collectives.start_reduce(dy.clone())).view(ctx.shape), None


class Experts(torch.nn.Module):
    """The mixture: (b, s, h) -> (b, s, h)."""

    def __init__(
        self, name: str, config: ModelConfig, kernels: Kernels, parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.config, self.kernels = config, kernels
        count, hidden = config.num_experts, config.hidden_size
        width = config.moe_ffn_hidden_size
        biased, channels = config.add_mlp_biases, parallel.parts(width)
        self.adds_bias = parallel.group.rank == 0
        self.group = parallel.experts
        self.router = Router(f"{name}.router", config, parallel)
        # each expert's rows, gate rows first
        rows = (width,) * ((2 if config.gated else 1) * count)
        split, std = (
            parallel.split_experts(0, *[channels] * len(rows)),
            config.init_method_std_mlp_1,
        )
        self.up = Linear(f"{name}.experts.up", hidden, rows, std, config, biased, split)
        rows, std = (hidden,) * count, config.init_method_std_mlp_2
        split = parallel.split_experts(1, channels)
        self.down = Linear(f"{name}.experts.down", width, rows, std, config, biased, split)
        self.shared: MLP | None = None
        if config.num_shared_experts:
            width *= config.num_shared_experts
            self.shared = MLP(f"{name}.shared", width, config, kernels, parallel)

    @property
    def recompute_level(self) -> str:
        """See `kernels.mlp`."""
        return self._recompute_level

    @recompute_level.setter
    def recompute_level(self, level: str) -> None:
        self._recompute_level = level
        if self.shared is not None:
            self.shared.recompute_level = level

    def forward(
        self,
        hidden: Tensor,
        micro_batch: MicroBatch,
        collectives: Collectives = ONE_RANK,
        after: Collectives | None = None,
    ) -> Tensor:
        """Compute (..., h) -> (..., h). after: other collectives of the output, None or
        `unreduced`."""
        tokens = _Gathered.apply(hidden, collectives)
        flat = tokens.flatten(0, -2)  # (t, h)
        scores, chosen = self.router(flat, micro_batch)
        dispatch = dispatched(flat, chosen, self.config.num_experts, self.group)
        # while the rows are on their way
        shared = None
        if self.shared is not None:
            shared = self.shared(tokens, micro_batch, collectives.unreduced)
        branch = experts(
            flat,
            scores,
            dispatch,
            _map_of(self.up),
            _map_of(self.down),
            self.config.activation_type,
            self.config.gated,
            self.recompute_level,
            self.kernels.triton,
            self.adds_bias,
            self.config.activation_limit,
        ).view(tokens.shape)
        if shared is not None:
            branch = branch + shared
        return branch if after is not None else collectives.joined(branch)


def _map_of(linear: Linear) -> ExpertMap:
    adapter = None if linear.adapter is None else linear.adapter.of_experts()
    return ExpertMap(linear.weight, linear.bias, adapter)
