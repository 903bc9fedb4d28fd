"""Checks a checkpoint as far as possible without its model: the manifest and every byte of every file."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_lite.checkpoint import blocks, manifest
from megatron_lite.checkpoint.blocks import Files
from megatron_lite.checkpoint.manifest import Manifest, Slice
from megatron_lite.checkpoint.names import OUR_FILE, open_regular, parse_json, rank_file, reason
from megatron_lite.errors import DamagedError

_LARGEST_HEADER_BYTES = 2**27


class Inspection(NamedTuple):
    """Findings about one checkpoint, which is good if there are no problems."""

    num_bytes: int | None  # total file size by the manifest; None: no usable manifest
    ranks: str | None  # saved by: "8", or "4x2" with tensor-parallel size 2
    problems: list[str]
    remarks: list[str]  # harmless


def inspect(folder: Path, values: bool = False) -> Inspection:
    """Check a checkpoint with little memory.

    values: also look for values that are not finite; reads the files a second time.
    """
    try:
        content = manifest.read(folder, int(folder.name) if folder.name.isdecimal() else None)
    except DamagedError as error:
        return Inspection(None, None, [str(error)], [])
    problems, places = [], content.places()
    for rank, (name, file) in enumerate(content.files.items()):
        slices = places.get(name, [])
        try:
            blocks.check_blocks(folder, name, file, slices=slices)
            _check_header(folder, rank, name, content, slices)
        except DamagedError as error:
            problems.append(str(error))
    if values and not problems:
        problems += _not_finite(folder, content)
    others = sorted(path.name for path in folder.iterdir() if not OUR_FILE.fullmatch(path.name))
    remarks = [f"other files: {', '.join(map(ascii, others[:5]))}"] if others else []
    tensor = content.tensor_parallel
    ranks = str(content.world_size) if tensor == 1 else f"{content.world_size // tensor}x{tensor}"
    return Inspection(sum(file.size for file in content.files.values()), ranks, problems, remarks)


def _check_header(folder: Path, rank: int, name: str, content: Manifest, slices: Sequence[tuple[Slice, str]]) -> None:
    """Check that a file's header names this save, and that no slice overlaps the header.

    Raises:
        DamagedError: if it does not.
    """
    try:
        with open_regular(folder / name) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEADER_BYTES:
                raise DamagedError(f"{name}: its header is too long")
            header = parse_json(file.read(length))
    except (OSError, ValueError) as error:
        said = reason(error) if isinstance(error, OSError) else str(error)
        raise DamagedError(f"{name}: its header is not readable ({said})") from None
    wanted = manifest.file_metadata(content.save_id, content.iteration, rank)
    if name != rank_file(rank) or not isinstance(header, dict) or header.get("__metadata__") != wanted:
        raise DamagedError(f"{name}: it belongs to another save, iteration or rank")
    if any(piece.offset < 8 + length for piece, _ in slices):
        raise DamagedError(f"{name}: a slice of the manifest reaches into its header")


def _not_finite(folder: Path, content: Manifest) -> list[str]:
    """List the parameters with infinite or NaN values."""
    problems = []
    with contextlib.closing(Files(folder)) as opened:
        for name, parameter in content.parameters.items():
            for kind, pieces in parameter.slices.items():
                dtype = parameter.dtype_of(kind)
                step = blocks.CHUNK_BYTES // dtype.itemsize
                for piece in pieces:
                    for first in range(0, piece.num_bytes // dtype.itemsize, step):
                        chunk = torch.empty(min(step, piece.num_bytes // dtype.itemsize - first), dtype=dtype)
                        opened.read(piece.file, piece.offset + first * dtype.itemsize, dtype, chunk)
                        if not bool(chunk.isfinite().all()):
                            problems.append(f"{kind} of {name!r} holds numbers that are not finite")
    return list(dict.fromkeys(problems))
