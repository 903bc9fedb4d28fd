"""Load tokenizers: bytes, built in, and any `tokenizer.json` of the `tokenizers` library, which can
also train one.

The byte tokenizer has ids 0 to 255 for the bytes of UTF-8 and 256 for the end of a document.
`byte_tokenizer.json` describes it as a byte-level BPE without merges with the same ids, which
exports carry and other programs load. Its characters for bytes are those of GPT-2 (Radford et al.
2019). `tokenizers` is imported where it is used: reading token files does not need it.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.disk_array import reading, replace_file
from megatron_lite.errors import DataError, UsageError
from megatron_lite.run.regular_files import open_regular, read_bytes

SMALLEST_VOCABULARY = 257  # bytes and the end of a document
LARGEST_VOCABULARY = 2**24  # of a tokenizer trained here; more than any text can fill
# of a JSON file that is read whole; a tokenizer.json has up to some 40 MB
LARGEST_OBJECT_BYTES = 2**28
CHAR = "char"  # names a tokenizer made of the characters of a text
BYTE = "byte"  # names the byte tokenizer wherever a tokenizer.json may be given
BYTE_FILE = Path(__file__).with_name("byte_tokenizer.json")
END_OF_DOCUMENT, UNKNOWN = "<|endoftext|>", "<|unknown|>"
# Tokens that end a document in common tokenizers, in order of preference.
END_OF_DOCUMENT_NAMES = (
    END_OF_DOCUMENT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|eot_id|>",
    "<EOT>",
)
CONFIG_NAME = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
# Patterns of a tokenizer's other files, which an export copies if they exist; it copies nothing
# else.
BESIDE = (
    SPECIAL_MAP,
    ADDED,
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
# which use tokenizer.json as it is
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# transformers creates a tokenizer.json from these files and patterns.
_SOURCES = ("*.model", "vocab.json", "vocab.txt", "tekken.json")


class MarkedText(str):
    """A text whose characters [start, end) count in the loss."""

    def __new__(cls, text: str, spans: Sequence[tuple[int, int]]) -> MarkedText:
        marked = super().__new__(cls, text)
        marked.spans = spans
        return marked

    spans: Sequence[tuple[int, int]]


class TokenizerFiles(NamedTuple):
    """A tokenizer, as the content of two files."""

    tokenizer: bytes  # tokenizer.json
    config: dict[str, Any]  # tokenizer_config.json; empty if there is none


class JsonTokenizer:
    """A `tokenizer.json`; special tokens spelled out in a text are plain text unless
    `special_tokens` is set.

    Attributes: `library`, the configured `tokenizers.Tokenizer`, and those that `__init__`
    explains.
    """

    def __init__(
        self,
        path: str,
        special_tokens: bool = False,
        needs_end: bool = True,
        said: TokenizerFiles | None = None,
    ) -> None:
        """Load a tokenizer. said: content to use instead of its files; None: read them.

        Documents end with the `eos_token` of `named_tokens`. Unless `needs_end`, the id is -1
        without any.

        Raises: DataError if the file cannot be read or has no such token.
        """
        self.path, self._said = path, said or read_files(path)
        self.library = read_tokenizer_file(path, self._said.tokenizer)
        self.library.no_truncation()  # some files would cut or pad documents silently
        self.library.no_padding()
        if hasattr(self.library.model, "dropout"):
            self.library.model.dropout = None  # which would tokenize at random
        # Text must not forge the end of a document, unless the user declares its special tokens
        # real.
        self.library.encode_special_tokens = not special_tokens
        # Not the number of tokens: ids may have gaps.
        self.vocab_size = max(self.library.get_vocab().values(), default=-1) + 1
        self.named_tokens = named_tokens(self.library, self._said.config)
        token = self.named_tokens.get("eos_token")
        if token is None and needs_end:
            raise DataError(
                f"{path}: has no usual end-of-document token like {END_OF_DOCUMENT}; name the one to take"
            )
        self.end_of_document = -1 if token is None else int(self.library.token_to_id(token))
        begin = self.token_id(self.named_tokens.get("bos_token", ""))
        self.begin_of_document = -1 if begin is None else begin  # -1: its files name none
        added = self.library.get_added_tokens_decoder()
        special = (number for number, token in added.items() if token.special)
        self.special_ids = frozenset((*special, self.begin_of_document, self.end_of_document)) - {
            -1
        }

    def __reduce__(
        self,
    ) -> Any:  # the library's tokenizer would lose its options on the way to a worker
        return JsonTokenizer, (self.path, not self.library.encode_special_tokens, False, self._said)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None if the vocabulary lacks it."""
        found: int | None = self.library.token_to_id(token)
        return found

    def encode(self, text: str, template: bool = False) -> list[int]:
        """Encode a text; `template` adds the tokens that the file puts around it, such as a leading
        <s>."""
        return list(self.library.encode(text, add_special_tokens=template).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Encode each text into one array of ids."""
        encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        # The array takes a quarter of the time that NumPy takes to read a list.
        return [np.asarray(array("I", encoding.ids)) for encoding in encodings]

    def encode_marked(self, texts: Sequence[Any]) -> Iterator[NDArray[Any]]:
        """Yield each MarkedText's ids, with ~id for a token without a loss."""
        for encoding, text in zip(
            self.library.encode_batch(texts, add_special_tokens=False), texts, strict=True
        ):
            ids = np.array(encoding.ids, np.int64)
            places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            starts, ends = places.T
            inside = [(starts < end) & (ends > start) for start, end in text.spans]
            yield np.where(np.logical_or.reduce([ids < 0, *inside]), ids, ~ids)

    def decode(self, ids: Iterable[int], with_end: bool = False) -> str:
        """Decode ids; bytes that are not UTF-8 become U+FFFD. with_end: show end-of-document
        tokens."""
        visible = [int(number) for number in ids if with_end or number != self.end_of_document]
        return str(self.library.decode(visible, skip_special_tokens=False))

    def token_bytes(self) -> NDArray[np.int64]:
        """Return the number of UTF-8 bytes that each id adds to a text, (vocab_size,): 0 for
        special tokens.

        In a byte-level vocabulary each character is a byte; elsewhere, the count is for a token
        after another token. A byte-fallback token such as <0x0A> is one byte.
        """
        added = self.library.get_added_tokens_decoder()
        vocabulary, counts = self.library.get_vocab(), np.zeros(self.vocab_size, dtype=np.int64)
        anchor = max(
            (token for token in vocabulary if token.isascii() and token.isalpha()), default=""
        )
        is_byte_level = '"ByteLevel"' in json.dumps(json.loads(self.library.to_str())["decoder"])
        for token, number in vocabulary.items():
            if number in added:
                special = added[number].special or number == self.end_of_document
                counts[number] = 0 if special else len(added[number].content.encode())
            elif is_byte_level:
                counts[number] = len(token)
            elif re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
                counts[number] = 1
            else:
                first = [self.library.token_to_id(anchor)] if anchor else []
                both, alone = self.library.decode([*first, number]), self.library.decode(first)
                counts[number] = len(both.encode()) - len(alone.encode())
        return counts


class ByteTokenizer(JsonTokenizer):
    """The bytes of UTF-8 as token ids, which take no library, and 256 for the end of a document."""

    def __init__(self) -> None:
        super().__init__(BYTE)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


Tokenizer = JsonTokenizer


def load_tokenizer(
    path: str,
    special_tokens: bool = False,
    needs_end: bool = True,
    said: TokenizerFiles | None = None,
) -> Tokenizer:
    """Load `byte`, or a `tokenizer.json` as a JsonTokenizer. Raises: its errors."""
    return ByteTokenizer() if path == BYTE else JsonTokenizer(path, special_tokens, needs_end, said)


def train_tokenizer(texts: Iterator[str], vocab_size: int, path: str) -> JsonTokenizer:
    """Train a byte-level BPE with `vocab_size` tokens, including the end of a document, and write
    it to `path`.

    The same texts give the same file. The tokenizer encodes and decodes every text exactly, even
    unseen ones.

    Raises: UsageError if `vocab_size` is below 257 or above 2**24; StorageError if `path` cannot be
    written.
    """
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size > LARGEST_VOCABULARY:
        raise UsageError(
            f"a vocabulary of {vocab_size} is too large: at most {LARGEST_VOCABULARY} tokens"
        )
    if vocab_size < SMALLEST_VOCABULARY:
        raise UsageError(
            f"a vocabulary of {vocab_size} is too small: bytes and the end of a document are "
            f"{SMALLEST_VOCABULARY} tokens"
        )
    tokenizer = LibraryTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    replace_file(Path(path), tokenizer.to_str(pretty=True).encode())
    return JsonTokenizer(path)


def character_tokenizer(texts: Iterator[str], path: str) -> JsonTokenizer:
    """Make a token of each character in the texts, in the order of Unicode, after the end of a
    document and a token for other characters, and write the tokenizer to `path`.

    Raises: StorageError if `path` cannot be written.
    """
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models

    characters = set[str]().union(*texts)
    vocabulary = [END_OF_DOCUMENT, UNKNOWN, *sorted(characters)]
    tokens = {token: number for number, token in enumerate(vocabulary)}
    # no merges: every piece is a character; WordLevel would look up whole texts
    tokenizer = LibraryTokenizer(models.BPE(tokens, [], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END_OF_DOCUMENT, UNKNOWN])
    replace_file(Path(path), tokenizer.to_str(pretty=True).encode())
    return JsonTokenizer(path)


def files_beside(tokenizer_file: Path) -> list[Path]:
    """Return the files matching BESIDE in a tokenizer.json's folder.

    Excludes a special_tokens_map.json that removes a token: exports name the one that training
    uses.
    """
    found = (
        path
        for pattern in BESIDE
        for path in sorted(tokenizer_file.parent.glob(pattern))
        if path.is_file()
    )
    return [
        path for path in found if path.name != SPECIAL_MAP or None not in read_object(path).values()
    ]


def without_dropout(content: bytes) -> bytes:
    """Return a tokenizer.json without dropout, which would tokenize at random."""
    said = json.loads(content)
    return json.dumps(said).encode() if said["model"].pop("dropout", None) else content


def copy_tokenizer(
    tokenizer_file: str | Path, directory: str | Path, keep_class: bool = False
) -> dict[str, int | None]:
    """Copy a tokenizer into an export so that transformers loads it.

    keep_class: also keep a class that splits text itself; else use one that gives tokenizer.json's
    ids.

    Writes `tokenizer.json`, `tokenizer_config.json`, and the files matching BESIDE in the source's
    folder. A tokenizer_config.json there is copied, with a class and an end of document added if it
    names none. If the source is not called tokenizer.json, the other files may belong to another
    tokenizer: only the special tokens of the tokenizer_config.json are used, unless it is named
    after the source (see `config_beside`). A tokenizer without an end of document is copied without
    one.

    Returns: bos_token_id and eos_token_id, None where unknown.
    Raises: DataError if `tokenizer_file` is not a tokenizer; StorageError if `directory` cannot be
    written.
    """
    source, directory = Path(tokenizer_file), Path(directory)
    said = read_files(source)
    beside = config_beside(source)
    is_whole = source.name == "tokenizer.json"
    tokenizer = read_tokenizer_file(source, said.tokenizer)
    tokens = named_tokens(tokenizer, said.config)
    config = read_object(beside) if is_whole or beside.name != CONFIG_NAME else {}
    config = config or {"clean_up_tokenization_spaces": False}
    kind = config.get("tokenizer_class")
    own = (
        {}
        if kind in PLAIN_CLASSES or (keep_class and kind)
        else {"tokenizer_class": PLAIN_CLASSES[0]}
    )
    changed = config | tokens | own
    content = beside.read_bytes() if changed == config else json.dumps(changed, indent=2).encode()
    replace_file(directory / CONFIG_NAME, content)
    replace_file(directory / "tokenizer.json", without_dropout(said.tokenizer))
    for path in files_beside(source) if is_whole else ():
        target = directory / path.relative_to(source.parent)
        target.parent.mkdir(exist_ok=True)
        with reading(path):
            replace_file(target, path.read_bytes())
    return {
        f"{key}_id": tokenizer.token_to_id(tokens[key]) if key in tokens else None
        for key in ("bos_token", "eos_token")
    }


def has_tokenizer(path: str | Path) -> bool:
    """Return whether a path names a file, or `byte`."""
    return str(path) == BYTE or Path(path).is_file()


def tokenizer_json(path: str | Path) -> bytes:
    """Return a tokenizer file's bytes; for `byte`, a file with the same ids.

    Raises: DataError if it cannot be read.
    """
    path = Path(path) if str(path) != BYTE else BYTE_FILE
    found = sorted(file.name for pattern in _SOURCES for file in path.parent.glob(pattern))
    if found and (not path.exists() or path.name in found):
        make = 'AutoTokenizer.from_pretrained("FOLDER").save_pretrained("NEW")'
        raise DataError(
            f"{path}: {', '.join(found)} without a tokenizer.json; make one with transformers and give NEW: "
            f"python -c 'from transformers import AutoTokenizer; {make}'"
        )
    if path.is_dir():
        raise DataError(f"{path}: is a folder; give the tokenizer.json in it")
    with reading(path), open_regular(path, follow_links=True) as file:
        return file.readall()


def read_tokenizer_file(path: str | Path, content: bytes | None = None) -> Any:
    """Load a `tokenizers.Tokenizer` from a file, from `byte`, or from its content.

    Raises: DataError if it cannot be read or is not a tokenizer.
    """
    from tokenizers import Tokenizer as LibraryTokenizer

    content = tokenizer_json(path) if content is None else content
    try:
        return LibraryTokenizer.from_str(content.decode())
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{path}: not a tokenizer.json: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file contains none, cannot be read or is larger than
    LARGEST_OBJECT_BYTES."""
    try:
        values = json.loads(read_bytes(path, LARGEST_OBJECT_BYTES, follow_links=True).decode())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def config_beside(tokenizer_file: Path) -> Path:
    """Return a tokenizer's configuration file; for `x.tokenizer.json`, prefer
    `x.tokenizer_config.json`."""
    own = tokenizer_file.with_name(tokenizer_file.name.removesuffix("tokenizer.json") + CONFIG_NAME)
    return (
        own
        if own.is_file() or str(tokenizer_file) == BYTE
        else tokenizer_file.with_name(CONFIG_NAME)
    )


def read_files(tokenizer_file: str | Path) -> TokenizerFiles:
    """Read a tokenizer.json, or `byte`, and its configuration with the special tokens from the
    files around it.

    As in transformers, a special_tokens_map.json comes first, unless the configuration lists all
    added tokens.

    Raises: DataError if the tokenizer.json cannot be read.
    """
    path = Path(tokenizer_file)
    config = read_object(config_beside(path))
    if path.name == "tokenizer.json" and "added_tokens_decoder" not in config:
        config |= read_object(path.with_name(SPECIAL_MAP))
    return TokenizerFiles(tokenizer_json(path), config)


def named_tokens(tokenizer: Any, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a configuration names.

    `eos_token` is always in the vocabulary: by default the first of END_OF_DOCUMENT_NAMES, if any.
    """
    tokens = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token")
    }
    ends = [tokens.pop("eos_token", None), *END_OF_DOCUMENT_NAMES]
    known = (end for end in ends if isinstance(end, str) and tokenizer.token_to_id(end) is not None)
    named = tokens | {"eos_token": next(known, None)}
    return {key: value for key, value in named.items() if isinstance(value, str)}
