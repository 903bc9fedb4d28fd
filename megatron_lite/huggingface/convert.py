"""Writing a checkpoint or a Hugging Face folder out of a `WeightSource`, one tensor in memory at a time.

A checkpoint made from a Hugging Face folder has weights alone, in fp32, and is of iteration 0: a run that resumes it
begins with fresh moments. One made from another checkpoint keeps everything: iteration, moments, averages and the
state of the run; with its averages as the weights, moments and state are left behind, as they belong to other weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.manifest import Manifest, SavedFile, SavedParameter, Slice
from megatron_lite.config import BatchConfig, Config, DataConfig, TrainingConfig, flatten
from megatron_lite.errors import NumericsError
from megatron_lite.huggingface import folder_kind
from megatron_lite.huggingface.architectures import check_exportable
from megatron_lite.huggingface.export_folder import ExportFolder, FilePlan, split
from megatron_lite.huggingface.open_source import CheckpointSource, WeightSource
from megatron_lite.parameter import DTYPES
from megatron_lite.run.durable_files import sync_folder
from megatron_lite.validation import resolve

Shapes = Iterable[tuple[str, tuple[int, ...]]]


def described_config(source: WeightSource, dtype: str) -> Config:
    """A configuration for the model of a source: as far as it was saved, that of its run. `dtype`: to be trained in."""
    positions = source.model.max_position_embeddings or BatchConfig.sequence_length
    length = min(positions, BatchConfig.sequence_length)
    if isinstance(source, CheckpointSource):
        length = source.content.config.get("sequence_length", length)
    training = TrainingConfig(export_model_type=source.model_type)
    config = Config(model=source.model, batch=BatchConfig(sequence_length=length, batch_size=1), training=training)
    distributed = dataclasses.replace(config.distributed, training_dtype=dtype)
    return resolve(dataclasses.replace(config, distributed=distributed, data=DataConfig(dataset_source="random")), 1)


def write_huggingface(
    folder: Path, source: WeightSource, shapes: Shapes, config: Config, limit_bytes: int, tokenizer_file: Path | None
) -> FilePlan:
    """Write a new Hugging Face folder in the dtype of --export_dtype of `config`; the source has been checked.

    Without a tokenizer, the special tokens are those of the folder that is read, if it is a Hugging Face folder.

    Raises:
        UsageError: if no architecture can express the model.
        NumericsError: if a weight is too large for the dtype.
        OSError: if it cannot be written.
    """
    shapes, dtype = list(shapes), config.training.export_dtype or config.distributed.training_dtype
    architecture = check_exportable(config.model, config.training.export_model_type)
    plan = FilePlan(shapes, architecture, config.model, DTYPES[dtype], limit_bytes)
    written = ExportFolder(folder, plan)
    for name, shape in shapes:
        written.write(name, read_whole(source, name, shape))
        if written.overflow:
            raise NumericsError(f"{written.overflow}, which {dtype} cannot hold: nothing is written; take bf16 or fp32")
    written.finish(config, tokenizer_file, _special_tokens(source))
    return plan


def _special_tokens(source: WeightSource) -> dict[str, int | None]:
    """What the config.json of a source says of them."""
    if isinstance(source, CheckpointSource):
        return {}
    content = folder_kind.read_object(source.folder, folder_kind.CONFIG_NAME, folder_kind.MOST_CONFIG_BYTES)
    tokens = {key: content.get(key) for key in ("bos_token_id", "eos_token_id")}
    return {key: token for key, token in tokens.items() if type(token) is int}


def read_whole(source: WeightSource, name: str, shape: tuple[int, ...]) -> Tensor:
    """A parameter of a source, in fp32."""
    values = torch.empty(math.prod(shape))
    source.read(name, 0, values)
    return values.view(shape)


def write_checkpoint(folder: Path, source: WeightSource, shapes: Shapes, config: Config, limit_bytes: int) -> Manifest:
    """Write a new checkpoint into a folder, in files of at most `limit_bytes` as `export_folder.split` cuts.

    `config`: what it says of the run, where the source has none.

    Raises:
        OSError: if it cannot be written.
    """
    whole = isinstance(source, CheckpointSource) and not source.averaged
    found = {f"{name}/{kind}": (name, kind, shape) for name, shape in shapes for kind in _kinds(source, name, whole)}
    tensors = {
        key: files.TensorToWrite(
            key,
            _dtype(source, name, kind, whole),
            shape,
            functools.partial(_read, source, name, kind, shape, _dtype(source, name, kind, whole)),
        )
        for key, (name, kind, shape) in found.items()
    }
    cut = split({key: tensor.num_bytes for key, tensor in tensors.items()}, limit_bytes)
    save_id, iteration = files.new_nonce(), source.content.iteration if isinstance(source, CheckpointSource) else 0
    folder.mkdir()
    saved: dict[str, SavedFile] = {}
    parameters: dict[str, SavedParameter] = {}
    for index, keys in enumerate(cut):
        name = manifest.rank_file(index)
        metadata = {"format": manifest.FORMAT, "save_id": save_id, "iteration": str(iteration), "rank": str(index)}
        some = [tensors[key] for key in keys]
        file = files.write_tensors(folder / name, some, metadata)
        saved[name], offset = SavedFile(file.size, file.crc32), file.data_start
        for key, tensor in zip(keys, some, strict=True):
            parameter, kind, shape = found[key]
            entry = parameters.setdefault(parameter, SavedParameter(tensor.dtype, tuple(shape), {}))
            entry.slices[kind] = [Slice(name, offset, tensor.num_bytes, 0)]
            offset += tensor.num_bytes
    state, options = _state(source, whole), _options(source, config)
    content = Manifest(save_id, iteration, len(saved), options, state, saved, parameters)
    files.write_text(folder / manifest.MANIFEST_NAME, manifest.dump(content))
    sync_folder(folder)
    return content


def _kinds(source: WeightSource, name: str, whole: bool) -> Iterator[str]:
    """What is written of a parameter, the weights first."""
    if whole:
        assert isinstance(source, CheckpointSource)
        yield from (kind for kind in manifest.KINDS if kind in source.content.parameters[name].slices)
    else:
        yield "weights"


def _dtype(source: WeightSource, name: str, kind: str, whole: bool) -> torch.dtype:
    """Frozen weights stay as they were saved; everything else is fp32."""
    if whole and isinstance(source, CheckpointSource):
        return source.content.parameters[name].dtype_of(kind)
    return torch.float32


def _read(source: WeightSource, name: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = torch.empty(math.prod(shape), dtype=dtype)
    if kind == "weights":
        source.read(name, 0, values)
    else:
        assert isinstance(source, CheckpointSource)
        source.read_state(name, kind, 0, values)
    return values.view(shape)


def _state(source: WeightSource, whole: bool) -> dict[str, Any]:
    """The state of the run, or that of one that has not begun."""
    if whole:
        assert isinstance(source, CheckpointSource)
        return source.content.state
    scale = {"dynamic": False, "scale": 1.0, "good": 0, "patience": 0}
    window = {"loss": (0.0).hex(), "tokens": 0}
    return {"optimizer": {"updates": 0, "loss_scale": scale}, "window": window, "evaluation_due": False}


def _options(source: WeightSource, config: Config) -> dict[str, Any]:
    return source.content.config if isinstance(source, CheckpointSource) else flatten(config)
