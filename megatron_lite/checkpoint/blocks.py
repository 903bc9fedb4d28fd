"""Files in blocks of a fixed size, each with a CRC-32 that is computed on writing and checked on reading.

Reading any bytes of a checkpoint reads and checks the blocks that contain them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpoint.decoding import PositiveCount, Rule
from megatron_lite.checkpoint.names import open_regular, reason
from megatron_lite.errors import DamagedError, shorten

if TYPE_CHECKING:
    from megatron_lite.checkpoint.manifest import Manifest, Slice

CHUNK_BYTES = 64 * 2**20  # memory for one read, and for one copy from a device
BLOCK_BYTES = 2**20  # written or read, then summed while still in the cache
LARGEST_BLOCK_BYTES = CHUNK_BYTES  # most that a reader holds in memory; older versions have larger blocks
AHEAD_BYTES = 32 * 2**20  # read-ahead of the disk while a processor sums earlier blocks
_DIFFERS = "its checksum does not match: it is damaged or belongs to another save"
_SHORTER = "it became shorter while it was read"

HexDigits = Annotated[str, Rule("hexadecimal digits", lambda text: re.fullmatch("[0-9a-f]*", text) is not None)]


class SavedFile(NamedTuple):
    """The size of a file and the checksums of its blocks."""

    size: PositiveCount  # bytes
    block_bytes: PositiveCount  # of each block but the last; in manifest versions 3 to 5 a file is one block
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


class BlockSums:
    """Computes the block checksums of a file while it is written."""

    def __init__(self) -> None:
        self._size = 0
        self._block_bytes = BLOCK_BYTES
        self._sums: list[int] = []

    def add(self, data: memoryview) -> None:
        """Add the next bytes."""
        while data:
            inside = self._size % self._block_bytes  # bytes that the last block has already
            part, data = data[: self._block_bytes - inside], data[self._block_bytes - inside :]
            self._sums.append(zlib.crc32(part, self._sums.pop() if inside else 0))
            self._size += len(part)

    def file(self) -> SavedFile:
        """Return the checksums of the complete file."""
        return SavedFile(self._size, self._block_bytes, "".join(f"{crc32:08x}" for crc32 in self._sums))


class Files:
    """The files of a folder; caches the latest open file and the latest partially read block.

    saved: files whose blocks are checked when they are read.
    follow_links: see `open_regular`.
    """

    def __init__(
        self, folder: Path, saved: Mapping[str, SavedFile] = MappingProxyType({}), follow_links: bool = False
    ) -> None:
        self._folder, self._saved, self._follow_links = folder, saved, follow_links
        self._name = ""
        self._file: io.FileIO | None = None
        self._block, self._block_number = memoryview(b""), -1
        # In the open file: start and end of the current sequential read, and the end of the read-ahead.
        self._start = self._end = self._asked = 0
        self.checked: dict[str, list[list[int]]] = {}  # by file, ranges of blocks that were read and verified

    def read(self, name: str, offset: int, dtype: torch.dtype, target: Tensor) -> None:
        """Read elements of this dtype into a tensor (n,), rounding to nearest if its dtype differs.

        Raises:
            DamagedError, OSError: if a checksum differs, the file is too short or it cannot be opened.
        """
        if self._file is None or name != self._name:
            self.close()
            self._name, self._file = name, open_regular(self._folder / name, self._follow_links)
            self._start = self._end = self._asked = 0
        for part in target.split(CHUNK_BYTES // dtype.itemsize):
            is_direct = part.dtype == dtype and part.device.type == "cpu"
            values = part if is_direct else torch.empty(part.numel(), dtype=dtype)
            self._read(offset, values.view(torch.uint8).numpy().data)
            if not is_direct:
                part.copy_(values)
            offset += values.nbytes

    def _read(self, offset: int, target: memoryview) -> None:
        saved, end = self._saved.get(self._name), offset + len(target)
        if saved is None or saved.block_bytes > LARGEST_BLOCK_BYTES:
            self._fill(offset, target)
            return
        for number in saved.blocks_around(offset, end):
            start, stop, crc32 = saved.block(number)
            low, high = max(start, offset), min(stop, end)
            part = target[low - offset : high - offset]
            if number == self._block_number:
                part[:] = self._block[low - start : high - start]
                continue
            is_whole = high - low == stop - start
            block = part if is_whole else memoryview(bytearray(stop - start))
            self._fill(start, block)
            if zlib.crc32(block) != crc32:
                raise DamagedError(f"{self._name}: {_DIFFERS}")
            self._note(number)
            if not is_whole:
                self._block, self._block_number = block, number
                part[:] = block[low - start : high - start]

    def _fill(self, offset: int, target: memoryview) -> None:
        """Read bytes without a check."""
        assert self._file is not None
        self._file.seek(offset)
        if offset != self._end:
            self._start = self._end = self._asked = offset
        while target:
            count = self._file.readinto(target[:BLOCK_BYTES])
            if not count:
                raise DamagedError(f"{self._name}: {_SHORTER}")
            target = target[count:]
            self._end += count
            self._read_ahead(self._file.fileno())

    def _read_ahead(self, descriptor: int) -> None:
        """Ask the system to read ahead, farther the longer a file is read sequentially.

        The kernel itself often reads only 128 KiB ahead, so that the disk idles while a processor sums.
        """
        wanted = self._end + min(self._end - self._start, AHEAD_BYTES)
        if wanted - self._asked >= AHEAD_BYTES // 4 and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, self._asked, wanted - self._asked, os.POSIX_FADV_WILLNEED)
            self._asked = wanted

    def _note(self, number: int) -> None:
        """Record a good block."""
        ranges = self.checked.setdefault(self._name, [])
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file, self._block_number = None, -1


def check_sizes(folder: Path, manifest: Manifest, rank: int = 0, world_size: int = 1) -> None:
    """Check that this rank's share of a manifest's files exists with the right sizes.

    Raises:
        DamagedError: for the first file that is missing or has another size.
    """
    for name, file in list(manifest.files.items())[rank::world_size]:
        with _open_file(folder, name, file):
            pass


def check_blocks(
    folder: Path,
    name: str,
    file: SavedFile,
    numbers: Iterable[int] | None = None,
    slices: Sequence[tuple[Slice, str]] = (),
) -> None:
    """Check a file's size and the given blocks, by default all; read nothing else.

    slices: the file's, each with its name for the message; see `Manifest.places`.

    Raises:
        DamagedError: if any differs or cannot be read.
    """
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with _open_file(folder, name, file) as opened:
        for number in file.blocks if numbers is None else numbers:
            start, end, crc32 = file.block(number)
            place, found = opened.seek(start), 0
            while place < end:
                count = opened.readinto(buffer[: end - place])
                if not count:
                    raise DamagedError(f"{name}: {_SHORTER}")
                place, found = place + count, zlib.crc32(buffer[:count], found)
            if found != crc32:
                inside = [what for piece, what in slices if piece.offset < end and start < piece.end]
                raise DamagedError(f"{name}: {_DIFFERS}" + (f" ({shorten(inside, 1)})" if inside else ""))


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
