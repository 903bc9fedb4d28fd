"""Names of the files and folders of checkpoints and exports, and safe reading of their JSON.
Imports no torch.

A folder is written as `.tmp-<name>-<nonce>`, waits as `.ready-<name>-<nonce>` while it replaces an
older folder, and is deleted as `.trash-<name>-<nonce>`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

MANIFEST_NAME = "manifest.json"
RANK_FILE = re.compile(r"rank_[0-9]{3,7}\.safetensors")
# All files of checkpoints and exports. Nothing else is ever deleted.
OUR_FILE = re.compile(
    r"rank_[0-9]{3,7}\.safetensors|manifest\.json"
    r"|model(-[0-9]{5}(-of-[0-9]{5})?)?\.safetensors|model\.safetensors\.index\.json"
    r"|(config|generation_config)\.json|README\.md|adapter_config\.json|adapter_model\.safetensors|model\.gguf"
    # Tokenizer files, which data/tokenizing.py copies.
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|(vocab|merges)\.txt|chat_template\.jinja|tokenizer\.model"
)
_ITERATION = re.compile(r"0|[1-9][0-9]{0,17}")
_WORK_NAME = re.compile(r"\.(tmp|ready|trash)-([^/]+)-([0-9a-f]{16})")


def rank_file(rank: int) -> str:
    return f"rank_{rank:03d}.safetensors"


def new_nonce() -> str:
    """Return 16 random hexadecimal digits."""
    return os.urandom(8).hex()


def work_path(directory: Path, kind: str, nonce: str) -> Path:
    """Return a sibling path of `directory` for a folder being written (`tmp`), replaced (`ready`)
    or deleted."""
    return directory.with_name(f".{kind}-{directory.name}-{nonce}")


def work_folders(root: Path, kind: str) -> list[tuple[Path, str]]:
    """List the work folders of a kind in `root` with their final names. Skips symbolic links."""
    matches = ((path, _WORK_NAME.fullmatch(path.name)) for path in sorted(root.iterdir()))
    return [
        (path, match[2])
        for path, match in matches
        if match and match[1] == kind and is_folder(path)
    ]


def find_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """List (iteration, folder) of all checkpoints by name, newest first, without checking their
    content.

    A `.ready-` folder is a complete checkpoint whose save was killed while replacing an older one.
    Symbolic links are listed, too, to be rejected like damaged checkpoints instead of silently
    ignored. `root` itself may be a link. So are checkpoints that a live run deletes meanwhile; its
    newest may have come too late for the list. See `rotation`.
    """
    if not root.is_dir():
        return []
    named = (entry for entry in os.scandir(root) if _ITERATION.fullmatch(entry.name))
    found = [
        (int(entry.name), 1, root / entry.name)
        for entry in named
        if entry.is_dir() or entry.is_symlink()
    ]
    found += [
        (int(name), 0, path)
        for path, name in work_folders(root, "ready")
        if _ITERATION.fullmatch(name)
    ]
    return [(iteration, path) for iteration, _, path in sorted(found, reverse=True)]


def newest_before(root: Path | None, iteration: int) -> Path | None:
    """Return the folder of the newest checkpoint, by name, before an iteration; None without
    any."""
    found = find_checkpoints(root) if root is not None else []
    return next((folder for number, folder in found if number < iteration), None)


def newest_checkpoint(root: Path | None) -> tuple[int, Path] | None:
    """Return (iteration, folder) of the newest checkpoint by name, for messages; None without any.
    Never raises."""
    with contextlib.suppress(OSError):
        return next(iter(find_checkpoints(root)), None) if root is not None else None
    return None


def no_folder(path: Path) -> str | None:
    """Return a message if a path is no folder; None if it is one."""
    if path.is_dir():
        return None
    return f"{path} is a file, not a folder" if path.exists() else f"there is no folder {path}"


def is_folder(path: Path) -> bool:
    """Return whether a path is a directory and not a symbolic link."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def has_only_our_files(folder: Path) -> bool:
    """Return whether a folder contains only files of checkpoints and exports."""
    return is_folder(folder) and all(OUR_FILE.fullmatch(path.name) for path in folder.iterdir())


def parse_json(data: str | bytes) -> Any:
    """Parse untrusted JSON.

    Raises:
        ValueError: with a short message, if it is not JSON, too deeply nested, or repeats a key.
    """
    try:
        return json.loads(data, object_pairs_hook=_without_repeated)
    except (ValueError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())[:100]) from None


def _without_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, rejecting repeated keys, which JSON itself allows."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a repeated name")
    return values


def reason(error: OSError) -> str:
    """Return the system's description of an error."""
    return error.strerror or str(error)
