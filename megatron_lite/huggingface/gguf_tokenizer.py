"""Describe a tokenizer to llama.cpp, which splits texts by rules of its own: a tokenizer that follows
none of them is refused."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_lite.data.tokenizing import JsonTokenizer, load_tokenizer, read_files
from megatron_lite.errors import DataError

# llama.cpp's name of a rule, and the steps of a tokenizer.json that it follows; *: the bytes of what
# was split. "spaces" and "prefixed" are SentencePiece's models, the second with a space before each text.
_RULES = r"""
gpt-2 ByteLevel
gpt-2 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ *
smollm Digits ByteLevel
qwen2 (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+ *
smaug-bpe (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+ *
spaces ▁
spaces ▁ {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false}
prefixed {"type": "Prepend", "prepend": "▁"} ▁
"""
# Steps of which only these settings are known.
_STEPS = MappingProxyType(
    {
        '{"type": "ByteLevel", "add_prefix_space": false, "use_regex": true}': "ByteLevel",
        '{"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}': "*",
        '{"type": "Digits", "individual_digits": true}': "Digits",
        '{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}': "▁",
    }
)
_PATTERN = re.compile(
    r'{"type": "Split", "pattern": {"Regex": (".*")}, "behavior": "Isolated", "invert": false}'
)
# Types of tokens.
_NORMAL, _BYTE = 1, 6
_CONTROL, _USER_DEFINED = 3, 4
_UNUSED = 5


def tokenizer_keys(tokenizer_file: Path | None, vocab_size: int) -> dict[str, Any]:
    """Return the keys of a GGUF file for a tokenizer; None: for a model that takes ids only.

    Raises:
        DataError: if it cannot be read, or llama.cpp would give texts other ids.
    """
    if tokenizer_file is None:
        return {"tokenizer.ggml.model": "none"}
    tokenizer = load_tokenizer(str(tokenizer_file), special_tokens=True, needs_end=False)
    ids = {key: tokenizer.token_id(token) for key, token in tokenizer.named_tokens.items()}
    around = tokenizer.encode("", template=True)
    if around[:1] not in ([], [ids.get("eos_token")]):
        ids.setdefault("bos_token", around[0])
    begin, end = ([ids[key]] if key in ids else [] for key in ("bos_token", "eos_token"))
    try:
        if around not in ([], begin, end, begin + end):
            raise ValueError(f"it puts the ids {around} around a text")
        if tokenizer.vocab_size > vocab_size:
            raise ValueError(f"it has {tokenizer.vocab_size} ids, and the model {vocab_size}")
        keys = _rule(json.loads(tokenizer.library.to_str()))
    except ValueError as error:
        raise DataError(
            f"{tokenizer_file}: llama.cpp would give texts other ids than this tokenizer, for {error}; write "
            "--format=huggingface, which transformers and vLLM read"
        ) from None
    keys |= _tokens(tokenizer, vocab_size, keys.pop("rank", None))
    keys |= {"add_bos_token": around[:1] == begin != [], "add_eos_token": around[-1:] == end != []}
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    keys |= {
        f"{theirs}_token_id": ids[f"{name}_token"]
        for name, theirs in names.items()
        if ids.get(f"{name}_token") is not None
    }
    found = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    template = read_files(tokenizer_file).config.get("chat_template")
    return found | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _rule(said: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a tokenizer.json's model and splitting.

    Raises:
        ValueError: if llama.cpp has no such rule.
    """
    model = said["model"]
    parts = [part for key in ("normalizer", "pre_tokenizer") if (part := said[key])]
    steps = [
        _described(step)
        for part in parts
        for step in part.get("normalizers") or part.get("pretokenizers") or [part]
    ]
    rule = " ".join(steps).removeprefix('{"type": "NFC"} ')  # llama.cpp takes texts as they are
    if not model.get("merges") and rule == "*":
        rule = "ByteLevel"  # without merges, it does not matter where texts are split
    lines = (line.split(" ", 1) for line in _RULES.splitlines() if line)
    name = next((name for name, known in lines if known == rule), "")
    if not name or model["type"] != "BPE":
        raise ValueError(f"its {model['type']} splits them by {rule or 'no rule'}")
    if model["byte_fallback"] != (name in ("spaces", "prefixed")):
        raise ValueError(f"byte_fallback is {model['byte_fallback']}")
    if model["byte_fallback"]:
        return {"model": "llama", "add_space_prefix": name == "prefixed", "rank": _ranks(model)}
    if model["ignore_merges"] and name != "smaug-bpe":
        raise ValueError("it ignores merges")
    # llama-bpe is smaug-bpe that takes words of the vocabulary whole. Without merges the file would
    # not load: these characters stand for no byte.
    merges = [" ".join(pair) for pair in model["merges"]] or ["␀ ␀"]
    return {
        "model": "gpt2",
        "pre": "llama-bpe" if model["ignore_merges"] else name,
        "merges": merges,
    }


def _described(step: dict[str, Any]) -> str:
    """Return a step as `_RULES` has it."""
    step.pop("trim_offsets", None)
    text = json.dumps(step, ensure_ascii=False)
    found = _PATTERN.fullmatch(text)
    return str(json.loads(found[1])) if found else _STEPS.get(text, text)


def _ranks(model: dict[str, Any]) -> dict[str, int]:
    """Return the turn in which each token is made of two: llama.cpp joins any two tokens whose text
    is a token, which merges of SentencePiece's models do, too.

    Raises:
        ValueError: if other merges are made.
    """
    vocabulary, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
    halves = {
        (token[:cut], token[cut:])
        for token in vocabulary
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    }
    made = [token for token, _ in itertools.groupby(map("".join, merges))]
    if halves != {*merges} or len(made) != len({*made}):
        raise ValueError("its merges are not all those of SentencePiece, token by token")
    return {token: turn for turn, token in enumerate(made)}


def _tokens(
    tokenizer: JsonTokenizer, vocab_size: int, rank: dict[str, int] | None
) -> dict[str, Any]:
    """Return all tokens with their types, as many as the model has, and their scores, if they have a
    rank."""
    texts = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    added = tokenizer.library.get_added_tokens_decoder()
    for text, number in tokenizer.library.get_vocab().items():
        texts[number], types[number] = text, _NORMAL
        if rank is not None and re.fullmatch("<0x[0-9A-F]{2}>", text):
            types[number] = _BYTE
        if number in added:
            types[number] = _CONTROL if added[number].special else _USER_DEFINED
    scores = {} if rank is None else {"scores": [-float(rank.get(text, 0)) for text in texts]}
    return {"tokens": texts, "token_type": types} | scores
