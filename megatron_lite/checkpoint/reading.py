"""Read the checkpoints that `writing.Save` writes into a model of any layout, and verify them on the way.

Each rank reads the bytes of its shards once and computes their checksums where they arrive; the rest of a file (header,
padding, copies on other tensor-parallel ranks, state that this run does not use) is read for its checksum only. The
ranks exchange the checksums of the pieces: those of a whole file, joined, must be the file's. So the first step waits
for one pass over the files, and a single wrong bit is found before it, even one that only one rank received. Only what
several tensor-parallel ranks need is read more than once.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_lite.checkpoint import file_checks, files, manifest
from megatron_lite.checkpoint.checksums import Checksums, Piece, joined, missing
from megatron_lite.checkpoint.compatibility import keeps_moments, saved_optimizer
from megatron_lite.checkpoint.manifest import MOMENTS, Manifest, SavedParameter, Slice, dtype_name
from megatron_lite.checkpoint.names import MANIFEST_NAME, open_regular
from megatron_lite.checkpoint.regions import Overlap, Region, held, overlaps, row_numel
from megatron_lite.distributed.agreement import first_problem
from megatron_lite.errors import DamagedError

if TYPE_CHECKING:
    from megatron_lite.distributed.process_group import Distributed
    from megatron_lite.zero.flat_shard import FlatShard
    from megatron_lite.zero.layout import ParameterSlot
    from megatron_lite.zero.multi_stage import MultiStage

_SKIPPED_BYTES = 2**20  # memory for bytes that are read for their checksum only


def open_checkpoint(folder: Path, iteration: int, distributed: Distributed) -> tuple[Manifest | None, str | None]:
    """Return the manifest of a checkpoint whose files exist and have the right sizes, or None and the problem.

    All ranks call this together and get the same answer.
    """
    contents: list[Manifest] = []

    def look() -> None:
        contents.append(manifest.read(folder, iteration))
        file_checks.check_sizes(folder, contents[0], distributed.rank, distributed.world_size)

    problem = first_problem(distributed, look)
    if problem is not None:
        return None, problem
    (content,) = contents
    if len(set(distributed.gather_objects(content.save_id))) > 1:
        return None, f"{MANIFEST_NAME}: not all ranks see the same file"
    return content, None


def fill_verified(
    folder: Path, content: Manifest, model: MultiStage, distributed: Distributed, optimizer: str
) -> str | None:
    """Fill the shards of all ranks; return the problem if any byte of the checkpoint is damaged.

    All ranks call this together and get the same answer. After a problem the shards are partly filled.
    """
    checksums = Checksums()
    fill_own = partial(fill, folder, content, model, distributed.data.rank, optimizer, checksums)
    if (problem := first_problem(distributed, fill_own)) is not None:
        return problem
    read = distributed.gather_objects(checksums.pieces())

    def check() -> None:
        for name in list(content.files)[distributed.rank :: distributed.world_size]:
            pieces = [Piece(*piece) for by_file in read for piece in by_file.get(name, ())]
            _check_file(folder, name, content, pieces)

    return first_problem(distributed, check)


def _check_file(folder: Path, name: str, content: Manifest, pieces: list[Piece]) -> None:
    """Read the bytes of a file that are in none of the pieces, and check the CRC-32 of the whole.

    Pieces that overlap others are read again: parameters of which several ranks have a copy, and their neighbours in
    the file. So what every rank received is what the file holds.

    Raises:
        DamagedError, OSError: if it differs, or the file can no longer be read.
    """
    size, covered = content.files[name].size, 0
    apart: list[Piece] = []
    repeated: list[Piece] = []
    for piece in sorted(set(pieces), key=lambda piece: (piece.start, -piece.end)):
        (apart if piece.start >= covered else repeated).append(piece)
        covered = max(covered, piece.end)
    with contextlib.closing(Files(folder)) as opened:
        apart += [opened.checksum(name, start, end) for start, end in missing(apart, size)]
        file_checks.require_checksum(name, content.files[name], joined(apart))
        for piece in repeated:
            file_checks.require_checksum(name, piece, opened.checksum(name, piece.start, piece.end).crc32)


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


def fill(folder: Path, content: Manifest, model: MultiStage, rank: int, optimizer: str, checksums: Checksums) -> None:
    """Read this rank's shards one after the other, with one file open at a time; `rank`: of the data-parallel group.

    `checksums` counts each byte that is read, and the bytes between two slices with the second slice. A rank that reads
    what it wrote reads its file from the first byte to the last slice, as one piece.

    Moments that are missing, or belong to another rule than the current `optimizer`, become zero; missing averages
    become the weights. Padding is not touched.

    Raises:
        DamagedError, OSError: if a file can no longer be read.
    """
    gaps = _gaps(content)
    with contextlib.closing(Files(folder, checksums=checksums, gaps=gaps)) as opened:
        for _, part in model.parts():
            for kind in part.kinds():
                _fill_shard(opened, content, part, kind, rank, optimizer)


def _gaps(content: Manifest) -> dict[str, dict[int, int]]:
    """Return, by file and by the start of each slice, the end of the slice before it (0: there is none)."""
    gaps: dict[str, dict[int, int]] = {}
    for name, slices in content.places().items():
        end, before = 0, gaps.setdefault(name, {})
        for piece, _ in slices:
            before[piece.offset], end = end, piece.offset + piece.num_bytes
    return gaps


def _fill_shard(opened: Files, content: Manifest, part: FlatShard, kind: str, rank: int, optimizer: str) -> None:
    """Fill one tensor of a part, (numel,), from the saved slices that overlap each piece of a parameter."""
    shard = part.read(kind).detach()
    assert shard.shape == (part.numel(kind),) and shard.is_contiguous(), (kind, tuple(shard.shape))
    assert shard.dtype == part.kinds()[kind], (kind, shard.dtype)
    before = saved_optimizer(content.config)
    weights = part.read("weights") if kind == "average" else shard  # filled before
    for (slot, region, target), (_, _, own_weights) in zip(
        shard_pieces(part, shard, rank), shard_pieces(part, weights, rank), strict=True
    ):
        if not part.has(kind, slot.spec):
            continue
        saved = content.parameters[slot.spec.name]
        is_kept = kind in saved.slices and keeps_moments(before, optimizer, bool(slot.spec.matrix_rows))
        if kind in MOMENTS and not is_kept:
            target.zero_()
        elif kind in saved.slices:
            read_elements(opened, saved, kind, region, target)
        else:
            assert kind == "average", kind
            target.copy_(own_weights)
    part.write(kind, shard)


def shard_pieces(part: FlatShard, shard: Tensor, rank: int) -> Iterator[tuple[ParameterSlot, Region, Tensor]]:
    """Yield (slot, elements of the whole parameter, view of the shard) for the shard of a data-parallel rank."""
    for slot, start, end in part.layout.pieces(rank):
        offset = slot.offset - rank * part.layout.shard_numel  # of the parameter's element 0; may be negative
        for first, region, _ in held(slot.spec, start, end):
            yield slot, region, shard[offset + first : offset + first + region.numel]


def read_elements(opened: Files, saved: SavedParameter, kind: str, region: Region, target: Tensor) -> None:
    """Fill a tensor (n,) with elements of a parameter, rounding to its dtype.

    Raises:
        DamagedError, OSError: if a file can no longer be read.
    """
    dtype, numel_found = saved.dtype_of(kind), 0
    for piece in saved.slices[kind]:
        for overlap in overlaps(region, piece.region(dtype), row_numel(saved.shape)):
            _read_overlap(opened, piece, dtype, overlap, target)
            numel_found += overlap.numel
    assert numel_found == target.numel(), (kind, region, numel_found)


def _read_overlap(opened: Files, piece: Slice, dtype: torch.dtype, overlap: Overlap, target: Tensor) -> None:
    """Read the elements that a slice and the target share; of columns, read whole rows of the slice, some at a time."""
    (rows, width, wanted, saved), first = overlap, overlap.wanted.first
    if overlap.is_contiguous:
        offset = piece.offset + saved.first * dtype.itemsize
        opened.read(piece.file, offset, dtype, target[first : first + overlap.numel])
        return
    step = max(1, files.CHUNK_BYTES // (saved.pitch * dtype.itemsize))
    opened.cut(piece.file)  # the ranks that read the same rows get the same piece
    for top in range(0, rows, step):
        values = torch.empty(min(step, rows - top), saved.pitch, dtype=dtype)
        offset = piece.offset + (saved.start + top * saved.pitch) * dtype.itemsize
        opened.read(piece.file, offset, dtype, values.view(-1))
        columns = values[:, saved.column : saved.column + width]
        target[first + top * wanted.pitch :].as_strided(columns.shape, (wanted.pitch, 1)).copy_(columns)
    opened.cut(piece.file)


class Files:
    """The files of a folder; keeps the latest one open.

    follow_links: see `open_regular`.
    checksums: counts the bytes that are read.
    gaps: see `_gaps`; whoever reads the start of a slice also counts the bytes before it that belong to no slice.
    """

    def __init__(
        self,
        folder: Path,
        follow_links: bool = False,
        checksums: Checksums | None = None,
        gaps: Mapping[str, Mapping[int, int]] = MappingProxyType({}),
    ) -> None:
        self._folder, self._name, self._follow_links = folder, "", follow_links
        self._checksums, self._gaps = checksums, gaps
        self._file: io.FileIO | None = None

    def read(self, name: str, offset: int, dtype: torch.dtype, target: Tensor) -> None:
        """Read elements of this dtype into a tensor (n,), rounding to nearest if its dtype differs.

        Raises:
            DamagedError, OSError: if the file is too short or cannot be opened.
        """
        if (gap := self._gaps.get(name, {}).get(offset, offset)) < offset:
            self.skip(name, gap, offset)
        if dtype == target.dtype:
            self._read(name, offset, target.view(torch.uint8))
            return
        for part in target.split(files.CHUNK_BYTES // dtype.itemsize):
            values = torch.empty(part.numel(), dtype=dtype)
            self._read(name, offset, values.view(torch.uint8))
            part.copy_(values)
            offset += values.nbytes

    def skip(self, name: str, start: int, end: int) -> None:
        """Read bytes for their checksum only.

        Raises:
            DamagedError, OSError: as `read`.
        """
        buffer = torch.empty(min(end - start, _SKIPPED_BYTES), dtype=torch.uint8)
        for offset in range(start, end, _SKIPPED_BYTES):
            self._read(name, offset, buffer[: end - offset])

    def cut(self, name: str) -> None:
        """Count the next bytes of a file as a piece of their own."""
        if self._checksums is not None:
            self._checksums.cut(name)

    def checksum(self, name: str, start: int, end: int) -> Piece:
        """Return the checksum of bytes of a file.

        Raises:
            DamagedError, OSError: as `read`.
        """
        outer, self._checksums = self._checksums, Checksums()
        self.skip(name, start, end)
        ((piece,),) = self._checksums.pieces().values()
        self._checksums = outer
        return piece

    def _read(self, name: str, offset: int, target: Tensor) -> None:
        if self._file is None or name != self._name:
            self.close()
            self._name, self._file = name, open_regular(self._folder / name, self._follow_links)
            self._ahead = files.ReadAhead(self._file.fileno())
        self._ahead.begin(offset)
        if self._checksums is not None:
            self._checksums.begin(name, offset)
        try:
            files.read_into(self._file, offset, target, self._arrived)
        except EOFError:
            raise DamagedError(f"{name}: it became shorter while it was read") from None

    def _arrived(self, data: memoryview) -> None:
        """Let the disk go on, then sum what it gave."""
        self._ahead.add(len(data))
        if self._checksums is not None:
            self._checksums.add(data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
