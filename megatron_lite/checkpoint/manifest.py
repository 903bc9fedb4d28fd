"""manifest.json: the content of a checkpoint, and the place of every element of every parameter in its files.

```
{"format": "megatron_lite_checkpoint", "version": 5, "save_id": "...", "iteration": 100, "world_size": 2,
 "config": {every option}, "state": {...},
 "files": {"rank_000.safetensors": {"size": 4096, "crc32": 123}, ...},
 "parameters": {"embedding.word.weight": {"dtype": "float32", "shape": [256, 64],
     "weights": [["rank_000.safetensors", 712, 32768, 0, 789, 8192],
                 ["rank_001.safetensors", 712, 32768, 8192, 987, 8192]],
     "exp_avg": [...], "exp_avg_sq": [...]}, ...},
 "crc32": 456}
```

A slice is [file, byte offset in the file, bytes, first element of the flattened parameter, CRC-32 of the bytes, run].
Its elements are consecutive if `run` is their number. Otherwise they are `run` consecutive ones in each of some rows of
the parameter (of `shape[0]`), one below the other: the columns of a tensor-parallel rank. Slices alone let any layout
read any other, and their checksums let a reader of weights verify nothing else. Each element is in one slice, also if
several ranks save it. Version 4 has no runs, and version 3 neither runs nor checksums of slices; both are still read.

`dtype` is the dtype of the weights; everything else is float32. A trained parameter also has its optimizer state
(`exp_avg`, or `exp_avg` and `exp_avg_sq`) and, with averaging, `average`. A frozen parameter has only weights, in
float32, bfloat16 or float16.

`crc32` covers every byte before its own line. A manifest is untrusted input, and its checksum can be forged: `read`
accepts exactly what `dump` writes, or wrote in versions 3 and 4, and raises `DamagedError` for everything else.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_lite.checkpoint.files import WrittenFile
from megatron_lite.checkpoint.names import A_LINK, MANIFEST_NAME, RANK_FILE, parse_json, rank_file, read_bytes, reason
from megatron_lite.checkpoint.regions import Region, coverage_problem, held
from megatron_lite.checkpoint.saved_options import check_options
from megatron_lite.checkpoint.saved_state import check_state, is_count
from megatron_lite.errors import DamagedError
from megatron_lite.parameter import DTYPES, ParameterSpec

if TYPE_CHECKING:
    from megatron_lite.zero.flat_shard import FlatShard
    from megatron_lite.zero.layout import ParameterSlot

FORMAT = "megatron_lite_checkpoint"
VERSION = 5
OLDEST_VERSION = 3
_SLICE_FIELDS = {3: 4, 4: 5, 5: 6}  # by version: how many of a slice it has
KINDS = ("weights", "exp_avg", "exp_avg_sq", "average")
MOMENTS = KINDS[1:3]

MAX_BYTES = 2**29
MAX_HEAD_BYTES = 2**26  # of these, for options, state and data sets
_RUN_KEYS = ("save_id", "iteration", "world_size", "config", "state")
_KEYS = ("format", "version", *_RUN_KEYS, "files", "parameters", "crc32")
_CRC_LINE = re.compile(rb'"crc32": ([0-9]{1,10})\n\}\n')


class Slice(NamedTuple):
    """A region of a parameter: `num_bytes` at byte `offset` of `file`, starting with element `first`."""

    file: str
    offset: int
    num_bytes: int
    first: int
    crc32: int | None  # None: in version 3
    run: int  # consecutive elements; see `regions.Region`

    def region(self, dtype: torch.dtype) -> Region:
        return Region(self.first, self.num_bytes // dtype.itemsize, self.run)


class SavedFile(NamedTuple):
    size: int  # bytes
    crc32: int


@dataclass(frozen=True)
class SavedParameter:
    dtype: torch.dtype  # of the weights
    shape: tuple[int, ...]
    slices: dict[str, list[Slice]]  # kind -> slices by first element, with each element in one of them

    def dtype_of(self, kind: str) -> torch.dtype:
        """Return the dtype of the elements of one of KINDS."""
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

    @property
    def tensor_parallel(self) -> int:
        """The tensor-parallel ranks among those that saved it; 1 if a converter has written other files since."""
        ranks = int(self.config.get("tensor_parallel", 1))
        return 1 if self.world_size % ranks else ranks

    @property
    def has_slice_checksums(self) -> bool:
        kinds = (pieces for parameter in self.parameters.values() for pieces in parameter.slices.values())
        return all(piece.crc32 is not None for pieces in kinds for piece in pieces)

    def places(self) -> dict[str, list[tuple[Slice, str]]]:
        """Return, by file, the slices in the order of their bytes, each with its name for a message."""
        found: dict[str, list[tuple[Slice, str]]] = {}
        for name, parameter in self.parameters.items():
            for kind, pieces in parameter.slices.items():
                for piece in pieces:
                    found.setdefault(piece.file, []).append((piece, f"{kind} of {name!r}"))
        return {file: sorted(slices, key=lambda item: item[0].offset) for file, slices in found.items()}

    def restricted(self, names: Collection[str]) -> Manifest:
        """Return the manifest without the parameters that are not in `names`."""
        kept = {name: parameter for name, parameter in self.parameters.items() if name in names}
        return replace(self, parameters=kept)

    def misfits(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """List the parameters whose name or shape differs from a model's."""
        saved = self.parameters
        return [
            *(f"{name} is not in the checkpoint" for name in shapes if name not in saved),
            *(
                f"{name} has shape {list(saved[name].shape)}, the model's has {list(shape)}"
                for name, shape in shapes.items()
                if name in saved and saved[name].shape != tuple(shape)
            ),
            *(f"{name} is not in the model" for name in saved if name not in shapes),
        ]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a manifest."""
    return str(dtype).removeprefix("torch.")


def tensor_name(stage: int, frozen: bool, kind: str) -> str:
    """Return the name of a shard in a rank's file: stage_003.exp_avg, stage_003.frozen.weights."""
    return f"stage_{stage:03d}.{'frozen.' if frozen else ''}{kind}"


def file_metadata(save_id: str, iteration: int, rank: int) -> dict[str, str]:
    """Return the metadata in the header of a rank's file."""
    return {"format": FORMAT, "save_id": save_id, "iteration": str(iteration), "rank": str(rank)}


def locate_parameters(parts: Sequence[FlatShard], files: Sequence[WrittenFile]) -> dict[str, SavedParameter]:
    """Return the place of every parameter, given that each rank's file holds its shards part by part, kind by kind.

    Files are in the order of all ranks.
    """
    parameters: dict[str, SavedParameter] = {}
    checksums = [iter(file.slices) for file in files]
    shard_start = 0  # bytes from data_start, the same in every rank's file
    for part in parts:
        layout, kinds = part.layout, part.kinds()
        for slot in layout.slots:
            slices: dict[str, list[Slice]] = {kind: [] for kind in kinds if part.has(kind, slot.spec)}
            parameters[slot.spec.name] = SavedParameter(kinds["weights"], tuple(slot.spec.shape), slices)
        for kind, dtype in kinds.items():
            for rank, file in enumerate(files):
                for slot, region, start, end in slices_of(part, kind, rank):
                    offset = file.data_start + shard_start + start
                    piece = Slice(rank_file(rank), offset, end - start, region.first, next(checksums[rank]), region.run)
                    parameters[slot.spec.name].slices[kind].append(piece)
            shard_start += part.numel(kind) * dtype.itemsize
    assert not any(list(rest) for rest in checksums), "a checksum per slice"
    for parameter in parameters.values():
        for pieces in parameter.slices.values():
            pieces.sort(key=lambda piece: piece.first)
    return parameters


def slices_of(part: FlatShard, kind: str, rank: int) -> Iterator[tuple[ParameterSlot, Region, int, int]]:
    """Yield the slices of a rank's shard: the parameter, its elements, and where they begin and end, in bytes.

    rank: of all. Of elements that several ranks of its tensor-parallel group hold, only the first has a slice.
    """
    size, (data_rank, tensor_rank) = part.kinds()[kind].itemsize, divmod(rank, part.layout.tensor_ranks)
    layout = part.layout.on_tensor_ranks[tensor_rank]
    for slot, first, last in layout.pieces(data_rank):
        if part.has(kind, slot.spec):
            begin = slot.offset - data_rank * layout.shard_numel
            for start, region, holders in held(slot.spec, first, last):
                if holders[0] == tensor_rank:
                    yield slot, region, (begin + start) * size, (begin + start + region.numel) * size


def dump(manifest: Manifest) -> str:
    """Return the text of manifest.json, with one parameter per line.

    Raises:
        TypeError, ValueError: if `config` or `state` is not JSON, or nothing that `read` would accept: a defect of the
            program, which must not be found only when the checkpoint is needed.
    """
    try:
        check_options(json.loads(json.dumps(manifest.config)))
        check_state(manifest.state)
    except DamagedError as error:
        raise ValueError(f"this checkpoint could not be read again: {error}") from None
    assert manifest.has_slice_checksums, "a manifest of version 3 is only read"
    head = {"format": FORMAT, "version": VERSION} | {key: getattr(manifest, key) for key in _RUN_KEYS}
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
    if len(covered) + 32 > MAX_BYTES:
        raise ValueError(f"this checkpoint could not be read again: a manifest of {len(covered):,} bytes")
    return f'{covered}"crc32": {zlib.crc32(covered.encode())}\n}}\n'


def table_bytes(parts: Sequence[FlatShard], world_size: int) -> int:
    """Return an upper bound of the bytes that the files and parameters of a manifest take, without its head."""
    digits = 10  # of a checksum
    slices = 0
    for part in parts:
        digits = max(digits, len(str(part.layout.numel)))
        for kind in part.kinds():
            for slot in part.layout.slots:
                first, last = (place // part.layout.shard_numel for place in (slot.offset, slot.end - 1))
                slices += _most_slices(slot.spec, last - first + 1) if part.has(kind, slot.spec) else 0
    own_bytes = sum(part.numel(kind) * dtype.itemsize for part in parts for kind, dtype in part.kinds().items())
    name = json.dumps(rank_file(world_size))
    digits = max(digits + 1, len(str(own_bytes + 2**27)))  # a header before the values
    slice_bytes = len(f"[{name}, , , , , ], ") + 5 * digits
    file_bytes = len(f' {name}: {{"size": , "crc32": }},\n') + 2 * digits
    specs = [slot.spec for part in parts for slot in part.layout.slots]
    row_bytes = len(str({kind: [] for kind in (*KINDS, "dtype", "shape")})) + 40
    rows = sum(row_bytes + len(json.dumps(spec.name)) + 2 + (digits + 2) * len(spec.shape) for spec in specs)
    return slices * slice_bytes + world_size * file_bytes + rows


def _most_slices(spec: ParameterSpec, shards: int) -> int:
    """Return the most slices of a parameter, of which each tensor-parallel rank has a part in so many shards."""
    if spec.local_shape == spec.shape:
        return shards
    if spec.split.dim:  # the end of a row, whole rows, the beginning of a row
        return spec.split.ranks * (3 * shards - 2)
    return sum(block.parts for block in spec.split.blocks) + spec.split.ranks * (shards - 1)


def read(folder: Path, iteration: int | None = None) -> Manifest:
    """Read and check a folder's manifest, but not the files that it lists.

    iteration: the number that is the folder's name. Such a folder may not be a symbolic link; the path above it may be.

    Raises:
        DamagedError: if it is missing, is not exactly what this program writes, or is not of this iteration.
    """
    if iteration is not None and folder.is_symlink():
        raise DamagedError(A_LINK)
    try:
        text = read_bytes(folder / MANIFEST_NAME, MAX_BYTES)
        values = parse_json(text)
    except OSError as error:
        raise DamagedError(f"{MANIFEST_NAME}: {reason(error)}") from None
    except ValueError as error:
        raise DamagedError(f"{MANIFEST_NAME}: not readable ({error})") from None
    try:
        _require(isinstance(values, dict) and values.get("format") == FORMAT, f"not of the format {FORMAT}")
        version = values.get("version")
        _require(is_count(version), "no version")
        use_other = (
            f"this program reads versions {OLDEST_VERSION} to {VERSION}; use the version of the program that wrote it"
        )
        _require(OLDEST_VERSION <= version <= VERSION, f"written in format version {version}, {use_other}")
        line = _CRC_LINE.search(text, max(0, len(text) - 32))
        found = line is not None and line.end() == len(text) and int(line[1]) == zlib.crc32(text[: line.start()])
        _require(found, "its checksum does not match: it was damaged or edited")
        _require(tuple(values) == _KEYS, "not the keys of this format")
        manifest = _manifest(values)
        _require(iteration in (None, manifest.iteration), f"it is of iteration {manifest.iteration}")
        return manifest
    except DamagedError as error:
        raise DamagedError(f"{MANIFEST_NAME}: {error}") from None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise DamagedError(message)


def _manifest(values: dict[str, Any]) -> Manifest:
    """Check everything below the top level."""
    save_id, iteration, world_size = values["save_id"], values["iteration"], values["world_size"]
    _require(isinstance(save_id, str) and re.fullmatch(r"[0-9a-f]{16}", save_id) is not None, "save_id is malformed")
    _require(is_count(iteration), "iteration is not a count")
    _require(is_count(world_size, 1), "world_size is not a count")
    check_options(values["config"])
    check_state(values["state"])
    for key in ("files", "parameters"):
        _require(isinstance(values[key], dict), f"{key} is not an object")
    _require(len(values["files"]) == world_size, f"names {len(values['files'])} files for {world_size} ranks")
    files = {}
    for name, entry in values["files"].items():
        _require(RANK_FILE.fullmatch(name) is not None, f"{name[:80]!r} is not a file name of this format")
        is_file = isinstance(entry, dict) and tuple(entry) == SavedFile._fields and all(map(is_count, entry.values()))
        _require(is_file, f"the entry of {name} is malformed")
        files[name] = SavedFile(**entry)
    parameters = {}
    for name, entry in values["parameters"].items():
        try:
            parameters[name] = _parameter(entry, files, values["version"])
        except DamagedError as error:
            raise DamagedError(f"parameter {name[:200]!r}: {error}") from None
    _check_apart(parameters)
    return Manifest(save_id, iteration, world_size, values["config"], values["state"], files, parameters)


def _parameter(entry: Any, files: dict[str, SavedFile], version: int) -> SavedParameter:
    _require(isinstance(entry, dict), "its keys are wrong")
    kinds = ("weights", *(kind for kind in KINDS[1:] if kind in entry))
    _require(tuple(entry) == ("dtype", "shape", *kinds), "its keys are wrong")
    dtypes = {dtype_name(dtype): dtype for dtype in DTYPES.values()}
    _require(isinstance(entry["dtype"], str) and entry["dtype"] in dtypes, f"its dtype is not {' or '.join(dtypes)}")
    shape = entry["shape"]
    _require(isinstance(shape, list) and len(shape) <= 8 and all(is_count(n, 1) for n in shape), "its shape is wrong")
    parameter = SavedParameter(dtypes[entry["dtype"]], tuple(shape), {})
    for kind in kinds:
        _require(isinstance(entry[kind], list), f"{kind} is not a list")
        pieces = [_slice(item, files, parameter.dtype_of(kind), version) for item in entry[kind]]
        problem = coverage_problem([piece.region(parameter.dtype_of(kind)) for piece in pieces], shape)
        _require(problem is None, f"the slices of {kind} {problem}")
        parameter.slices[kind] = pieces
    _require("exp_avg" in kinds or "exp_avg_sq" not in kinds, "one of its moments is missing")
    is_alone = parameter.dtype == torch.float32 or len(kinds) == 1
    _require(is_alone, f"{' and '.join(kinds[1:])} beside {entry['dtype']} weights")
    return parameter


def _check_apart(parameters: dict[str, SavedParameter]) -> None:
    """Check that no byte of a file belongs to two slices."""
    kinds = (pieces for parameter in parameters.values() for pieces in parameter.slices.values())
    places = sorted((piece.file, piece.offset, piece.num_bytes) for pieces in kinds for piece in pieces)
    for (file, offset, num_bytes), (other, start, _) in zip(places, places[1:], strict=False):
        _require(file != other or offset + num_bytes <= start, f"two slices of {file} overlap at byte {start}")


def _slice(item: Any, files: dict[str, SavedFile], dtype: torch.dtype, version: int) -> Slice:
    _require(isinstance(item, list) and len(item) == _SLICE_FIELDS[version], "a slice is malformed")
    file, offset, num_bytes, first, *rest = item
    _require(isinstance(file, str) and file in files, "a slice names a file that is not listed")
    _require(is_count(offset) and is_count(first) and all(map(is_count, rest)), "a slice is malformed")
    _require(is_count(num_bytes, 1) and num_bytes % dtype.itemsize == 0, "a slice is malformed")
    _require(offset + num_bytes <= files[file].size, f"a slice lies beyond the end of {file}")
    crc32, run = (*rest, None, None)[:2]
    numel = num_bytes // dtype.itemsize
    _require(run is None or 1 <= run <= numel, "a slice is malformed")
    return Slice(file, offset, num_bytes, first, crc32, run or numel)
