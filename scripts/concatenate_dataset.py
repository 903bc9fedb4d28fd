"""Write a JSON list of .bin/.idx pairs, weighted by their token counts, for --dataset_source=file.

    python scripts/concatenate_dataset.py data --output data/all.json
    python pretrain_gpt.py --dataset_source=file --data_path=data/all.json ...

A folder stands for the pairs in it, except pairs of validation documents. Prefixes are relative to
the list.

Exit codes: 0 done, 2 usage, 3 data, 8 storage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
from megatron_lite.cli.script_parser import ScriptParser
from megatron_lite.corpus.inputs import inside
from megatron_lite.data.disk_array import replace_file
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.errors import EXIT_DONE, DataError, RunError, StorageError
from megatron_lite.run.exit_status import print_failure


def find_pairs(names: Sequence[str]) -> list[str]:
    """Return the prefixes of the pairs of all names; a folder stands for the pairs in it, sorted by
    path.

    Of a folder, pairs of validation documents (`..._validation`) are left out: to train on them
    must be asked for; so are the loss masks of others (`..._mask`).

    Raises: DataError if a folder holds no pair, or a link out of it.
    """
    prefixes: list[str] = []
    for name in names:
        if Path(name).is_dir():
            found = sorted(str(path)[:-4] for path in Path(name).rglob("*.idx"))
            for prefix in found:
                for ending in (".idx", ".bin"):
                    inside(Path(name), Path(prefix + ending))
            masks = {prefix + "_mask" for prefix in found}
            kept = [
                prefix
                for prefix in found
                if not prefix.endswith("_validation") and prefix not in masks
            ]
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


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    parser = ScriptParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", help="folders, or prefixes of pairs")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the JSON file to write"
    )
    options = parser.parse_args(argv)
    try:
        entries = write_list(find_pairs(options.inputs), options.output)
    except (RunError, OSError) as error:
        return print_failure(error if isinstance(error, RunError) else StorageError(error))
    for entry in entries:
        print(f"{entry['weight']:>8.2%}  {entry['num_tokens']:>16,} tokens  {entry['prefix']}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
