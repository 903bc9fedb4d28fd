"""The tokenizer of a corpus: given or trained on the input, with its begin and end of documents."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.corpus.documents import TextFields, whole_texts
from megatron_lite.corpus.inputs import InputFile
from megatron_lite.corpus.pieces import ABSENT, Encoding, digest_of
from megatron_lite.corpus.tokenizer_folder import effective
from megatron_lite.data.disk_array import replace_file, replace_json
from megatron_lite.data.tokenizing import (
    BYTE,
    CONFIG_NAME,
    JsonTokenizer,
    config_beside,
    files_beside,
    tokenizer_json,
    train_tokenizer,
    without_dropout,
)
from megatron_lite.errors import UsageError


@dataclass(frozen=True)
class TokenizerChoice:
    """The user's choice.

    begin, end: a token, `none`, or None for the default: no token at the beginning, the tokenizer's own at the end.
    """

    name: str = "byte"  # or a path
    train: int | None = None  # vocabulary size of a tokenizer to train
    begin: str | None = None
    end: str | None = None
    special_tokens: bool = False

    @property
    def source(self) -> Path:
        """The file of a given tokenizer."""
        path = Path(self.name)
        return path / "tokenizer.json" if path.is_dir() else path

    def described(self) -> dict[str, object]:
        """Return the choice for the summary."""
        kind = "byte" if self.name == BYTE else "file"
        if self.train is not None:
            kind = f"trained, {self.train}"
        return {"kind": kind, "begin": self.begin, "end": self.end, "special_tokens": self.special_tokens}

    def identity(self) -> str:
        """Return text that identifies this tokenizer, without training it."""
        if self.train is not None or self.name == BYTE:
            return str(self.described()["kind"])
        own, beside = hashlib.sha256(tokenizer_json(self.source)).hexdigest(), config_beside(self.source)
        files = [beside]  # which may name the end of a document
        if self.source.name == "tokenizer.json":  # and all that transformers reads
            files += [*files_beside(self.source), beside.with_name("config.json")]
        return "".join([own, *(digest_of(file) for file in files if file.is_file())])

    def open(self, folder: Path, files: Sequence[InputFile], fields: TextFields, strict: bool) -> Encoding:
        """Train the tokenizer if necessary, put its file into the work folder, and find its tokens.

        Raises:
            DataError: if it cannot be read or has no end of documents.
            UsageError: if it lacks a token that the user names, or the vocabulary to train has no possible size.
        """
        path = folder / "given.tokenizer.json"
        if self.train is not None:
            key = hashlib.sha256(repr((self.train, files, fields)).encode(errors="surrogateescape")).hexdigest()
            path = folder / f"trained-{key[:32]}.json"
            if not path.is_file():
                # Faults are counted in the second pass; with `strict` the first one ends this one.
                texts = whole_texts(files, fields, strict, purpose="reading for the tokenizer")
                trained = train_tokenizer(texts, self.train, str(path))
                if trained.vocab_size < self.train:
                    print(f"the texts are too small for a vocabulary of {self.train}", file=sys.stderr)
            given = JsonTokenizer(str(path), self.special_tokens)
        else:
            said = effective(str(self.source))
            needs_end = self.end is None and not fields.marked
            given = JsonTokenizer(str(self.source), self.special_tokens, needs_end, said)
            replace_file(path, without_dropout(said.tokenizer))
            if said.config:
                replace_json(folder / f"given.{CONFIG_NAME}", said.config)
        end = given.end_of_document if self.end is None else self._token(given, "end_of_document", self.end)
        begin = self._token(given, "begin_of_document", self.begin or ABSENT)
        model = json.loads(path.read_bytes())["model"]
        unknown = model.get("unk_id", given.token_id(model.get("unk_token") or ""))
        is_byte, special_tokens = self.name == BYTE and self.train is None, self.special_tokens
        if fields.marked:  # the texts spell their special tokens, the last one too
            is_byte, end, special_tokens = False, None, True
        return Encoding(path.name, is_byte, digest_of(path), given.vocab_size, begin, end, special_tokens, unknown)

    def _token(self, tokenizer: JsonTokenizer, flag: str, token: str) -> int | None:
        if token == ABSENT:
            return None
        number = tokenizer.token_id(token)
        if number is None:
            raise UsageError(
                f"--{flag}={token}: {self.name}: has no such token; name one of its vocabulary, or {ABSENT}"
            )
        return number
