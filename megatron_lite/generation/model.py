"""Load a model into one process, from an export, any Hugging Face folder or a checkpoint; the options that name it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from megatron_lite.config.system import DTYPE_ALIASES
from megatron_lite.errors import UsageError
from megatron_lite.huggingface.load_pretrained import open_source
from megatron_lite.huggingface.weight_source import WeightSource
from megatron_lite.kernels.attention.choice import Work, choose_attention
from megatron_lite.kernels.choice import REFERENCES, failure
from megatron_lite.model.gpt import build_gpt, shapes_of
from megatron_lite.model.layer import Layer, MicroBatch
from megatron_lite.parameter import DTYPES, Parameter
from megatron_lite.run.launch import thread_limit


class LocalModel:
    """All layers of a model with their weights, in one process."""

    def __init__(self, source: WeightSource, length: int, dtype: torch.dtype, device: torch.device) -> None:
        """Load a model for texts of up to `length` tokens.

        Raises:
            CheckpointError: if the source is incomplete, damaged or not supported.
        """
        # Without the options that only training uses.
        model = dataclasses.replace(source.model, attention_dropout=0.0, hidden_dropout=0.0, embedding_dropout=0.0)
        self.config = dataclasses.replace(model, make_vocab_size_divisible_by=1)
        self.device, self.dtype = device, dtype
        self.layers = build_gpt(self.config, length, REFERENCES)
        source.check(shapes_of(self.layers))
        source.verify()
        for layer in self.layers:
            fill(layer, source, lambda numel: torch.empty(numel, dtype=dtype, device=device))

    def prompt_attention(self) -> str:
        """Return the fastest attention backend that works on this device for one text without dropout."""
        config, device = self.config, self.device
        if config.attention_softmax_in_fp32:
            return "math"
        work = Work(
            self.dtype,
            config.kv_channels,
            windowed=config.window_size is not None,
            heads_per_group=config.num_attention_heads // config.head_groups,
        )
        return choose_attention("auto", device, work, works=lambda backend: failure(backend, device, work) is None)

    @torch.no_grad()
    def run(self, micro_batch: MicroBatch) -> Tensor:
        """Return the summed loss of the labels, (), or, with a cache, the logits (t, v) that it asks for."""
        hidden: Tensor | None = None
        for layer in self.layers:
            hidden = layer(hidden, micro_batch)
        assert hidden is not None
        return hidden


def fill(layer: Layer, source: WeightSource, memory: Callable[[int], Tensor]) -> None:
    """Read the parameters of a layer one by one into tensors of `memory(numel)`."""
    for module in layer.modules():
        for attribute, declared in list(module.named_parameters(recurse=False)):
            spec = cast(Parameter, declared).spec
            values = memory(spec.numel)
            source.read(spec.name, 0, values)
            parameter = Parameter(values.view(spec.shape), requires_grad=False)
            parameter.spec = spec
            setattr(module, attribute, parameter)


def choose_device(name: str) -> torch.device:
    """Return the device to run on; on a CPU, keep to the user's limit of threads.

    Raises:
        UsageError: if `name` is cuda and there is no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device=cuda: no CUDA device is available; use --device=cpu or leave it out")
    if name != "cpu" and torch.cuda.is_available():
        return torch.device("cuda")
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, thread_limit() or threads))
    return torch.device("cpu")


def load_model(
    folder: Path, length: int | None, dtype: str | None, device: torch.device, weights: str = "raw"
) -> LocalModel:
    """Load the model of a folder for texts of up to `length` tokens, capped at its number of positions.

    Args:
        length: None for as many as the model has positions.
        dtype: fp32, bf16 or fp16; None: fp32 on a CPU, bf16 on a GPU.
        weights: raw, or average: the running averages in one of our checkpoints.

    Raises:
        CheckpointError: if the folder holds no complete, supported model.
    """
    with open_source(folder, weights=weights, whole=True) as source:
        longest = source.model.max_position_embeddings
        chosen = DTYPES[dtype or ("fp32" if device.type == "cpu" else "bf16")]
        return LocalModel(source, min(length or longest, longest), chosen, device)


def model_arguments() -> argparse.ArgumentParser:
    """Return a parser of the shared options, for `parents=[...]`."""

    def folder(text: str) -> Path:
        return Path(text).expanduser()  # the shell does not expand the ~ in --model=~/folder

    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--model", type=folder, required=True, help="export, Hugging Face folder, checkpoint, or folder of checkpoints")
    add("--tokenizer_file", help="tokenizer.json (default: from the model's folder, or the one used in training)")
    add(
        "--weights",
        choices=("raw", "average"),
        default="raw",
        help="average: the averaged weights in a checkpoint of a run with --ema_type (default: raw)",
    )
    add(
        "--dtype",
        type=lambda text: DTYPE_ALIASES.get(text, text),
        choices=DTYPES,
        help="dtype of the weights (default: fp32 on a CPU, bf16 on a GPU)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: a GPU if there is one)")
    return parser
