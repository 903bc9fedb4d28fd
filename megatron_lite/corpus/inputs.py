"""Find a corpus's input files in a stable order, from names, folders, glob patterns and {a,b}
lists, and open them.

A name's ending determines a file's kind: `.jsonl` and `.ndjson` contain one document per line,
`.parquet` and `.arrow` one per row. A `.json` file contains lines or one array of records; a file
of any other name whose first two lines are objects (of up to 16 MiB) contains lines, otherwise one
document. Text and JSON may be compressed: `.jsonl.zst`, `.txt.gz`. A truncated file is an error,
never a shorter text.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import glob
import importlib
import io
import itertools
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NoReturn

from megatron_lite.data.disk_array import reading, unreadable
from megatron_lite.errors import DataError, RunError, UsageError

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
# With other endings, the content determines the kind.
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
JSON = ".json"
DEFAULT_SUFFIXES = (".txt", ".md", JSON, *KINDS)
# No documents in a folder: a work folder of ours, and files that accompany tokens, tokenizers and
# copies.
UNFINISHED = ".partial"
DESCRIPTIONS = (".summary.json", "tokenizer.json", "tokenizer_config.json", "copied.json")
MOST_ALTERNATIVES = 1_000_000  # of one name with {a,b} lists
CHUNK_BYTES = 1 << 17
# Longest first line that determines its file's kind.
LONGEST_LINE_BYTES = 1 << 16
LONGEST_OBJECT_BYTES = 1 << 24
JSON_BYTES = 1 << 20  # of an array, decoded at a time unless a record is longer
LONGEST_WORD = 16  # characters of JSON that a boundary may cut: -Infinity, two escapes
COMPRESSED_BYTES = 1 << 13  # decompressed at a time: repetitive text becomes 60 MB
LARGEST_WINDOW = 1 << 31  # of zstd, as accepted by `zstd --long=31`
ROWS_PER_READ = 1024
# By kind or compression of a file: the package that reads it, and why.
PACKAGES = {
    ".zst": ("zstandard", "is compressed with zstd"),
    "parquet": ("pyarrow.parquet", "is a parquet file"),
    "arrow": ("pyarrow", "is an arrow file"),
}
_SPACE = re.compile(r"[ \t\n\r]*")  # in JSON
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")


@dataclass(frozen=True)
class InputFile:
    """A file to read, as it was during planning."""

    path: str
    kind: str  # text, jsonl, json (one value, an array of records or a record), parquet, arrow
    compression: str  # of COMPRESSIONS, or empty
    size_bytes: int  # 0 for a pipe
    mtime_ns: int
    regular: bool  # False: a pipe or a device, which can be read only once

    def place(self, number: int) -> str:
        """Name a line or row of the file, counted from 1; 0: the whole file."""
        if number == 0:
            return self.path
        return f"{self.path}: {'line' if self.kind in ('text', 'jsonl') else 'row'} {number}"


def find_inputs(
    names: Sequence[str], suffixes: Sequence[str] = DEFAULT_SUFFIXES
) -> list[InputFile]:
    """Return the files for all names, in their order; a folder or a pattern yields its files sorted
    by path.

    From a folder, files that end in one of `suffixes` are taken, including compressed ones. A
    folder saved by Hugging Face `datasets` yields its data files in its own order.

    Raises: DataError if a name matches nothing, or a folder has no such file.
    """
    files: list[InputFile] = []
    for alternative in (
        full
        for name in names
        for full in ([name] if os.path.lexists(name) else expand_braces(name))
    ):
        matches = [Path(alternative)]
        if glob.has_magic(alternative) and not os.path.lexists(alternative):
            base = Path(re.split(r"[*?[]", alternative)[0] + "_").parent
            matches = [
                inside(base, Path(match))
                for match in sorted(glob.glob(alternative, recursive=True))
            ]
            if not matches:
                raise DataError(f"{alternative}: no file matches this pattern")
        files += [_described(path) for match in matches for path in _files_of(match, suffixes)]
    return files


def inside(folder: Path, path: Path) -> Path:
    """Return a path from a folder's listing (names in a store, in a file, or of links), if it is
    inside the folder.

    A folder in the cache of the Hugging Face hub consists of links to the blobs next to its
    snapshots.

    Raises: DataError if the path leads out of the folder.
    """
    root, target = (Path(os.path.realpath(place)) for place in (folder, path))
    blobs = [above.parent / "blobs" for above in root.parents if above.name == "snapshots"]
    if not any(map(target.is_relative_to, (root, *blobs))):
        raise DataError(
            f"{path}: leads out of the folder {folder}; remove it there, or give the file itself"
        )
    return path


def expand_braces(name: str) -> list[str]:
    """Expand lists and ranges like a shell: `{a,b}{00..02}.txt` becomes six names.

    Raises: UsageError if there are too many.
    """
    for found in _BRACES.finditer(name):
        alternatives = _alternatives(found[1])
        if alternatives is None:
            continue
        before, after = name[: found.start()], name[found.end() :]
        expanded = [full for text in alternatives for full in expand_braces(before + text + after)]
        if len(expanded) > MOST_ALTERNATIVES:
            raise UsageError(f"{name}: stands for more than {MOST_ALTERNATIVES:,} names")
        # A list inside a list meets its neighbours once per item.
        return list(dict.fromkeys(expanded))
    return [name]


def _alternatives(text: str) -> list[str] | None:
    """Return the alternatives inside braces; None if the braces are part of the name."""
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
        raise UsageError(
            f"{path}: holds the splits {', '.join(splits)}; name one: {path / (splits or ['train'])[0]}"
        )
    elif (path / "state.json").is_file():
        yield from _saved_dataset(path)
    else:
        walk = os.walk(path, onerror=_refuse)
        found = (
            Path(folder, file)
            for folder, _, files in walk
            if not folder.endswith(UNFINISHED)
            for file in files
        )
        kept = sorted(file for file in found if is_input(file, suffixes))
        if not kept:
            raise DataError(
                f"{path}: no file in this folder ends in {' or '.join(suffixes)} (prepare_data --suffix)"
            )
        yield from (inside(path, file) for file in kept)


def _saved_dataset(folder: Path) -> list[Path]:
    """Return the data files in a folder written by `datasets.Dataset.save_to_disk`, in the order of
    their rows."""
    try:
        names = [
            str(entry["filename"])
            for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder / 'state.json'}: is not what Hugging Face datasets saves: {error!r}"
        ) from error
    return [inside(folder, folder / name) for name in names]


def is_input(path: Path, suffixes: Sequence[str] = DEFAULT_SUFFIXES) -> bool:
    """Return whether a path in a folder is a file to read, by its name."""
    is_wanted = bare_name(path.name).endswith(tuple(suffixes)) and not path.name.endswith(
        DESCRIPTIONS
    )
    return is_wanted and path.is_file()


def bare_name(name: str) -> str:
    """Return a file's name without a compression's ending."""
    return next(
        (name.removesuffix(ending) for ending in COMPRESSIONS if name.endswith(ending)), name
    )


def _described(path: Path) -> InputFile:
    with reading(path):
        status = path.stat()
    bare = bare_name(path.name)
    kind = next((kind for ending, kind in KINDS.items() if bare.endswith(ending)), "text")
    compression = path.name.removeprefix(bare)
    if compression and kind in ("parquet", "arrow"):
        raise DataError(
            f"{path}: decompress this file first; only text and .jsonl are read compressed"
        )
    file = InputFile(
        str(path), kind, compression, status.st_size, status.st_mtime_ns, path.is_file()
    )
    return replace(file, kind=_kind_by_content(file)) if kind == "text" and file.regular else file


def _kind_by_content(file: InputFile) -> str:
    is_json = bare_name(file.path).endswith(JSON)
    with reading(file.path), open(file.path, "rb") as source, opened(source, file) as content:
        has_objects = _begins_with_object(content) and (is_json or _begins_with_object(content))
    return "jsonl" if has_objects else "json" if is_json else "text"


def _begins_with_object(content: IO[bytes]) -> bool:
    """Read the next line, in full only if it begins like an object; return whether it is one."""
    line = content.readline(LONGEST_LINE_BYTES)
    if line.lstrip(b"\xef\xbb\xbf \t")[:1] != b"{":
        return False
    line += content.readline(LONGEST_OBJECT_BYTES) if len(line) == LONGEST_LINE_BYTES else b""
    try:
        return len(line) > LONGEST_OBJECT_BYTES or isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(error: OSError) -> NoReturn:
    raise unreadable(error.filename, error) from error


def package_for(kind: str, path: str) -> Any:
    """Import the package in PACKAGES that a file needs.

    Raises: UsageError if it is not installed; the message names the file and the command that
    helps.
    """
    name, reason = PACKAGES[kind]
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UsageError(
            f"{path} {reason}, which needs the package {package}: pip install '.[data]'"
        ) from error


def check_packages(files: Iterable[InputFile]) -> None:
    """Check, before any work, that every file can be read.

    Raises: UsageError for the first file of a kind whose package is not installed.
    """
    for kind in PACKAGES:
        first = next((file for file in files if kind in (file.kind, file.compression)), None)
        if first is not None:
            package_for(kind, first.path)


@contextlib.contextmanager
def opened(file: IO[bytes], described: InputFile) -> Iterator[Any]:
    """Open an open file's decompressed content, a binary stream, for a block.

    Raises: DataError from the block too, if the compressed data are damaged or incomplete.
    """
    ending = described.compression
    begins: dict[str, Callable[[], Any]] = {
        ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
        ".bz2": bz2.BZ2Decompressor,
        ".xz": lzma.LZMADecompressor,
    }
    damage: tuple[type[BaseException], ...] = (EOFError, zlib.error, lzma.LZMAError)
    if ending == ".zst":
        library = package_for(ending, described.path)
        begins[ending] = lambda: library.ZstdDecompressor(
            max_window_size=LARGEST_WINDOW
        ).decompressobj()
        damage += (library.ZstdError,)
    try:
        yield (
            io.BufferedReader(_Content(_parts(file, begins[ending])), CHUNK_BYTES)
            if ending
            else file
        )
    except Exception as error:
        # An OSError without a number is bz2's only sign of damage.
        of_bz2 = ending == ".bz2" and isinstance(error, OSError) and error.errno is None
        if not of_bz2 and not isinstance(error, damage):
            raise
        reason = f"damaged or incomplete compressed data: {error}"
        if "Dictionary" in str(error):
            reason = "was compressed with a dictionary, which is not read; decompress it first: zstd -d -D <dictionary>"
        raise DataError(f"{described.path}: {reason}") from error


class _Content(io.RawIOBase):
    """A stream of parts of any size."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts, self._part = parts, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._part = self._part or memoryview(next(self._parts, b""))
        count = min(len(buffer), len(self._part))
        buffer[:count] = self._part[:count]
        self._part = self._part[count:]
        return count


def _parts(file: IO[bytes], begin: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress a file's streams, between which zeros are padding. begin: returns a decompressor
    for one stream.

    The libraries' own readers accept a truncated file as complete, or ignore what they cannot read
    after a stream.

    Raises: EOFError if the file ends inside a stream; errors of the libraries.
    """
    stream, has_ended = begin(), False
    while data := file.read(COMPRESSED_BYTES):
        while data := data.lstrip(b"\0") if has_ended else data:
            stream = begin() if has_ended else stream
            if part := stream.decompress(data):
                yield part
            data, has_ended = stream.unused_data, stream.eof
    if not has_ended:
        raise EOFError("the file ends inside a stream")


def row_group_bytes(path: str) -> list[int]:
    """Return each row group's size on disk in a parquet file, from its footer.

    Raises: DataError if the file is damaged.
    """
    parquet = package_for("parquet", path)
    with _damage(path):
        metadata = parquet.read_metadata(path)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        return [
            sum(group.column(column).total_compressed_size for column in range(group.num_columns))
            for group in groups
        ]


def table_rows(
    file: IO[bytes], described: InputFile, keys: Sequence[str], start: int, end: int
) -> Iterator[Any]:
    """Yield the rows in row groups [start, end) of a parquet file, or in a whole arrow or JSON
    file.

    An arrow file is a stream of batches, as `datasets` writes it, or has a footer.

    Raises: DataError if the file is damaged or lacks the columns.
    """
    path = described.path
    with _damage(path):
        if described.kind == "json":
            with opened(file, described) as stream:
                yield from _json_values(stream)
            return
        batches: Iterable[Any]
        package = package_for(described.kind, path)
        if described.kind == "parquet":
            table = package.ParquetFile(file)
            columns = _columns(path, keys, table.schema_arrow.names)
            groups = list(range(start, end))
            batches = table.iter_batches(
                ROWS_PER_READ, row_groups=groups, columns=columns, use_threads=False
            )
        else:
            has_footer = file.read(6) == b"ARROW1"
            file.seek(0)
            reader = package.ipc.open_file(file) if has_footer else package.ipc.open_stream(file)
            whole = (
                map(reader.get_batch, range(reader.num_record_batches)) if has_footer else reader
            )
            columns = _columns(path, keys, reader.schema.names)
            # Rows become Python objects a few at a time.
            batches = (
                batch.select(columns).slice(first, ROWS_PER_READ)
                for batch in whole
                for first in range(0, batch.num_rows, ROWS_PER_READ)
            )
        for batch in batches:
            yield from (_plain(batch.schema, row) for row in batch.to_pylist())


def _json_values(stream: Any) -> Iterator[Any]:
    """Yield a JSON array's items, few in memory at a time, or a file's single other value.

    Raises: ValueError that names the place of the damage.
    """
    encoding = json.detect_encoding(stream.peek(4)[:4])
    parts = codecs.iterdecode(iter(lambda: stream.read(JSON_BYTES), b""), encoding, "surrogatepass")
    window = next(parts, "")
    place = _after_space(window, 0)
    if window[place : place + 1] != "[":
        value = json.loads(window + "".join(parts) or "[]")
        yield from value if isinstance(value, list) else [value]
        return
    decode = json.JSONDecoder().raw_decode
    passed = 0
    first = _after_space(window, place + 1)
    if window[first : first + 1] == "]":
        place = first
    while window[place] != "]":  # but before an item
        try:
            value, end = decode(window, _after_space(window, place + 1))
            end = _after_space(window, end)
            if window[end : end + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' delimiter", window, end)
        except json.JSONDecodeError as error:
            is_cut = error.pos > len(window) - LONGEST_WORD or error.msg.startswith("Unterminated")
            more = "".join(itertools.islice(parts, 1 + len(window) // JSON_BYTES)) if is_cut else ""
            if not more:
                raise ValueError(f"{error.msg}: character {passed + error.pos:,}") from None
            window = window[place:] + more
            passed = passed + place
            place = 0
        else:
            yield value
            place = end
    if any(map(str.split, itertools.chain([window[place + 1 :]], parts))):
        raise ValueError(f"Extra data: character {passed + place + 1:,}")


def _after_space(text: str, place: int) -> int:
    space = _SPACE.match(text, place)
    assert space is not None
    return space.end()


def _plain(kind: Any, value: Any) -> Any:
    """Return an Arrow value as a JSON line would contain it.

    JSON is decoded. Other records' keys, which a table fills with null, are removed.
    """
    if getattr(kind, "extension_name", "") == "arrow.json" and value is not None:
        return json.loads(value)
    if isinstance(value, dict):
        return {
            field.name: _plain(field.type, part)
            for field in kind
            if (part := value[field.name]) is not None
        }
    if isinstance(value, list) and hasattr(kind, "item_type"):  # a map
        return {key: _plain(kind.item_type, part) for key, part in value}
    return [_plain(kind.value_type, part) for part in value] if isinstance(value, list) else value


def _columns(path: str, keys: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the table columns that contain the keys: no others need to be read."""
    wanted = {key if key in columns else key.partition(".")[0] for key in keys}
    if not wanted.intersection(columns):
        raise DataError(
            f"{path}: has no column {' or '.join(keys)} (--json_key), but {', '.join(columns)}"
        )
    return [column for column in columns if column in wanted]


@contextlib.contextmanager
def _damage(path: str) -> Iterator[None]:
    """Convert an error of pyarrow, which has many classes, or of a JSON column to an error about
    the file."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        own = isinstance(error, ValueError | RecursionError) or type(error).__module__.startswith(
            "pyarrow"
        )
        if not own and not (isinstance(error, OSError) and error.errno is None):
            raise
        text = " ".join(str(error).split())
        raise DataError(f"{path}: damaged or not what its name says: {text}") from error
