"""Small .bin/.idx pairs, and configurations that read them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.config import Config, unflatten
from megatron_lite.data.host_batch import HostBatch
from megatron_lite.data.indexed_dataset import IndexedDatasetWriter
from megatron_lite.data.open_data import open_data
from megatron_lite.data.tokenizing import BYTE, tokenizer_json


def save_byte_tokenizer(path: Path | str) -> None:
    """Write the byte tokenizer as a `tokenizer.json`."""
    Path(path).write_bytes(tokenizer_json(BYTE))


def write_documents(prefix: Path | str, documents: Iterable[Any], dtype: str = "<u2") -> str:
    """Write a pair of these documents, arrays or lists of token ids; return its prefix."""
    with IndexedDatasetWriter(str(prefix), dtype) as writer:
        for document in documents:
            writer.add_document(np.asarray(document, dtype=np.int64))
    return str(prefix)


def write_counting(
    prefix: Path | str, sizes: Sequence[int], dtype: str = "<i4", base: int = 0
) -> str:
    """Write a pair whose tokens count up from `base`, so that a token tells its place; return its
    prefix."""
    return write_documents(
        prefix, np.split(np.arange(base, base + sum(sizes)), np.cumsum(sizes)[:-1]), dtype
    )


def data_config(*data_path: str, **values: Any) -> Config:
    """Return a configuration that trains on the whole of `data_path` without workers, before it is
    resolved."""
    fixed: dict[str, Any] = {
        "data_path": data_path,
        "split": (1.0,),
        "num_workers": 0,
        "device": "cpu",
    }
    fixed["multiprocessing_context"] = "fork"  # starts in a tenth of the time
    return unflatten({**fixed, **values})


def read_batches(
    config: Config,
    rank: int = 0,
    world_size: int = 1,
    done: int = 0,
    count: int | None = None,
    phase: str = "training",
) -> list[list[HostBatch]]:
    """Read a rank's micro-batches of `count` iterations (None: all) after the first `done`, and end
    its workers."""
    source = open_data(config, rank, world_size)
    try:
        return list(source.batches(phase, done, count))
    finally:
        source.close()


def overwrite(path: Path) -> None:
    """Change the content of a file in place, size and inode unchanged."""
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
