"""Exports: folders that `transformers.AutoModelForCausalLM.from_pretrained` loads.

Parameters arrive one at a time, are renamed and cut to the names of the architecture, gathered on rank 0 up to
`MAX_FILE_BYTES` and written. The folder is complete when it appears under its name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_lite.checkpoint import files
from megatron_lite.checkpoint.agreement import together
from megatron_lite.checkpoint.architectures import check_exportable, hugging_face_config
from megatron_lite.checkpoint.mapping import Piece, pieces
from megatron_lite.config import Config, ModelConfig
from megatron_lite.durable import sync_folder

if TYPE_CHECKING:
    from megatron_lite.distributed import Distributed
    from megatron_lite.zero.multi_stage import MultiStage

__all__ = ["check_exportable", "convert", "save_huggingface"]

MAX_FILE_BYTES = 4 * 2**30


def convert(name: str, tensor: Tensor, architecture: str, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """One parameter of ours as the architecture's: names and views (copies only where rows change their order).

    Raises:
        KeyError: if the architecture has no such parameter.
    """
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces(name, tuple(tensor.shape), architecture, model):
        by_name.setdefault(piece.name, []).append(piece)
    for theirs, parts in by_name.items():
        parts.sort(key=lambda piece: piece.their_first_row)
        rows = [tensor[piece.first_row : piece.first_row + piece.rows] for piece in parts]
        whole = rows[0] if len(rows) == 1 else torch.cat(rows)
        whole = whole.t() if parts[0].transposed else whole
        yield theirs, whole + parts[0].plus if parts[0].plus else whole


def save_huggingface(
    directory: Path,
    model: MultiStage,
    config: Config,
    distributed: Distributed,
    weights: Iterator[tuple[str, Tensor]],
) -> None:
    """Write a Hugging Face folder; all ranks call this together. A folder of that name is replaced.

    `weights` yields (parameter name, full weight in the training dtype) of the whole model, in the same order on every
    rank; each tensor may be overwritten when the next one is asked for. Rank 0 holds at most `MAX_FILE_BYTES` of
    copies (or the largest parameter) and writes; after each file the ranks agree that it worked.

    Raises:
        UsageError: if no architecture can express the model.
        StorageError: on every rank, if the folder cannot be written.
    """
    architecture = check_exportable(config.model)
    temporary = files.work_path(directory, "tmp", distributed.broadcast_object(files.new_nonce()))
    what = f"the export {directory}"
    is_writer = distributed.rank == 0

    def prepare() -> None:
        if is_writer:
            directory.parent.mkdir(parents=True, exist_ok=True)
            files.recover(directory.parent)
            temporary.mkdir()

    try:
        together(distributed, what, directory.parent, 0, prepare)
        expected = {slot.spec.name for _, part in model.parts() for slot in part.layout.slots}
        parts: list[list[str]] = []
        total_bytes = 0
        for part, num_bytes in _parts(weights, architecture, config.model, is_writer, expected):

            def write(part: dict[str, Tensor] = part) -> None:
                if is_writer:
                    tensors = [files.TensorToWrite.of(name, value) for name, value in part.items()]
                    files.write_tensors(_part_path(temporary, len(parts)), tensors, {"format": "pt"})

            together(distributed, what, _part_path(temporary, len(parts)), num_bytes, write)
            parts.append(list(part))
            total_bytes += num_bytes

        def finish() -> None:
            if is_writer:
                _name_parts(temporary, parts, total_bytes)
                _write_configs(temporary, config)
                for path in temporary.iterdir():
                    files.sync_file(path)
                sync_folder(temporary)
                files.publish(temporary, directory, files.has_only_our_files)

        together(distributed, what, directory, 0, finish)
    except Exception:
        if is_writer:
            files.remove_folder(temporary)
        raise


def _parts(
    weights: Iterator[tuple[str, Tensor]], architecture: str, model: ModelConfig, is_writer: bool, expected: set[str]
) -> Iterator[tuple[dict[str, Tensor], int]]:
    """The tensors of one file after the other and their bytes; the same cuts on every rank, copies on the writer only.

    Every rank cuts at the same place, because writing may take longer than a collective of the next gather may.
    """
    part: dict[str, Tensor] = {}
    part_bytes = 0
    missing = set(expected)
    for name, tensor in weights:
        missing.discard(name)
        if part and part_bytes + tensor.nbytes > MAX_FILE_BYTES:
            yield part, part_bytes
            part, part_bytes = {}, 0
        for new_name, view in convert(name, tensor, architecture, model):
            part[new_name] = _copy(view) if is_writer else torch.empty(0)
        part_bytes += tensor.nbytes
    assert not missing, f"weights left out: {sorted(missing)[:5]}"
    yield part, part_bytes


def _copy(view: Tensor) -> Tensor:
    """A contiguous copy in host memory."""
    return torch.empty(view.shape, dtype=view.dtype).copy_(view.detach())


def _part_path(folder: Path, index: int) -> Path:
    return folder / f"model-{index + 1:05d}.safetensors"


def _name_parts(folder: Path, parts: list[list[str]], total_bytes: int) -> None:
    """Give the files their final names, now that their number is known, and write the index if there are several."""
    if len(parts) == 1:
        os.rename(_part_path(folder, 0), folder / "model.safetensors")
        return
    weight_map = {}
    for index, names in enumerate(parts):
        file_name = f"model-{index + 1:05d}-of-{len(parts):05d}.safetensors"
        os.rename(_part_path(folder, index), folder / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", content)


def _write_configs(folder: Path, config: Config) -> None:
    """config.json, generation_config.json, and the tokenizer if one is known."""
    special_tokens: dict[str, int | None] = {}
    if config.data.tokenizer_file is not None:
        from megatron_lite.data.tokenizing import copy_tokenizer

        special_tokens = copy_tokenizer(config.data.tokenizer_file, folder)
    content = hugging_face_config(config, special_tokens)
    _write_json(folder / "config.json", content)
    generation = {key: content[key] for key in ("bos_token_id", "eos_token_id") if content[key] is not None}
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **generation})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    files.write_text(path, json.dumps(content, indent=2) + "\n")
