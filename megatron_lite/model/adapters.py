"""Adapters of linear layers: their parameters, and which layers have them.

A's initial values are uniform within 1 / sqrt(inputs), as peft's, and B's are zeros, so training
begins with the function of the frozen model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.config import Config, ModelConfig
from megatron_lite.config.adapters import FUSED, AdapterConfig
from megatron_lite.errors import UsageError
from megatron_lite.kernels.adapters import AdapterPass
from megatron_lite.kernels.experts import ExpertAdapter
from megatron_lite.kernels.linear import Products
from megatron_lite.kernels.tensor_collectives import split_seed
from megatron_lite.model.parameter_patterns import by_block, compressed, selected
from megatron_lite.parameter import Initializer, Parameter, ParameterSpec, declare
from megatron_lite.seeds import derive_seed

A, B = ".lora_a", ".lora_b"  # ends of names
_MAPS = {"query_key_value": ("query", "key", "value"), "up": ("gate", "up")}


class LinearMap(NamedTuple):
    """A linear map that a weight holds, alone or with others, or that of every expert."""

    name: str  # blocks.0.attention.query
    weight: str  # name of the module: blocks.0.attention.query_key_value
    first: int  # row of the weight
    rows: int
    parts: slice  # of the weight's `matrix_rows`
    experts: int = 1  # each with an adapter of its own; those of A and of B lie one below the other


def maps_of(spec: ParameterSpec, model: ModelConfig, model_type: str | None) -> list[LinearMap]:
    """Return the maps of a block's weight that have adapters of their own in peft's files of this
    architecture (None: that of most)."""
    weight = spec.name.removesuffix(".weight")
    place, own = weight.rsplit(".", 1)
    sizes = spec.matrix_rows
    names = _MAPS.get(own, ())
    experts = model.num_experts if place.endswith(".experts") else 1
    if experts > 1 or len(sizes) != len(names) or model_type in FUSED[own]:
        return [LinearMap(weight, weight, 0, spec.shape[0], slice(0, len(sizes)), experts)]
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [
        LinearMap(f"{place}.{name}", weight, first, size, slice(number, number + 1))
        for number, (name, first, size) in enumerate(zip(names, firsts, sizes, strict=True))
    ]


class Adapter(torch.nn.Module):
    """Adapters of linear maps that one weight (o, i) holds: A (m r, i) and B (o', r), the adapters
    of m maps with o' rows, one below the other; or of one map of each of m experts.

    spec: the weight's. maps: those with adapters.
    """

    def __init__(
        self, spec: ParameterSpec, maps: Sequence[LinearMap], options: AdapterConfig
    ) -> None:
        super().__init__()
        self.name, self.maps = spec.name.removesuffix(".weight"), maps
        self.options, split = options, spec.split
        rank, inputs = options.lora_rank, spec.shape[1]
        splits_inputs = split.dim == 1
        self._rank = split.rank if splits_inputs else 0  # whose inputs differ
        # gradients of what all ranks have are partial sums
        of_a = of_b = replace(split, dim=0, blocks=(), sums_gradients=True)
        sizes = list(spec.matrix_rows)  # on this rank
        if splits_inputs:
            of_a = split
        elif split.blocks:
            sizes = [block.part_size for block in split.blocks]
            of_b = replace(
                split, blocks=tuple(block for each in maps for block in split.blocks[each.parts])
            )
        self.rows = tuple(
            (sum(sizes[: each.parts.start]), sum(sizes[: each.parts.stop])) for each in maps
        )
        values = Initializer("around_zero", inputs**-0.5), Initializer("constant", 0.0)
        single = [each.rows // each.experts for each in maps for _ in range(each.experts)]
        rows = (rank,) * len(single), tuple(single)
        shapes = (sum(rows[0]), inputs), (sum(rows[1]), rank)
        self.a, self.b = (
            declare(
                ParameterSpec(self.name + end, shape, initializer, matrix_rows=each, split=of_part)
            )
            for end, shape, initializer, each, of_part in zip(
                (A, B), shapes, values, rows, (of_a, of_b), strict=True
            )
        )

    def products(self, base: Products, seed: int | None) -> Products:
        """Return the products of a pass, given those with the weight. seed: see
        `Linear.products`."""
        p = self.options.lora_dropout
        if p and seed is not None:
            seed = split_seed(derive_seed(seed, self.name, "adapter"), self._rank)
        return AdapterPass(
            self.a, self.b, self.rows, self.options.lora_factor, p, seed, base
        ).products()

    def of_experts(self) -> ExpertAdapter:
        """Return the adapters of experts for a pass."""
        return ExpertAdapter(self.a, self.b, self.options.lora_factor)


def add_adapters(linear: Iterable[Any], config: Config) -> list[Adapter]:
    """Give the chosen linear layers adapters. linear: the `Linear` modules of the blocks.

    Raises:
        UsageError: if a pattern of --lora_targets selects nothing, or experts would have dropout.
    """
    options, model_type = config.adapters, config.training.export_model_type
    found = [(module, maps_of(module.weight.spec, config.model, model_type)) for module in linear]
    names = [each.name for _, maps in found for each in maps]
    of_weights = {maps[0].weight: [each.name for each in maps] for _, maps in found}
    chosen = set[str]()
    for pattern in options.lora_targets or ("*",):
        try:
            chosen.update(selected("lora_targets", pattern, names))
        except UsageError:
            if not any(pattern in weight for weight in of_weights):
                raise
            for weight in selected("lora_targets", pattern, [*of_weights]):
                chosen.update(of_weights[weight])
    if options.lora_dropout and (
        experts := [name for name in names if ".mlp.experts." in name and name in chosen]
    ):
        raise UsageError(
            f"--lora_dropout={options.lora_dropout:g}: adapters of experts have none, as in peft, and {experts[0]} is "
            "selected; write --lora_dropout=0 or --lora_targets=attention (and mlp.shared)"
        )
    adapters = []
    for module, maps in found:
        own = [each for each in maps if each.name in chosen]
        if own:
            module.adapter = Adapter(module.weight.spec, own, options)
            adapters.append(module.adapter)
    return adapters


def freeze_base(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Freeze all parameters but those of adapters; return the latter."""
    of_adapters = []
    for parameter in parameters:
        if is_of_adapter(parameter.spec.name):
            of_adapters.append(parameter)
        else:
            parameter.spec = replace(parameter.spec, lr_scale=0.0)
    return of_adapters


def is_of_adapter(name: str) -> bool:
    """Return whether a parameter is one of an adapter."""
    return name.endswith((A, B))


def adapters_of(layers: Iterable[Any]) -> list[Adapter]:
    """Return the adapters in order."""
    return [module for layer in layers for module in layer.modules() if isinstance(module, Adapter)]


def factors(
    maps: Iterable[LinearMap], values: Mapping[str, Tensor], rank: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each map's rows of A and B as views. values: A and B by name."""
    done: dict[str, tuple[int, int]] = {}  # rows of A and B, by weight
    for each in maps:
        of_a, of_b = done.get(each.weight, (0, 0))
        ends = done[each.weight] = of_a + each.experts * rank, of_b + each.rows
        a, b = values[each.weight + A], values[each.weight + B]
        yield a[of_a : ends[0]], b[of_b : ends[1]]


def add_products(
    name: str,
    weight: Tensor,
    maps: Iterable[LinearMap],
    values: Mapping[str, Tensor],
    options: AdapterConfig,
) -> None:
    """Add c B A to a weight (o, i), in fp32, for those of the maps that it holds. values: A and B by
    name."""
    own = [each for each in maps if f"{each.weight}.weight" == name]
    for each, (a, b) in zip(own, factors(own, values, options.lora_rank), strict=True):
        rows = weight[each.first : each.first + each.rows]
        of_experts = (some.chunk(each.experts) for some in (rows, a, b))
        for own_rows, own_a, own_b in zip(*of_experts, strict=True):
            own_rows += (own_b @ own_a) * options.lora_factor


def describe(adapters: Sequence[Adapter], num_layers: int) -> str:
    """Return a log line: what is trained, and the maps with adapters; equal blocks share one
    name."""
    options = adapters[0].options
    trained = sum(each.spec.numel for adapter in adapters for each in (adapter.a, adapter.b))
    maps = [each.name for adapter in adapters for each in adapter.maps]
    listed = compressed(maps, dict.fromkeys(by_block(maps), range(num_layers)))
    return (
        f"adapters of rank {options.lora_rank}, factor {options.lora_factor:g}: {trained:,} parameters are trained, in "
        f"{len(maps)} linear maps: {', '.join(listed)}"
    )
