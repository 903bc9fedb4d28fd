"""Verify checkpoints: every byte of every file, and every entry of the manifest.

    megatron_lite verify_checkpoint experiments/mine
    megatron_lite verify_checkpoint experiments/mine/checkpoints/1000 experiments/mine/export/1000 --values

A path is a checkpoint, a folder of checkpoints, or the directory of a run. Each checkpoint is a row
of a table: iteration, bytes, ranks (4x2: data parallel 4, tensor parallel 2), and whether it is
good, or why not. What a live run deletes meanwhile is left out, and newer ones are looked for.
Nothing is changed, no model is built, and one chunk of a file is in memory at a time.

Exit codes: 0 all checkpoints are good, 2 usage, 4 a checkpoint is damaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_lite.checkpoint.inspection import Inspection, inspect
from megatron_lite.checkpoint.names import MANIFEST_NAME, find_checkpoints, no_folder, reason
from megatron_lite.checkpoint.rotation import ATTEMPTS, pinned
from megatron_lite.cli.script_parser import ScriptParser
from megatron_lite.errors import EXIT_DONE, CheckpointError, RotatedError, RunError, UsageError
from megatron_lite.huggingface.model_folder import CONFIG_NAME
from megatron_lite.run.exit_status import print_failure, print_page


def checkpoints_of(path: Path) -> list[Path]:
    """List the checkpoints at a path, newest first: the path itself, those in it, or those of a
    run.

    Raises:
        UsageError: if there is no checkpoint.
    """
    try:
        if (path / MANIFEST_NAME).exists() or (path / MANIFEST_NAME).is_symlink():
            return [path]
        folders = [path, path / "checkpoints", path / "export"]
        found = [folder for root in folders for _, folder in find_checkpoints(root)]
        # exports to Hugging Face
        found = [folder for folder in found if not (folder / CONFIG_NAME).exists()]
    except OSError as error:
        raise UsageError(f"{path}: {reason(error)}; give a folder that can be read") from None
    if not found:
        problem = no_folder(path) or f"{path}: holds no checkpoint"
        raise UsageError(f"{problem}; give a checkpoint or the directory of a run")
    return found


def inspections(path: Path, values: bool) -> Iterator[tuple[Path, Inspection]]:
    """Verify the checkpoints at a path; leave out what a live run deletes meanwhile, and look for
    newer ones then.

    Raises:
        UsageError: if there is no checkpoint.
        RotatedError: if the run deletes all of them faster than they can be read.
    """
    done = set[Path]()
    for attempt in range(ATTEMPTS):
        is_rotated = False
        for folder in checkpoints_of(path):
            if folder in done:
                continue
            try:
                found = inspected(folder, values)
            except RotatedError:
                if attempt == ATTEMPTS - 1 and not done:
                    raise
                is_rotated = True
                continue
            done.add(folder)
            yield folder, found
        if not is_rotated:
            return


def inspected(folder: Path, values: bool) -> Inspection:
    """Verify a checkpoint.

    Raises:
        RotatedError: if it has problems because a live run has deleted it meanwhile.
    """
    check = pinned(folder)
    try:
        found = inspect(folder, values)
    except OSError:
        check()
        raise
    if found.problems:
        check()
    return found


def row(folder: Path, found: Inspection) -> str:
    """Return a line of the table."""
    size, ranks = "" if found.num_bytes is None else f"{found.num_bytes:,}", found.ranks or ""
    verdict = "; ".join(
        [f"NO: {'; '.join(found.problems)}" if found.problems else "yes", *found.remarks]
    )
    return f"{folder.name:>10}  {size:>18}  {ranks:>5}  {RunError(verdict)}"  # its text has no control characters


def main(arguments: Sequence[str], program: str | None = None) -> int:
    """Print a table; return the exit code."""
    parser = ScriptParser(__doc__, prog=program)
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="checkpoint, or directory of a run"
    )
    parser.add_argument("--values", action="store_true", help="also look for non-finite numbers")
    options = parser.parse_args(arguments)
    try:
        paths = [path.expanduser() for path in options.paths]
        for path in paths:
            checkpoints_of(path)  # a wrong path is refused before anything is read
        bad = 0
        count = 0
        parent = None
        for folder, found in (pair for path in paths for pair in inspections(path, options.values)):
            if folder.parent != parent:
                parent = folder.parent
                print_page(f"{RunError(parent)}\n{'iteration':>10}  {'bytes':>18}  ranks  verified")
            bad, count = bad + bool(found.problems), count + 1
            print_page(row(folder, found))
        if bad:
            raise CheckpointError(f"{bad} of {count} checkpoints cannot be used")
    except Exception as error:
        return print_failure(error, "close other programs")
    return EXIT_DONE
