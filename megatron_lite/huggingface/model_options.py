"""The model that a folder of pretrained weights states: config.json or our manifest -> values of `ModelConfig`.

`config.json` is understood by `architectures.model_values`; here values are held against the options' own types, bounds
and rules, because a file is as little to be trusted as a command line. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron_lite.config import BatchConfig, Config, ModelConfig, flatten
from megatron_lite.config.training import MODEL_TYPES
from megatron_lite.config.values import FLAGS, Flag
from megatron_lite.errors import CheckpointError
from megatron_lite.huggingface import folder_kind
from megatron_lite.huggingface.architectures import model_values
from megatron_lite.validation import examine

_NUM_NAMED = 5  # problems that an error message names at most, beside the first
MODEL_OPTIONS = tuple(field.name for field in dataclasses.fields(ModelConfig))


def hugging_face_values(folder: Path) -> tuple[dict[str, Any], str]:
    """What config.json of a Hugging Face folder says, as it says it: options of the model; and its model_type.

    Raises:
        CheckpointError: if it cannot be read, or names or means what this program does not know.
    """
    content = folder_kind.read_object(folder, folder_kind.CONFIG_NAME, folder_kind.MOST_CONFIG_BYTES)
    try:
        values = model_values(content)
    except CheckpointError as error:
        first, *others = str(error).splitlines()
        rest = [line.removeprefix(f"{line.partition(': ')[0]}: ") for line in others]  # without the name of the file
        more = f" (and {len(rest) - _NUM_NAMED} more)" if len(rest) > _NUM_NAMED else ""
        raise CheckpointError(f"{folder}: {'; '.join([first, *rest[:_NUM_NAMED]])}{more}") from None
    check_types(values, f"{folder}: {folder_kind.CONFIG_NAME}")
    return values, content["model_type"]


def checkpoint_values(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The options of the model in the flat configuration that one of our checkpoints holds.

    Options that it is too old to know have their defaults.

    Raises:
        CheckpointError: if it has options that this version does not know, or impossible values.
    """
    unknown = [name for name in config if name not in FLAGS]
    if unknown:
        raise CheckpointError(
            f"{where}: it was saved with options that this version of the program does not know: "
            f"{', '.join(name[:50] for name in unknown[:5])}; use the version that saved it"
        )
    values = {name: config[name] for name in MODEL_OPTIONS if name in config}
    check_types(values, where)
    return values


def saved_model_type(config: dict[str, Any]) -> str | None:
    """The --export_model_type of a checkpoint's flat configuration; None: it names none that this version knows."""
    name = config.get("export_model_type")
    return name if name in MODEL_TYPES else None


def resolved_model(values: dict[str, Any], where: str) -> ModelConfig:
    """The model with everything filled in that follows from these values.

    Raises:
        CheckpointError: if they are out of bounds, or contradict each other.
    """
    model = ModelConfig(**values)
    positions = model.max_position_embeddings or BatchConfig.sequence_length
    batch = BatchConfig(sequence_length=max(1, min(BatchConfig.sequence_length, positions)))
    resolved, problems = examine(Config(model=model, batch=batch), 1)
    for problem in problems:
        if not set(MODEL_OPTIONS).isdisjoint(problem.names):
            raise CheckpointError(f"{where}: it describes a model that cannot be built: {problem.message}")
    return resolved.model


def resolved_values(values: dict[str, Any], where: str) -> dict[str, Any]:
    """`resolved_model` as {option: value}.

    Raises:
        CheckpointError: as that.
    """
    return model_options(Config(model=resolved_model(values, where)))


def model_options(config: Config) -> dict[str, Any]:
    """The options of the model of a configuration."""
    values = flatten(config)
    return {name: values[name] for name in MODEL_OPTIONS}


def check_types(values: dict[str, Any], where: str) -> None:
    """Every value is of the type of its option.

    Raises:
        CheckpointError: naming the first that is not.
    """
    for name, value in values.items():
        if not _fits(FLAGS[name], value):
            raise CheckpointError(f"{where}: {name} is {str(value)[:50]!r}, which is no {FLAGS[name].kind}")


def _fits(flag: Flag, value: Any) -> bool:
    if value is None:
        return flag.optional
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
    return type(value) in kinds[flag.kind]
