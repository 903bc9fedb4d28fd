"""A folder of weights: its kind, and the model that it describes. Imports no torch.

The kind is `huggingface` (config.json and safetensors files) or `distributed` (checkpoints). In a
folder of several, or an experiment directory, the newest good one is used; anything else is
rejected by name, with a fix. A folder is untrusted input: its files may be links, as in the cache
of the Hugging Face hub, but an index may only name files in the folder itself, JSON size is
limited, and pickles are never opened. The model is checked like a command line, against the types,
bounds and rules of our options. Messages begin with the folder.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection
from pathlib import Path

from megatron_lite.checkpoint.compatibility import with_tuples
from megatron_lite.checkpoint.names import MANIFEST_NAME, find_checkpoints, parse_json, reason
from megatron_lite.config import BatchConfig, Config, JsonObject, ModelConfig, Options
from megatron_lite.config.training import MODEL_TYPES
from megatron_lite.config.values import FLAGS
from megatron_lite.errors import CheckpointError, shorten
from megatron_lite.huggingface.config_file import model_values, text_part
from megatron_lite.run.regular_files import read_bytes
from megatron_lite.validation import examine

KINDS = ("huggingface", "distributed")
CONFIG_NAME = "config.json"
WEIGHTS_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
ADAPTER_NAME = "adapter_config.json"
LIMIT_BYTES = {CONFIG_NAME: 2**22, INDEX_NAME: 2**26, ADAPTER_NAME: 2**22}

_PICKLE = re.compile(r".*\.(bin|pt|pth|ckpt|pkl|pickle)(\.index\.json)?")
_OTHER_FORMAT = re.compile(
    r".*\.(gguf|ggml|h5|msgpack|onnx|npz)|consolidated.*\.safetensors|params\.json"
)
_PLAIN = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,200}\.safetensors")
_SHOWN = 100  # characters of a name shown in a message


def source_folders(folder: Path, kind: str | None = None) -> list[tuple[str, Path]]:
    """Return the folder or the folders in it to read, each with its kind, one of KINDS.

    Several are sorted newest first; a checkpoint precedes the export of the same iteration.

    kind: the expected one; None: any.

    Raises:
        CheckpointError: if the folder cannot be read or contains something else.
    """
    names = _names(folder)
    try:
        found = _found(folder, names)
        if fitting := [pair for pair in found if kind in (None, pair[0])]:
            return fitting
        raise CheckpointError(
            f"{folder}: {_why_not(folder, names, kind, found[0][0] if found else None)}"
        )
    except OSError as error:
        raise CheckpointError(f"{folder}: {_unreadable(folder, error)}") from None


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: {_unreadable(folder, error)}") from None


def _unreadable(folder: Path, error: OSError) -> str:
    if error.errno == errno.ENOTDIR and folder.is_file():
        return "this is a file; give its folder"
    if error.errno == errno.ENOENT and not os.path.lexists(folder):
        if folder.is_absolute() or len(folder.parts) > 2:  # names on the hub are owner/model
            return "there is no such folder; give one that holds a model"
        return (
            "there is no such folder; if this is the name of a model on the hub, write "
            f"hf://{str(folder)[:_SHOWN]}, or download it (hf download) and give its folder"
        )
    return f"{reason(error)}; give a folder that can be read"


def _found(folder: Path, names: set[str]) -> list[tuple[str, Path]]:
    if MANIFEST_NAME in names:
        return [("distributed", folder)]
    is_run = is_experiment(names)
    if not is_run and (
        names & {CONFIG_NAME, WEIGHTS_NAME, INDEX_NAME} or any(map(_PICKLE.fullmatch, names))
    ):
        return [("huggingface", folder)]
    parents = [folder / "checkpoints", folder / "export"] if is_run else [folder]
    found = [item for parent in parents for item in find_checkpoints(parent)]
    paths = [path for _, path in sorted(found, key=lambda item: -item[0])]
    adapters = [path for path in [folder, *paths] if (path / ADAPTER_NAME).exists()]
    others = [path for path in paths if path not in adapters]
    if adapters and not others:
        raise CheckpointError(_adapter(adapters[0]))
    return [
        ("huggingface" if (path / CONFIG_NAME).exists() else "distributed", path) for path in others
    ]


def is_experiment(names: Collection[str]) -> bool:
    """Return whether these names are an experiment directory's, whose config.json is our own."""
    ours = {"checkpoints", "metrics.jsonl"}.intersection(names) or {"runs", "exit.json"}.issubset(
        names
    )
    return bool(ours) and not {WEIGHTS_NAME, INDEX_NAME}.intersection(names)


def _why_not(folder: Path, names: set[str], kind: str | None, found: str | None) -> str:
    """Return why a folder is not of the expected kind, and what to give instead."""
    if found is not None:
        return f"it holds {found} weights, not {kind} ones; write {found} as its type, or leave the type out"
    if not names:
        return "the folder is empty; give one that holds a model"
    if is_experiment(names):
        return "this is an experiment directory without a checkpoint or an export yet; give another, or let it save one"
    if "snapshots" in names:
        return f"this is a model in the cache of the hub; give one of the folders in {folder / 'snapshots'}"
    return (
        f"it holds neither {CONFIG_NAME} with {WEIGHTS_NAME} (a Hugging Face model) nor {MANIFEST_NAME} (a checkpoint "
        "of this program); give the folder that directly holds one of them"
    )


def base_of(folder: Path, stated: object) -> Path:
    """Return the folder of the model that the adapters in a folder belong to. stated: what they say.

    Raises:
        CheckpointError: if it is not here.
    """
    if isinstance(stated, str | Path) and os.path.isdir(stated):
        return Path(stated)
    raise CheckpointError(
        f"{folder}: it holds adapters to a model that is not here ({stated or 'not named'}); convert_checkpoint "
        "takes the model's folder as --base, and merges both"
    )


def _adapter(folder: Path) -> str:
    return (
        f"{folder}: it holds an adapter ({ADAPTER_NAME}); give its model's folder (training takes the adapter as "
        f"--pretrained_adapter), or the merged model, which convert_checkpoint --from={folder} writes"
    )


def weight_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the safetensors files of a Hugging Face folder and its index, tensor -> file; {}
    without an index.

    Like transformers, prefer model.safetensors to an index.

    Raises:
        CheckpointError: if there are no weights or the index is unusable.
    """
    names = _names(folder)
    if ADAPTER_NAME in names:
        raise CheckpointError(_adapter(folder))
    if WEIGHTS_NAME in names:
        return [WEIGHTS_NAME], {}
    if INDEX_NAME in names:
        return _indexed(folder)
    raise CheckpointError(f"{folder}: {_no_weights(names)}")


def _no_weights(names: set[str]) -> str:
    for name in sorted(filter(_PICKLE.fullmatch, names)):
        return (
            f"{name[:_SHOWN]} is a pickle, which can run any code when loaded and is never opened; if you trust it, "
            "convert it with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER, "
            "safe_serialization=True)"
        )
    for name in sorted(filter(_OTHER_FORMAT.fullmatch, names)):
        return f"{name[:_SHOWN]} is in an unsupported format; convert it to a Hugging Face safetensors folder"
    for name in sorted(name for name in names if name.endswith(".safetensors")):
        return f"it holds {name[:_SHOWN]} and others, but no {INDEX_NAME}; download that file, too"
    return f"it holds neither {WEIGHTS_NAME} nor {INDEX_NAME}; download the weights, too"


def _indexed(folder: Path) -> tuple[list[str], dict[str, str]]:
    weight_map = read_object(folder, INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{folder}: {INDEX_NAME}: weight_map is not a map of tensors; download the file again"
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _PLAIN.fullmatch(name):
            raise CheckpointError(
                f"{folder}: {INDEX_NAME}: it places {tensor[:_SHOWN]!r} in {str(name)[:_SHOWN]!r}, which is not the "
                "name of a safetensors file of this folder; download the file again"
            )
    return sorted(set(weight_map.values())), weight_map


def read_object(folder: Path, name: str) -> JsonObject:
    """Read a JSON object from a regular file of at most `LIMIT_BYTES[name]`.

    Raises:
        CheckpointError: if the file is anything else.
    """
    try:
        values = parse_json(read_bytes(folder / name, LIMIT_BYTES[name], follow_links=True))
    except OSError as error:
        raise CheckpointError(
            f"{folder}: {name}: {reason(error)}; download the folder again"
        ) from None
    except ValueError as error:
        raise CheckpointError(
            f"{folder}: {name}: not readable ({error}); download the file again"
        ) from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{folder}: {name}: not a JSON object; download the file again")
    return values


MODEL_OPTIONS = tuple(vars(ModelConfig()))


def hugging_face_values(folder: Path) -> tuple[Options, str]:
    """Return the model options in config.json, unresolved, and its model_type.

    Raises:
        CheckpointError: if it cannot be read or has unsupported keys or values.
    """
    content = text_part(read_object(folder, CONFIG_NAME))
    try:
        return model_values(content), content["model_type"]
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {shorten(str(error).splitlines(), 6)}") from None


def checkpoint_values(config: Options, where: str) -> Options:
    """Return the model options in a manifest's flat configuration, whose values, of JSON, are
    already checked.

    Raises:
        CheckpointError: if it has options that this version does not know.
    """
    unknown = [name for name in config if name not in FLAGS]
    if unknown:
        raise CheckpointError(
            f"{where}: it was saved with options that this version of the program does not know: "
            f"{', '.join(name[:50] for name in unknown[:5])}; use the version that saved it"
        )
    return with_tuples({name: config[name] for name in MODEL_OPTIONS if name in config})


def saved_model_type(config: Options) -> str | None:
    """Return the --export_model_type in a checkpoint's flat configuration, if this version knows
    it."""
    name = config.get("export_model_type")
    return name if name in MODEL_TYPES else None


def resolved_model(values: Options, where: str) -> ModelConfig:
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
            raise CheckpointError(
                f"{where}: it describes a model that cannot be built: {problem.message}"
            )
    return resolved.model
