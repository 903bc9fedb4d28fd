"""Export folders for `transformers.AutoModelForCausalLM.from_pretrained`.

All ranks gather one parameter at a time, and rank 0 writes it to its place (`export_folder`). A
folder gets its final name only when it is complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpoint import files
from megatron_lite.checkpoint.names import has_only_our_files, new_nonce, work_path
from megatron_lite.config import Config
from megatron_lite.config.structured_values import size_bytes
from megatron_lite.distributed.agreement import write_together
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import NumericsError
from megatron_lite.huggingface.architectures import ARCHITECTURES, check_exportable
from megatron_lite.huggingface.export_folder import ExportFolder
from megatron_lite.huggingface.model_card import TrainingSummary
from megatron_lite.model.adapters import is_of_adapter
from megatron_lite.zero.flat_shard import FlatShard
from megatron_lite.zero.multi_stage import MultiStage
from megatron_lite.zero.replicas import assembled

Weights = Iterator[tuple[str, Tensor]]  # names and full tensors
# Ranks wait for rank 0 after this many bytes; otherwise the next gather could time out behind a
# slow disk.
AGREE_BYTES = 2**28
WINDOW_NUMEL = 2**24  # fp32 elements gathered at a time on every rank: 64 MiB


def export_weights(model: MultiStage, config: Config, distributed: Distributed) -> Weights:
    """Yield (name, full weight), trained or averaged, for `save_huggingface`; every rank must
    iterate to the end.

    In the training dtype these are the weights that the model computes with. For another
    --export_dtype, and if some tensors of the architecture are always in fp32, they are fp32 masters
    (or averages), to be rounded once.
    """
    averaged = config.training.export_weights == "average"
    training_dtype, export_dtype = config.distributed.training_dtype, config.training.export_dtype
    kept = ARCHITECTURES[check_exportable(config.model, config.training.export_model_type)].fp32
    if training_dtype != "fp32" and (training_dtype != export_dtype or kept):
        yield from master_weights(model, distributed, averaged)
    else:
        with model.averaged() if averaged else contextlib.nullcontext():
            yield from model.full_weights()


def master_weights(
    model: MultiStage, distributed: Distributed, average: bool = False, trained_only: bool = False
) -> Weights:
    """Yield (name, full fp32 weight) gathered from the master shards, on rank 0's host; other ranks
    get (0,).

    Every rank must iterate to the end. A tensor is valid until the next one is requested. Rank 0
    assembles one stage's flat range at a time, in host memory, from windows of all shards; devices
    store one window of each at a time.

    average: yield running averages, for parameters that have one.
    """
    for stage, part in model.all_parts():
        if trained_only and part.frozen:
            continue
        ranges = _gather(part, model.pipeline.rank_of[stage], distributed, average)
        for slot in part.layout.slots:
            parts = [flat[slot.offset : slot.offset + slot.spec.padded_numel] for flat in ranges]
            yield (
                slot.spec.name,
                assembled(slot.spec, parts) if distributed.rank == 0 else ranges.view(-1),
            )


def _gather(part: FlatShard, owner: int, distributed: Distributed, average: bool) -> Tensor:
    """Return all tensor-parallel ranks' flat ranges, (ranks, numel), on rank 0's host; (1, 0)
    elsewhere.

    owner: the part's pipeline rank.
    """
    group = distributed.layers
    pipeline = distributed.pipeline
    shard_numel = part.layout.shard_numel
    world_size, ranks = group.world_size, group.world_size // part.layout.world_size
    whole = torch.empty((ranks, part.layout.numel) if distributed.rank == 0 else (1, 0))
    step = max(1, min(shard_numel, WINDOW_NUMEL // world_size))
    gathered = torch.empty(world_size, step, device=distributed.device)
    averages = part.average if average else None
    for start in range(0, shard_numel, step):
        end = min(start + step, shard_numel)
        if pipeline.rank == owner:
            own = part.weights.read(slice(start, end)) if averages is None else averages[start:end]
            gathered[group.rank, : end - start] = own
            group.all_gather(gathered.view(-1), "export").wait()
        if owner != 0 and pipeline.rank == owner and group.rank == 0:
            pipeline.send(gathered, 0).wait()
        if distributed.rank == 0:
            if owner != 0:
                pipeline.receive(gathered, owner).wait()
            distributed.wait_for_device()
            # tensor-parallel ranks are adjacent
            shards = whole.view(ranks, -1, shard_numel).transpose(0, 1)
            by_rank = gathered[:, : end - start].view(-1, ranks, end - start)
            for number, shard in enumerate(shards):
                shard[:, start:end].copy_(by_rank[part.layout.holder(number)])
    return whole


def save_huggingface(
    directory: Path,
    model: MultiStage,
    config: Config,
    distributed: Distributed,
    weights: Weights,
    check: Callable[[], None] = lambda: None,
    trained: TrainingSummary | None = None,
) -> None:
    """Write a Hugging Face folder, replacing an older one of the same name. Collective.

    Rank 0 rounds to --export_dtype and writes. The files do not depend on the order of the weights.

    Args:
        weights: yields (parameter name, full weight) for the whole model, in the same order on
            every rank. The next tensor may overwrite the previous one. Only rank 0's tensors are
            read.
        check: see `writing.Save`.
        trained: for the model card.

    Raises:
        UsageError: if no architecture can express the model.
        NumericsError: on every rank, if a weight is too large for --export_dtype; no folder
            appears.
        StorageError: on every rank, if the folder cannot be written.
    """
    specs = (spec for spec in model.specs() if not is_of_adapter(spec.name))
    shapes = [(spec.name, tuple(spec.shape)) for spec in specs]
    folder = ExportFolder(shapes, config, size_bytes(config.training.export_shard_size))
    temporary = work_path(directory, "tmp", distributed.broadcast_object(new_nonce()))
    what, is_writer = f"the export {directory}", distributed.rank == 0

    def prepare() -> None:
        if is_writer:
            check()
            directory.parent.mkdir(parents=True, exist_ok=True)
            files.recover(directory.parent)
            folder.create(temporary)

    def finish() -> None:
        if is_writer:
            facts, origin = (trained.facts, trained.origin) if trained else ({}, {})
            folder.finish(config.data.tokenizer_file, origin, trained, facts)
            check()
            files.publish(temporary, directory, has_only_our_files)

    try:
        write_together(distributed, what, directory.parent, prepare)
        with folder.progress:
            _write_all(distributed, what, temporary, folder, weights)
        write_together(distributed, what, directory, finish)
    except BaseException:
        if is_writer:
            files.remove_folder(temporary)
        raise


def _write_all(
    distributed: Distributed, what: str, path: Path, folder: ExportFolder, weights: Weights
) -> None:
    """Write every weight on rank 0. If that fails, all ranks raise at the next agreement."""
    failure: Exception | None = None
    waiting_bytes, total_bytes = 0, sum(folder.num_bytes.values())

    def settle() -> str:
        if failure is not None:
            raise failure
        return folder.overflow

    for name, tensor in weights:
        if distributed.rank == 0 and failure is None:
            distributed.wait_for_device()
            try:
                folder.write(name, tensor)
            except Exception as error:
                failure = error
        waiting_bytes += folder.num_bytes[name]
        if waiting_bytes >= AGREE_BYTES:
            write_together(distributed, what, path, settle, total_bytes)
            waiting_bytes = 0
    if overflow := write_together(distributed, what, path, settle, total_bytes)[0]:
        raise NumericsError(
            f"{overflow}, too large for --export_dtype: nothing was exported; write --export_dtype=bf16 or fp32"
        )
