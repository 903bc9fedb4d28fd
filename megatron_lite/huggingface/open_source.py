"""Pretrained weights to be read slice by slice: a Hugging Face folder, or one of our checkpoints.

A source knows where each element of each of our parameters lies in its files; whoever needs some, a rank its shards or
a converter a whole parameter, asks for just those. Nothing else is ever in memory but one chunk of a file.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.names import MANIFEST_NAME
from megatron_lite.checkpoint.reading import Files, find_checkpoints, read_elements
from megatron_lite.config import Config, ModelConfig
from megatron_lite.errors import CheckpointError, DamagedError
from megatron_lite.huggingface import folder_kind, model_options

_NUM_NAMED = 5  # tensors that an error message names at most


class WeightSource(abc.ABC):
    """Weights of a model in some files.

    First `check` with the shapes of the model's parameters, then `read`; `verify` where damage must be found. `kind` is
    one of `folders.KINDS`, `model` the resolved model that the files state, `model_type` the Hugging Face architecture
    that it has there, or would be exported as (None: any).
    """

    kind: str
    model: ModelConfig
    model_type: str | None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = Files(folder)

    def values(self) -> dict[str, Any]:
        """The options of the model that the files state, everything filled in."""
        return model_options.model_options(Config(model=self.model))

    @abc.abstractmethod
    def describe(self) -> str:
        """What it is, in a few words."""

    @abc.abstractmethod
    def dtype(self) -> str:
        """fp32, bf16 or fp16, in which the weights are meant to be used."""

    @abc.abstractmethod
    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Everything that a model of these parameters needs is there, and nothing is left over.

        Raises:
            CheckpointError: naming what is not.
        """

    @abc.abstractmethod
    def damage(self, rank: int = 0, world_size: int = 1) -> str | None:
        """What is damaged inside the files, in this rank's part of them; to be called after `check`."""

    def verify(self) -> None:
        """Look for damage inside the files; reads all of them.

        Raises:
            CheckpointError: if there is any.
        """
        if (problem := self.damage()) is not None:
            raise CheckpointError(f"{self.folder}: {problem}; restore or download it again")

    def read(self, name: str, first: int, target: Tensor) -> None:
        """Fill `target` (n,), on any device, with the elements of a flattened parameter from `first` on, in its dtype.

        Raises:
            CheckpointError: if a file cannot be read any more.
        """
        with self._reported():
            self._read(name, first, target)

    @abc.abstractmethod
    def _read(self, name: str, first: int, target: Tensor) -> None:
        """As `read`, but raises OSError and DamagedError."""

    def close(self) -> None:
        """Close what is open."""
        self._files.close()

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Errors of files as one line."""
        try:
            yield
        except DamagedError as error:
            raise CheckpointError(f"{self.folder}: {error}; restore or download it again") from None
        except OSError as error:
            name = Path(error.filename).name if isinstance(error.filename, str) else "a file"
            raise CheckpointError(
                f"{self.folder}: {name}: {folder_kind.reason(error)}; restore or download it again"
            ) from None

    def _refuse(self, problems: list[str], fix: str) -> None:
        """One line for all that is wrong, if anything is."""
        if problems:
            more = f" (and {len(problems) - _NUM_NAMED} more)" if len(problems) > _NUM_NAMED else ""
            raise CheckpointError(
                f"{self.folder}: does not fit the model: {'; '.join(problems[:_NUM_NAMED])}{more}; {fix}"
            )


class CheckpointSource(WeightSource):
    """One of our checkpoints. `average`: the running averages of its weights instead of the weights; frozen parameters
    have none, and do not change. `averaged` says which they are.

    Raises:
        DamagedError: if its manifest is not usable, or a file is missing or of another size.
        CheckpointError: if this version does not know its options, or there are no averages.
    """

    kind = "distributed"

    def __init__(self, folder: Path, average: bool = False) -> None:
        super().__init__(folder)
        self.content = manifest.read(folder)
        if folder.name.isdecimal() and int(folder.name) != self.content.iteration:
            raise DamagedError(f"{manifest.MANIFEST_NAME}: it is of iteration {self.content.iteration}")
        for name, file in self.content.files.items():
            try:
                with files.open_regular(folder / name) as opened:
                    size = opened.seek(0, 2)
            except OSError as error:
                raise DamagedError(f"{name}: {folder_kind.reason(error)}") from None
            if size != file.size:
                raise DamagedError(f"{name}: {size:,} bytes, the manifest says {file.size:,}")
        saved = model_options.checkpoint_values(self.content.config, str(folder))
        self.model = model_options.resolved_model(saved, str(folder))
        self.model_type = model_options.saved_model_type(self.content.config)
        self.averaged = average
        if average and not any("average" in saved.slices for saved in self.content.parameters.values()):
            raise CheckpointError(f"{folder}: it holds no averaged weights (it was trained without --ema_type)")

    def describe(self) -> str:
        return f"a checkpoint of iteration {self.content.iteration:,}"

    def dtype(self) -> str:
        """That of its run."""
        return str(self.content.config.get("training_dtype", "fp32"))

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See `WeightSource.check`."""
        saved = {name: parameter.shape for name, parameter in self.content.parameters.items()}
        problems = [f"{name} is not in it" for name in shapes if name not in saved]
        problems += [
            f"{name} has shape {list(saved[name])}, the model's has {list(shape)}"
            for name, shape in shapes.items()
            if name in saved and saved[name] != tuple(shape)
        ]
        problems += [f"{name} is not in the model" for name in saved if name not in shapes]
        self._refuse(problems, "give the flags it was trained with, or none of the model's: it knows them")

    def damage(self, rank: int = 0, world_size: int = 1) -> str | None:
        try:
            for name in list(self.content.files)[rank::world_size]:
                manifest.check_file(self.folder, name, self.content)
        except DamagedError as error:
            return str(error)
        return None

    def _read(self, name: str, first: int, target: Tensor) -> None:
        saved = self.content.parameters[name]
        kind = "average" if self.averaged and "average" in saved.slices else "weights"
        read_elements(self._files, saved, kind, first, target)

    def read_state(self, name: str, kind: str, first: int, target: Tensor) -> None:
        """As `read`, of one of the optimizer's moments, which the checkpoint must hold."""
        with self._reported():
            read_elements(self._files, self.content.parameters[name], kind, first, target)


def source_folders(folder: Path, kind: str | None = None) -> tuple[str, list[Path]]:
    """The kind of weights in a folder, and where they are: of several checkpoints the newest first.

    Raises:
        CheckpointError: if there is nothing to be read.
    """
    found = folder_kind.kind_of(folder, kind)
    try:
        if found == "huggingface" or (folder / MANIFEST_NAME).exists():
            return found, [folder]
        return found, [path for _, path in find_checkpoints(folder)]
    except OSError as error:
        raise CheckpointError(f"{folder}: {folder_kind.reason(error)}; give a folder that can be read") from None


def open_one(folder: Path, kind: str, model: ModelConfig | None = None, weights: str = "raw") -> WeightSource:
    """The source in just this folder; see `open_source`.

    Raises:
        DamagedError: if it is a checkpoint of ours that is damaged.
        CheckpointError: if it cannot be used.
    """
    if kind == "distributed":
        return CheckpointSource(folder, weights == "average")
    if weights == "average":
        raise CheckpointError(f"{folder}: a Hugging Face folder has one set of weights; leave --weights=average out")
    from megatron_lite.huggingface.weight_source import HuggingFaceSource

    return HuggingFaceSource(folder, model)


def open_source(
    folder: Path, kind: str | None = None, model: ModelConfig | None = None, weights: str = "raw"
) -> WeightSource:
    """Open a Hugging Face folder, a checkpoint of ours, or the newest good one of a folder of checkpoints.

    Args:
        kind: one of `folders.KINDS`; None: what the folder holds.
        model: the resolved model that is to be filled; None: that which the files state.
        weights: raw, or average: those that a checkpoint of ours keeps beside.

    Raises:
        CheckpointError: if there is none; says what to do.
    """
    found, paths = source_folders(folder, kind)
    problems = []
    for path in paths:
        try:
            return open_one(path, found, model, weights)
        except DamagedError as error:
            problems.append(f"{path.name}: {error}" if len(paths) > 1 else str(error))
    raise unusable(folder, problems)


def unusable(folder: Path, problems: list[str]) -> CheckpointError:
    """None of the checkpoints in a folder is any good."""
    return CheckpointError(f"{folder}: no usable checkpoint: {'; '.join(problems[:_NUM_NAMED])}; restore it")
