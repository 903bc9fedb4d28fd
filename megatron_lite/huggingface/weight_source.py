"""Model weights in files, read slice by slice: a rank reads only its shards, a converter one parameter at a time.

A source knows where its files hold each element of our parameters, and has one chunk in memory at a time.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.files import Files
from megatron_lite.checkpoint.manifest import SavedParameter
from megatron_lite.checkpoint.names import reason
from megatron_lite.checkpoint.reading import read_elements
from megatron_lite.config import ModelConfig
from megatron_lite.errors import CheckpointError, DamagedError, shorten
from megatron_lite.huggingface import model_folder
from megatron_lite.tiles import Tile

ADVICE = "restore it or download it again"


class WeightSource(contextlib.AbstractContextManager["WeightSource"]):
    """A model's weights in a folder.

    Call `check` with the shapes of the model's parameters first, then `read`; `verify` looks for damage.
    """

    kind: str  # one of model_folder.KINDS
    model: ModelConfig  # the resolved model that the files describe
    iteration: int | None = None  # of our checkpoints
    model_type: str | None  # its Hugging Face architecture, or the requested one for exports; None: any
    description: str  # a few words for the log
    dtype: str  # fp32, bf16 or fp16: the dtype intended for use

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = Files(folder, follow_links=self.kind == "huggingface")

    @abc.abstractmethod
    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the files hold exactly the weights of a model with these parameters.

        Raises:
            CheckpointError: names missing, unexpected and misshapen parameters.
        """

    @abc.abstractmethod
    def damage(self, rank: int = 0, world_size: int = 1) -> str | None:
        """Return any damage in this rank's share of the values to read. Call `check` first."""

    def verify(self) -> None:
        """Check the files for damage, reading all values once.

        Raises:
            CheckpointError: if there is any.
        """
        if (problem := self.damage()) is not None:
            raise CheckpointError(f"{self.folder}: {problem}; {ADVICE}")

    def read(self, name: str, first: int, target: Tensor) -> None:
        """Fill `target` (n,), on any device and of any dtype, with elements of a flattened parameter from `first` on.

        Raises:
            CheckpointError: if a file can no longer be read.
        """
        self.read_tile(name, Tile.run(first, target.numel()), target)

    def read_tile(self, name: str, tile: Tile, target: Tensor) -> None:
        """Like `read`, for any tile of a parameter."""
        with self._reported():
            self._read(name, tile, target)

    @abc.abstractmethod
    def _read(self, name: str, tile: Tile, target: Tensor) -> None:
        """Implement `read_tile`; may raise OSError and DamagedError."""

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
            raise CheckpointError(f"{self.folder}: does not fit the model: {shorten(problems)}; {fix}")


class CheckpointSource(WeightSource):
    """One of our checkpoints. With `average`, reads running averages instead of weights, except of frozen parameters.

    state: `damage` also checks moments and averages, for `read_state`.

    Raises:
        DamagedError: if the manifest is unusable, or a file is missing or has another size.
        CheckpointError: if it has options unknown to this version, or lacks averages.
    """

    kind = "distributed"

    def __init__(self, folder: Path, average: bool = False, state: bool = False) -> None:
        super().__init__(folder)
        self.content = manifest.read(folder, int(folder.name) if folder.name.isdecimal() else None)
        files.check_sizes(folder, self.content)
        self.iteration, config = self.content.iteration, self.content.config
        self.model = model_folder.resolved_model(model_folder.checkpoint_values(config, str(folder)), str(folder))
        self.model_type = model_folder.saved_model_type(config)
        self.description = f"a checkpoint of iteration {self.iteration:,}"
        self.dtype = config.get("training_dtype", "fp32")
        self.averaged, self._state = average, state
        self._good_share: tuple[int, int] | None = None  # (rank, world size) whose share is verified
        if average and not any("average" in saved.slices for saved in self.content.parameters.values()):
            raise CheckpointError(f"{folder}: it holds no averaged weights (it was trained without --ema_type)")

    def check(self, shapes: Mapping[str, tuple[int, ...]], partial: bool = False) -> None:
        """See `WeightSource.check`. partial: ignore the checkpoint's other parameters."""
        self._refuse(
            self.content.misfits(shapes, partial), "give the flags it was trained with, or no flags of the model"
        )

    def damage(self, rank: int = 0, world_size: int = 1) -> str | None:
        """See `WeightSource.damage`. Reads only the blocks to be used, or nothing if the share is already verified."""
        if self._good_share == (rank, world_size):
            return None
        parameters = dict(self.content.parameters)
        if not self._state:
            for name, saved in parameters.items():
                kind = self._weights_kind(saved)
                parameters[name] = replace(saved, slices={kind: saved.slices[kind]})
        places = replace(self.content, parameters=parameters).places()
        wanted = [item for name in self.content.files for item in places.get(name, ())]
        first, end = (len(wanted) * share // world_size for share in (rank, rank + 1))
        try:
            for name, group in itertools.groupby(wanted[first:end], key=lambda item: item[0].file):
                file, slices = self.content.files[name], list(group)
                numbers = {number for piece, _ in slices for number in file.blocks_around(piece.offset, piece.end)}
                files.check_blocks(self.folder, name, file, sorted(numbers), slices)
        except DamagedError as error:
            return str(error)
        self._good_share = rank, world_size
        return None

    def _weights_kind(self, saved: SavedParameter) -> str:
        return "average" if self.averaged and "average" in saved.slices else "weights"

    def _read(self, name: str, tile: Tile, target: Tensor) -> None:
        saved = self.content.parameters[name]
        read_elements(self._files, saved, self._weights_kind(saved), tile, target)

    def read_state(self, name: str, kind: str, tile: Tile, target: Tensor) -> None:
        """Read one of `manifest.KINDS`, which the checkpoint must hold, like `read_tile`."""
        assert self._state, "it was not verified"
        with self._reported():
            read_elements(self._files, self.content.parameters[name], kind, tile, target)
