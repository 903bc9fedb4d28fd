"""A model read from a folder into the memory of one process: an export, any Hugging Face folder, or a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron_lite.checkpoint.sources import WeightSource, open_source
from megatron_lite.gpt import build_gpt
from megatron_lite.kernels.choice import REFERENCES
from megatron_lite.layers.layer import Layer, MicroBatch
from megatron_lite.parameter import DTYPES, Parameter

# Options of training alone.
_NOT_HERE: dict[str, Any] = {
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "embedding_dropout": 0.0, "make_vocab_size_divisible_by": 1,
}  # fmt: skip


class LocalModel:
    """A chain of layers with all its weights, in one process.

    Raises:
        CheckpointError: if the folder holds no whole model that this program knows.
    """

    def __init__(self, source: WeightSource, length: int, dtype: torch.dtype, device: torch.device) -> None:
        """For texts of up to `length` tokens."""
        self.config = dataclasses.replace(source.model, **_NOT_HERE)
        self.device, self.dtype = device, dtype
        self.layers = build_gpt(self.config, length, REFERENCES)
        _fill(self.layers, source, dtype, device)

    @torch.no_grad()
    def run(self, micro_batch: MicroBatch) -> Tensor:
        """The summed loss of its labels, (), or with a cache the logits (t, v) that it wants."""
        hidden: Tensor | None = None
        for layer in self.layers:
            hidden = layer(hidden, micro_batch)
        assert hidden is not None
        return hidden

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """(t, v) of the tokens that `micro_batch.cache` wants answered."""
        assert micro_batch.cache is not None, "without a cache the head gives a loss"
        return self.run(micro_batch)


def _fill(layers: list[Layer], source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
    """Give every parameter memory and its values, one after the other."""
    modules = [module for layer in layers for module in layer.modules()]
    declared = {
        cast(Parameter, parameter).spec.name: (module, attribute, cast(Parameter, parameter))
        for module in modules
        for attribute, parameter in module.named_parameters(recurse=False)
    }
    source.check({name: parameter.spec.shape for name, (_, _, parameter) in declared.items()})
    source.verify()
    for name, (module, attribute, parameter) in declared.items():
        values = torch.empty(parameter.spec.shape, dtype=dtype)
        source.read(name, 0, values.view(-1))
        filled = Parameter(values.to(device), requires_grad=False)
        filled.spec = parameter.spec
        setattr(module, attribute, filled)


def load_model(
    folder: Path, length: int | None, dtype: str | None, device: torch.device, weights: str = "raw"
) -> LocalModel:
    """The model of a folder for texts of up to `length` tokens, but no more than it has positions for.

    Args:
        length: None takes as many as the model says that it takes.
        dtype: fp32, bf16 or fp16; None: fp32 on a CPU, bf16 on a GPU.
        weights: raw, or average: the running averages that a checkpoint of ours keeps beside.

    Raises:
        CheckpointError: if there is no whole model that this program knows.
    """
    with contextlib.closing(open_source(folder, weights=weights)) as source:
        longest = source.model.max_position_embeddings
        assert longest is not None, "resolved"
        chosen = DTYPES[dtype or ("fp32" if device.type == "cpu" else "bf16")]
        return LocalModel(source, min(length or longest, longest), chosen, device)
