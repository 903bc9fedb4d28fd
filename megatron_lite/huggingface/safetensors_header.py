"""The header of a safetensors file: the place of each tensor. The file is untrusted.

The safetensors library checks it: a length, a JSON header, and values that cover the rest of the file without gaps or
overlaps (https://github.com/huggingface/safetensors). This module adds what the library accepts or does not return.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megatron_lite.checkpoint.names import open_regular, parse_json
from megatron_lite.errors import DamagedError
from megatron_lite.parameter import SAFETENSORS_NAMES

# Dtypes that can become weights. Files may hold other tensors: masks, counters.
FLOATING = {"F64": torch.float64} | {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


class StoredTensor(NamedTuple):
    """The place of a tensor in a folder."""

    file: str
    offset: int  # of its first byte in the file
    num_bytes: int
    dtype: str  # as in the header
    shape: tuple[int, ...]


def read_header(folder: Path, name: str) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name.

    Raises:
        DamagedError: if it is not a complete safetensors file.
        OSError: if it cannot be read.
    """
    with open_regular(folder / name) as file:  # the library would block on a pipe
        size = os.fstat(file.fileno()).st_size
        try:
            with safe_open(folder / name, framework="np"):
                pass
            length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
            content = parse_json(os.pread(file.fileno(), length, 8))  # refuses repeated names, unlike the library
        except (SafetensorError, ValueError) as error:
            text = " ".join(str(error).split())[:200]
            raise DamagedError(f"{name}: not a complete safetensors file of {size:,} bytes ({text})") from None
    content.pop("__metadata__", None)
    tensors = {}
    for key, entry in content.items():
        if not isinstance(entry, dict) or not isinstance(entry["dtype"], str):  # the library takes other JSON, too
            raise DamagedError(f"{name}: the header entry of {key[:100]!r} is malformed")
        start, end = entry["data_offsets"]
        tensors[key] = StoredTensor(name, 8 + length + start, end - start, entry["dtype"], tuple(entry["shape"]))
    return tensors
