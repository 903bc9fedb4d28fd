"""Large files in S3, in parts, and each part in pieces that a processor's cache holds.

s3fs and aiohttp copy a part as a whole, up to four times and each time to new memory: half of a
transfer's CPU time.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO, Any

from megatron_lite.run.silence import Line

AT_A_TIME = 4  # parts in flight
PART_BYTES = 16 * 2**20
_PIECE_BYTES = 2**18


def parts(begin: int, end: int, part_bytes: int) -> Sequence[tuple[int, int]]:
    """Return begin and end of each part of the bytes from begin to end."""
    return [(one, min(one + part_bytes, end)) for one in range(begin, end, part_bytes)]


async def fetch(system: Any, there: str, begin: int, end: int) -> list[bytes]:
    """Return the pieces of a part of a remote file; less than all if the connection is cut."""
    bucket, key, _ = system.split_path(there)
    span, pieces = f"bytes={begin}-{end - 1}", list[bytes]()
    answer = await system._call_s3("get_object", Bucket=bucket, Key=key, Range=span)
    async with answer["Body"] as body:
        try:
            while piece := await body.read(_PIECE_BYTES):
                pieces.append(piece)
        except Exception:
            if not pieces:
                raise
    return pieces


def send(system: Any, line: Line, path: Path, there: str, part_bytes: int) -> None:
    """Upload a file in parts, with the checksum of each."""
    bucket, key, _ = system.split_path(there)
    place = {"Bucket": bucket, "Key": key}

    def call(method: str, **options: Any) -> Any:
        return line.wait_for(system._call_s3(method, **place, **options))

    place["UploadId"] = call("create_multipart_upload")["UploadId"]
    try:
        with open(path, "rb") as file:
            works = (
                system._call_s3("upload_part", PartNumber=one, Body=_Part(file, *part), **place)
                for one, part in enumerate(parts(0, path.stat().st_size, part_bytes), 1)
            )
            sent = list(line.in_turn(works, AT_A_TIME))
        done = [{"PartNumber": one, "ETag": part["ETag"]} for one, part in enumerate(sent, 1)]
        call("complete_multipart_upload", MultipartUpload={"Parts": done})
    except Exception as error:
        if not isinstance(error, TimeoutError):  # a silent store would not answer this, too
            call("abort_multipart_upload")
        raise


class _Part:
    """A part of a file as a request's body. For https botocore reads it, and sends the checksum
    behind it; else it reads only to sum, and aiohttp iterates."""

    def __init__(self, file: IO[bytes], begin: int, end: int) -> None:
        self._file = file
        self._begin, self._end = begin, end
        self._place = begin

    def __len__(self) -> int:
        # Asked for at the start of each attempt; the one before has stopped anywhere.
        self._place = self._begin
        return self._end - self._begin

    def tell(self) -> int:
        return self._place - self._begin

    def seek(self, place: int) -> None:
        self._place = self._begin + place

    def read(self, count: int) -> bytes:
        begin = self._place
        self._place = min(begin + count, self._end)
        return os.pread(self._file.fileno(), self._place - begin, begin)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for begin, end in parts(self._begin, self._end, _PIECE_BYTES):
            yield os.pread(self._file.fileno(), end - begin, begin)
