"""The header of a safetensors file that somebody else has written: which tensors lie where.

A file is 8 bytes with the length of the header (little-endian), the header (JSON: name -> dtype, shape, data_offsets),
and the values, tensor behind tensor without gaps (https://github.com/huggingface/safetensors). It is untrusted: what
does not fit is refused here, so that nothing outside of a tensor is ever read.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_lite.checkpoint import files
from megatron_lite.checkpoint.names import without_repeated
from megatron_lite.errors import DamagedError

_MOST_HEADER_BYTES = 10**8  # the limit of the safetensors library
_MOST_ELEMENTS, _MOST_DIMENSIONS = 2**62, 8
# Those whose values can become weights. Files may hold others: masks, counters.
FLOATING = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class StoredTensor(NamedTuple):
    """Where a tensor lies in a folder."""

    file: str
    offset: int  # of its first byte in the file
    num_bytes: int
    dtype: str  # as the header says
    shape: tuple[int, ...]


def read_header(folder: Path, name: str) -> dict[str, StoredTensor]:
    """The tensors of a file.

    Raises:
        DamagedError: if the file is not what the format says, or shorter.
        OSError: if it cannot be read.
    """
    with files.open_regular(folder / name) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
            raise DamagedError(f"{name}: no safetensors file, or one cut off in its header ({size:,} bytes)")
        text = os.pread(file.fileno(), length, 8)
    try:
        content = json.loads(text, object_pairs_hook=without_repeated)
        if not isinstance(content, dict):
            raise ValueError("no object")
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{name}: its header is not readable ({' '.join(str(error).split())[:100]})") from None
    content.pop("__metadata__", None)
    tensors = {key: _tensor(name, 8 + length, key, entry) for key, entry in content.items()}
    end = 8 + length
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != end:
            raise DamagedError(f"{name}: its header says that tensors overlap or leave gaps")
        end += tensor.num_bytes
    if end != size:
        raise DamagedError(f"{name}: {size:,} bytes, its header says {end:,}: cut off, or not downloaded to the end")
    return tensors


def _tensor(file: str, data_start: int, name: str, entry: Any) -> StoredTensor:
    """One entry of a header."""
    values: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (values.get(key) for key in ("dtype", "shape", "data_offsets"))
    sound = isinstance(dtype, str) and _are_counts(shape) and _are_counts(offsets)
    if not sound or len(offsets or ()) != 2 or offsets != sorted(offsets or ()):
        raise DamagedError(f"{file}: the entry of {name[:100]!r} in its header is malformed")
    assert dtype is not None and shape is not None and offsets is not None
    num_bytes = offsets[1] - offsets[0]
    if dtype in FLOATING and num_bytes != math.prod(shape) * FLOATING[dtype].itemsize:
        raise DamagedError(f"{file}: {name[:100]!r} has {num_bytes:,} bytes, which its shape and dtype contradict")
    return StoredTensor(file, data_start + offsets[0], num_bytes, dtype, tuple(shape))


def _are_counts(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= _MOST_DIMENSIONS
        and all(type(value) is int and 0 <= value <= _MOST_ELEMENTS for value in values)
    )
