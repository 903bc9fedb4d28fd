"""A model and its adapters as one source of weights: W + c B A, in fp32, to be rounded once."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpoint.compatibility import with_tuples
from megatron_lite.checkpoint.frozen_base import check_base, digest
from megatron_lite.config import unflatten
from megatron_lite.errors import CheckpointError
from megatron_lite.huggingface import adapter_folder
from megatron_lite.huggingface.architectures import check_exportable
from megatron_lite.huggingface.weight_source import (
    ADVICE,
    CheckpointSource,
    Shapes,
    WeightSource,
    read_whole,
)
from megatron_lite.model.adapters import add_adapters, add_products, is_of_adapter
from megatron_lite.model.gpt import build_gpt, linear_layers, parameters_of
from megatron_lite.parameter import DTYPES
from megatron_lite.tiles import Tile


class MergedSource(WeightSource):
    """The adapters in a folder, merged into a model.

    base: the model. adapters: a run's checkpoint, which knows its model by digest and rounded it to
    the training dtype; None: the folder is one of peft.

    Raises:
        CheckpointError: if the model has other parameters, or peft would compute something else.
    """

    kind = "distributed"  # of fp32 weights

    def __init__(
        self, folder: Path, base: WeightSource, adapters: CheckpointSource | None = None
    ) -> None:
        super().__init__(folder)
        self.base, self.adapters = base, adapters
        self.facts = facts = base if adapters is None else adapters
        self.model, self.model_type = facts.model, facts.model_type
        self.origin, self.training = facts.origin, facts.training
        self.dtype = facts.dtype
        what = "adapters" if adapters is None else f"adapters in {adapters.description}"
        self.description = f"{what}, merged into {base.folder}"
        if adapters is None:
            architecture = check_exportable(base.model, base.model_type)
            stated = adapter_folder.options_of(folder, base.model, architecture)
            known = vars(base.model) | {"export_model_type": architecture}
            config = unflatten({**known, **stated})
        else:
            config = unflatten(with_tuples(adapters.content.config))
        layers = build_gpt(self.model, 1)
        self._options = config.adapters
        adapted = add_adapters(linear_layers(layers), config)
        self._maps = [each for adapter in adapted for each in adapter.maps]
        self._specs = {parameter.spec.name: parameter.spec for parameter in parameters_of(layers)}
        shapes = {name: spec.shape for name, spec in self._specs.items()}
        of_adapters = {name: shape for name, shape in shapes.items() if is_of_adapter(name)}
        self._frozen = shapes.keys() - of_adapters
        base.check({name: shapes[name] for name in self._frozen})
        if adapters is None:
            self._values = adapter_folder.read(folder, config, self._maps, shapes)
        else:
            adapters.check(of_adapters)
            self._values = {
                name: read_whole(adapters, name, shape) for name, shape in of_adapters.items()
            }
        self._is_right = adapters is None  # the model, as far as is known

    def check(self, shapes: Shapes) -> None:
        """See `WeightSource.check`."""
        self.base.check(shapes)

    def damage(self, rank: int = 0, world_size: int = 1) -> str | None:
        """See `WeightSource.damage`.

        Raises:
            CheckpointError: if the model is damaged, or not the one that was adapted.
        """
        if self.adapters is not None and (found := self.adapters.damage(rank, world_size)):
            return found
        if problem := self.base.damage(rank, world_size):
            raise CheckpointError(f"{self.base.folder}: {problem}; {ADVICE}")
        if self.adapters is not None and not self._is_right:
            weights = ((name, self._frozen_weight(name)) for name in self._frozen)
            fix = f"{self.base.folder} is another model; give that of before (convert_checkpoint takes --base)"
            check_base(self.adapters.content.state, digest(weights), str(self.folder), fix)
            self._is_right = True
        return None

    def _read(self, name: str, tile: Tile, target: Tensor) -> None:
        whole = self._frozen_weight(name).float()
        add_products(name, whole, self._maps, self._values, self._options)
        target.view(tile.rows, tile.width).copy_(tile.view(whole.view(-1)))

    def _frozen_weight(self, name: str) -> Tensor:
        """Return a parameter of the model as training keeps it."""
        spec, is_rounded = self._specs[name], self.adapters is not None
        dtype = DTYPES[self.dtype] if is_rounded and not spec.is_state else torch.float32
        values = torch.empty(spec.shape, dtype=dtype)
        self.base.read(name, Tile.run(0, values.numel()), values.view(-1))
        return values

    def close(self) -> None:
        super().close()
        self.base.close()
        if self.adapters is not None:
            self.adapters.close()
