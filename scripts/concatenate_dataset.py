"""Write a JSON list of .bin/.idx pairs, weighted by their token counts, for --dataset_source=file.

    python scripts/concatenate_dataset.py data --output data/all.json
    python pretrain_gpt.py --dataset_source=file --data_path=data/all.json ...

A folder stands for the pairs in it, except pairs of validation documents. Prefixes are relative to the list.

Exit codes: 0 done, 2 usage, 3 data, 8 storage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
from megatron_lite.cli.script_parser import ScriptParser
from megatron_lite.corpus.dataset_list import find_pairs, write_list
from megatron_lite.errors import EXIT_DONE, RunError, StorageError


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    parser = ScriptParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", help="folders, or prefixes of pairs")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the JSON file to write")
    options = parser.parse_args(argv)
    try:
        entries = write_list(find_pairs(options.inputs), options.output)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {StorageError(error)}", file=sys.stderr)
        return StorageError.exit_code
    for entry in entries:
        print(f"{entry['weight']:>8.2%}  {entry['num_tokens']:>16,} tokens  {entry['prefix']}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
