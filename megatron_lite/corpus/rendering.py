"""Ask transformers how it reads tokenizers and conversations: its own special tokens, templates,
texts and masks.

Imported only by the process of `confined`, once, before any limit counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import chat_template_utils

from megatron_lite.corpus.tokenizer_folder import difference
from megatron_lite.data.tokenizing import JsonTokenizer, copy_tokenizer
from megatron_lite.errors import DataError

NO_MARK = "\0"
TEXT = (
    "Hello  world, it's 12345!\n\n"
    "größer ≥ 12 € 😀 こんにちは\t\n x"
    "\n\n  We'LL don't  Cafe\u0301 ŒUVRE x_1 += 3.14e-10; // ١٢٣ 12,345 \r\n\t\tif(a){ }  "
    "Привет мир Ελλάδα שלום مرحبا नमस्ते 你好世界 안녕 ไทย 👩‍👩‍👧 \u00a0\u200b ﬁ ﷺ"
)
PIECES = [TEXT[at : at + size] for size in (1, 2, 3, 4, len(TEXT)) for at in range(len(TEXT))]
Messages = Sequence[Mapping[str, Any]]
Parts = list[tuple[int, int]]  # of a text, which count


def described(folder: str) -> tuple[str, dict[str, str], Any, list[tuple[str, list[int]]]]:
    """Load a folder with AutoTokenizer, without the folder's code and without a network.

    Returns: the effective tokenizer.json, special tokens by name, its chat templates as in a
    tokenizer_config.json, and texts, among them every added token, with their ids.

    Raises: DataError if it cannot be loaded.
    """
    import huggingface_hub.constants
    from transformers import AutoTokenizer

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        loaded = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        backend = loaded.backend_tokenizer
    except Exception as error:  # untrusted files may lead to anything
        reason = f"cannot be loaded: transformers says {type(error).__name__}: {error}"
        if "trust_remote_code" in str(error):
            reason = "needs its own code, which is never run; save it as a tokenizer.json that needs none"
        raise DataError(f"{folder}: the tokenizer {reason}") from error
    if hasattr(backend.model, "dropout"):
        backend.model.dropout = None
    templates = loaded.chat_template
    if isinstance(templates, dict):
        templates = [{"name": name, "template": template} for name, template in templates.items()]
    added = [f"a{token} b {token}" for token in map(str, loaded.added_tokens_decoder.values())]
    ids = [(text, loaded(text)["input_ids"]) for text in (*PIECES, *added)]
    return backend.to_str(), loaded.special_tokens_map, templates, ids


def exported(file: str, model_type: str, folder: str) -> str:
    """Return how the training's ids differ from AutoTokenizer's in an export, if at all.

    folder: for the tokenizer as exports contain it.
    """
    copy_tokenizer(file, folder)
    Path(folder, "config.json").write_text(json.dumps({"model_type": model_type}), "utf-8")
    try:
        *_, ids = described(folder)
    except DataError as error:
        return str(error)
    return difference(JsonTokenizer(file, special_tokens=True, needs_end=False), ids)


def rendered(
    template: Any, tokens: Mapping[str, Any], messages: Messages, tools: Any, prompt: bool
) -> tuple[str, Parts | None]:
    """Return the text, and the parts that the template marks as the assistant's; None: it marks
    nothing.

    prompt: append the beginning of an answer.

    template: one, or several as in a tokenizer_config.json. tokens: special tokens by the
    template's names.

    Raises: whatever the template does.
    """
    chosen = _chosen(template, tools)
    marks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", chosen) is not None
    texts, spans = chat_template_utils.render_jinja_template(
        [list(messages)], tools, None, chosen, marks, add_generation_prompt=prompt, **tokens
    )
    return texts[0], [*spans[0]] if marks else None


def _chosen(template: Any, tools: Any) -> str:
    """Choose among named templates, as transformers does."""
    if isinstance(template, str):
        return template
    named = {entry["name"]: entry["template"] for entry in template}
    return str(named["tool_use" if tools is not None and "tool_use" in named else "default"])


def spoken(
    template: Any, tokens: Mapping[str, Any], messages: Messages, tools: Any, first: int
) -> tuple[str, Parts]:
    """Return the text, and the assistant's parts from message `first` on, including the end of each
    turn.

    Without marks, a part is what a message adds to the text of the preceding ones and the beginning
    of an answer.

    Raises: like `rendered`, or DataError if a message changes the text before it.
    """

    def text(count: int, prompt: bool) -> str:
        return rendered(template, tokens, messages[:count], tools, prompt)[0]

    whole, marked = rendered(template, tokens, messages, tools, False)
    if marked is not None:
        begin = len(text(first, False)) if first else 0
        return whole, [span for span in marked if span[0] >= begin]
    spans = Parts()
    for number, message in enumerate(messages[first:], first):
        content = message.get("content") or message.get("tool_calls")
        if message["role"] != "assistant" or not content:
            continue
        before = text(number, True)
        after = whole if number + 1 == len(messages) else text(number + 1, False)
        if not (after.startswith(before) and whole.startswith(after)):
            raise DataError(
                f"what the chat template writes up to messages[{number}] changes with what follows (it drops "
                "thoughts, or begins answers differently); end the record there, or give a template with "
                "{% generation %} blocks (--chat_template)"
            )
        said = after[len(before) :]
        if not said.rstrip().endswith(str(content).strip() or NO_MARK):
            said = said.rstrip()  # white space follows the end of the turn; otherwise it is the end
        spans.append((len(before), len(before) + len(said)))
    return whole, spans
