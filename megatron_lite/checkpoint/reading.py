"""Finding, verifying and reading the checkpoints that `sharded.save` has written."""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.compatibility import keeps_moments, saved_optimizer
from megatron_lite.checkpoint.manifest import MOMENTS, DamagedError, Manifest, SavedParameter, dtype_name
from megatron_lite.distributed.agreement import first_problem
from megatron_lite.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_lite.distributed.process_group import Distributed
    from megatron_lite.zero.flat_shard import FlatShard
    from megatron_lite.zero.multi_stage import MultiStage

_ITERATION = re.compile(r"0|[1-9][0-9]{0,17}")
_NUM_NAMED = 5  # parameters that an error message names at most


def find_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Folders that should be checkpoints, newest first, good or not; reads names only.

    `.ready-` folders are complete checkpoints whose save was killed while replacing an older one.
    """
    if not root.is_dir():
        return []
    found = [(int(path.name), 1, path) for path in root.iterdir() if _ITERATION.fullmatch(path.name) and path.is_dir()]
    found += [(int(name), 0, path) for path, name in files.work_folders(root, "ready") if _ITERATION.fullmatch(name)]
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


def changes(content: Manifest, model: MultiStage, optimizer: str) -> list[str]:
    """What does not go over as it is, one line each: moments, averages and precision. `optimizer`: that of now."""
    started, num_followed, num_rounded, dtypes = Counter[str](), 0, 0, set()
    before, num_others, total = saved_optimizer(content.config), 0, len(content.parameters)
    averaged = dropped = any("average" in saved.slices for saved in content.parameters.values())
    for _, part in model.parts():
        kinds = part.kinds()
        dropped = dropped and "average" not in kinds
        for slot in part.layout.slots:
            saved = content.parameters[slot.spec.name]
            wanted = [kind for kind in MOMENTS if kind in kinds and part.has(kind, slot.spec)]
            missing = " and ".join(kind for kind in wanted if kind not in saved.slices)
            if wanted and not keeps_moments(before, optimizer, bool(slot.spec.matrix_rows)):
                num_others += 1
            elif missing:
                started[missing] += 1
            num_followed += averaged and "average" in kinds and "average" not in saved.slices
            if kinds["weights"] not in (saved.dtype, torch.float32):
                num_rounded += 1
                dtypes.add(f"{dtype_name(saved.dtype)} to {dtype_name(kinds['weights'])}")
    lines = [
        f"{number} of {total} parameter tensors have no {missing} there (they were frozen, or another --optimizer "
        "trained them): those start at zero"
        for missing, number in started.items()
    ]
    if num_others:
        lines.append(
            f"it was trained with --optimizer={before}, whose moments mean something else to --optimizer={optimizer}: "
            f"those of {num_others} of {total} parameter tensors start at zero"
        )
    if num_followed:
        lines.append(
            f"{num_followed} of {total} parameter tensors have no average there (they were frozen): it starts from "
            "their weights"
        )
    if dropped:
        lines.append("it holds averaged weights, which a run without --ema_type neither uses nor saves again")
    if num_rounded:
        lines.append(
            f"{num_rounded} of {total} parameter tensors are frozen and were rounded: {', '.join(sorted(dtypes))}"
        )
    return lines


def fill(folder: Path, content: Manifest, model: MultiStage, rank: int, optimizer: str) -> None:
    """Read this rank's shards, one after the other, opening one file at a time.

    Moments that the checkpoint lacks, or that mean something else to the `optimizer` of now, become zero, averages that
    it lacks the weights; what the model lacks is not read. Padding is not touched.

    Raises:
        DamagedError, OSError: if a file cannot be read any more.
    """
    with contextlib.closing(Files(folder)) as opened:
        for _, part in model.parts():
            for kind in part.kinds():
                _fill_shard(opened, content, part, kind, rank, optimizer)


def _fill_shard(opened: Files, content: Manifest, part: FlatShard, kind: str, rank: int, optimizer: str) -> None:
    """One tensor of a part, (numel,): for each piece of a parameter its overlaps with the saved slices."""
    shard = part.read(kind).detach()
    assert shard.shape == (part.numel(kind),) and shard.is_contiguous(), (kind, tuple(shard.shape))
    assert shard.dtype == part.kinds()[kind], (kind, shard.dtype)
    before = saved_optimizer(content.config)
    for slot, start, end in part.layout.pieces(rank):
        if not part.has(kind, slot.spec):
            continue
        saved = content.parameters[slot.spec.name]
        in_shard = slot.offset - rank * part.layout.shard_numel  # of the parameter's element 0
        kept = kind in saved.slices and keeps_moments(before, optimizer, bool(slot.spec.matrix_rows))
        if kind in MOMENTS and not kept:
            shard[in_shard + start : in_shard + end] = 0.0
            continue
        source = kind if kind in saved.slices else "weights"
        read_elements(opened, saved, source, start, shard[in_shard + start : in_shard + end])
    part.write(kind, shard)


def read_elements(opened: Files, saved: SavedParameter, kind: str, first: int, target: Tensor) -> None:
    """Read elements of one kind of a flattened parameter, from `first` on, into a tensor (n,), rounding to its dtype.

    Raises:
        DamagedError, OSError: if a file cannot be read any more.
    """
    dtype, last, numel_found = saved.dtype_of(kind), first + target.numel(), 0
    for piece in saved.slices[kind]:
        start, end = max(first, piece.first), min(last, piece.end(dtype))
        if start < end:
            offset = piece.offset + (start - piece.first) * dtype.itemsize
            opened.read(piece.file, offset, dtype, target[start - first : end - first])
            numel_found += end - start
    assert numel_found == target.numel(), (kind, first, last, numel_found)


class Files:
    """The files of a folder, of which the one read last is open."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._name = folder, ""
        self._file: io.FileIO | None = None

    def read(self, name: str, offset: int, dtype: torch.dtype, target: Tensor) -> None:
        """Read elements of this dtype into a tensor (n,) of perhaps another one, rounding to nearest.

        Raises:
            DamagedError, OSError: if the file is shorter or cannot be opened.
        """
        if self._file is None or name != self._name:
            self.close()
            self._name, self._file = name, files.open_regular(self._folder / name)
        try:
            if dtype == target.dtype:
                files.read_into(self._file, offset, target.view(torch.uint8))
                return
            for part in target.split(files.CHUNK_BYTES // dtype.itemsize):
                values = torch.empty(part.numel(), dtype=dtype)
                files.read_into(self._file, offset, values.view(torch.uint8))
                part.copy_(values)
                offset += values.nbytes
        except EOFError:
            raise DamagedError(f"{name}: it became shorter while it was read") from None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
