"""Read a tokenizer for what it says in effect: two plain files, which the rest of the program reads.

A folder means what transformers makes of it (`rendering.described`). A folder that says no more than its tokenizer.json
and the names of its special tokens needs no transformers, nor does a file without others beside it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.corpus.confined import Limits, confined
from megatron_lite.data.disk_array import replace_file
from megatron_lite.data.tokenizing import (
    ADDED,
    BYTE,
    CONFIG_NAME,
    SPECIAL_MAP,
    JsonTokenizer,
    Tokenizer,
    config_beside,
    load_tokenizer,
    named_tokens,
    read_object,
    read_tokenizer_file,
    tokenizer_json,
)
from megatron_lite.errors import DataError, UsageError

LOADING = Limits(seconds=300.0, memory_bytes=2**40, answer_bytes=2**29, program="the tokenizer")
# Classes that take tokenizer.json as it is, and architectures that leave the choice of the class to the folder.
PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
FREE = ("llama", "mistral", "gpt2", "gpt_bigcode", "starcoder2", "qwen3")
INSTALL = "pip install 'megatron_lite[chat]' (in a checkout: pip install -e '.[chat]')"


class Effective(NamedTuple):
    tokenizer: bytes  # tokenizer.json
    config: dict[str, Any]  # tokenizer_config.json, with special tokens by name and chat templates; perhaps empty

    def write(self, path: Path, special_tokens: bool) -> JsonTokenizer:
        """Write `x.tokenizer.json` and its configuration; return the tokenizer, perhaps without an end of documents."""
        replace_file(path, self.tokenizer)
        if self.config:
            replace_file(path.with_name(path.name.removesuffix("tokenizer.json") + CONFIG_NAME), as_json(self.config))
        return JsonTokenizer(str(path), special_tokens, needs_end=False)

    def open(self, special_tokens: bool = True) -> JsonTokenizer:
        """Return the tokenizer."""
        with tempfile.TemporaryDirectory() as place:
            return self.write(Path(place, "tokenizer.json"), special_tokens)


def as_json(values: Any) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def in_library(name: str, *arguments: Any, limits: Limits = LOADING) -> Any:
    """Return the result of a function of `rendering`, in its process. Raises: UsageError without transformers."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("jinja2") is None:
        raise UsageError(f"chat templates and this tokenizer need transformers and jinja2: {INSTALL}")
    return confined(limits, _call, name, *arguments)


def _call(name: str, *arguments: Any) -> Any:
    function: Callable[..., Any] = getattr(importlib.import_module("megatron_lite.corpus.rendering"), name)
    return function(*arguments)


def effective(tokenizer: str, for_chat: bool = False) -> Effective:
    """Read a tokenizer.json, the folder of one, or `byte`. for_chat: its templates are needed, too.

    Raises: DataError if it cannot be read, needs code of its own, or gives other ids or tokens than it states;
        UsageError if that takes transformers, which is not installed.
    """
    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    content, config = tokenizer_json(path), read_object(config_beside(path))
    if tokenizer != BYTE:
        _check_ids(path, content)
        folder = path.parent
        if path.name == "tokenizer.json" and (for_chat or _says_more(folder, json.loads(content), config)):
            found = in_library("described", str(folder))
            plain = {key: value for key, value in config.items() if not isinstance(value, dict | list)}
            plain = {key: value for key, value in plain.items() if not key.endswith("_token")} | found["tokens"]
            config = plain | {"tokenizer_class": PLAIN[0], "chat_template": found["template"]}
            checked = Effective(found["tokenizer"].encode(), config)
            _compare(folder, checked.open(), found["ids"])
            return checked
    return Effective(content, config | named_tokens(path))


def _says_more(folder: Path, content: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether the files beside a tokenizer.json state a class, a token, an id or a flag that it does not."""
    kind, model_type = config.get("tokenizer_class"), read_object(folder / "config.json").get("model_type")
    if kind not in (None, *PLAIN) or model_type not in (None, *FREE) or "auto_map" in config:
        return True
    if config.get("split_special_tokens") or (kind is None and model_type is not None):
        return True
    added = {entry["content"]: entry for entry in content.get("added_tokens", [])}
    try:
        return not all(token.items() <= added[token["content"]].items() for token in _stated(folder, config))
    except (AttributeError, KeyError, TypeError, ValueError):
        return True


def _stated(folder: Path, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tokens that the files state, with what they say of each."""
    for number, token in config.get("added_tokens_decoder", {}).items():
        yield {"id": int(number), **token}
    for text, number in read_object(folder / ADDED).items():
        yield {"id": number, "content": text}
    for values in (config, read_object(folder / SPECIAL_MAP)):
        for key, value in values.items():
            if key.endswith("special_tokens") and isinstance(value, dict):
                value = list(value.values())
            if key.endswith(("_token", "special_tokens")):
                for token in value if isinstance(value, list) else [value]:
                    if isinstance(token, str):
                        yield {"special": True, "content": token}
                    elif isinstance(token, dict):
                        yield {"special": True, **{name: part for name, part in token.items() if name != "__type"}}


def _check_ids(path: Path, content: bytes) -> None:
    """Compare the ids that a tokenizer.json states for added tokens with those of the library."""
    library = read_tokenizer_file(path)
    for entry in json.loads(content).get("added_tokens", []):
        given = library.token_to_id(entry["content"])
        if given != entry["id"]:
            raise DataError(
                f"{path}: states the id {entry['id']} for {entry['content']}, which tokenizers gives {given}; number "
                "added tokens from the size of the vocabulary on"
            )


def _compare(folder: Path, own: JsonTokenizer, stated: list[tuple[str, list[int]]]) -> None:
    """Compare the ids of some texts with those of transformers."""
    for text, theirs in stated:
        ours = own.encode(text, template=True)
        if ours != theirs:
            place = next((n for n, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), 0)  # noqa: B905
            raise DataError(
                f"{folder}: token {place} of {text[:40]!r} is {theirs[place : place + 8]} ... in transformers and "
                f"{ours[place : place + 8]} ... by its tokenizer.json; save the tokenizer anew by save_pretrained"
            )


def open_tokenizer(name: str, special_tokens: bool) -> Tokenizer:
    """Load what a tokenizer says in effect, see `effective`. special_tokens: see JsonTokenizer."""
    if name == BYTE:
        return load_tokenizer(name)
    found = effective(name).open(special_tokens)
    found.path = name
    return found
