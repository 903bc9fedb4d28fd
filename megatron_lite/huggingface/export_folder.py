"""Write a Hugging Face folder. Names and shapes determine each tensor's place before any value is
known.

Values can therefore arrive in any order, one parameter in memory at a time, and the folder's bytes
depend neither on the number of ranks nor on the ZeRO stage.

Tensors are split into files as by `save_pretrained` in transformers: in name order, with a new file
when the next tensor would exceed the limit, a separate file for a tensor above the limit, and a
single file without an index if everything fits. Only experts differ: transformers 5.24 puts those of
a block into one file, beyond the limit. Files have mode 0666 and folders 0777, minus the
user's umask.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpoint import files
from megatron_lite.config import Config
from megatron_lite.data.tokenizing import copy_tokenizer
from megatron_lite.huggingface.architectures import check_exportable
from megatron_lite.huggingface.config_file import TRAINING_KEY, hugging_face_config
from megatron_lite.huggingface.model_card import TrainingSummary, model_card
from megatron_lite.huggingface.model_folder import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME
from megatron_lite.huggingface.origin import CARD_NAME, GENERATION_NAME, special_ids
from megatron_lite.huggingface.weight_map import (
    MappedRows,
    always_fp32,
    by_tensor,
    constants,
    pieces,
)
from megatron_lite.model.gpt import active_numel
from megatron_lite.parameter import DTYPES
from megatron_lite.run.durable_files import sync_files
from megatron_lite.run.progress_line import ByteProgress
from megatron_lite.zero.finite import are_finite

# How transformers splits text for every qwen2 model, regardless of its tokenizer.json.
QWEN_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class TensorPlace(NamedTuple):
    """A Hugging Face tensor's place."""

    file: str
    offset: int  # in the file, in bytes
    shape: tuple[int, ...]


class ExportFolder:
    """The files of an export, with the place of each Hugging Face tensor, and, after `create`, a
    folder being written.

    `overflow` describes the first value too large for the dtype, if any; after that nothing more is
    written, and the folder must not be published. Close `progress` after the last `write`.

    parameters: our (name, shape). limit_bytes: for one file's tensors.

    Raises:
        UsageError: from the constructor, if no architecture can express the model.
        OSError: from all methods that write, if writing fails.
    """

    def __init__(
        self, parameters: Collection[tuple[str, tuple[int, ...]]], config: Config, limit_bytes: int
    ) -> None:
        self.config, self.overflow = config, ""
        architecture = check_exportable(config.model, config.training.export_model_type)
        self.dtype = DTYPES[config.training.export_dtype]
        self._pieces = {
            name: pieces(name, shape, architecture, config.model) for name, shape in parameters
        }
        self._missing = set(self._pieces)
        self._architecture = architecture
        self.num_bytes = {
            name: math.prod(shape) * self._dtype(self._pieces[name][0].name).itemsize
            for name, shape in parameters
        }  # of ours
        numels = [(name, math.prod(shape)) for name, shape in parameters]
        self._numels = sum(dict(numels).values()), active_numel(numels, config.model)
        self.progress = ByteProgress("writing the export", sum(self.num_bytes.values()))
        self._constants = list(constants(architecture, config.model))
        shapes = {constant.name: constant.shape for constant in self._constants}
        for piece in (piece for every in self._pieces.values() for piece in every):
            assert shapes.setdefault(piece.name, piece.their_shape) == piece.their_shape, piece.name
        sizes = {
            name: math.prod(shapes[name]) * self._dtype(name).itemsize
            for name in sorted(shapes, key=_natural)
        }
        self.total_bytes = sum(sizes.values())
        cut = split(sizes, limit_bytes)
        self.headers: dict[str, bytes] = {}  # of each file
        self.places: dict[str, TensorPlace] = {}
        for number, names in enumerate(cut, start=1):
            file = (
                WEIGHTS_NAME
                if len(cut) == 1
                else f"model-{number:05d}-of-{len(cut):05d}.safetensors"
            )
            header = files.safetensors_header(
                {name: (self._dtype(name), shapes[name]) for name in names}, {"format": "pt"}
            )
            self.headers[file], offset = header, len(header)
            for name in names:
                self.places[name] = TensorPlace(file, offset, shapes[name])
                offset += sizes[name]

    def _dtype(self, name: str) -> torch.dtype:
        return torch.float32 if always_fp32(name, self._architecture) else self.dtype

    def create(self, folder: Path) -> None:
        """Create the folder, and the files with their headers and constants."""
        self._folder = folder
        folder.mkdir()
        for file, header in self.headers.items():
            with files.new_file(folder / file) as write:
                write(memoryview(header))
        for constant in self._constants:
            self._write(constant.name, torch.full((math.prod(constant.shape),), constant.value))

    def write(self, name: str, values: Tensor) -> None:
        """Write one of our full parameters, on any device and of any dtype, rounding to nearest."""
        assert name in self._missing, f"{name} is written twice, or is not a parameter"
        self._missing.discard(name)
        for their_name, parts in by_tensor(self._pieces[name]).items():
            if self.overflow:
                return
            self._write(their_name, their_tensor(values, parts).reshape(-1))
        self.progress.add(self.num_bytes[name])

    def _write(self, name: str, flat: Tensor) -> None:
        """Write a tensor's values, rounded, in chunks."""
        place, dtype = self.places[name], self._dtype(name)
        assert flat.numel() == math.prod(place.shape), (name, flat.numel(), place.shape)
        descriptor = os.open(self._folder / place.file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            offset = place.offset
            for chunk in flat.detach().split(files.CHUNK_BYTES // 4):
                rounded = chunk.to(dtype)
                if dtype != torch.float32 and not are_finite([rounded])[0]:
                    self.overflow = f"{name} has a weight of {float(chunk.abs().max()):g}"
                    return
                data = rounded.cpu().contiguous().view(torch.uint8).numpy().data
                while data:
                    count = os.pwrite(descriptor, data, offset)
                    data, offset = data[count:], offset + count
        finally:
            os.close(descriptor)

    def finish(
        self,
        tokenizer_file: str | Path | None,
        origin: Mapping[str, Any] = MappingProxyType({}),
        trained: TrainingSummary | None = None,
        training: Mapping[str, Any] = MappingProxyType({}),
        keep_class: bool = False,
    ) -> None:
        """Add index, configuration, tokenizer and model card, and sync everything before
        publishing.

        origin: see `read_origin`. keep_class: see `copy_tokenizer`. trained: for the card.
        training: for config.json, see `saved_state.TRAINING`.
        """
        assert not self._missing, f"missing weights: {sorted(self._missing)[:5]}"
        assert not self.overflow, self.overflow
        if len(self.headers) > 1:
            weight_map = {name: self.places[name].file for name in sorted(self.places)}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            _write_json(self._folder / INDEX_NAME, index)
        found = (
            {}
            if tokenizer_file is None
            else copy_tokenizer(tokenizer_file, self._folder, keep_class)
        )
        model = Path(self.config.source.pretrained_checkpoint_path or "", "tokenizer.model")
        if found and model.is_file():  # without the data's tokenizer, none was copied
            shutil.copyfile(model, self._folder / model.name)
        is_trained = bool(training)
        ids = special_ids(origin.get("ids", {}), found, is_trained)
        content = hugging_face_config(self.config, ids) | (
            {TRAINING_KEY: dict(training)} if is_trained else {}
        )
        _write_json(self._folder / CONFIG_NAME, content)
        text = (
            "" if tokenizer_file is None else (self._folder / "tokenizer.json").read_text("utf-8")
        )
        compared = trained is not None and trained.compared
        if (
            not compared
            and content["model_type"] == "qwen2"
            and text
            and json.dumps(QWEN_PATTERN) not in text
        ):
            files.logger.warning(
                "AutoTokenizer splits text of every qwen2 model like Qwen's; load the tokenizer of this export with "
                "transformers.PreTrainedTokenizerFast.from_pretrained(FOLDER)"
            )
        stated = origin.get("generation") or {"_from_model_config": True, **ids}
        stated = stated | special_ids(stated, found, is_trained)
        generation = {key: value for key, value in stated.items() if value is not None}
        _write_json(self._folder / GENERATION_NAME, generation)
        card = model_card(
            self.config, content["model_type"], *self._numels, trained, origin.get("card")
        )
        files.write_text(self._folder / CARD_NAME, card)
        sync_files(self._folder)


def split(sizes: Mapping[str, int], limit_bytes: int) -> list[list[str]]:
    """Split tensors, in order, into files of at most `limit_bytes`; larger tensors get their own
    file.

    Source: `split_torch_state_dict_into_shards` of huggingface_hub.
    """
    cut: list[list[str]] = []
    current: list[str] = []
    current_bytes = 0
    for name, size in sizes.items():
        if size > limit_bytes:
            cut.append([name])
            continue
        if current_bytes + size > limit_bytes:
            cut.append(current)
            current, current_bytes = [], 0
        current.append(name)
        current_bytes += size
    return [*cut, current] if current else cut


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders layer 2 before layer 10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)
    ]


def their_tensor(values: Tensor, parts: Sequence[MappedRows]) -> Tensor:
    """Assemble a Hugging Face tensor from our parameter's rows: a view if possible, else a copy on
    the host."""
    first = parts[0]
    if len(parts) == 1:
        ours = values[first.first_row : first.first_row + first.rows]
        ours = ours.t() if first.transposed else ours
        return ours.float() + first.plus if first.plus else ours
    made = torch.empty(first.their_shape, dtype=values.dtype)
    for piece in parts:
        piece.place(made, values).copy_(values[piece.first_row : piece.first_row + piece.rows])
    return made


def _write_json(path: Path, content: dict[str, Any]) -> None:
    files.write_text(path, json.dumps(content, indent=2) + "\n")
