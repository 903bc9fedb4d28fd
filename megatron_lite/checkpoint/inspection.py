"""Verify checkpoints without a model. Imports torch only to look at values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_lite.checkpoint import manifest
from megatron_lite.checkpoint.blocks import Slice, check_blocks
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.checkpoint.names import OUR_FILE, parse_json, rank_file, reason
from megatron_lite.errors import DamagedError
from megatron_lite.run.progress_line import ByteProgress
from megatron_lite.run.regular_files import open_regular

LARGEST_HEADER_BYTES = 2**27  # of a rank's file


class Inspection(NamedTuple):
    """Findings about one checkpoint, which is good if there are no problems."""

    num_bytes: int | None  # total file size by the manifest; None: no usable manifest
    # saved by: "8", "4x2" (data x tensor-parallel), or "2x4x1" with 2 pipeline ranks
    ranks: str | None
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
    num_bytes = sum(file.size for file in content.files.values())
    with ByteProgress(f"verifying {folder}", num_bytes * (1 + values)) as progress:
        for rank, (name, file) in enumerate(content.files.items()):
            slices = places.get(name, [])
            try:
                check_blocks(folder, name, file, slices=slices, progress=progress.add)
                _check_header(folder, rank, name, content, slices)
            except DamagedError as error:
                problems.append(str(error))
        if values and not problems:
            from megatron_lite.checkpoint.reading import not_finite  # and torch

            problems += not_finite(folder, content, progress)
    others = sorted(path.name for path in folder.iterdir() if not OUR_FILE.fullmatch(path.name))
    remarks = [f"other files: {', '.join(map(ascii, others[:5]))}"] if others else []
    return Inspection(num_bytes, shape_text(content.grid), problems, remarks)


def shape_text(shape: Mapping[str, int]) -> str:
    """Return the ranks along each dimension; without a pipeline, from data-parallel ranks to the
    last dimension with several."""
    text = "x".join(map(str, shape.values()))
    return re.sub("(x1)+$", "", text[2:]) if text.startswith("1x") else text


def _check_header(
    folder: Path, rank: int, name: str, content: Manifest, slices: Sequence[tuple[Slice, str]]
) -> None:
    """Check that a file's header names this save, and that no slice overlaps the header.

    Raises:
        DamagedError: if it does not.
    """
    try:
        with open_regular(folder / name) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > LARGEST_HEADER_BYTES:
                raise DamagedError(f"{name}: its header is too long")
            header = parse_json(file.read(length))
    except (OSError, ValueError) as error:
        said = reason(error) if isinstance(error, OSError) else str(error)
        raise DamagedError(f"{name}: its header is not readable ({said})") from None
    wanted = manifest.file_metadata(content.save_id, content.iteration, rank)
    if (
        name != rank_file(rank)
        or not isinstance(header, dict)
        or header.get("__metadata__") != wanted
    ):
        raise DamagedError(f"{name}: it belongs to another save, iteration or rank")
    if any(piece.offset < 8 + length for piece, _ in slices):
        raise DamagedError(f"{name}: a slice of the manifest reaches into its header")
