"""The model that a folder of pretrained weights describes: config.json or our manifest -> values of `ModelConfig`.

`config_file.model_values` translates config.json. This module checks values against the types, bounds and rules of our
options, because files deserve no more trust than a command line. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron_lite.config import BatchConfig, Config, ModelConfig
from megatron_lite.config.training import MODEL_TYPES
from megatron_lite.config.values import FLAGS
from megatron_lite.errors import CheckpointError, shorten
from megatron_lite.huggingface import folder_kind
from megatron_lite.huggingface.config_file import model_values
from megatron_lite.validation import examine

MODEL_OPTIONS = tuple(field.name for field in dataclasses.fields(ModelConfig))


def hugging_face_values(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the model options in config.json, unresolved, and its model_type.

    Raises:
        CheckpointError: if it cannot be read or has unsupported keys or values.
    """
    content = folder_kind.read_object(folder, folder_kind.CONFIG_NAME)
    try:
        return model_values(content), content["model_type"]
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {shorten(str(error).splitlines(), 6)}") from None


def checkpoint_values(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the model options in a manifest's flat configuration, whose values are already checked.

    Raises:
        CheckpointError: if it has options that this version does not know.
    """
    unknown = [name for name in config if name not in FLAGS]
    if unknown:
        raise CheckpointError(
            f"{where}: it was saved with options that this version of the program does not know: "
            f"{', '.join(name[:50] for name in unknown[:5])}; use the version that saved it"
        )
    return {name: config[name] for name in MODEL_OPTIONS if name in config}


def saved_model_type(config: dict[str, Any]) -> str | None:
    """Return the --export_model_type of a checkpoint's flat configuration, if this version knows it."""
    name = config.get("export_model_type")
    return name if name in MODEL_TYPES else None


def resolved_model(values: dict[str, Any], where: str) -> ModelConfig:
    """Return the model with these options and all derived ones.

    Raises:
        CheckpointError: if the values are out of bounds or contradict each other.
    """
    model = ModelConfig(**values)
    positions = model.max_position_embeddings or BatchConfig.sequence_length
    batch = BatchConfig(sequence_length=max(1, min(BatchConfig.sequence_length, positions)))
    resolved, problems = examine(Config(model=model, batch=batch), 1)
    for problem in problems:
        if not set(MODEL_OPTIONS).isdisjoint(problem.names):
            raise CheckpointError(f"{where}: it describes a model that cannot be built: {problem.message}")
    return resolved.model


def as_values(model: ModelConfig) -> dict[str, Any]:
    """Return a model as {option: value}."""
    return {name: getattr(model, name) for name in MODEL_OPTIONS}
