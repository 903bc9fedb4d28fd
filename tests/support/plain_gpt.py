"""An independent oracle: the same architectures out of torch.nn and autograd, nothing of ours but
the names."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_lite.config import ModelConfig, OptimizerConfig

ACTIVATIONS = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_exact": functional.gelu,
    "silu": functional.silu,
    "relu": functional.relu,
    "squared_relu": lambda x: functional.relu(x) ** 2,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
    "identity": lambda x: x,
}


class PlainBlock(nn.Module):
    documents: Tensor | None = (
        None  # (b, s): a number for each token's document, which attention does not leave
    )
    positions: Tensor | None = None  # (b, s); None: 0, 1, 2, ...

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.config = config
        kinds = [
            pattern[index % len(pattern)] if pattern else ""
            for pattern in (config.attention_pattern, config.rotary_pattern)
        ]
        self.window = config.window_size if kinds[0] != "full" else None
        self.rotates = config.use_rotary_embeddings and kinds[1] != "nope"
        self.divisor = index + 1 if config.scale_attn_by_inverse_layer_idx else 1
        h = config.hidden_size
        d = config.kv_channels
        f = config.ffn_hidden_size
        n, g = config.num_attention_heads, config.head_groups
        if config.norm_placement != "post":
            self.attention_norm = PlainNorm(config)
        if config.norm_placement != "post" and config.parallel_branches != "one_norm":
            self.mlp_norm = PlainNorm(config)
        if config.norm_placement != "pre":
            self.attention_output_norm, self.mlp_output_norm = PlainNorm(config), PlainNorm(config)
        self.attention = nn.ModuleDict(
            {
                "query_key_value": nn.Linear(h, (n + 2 * g) * d, config.add_qkv_biases),
                "output": nn.Linear(n * d, h, config.add_linear_biases),
            }
        )
        if config.attention_sinks:
            self.attention.register_parameter("sinks", nn.Parameter(torch.empty(n)))
        if config.qk_layernorm:
            self.together = config.qk_norm_scope == "all"
            self.attention["query_norm"], self.attention["key_norm"] = (
                PlainNorm(config, n * d if self.together else d),
                PlainNorm(config, g * d if self.together else d),
            )
        self.mlp: nn.Module = plain_mlp(h, f, config)
        if config.has_experts(index):
            self.mlp = PlainExperts(config)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.parallel_branches != "none":
            normalized = self.attention_norm(x)
            other = self.mlp_norm(x) if self.config.parallel_branches == "two_norms" else normalized
            both = self.attend(normalized) + self.multiply(other)
            return x + both * self.config.residual_scale
        before, after = (self.config.norm_placement in (place, "both") for place in ("pre", "post"))
        branch = self.attend(self.attention_norm(x) if before else x)
        branch = self.attention_output_norm(branch) if after else branch
        x = x + branch * self.config.residual_scale
        branch = self.multiply(self.mlp_norm(x) if before else x)
        branch = self.mlp_output_norm(branch) if after else branch
        return x + branch * self.config.residual_scale

    def multiply(self, x: Tensor) -> Tensor:
        if isinstance(self.mlp, PlainExperts):
            return self.mlp(x)
        return self.mlp["down"](activated(self.mlp["up"](x), self.config))

    def attend(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        n = self.config.num_attention_heads
        g = self.config.head_groups
        d = self.config.kv_channels
        q, k, v = self.attention["query_key_value"](x).split([n * d, g * d, g * d], dim=-1)
        if self.config.qk_layernorm and self.together:
            q, k = self.attention["query_norm"](q), self.attention["key_norm"](k)
        q, k, v = (t.view(b, s, -1, d).transpose(1, 2) for t in (q, k, v))
        if self.config.qk_layernorm and not self.together:
            q, k = self.attention["query_norm"](q), self.attention["key_norm"](k)
        if self.rotates:
            q, k = (rotate(t, self.config, self.positions, self.window is not None) for t in (q, k))
        k, v = k.repeat_interleave(n // g, dim=1), v.repeat_interleave(n // g, dim=1)
        distance = torch.arange(s)[:, None] - torch.arange(s)
        allowed = (distance >= 0) & (distance < (self.window or s))
        if self.documents is not None:
            allowed = allowed & (
                self.documents[:, None, :, None] == self.documents[:, None, None, :]
            )
        scores = q @ k.transpose(-1, -2) / self.divisor
        scores = scores * (self.config.attention_scale or 1 / math.sqrt(d))
        if cap := self.config.attention_soft_cap:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~allowed, -math.inf)
        if self.config.attention_sinks:
            sinks = self.attention.sinks.view(1, n, 1, 1).expand(b, n, s, 1)
            scores = torch.cat((scores, sinks), -1)
        probabilities = scores.softmax(-1)[..., :s]
        return self.attention["output"]((probabilities @ v).transpose(1, 2).reshape(b, s, n * d))


def activated(up: Tensor, config: ModelConfig) -> Tensor:
    act = ACTIVATIONS[config.activation_type]
    if not config.gated:
        return act(up)
    gate, up = up.chunk(2, dim=-1)
    if limit := config.activation_limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    return act(gate) * up


def plain_mlp(hidden: int, width: int, config: ModelConfig, experts: int = 1) -> nn.ModuleDict:
    bias, rows = config.add_mlp_biases, width * (1 + config.gated)
    up, down = nn.Linear(hidden, experts * rows, bias), nn.Linear(width, experts * hidden, bias)
    return nn.ModuleDict({"up": up, "down": down})


class PlainExperts(nn.Module):
    """Every expert computes every token, and scores of 0 drop what was not chosen."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        h, width, count = config.hidden_size, config.moe_ffn_hidden_size, config.num_experts
        self.router = nn.Linear(h, count, config.moe_router_bias)
        if config.moe_router_choice_bias:
            self.router.register_buffer("balance", torch.zeros(count))
        self.experts = plain_mlp(h, width, config, count)
        self.shared = (
            plain_mlp(h, width * config.num_shared_experts, config)
            if config.num_shared_experts
            else None
        )
        self.loads = torch.zeros(count)  # of the step before
        self.exact_balance = torch.zeros(count, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        config, count = self.config, self.config.num_experts
        self.logits = self.router(x)  # (b, s, E)
        softmax = config.moe_router_score == "softmax"
        p = self.logits.softmax(-1) if softmax else self.logits.sigmoid()
        values = p.detach() + getattr(self.router, "balance", 0.0)
        if (groups := config.moe_router_groups) > 1:
            best = values.unflatten(-1, (groups, -1)).topk(2).values.sum(-1)
            kept = torch.zeros_like(best).scatter(
                -1, best.topk(config.moe_router_top_groups).indices, 1.0
            )
            values = values.masked_fill(kept.repeat_interleave(count // groups, -1) == 0, -math.inf)
        chosen = values.topk(config.num_experts_per_token).indices
        self.mask = torch.zeros_like(p).scatter(-1, chosen, 1.0)
        scores = p * self.mask
        if config.moe_normalize_top_k:
            scores = scores / scores.sum(-1, keepdim=True)
        scores = scores * config.moe_routed_scaling_factor
        self.shares = p / p.sum(-1, keepdim=True)
        up, down = self.experts["up"], self.experts["down"]
        total = torch.zeros_like(x)
        for expert in range(count):
            own = [
                None if each is None else each.unflatten(0, (count, -1))[expert]
                for each in (up.weight, up.bias, down.weight, down.bias)
            ]
            y = functional.linear(
                activated(functional.linear(x, own[0], own[1]), config), own[2], own[3]
            )
            total = total + y * scores[..., expert, None]
        if self.shared is not None:
            total = total + self.shared["down"](activated(self.shared["up"](x), config))
        return total

    def losses(self) -> Tensor:
        """Balance loss, unless of all blocks together, and z-loss, times their coefficients."""
        config = self.config
        z = self.logits.logsumexp(-1).square().mean() * config.expert_z_loss_coefficient
        if config.moe_balance == "micro_batch":
            return z
        loads = self.mask.mean(1) if config.moe_balance == "sequence" else self.loads
        balance = (loads * self.shares.mean(1)).sum(-1).mean() * config.num_experts
        return z + balance * config.expert_auxiliary_loss_coefficient

    def after_update(self) -> None:
        """Move the choice bias, in float64, by the counts of the step."""
        counts = self.mask.sum((0, 1)).double()
        self.loads = self.mask.mean((0, 1))
        signs = (counts.mean() - counts).sign()
        self.exact_balance += self.config.moe_router_bias_update_rate * (signs - signs.mean())
        if self.config.moe_router_choice_bias:
            self.router.balance.copy_(self.exact_balance)


class PlainGPT(nn.Module):
    """tokens (b, s) -> logits (b, s, v), with our parameter names in its state dict."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.ModuleDict(
            {"word": nn.Embedding(config.vocab_size, config.hidden_size)}
        )
        if config.use_position_embeddings:
            self.embedding["position"] = nn.Embedding(
                config.max_position_embeddings, config.hidden_size
            )
        if config.input_embedding_norm:
            self.embedding["norm"] = PlainNorm(config)
        self.blocks = nn.ModuleList(PlainBlock(config, index) for index in range(config.num_layers))
        self.head = nn.ModuleDict({"norm": PlainNorm(config)})
        if not config.tie_word_embeddings:
            self.head["output"] = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding["word"](tokens) * self.config.embedding_scale
        if self.config.use_position_embeddings:
            positions = self.blocks[0].positions
            x = x + self.embedding["position"](
                torch.arange(tokens.shape[1]) if positions is None else positions
            )
        if self.config.input_embedding_norm:
            x = self.embedding["norm"](x)
        for block in self.blocks:
            x = block(x)
        weight = (
            self.embedding["word"].weight
            if self.config.tie_word_embeddings
            else self.head["output"].weight
        )
        logits = self.head["norm"](x) @ weight.T * self.config.logit_scale
        cap = self.config.logit_soft_cap
        return cap * torch.tanh(logits / cap) if cap else logits

    def loss(self, tokens: Tensor, masked: Tensor | None = None) -> Tensor:
        """Mean cross-entropy of (b, s + 1) tokens, without the labels in `masked`, (b, s)."""
        labels = tokens[:, 1:] if masked is None else tokens[:, 1:].masked_fill(masked, -100)
        return functional.cross_entropy(
            self(tokens[:, :-1]).flatten(0, 1).float(), labels.flatten()
        )

    @property
    def experts(self) -> list[PlainExperts]:
        return [block.mlp for block in self.blocks if isinstance(block.mlp, PlainExperts)]

    def expert_losses(self) -> Tensor | float:
        """What the routers add to the loss, after a pass."""
        if not self.experts:
            return 0.0
        total = torch.stack([experts.losses() for experts in self.experts]).sum()
        if self.config.moe_balance != "micro_batch":
            return total
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        logits = tuple(experts.logits.flatten(0, 1) for experts in self.experts)
        numbers = self.config.num_experts, self.config.num_experts_per_token
        balance = load_balancing_loss_func(logits, *numbers)
        return total + balance * self.config.expert_auxiliary_loss_coefficient

    def load(self, weights: dict[str, np.ndarray]) -> None:
        self.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()})


class PlainNorm(nn.Module):
    def __init__(self, config: ModelConfig, size: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.weight = None
        self.bias = None
        if config.use_layer_norm_weight:
            self.weight = nn.Parameter(torch.empty(size or config.hidden_size))
            if config.normalization_type == "layer_norm" and config.use_layer_norm_bias:
                self.bias = nn.Parameter(torch.empty(size or config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.config.zero_centered_normalization:
            weight = weight + 1
        if self.config.normalization_type == "layer_norm":
            return functional.layer_norm(
                x, x.shape[-1:], weight, self.bias, self.config.layer_norm_eps
            )
        return functional.rms_norm(x, x.shape[-1:], weight, self.config.layer_norm_eps)


def rotate(
    x: Tensor, config: ModelConfig, positions: Tensor | None = None, windowed: bool = False
) -> Tensor:
    """Rotary positions through complex numbers: of the first r channels, j and j + r / 2 are one
    complex number.

    Only plain and linear frequencies; tests/layers/test_rotary.py has the others.
    """
    r, s = int(x.shape[-1] * config.rotary_percent), x.shape[-2]
    where = torch.arange(s) if positions is None else positions[:, None]  # (s,) or (b, 1, s)
    base, factor = config.rotary_base, config.rope_factor or 1
    if windowed and config.window_rotary_base is not None:
        base, factor = config.window_rotary_base, 1
    angles = where[..., None] * base ** (-torch.arange(0, r, 2) / r) / factor
    turned = torch.complex(x[..., : r // 2], x[..., r // 2 : r]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([turned.real, turned.imag, x[..., r:]], dim=-1)


def plain_adamw(
    model: nn.Module, options: OptimizerConfig, scales: Mapping[str, float] | None = None
) -> Callable[[Tensor, float], float]:
    """Return a function that updates a model from a loss at a learning rate, and returns the
    gradient norm.

    As in Fast-LLM, norms and biases are exempt from weight decay, embeddings are not. scales:
    factors on the learning rate by name; 0 freezes.
    """
    groups = []
    for name, parameter in model.named_parameters():
        scale = (scales or {}).get(name, 1.0)
        parameter.requires_grad_(scale != 0)
        if scale:
            decay = options.weight_decay if parameter.dim() > 1 else 0.0
            groups.append({"params": [parameter], "weight_decay": decay, "scale": scale})
    optimizer = torch.optim.AdamW(
        groups, betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_eps
    )

    def update(loss: Tensor, rate: float) -> float:
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        optimizer.step()
        return float(norm)

    return update
