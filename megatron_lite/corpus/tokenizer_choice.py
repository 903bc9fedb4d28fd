"""Choose a corpus's tokenizer: given or trained on the input, with its begin and end of
documents."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_lite.corpus.documents import TextFields, whole_texts
from megatron_lite.corpus.fast_tokenizer import FAST, FastTokenizer, UnfitError
from megatron_lite.corpus.inputs import InputFile
from megatron_lite.corpus.pieces import ABSENT, Encoding, digest_of
from megatron_lite.corpus.tokenizer_folder import effective
from megatron_lite.data.disk_array import replace_file, replace_json
from megatron_lite.data.tokenizing import (
    BYTE,
    CONFIG_NAME,
    JsonTokenizer,
    character_tokenizer,
    config_beside,
    files_beside,
    tokenizer_json,
    train_tokenizer,
    without_dropout,
)
from megatron_lite.errors import UsageError

# Input size: loading fastokens and proving its ids takes as long as `tokenizers` takes for this
# much text.
WORTHWHILE_BYTES = 1 << 20
BYTES, SMALL = "bytes need no library", "the input is small"  # reasons not worth a message


@dataclass(frozen=True)
class TokenizerChoice:
    """The user's choice of tokenizer.

    begin, end: a token, `none`, or None for the default: no token at the beginning, the tokenizer's
    own at the end.
    """

    name: str = "byte"  # or a path
    # vocabulary size of a tokenizer to train, or CHAR
    train: int | str | None = None
    begin: str | None = None
    end: str | None = None
    special_tokens: bool = False
    library: str = "auto"  # or tokenizers, or fastokens; the ids are the same

    @property
    def source(self) -> Path:
        """A given tokenizer's file."""
        path = Path(self.name)
        return path / "tokenizer.json" if path.is_dir() else path

    def described(self) -> dict[str, object]:
        """Return the choice for the summary."""
        kind = "byte" if self.name == BYTE else "file"
        if self.train is not None:
            kind = f"trained, {self.train}"
        return {
            "kind": kind,
            "begin": self.begin,
            "end": self.end,
            "special_tokens": self.special_tokens,
        }

    def identity(self) -> str:
        """Return text that identifies this tokenizer, without training it."""
        if self.train is not None or self.name == BYTE:
            return str(self.described()["kind"])
        own = hashlib.sha256(tokenizer_json(self.source)).hexdigest()
        beside = config_beside(self.source)
        files = [beside]  # which may name the end of a document
        if self.source.name == "tokenizer.json":  # and everything that transformers reads
            files += [*files_beside(self.source), beside.with_name("config.json")]
        return "".join([own, *(digest_of(file) for file in files if file.is_file())])

    def open(
        self, folder: Path, files: Sequence[InputFile], fields: TextFields, strict: bool
    ) -> tuple[Encoding, JsonTokenizer]:
        """Train the tokenizer if necessary, put its file into the work folder, and return its
        encoding and the tokenizer.

        Raises:
            DataError: if it cannot be read or has no end of documents.
            UsageError: if it lacks a token that the user names, or cannot be trained to the
                requested size.
        """
        path, config = folder / "given.tokenizer.json", {}
        if self.train is not None:
            key = hashlib.sha256(
                repr((self.train, files, fields)).encode(errors="surrogateescape")
            ).hexdigest()
            path = folder / f"trained-{key[:32]}.json"
            if not path.is_file():
                # Faults are counted in the second pass; with `strict` the first one ends this one.
                texts = whole_texts(files, fields, strict, purpose="reading for the tokenizer")
                if isinstance(self.train, str):
                    character_tokenizer(texts, str(path))
                elif train_tokenizer(texts, self.train, str(path)).vocab_size < self.train:
                    print(
                        f"the texts are too small for a vocabulary of {self.train}", file=sys.stderr
                    )
            given = JsonTokenizer(str(path), self.special_tokens)
        else:
            said = effective(str(self.source))
            needs_end = self.end is None and not fields.marked
            given = JsonTokenizer(str(self.source), self.special_tokens, needs_end, said)
            config = said.config
            replace_file(path, without_dropout(said.tokenizer))
        end = (
            given.end_of_document
            if self.end is None
            else self._token(given, "end_of_document", self.end)
        )
        begin = self._token(given, "begin_of_document", self.begin or ABSENT)
        if self.end not in (None, ABSENT):
            config = {**config, "eos_token": self.end}  # exports and samples also end with it
        if config:
            replace_json(
                path.with_name(path.name.removesuffix("tokenizer.json") + CONFIG_NAME), config
            )
        model = json.loads(path.read_bytes())["model"]
        unknown = model.get("unk_id", given.token_id(model.get("unk_token") or ""))
        is_byte, special_tokens = self.name == BYTE and self.train is None, self.special_tokens
        if fields.marked:  # the texts spell their special tokens, including the last one
            is_byte = False
            end = None
            special_tokens = True
        digest = digest_of(path)
        return Encoding(
            path.name, is_byte, digest, given.vocab_size, begin, end, special_tokens, unknown
        ), given

    def fast_version(self, files: Sequence[InputFile], fields: TextFields) -> str:
        """Return fastokens' version if it may be used. Raises: UnfitError with the reason if
        not."""
        size_bytes = sum(file.size_bytes for file in files)
        version = next((found.version for found in metadata.distributions(name=FAST)), "")
        reasons = {
            "only tokenizers may (--tokenizer_library, --per_token)": self.library == "tokenizers",
            BYTES: self.name == BYTE and self.train is None,
            "conversations need the places of tokens in the text": fields.marked,
            "a pipe can be read only once, and a wrong id would make all tokens anew": not all(
                file.regular for file in files
            ),
            SMALL: size_bytes < WORTHWHILE_BYTES and self.library == "auto",
            f"{FAST}, which is faster, is not installed: pip install '.[fast]'": not version,
        }
        for reason, holds in reasons.items():
            if holds:
                raise UnfitError(reason)
        return version

    def fast(
        self, given: Any, files: Sequence[InputFile], fields: TextFields
    ) -> FastTokenizer | None:
        """Load fastokens for a JsonTokenizer and prove its ids, or return None, with a message if
        the user may expect it.

        Raises: UsageError if the user requests it in vain.
        """
        try:
            self.fast_version(files, fields)
            found = FastTokenizer(given)
            found.prove()
        except UnfitError as reason:
            if self.library == FAST:
                raise UsageError(
                    f"--tokenizer_library={FAST}: {reason}; write auto, or tokenizers"
                ) from None
            if str(reason) not in (BYTES, SMALL):
                print(f"tokenizing without {FAST}: {reason}", file=sys.stderr)
            return None
        print(
            f"tokenizing with {FAST}: the ids of proof texts are those of tokenizers",
            file=sys.stderr,
        )
        return found

    def _token(self, tokenizer: JsonTokenizer, flag: str, token: str) -> int | None:
        if token == ABSENT:
            return None
        number = tokenizer.token_id(token)
        if number is None:
            raise UsageError(
                f"--{flag}={token}: {self.name}: has no such token; name one of its vocabulary, or {ABSENT}"
            )
        return number
