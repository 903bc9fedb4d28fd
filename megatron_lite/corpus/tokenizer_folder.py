"""Read a tokenizer with its effective settings.

A folder means what transformers makes of it (`rendering.described`). A folder that seems to contain
no more than its tokenizer.json and the names of its special tokens needs no transformers. A file of
another name is taken literally, and so is the tokenizer.json of our exports, as in their training.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_lite.config.training import MODEL_TYPES
from megatron_lite.corpus.confined import Limits, confined, end_process
from megatron_lite.data.tokenizing import (
    ADDED,
    BESIDE,
    CONFIG_NAME,
    PLAIN_CLASSES,
    SPECIAL_MAP,
    JsonTokenizer,
    TokenizerFiles,
    read_files,
    read_object,
    read_tokenizer_file,
)
from megatron_lite.errors import DataError, UsageError

LOADING = Limits(seconds=300.0, memory_bytes=2**40, answer_bytes=2**29, program="the tokenizer")
TRAINED = "megatron_lite"  # in the config.json of our exports, whose tokenizer.json gives the ids of the training
# Architectures for which the folder chooses the class; Qwen 2 has its own.
FREE = tuple(name for name in MODEL_TYPES if name != "qwen2")

# For exports that AutoTokenizer reads with another class, or with special tokens unknown to the
# training.
ADVICE = "load their tokenizer with transformers.PreTrainedTokenizerFast.from_pretrained(FOLDER)"


def has_library() -> bool:
    """Return whether a known version of transformers is installed, 5 or later."""
    try:
        return int(importlib.metadata.version("transformers").partition(".")[0]) >= 5
    except importlib.metadata.PackageNotFoundError:
        return False


def need_library() -> None:
    """Raise UsageError without transformers."""
    if not has_library():
        raise UsageError(
            "chat templates, and a tokenizer of which other files say more than its tokenizer.json, need transformers "
            "5 or later: pip install 'megatron_lite[chat]' (in a checkout: pip install -e '.[chat]')"
        )


def effective(path: str) -> TokenizerFiles:
    """Read a tokenizer.json, or `byte`.

    If installed, transformers is asked about every folder, which takes a second in another process.

    Raises: DataError if it cannot be read, needs code of its own, or gives other ids than it
        states; UsageError if that takes transformers, which is not installed.
    """
    said, folder = read_files(path), Path(path).parent
    if Path(path).name == "tokenizer.json":
        _refuse_pipes(folder)
    library = read_tokenizer_file(path, said.tokenizer)
    added = {
        entry["content"]: entry for entry in json.loads(said.tokenizer).get("added_tokens", [])
    }
    for pair in _same(library, added.values()):
        raise DataError(
            f"{path}: the added tokens {pair} are one text after its normalizer, and tokenizers takes one of them at "
            'random; set "normalized": false for both, or remove one'
        )
    for entry in added.values():
        if (given := library.token_to_id(entry["content"])) != entry["id"]:
            raise DataError(
                f"{path}: states the id {entry['id']} for {entry['content']}, which tokenizers gives {given}; number "
                "added tokens from the size of the vocabulary on"
            )
    if Path(path).name != "tokenizer.json" or not (has_library() or _says_more(folder, added)):
        return said
    need_library()
    tokenizer, tokens, template, ids = confined(LOADING, "described", str(folder))
    if TRAINED in read_object(folder / "config.json"):
        return TokenizerFiles(said.tokenizer, said.config | {"chat_template": template})
    ours, theirs = (
        json.loads(text) | {"post_processor": None} for text in (library.to_str(), tokenizer)
    )
    plain = {
        key: value for key, value in said.config.items() if isinstance(value, str | int | float)
    }
    config = plain | tokens | {"tokenizer_class": PLAIN_CLASSES[0], "chat_template": template}
    said = TokenizerFiles(said.tokenizer if ours == theirs else tokenizer.encode(), config)
    if reason := difference(JsonTokenizer(path, True, False, said), ids):
        raise DataError(f"{folder}: {reason}; save the tokenizer anew by its save_pretrained")
    return said


def compare_exports(file: str, model_type: str, warn: Callable[[str], None]) -> threading.Thread:
    """Start to compare the tokenizer in a run's exports with the training's ids; a difference is a
    warning.

    Returns: a thread that waits for the comparison, which `end_process` ends.
    """

    def compare() -> None:
        # the process was ended
        with contextlib.suppress(DataError), tempfile.TemporaryDirectory() as folder:
            if reason := confined(LOADING, "exported", file, model_type, folder):
                warn(f"AutoTokenizer on exports of this run: {reason}; {ADVICE}")
        end_process()  # it would keep memory

    thread = threading.Thread(target=compare, daemon=True, name="exported-tokenizer")
    thread.start()
    return thread


def difference(own: JsonTokenizer, stated: list[tuple[str, list[int]]]) -> str:
    """Compare ids of texts with those from transformers; return the shortest text's difference, if
    any."""
    different = (
        f"{text!r} is {theirs} in transformers, {ours} by tokenizer.json"
        for text, theirs in sorted(stated, key=lambda each: len(each[0]))
        if (ours := own.encode(text, template=True)) != theirs
    )
    return next(different, "")


def _same(library: Any, added: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield pairs of added tokens that the normalizer makes equal, in words."""
    first = dict[str, str]()
    for entry in added if library.normalizer else ():
        text = entry["content"]
        if entry["normalized"]:
            other = first.setdefault(library.normalizer.normalize_str(text), text)
            if other != text:
                yield f"{other!r} and {text!r}"


def _refuse_pipes(folder: Path) -> None:
    """Refuse a file of a tokenizer for which transformers would wait for ever."""
    for name in ("config.json", CONFIG_NAME, *BESIDE):
        for file in folder.glob(name):
            if file.exists() and not (file.is_file() or file.is_dir()):
                raise DataError(f"{file}: not a regular file; replace it by one, or remove it")


def _says_more(folder: Path, added: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json's companion files state a class, a token, an id or a flag
    that it does not.

    added: its added tokens by their content.
    """
    files = [folder / name for name in (CONFIG_NAME, SPECIAL_MAP)]
    beside = [read_object(file) for file in files]
    if any(
        file.is_file() and not read_object(file) and file.read_bytes().strip() != b"{}"
        for file in files
    ):
        return True  # damaged
    model = read_object(folder / "config.json")
    if TRAINED in model:
        return False
    kind, model_type = (model | beside[0]).get("tokenizer_class"), model.get("model_type")
    is_plain = (
        model_type in (None, *FREE) if kind in PLAIN_CLASSES else (kind, model_type) == (None, None)
    )
    if not is_plain or beside[0].get("split_special_tokens"):
        return True
    ids = read_object(folder / ADDED)
    stated = [
        *_stated(beside, ""),
        *({"content": text, "id": number} for text, number in ids.items()),
    ]
    return not all(token.items() <= added.get(token["content"], {}).items() for token in stated)


def _stated(part: Any, key: str) -> Iterator[dict[str, Any]]:
    """Yield the tokens in a part of a file under `key`, with their stated properties."""
    if isinstance(part, dict) and isinstance(part.get("content"), str):
        flags = {name: value for name, value in part.items() if name != "__type"}
        yield flags | ({"id": int(key)} if key.isdecimal() else {"special": True})
    elif isinstance(part, dict):
        for name, value in part.items():
            yield from _stated(value, key if key.endswith("special_tokens") else name)
    elif isinstance(part, list) and not key.endswith("_token"):
        for value in part:
            yield from _stated(value, key)
    elif not isinstance(part, bool | None) and key.endswith(("_token", "special_tokens")):
        # A number or a list is no token, whatever it means.
        yield {"content": str(part), "special": True}
