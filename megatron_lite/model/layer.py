"""What a layer of the chain is, and what it receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config import ModelConfig
from megatron_lite.kernels.attention.attention import Documents
from megatron_lite.kernels.linear import linear
from megatron_lite.model.kv_cache import CachePass
from megatron_lite.parameter import Initializer, ParameterSpec, declare
from megatron_lite.seeds import derive_seed

MASKED = -1  # label of a token that counts in no loss


@dataclass(frozen=True)
class MicroBatch:
    """The input of one pass through the model."""

    tokens: Tensor  # (b, s) int64
    labels: Tensor  # (b, s) int64; below zero: masked, neither loss nor gradient
    gradient_scale: Tensor | None = None  # loss scale / tokens of the global batch, (); None: no gradients wanted
    dropout_seed: int | None = None  # None: nothing is dropped
    documents: Documents | None = None  # None: attention crosses their borders
    loss_weight: float = 1.0  # of the summed loss; `gradient_scale` holds it, too
    cache: CachePass | None = None  # what grows; the head then gives logits (t, v) and no loss
    positions: Tensor | None = None  # (b, s) int64; None: 0, 1, 2, ... in every sample

    def site_seed(self, site: str) -> int | None:
        """The seed of one place that drops."""
        return None if self.dropout_seed is None else derive_seed(self.dropout_seed, site)


class Layer(torch.nn.Module):
    """One link of the chain: hidden (b, s, h) -> hidden (b, s, h)."""

    # Unique in the model, and the beginning of its parameters' names: "embedding", "blocks.3", "head".
    name: str
    # Layers whose parameters this one also uses (a tied head uses the embedding's).
    borrows_from: tuple[torch.nn.Module, ...] = ()
    # Whether parameter gradients are written in the forward pass already (the loss does).
    gradients_in_forward = False
    # Whether the backward pass reads parameters; if not, they are not gathered for it.
    backward_needs_weights = True
    # Whether only the input is kept, and the backward pass runs the forward pass again.
    recomputed = False

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        raise NotImplementedError


class Linear(torch.nn.Module):
    """Parameters of a linear layer: weight (o, i) and, where it is `biased`, bias (o,).

    out_sizes: of each linear map in it, their rows one after the other; they add up to o.
    """

    def __init__(
        self, name: str, in_size: int, out_sizes: Sequence[int], std: float, config: ModelConfig, biased: bool
    ) -> None:
        super().__init__()
        weights, out_size = Initializer("normal", std), sum(out_sizes)
        shape = (out_size, in_size)
        self.weight = declare(ParameterSpec(f"{name}.weight", shape, weights, matrix_rows=tuple(out_sizes)))
        biases = weights if config.random_bias_init else Initializer("constant", 0.0)
        self.bias = declare(ParameterSpec(f"{name}.bias", (out_size,), biases, weight_decay=False)) if biased else None

    def forward(self, input_: Tensor) -> Tensor:
        return linear(input_, self.weight, self.bias)


def dropout(x: Tensor, p: float, seed: int | None) -> Tensor:
    """Zero each element with probability p and scale the rest by 1 / (1 - p); with no seed (evaluation) drop nothing.

    The mask depends on the seed only, not on what ran before.
    """
    if p == 0.0 or seed is None:
        return x
    generator = torch.Generator(device=x.device).manual_seed(seed)
    mask = torch.empty_like(x).bernoulli_(1.0 - p, generator=generator)
    return x * mask.div_(1.0 - p)
