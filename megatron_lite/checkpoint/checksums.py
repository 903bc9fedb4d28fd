"""CRC-32 of a file and of its pieces: the checksum of the whole comes from those of the pieces, in any order.

A CRC is a remainder of polynomials over GF(2): appending n bytes multiplies it by x**(8 n). The arithmetic is that of
`crc32_combine` in zlib (https://github.com/madler/zlib), which Python does not offer.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable
from typing import NamedTuple

_POLYNOMIAL = 0xEDB88320  # reflected: the highest bit is x**0
_ONE = 1 << 31


class Piece(NamedTuple):
    """Consecutive bytes of a file, and their CRC-32."""

    start: int
    end: int
    crc32: int


def combine(first: int, second: int, num_bytes: int) -> int:
    """Return the CRC-32 of two texts, one after the other; `num_bytes`: of the second."""
    return _product(_power_of_x(8 * num_bytes), first) ^ second


def _product(left: int, right: int) -> int:
    """Multiply two polynomials modulo that of CRC-32."""
    result, bit = 0, _ONE
    while left:
        if left & bit:
            result ^= right
            left ^= bit
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
        bit >>= 1
    return result


@functools.lru_cache(4096)  # tensors have few sizes
def _power_of_x(exponent: int) -> int:
    """Return x**exponent modulo the polynomial of CRC-32."""
    result, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square, exponent = _product(square, square), exponent >> 1
    return result


class Checksums:
    """The pieces of some files that were read, joined where one begins at the end of the one before."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        self._open: dict[str, list[int]] = {}  # the newest piece of a file: start, end, CRC-32
        self._current: list[int] = []

    def begin(self, file: str, offset: int) -> None:
        """Continue with the bytes of a file from `offset` on."""
        if file not in self._open or self._open[file][1] != offset:
            self.cut(file)
            self._open[file] = [offset, offset, 0]
        self._current = self._open[file]

    def add(self, data: memoryview) -> None:
        """Count the next bytes."""
        self._current[2] = zlib.crc32(data, self._current[2])
        self._current[1] += len(data)

    def cut(self, file: str) -> None:
        """Let the next bytes of a file begin a piece."""
        start, end, crc = self._open.pop(file, (0, 0, 0))
        if end > start:
            self._pieces.setdefault(file, []).append(Piece(start, end, crc))

    def pieces(self) -> dict[str, list[Piece]]:
        """Return all pieces so far, by file."""
        for file in [*self._open]:
            self.cut(file)
        return self._pieces


class CutChecksums:
    """The pieces of a file that is written or read from its beginning, cut at some of its bytes.

    cuts: where pieces end, in any order; the last piece ends with the file.
    """

    def __init__(self, cuts: Iterable[int]) -> None:
        self._cuts = sorted(set(cuts), reverse=True)
        self._pieces: list[Piece] = []
        self._start = self._end = self._crc = 0

    def add(self, data: memoryview) -> None:
        """Count the next bytes."""
        while self._cuts and self._end + len(data) >= self._cuts[-1]:
            size = self._cuts.pop() - self._end
            self._count(data[:size])
            self._close()
            data = data[size:]
        self._count(data)

    def pieces(self) -> list[Piece]:
        """Return the pieces of the file in order."""
        self._close()
        return self._pieces

    def _count(self, data: memoryview) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._end += len(data)

    def _close(self) -> None:
        if self._end > self._start:
            self._pieces.append(Piece(self._start, self._end, self._crc))
        self._start, self._crc = self._end, 0


def missing(pieces: Iterable[Piece], size: int) -> list[tuple[int, int]]:
    """Return the ranges (start, end) of a file of `size` bytes that are in no piece."""
    ranges, covered = [], 0
    for start, end, _ in sorted(pieces):
        if start > covered:
            ranges.append((covered, start))
        covered = max(covered, end)
    return ranges + ([(covered, size)] if covered < size else [])


def joined(pieces: Iterable[Piece]) -> int | None:
    """Return the CRC-32 of a whole file from pieces that hold each byte once; None if they do not."""
    crc, covered = 0, 0
    for start, end, piece_crc in sorted(pieces):
        if start != covered:
            return None
        crc, covered = combine(crc, piece_crc, end - start), end
    return crc
