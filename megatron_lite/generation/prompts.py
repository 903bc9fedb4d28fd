"""Turn prompts into tokens, and continuations into text up to their stop string."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint import manifest
from megatron_lite.checkpoint.names import MANIFEST_NAME
from megatron_lite.checkpoint.rotation import pinned
from megatron_lite.corpus.tokenizer_folder import effective
from megatron_lite.data.tokenizing import Tokenizer, has_tokenizer, load_tokenizer, read_object
from megatron_lite.errors import DamagedError, DataError
from megatron_lite.generation.continuation import Text
from megatron_lite.huggingface.model_folder import ADAPTER_NAME, base_of, source_folders


def open_tokenizer(model: Path, tokenizer_file: str | None, special_tokens: bool) -> Tokenizer:
    """Load `tokenizer_file`, or else the tokenizer.json in a model's folder, or a checkpoint's
    training tokenizer.

    special_tokens: whether a text may spell special tokens.

    Raises:
        CheckpointError: if there is none, because the folder contains no model.
        DataError: if there is none, or it cannot be read.
        RotatedError: if a live run deletes what is read; see `rotation.again`.
    """
    if tokenizer_file is None:
        named = list(_tokenizers_of(model))
        tokenizer_file = next(filter(has_tokenizer, named), None)
        if tokenizer_file is None:
            gone = (
                f"was trained with --tokenizer_file={named[0]}, which no longer exists"
                if named
                else ""
            )
            raise DataError(
                f"{model} {gone or 'has no tokenizer.json'}; name one with --tokenizer_file"
            )
    return load_tokenizer(tokenizer_file, special_tokens, said=effective(tokenizer_file))


def _tokenizers_of(model: Path) -> Iterator[str]:
    """Yield the tokenizer.json of each model in a folder, or of its adapters' model, newest first, or
    else its training's --tokenizer_file."""
    base = model
    if (adapter := model / ADAPTER_NAME).is_file():
        base = base_of(model, read_object(adapter).get("base_model_name_or_path"))
    for folder in (model, *(folder for _, folder in source_folders(base))):
        check = pinned(folder)
        if (folder / "tokenizer.json").is_file():
            yield str(folder / "tokenizer.json")
        elif (folder / MANIFEST_NAME).is_file():
            with contextlib.suppress(DamagedError):
                if (named := manifest.read(folder).config.get("tokenizer_file")) is not None:
                    yield named
        check()


def end_tokens(model: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a text: the tokenizer's end of document, and the model's
    `eos_token_id`.

    generation_config.json comes before config.json; `eos_token_id` is a number or a list.
    """
    for name in ("generation_config.json", "config.json"):
        found = read_object(model / name).get("eos_token_id")
        ids = [
            token
            for token in (found if isinstance(found, list) else [found])
            if isinstance(token, int)
        ]
        if ids:
            return frozenset((tokenizer.end_of_document, *ids))
    return frozenset((tokenizer.end_of_document,))


def read_prompts(content: bytes, name: str) -> list[str]:
    """Return a text file's nonblank lines. `name` is the flag with its value, for messages.

    Raises:
        DataError: if there is no such line, or the file is not UTF-8.
    """
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except ValueError as error:
        raise DataError(f"{name}: not UTF-8: {error}") from None
    found = [line.removesuffix("\r") for line in lines if line.strip()]
    if not found:
        raise DataError(f"{name}: holds no prompt; write one per line")
    return found


def encode_prompt(
    tokenizer: Tokenizer, prompt: str, template: bool, vocab_size: int, longest: int
) -> list[int]:
    """Encode a prompt; an empty one becomes the end of a document, after which another begins.

    Raises:
        DataError: if a token is beyond the vocabulary, or a text of `longest` tokens has no room
            after the prompt.
    """
    tokens = tokenizer.encode(prompt, template) or [tokenizer.end_of_document]
    shown = repr(prompt if len(prompt) <= 40 else prompt[:37] + "...")
    if max(tokens) >= vocab_size:
        raise DataError(
            f"token {max(tokens)} of the prompt {shown} is beyond the model's vocabulary of {vocab_size}: "
            "give the model's own tokenizer with --tokenizer_file"
        )
    if len(tokens) >= longest:
        raise DataError(
            f"the prompt {shown} has {len(tokens):,} tokens, but prompt and continuation together have at most "
            f"{longest:,} (--sequence_length); shorten the prompt or the conversation"
        )
    return tokens


class Continuations:
    """Decodes continuations and cuts them at the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)

    def text(self, text: Text) -> str:
        """Return a prompt's continuation, without the stop string that ended it."""
        whole = self._decode(text)
        return whole[: self._end(whole)]

    def certain(self, text: Text) -> str:
        """Return the part of a growing continuation that no further token changes: without a stop
        string and what follows in its token, half a character, or half a stop string at its end."""
        whole = self.text(text).rstrip("\ufffd")
        held = max((_begun(stop, whole) for stop in self._stops), default=0)
        return whole[: len(whole) - held]

    def stopped(self, text: Text) -> bool:
        """Return whether the continuation contains a stop string, which may span tokens."""
        return bool(self._stops) and self._end(self._decode(text)) is not None

    def _decode(self, text: Text) -> str:
        """Decode with the prompt: some tokenizers write a leading space only after another
        token."""
        before = self._tokenizer.decode(text.prompt)
        whole = self._tokenizer.decode([*text.prompt, *text.tokens])
        return (
            whole[len(before) :]
            if whole.startswith(before)
            else self._tokenizer.decode(text.tokens)
        )

    def _end(self, text: str) -> int | None:
        """Return the start of the stop string that ends first; if several end there, the longest
        one's."""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None


def _begun(stop: str, text: str) -> int:
    """Return how many characters of a stop string `text` ends with."""
    return next(size for size in range(len(stop), -1, -1) if text.endswith(stop[:size]))


def token_text(tokenizer: Tokenizer, before: int, token: int) -> str:
    """Return what a token adds to a text after another token; its name in the vocabulary if that is
    a part of a character."""
    both, alone = (tokenizer.decode(ids, with_end=True) for ids in ([before, token], [before]))
    text = both[len(alone) :] if both.startswith(alone) else tokenizer.decode([token], True)
    return text if "\ufffd" not in text else str(tokenizer.library.id_to_token(token))


def numbered(prompts: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Pair each prompt with the number of equal prompts before it.

    Seeds derive from these pairs, so they do not depend on a prompt's place or on other prompts.
    """
    seen = Counter[str]()
    for prompt in prompts:
        yield prompt, seen[prompt]
        seen[prompt] += 1


def as_json(index: int, prompt: str, text: Text, continuation: str) -> dict[str, Any]:
    """Return a text as an object for a JSON line."""
    counted = {"finish": text.finish, "prompt_tokens": len(text.prompt), "tokens": text.tokens}
    return {"index": index, "prompt": prompt, "text": continuation, **counted}
