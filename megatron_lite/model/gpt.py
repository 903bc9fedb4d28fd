"""GPT: an ordered list of layers that pass one hidden tensor, (b, s, h)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from megatron_lite.config import Config, ModelConfig
from megatron_lite.config.structured_values import lr_scale_patterns
from megatron_lite.kernels.choice import REFERENCES, Kernels
from megatron_lite.model.block import Block
from megatron_lite.model.embedding_and_head import Embedding, Head
from megatron_lite.model.layer import Layer
from megatron_lite.model.parameter_patterns import set_weight_decay
from megatron_lite.model.rotary import Rotary
from megatron_lite.parameter import Parameter, set_lr_scales


def build_gpt(
    config: ModelConfig, sequence_length: int, kernels: Kernels = REFERENCES, logit_z_loss: float = 0.0
) -> list[Layer]:
    """The layers of a model in order, on the meta device: embedding, blocks, head with loss.

    `config` has every derived value filled in; positions are tabled up to `sequence_length`.
    `kernels` are the implementations that compute; as it stands, the torch references.
    """
    rotary = Rotary(config, sequence_length) if config.use_rotary_embeddings else None
    embedding = Embedding(config, kernels)
    blocks = [Block(index, config, rotary, kernels) for index in range(config.num_layers)]
    return [embedding, *blocks, Head(config, embedding, kernels, logit_z_loss)]


def model_layers(config: Config, kernels: Kernels) -> list[Layer]:
    """The layers on the meta device, their parameters with the learning-rate scales and weight decay asked for.

    Raises:
        UsageError: if a pattern of --freeze, --lr_scales or --weight_decay_modules matches nothing, or everything
            would be frozen.
    """
    layers = build_gpt(config.model, config.batch.sequence_length, kernels, config.training.logit_z_loss)
    optimizer, parameters = config.optimizer, parameters_of(layers)
    set_lr_scales(parameters, lr_scale_patterns(optimizer.freeze, optimizer.lr_scales))
    set_weight_decay(parameters, optimizer.weight_decay_default_mask, optimizer.weight_decay_modules)
    return layers


def parameters_of(layers: Iterable[Layer]) -> list[Parameter]:
    """The parameters of a model in its order; a tied head has none of its own but the norm's."""
    return [cast(Parameter, parameter) for layer in layers for parameter in layer.parameters()]


def shapes_of(layers: Iterable[Layer]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a model by their names, in its order."""
    return {parameter.spec.name: parameter.spec.shape for parameter in parameters_of(layers)}
