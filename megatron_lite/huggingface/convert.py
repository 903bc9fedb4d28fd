"""Write a checkpoint or a Hugging Face folder from a `WeightSource`, with one tensor in memory at a
time.

A checkpoint converted from a Hugging Face folder has only fp32 weights, at iteration 0: a run
resumes it with fresh moments. One converted from a checkpoint keeps its iteration, moments,
averages and run state. If averages become the weights, moments and state are dropped, because they
belong to other weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.files import SavedFile, Slice
from megatron_lite.checkpoint.manifest import Manifest, SavedParameter
from megatron_lite.checkpoint.names import MANIFEST_NAME, new_nonce, rank_file
from megatron_lite.config import BatchConfig, Config, flatten, unflatten
from megatron_lite.errors import NumericsError
from megatron_lite.huggingface.export_folder import ExportFolder, split
from megatron_lite.huggingface.weight_source import (
    CheckpointSource,
    Shapes,
    WeightSource,
    read_whole,
)
from megatron_lite.run.durable_files import sync_folder
from megatron_lite.run.progress_line import ByteProgress
from megatron_lite.tiles import Tile
from megatron_lite.validation import resolve


def described_config(
    source: WeightSource, export_dtype: str | None, model_type: str | None
) -> Config:
    """Return a configuration for the model of a source, with the options saved in it; None: as
    trained or read."""
    length = min(source.model.max_position_embeddings, BatchConfig.sequence_length)
    if isinstance(source, CheckpointSource):
        length = source.content.config.get("sequence_length", length)
    values = vars(source.model) | {
        "sequence_length": length,
        "batch_size": 1,
        "dataset_source": "random",
        "training_dtype": source.dtype,
        "export_dtype": export_dtype,
        "export_model_type": model_type or source.model_type,
    }
    if (tokenizer := source.folder / "tokenizer.json").is_file():
        values["tokenizer_file"] = str(tokenizer.resolve())
    return resolve(unflatten(values), 1)


def write_huggingface(
    folder: Path,
    source: WeightSource,
    shapes: Shapes,
    config: Config,
    limit_bytes: int,
    tokenizer_file: Path | None,
) -> ExportFolder:
    """Write a new Hugging Face folder in the --export_dtype of `config`, from a checked source.

    Raises:
        UsageError: if no architecture can express the model.
        NumericsError: if a weight is too large for the dtype.
        OSError: if the folder cannot be written.
    """
    written = ExportFolder(shapes.items(), config, limit_bytes)
    written.create(folder)
    with written.progress:
        for name, shape in shapes.items():
            written.write(name, read_whole(source, name, shape))
            if written.overflow:
                kept = "nothing is written; choose bf16 or fp32"
                raise NumericsError(
                    f"{written.overflow}, too large for {config.training.export_dtype}: {kept}"
                )
    written.finish(
        tokenizer_file,
        source.origin,
        training=source.training,
        keep_class=source.kind == "huggingface",
    )
    return written


def write_checkpoint(
    folder: Path, source: WeightSource, shapes: Shapes, config: Config, limit_bytes: int
) -> Manifest:
    """Write a new checkpoint in files of at most `limit_bytes`, cut like `export_folder.split`.

    config: the run's options, for a source without any.

    Raises:
        OSError: if it cannot be written.
    """
    kept = source if isinstance(source, CheckpointSource) and not source.averaged else None
    tensors = {tensor.name: tensor for tensor in _tensors(source, kept, shapes)}
    cut = split({name: tensor.num_bytes for name, tensor in tensors.items()}, limit_bytes)
    save_id, iteration = new_nonce(), source.iteration or 0
    folder.mkdir()
    saved: dict[str, SavedFile] = {}
    parameters: dict[str, SavedParameter] = {}
    with ByteProgress(
        "writing the checkpoint", sum(tensor.num_bytes for tensor in tensors.values())
    ) as progress:
        for index, names in enumerate(cut):
            file = rank_file(index)
            some = [tensors[name] for name in names]
            metadata = manifest.file_metadata(save_id, iteration, index)
            saved[file], offset = files.write_tensors(folder / file, some, metadata, progress.add)
            for tensor in some:
                name, kind = tensor.name.split("/")
                entry = parameters.setdefault(name, SavedParameter(tensor.dtype, tensor.shape, {}))
                entry.slices[kind] = [
                    Slice(file, offset, tensor.num_bytes, 0, math.prod(tensor.shape))
                ]
                offset += tensor.num_bytes
    content = Manifest(
        save_id=save_id,
        iteration=iteration,
        world_size=len(saved),
        config=source.content.config if isinstance(source, CheckpointSource) else flatten(config),
        state=_fresh_state() | {"origin": source.origin} if kept is None else kept.content.state,
        files=saved,
        parameters=parameters,
    )
    files.write_text(folder / MANIFEST_NAME, manifest.dump(content))
    sync_folder(folder)
    return content


def _tensors(
    source: WeightSource, kept: CheckpointSource | None, shapes: Shapes
) -> Iterator[files.TensorToWrite]:
    """Yield the tensors "parameter/kind" of a checkpoint. kept: the source, if its moments and
    averages are copied."""
    for name, shape in shapes.items():
        if kept is None:
            read = functools.partial(read_whole, source, name, shape)
            yield files.TensorToWrite(f"{name}/weights", torch.float32, tuple(shape), read)
            continue
        saved = kept.content.parameters[name]
        for kind in saved.slices:
            read = functools.partial(_read_saved, kept, name, kind)
            yield files.TensorToWrite(f"{name}/{kind}", saved.dtype_of(kind), saved.shape, read)


def _read_saved(source: CheckpointSource, name: str, kind: str) -> Tensor:
    saved = source.content.parameters[name]
    values = torch.empty(saved.shape, dtype=saved.dtype_of(kind))  # frozen weights keep their dtype
    source.read_state(name, kind, Tile.run(0, values.numel()), values.view(-1))
    return values


def _fresh_state() -> dict[str, Any]:
    """Return the state of a run before its first update."""
    scale = {"dynamic": False, "scale": 1.0, "good": 0, "patience": 0}
    window = {"loss": (0.0).hex(), "tokens": 0}
    return {
        "optimizer": {"updates": 0, "loss_scale": scale},
        "window": window,
        "evaluation_due": False,
    }
