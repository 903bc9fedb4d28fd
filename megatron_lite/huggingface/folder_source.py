"""Read the weights of a Hugging Face folder: safetensors files, with tensors of any float dtype or in
4 bits, whose rows `weight_map` places in our parameters."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_lite.checkpoint import files
from megatron_lite.checkpoint.blocks import Slice
from megatron_lite.checkpoint.compatibility import FREE
from megatron_lite.checkpoint.decoding import decode
from megatron_lite.checkpoint.names import parse_json
from megatron_lite.checkpoint.reading import read_overlap
from megatron_lite.checkpoint.saved_state import TRAINING
from megatron_lite.config import ModelConfig
from megatron_lite.config.values import written
from megatron_lite.errors import CheckpointError, DamagedError, shorten
from megatron_lite.huggingface import model_folder
from megatron_lite.huggingface.config_file import TRAINING_KEY
from megatron_lite.huggingface.four_bit_floats import GROUP, decoded
from megatron_lite.huggingface.origin import read_origin
from megatron_lite.huggingface.weight_map import (
    MappedRows,
    always_fp32,
    extra_layer,
    known_name,
    pieces,
)
from megatron_lite.huggingface.weight_source import Shapes, WeightSource
from megatron_lite.parameter import DTYPES, SAFETENSORS_NAMES
from megatron_lite.run.regular_files import open_regular
from megatron_lite.tiles import Tile, overlaps

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
        found = {
            FLOATING[tensor.dtype]
            for name, tensor in self._tensors.items()
            if tensor.dtype in FLOATING and not always_fp32(name, self.model_type)
        }
        # of all other tensors
        self.dtype = next((name for name, dtype in DTYPES.items() if found == {dtype}), "fp32")
        self._pieces: dict[
            str, tuple[list[MappedRows], int]
        ] = {}  # by our parameter, with the elements per row
        self._tied_copy: StoredTensor | None = None

    def _named(self, names: list[str], index: dict[str, str]) -> dict[str, StoredTensor]:
        """Return all tensors except buffers and MTP layers by the architecture's full names."""
        tensors: dict[str, StoredTensor] = {}
        left_out: set[int] = set()
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
                layer = extra_layer(full, self.model_type, self.model)
                if layer is not None:
                    left_out.add(layer)
                    continue
                if full in tensors:
                    raise DamagedError(f"{file}: {full[:100]!r} is there twice")
                tensors[full] = tensor
        self.description = f"a Hugging Face folder, {self.model_type}"
        if left_out:
            numbers = ", ".join(map(str, sorted(left_out)))
            self.description += f", without layers {numbers}, which predict later tokens (MTP)"
        return tensors

    def check(self, shapes: Shapes) -> None:
        """See `WeightSource.check`; finds the pieces of every parameter."""
        problems = []
        left = set(self._tensors)
        in_memory = any(name.endswith(".experts.gate_up_proj") for name in left)
        for name, shape in shapes.items():
            try:
                found = pieces(name, tuple(shape), self.model_type, self._filled, in_memory)
            except KeyError:
                problems.append(f"{name} of the model does not exist in {self.model_type}")
                continue
            found = [self._as_stored(piece) for piece in found]
            self._pieces[name] = found, math.prod(shape[1:])
            for piece in found:
                problems += self._problems(piece)
                left -= {piece.name, *_parts_of_four_bits(piece.name)}
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

    def _as_stored(self, piece: MappedRows) -> MappedRows:
        """Return the piece, whose tensor is not transposed if it is in 4 bits."""
        blocks, _ = _parts_of_four_bits(piece.name)
        if blocks not in self._tensors or not piece.transposed:
            return piece
        stack, width, rows = piece.their_shape
        first = piece.matrix * rows + piece.their_first_row
        return piece._replace(
            transposed=False, their_first_row=first, their_shape=(stack, rows, width)
        )

    def _problems(self, piece: MappedRows) -> list[str]:
        """List the problems with a piece's tensor."""
        if (names := _parts_of_four_bits(piece.name))[0] in self._tensors:
            *rows, width = piece.their_shape
            shape = (*rows, width // GROUP)
            needed = (("U8", (*shape, GROUP // 2)), ("U8", shape))
            stored = [self._tensors.get(name) for name in names]
            fit = [found and (found.dtype, found.shape) for found in stored] == [*needed]
            return (
                []
                if fit and width % GROUP == 0
                else [f"{' and '.join(names)} are not {list(piece.their_shape)} in MXFP4"]
            )
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
        plus = found[0].plus  # of a norm, which is small
        values = target
        if plus:
            dtype = FLOATING[self._tensors[found[0].name].dtype]
            values = torch.empty(target.numel(), dtype=torch.promote_types(dtype, torch.float32))
        for piece in found:
            is_plain = piece.step == 1 and piece.name in self._tensors
            read = self._read_piece if is_plain else self._read_rows
            read = self._read_transposed if piece.transposed else read
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
        dtype, columns = FLOATING[tensor.dtype], tensor.shape[-1]
        first, numel = piece.their_first_row, width * columns  # of a matrix
        step = max(1, files.CHUNK_BYTES // (columns * dtype.itemsize))
        for top in range(0, width, step):
            count = min(step, width - top)
            tile = Tile(piece.first_row * width + top, piece.rows, count, width)
            if not (found := list(overlaps(wanted, tile))):
                continue
            block = torch.empty(count, columns, dtype=dtype)
            offset = tensor.offset + (piece.matrix * numel + top * columns) * dtype.itemsize
            self._files.read(tensor.file, offset, dtype, block.view(-1))
            ours = block[:, first :: piece.step][:, : piece.rows].t().contiguous().view(-1)
            for overlap in found:
                overlap.wanted.view(target).copy_(overlap.saved.view(ours))

    def _read_rows(self, piece: MappedRows, width: int, wanted: Tile, target: Tensor) -> None:
        """Do the same for a piece of every `step`-th row, or in 4 bits, some rows at a time."""
        count = max(1, files.CHUNK_BYTES // (width * 8 * piece.step))
        for top in range(0, piece.rows, count):
            rows = min(count, piece.rows - top)
            tile = Tile.run((piece.first_row + top) * width, rows * width)
            if found := list(overlaps(wanted, tile)):
                first = piece.their_first_row + top * piece.step
                read = self._stored_rows(piece.name, first, (rows - 1) * piece.step + 1, width)
                ours = read[:: piece.step].contiguous().view(-1)
                for overlap in found:
                    overlap.wanted.view(target).copy_(overlap.saved.view(ours))

    def _stored_rows(self, name: str, first: int, count: int, width: int) -> Tensor:
        """Read rows of a tensor, (count, width), which may be in 4 bits."""

        def read(name: str, width: int) -> Tensor:
            tensor = self._tensors[name]
            dtype = FLOATING.get(tensor.dtype, torch.uint8)
            values = torch.empty(count, width, dtype=dtype)
            offset = tensor.offset + first * width * dtype.itemsize
            self._files.read(tensor.file, offset, dtype, values.view(-1))
            return values

        if name in self._tensors:
            return read(name, width)
        blocks, scales = _parts_of_four_bits(name)
        groups = width // GROUP
        return decoded(read(blocks, width // 2).view(count, groups, -1), read(scales, groups))


def _parts_of_four_bits(name: str) -> tuple[str, str]:
    return f"{name}_blocks", f"{name}_scales"


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
