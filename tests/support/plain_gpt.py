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
        bias = config.add_mlp_biases
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
        self.mlp = nn.ModuleDict(
            {"up": nn.Linear(h, f * (1 + config.gated), bias), "down": nn.Linear(f, h, bias)}
        )

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
        up = self.mlp["up"](x)
        act = ACTIVATIONS[self.config.activation_type]
        if self.config.gated:
            gate, up = up.chunk(2, dim=-1)
            if limit := self.config.activation_limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
            up = act(gate) * up
        else:
            up = act(up)
        return self.mlp["down"](up)

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
