"""Folders in remote storage through fsspec, which is imported only when one is opened.

Credentials come from where a store's library looks for them: the environment, its files, the
machine's role.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from megatron_lite.distributed.in_time import in_time
from megatron_lite.errors import UsageError, without_credentials
from megatron_lite.run.secrets import masked
from megatron_lite.run.silence import CONNECT_S, Line

logger = logging.getLogger("megatron_lite")
SILENCE_S = 60.0  # less would end a slow line, on which megabytes wait in routers
_SECRET_NAME = re.compile(
    r"(?i).*(secret|token|passw|credential|(access|api|private)_?key).*(?<!path|file)"
)
_AT_A_TIME = 4  # parts in flight, some of them stored twice
_PART_BYTES, _MOST_PARTS = 16 * 2**20, 10_000
_PIECE_BYTES = (
    2**18
)  # fits a processor's cache; a part in one object is copied from new memory to new memory
# Two of Google's attempts on a silent metadata server, which may last for half a minute.
_ACCOUNT_S = 7.0


def _options(scheme: str, line: Line, anonymous: bool) -> dict[str, Any]:
    """Return the options of a scheme's library: connections of `line`, and no limits of its own on
    a slow one."""
    if scheme in ("s3", "s3a"):  # s3fs itself tries five times
        config = {
            "connector_args": {"socket_factory": line.open_socket},
            "connect_timeout": CONNECT_S,
            "read_timeout": None,
            "retries": {"total_max_attempts": 1},
        }
        # Others change a store too, so no listing is cached.
        return {"use_listings_cache": False, "config_kwargs": config, "max_concurrency": _AT_A_TIME}
    if scheme in ("gs", "gcs"):
        token = _google_account(anonymous)
        return {"use_listings_cache": False, "token": token, "session_kwargs": line.session()}
    if scheme in ("http", "https"):
        return {"client_kwargs": line.session()}
    return {}


def _google_account(anonymous: bool) -> Any:
    """Return the credentials for gcsfs, which itself would search for a minute; "anon" without an
    account.

    Raises:
        LookupError: without an account, unless anonymous.
    """
    import google.auth

    scopes = ["https://www.googleapis.com/auth/devstorage.full_control"]
    try:
        return in_time(lambda: google.auth.default(scopes)[0], _ACCOUNT_S)
    except (google.auth.exceptions.DefaultCredentialsError, TimeoutError):
        if not anonymous and "STORAGE_EMULATOR_HOST" not in os.environ:
            raise LookupError(
                "no Google account; name a key file in GOOGLE_APPLICATION_CREDENTIALS"
            ) from None
        return "anon"


class Storage:
    """The store at an address; nothing is sent there before the first call. flag: for messages.

    Each call to S3, Google Cloud or a web server raises TimeoutError once no byte has moved for
    `limit_s`, see `Line`. anonymous: whether to go on without an account.

    Attributes:
        system, path: the fsspec file system, and the path there.

    Raises:
        UsageError: if a package is missing, none knows the address, or there is no account.
    """

    def __init__(
        self, address: str, flag: str, limit_s: float = SILENCE_S, anonymous: bool = True
    ) -> None:
        # it logs tracebacks of errors that it also raises
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        try:
            from fsspec.core import url_to_fs

            self.line = Line(limit_s)
            options = _options(address.partition("://")[0], self.line, anonymous)
            self.system, self.path = url_to_fs(address, **options)
            self._is_watched = bool(options)  # the library opens its connections by `line`
        except (ImportError, ValueError, TypeError) as error:
            fix = (
                "pip install '.[remote]'"
                if isinstance(error, ImportError)
                else "give s3://..., gs://... or a folder"
            )
            raise UsageError(f"--{flag}={address}: {failure(error)}; {fix}") from None
        except LookupError as error:
            raise UsageError(f"--{flag}={address}: {error}") from None

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system, and raise what it raises."""
        if not self._is_watched:
            return getattr(self.system, method)(*arguments, **options)
        return self.line.wait_for(getattr(self.system, f"_{method}")(*arguments, **options))

    def append(self, there: str, file: IO[bytes], told: Mapping[str, Any]) -> None:
        """Append the missing rest of a remote file to a local one. told: the store's entry for the
        remote file.

        A failure is retried as long as each attempt makes progress.
        """
        while True:
            begin = file.tell()
            try:
                self._append(there, file, told)
                return os.fsync(file.fileno())
            except Exception as error:
                if file.tell() <= begin:
                    raise
                logger.warning(
                    "%s: %s; the copy goes on at byte %s", there, failure(error), f"{file.tell():,}"
                )

    def _append(self, there: str, file: IO[bytes], told: Mapping[str, Any]) -> None:
        if "https" in self.system.protocol:
            return self.line.wait_for(self._stream(there, file))
        if not self.system.async_impl:
            with self.system.open(there, "rb") as source:
                source.seek(file.tell())
                return shutil.copyfileobj(source, file)
        # `get_file` of s3fs would set the file to its full size first.
        size = told["size"]
        ends = [min(begin + _PART_BYTES, size) for begin in range(file.tell(), size, _PART_BYTES)]
        begins = [file.tell(), *ends]
        works = (self._part(there, *span) for span in zip(begins, ends, strict=False))
        for end, pieces in zip(ends, self.line.in_turn(works, _AT_A_TIME), strict=True):
            file.writelines(pieces)
            os.fsync(file.fileno())
            if file.tell() != end:
                raise OSError(f"{there}: a part ended before its last byte")

    async def _part(self, there: str, begin: int, end: int) -> list[bytes]:
        """Return the pieces of a part of a file; less than all if the connection is cut."""
        if "s3" not in self.system.protocol:
            return [await self.system._cat_file(there, start=begin, end=end)]
        bucket, key, _ = self.system.split_path(there)
        span, pieces = f"bytes={begin}-{end - 1}", list[bytes]()
        answer = await self.system._call_s3("get_object", Bucket=bucket, Key=key, Range=span)
        async with answer["Body"] as body:
            try:
                while piece := await body.read(_PIECE_BYTES):
                    pieces.append(piece)
            except Exception:
                if not pieces:
                    raise
        return pieces

    async def _stream(self, there: str, file: IO[bytes]) -> None:
        """Append a web server's response; the server may not support ranges or know the size."""
        headers = {"Accept-Encoding": "identity"}
        if start := file.tell():
            headers["Range"] = f"bytes={start}-"
        session = await self.system.set_session()
        async with session.get(
            self.system.encode_url(there), headers=headers, raise_for_status=True
        ) as answer:
            if answer.status != 206:
                file.seek(0)
                file.truncate()
            async for piece in answer.content.iter_any():
                file.write(piece)


def _part_bytes(size: int) -> int:
    """Return the part size for a file; a store accepts 10,000 parts."""
    return max(_PART_BYTES, math.ceil(size / _MOST_PARTS))


def failure(error: BaseException) -> str:
    """Describe a store's error in one line without credentials."""
    reason = (
        (error.strerror if isinstance(error, OSError) else None)
        or str(error)
        or type(error).__name__
    )
    secrets = [value for name, value in os.environ.items() if _SECRET_NAME.fullmatch(name)]
    return masked(without_credentials(" ".join(reason.split())), secrets)[:300]


class RemoteFolder(Storage):
    """A folder in remote storage; names in it are relative. Methods raise whatever the store's
    library raises."""

    def overlaps(self, folder: Path) -> bool:
        """Return whether this is a local folder that equals, contains or is inside another one,
        also through links."""
        if "file" not in self.system.protocol:
            return False
        one, other = Path(self.path).resolve(), folder.resolve()
        lines = ((one, (other, *other.parents)), (other, (one, *one.parents)))
        return any(
            path.exists() and above.exists() and path.samefile(above)
            for path, line in lines
            for above in line
        )

    def at(self, name: str) -> str:
        """Return a name's path for the methods of `storage`."""
        return f"{self.path.rstrip('/')}/{name}"

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return bytes(self.call("cat_file", self.at(name)))
        return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file completely or not at all."""
        self._put(name, lambda there: self.call("pipe_file", there, data))

    def listing(self, folder: str) -> dict[str, dict[str, Any]]:
        """Return the store's entries for the files and folders in a folder, by name; {} without
        it."""
        with contextlib.suppress(FileNotFoundError):
            found = self.call("ls", self.at(folder), detail=True)
            return {info["name"].rstrip("/").rpartition("/")[2]: info for info in found}
        return {}

    def upload(self, path: Path, name: str, told: Mapping[str, Any]) -> int:
        """Upload a file and return the bytes sent: 0 if the store reports the same size and, as S3
        and GCS do, MD5.

        S3 compares what arrives with a checksum that is sent along. told: see `listing`; {} if it
        is not there.
        """
        md5 = str(told.get("ETag") or base64.b64decode(told.get("md5Hash", "")).hex()).strip('"')
        part_bytes = _part_bytes(size := path.stat().st_size)
        if told.get("size") == size and md5 and md5 == _md5(path, part_bytes, in_parts="-" in md5):
            return 0
        options = {"chunksize": part_bytes} if {"s3", "gs"} & set(self.system.protocol) else {}
        self._put(name, lambda there: self.call("put_file", str(path), there, **options))
        return size

    def download(self, name: str, path: Path) -> None:
        """Download a file."""
        there = self.at(name)
        with open(path, "wb") as file:
            self.append(there, file, self.call("info", there))

    def _put(self, name: str, put: Callable[[str], None]) -> None:
        there = self.at(name)
        # an object store: it has no folders, and an object is complete or absent
        if self.system.async_impl:
            return put(there)
        self.system.makedirs(there.rpartition("/")[0], exist_ok=True)
        put(f"{there}.part")
        self.system.mv(f"{there}.part", there)

    def move(self, folder: str, target: str, mark: str) -> None:
        """Move a folder's files; at each moment, one of the two has its mark, without which it does
        not count."""
        names = [name for name in self.listing(folder) if name != mark]
        for name in (*names, mark):
            self.copy(f"{folder}/{name}", f"{target}/{name}")
        self.delete(folder, f"{folder}/{mark}")

    def copy(self, name: str, target: str) -> None:
        """Copy a file inside the store, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._put(target, lambda there: self.call("cp_file", self.at(name), there))

    def delete(self, folder: str, mark: str) -> None:
        """Delete a folder, its mark first, without which it does not count."""
        with contextlib.suppress(FileNotFoundError):
            self.call("rm_file", self.at(mark))
        with contextlib.suppress(FileNotFoundError):
            self.call("rm", self.at(folder), recursive=True)


def _md5(path: Path, part_bytes: int, in_parts: bool) -> str:
    """Return a file's MD5. in_parts: as S3 computes it for a file sent in parts, from the parts'
    MD5s."""
    total, count = hashlib.md5(usedforsecurity=False), 0
    with open(path, "rb") as file:
        while part := file.read(part_bytes):
            total.update(hashlib.md5(part, usedforsecurity=False).digest() if in_parts else part)
            count += 1
    return total.hexdigest() + f"-{count}" * in_parts
