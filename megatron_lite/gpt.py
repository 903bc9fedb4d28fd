"""GPT: an ordered list of layers that pass one hidden tensor, (b, s, h)."""

from __future__ import annotations

from megatron_lite.config import ModelConfig
from megatron_lite.layers.block import Block, Rotary
from megatron_lite.layers.ends import Embedding, Head
from megatron_lite.layers.layer import Layer


def build_gpt(config: ModelConfig, sequence_length: int) -> list[Layer]:
    """The layers of a model in order, on the meta device: embedding, blocks, head with loss.

    `config` has every derived value filled in; positions are tabled up to `sequence_length`.
    """
    rotary = Rotary(config, sequence_length) if config.use_rotary_embeddings else None
    embedding = Embedding(config)
    blocks = [Block(index, config, rotary) for index in range(config.num_layers)]
    return [embedding, *blocks, Head(config, embedding)]
