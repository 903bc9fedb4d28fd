"""Identify a run's data: checkpoints store the identity, and a resumed run compares it.

A fingerprint samples a data set: the sizes of its two files, and eight blocks of each from the
first to the last byte. So it takes a millisecond at any size, finds another corpus under the same
path, and accepts the same corpus under another path. It does not find an edit of a few tokens that
changes no size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from megatron_lite.config import JsonObject
from megatron_lite.config.values import digest
from megatron_lite.data.disk_array import sample_of, unreadable
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.tokenizing import tokenizer_json
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import DataError


def fingerprint(dataset: IndexedDataset) -> str:
    """Return 16 hexadecimal digits that depend on a data set's content, not on its place.

    Raises: DataError if a file cannot be read.
    """
    try:
        return sample_of(dataset.index_path, dataset.tokens.path)
    except OSError as error:
        raise unreadable(error.filename or dataset.prefix, error) from error


def identity(
    datasets: list[IndexedDataset],
    tokenizer_file: str | None,
    masks: Sequence[IndexedDataset | None] = (),
) -> JsonObject:
    """Return what a checkpoint stores about its data, as JSON.

    `sets`: [documents, tokens, dtype, fingerprint] per data set, in the order of --data_path.
    `tokenizer`: a digest of the tokenizer's file, or None. `masks`: the fingerprint of each data
    set's loss mask, or None; absent without masks. `open_data` adds `evaluated`: a digest for each
    phase with data of its own.

    Raises: DataError if a file cannot be read.
    """
    known = {
        dataset: [
            dataset.num_documents,
            dataset.num_tokens,
            dataset.tokens.dtype.name,
            fingerprint(dataset),
        ]
        for dataset in set(datasets)
    }
    tokenizer = None
    if tokenizer_file is not None:
        tokenizer = hashlib.blake2b(tokenizer_json(tokenizer_file), digest_size=8).hexdigest()
    found: JsonObject = {"sets": [known[dataset] for dataset in datasets], "tokenizer": tokenizer}
    if any(mask is not None for mask in masks):
        found["masks"] = [None if mask is None else fingerprint(mask) for mask in masks]
    return found


def check_same(own: JsonObject, distributed: Distributed) -> None:
    """Check that all ranks read the same data. Collective.

    Raises: DataError on every rank, if any rank's identity differs from rank 0's.
    """
    digests = distributed.gather_objects(digest(own))
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        error = DataError(
            f"rank {others[0]} reads other files than rank 0 under the same --data_path, --valid_data_path, "
            "--test_data_path, --loss_mask or --tokenizer_file; every rank needs the same data"
        )
        error.agreed = True
        raise error
