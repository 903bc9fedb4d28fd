"""Finding, verifying and reading the checkpoints that `sharded.save` has written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.agreement import first_problem
from megatron_lite.checkpoint.manifest import ELEMENT_BYTES, KINDS, DamagedError, Manifest
from megatron_lite.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_lite.distributed import Distributed
    from megatron_lite.zero.multi_stage import MultiStage
    from megatron_lite.zero.part import Part

_ITERATION = re.compile(r"0|[1-9][0-9]{0,17}")
_NUM_NAMED = 5  # parameters that an error message names at most


def find_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Folders that should be checkpoints, newest first, good or not; reads names only.

    `.ready-` folders are complete checkpoints whose save was killed while replacing an older one.
    """
    if not root.is_dir():
        return []
    found = [
        (int(path.name), 1, path) for path in root.iterdir() if _ITERATION.fullmatch(path.name) and path.is_dir()
    ]
    found += [
        (int(name), 0, path) for path, name in files.work_folders(root, "ready") if _ITERATION.fullmatch(name)
    ]
    return [(iteration, path) for iteration, _, path in sorted(found, reverse=True)]


def verify(folder: Path, iteration: int, distributed: Distributed) -> tuple[Manifest | None, str | None]:
    """The manifest if the checkpoint is good, otherwise None and what is wrong; each rank reads its part of the files.

    All ranks call this together and get the same answer.
    """
    content: Manifest | None = None

    def read() -> None:
        nonlocal content
        content = manifest.read(folder)
        if content.iteration != iteration:
            raise DamagedError(f"{manifest.MANIFEST_NAME}: it is of iteration {content.iteration}")

    problem = first_problem(distributed, read)
    if problem is not None or content is None:
        return None, problem
    good = content
    if len(set(distributed.gather_objects(good.save_id))) > 1:
        return None, f"{manifest.MANIFEST_NAME}: not all ranks see the same file"

    def check() -> None:
        for name in list(good.files)[distributed.rank :: distributed.world_size]:
            manifest.check_file(folder, name, good)

    problem = first_problem(distributed, check)
    return (good, None) if problem is None else (None, problem)


def check_parameters(folder: Path, content: Manifest, model: MultiStage) -> None:
    """Compare names and shapes."""
    wanted = {slot.spec.name: tuple(slot.spec.shape) for _, part in model.parts() for slot in part.layout.slots}
    saved = {name: parameter.shape for name, parameter in content.parameters.items()}
    differences = [f"{name} is not in the checkpoint" for name in wanted if name not in saved]
    differences += [f"{name} is not in the model" for name in saved if name not in wanted]
    differences += [
        f"{name} has shape {saved[name]}, the model's has {wanted[name]}"
        for name in wanted
        if name in saved and saved[name] != wanted[name]
    ]
    if differences:
        more = f" (and {len(differences) - _NUM_NAMED} more)" if len(differences) > _NUM_NAMED else ""
        raise CheckpointError(
            f"checkpoint {folder} does not fit the model: {'; '.join(differences[:_NUM_NAMED])}{more}. Give the flags "
            "it was trained with, or choose another --experiment_dir"
        )


def checked_shards(part: Part) -> dict[str, Tensor]:
    """The three fp32 shards of a part, each (shard_numel,), in the order in which they are stored."""
    shards = {kind: part.read(kind) for kind in part.kinds()}
    for kind in KINDS:
        shard, numel = shards[kind], part.layout.shard_numel
        assert shard.shape == (numel,) and shard.is_contiguous(), (kind, tuple(shard.shape), numel)
        assert shard.dtype == torch.float32, (kind, shard.dtype)
    return {kind: shards[kind].detach() for kind in KINDS}


class _Read(NamedTuple):
    """Bytes to copy from a file into a shard, given as bytes (shard_numel * 4,) uint8."""

    file: str
    offset: int
    shard: Tensor
    start: int
    end: int


def _reads(content: Manifest, model: MultiStage, rank: int) -> Iterator[_Read]:
    """All that a rank has to read: for each piece of its shards the overlaps with the saved slices."""
    for _, part in model.parts():
        for kind, shard in checked_shards(part).items():
            shard_bytes = shard.view(torch.uint8)
            for slot, start, end in part.layout.pieces(rank):
                in_shard = slot.offset - rank * part.layout.shard_numel  # of the parameter's element 0
                numel_found = 0
                for piece in content.parameters[slot.spec.name].slices[kind]:
                    first, last = max(start, piece.first), min(end, piece.end)
                    if first < last:
                        offset = piece.offset + (first - piece.first) * ELEMENT_BYTES
                        begin, stop = (in_shard + first) * ELEMENT_BYTES, (in_shard + last) * ELEMENT_BYTES
                        yield _Read(piece.file, offset, shard_bytes, begin, stop)
                        numel_found += last - first
                assert numel_found == end - start, (slot.spec.name, kind, start, end, numel_found)


def fill(folder: Path, content: Manifest, model: MultiStage, rank: int) -> None:
    """Read this rank's shards, opening one file at a time.

    Raises:
        DamagedError, OSError: if a file cannot be read any more.
    """
    by_file: dict[str, list[_Read]] = {}
    for item in _reads(content, model, rank):
        by_file.setdefault(item.file, []).append(item)
    for name, items in by_file.items():
        with files.open_regular(folder / name) as file:
            try:
                for item in items:
                    files.read_into(file, item.offset, item.shard[item.start : item.end])
            except EOFError:
                raise DamagedError(f"{name}: it became shorter while it was read") from None
