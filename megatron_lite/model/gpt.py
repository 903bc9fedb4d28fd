"""Build GPT as a list of layers, with the configured learning-rate scales and weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from megatron_lite.config import Config, ModelConfig, PerformanceConfig
from megatron_lite.config.mup import Factors, factors, with_factors
from megatron_lite.config.structured_values import lr_scale_patterns, mlp_lr_scales
from megatron_lite.distributed.rank_group import Group
from megatron_lite.kernels.choice import REFERENCES, Kernels
from megatron_lite.kernels.eight_bit import RECIPES, EightBit
from megatron_lite.model.adapters import add_adapters, freeze_base
from megatron_lite.model.block import Block
from megatron_lite.model.embedding_and_head import Embedding, Head
from megatron_lite.model.layer import Layer, Linear
from megatron_lite.model.parameter_patterns import selected, set_lr_scales, set_weight_decay
from megatron_lite.model.rotary import Rotary
from megatron_lite.model.tensor_parallel import ALONE, TensorParallel, tensor_parallel
from megatron_lite.parameter import Parameter, ParameterSpec

_DEFAULT_PERFORMANCE = PerformanceConfig()


def build_gpt(
    config: ModelConfig,
    sequence_length: int,
    kernels: Kernels = REFERENCES,
    logit_z_loss: float = 0.0,
    performance: PerformanceConfig = _DEFAULT_PERFORMANCE,
    parallel: TensorParallel = ALONE,
) -> list[Layer]:
    """Build the layers on the meta device, in order: embedding, blocks, head with loss.

    config: after `resolve`; muP's factors on scores and logits apply. sequence_length: positions in
    the rotary table. performance: what to recompute. parallel: the tensor-parallel split of the
    layers.
    """
    config = with_factors(config)
    rotary = Rotary(config, sequence_length) if config.use_rotary_embeddings else None
    embedding = Embedding(config, kernels, parallel)
    blocks = [
        Block(
            index,
            config,
            rotary if config.rotates(index) else None,
            kernels,
            performance,
            parallel,
        )
        for index in range(config.num_layers)
    ]
    return [embedding, *blocks, Head(config, embedding, kernels, parallel, logit_z_loss)]


def model_layers(config: Config, kernels: Kernels, groups: Any = None) -> list[Layer]:
    """Build the layers on the meta device and set learning-rate scales and weight decay as
    configured.

    groups: this rank's `Distributed`, or a plan's substitute; None: this rank alone.

    Raises:
        UsageError: if a pattern of --freeze, --lr_scales, --weight_decay_modules,
            --quantization_targets or --lora_targets matches nothing, or everything would be frozen.
    """
    length, z_loss = config.batch.sequence_length, config.training.logit_z_loss
    parallel = ALONE if groups is None else tensor_parallel(config, groups)
    layers = build_gpt(config.model, length, kernels, z_loss, config.performance, parallel)
    if config.adapters.lora_rank:
        add_adapters(linear_layers(layers), config)
    optimizer, parameters = config.optimizer, parameters_of(layers)
    if config.adapters.lora_rank:
        parameters = freeze_base(parameters)
    router = 1.0 if optimizer.router_lr_scale is None else optimizer.router_lr_scale
    scales = mlp_lr_scales(optimizer.mlp_lr_scale, router if config.model.num_experts > 1 else None)
    scales += lr_scale_patterns(optimizer.freeze, optimizer.lr_scales)
    set_lr_scales(parameters, scales)
    set_weight_decay(
        parameters, optimizer.weight_decay_default_mask, optimizer.weight_decay_modules
    )
    if config.model.mup:
        set_width_factors(parameters, factors(config))
    if config.performance.eight_bit:
        round_products(layers, config.performance, kernels, parallel.group)
    return layers


def set_width_factors(parameters: Iterable[Parameter], of_kinds: Mapping[str, Factors]) -> None:
    """Multiply initial values and learning rates by muP's factors; weight decay per step stays."""
    for parameter in parameters:
        spec, of_kind = parameter.spec, of_kinds[kind_of(parameter.spec)]
        initializer = replace(spec.initializer, scale=spec.initializer.scale * of_kind.initial_std)
        parameter.spec = replace(
            spec,
            initializer=initializer,
            lr_scale=spec.lr_scale * of_kind.learning_rate,
            weight_decay=spec.weight_decay / of_kind.learning_rate,
        )


def kind_of(spec: ParameterSpec) -> str:
    """Return a parameter's kind in `config.mup`: hidden, output or input."""
    if spec.matrix_rows:
        return "hidden"
    return "output" if len(spec.shape) == 2 and not spec.embedding else "input"


def round_products(
    layers: Iterable[Layer], options: PerformanceConfig, kernels: Kernels, group: Group
) -> None:
    """Round the factors of products in the blocks' linear layers, or in those selected by
    --quantization_targets.

    Raises:
        UsageError: if a pattern selects nothing.
    """
    linear = linear_layers(layers)
    recipe, patterns = RECIPES[options.eight_bit], options.quantization_targets or ("*",)
    units = kernels.eight_bit_units
    triton = kernels.triton and bool(units)  # without units, Triton may lack the formats, too
    made = {module: EightBit(recipe, module.weight.spec, group, units, triton) for module in linear}
    names = [eight_bit.name for eight_bit in made.values()]
    chosen = {
        name for pattern in patterns for name in selected("quantization_targets", pattern, names)
    }
    for module, eight_bit in made.items():
        if eight_bit.name in chosen:
            module.eight_bit = eight_bit


def linear_layers(layers: Iterable[Layer]) -> list[Linear]:
    """Return the linear layers of the blocks."""
    blocks = (layer for layer in layers if isinstance(layer, Block))
    return [module for block in blocks for module in block.modules() if isinstance(module, Linear)]


def parameters_of(layers: Iterable[Layer]) -> list[Parameter]:
    """Return all parameters in model order; a tied head adds only its norm."""
    return [cast(Parameter, parameter) for layer in layers for parameter in layer.parameters()]


def active_numel(numels: Iterable[tuple[str, int]], config: ModelConfig) -> int:
    """Return the elements of the parameters that compute a token: of experts, those of the chosen.

    numels: names and elements of the parameters.
    """
    sums = {True: 0, False: 0}  # by whether they are experts'
    for name, numel in numels:
        sums[".mlp.experts." in name] += numel
    return sums[False] + sums[True] * config.num_experts_per_token // config.num_experts


def shapes_of(layers: Iterable[Layer]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters by name, in model order."""
    return {parameter.spec.name: parameter.spec.shape for parameter in parameters_of(layers)}
