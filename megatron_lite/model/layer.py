"""A layer of the model, its input, and its building blocks: linear maps, MLPs, norms, dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.config import ModelConfig
from megatron_lite.kernels.attention.attention import Documents
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.eight_bit import EightBit
from megatron_lite.kernels.linear import PLAIN, Products, linear
from megatron_lite.kernels.mlp import mlp
from megatron_lite.kernels.normalization import Kind, Weights, add_norm
from megatron_lite.kernels.tensor_collectives import ONE_RANK, Collectives
from megatron_lite.kernels.triton_support import generator_for
from megatron_lite.model.adapters import Adapter
from megatron_lite.model.kv_cache import CachePass
from megatron_lite.model.tensor_parallel import TensorParallel
from megatron_lite.parameter import Initializer, Parameter, ParameterSpec, declare
from megatron_lite.seeds import derive_seed
from megatron_lite.tiles import WHOLE, Split

MASKED = -1  # label of a token without a loss


class Routing(NamedTuple):
    """A micro-batch of training, for the routers of experts."""

    samples: int  # without padding, which comes last
    scale: Tensor  # loss scale / tokens of the global batch, ()
    # a router's name and choice (t, K) without padding -> the experts to take; None: its choice
    replay: Callable[[str, Tensor], Tensor] | None = None
    # tokens by router and expert, (routers, E) fp32, which the routers fill; None: not needed
    counts: Tensor | None = None


@dataclass(frozen=True)
class MicroBatch:
    """The input of one pass through the model."""

    tokens: Tensor  # (b, s) int64
    labels: Tensor  # (b, s) int64; below zero: masked, no loss or gradient
    gradient_scale: Tensor | None = (
        None  # loss scale / tokens of the global batch, (); None: compute no gradients
    )
    dropout_seed: int | None = None  # None: no dropout
    documents: Documents | None = None  # None: attention crosses document borders
    loss_weight: float = 1.0  # factor on the summed loss; `gradient_scale` includes it
    cache: CachePass | None = None  # generation: the head returns logits (t, v) instead of a loss
    positions: Tensor | None = None  # (b, s) int64; None: 0, 1, 2, ... in every sample
    routing: Routing | None = None  # training of experts; None: count and balance nothing
    # computed by the first layer that needs it, for all layers
    shared: dict[str, Any] = field(default_factory=dict)

    @property
    def carried(self) -> Sequence[Tensor]:
        """See `zero.messages.Carrier`."""
        counts = None if self.routing is None else self.routing.counts
        return () if counts is None else (counts,)

    def site_seed(self, site: str, p: float) -> int | None:
        """Return the seed of one dropout site with probability p; None: no dropout."""
        return (
            None if p == 0.0 or self.dropout_seed is None else derive_seed(self.dropout_seed, site)
        )


class Layer(torch.nn.Module):
    """One layer of the model: hidden (b, s, h) -> hidden (b, s, h)."""

    variant: tuple[Any, ...] = ()  # tells layers apart whose parameters are alike
    name: str  # unique in the model, and the prefix of its parameters' names: "embedding", "blocks.3", "head"
    # See `zero.stage.Layer`.
    borrows_from: tuple[torch.nn.Module, ...] = ()
    borrowed: tuple[str, ...] = ()
    gradients_in_forward: bool = False
    backward_needs_weights: bool = True
    recomputed: bool = False

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        raise NotImplementedError


class Linear(torch.nn.Module):
    """A linear layer with weight (o, i) and, if `biased`, bias (o,).

    out_sizes: rows of each linear map stored in the weight, from the top; they sum to o. split: the
    weight's; a bias is split with the rows, and whole if columns are split.
    """

    def __init__(
        self,
        name: str,
        in_size: int,
        out_sizes: Sequence[int],
        std: float,
        config: ModelConfig,
        biased: bool,
        split: Split = WHOLE,
    ) -> None:
        super().__init__()
        self.eight_bit: EightBit | None = None  # set by `round_products`
        self.adapter: Adapter | None = None  # set by `add_adapters`
        weights, out_size = Initializer("normal", std), sum(out_sizes)
        rows, shape = tuple(out_sizes), (out_size, in_size)
        self.weight = declare(
            ParameterSpec(f"{name}.weight", shape, weights, matrix_rows=rows, split=split)
        )
        self.bias: Parameter | None = None
        if biased:
            biases = weights if config.random_bias_init else Initializer("constant", 0.0)
            of_bias = replace(split, dim=0, blocks=(), sums_gradients=False) if split.dim else split
            self.bias = declare(
                ParameterSpec(f"{name}.bias", (out_size,), biases, weight_decay=0.0, split=of_bias)
            )

    def products(self, seed: int | None) -> Products:
        """Return the products for a micro-batch with this dropout seed; None: without gradients."""
        products = PLAIN if self.eight_bit is None else self.eight_bit.at(seed)
        return products if self.adapter is None else self.adapter.products(products, seed)

    def forward(
        self,
        input_: Tensor,
        before: Collectives = ONE_RANK,
        after: Collectives = ONE_RANK,
        seed: int | None = None,
    ) -> Tensor:
        """Compute the layer; see `products` and `kernels.linear`."""
        return linear(input_, self.weight, self.bias, before, after, self.products(seed))


class MLP(torch.nn.Module):
    """Plain or gated two-layer MLP: (b, s, h) -> (b, s, h)."""

    recompute_level = "none"

    def __init__(
        self,
        name: str,
        width: int,
        config: ModelConfig,
        kernels: Kernels,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        channels = parallel.parts(width)
        self.activation_type, self.gated = config.activation_type, config.gated
        self.limit, self.kernels = config.activation_limit, kernels
        up_sizes = (width,) * (2 if config.gated else 1)  # gate rows first
        biased = config.add_mlp_biases
        split, std = parallel.split(0, *[channels] * len(up_sizes)), config.init_method_std_mlp_1
        self.up = Linear(f"{name}.up", config.hidden_size, up_sizes, std, config, biased, split)
        self.down = Linear(
            f"{name}.down",
            width,
            (config.hidden_size,),
            config.init_method_std_mlp_2,
            config,
            biased,
            parallel.split(1, channels),
        )

    def forward(
        self,
        hidden: Tensor,
        micro_batch: MicroBatch,
        collectives: Collectives = ONE_RANK,
        after: Collectives | None = None,
    ) -> Tensor:
        """Compute (..., h) -> (..., h). after: other collectives of the output."""
        seed = micro_batch.dropout_seed
        return mlp(
            hidden,
            up=self.up.weight,
            up_bias=self.up.bias,
            down=self.down.weight,
            down_bias=self.down.bias,
            activation=self.activation_type,
            gated=self.gated,
            recompute_level=self.recompute_level,
            triton=self.kernels.triton,
            exchange=collectives,
            products=(self.up.products(seed), self.down.products(seed)),
            after=after,
            limit=self.limit,
        )


class Norm(torch.nn.Module):
    """Layer or RMS norm over the last dimension, (..., h) -> (..., h); parameters, if any, are
    (h,)."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        kernels: Kernels,
        split: Split = WHOLE,
        size: int | None = None,
    ) -> None:
        """Declare the parameters. size: last dimension; None: hidden_size."""
        super().__init__()
        centered = {"layer_norm": True, "rms_norm": False}[config.normalization_type]
        self.kind = Kind(config.layer_norm_eps, centered, config.zero_centered_normalization)
        self.kernels = kernels
        shape = (size or config.hidden_size,)
        self.weight: Parameter | None = None
        self.bias: Parameter | None = None
        if config.use_layer_norm_weight:
            init_range = config.layer_norm_init_range
            weights = Initializer(
                "around_zero" if self.kind.zero_centered else "around_one", init_range
            )
            self.weight = declare(
                ParameterSpec(f"{name}.weight", shape, weights, weight_decay=0.0, split=split)
            )
        if config.use_layer_norm_weight and config.use_layer_norm_bias and centered:
            zeros = Initializer("constant", 0.0)
            self.bias = declare(
                ParameterSpec(f"{name}.bias", shape, zeros, weight_decay=0.0, split=split)
            )

    @property
    def weights(self) -> Weights:
        """Weight and bias."""
        return Weights(self.weight, self.bias)

    def forward(self, hidden: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Normalize; the output has the given dtype, by default the input's."""
        return self.add(hidden, None, dtype)[1]

    def add(
        self, hidden: Tensor, branch: Tensor | None, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return hidden + branch, in the branch's memory if the dtypes agree, and its norm.

        Without a branch, return `hidden` itself and its norm.
        """
        return add_norm(
            hidden, branch, self.weight, self.bias, self.kind, self.kernels.triton, dtype=dtype
        )


def dropout(x: Tensor, p: float, seed: int | None) -> Tensor:
    """Zero each element with probability p and scale the rest by 1 / (1 - p); no-op without a seed
    (evaluation).

    The mask depends only on the seed.
    """
    if p == 0.0 or seed is None:
        return x
    generator = generator_for(x).manual_seed(seed)
    mask = torch.empty_like(x).bernoulli_(1.0 - p, generator=generator)
    return x * mask.div_(1.0 - p)
