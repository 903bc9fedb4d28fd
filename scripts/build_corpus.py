"""Write a folder of Python files as a .jsonl corpus for prepare_data.py; by default, the standard
library.

    python scripts/build_corpus.py --output corpus.jsonl
    python scripts/build_corpus.py --output corpus.jsonl --source ~/code --max_bytes 5e6

Each file is one document: {"path": ..., "text": ...}. Every interpreter has the standard library,
so no download is needed. Files are sorted by a hash of their path, so the order is the same on
every machine with the same files, and the last documents (the validation split) resemble the first.
"""

import argparse
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Tests and tables are poor examples of code; installed packages differ between machines.
SKIPPED_FOLDERS = frozenset(
    (
        "test",
        "tests",
        "idle_test",
        "idlelib",
        "lib2to3",
        "distutils",
        "turtledemo",
        "encodings",
        "pydoc_data",
    )
    + ("site-packages", "dist-packages", "__pycache__")
)


def source_files(root: Path) -> list[Path]:
    """Return the .py files under `root` as relative paths, sorted by a hash of the path."""
    found = (path.relative_to(root) for path in root.rglob("*.py") if path.is_file())
    kept = (path for path in found if SKIPPED_FOLDERS.isdisjoint(path.parts))
    return sorted(kept, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())


def documents(root: Path, max_bytes: float) -> Iterator[dict[str, str]]:
    """Yield documents up to `max_bytes` of text; skip empty files and files that are not UTF-8."""
    total_bytes = 0
    for path in source_files(root):
        try:
            text = (root / path).read_text("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        total_bytes += len(text.encode())
        if total_bytes > max_bytes:
            return
        if text.strip():
            yield {"path": path.as_posix(), "text": text}


def main() -> int:
    """Write the corpus; return 3 (data) if there is nothing to write, 8 (storage) if it cannot be
    written."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, help=".jsonl file to write")
    parser.add_argument(
        "--source", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder to read"
    )
    parser.add_argument(
        "--max_bytes",
        type=float,
        default=float("inf"),
        help="stop before the text exceeds this size",
    )
    options = parser.parse_args()
    partial = options.output.with_name(options.output.name + ".partial")
    count = text_bytes = 0
    try:
        with partial.open("w", encoding="utf-8") as file:
            for document in documents(options.source, options.max_bytes):
                file.write(json.dumps(document) + "\n")
                count += 1
                text_bytes += len(document["text"].encode())
        if count:
            partial.replace(options.output)
        else:
            partial.unlink()
    except OSError as error:
        print(f"build_corpus.py: cannot write {options.output}: {error.strerror}", file=sys.stderr)
        return 8
    if not count:
        print(f"build_corpus.py: no .py files found in --source {options.source}", file=sys.stderr)
        return 3
    print(
        f"{options.output}: {count} files, {text_bytes / 1e6:.1f} MB of text from {options.source}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
