"""Lists of data sets as JSON, Fast-LLM's: `{"datasets": [{"prefix", "weight", "num_documents", "num_tokens"}]}`.

Prefixes are relative to the list's folder, so that a folder with its list can be moved.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lite.data.disk_array import reading, replace_file
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.errors import DataError


def find_pairs(names: Sequence[str]) -> list[str]:
    """Return the prefixes of the pairs of all names; a folder stands for the pairs in it, sorted by path.

    Of a folder, pairs of validation documents (`..._validation`) are left out: to train on them must be asked for; so
    are the loss masks of others (`..._mask`).

    Raises: DataError if a folder holds no pair.
    """
    prefixes: list[str] = []
    for name in names:
        if Path(name).is_dir():
            found = sorted(str(path)[:-4] for path in Path(name).rglob("*.idx"))
            masks = {prefix + "_mask" for prefix in found}
            kept = [prefix for prefix in found if not prefix.endswith("_validation") and prefix not in masks]
            if not kept:
                raise DataError(f"{name}: no .bin/.idx pair in this folder")
            prefixes += kept
        else:
            prefixes.append(name[:-4] if name.endswith((".bin", ".idx")) else name)
    return prefixes


def write_list(prefixes: Sequence[str], path: Path) -> list[dict[str, Any]]:
    """Write the list of these pairs, each weighted by its tokens; return its entries.

    Raises: DataError if a pair is damaged, or all are empty.
    """
    opened = [IndexedDataset(prefix) for prefix in prefixes]
    total = sum(dataset.num_tokens for dataset in opened)
    if not total:
        raise DataError(f"{', '.join(prefixes[:3])}: no tokens")
    entries = [
        {
            "prefix": os.path.relpath(dataset.prefix, path.parent),
            "weight": dataset.num_tokens / total,
            "num_documents": dataset.num_documents,
            "num_tokens": dataset.num_tokens,
        }
        for dataset in opened
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps({"datasets": entries}, indent=2) + "\n").encode())
    return entries


def read_list(path: Path) -> list[str]:
    """Return the words of --data_path that a list stands for: weight, prefix, ...; sets of weight 0 are left out.

    Raises: DataError if the file is not such a list.
    """
    with reading(f"--data_path={path}"):
        content = path.read_bytes()
    try:
        pairs = [(entry["weight"], entry["prefix"]) for entry in json.loads(content)["datasets"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(
            f"--data_path={path}: is not a list of data sets: {error!r}; scripts/concatenate_dataset.py writes one"
        ) from error
    for weight, prefix in pairs:
        valid = type(weight) in (int, float) and math.isfinite(weight) and weight >= 0
        if not valid or not isinstance(prefix, str):
            raise DataError(f"--data_path={path}: weight {weight!r} of {prefix!r} is not a number >= 0")
    if not any(weight for weight, _ in pairs):
        raise DataError(f"--data_path={path}: names no data set with a weight")
    return [word for weight, prefix in pairs if weight for word in (repr(float(weight)), str(path.parent / prefix))]
