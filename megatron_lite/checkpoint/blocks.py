"""Blocks of a file, each with a CRC-32 that is computed on writing and checked on reading. Imports
no torch."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from megatron_lite.checkpoint.decoding import PositiveCount, Rule
from megatron_lite.checkpoint.names import reason
from megatron_lite.errors import DamagedError, shorten
from megatron_lite.run.regular_files import open_regular
from megatron_lite.tiles import Tile

try:  # the same sums in a tenth of the time
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

BLOCK_BYTES = 2**20  # written or read, then summed while still in the cache
DIFFERS = "its checksum does not match: it is damaged or belongs to another save"
SHORTER = "it became shorter while it was read"

HexDigits = Annotated[str, Rule("hexadecimal digits", re.compile("[0-9a-f]*").fullmatch)]


class SavedFile(NamedTuple):
    """The size of a file and the checksums of its blocks."""

    size: PositiveCount  # bytes
    block_bytes: (
        PositiveCount  # of each block but the last; in manifest versions 3 to 5 a file is one block
    )
    crc32: HexDigits  # of the blocks, 8 digits each

    @property
    def blocks(self) -> range:
        """All block numbers."""
        return self.blocks_around(0, self.size)

    def blocks_around(self, start: int, end: int) -> range:
        """Return the numbers of the blocks that contain bytes [start, end)."""
        return range(start // self.block_bytes, -(-end // self.block_bytes))

    def block(self, index: int) -> tuple[int, int, int]:
        """Return a block's start, end and CRC-32."""
        start, crc32 = index * self.block_bytes, self.crc32[8 * index : 8 * index + 8]
        return start, min(start + self.block_bytes, self.size), int(crc32, 16)


class Slice(NamedTuple):
    """A tile of a parameter: `num_bytes` at byte `offset` of `file`, starting with element
    `first`."""

    file: str
    offset: int
    num_bytes: int
    first: int
    run: int  # consecutive elements: the width of the tile

    @property
    def end(self) -> int:
        """The end offset in `file`."""
        return self.offset + self.num_bytes

    def tile(self, itemsize: int, shape: Sequence[int]) -> Tile:
        """Return the slice's tile in a parameter of this shape."""
        return Tile(
            self.first, self.num_bytes // itemsize // self.run, self.run, math.prod(shape[1:])
        )


class BlockSums:
    """Computes the block checksums of a file while it is written."""

    def __init__(self) -> None:
        self._size, self._sums = 0, list[int]()

    def add(self, data: memoryview) -> None:
        """Add the next bytes."""
        while data:
            inside = self._size % BLOCK_BYTES  # bytes that the last block has already
            part, data = data[: BLOCK_BYTES - inside], data[BLOCK_BYTES - inside :]
            self._sums.append(crc32(part, self._sums.pop() if inside else 0))
            self._size += len(part)

    def file(self) -> SavedFile:
        """Return the checksums of the complete file."""
        return SavedFile(self._size, BLOCK_BYTES, "".join(f"{found:08x}" for found in self._sums))


def check_sizes(
    folder: Path, saved: Mapping[str, SavedFile], rank: int = 0, world_size: int = 1
) -> None:
    """Check that this rank's share of a checkpoint's files exists with the right sizes.

    Raises:
        DamagedError: for the first file that is missing or has another size.
    """
    for name, file in list(saved.items())[rank::world_size]:
        with _open_file(folder, name, file):
            pass


def check_blocks(
    folder: Path,
    name: str,
    file: SavedFile,
    numbers: Iterable[int] | None = None,
    slices: Sequence[tuple[Slice, str]] = (),
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Check a file's size and the given blocks, by default all; read nothing else.

    slices: the file's, each with its name for the message; see `Manifest.places`. progress: gets
    the bytes of each block.

    Raises:
        DamagedError: if any differs or cannot be read.
    """
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with _open_file(folder, name, file) as opened:
        for number in file.blocks if numbers is None else numbers:
            start, end, expected = file.block(number)
            place, found = opened.seek(start), 0
            while place < end:
                count = opened.readinto(buffer[: end - place])
                if not count:
                    raise DamagedError(f"{name}: {SHORTER}")
                place, found = place + count, crc32(buffer[:count], found)
            if found != expected:
                inside = [
                    what for piece, what in slices if piece.offset < end and start < piece.end
                ]
                raise DamagedError(
                    f"{name}: {DIFFERS}" + (f" ({shorten(inside, 1)})" if inside else "")
                )
            progress(end - start)


@contextlib.contextmanager
def _open_file(folder: Path, name: str, expected: SavedFile) -> Iterator[io.FileIO]:
    """Open a file of the expected size; raise DamagedError also for system errors while it is
    open."""
    try:
        with open_regular(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected.size:
                raise DamagedError(f"{name}: {size:,} bytes, the manifest says {expected.size:,}")
            yield file
    except OSError as error:
        raise DamagedError(f"{name}: {reason(error)}") from None
