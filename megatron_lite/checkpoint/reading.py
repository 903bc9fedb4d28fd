"""Verify the checkpoints that `sharded.save` writes, and read them into a model of any layout."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.compatibility import keeps_moments, saved_optimizer
from megatron_lite.checkpoint.manifest import MOMENTS, Manifest, SavedParameter, dtype_name
from megatron_lite.checkpoint.names import MANIFEST_NAME, open_regular
from megatron_lite.distributed.agreement import first_problem
from megatron_lite.errors import DamagedError

if TYPE_CHECKING:
    from megatron_lite.distributed.process_group import Distributed
    from megatron_lite.zero.flat_shard import FlatShard
    from megatron_lite.zero.layout import ParameterSlot
    from megatron_lite.zero.multi_stage import MultiStage


def verify(folder: Path, iteration: int, distributed: Distributed) -> tuple[Manifest | None, str | None]:
    """Return the manifest of a good checkpoint, or None and the problem. Each rank reads its share of the files.

    All ranks call this together and get the same answer.
    """
    contents: list[Manifest] = []
    problem = first_problem(distributed, lambda: contents.append(manifest.read(folder, iteration)))
    if problem is not None:
        return None, problem
    (content,) = contents
    if len(set(distributed.gather_objects(content.save_id))) > 1:
        return None, f"{MANIFEST_NAME}: not all ranks see the same file"
    rank, world_size = distributed.rank, distributed.world_size
    problem = first_problem(distributed, lambda: manifest.check_files(folder, content, rank, world_size))
    return (content, None) if problem is None else (None, problem)


def changes(content: Manifest, model: MultiStage, optimizer: str) -> list[str]:
    """Describe the state that cannot be restored unchanged: optimizer state, averages and precision, a line each.

    optimizer: the current --optimizer.
    """
    before, total = saved_optimizer(content.config), len(content.parameters)
    has_averages = any("average" in saved.slices for saved in content.parameters.values())
    num_other_rule = num_without_average = 0
    without_moments, rounded = Counter[str](), Counter[str]()
    for _, part in model.parts():
        kinds = part.kinds()
        for slot in part.layout.slots:
            saved = content.parameters[slot.spec.name]
            wanted = [kind for kind in MOMENTS if kind in kinds and part.has(kind, slot.spec)]
            missing = [kind for kind in wanted if kind not in saved.slices]
            if wanted and not keeps_moments(before, optimizer, bool(slot.spec.matrix_rows)):
                num_other_rule += 1
            elif missing:
                without_moments[" and ".join(missing)] += 1
            if has_averages and "average" in kinds and "average" not in saved.slices:
                num_without_average += 1
            if kinds["weights"] not in (saved.dtype, torch.float32):
                rounded[f"{dtype_name(saved.dtype)} to {dtype_name(kinds['weights'])}"] += 1
    lines = [
        f"{number} of {total} parameter tensors have no {missing} there (they were frozen, or trained with another "
        "--optimizer): these start at zero"
        for missing, number in without_moments.items()
    ]
    if num_other_rule:
        lines.append(
            f"it was trained with --optimizer={before}, whose moments --optimizer={optimizer} cannot use: those of "
            f"{num_other_rule} of {total} parameter tensors start at zero"
        )
    if num_without_average:
        lines.append(
            f"{num_without_average} of {total} parameter tensors have no average there (they were frozen): averages "
            "start from the weights"
        )
    if has_averages and not any("average" in part.kinds() for _, part in model.parts()):
        lines.append("it holds averaged weights, which a run without --ema_type neither uses nor saves again")
    if rounded:
        dtypes = ", ".join(sorted(rounded))
        lines.append(f"{rounded.total()} of {total} parameter tensors are frozen and were rounded: {dtypes}")
    return lines


def fill(folder: Path, content: Manifest, model: MultiStage, rank: int, optimizer: str) -> None:
    """Read this rank's shards one after the other, with one file open at a time.

    Moments that are missing, or belong to another rule than the current `optimizer`, become zero; missing averages
    become the weights. Padding is not touched.

    Raises:
        DamagedError, OSError: if a file can no longer be read.
    """
    with contextlib.closing(Files(folder)) as opened:
        for _, part in model.parts():
            for kind in part.kinds():
                _fill_shard(opened, content, part, kind, rank, optimizer)


def _fill_shard(opened: Files, content: Manifest, part: FlatShard, kind: str, rank: int, optimizer: str) -> None:
    """Fill one tensor of a part, (numel,), from the saved slices that overlap each piece of a parameter."""
    shard = part.read(kind).detach()
    assert shard.shape == (part.numel(kind),) and shard.is_contiguous(), (kind, tuple(shard.shape))
    assert shard.dtype == part.kinds()[kind], (kind, shard.dtype)
    before = saved_optimizer(content.config)
    for slot, start, target in shard_pieces(part, shard, rank):
        if not part.has(kind, slot.spec):
            continue
        saved = content.parameters[slot.spec.name]
        is_kept = kind in saved.slices and keeps_moments(before, optimizer, bool(slot.spec.matrix_rows))
        if kind in MOMENTS and not is_kept:
            target.zero_()
        else:
            read_elements(opened, saved, kind if kind in saved.slices else "weights", start, target)
    part.write(kind, shard)


def shard_pieces(part: FlatShard, shard: Tensor, rank: int) -> Iterator[tuple[ParameterSlot, int, Tensor]]:
    """Yield (slot, index of the first element, view of the shard) for each parameter in a rank's shard of a part."""
    for slot, start, end in part.layout.pieces(rank):
        offset = slot.offset - rank * part.layout.shard_numel  # of the parameter's element 0; may be negative
        yield slot, start, shard[offset + start : offset + end]


def read_elements(opened: Files, saved: SavedParameter, kind: str, first: int, target: Tensor) -> None:
    """Fill a tensor (n,) with elements of a flattened parameter, starting with `first` and rounding to its dtype.

    Raises:
        DamagedError, OSError: if a file can no longer be read.
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
    """The files of a folder; keeps the latest one open. `follow_links`: see `open_regular`."""

    def __init__(self, folder: Path, follow_links: bool = False) -> None:
        self._folder, self._name, self._follow_links = folder, "", follow_links
        self._file: io.FileIO | None = None

    def read(self, name: str, offset: int, dtype: torch.dtype, target: Tensor) -> None:
        """Read elements of this dtype into a tensor (n,), rounding to nearest if its dtype differs.

        Raises:
            DamagedError, OSError: if the file is too short or cannot be opened.
        """
        if self._file is None or name != self._name:
            self.close()
            self._name, self._file = name, open_regular(self._folder / name, self._follow_links)
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
