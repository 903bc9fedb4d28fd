"""What a folder of pretrained weights holds, before anything heavy is imported.

Two kinds are read: `huggingface` (config.json beside safetensors files) and `distributed` (checkpoints of this
program). Everything else is refused by name with the way out of it. A folder is untrusted input: its files may be
links, as in the cache of the Hugging Face hub, but names that an index gives must be those of files in the folder
itself, JSON has a size, and pickles are never opened. Every message begins with the folder. Imports no torch.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.names import MANIFEST_NAME, without_repeated
from megatron_lite.errors import CheckpointError

KINDS = ("huggingface", "distributed")
CONFIG_NAME = "config.json"
WEIGHTS_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
MOST_CONFIG_BYTES, MOST_INDEX_BYTES = 2**22, 2**26

_ITERATION = re.compile(r"0|[1-9][0-9]{0,17}|\.ready-[0-9]+-[0-9a-f]{16}")
_PICKLE = re.compile(r".*\.(bin|pt|pth|ckpt|pkl|pickle)(\.index\.json)?")
_OTHER_FORMAT = re.compile(r".*\.(gguf|ggml|h5|msgpack|onnx|npz)|consolidated.*\.safetensors|params\.json")
_SHOWN = 100  # characters of a name that a message shows


def kind_of(folder: Path, kind: str | None = None) -> str:
    """One of KINDS: what the folder holds. `kind`: what it should.

    Raises:
        CheckpointError: if it cannot be read, or holds something else.
    """
    names = _names(folder)
    try:
        found = _found(folder, names)
        if found is not None and kind in (None, found):
            return found
        raise CheckpointError(f"{folder}: {_what_else(folder, names, kind, found)}")
    except OSError as error:
        raise CheckpointError(f"{folder}: {_unreadable(folder, error)}") from None


def _names(folder: Path) -> set[str]:
    """The names in a folder."""
    try:
        return set(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: {_unreadable(folder, error)}") from None


def _unreadable(folder: Path, error: OSError) -> str:
    if error.errno == errno.ENOTDIR and folder.is_file():
        return "this is a file; give the folder that it is in"
    if error.errno == errno.ENOENT and not os.path.lexists(folder):
        if folder.is_absolute() or len(folder.parts) > 2:  # names on the hub are owner/model
            return "there is no such folder; give one that holds a model"
        return (
            "there is no such folder; if this is the name of a model on the hub, download it first (hf download "
            f"{str(folder)[:_SHOWN]} --local-dir FOLDER) and give that folder: nothing is downloaded here"
        )
    return f"{error.strerror or error}; give a folder that can be read"


def _found(folder: Path, names: set[str]) -> str | None:
    if MANIFEST_NAME in names:
        return "distributed"
    if _is_experiment(names):
        return None
    if names & {CONFIG_NAME, WEIGHTS_NAME, INDEX_NAME} or any(_PICKLE.fullmatch(name) for name in names):
        return "huggingface"
    iterations = [folder / name for name in names if _ITERATION.fullmatch(name) and (folder / name).is_dir()]
    return "distributed" if iterations and not any((path / CONFIG_NAME).exists() for path in iterations) else None


def _is_experiment(names: set[str]) -> bool:
    """Whether these are the names in the directory of a run of this program, whose config.json is our own."""
    return "runs" in names and bool(names & {"checkpoints", "exit.json"}) and not names & {WEIGHTS_NAME, INDEX_NAME}


def _what_else(folder: Path, names: set[str], kind: str | None, found: str | None) -> str:
    """Why it is not what it should be, and what to write instead."""
    if found is not None:
        return f"it holds no {kind} weights but {found} ones; write {found} as its type, or leave the type out"
    if not names:
        return "the folder is empty; give one that holds a model"
    if _is_experiment(names):
        return f"this is an experiment directory; give {folder / 'checkpoints'}"
    if "snapshots" in names:
        return f"this is a model in the cache of the hub; give one of the folders in {folder / 'snapshots'}"
    inside = sorted((int(name) for name in names if name.isdecimal() and (folder / name).is_dir()), reverse=True)
    if inside:
        return f"this is a folder of exports; give one of them, such as {folder / str(inside[0])}"
    return (
        f"there is neither {CONFIG_NAME} with {WEIGHTS_NAME} (a Hugging Face model) nor {MANIFEST_NAME} (a checkpoint "
        "of this program) in it; give the folder that directly holds one of them"
    )


def weight_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The safetensors files of a Hugging Face folder, and what its index says: tensor -> file (empty without one).

    As transformers does, one model.safetensors is preferred to an index.

    Raises:
        CheckpointError: if there are none, or the index is not usable.
    """
    names = _names(folder)
    if "adapter_config.json" in names:
        raise CheckpointError(
            f"{folder}: it holds an adapter (adapter_config.json); merge it into its base model first (peft: "
            "merge_and_unload(), then save_pretrained()) and give the folder of the result"
        )
    if WEIGHTS_NAME in names:
        return [WEIGHTS_NAME], {}
    if INDEX_NAME in names:
        return _indexed(folder)
    raise CheckpointError(f"{folder}: {_no_weights(names)}")


def _no_weights(names: set[str]) -> str:
    pickles = sorted(name for name in names if _PICKLE.fullmatch(name))
    others = sorted(name for name in names if _OTHER_FORMAT.fullmatch(name))
    if pickles:
        return (
            f"{pickles[0][:_SHOWN]} is a pickle, which can run any code when it is loaded: never done here; convert it "
            "with transformers where you trust it: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained("
            "NEW_FOLDER, safe_serialization=True)"
        )
    if others:
        return f"{others[0][:_SHOWN]} is of a format that is not read; convert it to a Hugging Face safetensors folder"
    parts = sorted(name for name in names if name.endswith(".safetensors"))
    if parts:
        return f"there are {parts[0][:_SHOWN]} and others, but no {INDEX_NAME}: download that file, too"
    return f"there is neither {WEIGHTS_NAME} nor {INDEX_NAME}: download the weights, too"


def _indexed(folder: Path) -> tuple[list[str], dict[str, str]]:
    content = read_object(folder, INDEX_NAME, MOST_INDEX_BYTES)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder}: {INDEX_NAME}: weight_map is no object of tensors; download the file again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain(name):
            raise CheckpointError(
                f"{folder}: {INDEX_NAME}: {tensor[:_SHOWN]!r} should be in {str(name)[:_SHOWN]!r}, which is not the "
                "name of a safetensors file of this folder; download the file again"
            )
    return sorted(set(weight_map.values())), weight_map


def _is_plain(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9_.-]{1,200}\.safetensors", name) is not None and not name.startswith(".")


def read_object(folder: Path, name: str, most_bytes: int) -> dict[str, Any]:
    """A JSON object out of a regular file of at most so many bytes.

    Raises:
        CheckpointError: if it is anything else.
    """
    try:
        values = json.loads(_read_bytes(folder / name, most_bytes), object_pairs_hook=without_repeated)
    except OSError as error:
        raise CheckpointError(f"{folder}: {name}: {reason(error)}; download the folder again") from None
    except (ValueError, RecursionError) as error:  # of UTF-8 and JSON
        text = " ".join(str(error).split())[:_SHOWN]
        raise CheckpointError(f"{folder}: {name}: not readable ({text}); download the file again") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{folder}: {name}: not a JSON object; download the file again")
    return values


def reason(error: OSError) -> str:
    """The words of an error of the system."""
    return error.strerror or str(error)


def _read_bytes(path: Path, most_bytes: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is not waited for
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if status.st_size > most_bytes:
            raise ValueError(f"{status.st_size:,} bytes, at most {most_bytes:,} are read")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(most_bytes)
    finally:
        os.close(descriptor)
