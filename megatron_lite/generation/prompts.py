"""Prompts as tokens, and continuations as text: what ends them, and what of them is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint import manifest
from megatron_lite.checkpoint.names import find_checkpoints
from megatron_lite.data.tokenizing import Tokenizer, load_tokenizer
from megatron_lite.errors import DataError
from megatron_lite.generation.continuation import Text


def open_tokenizer(model: Path, tokenizer_file: str | None, special_tokens: bool) -> Tokenizer:
    """The tokenizer named, or else that of a model's folder: its tokenizer.json, or the one a checkpoint was trained
    with. `special_tokens`: those spelled out in a text are taken for what they spell.

    Raises:
        DataError: if there is none, or it cannot be read.
    """
    if tokenizer_file is None and (model / "tokenizer.json").is_file():
        tokenizer_file = str(model / "tokenizer.json")
    if tokenizer_file is None:
        tokenizer_file = _trained_with(model)
        if tokenizer_file is None:
            raise DataError(f"{model} has no tokenizer.json; name one with --tokenizer_file")
        if not Path(tokenizer_file).exists():
            raise DataError(
                f"{model} was trained with --tokenizer_file={tokenizer_file}, which is not there any more; name one "
                "with --tokenizer_file"
            )
    return load_tokenizer(tokenizer_file, special_tokens=special_tokens)


def _trained_with(model: Path) -> str | None:
    """--tokenizer_file of the run that left a checkpoint, or the newest of a folder of them."""
    folders = [model, *(folder for _, folder in find_checkpoints(model))]
    for folder in folders:
        if (folder / manifest.MANIFEST_NAME).is_file():
            try:
                return manifest.read(folder).config.get("tokenizer_file")
            except manifest.DamagedError:
                continue
    return None


def end_tokens(model: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end a text: the tokenizer's end of document, and `eos_token_id` of generation_config.json or else
    config.json, one or a list.
    """
    for name in ("generation_config.json", "config.json"):
        try:
            found = json.loads((model / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        ids = [token for token in (found if isinstance(found, list) else [found]) if isinstance(token, int)]
        if ids:
            return frozenset((tokenizer.end_of_document, *ids))
    return frozenset((tokenizer.end_of_document,))


def read_prompts(content: bytes, name: str) -> list[str]:
    """The lines of a text file but for blank ones. `name` is the flag with its value, for messages.

    Raises:
        DataError: if there are none, or it is not UTF-8.
    """
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except ValueError as error:
        raise DataError(f"{name}: not UTF-8: {error}") from None
    found = [line.removesuffix("\r") for line in lines if line.strip()]
    if not found:
        raise DataError(f"{name}: holds no prompt; write one on each line")
    return found


def encode_prompt(tokenizer: Tokenizer, prompt: str, template: bool, vocab_size: int, longest: int) -> list[int]:
    """The tokens of a prompt; those of an empty one are the end of a document, after which another begins.

    Raises:
        DataError: if it does not fit the model, which has `vocab_size` tokens and takes texts of `longest` of them.
    """
    tokens = tokenizer.encode(prompt, template) or [tokenizer.end_of_document]
    shown = repr(prompt if len(prompt) <= 40 else prompt[:37] + "...")
    if max(tokens) >= vocab_size:
        raise DataError(
            f"token {max(tokens)} of the prompt {shown} is beyond the model's vocabulary of {vocab_size}: "
            "another tokenizer belongs to this model (--tokenizer_file)"
        )
    if len(tokens) >= longest:
        raise DataError(
            f"the prompt {shown} has {len(tokens):,} tokens, and a text of this model has {longest:,} at most, with "
            "what follows; shorten it"
        )
    return tokens


class Continuations:
    """The text of what follows a prompt, cut at the first of some strings."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)

    def text(self, text: Text) -> str:
        """What follows the prompt, without the stop string that ended it."""
        whole = self._decode(text)
        end = self._end(whole)
        return whole if end is None else whole[:end]

    def stopped(self, text: Text) -> bool:
        """Whether a stop string is complete, whichever tokens it consists of."""
        return bool(self._stops) and self._end(self._decode(text)) is not None

    def _decode(self, text: Text) -> str:
        """Together with the prompt: some tokenizers write a word's first token with a space only behind another."""
        before = self._tokenizer.decode(text.prompt)
        whole = self._tokenizer.decode([*text.prompt, *text.tokens])
        return whole[len(before) :] if whole.startswith(before) else self._tokenizer.decode(text.tokens)

    def _end(self, text: str) -> int | None:
        """Where the stop string begins that is the first to be complete, the longest of several."""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None


def numbered(prompts: Sequence[str]) -> list[tuple[str, int]]:
    """Each prompt with the number of equal ones before it: what its seed is made of, so that neither its place nor
    other prompts matter.
    """
    seen: dict[str, int] = {}
    result: list[tuple[str, int]] = []
    for prompt in prompts:
        result.append((prompt, seen.get(prompt, 0)))
        seen[prompt] = result[-1][1] + 1
    return result


def as_json(index: int, prompt: str, text: Text, continuation: str) -> dict[str, Any]:
    """One text for a line of JSON."""
    return {
        "index": index,
        "prompt": prompt,
        "text": continuation,
        "finish": text.finish,
        "prompt_tokens": len(text.prompt),
        "tokens": text.tokens,
    }
