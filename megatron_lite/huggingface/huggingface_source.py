"""Weights of a Hugging Face folder; `weight_map.pieces` maps the rows of our parameters to rows of their tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpoint import files
from megatron_lite.config import ModelConfig
from megatron_lite.errors import CheckpointError, DamagedError
from megatron_lite.huggingface import folder_kind, model_options
from megatron_lite.huggingface.safetensors_header import FLOATING, StoredTensor, read_header
from megatron_lite.huggingface.weight_map import Piece, known_name, pieces
from megatron_lite.huggingface.weight_source import WeightSource
from megatron_lite.parameter import DTYPES

_HEAD = "lm_head.weight"
_EMBEDDING = "embedding.word.weight"  # ours


class HuggingFaceSource(WeightSource):
    """A Hugging Face folder. `model`: the resolved model to fill; None: the model of config.json.

    Raises:
        CheckpointError: if the folder cannot be used.
    """

    kind = "huggingface"
    model_type: str

    def __init__(self, folder: Path, model: ModelConfig | None = None) -> None:
        super().__init__(folder)
        names, index = folder_kind.weight_files(folder)
        values, self.model_type = model_options.hugging_face_values(folder)
        self.model = model_options.resolved_model(values, f"{folder}: {folder_kind.CONFIG_NAME}")
        self._filled = model or self.model
        with self._reported():
            self._tensors = self._named(names, index)
        self._pieces: dict[str, tuple[list[Piece], int]] = {}  # of our parameters, with the elements in a row
        self._tied_copy: StoredTensor | None = None

    def describe(self) -> str:
        return f"a Hugging Face folder, {self.model_type}"

    def dtype(self) -> str:
        """Return the dtype of all tensors if they share one, else fp32."""
        found = {FLOATING[tensor.dtype] for tensor in self._tensors.values() if tensor.dtype in FLOATING}
        return next((name for name, dtype in DTYPES.items() if found == {dtype}), "fp32")

    def _named(self, names: list[str], index: dict[str, str]) -> dict[str, StoredTensor]:
        """Return all tensors except buffers, by the full names of the architecture."""
        tensors: dict[str, StoredTensor] = {}
        for file in names:
            header = read_header(self.folder, file)
            absent = [tensor for tensor, place in index.items() if place == file and tensor not in header]
            if absent:
                raise DamagedError(
                    f"{file}: {absent[0][:100]!r} is not in it, although {folder_kind.INDEX_NAME} says so"
                )
            for name, tensor in header.items():
                full = name if name == _HEAD else known_name(name, self.model_type, self._filled)
                if full is None:
                    continue
                if full in tensors:
                    raise DamagedError(f"{file}: {full[:100]!r} is there twice")
                tensors[full] = tensor
        return tensors

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
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
            problems += self._tie(self._pieces.get(_EMBEDDING))
        problems += [f"{name[:100]} is not a tensor of this model" for name in sorted(left)]
        self._refuse(list(dict.fromkeys(problems)), "download the folder again, or check the flags of the model")

    def _problems(self, piece: Piece) -> list[str]:
        """List the problems of the tensor that holds a piece."""
        tensor = self._tensors.get(piece.name)
        if tensor is None:
            return [f"{piece.name} is missing"]
        if tensor.shape != tuple(piece.their_shape):
            return [f"{piece.name} has shape {list(tensor.shape)}, the model needs {list(piece.their_shape)}"]
        if tensor.dtype not in FLOATING:
            kinds = ", ".join(FLOATING)
            return [f"{piece.name} is {tensor.dtype}; weights must be {kinds} (quantized weights are not supported)"]
        return []

    def _tie(self, found: tuple[list[Piece], int] | None) -> list[str]:
        """Check that a head stored beside a tied embedding can be its copy; `verify` compares the values."""
        embedding = self._tensors.get(found[0][0].name) if found else None
        self._tied_copy = self._tensors[_HEAD]
        if embedding is None or (self._tied_copy.shape, self._tied_copy.dtype) == (embedding.shape, embedding.dtype):
            return []
        return [f"{_HEAD} is not a copy of the embedding, although the model ties them"]

    def damage(self, rank: int = 0, world_size: int = 1) -> str | None:
        """See `WeightSource.damage`. Files have no checksums, but a copy of a tied head must equal the embedding."""
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

    def _read(self, name: str, first: int, target: Tensor) -> None:
        found, width = self._pieces[name]
        last = first + target.numel()
        for piece in found:
            start = piece.first_row * width
            low, high = max(first, start), min(last, start + piece.rows * width)
            if low < high:
                self._read_piece(piece, width, low - start, high - start, target[low - first : high - first])

    def _read_piece(self, piece: Piece, width: int, low: int, high: int, target: Tensor) -> None:
        """Read the elements low to high of a piece."""
        tensor = self._tensors[piece.name]
        dtype = FLOATING[tensor.dtype]
        if piece.transposed:
            assert not piece.plus, piece
            self._read_transposed(tensor, piece, width, low, high, target)
            return
        offset = tensor.offset + (piece.their_first_row * width + low) * dtype.itemsize
        if not piece.plus:
            self._files.read(tensor.file, offset, dtype, target)
            return
        values = torch.empty(target.numel(), dtype=torch.promote_types(dtype, torch.float32))  # small: a norm
        self._files.read(tensor.file, offset, dtype, values)
        target.copy_(values - piece.plus)

    def _read_transposed(
        self, tensor: StoredTensor, piece: Piece, width: int, low: int, high: int, target: Tensor
    ) -> None:
        """Read the elements low to high of a piece whose tensor is stored transposed, (width, rows), as in GPT-2.

        Read a few stored rows at a time and copy the columns needed: a rank reads the whole tensor for its share.
        """
        dtype, columns = FLOATING[tensor.dtype], tensor.shape[1]
        step = max(1, files.CHUNK_BYTES // (columns * dtype.itemsize))
        for top in range(0, width, step):
            bottom = min(width, top + step)
            values = torch.empty((bottom - top) * columns, dtype=dtype)
            self._files.read(tensor.file, tensor.offset + top * columns * dtype.itemsize, dtype, values)
            block = values.view(bottom - top, columns)
            for region in _regions(low, high, width):
                left, right = max(top, region.left), min(bottom, region.right)
                if left < right:
                    ours = target[region.offset : region.offset + region.numel].view(region.rows, -1)
                    begin = piece.their_first_row + region.row
                    theirs = block[left - top : right - top, begin : begin + region.rows]
                    ours[:, left - region.left : right - region.left].copy_(theirs.t())


class _Region(NamedTuple):
    """Some columns of some rows of a matrix; `offset`: their position in the target."""

    row: int
    rows: int
    left: int
    right: int
    offset: int

    @property
    def numel(self) -> int:
        return self.rows * (self.right - self.left)


def _regions(low: int, high: int, width: int) -> Iterator[_Region]:
    """Split the elements low to high of a flattened matrix: the end of a row, whole rows, the start of a row."""
    position = low
    while position < high:
        row, column = divmod(position, width)
        whole = 0 if column else (high - position) // width
        rows, right = (whole, width) if whole else (1, min(width, column + high - position))
        yield _Region(row, rows, column, right, position - low)
        position += rows * (right - column)
