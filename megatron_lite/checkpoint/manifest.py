"""manifest.json: a checkpoint's content, and where its files store each element of each parameter.

```
{"format": "megatron_lite_checkpoint", "version": 6, "save_id": "...", "iteration": 100,
 "world_size": 2, "config": {every option}, "state": {...},
 "files": {"rank_000.safetensors": {"size": 1500000, "block_bytes": 1048576, "crc32":
 "00c0ffee0badf00d"}, ...}, "parameters": {"embedding.word.weight": {"dtype": "float32", "shape":
 [256, 64],
     "weights": [["rank_000.safetensors", 712, 32768, 0, 8192],
                 ["rank_001.safetensors", 712, 32768, 8192, 8192]],
     "exp_avg": [...], "exp_avg_sq": [...]}, ...},
 "crc32": 456}
```

A file has a CRC-32 per block, so that reading some bytes verifies little else. A slice is [file,
byte offset in the file, bytes, first element of the flattened parameter, run]. Its elements are
consecutive if `run` is their number. Otherwise they are `run` consecutive elements in each of
several adjacent rows of the parameter (of `shape[0]`): the columns of a tensor-parallel rank.
Slices alone let any layout read any other. Each element is in one slice, even if several ranks have
it.

`dtype` is the dtype of the weights; everything else is float32. A trained parameter also has its
optimizer state (`exp_avg`, or `exp_avg` and `exp_avg_sq`) and, with averaging, `average`. A frozen
parameter has only weights, in float32, bfloat16 or float16.

`crc32` covers every byte before its own line, so `read` returns what `dump` wrote, unless the
manifest was forged. A forged one raises `DamagedError` or is accepted as is, but never leads to
bytes outside the files it lists.

Versions 3 to 5 are still read. Their files have a single checksum; slices have a checksum before
`run` in version 5, after `first` in version 4, none in version 3, and no `run` before version 5.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from megatron_lite.checkpoint.blocks import SavedFile, Slice
from megatron_lite.checkpoint.decoding import Count, PositiveCount, Rule, decode
from megatron_lite.checkpoint.names import MANIFEST_NAME, RANK_FILE, parse_json, reason
from megatron_lite.checkpoint.saved_state import RUN_STATE, check_options, with_current_names
from megatron_lite.config import JsonObject
from megatron_lite.config.dimensions import OF_A_SAMPLE, RankGrid, ranks_per_sample
from megatron_lite.config.system import DTYPES
from megatron_lite.errors import DamagedError
from megatron_lite.run.regular_files import A_LINK, read_bytes

FORMAT = "megatron_lite_checkpoint"
VERSION = 6
OLDEST_VERSION = 3
KINDS = ("weights", "exp_avg", "exp_avg_sq", "average")
MOMENTS = KINDS[1:3]
MAX_BYTES = 2**31  # largest manifest read into memory
_RUN_KEYS = ("save_id", "iteration", "world_size", "config", "state")
_CRC_LINE = re.compile(rb'"crc32": ([0-9]{1,10})\n\}\n')


@dataclass(frozen=True)
class SavedParameter:
    dtype: str  # of the weights, as torch names it
    shape: tuple[int, ...]
    slices: dict[str, list[Slice]]  # kind -> slices by first element, covering each element once

    def dtype_of(self, kind: str) -> str:
        """Return the dtype of the elements of one of KINDS."""
        return self.dtype if kind == "weights" else "float32"


@dataclass(frozen=True)
class Manifest:
    save_id: str
    iteration: int
    world_size: int
    config: JsonObject
    state: JsonObject
    files: dict[str, SavedFile]
    parameters: dict[str, SavedParameter]

    @property
    def grid(self) -> dict[str, int]:
        """Pipeline, data and tensor-parallel ranks of the run that saved the checkpoint; all 1
        after a conversion."""
        sizes = {row.option: self.config.get(row.option, row.unset) for row in OF_A_SAMPLE}
        asked = SimpleNamespace(**sizes)
        fits = self.world_size % ranks_per_sample(asked) == 0
        return RankGrid(self.world_size, asked if fits else None).shape

    def places(
        self, kinds: Callable[[SavedParameter], Iterable[str]] = lambda parameter: parameter.slices
    ) -> dict[str, list[tuple[Slice, str]]]:
        """Return each file's slices by offset, with names for messages. kinds: of a parameter."""
        found: dict[str, list[tuple[Slice, str]]] = {}
        for name, parameter in self.parameters.items():
            for kind in kinds(parameter):
                for piece in parameter.slices[kind]:
                    found.setdefault(piece.file, []).append((piece, f"{kind} of {name!r}"))
        return {
            file: sorted(slices, key=lambda item: item[0].offset) for file, slices in found.items()
        }

    def misfits(self, shapes: Mapping[str, tuple[int, ...]], partial: bool = False) -> list[str]:
        """List parameters whose name or shape differs from a model's. partial: ignore those missing
        in the model."""
        saved = self.parameters
        found = [f"{name} is not in the checkpoint" for name in shapes if name not in saved]
        for name, shape in shapes.items():
            if name in saved and saved[name].shape != tuple(shape):
                found.append(
                    f"{name} has shape {list(saved[name].shape)}, the model's has {list(shape)}"
                )
        return found + [
            f"{name} is not in the model" for name in saved if not partial and name not in shapes
        ]


def tensor_name(stage: int, frozen: bool, is_state: bool, kind: str, has_experts: bool) -> str:
    """Return a shard's name in a rank's file: stage_003.exp_avg, stage_003.frozen.weights,
    stage_003.state.weights, stage_003.experts.exp_avg."""
    part = "state." if is_state else "frozen." if frozen else ""
    part += "experts." if has_experts else ""
    return f"stage_{stage:03d}.{part}{kind}"


def file_metadata(save_id: str, iteration: int, rank: int) -> dict[str, str]:
    """Return the metadata for the header of a rank's file."""
    return {"format": FORMAT, "save_id": save_id, "iteration": str(iteration), "rank": str(rank)}


def dump(manifest: Manifest) -> str:
    """Return the text of manifest.json, with one parameter per line.

    Raises:
        TypeError, ValueError: if `config` or `state` is not JSON, or `read` would reject the
            result: a defect that must not surface only when the checkpoint is needed.
    """
    head = {"format": FORMAT, "version": VERSION} | {
        key: getattr(manifest, key) for key in _RUN_KEYS
    }
    files = {name: file._asdict() for name, file in manifest.files.items()}
    parameters = {
        name: {"dtype": parameter.dtype, "shape": parameter.shape, **parameter.slices}
        for name, parameter in manifest.parameters.items()
    }
    covered = "{\n" + "".join(
        f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items()
    )
    for key, entries in (("files", files), ("parameters", parameters)):
        rows = ",\n".join(
            f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()
        )
        covered += f"{json.dumps(key)}: {{\n{rows}\n}},\n"
    try:
        check_options(json.loads(json.dumps(manifest.config)))
        decode(RUN_STATE, json.loads(json.dumps(manifest.state)), "state")
        if len(covered) + 32 > MAX_BYTES:
            raise DamagedError(f"a manifest of {len(covered):,} bytes")
    except DamagedError as error:
        raise ValueError(f"this checkpoint could not be read again: {error}") from None
    return f'{covered}"crc32": {zlib.crc32(covered.encode())}\n}}\n'


def read(folder: Path, iteration: int | None = None) -> Manifest:
    """Read and check a folder's manifest, but not the files that it lists.

    iteration: the number in the folder's name. Such a folder must not be a symbolic link; its
    parents may be.

    Raises:
        DamagedError: if it is missing, damaged, or not for this iteration.
    """
    if iteration is not None and folder.is_symlink():
        raise DamagedError(A_LINK)
    try:
        manifest = parse(read_bytes(folder / MANIFEST_NAME, MAX_BYTES))
        if iteration not in (None, manifest.iteration):
            raise DamagedError(f"it is of iteration {manifest.iteration}")
        return manifest
    except OSError as error:
        problem = reason(error)
    except ValueError as error:
        problem = f"not readable ({error})"
    except DamagedError as error:
        problem = str(error)
    raise DamagedError(f"{MANIFEST_NAME}: {problem}")


_ITEMSIZES = {names.torch: names.itemsize for names in DTYPES.values()}
_DtypeName = Annotated[str, Rule(" or ".join(_ITEMSIZES), lambda value: value in _ITEMSIZES)]
_SliceRow = tuple[str, Count, PositiveCount, Count, PositiveCount]


_PARAMETER = {
    "dtype": _DtypeName,
    "shape": list[PositiveCount],
    **{kind if kind == "weights" else f"{kind}?": list[_SliceRow] for kind in KINDS},
}
_MANIFEST = {
    "format": str,
    "version": int,
    "save_id": str,
    "iteration": Count,
    "world_size": PositiveCount,
    "config": JsonObject,
    "state": RUN_STATE,
    "files": dict[str, SavedFile],
    "parameters": JsonObject,
    "crc32": int,
}


def parse(text: bytes) -> Manifest:
    """Verify a manifest's checksum, then decode it.

    Raises:
        DamagedError, ValueError: if it is damaged.
    """
    values = parse_json(text)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise DamagedError(f"not of the format {FORMAT}")
    version = decode(Count, values.get("version"), "version")
    if not OLDEST_VERSION <= version <= VERSION:
        raise DamagedError(
            f"written in format version {version}, this program reads versions {OLDEST_VERSION} to {VERSION}; use the "
            "version of the program that wrote it"
        )
    line = _CRC_LINE.search(text, max(0, len(text) - 32))
    if line is None or line.end() != len(text) or int(line[1]) != zlib.crc32(text[: line.start()]):
        raise DamagedError("its checksum does not match: it was damaged or edited")
    if version < VERSION:
        try:
            _upgrade(values, version)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError):
            raise DamagedError(f"not the content of version {version}") from None
    entry = decode(_MANIFEST, values)
    entry["config"] = with_current_names(entry["config"])
    check_options(entry["config"])
    if len(entry["files"]) != entry["world_size"]:
        raise DamagedError(f"names {len(entry['files'])} files for {entry['world_size']} ranks")
    for name, file in entry["files"].items():
        if RANK_FILE.fullmatch(name) is None:
            raise DamagedError(f"{ascii(name[:80])} is not a file name of this format")
        if len(file.crc32) != 8 * len(file.blocks):
            raise DamagedError(f"{name} does not have one checksum per block")
    parameters = {
        name: _parameter(name, item, entry["files"]) for name, item in entry["parameters"].items()
    }
    return Manifest(**{key: entry[key] for key in (*_RUN_KEYS, "files")}, parameters=parameters)


def _upgrade(values: JsonObject, version: int) -> None:
    """Convert an older manifest to the current form."""
    for file in values["files"].values():
        file |= {"block_bytes": file["size"], "crc32": f"{file['crc32']:08x}"}
    for parameter in values["parameters"].values():
        for kind in KINDS:
            itemsize = _ITEMSIZES[parameter["dtype"]] if kind == "weights" else 4
            for piece in parameter.get(kind, ()):
                run = piece[5] if version == 5 else piece[2] // itemsize
                if len(piece) != version + 1 or (version > 3 and not 0 <= piece[4] < 2**32):
                    raise ValueError
                piece[4:] = [run]


def _parameter(name: str, value: Any, files: Mapping[str, SavedFile]) -> SavedParameter:
    """Decode a parameter; check that its slices are within listed files and add up to its number of
    elements.

    Gaps between columns are found when reading them.
    """
    entry = decode(_PARAMETER, value, f"parameters.{ascii(name[:80])[1:-1]}")
    slices = {kind: [Slice(*row) for row in entry[kind]] for kind in KINDS if kind in entry}
    parameter = SavedParameter(entry["dtype"], tuple(entry["shape"]), slices)
    total, row = math.prod(parameter.shape), math.prod(parameter.shape[1:])
    for kind, pieces in slices.items():
        itemsize, covered = _ITEMSIZES[parameter.dtype_of(kind)], 0
        what = f"parameter {name[:200]!r}: the slices of {kind}"
        has_columns = any(piece.run * itemsize != piece.num_bytes for piece in pieces)
        for piece in pieces:
            numel, rest = divmod(piece.num_bytes, itemsize)
            if piece.file not in files or piece.end > files[piece.file].size:
                raise DamagedError(f"{what} lie outside the listed files")
            if rest or not (piece.run == numel or (piece.run < row and numel % piece.run == 0)):
                raise DamagedError(f"{what} have more or fewer bytes than their elements need")
            if not has_columns and piece.first != covered:
                raise DamagedError(f"{what} leave a gap or overlap at element {covered}")
            covered += numel
        if covered != total:
            raise DamagedError(f"{what} hold {covered} of {total} elements")
    return parameter
