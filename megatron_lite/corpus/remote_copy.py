"""Copy data and models in remote storage into a cache, and reuse them while their source is
unchanged."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_lite.config.structured_values import storage_address
from megatron_lite.corpus.inputs import expand_braces, inside
from megatron_lite.corpus.prepare import LOCK, held
from megatron_lite.corpus.prepared import files_beside
from megatron_lite.data.tokenizing import read_object
from megatron_lite.errors import DataError, RunError, UsageError
from megatron_lite.monitor.logging import get_logger
from megatron_lite.run.durable_files import replace_file
from megatron_lite.run.remote_storage import Storage, failure

RECORD = "copied.json"  # in a copy's folder: the store's entry for each complete file
# In the record of a copy from the hub, where no file's name begins so: the address, the path with
# its commit, and a mark that all files are there.
ADDRESS, PINNED = "/address", "/pinned"
DONE = "/done"
# The same weights in formats that no run reads, beside safetensors.
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".ot", ".onnx", ".onnx_data", ".gguf")
PAGES = (".html", ".htm")
WEB_FOLDER = "of a folder in the web give files, {one,two}.txt, or a pattern, *.txt, if the server lists them"


def cache_of(chosen: str | None, experiment_dir: Path | str | None) -> str | None:
    """Return the folder for copies and prepared text: --dataset_cache, or one in the experiment
    directory, if any."""
    return chosen or (
        str(Path(experiment_dir, "dataset_cache")) if experiment_dir is not None else None
    )


def local_copy(
    address: str, flag: str, cache: str | None, pinned: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the path of a copy of an address: a file, a folder, a pattern's files, or a prefix's
    pair and its companions.

    A local path is returned, without `file://`. An interrupted copy continues at the byte where it
    stopped. pinned: see `pin_of`; the run's commits, whatever the cache keeps.

    Raises:
        UsageError: for an address without a place (cache), or without the store's package.
        DataError: if nothing is there, it cannot be read, or a name in the store leads out of the
            copy.
        StorageError: if the cache cannot be written.
    """
    address = re.sub("^(file|local)://", "", address)
    if "://" not in address:
        return address
    storage_address(address, flag)
    if cache is None:
        raise UsageError(
            f"--{flag}={address}: there is no place for a copy; give --dataset_cache or --experiment_dir"
        )
    get_logger().info("asking for %s", address)
    storage = Storage(address, flag)
    folder, kept = _folder(cache, address), pinned.get(address)
    if kept is not None and read_object(folder / RECORD).get(PINNED) != kept:
        folder = _folder(cache, f"hf://{kept}")  # the commit of another run may be in the other
    try:
        with held(
            folder,
            lambda: get_logger().info("waiting for another process, which copies %s", address),
        ):
            is_hub = address.startswith("hf://")
            there = _pinned(storage, folder, address, kept) if is_hub else storage.path
            pattern = re.search(r"[*?\[{]", there)
            begin = there[: pattern.start()] if pattern else there.rstrip("/")
            base, _, name = begin.rpartition("/")
            copy = folder if pattern else folder / name
            if is_hub and _is_complete(folder):
                return str(copy)
            found = (
                item for full in expand_braces(there) for item in _found(storage, full).items()
            )
            files = {
                path.removeprefix(f"{base}/"): told
                for path, told in found
                if told["type"] == "file"
            }
            if not files:
                fact = "there is no such file or folder, and no pair with this prefix"
                raise DataError(f"--{flag}={address}: {fact}; {WEB_FOLDER}")
            if is_hub and any(name.endswith(".safetensors") for name in files):
                files = {n: told for n, told in files.items() if not n.endswith(OTHER_WEIGHTS)}
            num_bytes = _copy(storage, base, files, folder)
            if is_hub:
                _keep(folder, read_object(folder / RECORD) | {DONE: True})
    except RunError:
        raise
    except Exception as error:
        began = "" if kept is None else f"; this run began with hf://{kept}"
        raise DataError(f"--{flag}={address}: {failure(error)}{began}") from None
    get_logger().info(
        "copied %s to %s: %.1f MB of %d files", address, folder, num_bytes / 1e6, len(files)
    )
    return str(copy)


def pin_of(copy: str) -> dict[str, str]:
    """Return the address of a copy from the hub with its path there, which names the commit; {} of
    anything else."""
    folders = Path(copy).parent, Path(copy)  # the second of a pattern
    records = [read_object(folder / RECORD) for folder in folders]
    return next(({one[ADDRESS]: one[PINNED]} for one in records if ADDRESS in one), {})


def _folder(cache: str, address: str) -> Path:
    return Path(cache, hashlib.blake2b(address.encode(), digest_size=8).hexdigest())


def _pinned(storage: Storage, folder: Path, address: str, kept: str | None) -> str:
    """Return a path on the Hugging Face hub with the commit of its first copy, so that later starts
    read the same files, whatever was pushed since. kept: by the run."""
    record = read_object(folder / RECORD)
    if (pinned := record.get(PINNED, kept)) is None:
        from huggingface_hub import HfApi

        place = storage.system.resolve_path(storage.path)
        api = HfApi(storage.system.endpoint, storage.system.token)
        found = api.repo_info(place.repo_id, repo_type=place.repo_type, revision=place.revision)
        kind = "" if place.repo_type == "model" else f"{place.repo_type}s/"
        pinned = f"{kind}{place.repo_id}@{found.sha}/{place.path_in_repo}".rstrip("/")
    if ADDRESS not in record:
        _keep(folder, record | {ADDRESS: address, PINNED: pinned})
    get_logger().info("hf://%s is the commit that this cache keeps", pinned)
    return str(pinned)


def hub_name(copy: Path) -> tuple[str, str] | None:
    """Return the name and commit on the Hugging Face hub of a model that is copied to this folder;
    None: it is no such copy."""
    pinned = read_object(copy.parent / RECORD).get(PINNED, "")
    name, _, commit = pinned.partition("@")
    is_whole = "/" not in commit and pinned.endswith(f"/{copy.name}")
    return (name, commit) if is_whole else None


def _is_complete(folder: Path) -> bool:
    """Return whether a copy from the hub has every file, so that it needs no network."""
    record = read_object(folder / RECORD)
    files = {folder / name: told for name, told in record.items() if not name.startswith("/")}
    return DONE in record and all(
        path.is_file() and path.stat().st_size == told[0] for path, told in files.items()
    )


def _keep(folder: Path, record: Mapping[str, object]) -> None:
    replace_file(folder / RECORD, json.dumps(record).encode())


def _found(storage: Storage, there: str) -> dict[str, Mapping[str, Any]]:
    """Return the store's entries for an address's files, with one request for many."""
    if glob.has_magic(there):
        return dict(storage.call("glob", there, detail=True))
    if storage.call("exists", f"{there}.idx"):
        beside = [path for path in files_beside(there) if storage.call("exists", path)]
        return {
            path: storage.call("info", path) for path in (f"{there}.idx", f"{there}.bin", *beside)
        }
    if storage.call("isfile", there):
        return {there: storage.call("info", there)}
    return dict(storage.call("find", there, detail=True))


def _copy(storage: Storage, base: str, files: Mapping[str, Mapping[str, Any]], folder: Path) -> int:
    """Bring the folder up to date with its source; return the bytes copied. files: the store's
    entries."""
    record, num_bytes = read_object(folder / RECORD), 0
    for name, told in files.items():
        path = inside(folder, folder / name)
        there = f"{base}/{name}"
        part = f"{name}.part"
        if name in (RECORD, LOCK):
            raise DataError(
                f"{there}: a copy has a file of its own with this name; rename it there"
            )
        if told.get("size") is None:  # a page that lists files knows no sizes
            told = storage.call("info", there)
        if told.get("mimetype") == "text/html" and not name.endswith(PAGES):
            raise DataError(f"{there}: the server sends a page, not a file; {WEB_FOLDER}")
        if record.get(name) == [
            path.stat().st_size if path.is_file() else None,
            version := _version(told),
        ]:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        goes_on, record[part] = record.get(part) == version, version
        _keep(folder, record)
        with open(folder / part, "ab" if goes_on else "wb") as file:
            storage.append(there, file, told)
            size = file.tell()
        if _version(storage.call("info", there)) != version or told.get("size") not in (None, size):
            (folder / part).unlink()
            raise OSError(f"{name} changed while it was copied, or only {size:,} bytes arrived")
        os.replace(folder / part, path)
        record[name], num_bytes = [size, record.pop(part)], num_bytes + size
        _keep(folder, record)
    return num_bytes


def _version(told: Mapping[str, Any]) -> str:
    """Return a file's version in a store: the first fact available, because listings round times
    differently."""
    keys = ("ETag", "md5Hash", "LastModified", "Last-Modified", "mtime")
    version = next((told[key] for key in keys if told.get(key)), "")
    return f"{told.get('size')} {version}"
