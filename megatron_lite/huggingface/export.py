"""Exports: folders that `transformers.AutoModelForCausalLM.from_pretrained` loads.

Parameters arrive one at a time on every rank; rank 0 writes each where it belongs (`export_folder`). The folder is
complete when it appears under its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_lite.checkpoint import files
from megatron_lite.config import Config, ModelConfig
from megatron_lite.config.structured_values import size_bytes
from megatron_lite.distributed.agreement import write_together
from megatron_lite.errors import NumericsError
from megatron_lite.huggingface.architectures import check_exportable
from megatron_lite.huggingface.export_folder import ExportFolder, FilePlan, their_tensor
from megatron_lite.huggingface.master_weights import master_weights
from megatron_lite.huggingface.weight_map import by_tensor, pieces
from megatron_lite.parameter import DTYPES

if TYPE_CHECKING:
    from megatron_lite.distributed.process_group import Distributed
    from megatron_lite.zero.multi_stage import MultiStage

__all__ = ["check_exportable", "convert", "export_weights", "save_huggingface"]

# After so many bytes the ranks wait for rank 0: its disk may be slower than a collective of the next gather may be.
AGREE_BYTES = 2**28


def convert(name: str, tensor: Tensor, architecture: str, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """One parameter of ours as the architecture's: names, and views where a tensor lies in ours in one piece.

    Raises:
        KeyError: if the architecture has no such parameter.
    """
    for their_name, parts in by_tensor(pieces(name, tuple(tensor.shape), architecture, model)).items():
        yield their_name, their_tensor(tensor, parts)


def export_weights(model: MultiStage, config: Config, distributed: Distributed) -> Iterator[tuple[str, Tensor]]:
    """(name, full weight) for `save_huggingface`: as trained, or averaged; every rank has to iterate to the end.

    In the training dtype these are the very weights that the model computes with; for another --export_dtype they come
    from the fp32 masters (or averages), so that they are rounded once.
    """
    averaged, training_dtype = config.training.export_weights == "average", config.distributed.training_dtype
    if training_dtype not in ("fp32", config.training.export_dtype or training_dtype):
        yield from master_weights(model, distributed, averaged)
    elif averaged:
        with model.averaged():
            yield from model.full_weights()
    else:
        yield from model.full_weights()


def save_huggingface(
    directory: Path, model: MultiStage, config: Config, distributed: Distributed, weights: Iterator[tuple[str, Tensor]]
) -> None:
    """Write a Hugging Face folder; all ranks call this together. A folder of that name is replaced.

    `weights` yields (parameter name, full weight) of the whole model, in the same order on every rank; each tensor may
    be overwritten when the next one is asked for, and only that of rank 0 is looked at. Rank 0 rounds to --export_dtype
    and writes; the bytes of the files do not depend on the order.

    Raises:
        UsageError: if no architecture can express the model.
        NumericsError: on every rank, if a weight is too large for --export_dtype: no folder appears.
        StorageError: on every rank, if the folder cannot be written.
    """
    architecture = check_exportable(config.model, config.training.export_model_type)
    temporary = files.work_path(directory, "tmp", distributed.broadcast_object(files.new_nonce()))
    what, is_writer = f"the export {directory}", distributed.rank == 0
    specs = [slot.spec for _, part in model.parts() for slot in part.layout.slots]
    dtype = DTYPES[config.training.export_dtype or config.distributed.training_dtype]
    limit_bytes = size_bytes(config.training.export_shard_size)
    plan = FilePlan([(spec.name, tuple(spec.shape)) for spec in specs], architecture, config.model, dtype, limit_bytes)
    folder: ExportFolder | None = None

    def prepare() -> None:
        nonlocal folder
        if is_writer:
            directory.parent.mkdir(parents=True, exist_ok=True)
            files.recover(directory.parent)
            folder = ExportFolder(temporary, plan)

    def finish() -> None:
        if folder is not None:
            folder.finish(config, config.data.tokenizer_file)
            files.publish(temporary, directory, files.has_only_our_files)

    try:
        write_together(distributed, what, directory.parent, prepare)
        num_bytes = {spec.name: spec.numel * dtype.itemsize for spec in specs}
        _write_all(distributed, what, temporary, num_bytes, folder, weights)
        write_together(distributed, what, directory, finish)
    except BaseException:
        if is_writer:
            files.remove_folder(temporary)
        raise


def _write_all(
    distributed: Distributed,
    what: str,
    path: Path,
    num_bytes: Mapping[str, int],
    folder: ExportFolder | None,
    weights: Iterator[tuple[str, Tensor]],
) -> None:
    """Let rank 0 write every weight; if it cannot, all ranks know by the next agreement. `num_bytes`: by name."""
    failure: Exception | None = None
    waiting_bytes, total_bytes = 0, sum(num_bytes.values())

    def settle() -> str:
        if failure is not None:
            raise failure
        return "" if folder is None else folder.overflow

    for name, tensor in weights:
        if folder is not None and failure is None:
            try:
                folder.write(name, tensor)
            except Exception as error:
                failure = error
        waiting_bytes += num_bytes[name]
        if waiting_bytes >= AGREE_BYTES:
            write_together(distributed, what, path, settle, total_bytes)
            waiting_bytes = 0
    if overflow := write_together(distributed, what, path, settle, total_bytes)[0]:
        raise NumericsError(
            f"{overflow}, which --export_dtype cannot hold: nothing was exported; write --export_dtype=bf16 or fp32"
        )
