"""The input files of a corpus, in a stable order: from names, folders, glob patterns and {a,b} lists.

The ending of a name tells the kind of a file: `.jsonl` and `.ndjson` hold one document per line, `.parquet` and
`.arrow` one per row, and any other file is one document. Text and lines may be compressed: `.jsonl.zst`, `.txt.gz`.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron_lite.data.disk_array import reading, unreadable
from megatron_lite.errors import DataError, UsageError

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}  # any other ending: text
DEFAULT_SUFFIXES = (".txt", ".md", *KINDS)
MOST_ALTERNATIVES = 1_000_000  # of one name with {a,b} lists
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")


@dataclass(frozen=True)
class InputFile:
    """A file to read, as it was when the work was planned."""

    path: str
    kind: str  # text, jsonl, parquet, arrow
    compression: str  # of COMPRESSIONS, or empty
    size_bytes: int  # 0 for a pipe
    mtime_ns: int
    regular: bool  # False for a pipe or a device, which can be read once only

    def place(self, number: int) -> str:
        """Name a line or row of the file, counted from 1; 0 stands for the whole file."""
        if number == 0:
            return self.path
        return f"{self.path}: {'line' if self.kind == 'jsonl' else 'row'} {number}"


def find_inputs(names: Sequence[str], suffixes: Sequence[str] = DEFAULT_SUFFIXES) -> list[InputFile]:
    """Return the files of all names, in their order; a folder or a pattern yields its files sorted by path.

    Of a folder, files that end in one of `suffixes` are taken, compressed ones too. A folder that Hugging Face
    `datasets` saved yields its data files in its own order.

    Raises: DataError if a name matches nothing, or a folder has no such file.
    """
    files: list[InputFile] = []
    for alternative in (full for name in names for full in ([name] if os.path.lexists(name) else expand_braces(name))):
        matches = [alternative]
        if glob.has_magic(alternative) and not os.path.lexists(alternative):
            matches = sorted(glob.glob(alternative, recursive=True))
            if not matches:
                raise DataError(f"{alternative}: no file matches this pattern")
        for match in matches:
            files += [_described(path) for path in _files_of(Path(match), suffixes)]
    return files


def expand_braces(name: str) -> list[str]:
    """Expand lists and ranges as a shell does: `{a,b}{00..02}.txt` stands for six names.

    Raises: UsageError if it stands for too many.
    """
    for found in _BRACES.finditer(name):
        alternatives = _alternatives(found[1])
        if alternatives is None:
            continue
        before, after = name[: found.start()], name[found.end() :]
        expanded = [full for text in alternatives for full in expand_braces(before + text + after)]
        if len(expanded) > MOST_ALTERNATIVES:
            raise UsageError(f"{name}: stands for more than {MOST_ALTERNATIVES:,} names")
        return list(dict.fromkeys(expanded))  # a list inside a list meets its neighbours once for each of its items
    return [name]


def _alternatives(text: str) -> list[str] | None:
    """Return what the inside of braces stands for; None if the braces are part of the name."""
    if (numbers := _RANGE.fullmatch(text)) is not None:
        first, last = int(numbers[1]), int(numbers[2])
        width = len(numbers[1]) if numbers[1].startswith("0") else 0
        if last - first >= MOST_ALTERNATIVES:
            raise UsageError(f"{{{text}}}: stands for more than {MOST_ALTERNATIVES:,} names")
        return [f"{number:0{width}d}" for number in range(first, last + 1)]
    return text.split(",") if "," in text else None


def _files_of(path: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    if not path.is_dir():
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
        yield path
    elif (path / "dataset_dict.json").is_file():
        splits = sorted(child.parent.name for child in path.glob("*/state.json"))
        raise UsageError(f"{path}: holds the splits {', '.join(splits)}; name one: {path / (splits or ['train'])[0]}")
    elif (path / "state.json").is_file():
        yield from _saved_dataset(path)
    else:
        found = [Path(folder, file) for folder, _, files in os.walk(path, onerror=_refuse) for file in files]
        kept = sorted(file for file in found if bare_name(file.name).endswith(tuple(suffixes)) and file.is_file())
        if not kept:
            raise DataError(f"{path}: no file in this folder ends in {' or '.join(suffixes)} (--suffix)")
        yield from kept


def _saved_dataset(folder: Path) -> list[Path]:
    """Return the data files of a folder that `datasets.Dataset.save_to_disk` wrote, in the order of their rows."""
    try:
        names = [entry["filename"] for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]]
        return [folder / str(name) for name in names]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / 'state.json'}: is not what Hugging Face datasets saves: {error!r}") from error


def bare_name(name: str) -> str:
    """Return a file's name without the ending of a compression."""
    return next((name.removesuffix(ending) for ending in COMPRESSIONS if name.endswith(ending)), name)


def _described(path: Path) -> InputFile:
    with reading(path):
        status = path.stat()
    bare = bare_name(path.name)
    kind = next((kind for ending, kind in KINDS.items() if bare.endswith(ending)), "text")
    compression = path.name.removeprefix(bare)
    if compression and kind in ("parquet", "arrow"):
        raise DataError(f"{path}: decompress this file first; only text and .jsonl are read compressed")
    return InputFile(str(path), kind, compression, status.st_size, status.st_mtime_ns, path.is_file())


def _refuse(error: OSError) -> NoReturn:
    raise unreadable(error.filename, error) from error
