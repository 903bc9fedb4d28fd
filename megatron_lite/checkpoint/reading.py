"""Load checkpoints of `writing.Save` into a model of any layout, verifying them on the way.

The manifest maps every element of every parameter to its place, so any world size, tensor-parallel
size, ZeRO stage, number of layers per stage and choice of frozen parameters can load any other. A
damaged checkpoint is reported, skipped and never touched; the next older one then overwrites what
was loaded from it.

Each rank reads the bytes of its shards once and checks the blocks that contain them; the ranks then
gather the numbers of these blocks and check the remaining ones (padding, copies of other
tensor-parallel ranks, unused state). The first step thus waits for one pass over the files, and a
single wrong bit is found before it, even one that only one rank received. Only blocks that several
ranks need, and older versions' files (a single block) too large for memory, are read more than
once.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.blocks import Slice, check_blocks, check_sizes
from megatron_lite.checkpoint.compatibility import keeps_moments, saved_optimizer
from megatron_lite.checkpoint.files import Files, dtype_name
from megatron_lite.checkpoint.manifest import MOMENTS, Manifest, SavedParameter
from megatron_lite.checkpoint.names import MANIFEST_NAME
from megatron_lite.checkpoint.rotation import pinned
from megatron_lite.distributed.agreement import first_problem, together
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import CheckpointError, DamagedError, shorten
from megatron_lite.run.progress_line import ByteProgress
from megatron_lite.tiles import Overlap, Tile, overlaps
from megatron_lite.zero.finite import are_finite
from megatron_lite.zero.flat_shard import FlatShard
from megatron_lite.zero.multi_stage import MultiStage


def load_first_good(
    found: Sequence[tuple[int, Path]],
    where: Path | None,
    model: MultiStage,
    distributed: Distributed,
    report: Callable[[str], None],
    optimizer: str = "adamw",
    repair: Callable[[int], bool | None] = lambda iteration: None,
) -> tuple[Path, Manifest] | None:
    """Fill the model's shards from the first good checkpoint. Collective.

    Padding is not touched.

    Args:
        found: (iteration, folder), the same on every rank; see `choice.choose_together`.
        where: their folder, for the message.
        report: gets a line on every rank for each newer checkpoint that is damaged, and for each
            kind of state that cannot be restored unchanged (see `changes`).
        optimizer: the current --optimizer.
        repair: restores a damaged or missing checkpoint and returns whether it could, None if it
            knows of none. Collective.

    Returns:
        The checkpoint's folder and manifest; None if there is none.

    Raises:
        CheckpointError: on every rank, if no checkpoint is usable, or if the newest good one has
            other parameters than the model. No file is changed.
        RotatedError: on every rank, if a live run, whose checkpoints these are, deletes one that is
            read.
    """
    problems = []
    for iteration, folder in found:
        check, repaired = pinned(folder), None
        content, problem = _load(folder, iteration, model, distributed, optimizer)
        if problem is not None and (repaired := repair(iteration)):
            report(f"checkpoint {folder}: {problem}; the mirror's is used")
            content, problem = _load(folder, iteration, model, distributed, optimizer)
        if content is not None and problem is None:
            for line in changes(content, model, optimizer):
                report(f"checkpoint {folder}: {line}")
            return folder, content
        if repaired is None:
            together(distributed, check)
        problems.append(f"{folder}: {problem}")
        report(f"checkpoint {problems[-1]}; skipped, looking for an older one")
    if not problems:
        return None
    raise CheckpointError(
        f"no usable checkpoint in {where}; nothing was changed, and training does not restart from zero by itself. "
        "Restore one of these or choose another --experiment_dir:\n  " + "\n  ".join(problems)
    )


def _load(
    folder: Path, iteration: int, model: MultiStage, distributed: Distributed, optimizer: str
) -> tuple[Manifest | None, str | None]:
    """Fill the shards from one checkpoint; return its manifest and the problem, if any."""
    content, problem = open_checkpoint(folder, iteration, distributed)
    if content is None:
        return None, problem
    shapes = {
        slot.spec.name: slot.spec.shape
        for _, part in model.saved_parts(of_all=True)
        for slot in part.layout.slots
    }
    if misfits := content.misfits(shapes):
        raise CheckpointError(
            f"checkpoint {folder} does not fit the model: {shorten(misfits)}. Give the flags it was trained with, or "
            "choose another --experiment_dir"
        )
    return content, fill_verified(folder, content, model, distributed, optimizer)


def open_checkpoint(
    folder: Path, iteration: int, distributed: Distributed
) -> tuple[Manifest | None, str | None]:
    """Return the manifest of a checkpoint whose files exist and have the right sizes, or None and
    the problem.

    Collective; all ranks get the same answer.
    """
    content: Manifest | None = None

    def look() -> None:
        nonlocal content
        content = manifest.read(folder, iteration)
        check_sizes(folder, content.files, distributed.rank, distributed.world_size)

    problem = first_problem(distributed, look)
    if problem is None and len(set(distributed.gather_objects(content and content.save_id))) > 1:
        problem = f"{MANIFEST_NAME}: not all ranks see the same file"
    return None if problem else content, problem


def fill_verified(
    folder: Path, content: Manifest, model: MultiStage, distributed: Distributed, optimizer: str
) -> str | None:
    """Fill the shards of all ranks; return the problem if any byte of the checkpoint is damaged.

    Collective; all ranks get the same answer. After a problem the shards are partly filled.
    """
    opened = Files(folder, content.files)

    def fill_own() -> None:
        with contextlib.closing(opened):
            for _, part in model.saved_parts():
                for kind in part.kinds():
                    _fill_shard(opened, content, part, kind, optimizer)

    if (problem := first_problem(distributed, fill_own)) is not None:
        return problem
    read = distributed.gather_objects(opened.checked)

    def check_rest() -> None:
        for name, file in list(content.files.items())[distributed.rank :: distributed.world_size]:
            done = {
                number
                for by_file in read
                for ends in by_file.get(name, ())
                for number in range(*ends)
            }
            check_blocks(
                folder, name, file, [number for number in file.blocks if number not in done]
            )

    return first_problem(distributed, check_rest)


def changes(content: Manifest, model: MultiStage, optimizer: str) -> list[str]:
    """Describe state that cannot be restored unchanged: optimizer state, averages and precision,
    one line each.

    optimizer: the current --optimizer.
    """
    before, total = saved_optimizer(content.config), len(content.parameters)
    has_averages = any("average" in saved.slices for saved in content.parameters.values())
    num_other_rule = num_without_average = 0
    without_moments, rounded = Counter[str](), Counter[str]()
    for _, part in model.saved_parts(of_all=True):
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
            if (rounded_to := dtype_name(kinds["weights"])) not in (saved.dtype, "float32"):
                rounded[f"{saved.dtype} to {rounded_to}"] += 1
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
    if has_averages and not any("average" in part.kinds() for _, part in model.all_parts()):
        lines.append(
            "it holds averaged weights, which a run without --ema_type neither uses nor saves again"
        )
    if rounded:
        dtypes = ", ".join(sorted(rounded))
        lines.append(
            f"{rounded.total()} of {total} parameter tensors are frozen and were rounded: {dtypes}"
        )
    return lines


def _fill_shard(
    opened: Files, content: Manifest, part: FlatShard, kind: str, optimizer: str
) -> None:
    """Fill one tensor of a part, (numel,), from the saved slices that overlap its tiles.

    Moments that are missing, or belong to a rule other than the current `optimizer`, become zero;
    missing averages become the weights. Padding is not touched.

    Raises:
        DamagedError, OSError: if a file is damaged or can no longer be read.
    """
    shard = part.read(kind).detach()
    assert shard.shape == (part.numel(kind),) and shard.is_contiguous(), (kind, tuple(shard.shape))
    assert shard.dtype == part.kinds()[kind], (kind, shard.dtype)
    before = saved_optimizer(content.config)
    weights = part.read("weights") if kind == "average" else shard  # already filled
    for spec, tile in part.layout.tiles(part.rank):
        if not part.has(kind, spec):
            continue
        saved, target = content.parameters[spec.name], shard[tile.offset : tile.end]
        is_kept = kind in saved.slices and keeps_moments(before, optimizer, bool(spec.matrix_rows))
        if kind in MOMENTS and not is_kept:
            target.zero_()
        elif kind in saved.slices:
            read_elements(opened, saved, kind, tile, target)
        else:
            assert kind == "average", kind
            target.copy_(weights[tile.offset : tile.end])
    part.write(kind, shard)


def read_elements(
    opened: Files, saved: SavedParameter, kind: str, wanted: Tile, target: Tensor
) -> None:
    """Fill a tensor (n,) with elements of a parameter, rounding to its dtype.

    Raises:
        DamagedError, OSError: if a file is damaged, can no longer be read, or the slices lack some
        of these elements.
    """
    dtype = getattr(torch, saved.dtype_of(kind))
    numel_found = 0
    wanted = wanted._replace(offset=0)
    for piece in saved.slices[kind]:
        for overlap in overlaps(wanted, piece.tile(dtype.itemsize, saved.shape)):
            read_overlap(opened, piece, dtype, overlap, target)
            numel_found += overlap.wanted.numel
    if numel_found != target.numel():
        raise DamagedError(
            f"{MANIFEST_NAME}: the slices of {kind} leave gaps or overlap from element {wanted.first} on"
        )


def read_overlap(
    opened: Files, piece: Slice, dtype: torch.dtype, overlap: Overlap, target: Tensor
) -> None:
    """Read a slice's overlap with the target; for columns, read whole rows of the slice, some at a
    time."""
    wanted, saved, column = overlap
    if overlap.is_run:
        offset = piece.offset + saved.first * dtype.itemsize
        opened.read(piece.file, offset, dtype, target[wanted.first : wanted.first + wanted.numel])
        return
    step = max(1, files.CHUNK_BYTES // (saved.pitch * dtype.itemsize))
    for top in range(0, saved.rows, step):
        values = torch.empty(min(step, saved.rows - top), saved.pitch, dtype=dtype)
        offset = piece.offset + (saved.first - column + top * saved.pitch) * dtype.itemsize
        opened.read(piece.file, offset, dtype, values.view(-1))
        wanted.view(target)[top : top + len(values)] = values[:, column : column + saved.width]


def not_finite(folder: Path, content: Manifest, progress: ByteProgress) -> list[str]:
    """List the parameters with infinite or NaN values."""
    problems = []
    with contextlib.closing(Files(folder)) as opened:
        for name, parameter in content.parameters.items():
            for kind, pieces in parameter.slices.items():
                dtype = getattr(torch, parameter.dtype_of(kind))
                for piece in pieces:
                    for offset in range(piece.offset, piece.end, files.CHUNK_BYTES):
                        num_bytes = min(files.CHUNK_BYTES, piece.end - offset)
                        chunk = torch.empty(num_bytes // dtype.itemsize, dtype=dtype)
                        opened.read(piece.file, offset, dtype, chunk)
                        progress.add(num_bytes)
                        if not are_finite([chunk])[0]:
                            problems.append(f"{kind} of {name!r} holds numbers that are not finite")
    return list(dict.fromkeys(problems))
