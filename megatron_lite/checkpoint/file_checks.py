"""Compare the files of a checkpoint with its manifest: their sizes, the checksum of a file, those of some slices."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_lite.checkpoint.checksums import CutChecksums, Piece, joined
from megatron_lite.checkpoint.files import PIECE_BYTES
from megatron_lite.checkpoint.manifest import Manifest, SavedFile, Slice
from megatron_lite.checkpoint.names import open_regular, reason
from megatron_lite.errors import DamagedError

_DIFFERS = "its checksum does not match: it is damaged or belongs to another save"


def check_sizes(folder: Path, manifest: Manifest, rank: int = 0, world_size: int = 1) -> None:
    """Check that this rank's share of the files of a manifest exist and have the right size.

    Raises:
        DamagedError: for the first that does not.
    """
    for name, file in list(manifest.files.items())[rank::world_size]:
        with _open_file(folder, name, file):
            pass


def check_file(folder: Path, name: str, manifest: Manifest, slices: Sequence[tuple[Slice, str]] = ()) -> None:
    """Check the size and the CRC-32 of one file of a manifest, reading all of it once, and those of its `slices`.

    slices: from `Manifest.places`.

    Raises:
        DamagedError: if any differs or the file cannot be read.
    """
    sums = CutChecksums(cut for piece, _ in slices for cut in (piece.offset, piece.offset + piece.num_bytes))
    with _open_file(folder, name, manifest.files[name]) as file:
        buffer = memoryview(bytearray(PIECE_BYTES))
        while count := file.readinto(buffer):
            sums.add(buffer[:count])
    pieces = sums.pieces()
    require_checksum(name, manifest.files[name], joined(pieces))
    found = {(start, end): crc for start, end, crc in pieces}
    for piece, what in slices:
        _require_slice(piece, what, found[piece.offset, piece.offset + piece.num_bytes])


def require_checksum(name: str, expected: SavedFile | Piece, found: int | None) -> None:
    """Raise DamagedError unless a file, or a piece of it, has the CRC-32 that is expected."""
    if found != expected.crc32:
        raise DamagedError(f"{name}: {_DIFFERS}")


def _require_slice(piece: Slice, what: str, found: int) -> None:
    if piece.crc32 not in (None, found):
        raise DamagedError(f"{piece.file}: {_DIFFERS} ({what})")


def check_files(folder: Path, manifest: Manifest, rank: int, world_size: int) -> None:
    """Check this rank's share of the files; see `check_file`."""
    for name in list(manifest.files)[rank::world_size]:
        check_file(folder, name, manifest)


def check_slices(folder: Path, manifest: Manifest, slices: Sequence[tuple[Slice, str]]) -> None:
    """Check the CRC-32 of slices with checksums, each with its name for a message; read nothing else.

    Raises:
        DamagedError: if one differs or cannot be read.
    """
    buffer = memoryview(bytearray(PIECE_BYTES))
    for name, group in itertools.groupby(slices, key=lambda item: item[0].file):
        with _open_file(folder, name, manifest.files[name]) as file:
            for piece, what in group:
                file.seek(piece.offset)
                crc, left = 0, piece.num_bytes
                while left and (count := file.readinto(buffer[:left])):
                    crc, left = zlib.crc32(buffer[:count], crc), left - count
                _require_slice(piece, what, crc)


@contextlib.contextmanager
def _open_file(folder: Path, name: str, expected: SavedFile) -> Iterator[io.FileIO]:
    """Open a file of the expected size; raise DamagedError also for system errors while it is open."""
    try:
        with open_regular(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected.size:
                raise DamagedError(f"{name}: {size:,} bytes, the manifest says {expected.size:,}")
            yield file
    except OSError as error:
        raise DamagedError(f"{name}: {reason(error)}") from None
