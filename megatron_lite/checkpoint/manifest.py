"""manifest.json: what a checkpoint holds, and where each element of each parameter lies in its files.

```
{"format": "megatron_lite_checkpoint", "version": 3, "save_id": "...", "iteration": 100, "world_size": 2,
 "config": {every option}, "state": {...},
 "files": {"rank_000.safetensors": {"size": 4096, "crc32": 123}, ...},
 "parameters": {"embedding.word.weight": {"dtype": "float32", "shape": [256, 64],
     "weights": [["rank_000.safetensors", 712, 32768, 0], ["rank_001.safetensors", 712, 32768, 8192]],
     "exp_avg": [...], "exp_avg_sq": [...]}, ...},
 "crc32": 456}
```

A slice is [file, byte offset in the file, bytes, first element of the flattened parameter]. Any layout reads any other
from this alone. `dtype` is that of the weights; everything else is float32. Beside its weights a parameter has what its
optimizer keeps of it, `exp_avg` or `exp_avg` and `exp_avg_sq`, and `average` if its weights were averaged. A parameter
that was frozen has none of them, and only its weights may be of another dtype: bfloat16 or float16. Version 2 knew no
averages, and both moments or none (then as empty lists); version 1 knew no frozen parameters.

`crc32` covers every byte before its own line. A manifest is untrusted input: `read` accepts exactly what `dump` writes,
or wrote in an older version, and raises `DamagedError` for everything else.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_lite.checkpoint.files import CHUNK_BYTES, WrittenFile, open_regular
from megatron_lite.checkpoint.names import MANIFEST_NAME, without_repeated
from megatron_lite.errors import DamagedError

if TYPE_CHECKING:
    from megatron_lite.zero.flat_shard import FlatShard

FORMAT = "megatron_lite_checkpoint"
VERSION = 3
READABLE_VERSIONS = (1, 2, 3)
KINDS = ("weights", "exp_avg", "exp_avg_sq", "average")
MOMENTS = KINDS[1:3]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RANK_FILE = re.compile(r"rank_[0-9]{3,7}\.safetensors")

_MAX_MANIFEST_BYTES = 2**29
_MAX_COUNT = 2**62
_KEYS = ("format", "version", "save_id", "iteration", "world_size", "config", "state", "files", "parameters", "crc32")
_CRC_LINE = re.compile(rb'"crc32": ([0-9]{1,10})\n\}\n')


class Slice(NamedTuple):
    """Elements of a parameter that lie together: `num_bytes` at byte `offset` of `file`, from element `first` on."""

    file: str
    offset: int
    num_bytes: int
    first: int

    def end(self, dtype: torch.dtype) -> int:
        """One past the last element, of elements of this dtype."""
        return self.first + self.num_bytes // dtype.itemsize


class SavedFile(NamedTuple):
    size: int  # bytes
    crc32: int


@dataclass(frozen=True)
class SavedParameter:
    dtype: torch.dtype  # of the weights
    shape: tuple[int, ...]
    slices: dict[str, list[Slice]]  # of those of KINDS that it has: in element order, without gaps

    def dtype_of(self, kind: str) -> torch.dtype:
        """Of the elements of one of KINDS."""
        return self.dtype if kind == "weights" else torch.float32


@dataclass(frozen=True)
class Manifest:
    save_id: str
    iteration: int
    world_size: int
    config: dict[str, Any]
    state: dict[str, Any]
    files: dict[str, SavedFile]
    parameters: dict[str, SavedParameter]


def rank_file(rank: int) -> str:
    return f"rank_{rank:03d}.safetensors"


def dtype_name(dtype: torch.dtype) -> str:
    """One of the names of DTYPES."""
    return str(dtype).removeprefix("torch.")


def tensor_name(stage: int, frozen: bool, kind: str) -> str:
    """What a shard is called in a rank's file: stage_003.exp_avg, stage_003.frozen.weights."""
    return f"stage_{stage:03d}.{'frozen.' if frozen else ''}{kind}"


def locate_parameters(parts: Sequence[FlatShard], files: Sequence[WrittenFile]) -> dict[str, SavedParameter]:
    """Where everything lies, for rank files that hold the shards of each part one after the other, as `kinds` says."""
    parameters: dict[str, SavedParameter] = {}
    shard_start = 0  # bytes from data_start, the same in every rank's file
    for part in parts:
        layout, kinds = part.layout, part.kinds()
        for slot in layout.slots:
            slices: dict[str, list[Slice]] = {kind: [] for kind in kinds if part.has(kind, slot.spec)}
            parameters[slot.spec.name] = SavedParameter(kinds["weights"], tuple(slot.spec.shape), slices)
        for kind, dtype in kinds.items():
            size = dtype.itemsize
            for rank, file in enumerate(files):
                for slot, start, end in layout.pieces(rank):
                    if not part.has(kind, slot.spec):
                        continue
                    in_shard = slot.offset + start - rank * layout.shard_numel
                    offset = file.data_start + shard_start + in_shard * size
                    piece = Slice(rank_file(rank), offset, (end - start) * size, start)
                    parameters[slot.spec.name].slices[kind].append(piece)
            shard_start += part.numel(kind) * size
    return parameters


def dump(manifest: Manifest) -> str:
    """The text of manifest.json, one parameter a line.

    Raises:
        TypeError, ValueError: if `config` or `state` is not JSON.
    """
    head = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": manifest.save_id,
        "iteration": manifest.iteration,
        "world_size": manifest.world_size,
        "config": manifest.config,
        "state": manifest.state,
    }
    files = {name: file._asdict() for name, file in manifest.files.items()}
    parameters = {
        name: {"dtype": dtype_name(parameter.dtype), "shape": parameter.shape, **parameter.slices}
        for name, parameter in manifest.parameters.items()
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items()]
    for key, entries in (("files", files), ("parameters", parameters)):
        rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
        lines.append(f"{json.dumps(key)}: {{\n{rows}\n}},\n")
    covered = "{\n" + "".join(lines)
    return f'{covered}"crc32": {zlib.crc32(covered.encode())}\n}}\n'


def read(folder: Path) -> Manifest:
    """Read and check a folder's manifest, but none of the files it names.

    Raises:
        DamagedError: if it is missing or not exactly what this program writes.
    """
    try:
        text = _read_bytes(folder / MANIFEST_NAME)
        values = json.loads(text, object_pairs_hook=without_repeated)
    except OSError as error:
        raise DamagedError(f"{MANIFEST_NAME}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # of UTF-8 and JSON
        raise DamagedError(f"{MANIFEST_NAME}: not readable ({str(error)[:100]})") from None
    try:
        _require(isinstance(values, dict) and values.get("format") == FORMAT, f"not of the format {FORMAT}")
        version = values.get("version")
        _require(_is_count(version), "no version")
        readable = f"{', '.join(map(str, READABLE_VERSIONS[:-1]))} and {READABLE_VERSIONS[-1]}"
        _require(version in READABLE_VERSIONS, f"written by format {version}, this program reads {readable}")
        line = _CRC_LINE.search(text, max(0, len(text) - 32))
        found = line is not None and line.end() == len(text) and int(line[1]) == zlib.crc32(text[: line.start()])
        _require(found, "its checksum does not match: it was damaged or edited")
        _require(tuple(values) == _KEYS, "not the keys of this format")
        return _manifest(values)
    except DamagedError as error:
        raise DamagedError(f"{MANIFEST_NAME}: {error}") from None


def _read_bytes(path: Path) -> bytes:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_MANIFEST_BYTES:
            raise ValueError(f"{size:,} bytes, at most {_MAX_MANIFEST_BYTES:,} are read")
        return file.readall()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise DamagedError(message)


def _is_count(value: Any, minimum: int = 0) -> bool:
    return type(value) is int and minimum <= value <= _MAX_COUNT  # bool is an int, but no count


def _manifest(values: dict[str, Any]) -> Manifest:
    """Check everything below the top level."""
    save_id, iteration, world_size = values["save_id"], values["iteration"], values["world_size"]
    _require(isinstance(save_id, str) and re.fullmatch(r"[0-9a-f]{16}", save_id) is not None, "save_id is malformed")
    _require(_is_count(iteration), "iteration is not a count")
    _require(_is_count(world_size, 1), "world_size is not a count")
    for key in ("config", "state", "files", "parameters"):
        _require(isinstance(values[key], dict), f"{key} is not an object")
    raw_files = values["files"]
    _require(len(raw_files) == world_size, f"names {len(raw_files)} files for {world_size} ranks")
    files = {}
    for name, entry in raw_files.items():
        _require(RANK_FILE.fullmatch(name) is not None, f"{name[:80]!r} is not a file name of this format")
        _require(isinstance(entry, dict) and tuple(entry) == SavedFile._fields, f"the entry of {name} is malformed")
        file = SavedFile(**entry)
        _require(_is_count(file.size) and _is_count(file.crc32), f"the entry of {name} is malformed")
        files[name] = file
    parameters = {}
    for name, entry in values["parameters"].items():
        try:
            parameters[name] = _parameter(entry, files, values["version"])
        except DamagedError as error:
            raise DamagedError(f"parameter {name[:200]!r}: {error}") from None
    return Manifest(save_id, iteration, world_size, values["config"], values["state"], files, parameters)


def _parameter(entry: Any, files: dict[str, SavedFile], version: int) -> SavedParameter:
    _require(isinstance(entry, dict), "its keys are wrong")
    kinds = ("weights", *(kind for kind in KINDS[1:] if kind in entry)) if version > 2 else ("weights", *MOMENTS)
    _require(tuple(entry) == ("dtype", "shape", *kinds), "its keys are wrong")
    dtypes = tuple(DTYPES) if version > 1 else ("float32",)
    _require(entry["dtype"] in dtypes, f"its dtype is not {' or '.join(dtypes)}")
    shape = entry["shape"]
    _require(isinstance(shape, list) and len(shape) <= 8 and all(_is_count(n, 1) for n in shape), "its shape is wrong")
    parameter = SavedParameter(DTYPES[entry["dtype"]], tuple(shape), {})
    for kind in kinds:
        _require(isinstance(entry[kind], list), f"{kind} is not a list")
        if version == 2 and kind in MOMENTS and not entry[kind]:
            continue
        pieces = [_slice(item, files, parameter.dtype_of(kind)) for item in entry[kind]]
        _check_coverage(kind, pieces, math.prod(shape), parameter.dtype_of(kind))
        parameter.slices[kind] = pieces
    beside = [kind for kind in parameter.slices if kind != "weights"]
    first, second = (kind in beside for kind in MOMENTS)
    _require(first == second or (first and version > 2), "one of its moments is missing")
    _require(parameter.dtype == torch.float32 or not beside, f"{' and '.join(beside)} beside {entry['dtype']} weights")
    return parameter


def _check_coverage(kind: str, pieces: list[Slice], numel: int, dtype: torch.dtype) -> None:
    """Each element once, in order."""
    covered = 0
    for piece in pieces:
        _require(piece.first == covered, f"the slices of {kind} leave a gap or overlap at element {covered}")
        covered = piece.end(dtype)
    _require(covered == numel, f"the slices of {kind} hold {covered} of {numel} elements")


def _slice(item: Any, files: dict[str, SavedFile], dtype: torch.dtype) -> Slice:
    _require(isinstance(item, list) and len(item) == len(Slice._fields), "a slice is malformed")
    piece = Slice(*item)
    _require(isinstance(piece.file, str) and piece.file in files, "a slice names a file that is not listed")
    _require(_is_count(piece.offset) and _is_count(piece.first), "a slice is malformed")
    _require(_is_count(piece.num_bytes, 1) and piece.num_bytes % dtype.itemsize == 0, "a slice is malformed")
    _require(piece.offset + piece.num_bytes <= files[piece.file].size, f"a slice lies beyond the end of {piece.file}")
    return piece


def check_file(folder: Path, name: str, manifest: Manifest) -> None:
    """Check size and CRC-32 of one of the manifest's files, reading all of it.

    Raises:
        DamagedError: if either differs or the file cannot be read.
    """
    expected = manifest.files[name]
    crc = 0
    try:
        with open_regular(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            _require(size == expected.size, f"{name}: {size:,} bytes, the manifest says {expected.size:,}")
            buffer = memoryview(bytearray(min(CHUNK_BYTES, max(size, 1))))
            while count := file.readinto(buffer):
                crc = zlib.crc32(buffer[:count], crc)
            if crc != expected.crc32:
                is_other = _save_id(file.fileno()) not in (None, manifest.save_id)
                reason = "it is of another save" if is_other else "its checksum does not match"
                raise DamagedError(f"{name}: {reason}")
    except OSError as error:
        raise DamagedError(f"{name}: {error.strerror or error}") from None


def _save_id(descriptor: int) -> str | None:
    """The save that a safetensors file says it belongs to, if its header can be read."""
    try:
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        header = json.loads(os.pread(descriptor, min(length, 2**23), 8))
        save_id = header["__metadata__"]["save_id"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return save_id if isinstance(save_id, str) else None
