"""Data and models in remote storage: copied into a cache, and found there while they are unchanged at their source."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.config.structured_values import storage_address
from megatron_lite.corpus.inputs import expand_braces, inside
from megatron_lite.corpus.prepare import LOCK, held
from megatron_lite.corpus.prepared import files_beside
from megatron_lite.data.tokenizing import read_object
from megatron_lite.errors import DataError, RunError, UsageError
from megatron_lite.monitor.logging import get_logger
from megatron_lite.run.durable_files import replace_file
from megatron_lite.run.remote_storage import failure, open_storage

RECORD = "copied.json"  # in a copy's folder: what the store told of each whole file
PAGES = (".html", ".htm")
WEB_FOLDER = "of a folder in the web give files, {one,two}.txt, or a pattern, *.txt, if the server lists them"


def cache_of(chosen: str | None, experiment_dir: Path | str | None) -> str | None:
    """Return the folder of copies and of prepared text: --dataset_cache, or one in the experiment directory, if any."""
    return chosen or (str(Path(experiment_dir, "dataset_cache")) if experiment_dir is not None else None)


def local_copy(address: str, flag: str, cache: str | None) -> str:
    """Return the path of a copy of what an address names: a file, a folder, a pattern's files, or a prefix's pair
    with what is beside it.

    A local path is returned, without `file://`. A copy that was cut goes on with the files that are missing.

    Raises:
        UsageError: for an address without a place (cache), or without the package of the store.
        DataError: if nothing is there, it cannot be read, or a name in the store leads out of the copy.
        StorageError: if the cache cannot be written.
    """
    address = re.sub("^(file|local)://", "", address)
    if "://" not in address:
        return address
    storage_address(address, flag)
    if cache is None:
        raise UsageError(f"--{flag}={address}: there is no place for a copy; give --dataset_cache or --experiment_dir")
    storage, there = open_storage(address, flag)
    folder = Path(cache, hashlib.blake2b(address.encode(), digest_size=8).hexdigest())
    pattern = re.search(r"[*?\[{]", there)
    base, _, name = (there[: pattern.start()] if pattern else there.rstrip("/")).rpartition("/")
    try:
        with held(folder, lambda: get_logger().info("waiting for another process, which copies %s", address)):
            found = (item for full in expand_braces(there) for item in _found(storage, full).items())
            files = {path.removeprefix(f"{base}/"): told for path, told in found if told["type"] == "file"}
            if not files:
                fact = "there is no such file or folder, and no pair with this prefix"
                raise DataError(f"--{flag}={address}: {fact}; {WEB_FOLDER}")
            num_bytes = _copy(storage, base, files, folder)
    except RunError:
        raise
    except Exception as error:
        raise DataError(f"--{flag}={address}: {failure(error)}") from None
    get_logger().info("copied %s to %s: %.1f MB of %d files", address, folder, num_bytes / 1e6, len(files))
    return str(folder if pattern else folder / name)


def _found(storage: Any, there: str) -> dict[str, Mapping[str, Any]]:
    """Return what the store tells of the files of an address, of many with one question."""
    if glob.has_magic(there):
        return dict(storage.glob(there, detail=True))
    if storage.exists(f"{there}.idx"):
        beside = filter(storage.exists, files_beside(there))
        return {path: storage.info(path) for path in (f"{there}.idx", f"{there}.bin", *beside)}
    return {there: storage.info(there)} if storage.isfile(there) else dict(storage.find(there, detail=True))


def _copy(storage: Any, base: str, files: Mapping[str, Mapping[str, Any]], folder: Path) -> int:
    """Bring the folder up to date with its source; return the bytes copied. files: what the store tells of each."""
    record, num_bytes = read_object(folder / RECORD), 0
    for name, told in files.items():
        path, there, part = inside(folder, folder / name), f"{base}/{name}", folder / f"{name}.part"
        if name in (RECORD, LOCK):
            raise DataError(f"{there}: a copy has a file of its own with this name; rename it there")
        told = storage.info(there) if told.get("size") is None else told  # a page that lists files knows no sizes
        if told.get("mimetype") == "text/html" and not name.endswith(PAGES):
            raise DataError(f"{there}: the server sends a page, not a file; {WEB_FOLDER}")
        if record.get(name) == [path.stat().st_size if path.is_file() else None, _version(told)]:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.get_file(there, str(part))
        size = part.stat().st_size
        if _version(storage.info(there)) != _version(told) or told.get("size") not in (None, size):
            raise OSError(f"{name} changed while it was copied, or only {size:,} bytes arrived")
        os.replace(part, path)
        record[name], num_bytes = [size, _version(told)], num_bytes + size
        replace_file(folder / RECORD, json.dumps(record).encode())
    return num_bytes


def _version(told: Mapping[str, Any]) -> str:
    """Return what a store changes with a file: of several facts the first, as listings round times differently."""
    keys = ("ETag", "md5Hash", "LastModified", "Last-Modified", "mtime")
    version = next((told[key] for key in keys if told.get(key)), "")
    return f"{told.get('size')} {version}"
