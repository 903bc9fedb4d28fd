"""Exports: folders that `transformers.AutoModelForCausalLM.from_pretrained` loads.

Parameters arrive one at a time on every rank, and rank 0 writes each to its place (`export_folder`). A folder appears
under its final name only when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_lite.checkpoint import files
from megatron_lite.checkpoint.names import has_only_our_files, new_nonce, work_path
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

# Ranks wait for rank 0 after this many bytes, or the next gather could time out while a slow disk catches up.
AGREE_BYTES = 2**28


def convert(name: str, tensor: Tensor, architecture: str, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of an architecture for one parameter of ours, as views where possible.

    Raises:
        KeyError: if the architecture has no such parameter.
    """
    for their_name, parts in by_tensor(pieces(name, tuple(tensor.shape), architecture, model)).items():
        yield their_name, their_tensor(tensor, parts)


def export_weights(model: MultiStage, config: Config, distributed: Distributed) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full weight), trained or averaged, for `save_huggingface`; every rank must iterate to the end.

    In the training dtype these are the weights that the model computes with. For another --export_dtype they come from
    the fp32 masters (or averages), so that they are rounded once.
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
    """Write a Hugging Face folder, replacing an older one of that name; all ranks call this together.

    Rank 0 rounds to --export_dtype and writes. The bytes of the files do not depend on the order of the weights.

    Args:
        weights: yields (parameter name, full weight) of the whole model, in the same order on every rank. The next
            tensor may overwrite the previous one. Only the tensors of rank 0 are read.

    Raises:
        UsageError: if no architecture can express the model.
        NumericsError: on every rank, if a weight is too large for --export_dtype; no folder appears.
        StorageError: on every rank, if the folder cannot be written.
    """
    architecture = check_exportable(config.model, config.training.export_model_type)
    temporary = work_path(directory, "tmp", distributed.broadcast_object(new_nonce()))
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
            files.publish(temporary, directory, has_only_our_files)

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
    """Let rank 0 write every weight. If it fails, all ranks raise at the next agreement. `num_bytes`: by name."""
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
            f"{overflow}, too large for --export_dtype: nothing was exported; write --export_dtype=bf16 or fp32"
        )
