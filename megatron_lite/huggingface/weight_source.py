"""Read model weights from files, slice by slice: a rank reads only its shards, a converter one
parameter at a time.

A source knows where its files store each element of our parameters, and has one chunk in memory at
a time. For a Hugging Face folder, `weight_map.pieces` maps our parameters' rows to rows of their
tensors.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.blocks import Slice, check_blocks, check_sizes
from megatron_lite.checkpoint.compatibility import FREE
from megatron_lite.checkpoint.decoding import decode
from megatron_lite.checkpoint.files import Files
from megatron_lite.checkpoint.manifest import SavedParameter
from megatron_lite.checkpoint.names import open_regular, parse_json, reason
from megatron_lite.checkpoint.reading import read_elements, read_overlap
from megatron_lite.checkpoint.saved_state import TRAINING, training_facts
from megatron_lite.config import JsonObject, ModelConfig
from megatron_lite.config.values import written
from megatron_lite.errors import CheckpointError, DamagedError, shorten
from megatron_lite.huggingface import model_folder
from megatron_lite.huggingface.config_file import TRAINING_KEY
from megatron_lite.huggingface.origin import read_origin
from megatron_lite.huggingface.weight_map import MappedRows, known_name, pieces
from megatron_lite.model.layer import Layer
from megatron_lite.parameter import DTYPES, SAFETENSORS_NAMES, Parameter
from megatron_lite.run.progress_line import ByteProgress
from megatron_lite.tiles import Tile, overlaps

Shapes = Mapping[str, tuple[int, ...]]  # of parameters, by name
ADVICE = "restore it or download it again"


class WeightSource(contextlib.AbstractContextManager["WeightSource"]):
    """A model's weights in a folder.

    Call `check` with the shapes of the model's parameters first, then `read`; `verify` looks for
    damage.
    """

    kind: str  # one of model_folder.KINDS
    model: ModelConfig  # the resolved model that the files describe
    iteration: int | None = None  # of our checkpoints
    # its Hugging Face architecture, or the requested one for exports; None: any
    model_type: str | None
    description: str  # a few words for the log
    dtype: str  # fp32, bf16 or fp16: the dtype intended for use
    origin: JsonObject  # of the initial weights, see `read_origin`; empty if unknown
    training: JsonObject  # what is known about it, see `saved_state.TRAINING`

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = Files(folder, follow_links=self.kind == "huggingface")

    @abc.abstractmethod
    def check(self, shapes: Shapes) -> None:
        """Check that the files contain exactly the weights of a model with these parameters.

        Raises:
            CheckpointError: names missing, unexpected and misshapen parameters.
        """

    @abc.abstractmethod
    def damage(self, rank: int = 0, world_size: int = 1) -> str | None:
        """Return any damage in this rank's share of the values to read. Call `check` first.

        Raises:
            RotatedError: if a live run deletes what is read.
        """

    def verify(self) -> None:
        """Check the files for damage, reading all values once.

        Raises:
            CheckpointError: if there is any.
        """
        if (problem := self.damage()) is not None:
            raise CheckpointError(f"{self.folder}: {problem}; {ADVICE}")

    def read(self, name: str, tile: Tile, target: Tensor) -> None:
        """Fill `target` (n,), on any device and of any dtype, with a parameter tile's elements.

        Raises:
            CheckpointError: if a file can no longer be read.
        """
        with self._reported():
            self._read(name, tile, target)

    @abc.abstractmethod
    def _read(self, name: str, tile: Tile, target: Tensor) -> None:
        """Implement `read`; may raise OSError and DamagedError."""

    def close(self) -> None:
        self._files.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Convert file errors to a one-line CheckpointError."""
        try:
            yield
        except DamagedError as error:
            raise CheckpointError(f"{self.folder}: {error}; {ADVICE}") from None
        except OSError as error:
            name = Path(error.filename).name if isinstance(error.filename, str) else "a file"
            raise CheckpointError(f"{self.folder}: {name}: {reason(error)}; {ADVICE}") from None

    def _refuse(self, problems: list[str], fix: str) -> None:
        """Raise a one-line error for all problems, if any."""
        if problems:
            raise CheckpointError(
                f"{self.folder}: does not fit the model: {shorten(problems)}; {fix}"
            )


def read_whole(source: WeightSource, name: str, shape: tuple[int, ...]) -> Tensor:
    """Read a full parameter in fp32."""
    values = torch.empty(shape)
    source.read(name, Tile.run(0, values.numel()), values.view(-1))
    return values


def fill(layer: Layer, source: WeightSource, memory: Callable[[int], Tensor]) -> None:
    """Read the parameters of a layer one by one into tensors of `memory(numel)`."""
    for module in layer.modules():
        for attribute, declared in list(module.named_parameters(recurse=False)):
            spec = cast(Parameter, declared).spec
            values = memory(spec.numel)
            source.read(spec.name, Tile.run(0, spec.numel), values)
            parameter = Parameter(values.view(spec.shape), requires_grad=False)
            parameter.spec = spec
            setattr(module, attribute, parameter)


class CheckpointSource(WeightSource):
    """One of our checkpoints. With `average`, reads running averages instead of weights, except of
    frozen parameters.

    state: `damage` also checks moments and averages, for `read_state`.

    Raises:
        DamagedError: if the manifest is unusable, or a file is missing or has another size.
        CheckpointError: if it has options unknown to this version, or lacks averages.
    """

    kind = "distributed"

    def __init__(self, folder: Path, average: bool = False, state: bool = False) -> None:
        super().__init__(folder)
        self.content = manifest.read(folder, int(folder.name) if folder.name.isdecimal() else None)
        check_sizes(folder, self.content.files)
        self.iteration, config = self.content.iteration, self.content.config
        self.model = model_folder.resolved_model(
            model_folder.checkpoint_values(config, str(folder)), str(folder)
        )
        self.model_type = model_folder.saved_model_type(config)
        self.description = f"a checkpoint of iteration {self.iteration:,}"
        self.dtype = config.get("training_dtype", "fp32")
        data, self.origin = self.content.state.get("data", {}), self.content.state.get("origin", {})
        self.training = training_facts(config["sequence_length"], data) if self.iteration else {}
        self.averaged, self._state = average, state
        self._good_share: tuple[int, int] | None = (
            None  # (rank, world size) whose share has been verified
        )
        if average and not any(
            "average" in saved.slices for saved in self.content.parameters.values()
        ):
            raise CheckpointError(
                f"{folder}: it holds no averaged weights (it was trained without --ema_type)"
            )

    def check(self, shapes: Shapes, partial: bool = False) -> None:
        """See `WeightSource.check`. partial: ignore the checkpoint's other parameters."""
        self._refuse(
            self.content.misfits(shapes, partial),
            "give the flags it was trained with, or no flags of the model",
        )

    def damage(self, rank: int = 0, world_size: int = 1) -> str | None:
        """See `WeightSource.damage`. Reads only the blocks to be used, or nothing if the share has
        been verified."""
        if self._good_share == (rank, world_size):
            return None
        places = self.content.places(
            lambda saved: saved.slices if self._state else [self._weights_kind(saved)]
        )
        wanted = [item for name in self.content.files for item in places.get(name, ())]
        first, end = (len(wanted) * share // world_size for share in (rank, rank + 1))
        try:
            with ByteProgress(f"checking {self.folder}", 0, rank == 0) as progress:
                for name, group in itertools.groupby(
                    wanted[first:end], key=lambda item: item[0].file
                ):
                    file, slices = self.content.files[name], list(group)
                    numbers = {
                        number
                        for piece, _ in slices
                        for number in file.blocks_around(piece.offset, piece.end)
                    }
                    check_blocks(self.folder, name, file, sorted(numbers), slices, progress.add)
        except DamagedError as error:
            self._files.check()
            return str(error)
        self._good_share = rank, world_size
        return None

    def _weights_kind(self, saved: SavedParameter) -> str:
        return "average" if self.averaged and "average" in saved.slices else "weights"

    def _read(self, name: str, tile: Tile, target: Tensor) -> None:
        saved = self.content.parameters[name]
        read_elements(self._files, saved, self._weights_kind(saved), tile, target)

    def read_state(self, name: str, kind: str, tile: Tile, target: Tensor) -> None:
        """Read one of `manifest.KINDS`, which the checkpoint must contain, like `read`."""
        assert self._state, "it was not verified"
        with self._reported():
            read_elements(self._files, self.content.parameters[name], kind, tile, target)


# Dtypes that can become weights. Files may also contain masks and counters.
FLOATING = {"F64": torch.float64} | {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
_HEAD = "lm_head.weight"
_EMBEDDING = "embedding.word.weight"  # ours
VOCABULARY = (_EMBEDDING, "head.output.weight")  # with one row per token


class StoredTensor(NamedTuple):
    """A tensor's place in a folder."""

    file: str
    offset: int  # of the first byte in the file
    num_bytes: int
    dtype: str  # as in the header
    shape: tuple[int, ...]


class HuggingFaceSource(WeightSource):
    """A Hugging Face folder. `model`: the resolved model to fill; None: the model of config.json.

    Raises:
        CheckpointError: if the folder cannot be used.
    """

    kind = "huggingface"
    model_type: str

    def __init__(self, folder: Path, model: ModelConfig | None = None) -> None:
        super().__init__(folder)
        self.origin = read_origin(folder)
        names, index = model_folder.weight_files(folder)
        values, self.model_type = model_folder.hugging_face_values(folder)
        self.model = model_folder.resolved_model(values, f"{folder}: {model_folder.CONFIG_NAME}")
        self._filled = model or self.model
        with self._reported():
            stated = model_folder.read_object(folder, model_folder.CONFIG_NAME).get(
                TRAINING_KEY, {}
            )
            self.training = decode(TRAINING, stated, TRAINING_KEY)
            self._tensors = self._named(names, index)
        self.description = f"a Hugging Face folder, {self.model_type}"
        found = {
            FLOATING[tensor.dtype] for tensor in self._tensors.values() if tensor.dtype in FLOATING
        }
        # of all tensors
        self.dtype = next((name for name, dtype in DTYPES.items() if found == {dtype}), "fp32")
        self._pieces: dict[
            str, tuple[list[MappedRows], int]
        ] = {}  # by our parameter, with the elements per row
        self._tied_copy: StoredTensor | None = None

    def _named(self, names: list[str], index: dict[str, str]) -> dict[str, StoredTensor]:
        """Return all tensors except buffers by the architecture's full names."""
        tensors: dict[str, StoredTensor] = {}
        for file in names:
            header = read_header(self.folder, file)
            absent = [
                tensor for tensor, place in index.items() if place == file and tensor not in header
            ]
            if absent:
                raise DamagedError(
                    f"{file}: {absent[0][:100]!r} is not in it, although {model_folder.INDEX_NAME} says so"
                )
            for name, tensor in header.items():
                full = name if name == _HEAD else known_name(name, self.model_type, self._filled)
                if full is None:
                    continue
                if full in tensors:
                    raise DamagedError(f"{file}: {full[:100]!r} is there twice")
                tensors[full] = tensor
        return tensors

    def check(self, shapes: Shapes) -> None:
        """See `WeightSource.check`; finds the pieces of every parameter."""
        problems = []
        left = set(self._tensors)
        for name, shape in shapes.items():
            try:
                found = pieces(name, tuple(shape), self.model_type, self._filled)
            except KeyError:
                problems.append(f"{name} of the model does not exist in {self.model_type}")
                continue
            self._pieces[name] = found, math.prod(shape[1:])
            for piece in found:
                problems += self._problems(piece)
                left.discard(piece.name)
        if _HEAD in left and "head.output.weight" not in shapes and _EMBEDDING in shapes:
            left.remove(_HEAD)
            problems += self._tie()
        problems += [f"{name[:100]} is not a tensor of this model" for name in sorted(left)]
        other = vars(self.model).items() - vars(self._filled).items()
        stated = [f"--{name}={written(value)}" for name, value in sorted(other) if name not in FREE]
        fix = "download the folder again, or check the flags of the model"
        if stated:
            fix = f"its config.json says {shorten(stated)}; write that"
        if self.model.vocab_size != self._filled.vocab_size:
            fix += ", or --resize_vocabulary=mean for other tokens"
        self._refuse(list(dict.fromkeys(problems)), fix)

    def _problems(self, piece: MappedRows) -> list[str]:
        """List the problems with a piece's tensor."""
        tensor = self._tensors.get(piece.name)
        if tensor is None:
            return [f"{piece.name} is missing"]
        if tensor.shape != tuple(piece.their_shape):
            return [
                f"{piece.name} has shape {list(tensor.shape)}, the model needs {list(piece.their_shape)}"
            ]
        if tensor.dtype not in FLOATING:
            kinds = ", ".join(FLOATING)
            return [
                f"{piece.name} is {tensor.dtype}; weights must be {kinds} (quantized weights are not supported)"
            ]
        return []

    def _tie(self) -> list[str]:
        """Check that a stored head may be a copy of the tied embedding; `verify` compares the
        values."""
        (first, *_), _ = self._pieces[_EMBEDDING]
        embedding, self._tied_copy = self._tensors.get(first.name), self._tensors[_HEAD]
        if embedding is None or (self._tied_copy.shape, self._tied_copy.dtype) == (
            embedding.shape,
            embedding.dtype,
        ):
            return []
        return [f"{_HEAD} is not a copy of the embedding, although the model ties them"]

    def damage(self, rank: int = 0, world_size: int = 1) -> str | None:
        """See `WeightSource.damage`. Files have no checksums, but a tied head's copy must equal the
        embedding."""
        if self._tied_copy is None:
            return None
        (first, *_), _ = self._pieces[_EMBEDDING]
        embedding, copy = self._tensors[first.name], self._tied_copy
        start, end = (copy.num_bytes * (rank + i) // world_size for i in range(2))
        with self._reported():
            for offset in range(start, end, files.CHUNK_BYTES):
                both = torch.empty(2, min(files.CHUNK_BYTES, end - offset), dtype=torch.uint8)
                for tensor, target in zip((embedding, copy), both, strict=True):
                    self._files.read(tensor.file, tensor.offset + offset, torch.uint8, target)
                if not torch.equal(*both):
                    raise CheckpointError(
                        f"{self.folder}: {_HEAD} differs from {first.name}, although tie_word_embeddings is true; "
                        f"set it to false in config.json, or remove {_HEAD} from the file"
                    )
        return None

    def _read(self, name: str, tile: Tile, target: Tensor) -> None:
        found, width = self._pieces[name]
        dtype = FLOATING[self._tensors[found[0].name].dtype]
        plus = found[0].plus  # of a norm, which is small
        values = (
            torch.empty(target.numel(), dtype=torch.promote_types(dtype, torch.float32))
            if plus
            else target
        )
        for piece in found:
            read = self._read_transposed if piece.transposed else self._read_piece
            read(piece, width, tile._replace(offset=0), values)
        if plus:
            target.copy_(values - plus)

    def _read_piece(self, piece: MappedRows, width: int, wanted: Tile, target: Tensor) -> None:
        """Fill `target` with a tile's elements from a piece."""
        tensor = self._tensors[piece.name]
        first = piece.first_row * width
        numel = piece.rows * width
        dtype = FLOATING[tensor.dtype]
        offset = tensor.offset + piece.their_first_row * width * dtype.itemsize
        stored = Slice(tensor.file, offset, numel * dtype.itemsize, first, numel)
        for overlap in overlaps(wanted, Tile.run(first, numel)):
            read_overlap(self._files, stored, dtype, overlap, target)

    def _read_transposed(self, piece: MappedRows, width: int, wanted: Tile, target: Tensor) -> None:
        """Do the same for a piece whose tensor is stored transposed, (width, rows), as in GPT-2.

        A few stored rows at a time are columns of ours; a rank reads those that it needs, whole.
        """
        assert not piece.plus, piece
        tensor = self._tensors[piece.name]
        dtype, columns = FLOATING[tensor.dtype], tensor.shape[1]
        first, end = piece.their_first_row, piece.their_first_row + piece.rows
        step = max(1, files.CHUNK_BYTES // (columns * dtype.itemsize))
        for top in range(0, width, step):
            count = min(step, width - top)
            tile = Tile(piece.first_row * width + top, piece.rows, count, width)
            if not (found := list(overlaps(wanted, tile))):
                continue
            block = torch.empty(count, columns, dtype=dtype)
            offset = tensor.offset + top * columns * dtype.itemsize
            self._files.read(tensor.file, offset, dtype, block.view(-1))
            ours = block[:, first:end].t().contiguous().view(-1)
            for overlap in found:
                overlap.wanted.view(target).copy_(overlap.saved.view(ours))


def read_header(folder: Path, name: str) -> dict[str, StoredTensor]:
    """Return an untrusted file's tensors by name.

    The safetensors library checks the file: a length, a JSON header, and values that cover the rest
    of the file without gaps or overlaps (https://github.com/huggingface/safetensors). This function
    checks what the library does not.

    Raises:
        DamagedError: if it is not a complete safetensors file.
        OSError: if it cannot be read.
    """
    with open_regular(
        folder / name, follow_links=True
    ) as file:  # the library would block on a pipe
        size = os.fstat(file.fileno()).st_size
        try:
            with safe_open(folder / name, framework="np"):
                pass
            length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
            # refuses repeated names, unlike the library
            content = parse_json(os.pread(file.fileno(), length, 8))
        except (SafetensorError, ValueError) as error:
            text = " ".join(str(error).split())[:200]
            raise DamagedError(
                f"{name}: not a complete safetensors file of {size:,} bytes ({text})"
            ) from None
    content.pop("__metadata__", None)
    tensors = {}
    for key, entry in content.items():
        # the library takes other JSON, too
        if not isinstance(entry, dict) or not isinstance(entry["dtype"], str):
            raise DamagedError(f"{name}: the header entry of {key[:100]!r} is malformed")
        start, end = entry["data_offsets"]
        tensors[key] = StoredTensor(
            name, 8 + length + start, end - start, entry["dtype"], tuple(entry["shape"])
        )
    return tensors
