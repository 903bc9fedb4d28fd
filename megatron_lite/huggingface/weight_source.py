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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from megatron_lite.checkpoint import manifest
from megatron_lite.checkpoint.blocks import check_blocks, check_sizes
from megatron_lite.checkpoint.files import Files
from megatron_lite.checkpoint.manifest import SavedParameter
from megatron_lite.checkpoint.names import reason
from megatron_lite.checkpoint.reading import read_elements
from megatron_lite.checkpoint.saved_state import training_facts
from megatron_lite.config import JsonObject, ModelConfig
from megatron_lite.errors import CheckpointError, DamagedError, shorten
from megatron_lite.huggingface import model_folder
from megatron_lite.model.layer import Layer
from megatron_lite.parameter import Parameter
from megatron_lite.run.progress_line import ByteProgress
from megatron_lite.tiles import Tile

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
    facts: (
        WeightSource  # the one that describes the model: another than itself if adapters are merged
    )

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = self
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
            values = values.float() if spec.is_state else values
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
