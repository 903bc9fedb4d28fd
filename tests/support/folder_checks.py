"""Expected content of pretrained folders, by transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_lite.config import BatchConfig, Config, DataConfig, DistributedConfig, ModelConfig
from megatron_lite.huggingface import weight_map
from megatron_lite.huggingface.config_file import model_values
from megatron_lite.huggingface.load_pretrained import open_source
from megatron_lite.huggingface.weight_source import WeightSource
from megatron_lite.model.gpt import build_gpt, shapes_of
from megatron_lite.tiles import Tile
from megatron_lite.validation import resolve
from tests.support.families import SEQUENCE_LENGTH, load_model, make_config

Shapes = dict[str, tuple[int, ...]]
Weights = dict[str, torch.Tensor]


def resolved_config(values: dict[str, Any], dtype: str = "fp32") -> Config:
    """Return a resolved configuration for short samples of a model with these options."""
    batch, data = BatchConfig(sequence_length=SEQUENCE_LENGTH), DataConfig(dataset_source="random")
    distributed = DistributedConfig(training_dtype=dtype)
    return resolve(
        Config(model=ModelConfig(**values), batch=batch, data=data, distributed=distributed), 1
    )


def our_config(family: str, dtype: str = "fp32", **changes: Any) -> Config:
    """Return a resolved configuration with our model of one of `FAMILIES`; `changes` override its
    options."""
    values = model_values(json.loads(make_config(family).to_json_string(use_diff=False)))
    return resolved_config(values | changes, dtype)


def checked(folder: Path, **options: Any) -> tuple[WeightSource, Shapes]:
    """Open a folder, check that it holds everything its model needs, and return the source and the
    shapes."""
    source = open_source(folder, **options)
    shapes = shapes_of(build_gpt(source.model, 24))
    source.check(shapes)
    source.verify()
    return source, shapes


def read_whole(source: WeightSource, shapes: Shapes) -> Weights:
    """Read all parameters."""
    values = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for name, value in values.items():
        source.read(name, Tile.run(0, value.numel()), value.view(-1))
    return values


def expected(folder: Path, source: WeightSource, shapes: Shapes) -> Weights:
    """Return our parameters, assembled from the tensors that transformers loads."""
    assert source.model_type is not None
    return to_ours(load_model(folder).state_dict(), shapes, source.model_type, source.model)


def to_ours(
    theirs: Mapping[str, torch.Tensor], shapes: Shapes, architecture: str, model: ModelConfig
) -> Weights:
    """Return our parameters, assembled by the table from a state dict; rows missing from the table are
    NaN."""
    ours = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        for piece in weight_map.pieces(name, shape, architecture, model, in_memory=True):
            tensor = theirs[piece.name]
            assert tuple(tensor.shape) == piece.their_shape, piece
            rows = piece.place(tensor, ours[name])
            ours[name][piece.first_row : piece.first_row + piece.rows] = rows - piece.plus
    return ours
