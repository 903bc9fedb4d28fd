"""Folders in remote storage through fsspec, which is imported only when one is opened.

Credentials come from where the library of a store looks for them: the environment, its files, the machine's role.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_lite.errors import UsageError, without_credentials
from megatron_lite.run.secrets import masked

# Others change a store too, so no listing is cached. s3fs itself tries five times.
_S3: Any = {"use_listings_cache": False, "config_kwargs": {"connect_timeout": 10, "retries": {"total_max_attempts": 1}}}
_OPTIONS = MappingProxyType({"s3": _S3, "s3a": _S3, "gs": {"use_listings_cache": False}})
_SECRET_NAME = re.compile(r"(?i).*(secret|token|passw|credential|(access|api|private)_?key).*(?<!path|file)")
_PART_BYTES = 50 * 2**20  # s3fs sends larger files in such parts


def open_storage(address: str, flag: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address and the path there; nothing is sent yet. flag: for messages.

    Raises:
        UsageError: if a package is missing, or none knows the address.
    """
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs tracebacks of what it also raises
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(address, **_OPTIONS.get(address.partition("://")[0], {}))
    except (ImportError, ValueError, TypeError) as error:
        fix = "pip install '.[remote]'" if isinstance(error, ImportError) else "give s3://..., gs://... or a folder"
        raise UsageError(f"--{flag}={address}: {failure(error)}; {fix}") from None


def failure(error: BaseException) -> str:
    """Describe any error of a store in one line without credentials."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    secrets = [value for name, value in os.environ.items() if _SECRET_NAME.fullmatch(name)]
    return masked(without_credentials(" ".join(reason.split())), secrets)[:300]


class RemoteFolder:
    """A folder in remote storage; names in it are relative. Methods raise whatever the library of the store raises."""

    def __init__(self, address: str, flag: str) -> None:
        self.storage, self._path = open_storage(address, flag)

    def overlaps(self, folder: Path) -> bool:
        """Return whether this is a local folder that is another one, contains it or lies in it, also through links."""
        if "file" not in self.storage.protocol:
            return False
        one, other = Path(self._path).resolve(), folder.resolve()
        lines = ((one, (other, *other.parents)), (other, (one, *one.parents)))
        return any(path.exists() and above.exists() and path.samefile(above) for path, line in lines for above in line)

    def at(self, name: str) -> str:
        """Return the path of a name for the methods of `storage`."""
        return f"{self._path.rstrip('/')}/{name}"

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return bytes(self.storage.cat_file(self.at(name)))
        return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all."""
        self._put(name, lambda there: self.storage.pipe_file(there, data))

    def listing(self, folder: str) -> dict[str, dict[str, Any]]:
        """Return what the store tells of each file and folder in a folder, by name; {} if there is none."""
        with contextlib.suppress(FileNotFoundError):
            found = self.storage.ls(self.at(folder), detail=True)
            return {info["name"].rstrip("/").rpartition("/")[2]: info for info in found}
        return {}

    def upload(self, path: Path, name: str, told: Mapping[str, Any]) -> int:
        """Copy a file there and return the bytes sent: 0 if the store has told its size and, as S3 and GCS do, its MD5.

        S3 compares what arrives with a checksum that is sent along. told: see `listing`; {} if it is not there.
        """
        md5 = str(told.get("ETag") or base64.b64decode(told.get("md5Hash", "")).hex()).strip('"')
        if told.get("size") == path.stat().st_size and md5 and md5 == _md5(path, in_parts="-" in md5):
            return 0
        self._put(name, lambda there: self.storage.put_file(str(path), there))
        return path.stat().st_size

    def _put(self, name: str, put: Callable[[str], None]) -> None:
        there = self.at(name)
        if self.storage.async_impl:  # an object store: it has no folders, and an object is whole or absent
            return put(there)
        self.storage.makedirs(there.rpartition("/")[0], exist_ok=True)
        put(f"{there}.part")
        self.storage.mv(f"{there}.part", there)

    def move(self, folder: str, target: str, mark: str) -> None:
        """Move the files of a folder; at each moment, one of both has its mark, without which it does not count."""
        names = [name for name in self.listing(folder) if name != mark]
        for name in (*names, mark):
            self.copy(f"{folder}/{name}", f"{target}/{name}")
        self.delete(folder, f"{folder}/{mark}")

    def copy(self, name: str, target: str) -> None:
        """Copy a file inside the store, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            self._put(target, lambda there: self.storage.cp_file(self.at(name), there))

    def delete(self, folder: str, mark: str) -> None:
        """Delete a folder, but first the file without which it does not count."""
        with contextlib.suppress(FileNotFoundError):
            self.storage.rm_file(self.at(mark))
        with contextlib.suppress(FileNotFoundError):
            self.storage.rm(self.at(folder), recursive=True)


def _md5(path: Path, in_parts: bool) -> str:
    """Return the MD5 of a file. in_parts: as S3 does of a file sent in parts, that of the parts' MD5s."""
    total, count = hashlib.md5(usedforsecurity=False), 0
    with open(path, "rb") as file:
        while part := file.read(_PART_BYTES):
            total.update(hashlib.md5(part, usedforsecurity=False).digest() if in_parts else part)
            count += 1
    return total.hexdigest() + f"-{count}" * in_parts
