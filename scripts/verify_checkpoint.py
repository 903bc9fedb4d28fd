"""Verify checkpoints: every byte of every file, and every entry of the manifest.

    python scripts/verify_checkpoint.py experiments/mine
    python scripts/verify_checkpoint.py experiments/mine/checkpoints/1000 experiments/mine/export/1000 --values

A path is a checkpoint, a folder of checkpoints, or the directory of a run. Each checkpoint is a row of a table:
iteration, bytes, ranks (4x2: data parallel 4, tensor parallel 2), and whether it is good, or why not. Nothing is
changed, no model is built, and one chunk of a file is in memory at a time.

Exit codes: 0 all checkpoints are good, 2 usage, 4 a checkpoint is damaged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
from megatron_lite.checkpoint.names import MANIFEST_NAME, find_checkpoints, no_folder, reason
from megatron_lite.checkpoint.reading import Inspection, inspect
from megatron_lite.cli.script_parser import ScriptParser
from megatron_lite.errors import EXIT_DONE, CheckpointError, RunError, UsageError
from megatron_lite.huggingface.model_folder import CONFIG_NAME
from megatron_lite.run.exit_status import print_failure, print_page


def checkpoints_of(path: Path) -> list[Path]:
    """List the checkpoints at a path, newest first: the path itself, those in it, or those of a run.

    Raises:
        UsageError: if there is no checkpoint.
    """
    try:
        if problem := no_folder(path):
            raise UsageError(f"{problem}; give a checkpoint or the directory of a run")
        if (path / MANIFEST_NAME).exists() or (path / MANIFEST_NAME).is_symlink():
            return [path]
        folders = [path, path / "checkpoints", path / "export"]
        found = [folder for root in folders for _, folder in find_checkpoints(root)]
        found = [folder for folder in found if not (folder / CONFIG_NAME).exists()]  # exports to Hugging Face
    except OSError as error:
        raise UsageError(f"{path}: {reason(error)}; give a folder that can be read") from None
    if not found:
        raise UsageError(f"{path}: holds no checkpoint; give a checkpoint or the directory of a run")
    return found


def row(folder: Path, found: Inspection) -> str:
    """Return a line of the table."""
    size, ranks = "" if found.num_bytes is None else f"{found.num_bytes:,}", found.ranks or ""
    verdict = "; ".join([f"NO: {'; '.join(found.problems)}" if found.problems else "yes", *found.remarks])
    return f"{folder.name:>10}  {size:>18}  {ranks:>5}  {RunError(verdict)}"  # its text has no control characters


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = ScriptParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="Exit codes: 0 all checkpoints are good, 2 usage, 4 a checkpoint is damaged.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="checkpoint, or directory of a run")
    parser.add_argument("--values", action="store_true", help="also look for non-finite numbers")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; return the exit code."""
    options = parse(arguments)
    try:
        folders = [folder for path in options.paths for folder in checkpoints_of(path.expanduser())]
        bad, parent = 0, None
        for folder in folders:
            if folder.parent != parent:
                parent = folder.parent
                print_page(f"{RunError(parent)}\n{'iteration':>10}  {'bytes':>18}  ranks  verified")
            found = inspect(folder, options.values)
            bad += bool(found.problems)
            print_page(row(folder, found))
        if bad:
            raise CheckpointError(f"{bad} of {len(folders)} checkpoints cannot be used")
    except Exception as error:
        return print_failure(error, "close other programs")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
