"""Render conversations by Jinja's sandbox, set up as in transformers, so that both render the same text."""

from __future__ import annotations

import functools
import itertools
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_lite.errors import DataError

BLOCK_END = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")
MARK = uuid.uuid4().hex  # printed at both ends of a `{% generation %}` block; random: no text holds it
Messages = Sequence[Mapping[str, Any]]
Marked = tuple[str, list[tuple[int, int]]]  # a text, and the parts that count


def rendered(template: str, tokens: Mapping[str, Any], messages: Messages, tools: Any, prompt: bool) -> Marked:
    """Return the text, and its parts in `{% generation %}` blocks. prompt: with the beginning of an answer.

    tokens: special tokens by the names that a template uses.

    Raises: whatever the template does.
    """
    context = {**tokens, "messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
    parts = _compiled(template).render(context).split(MARK)
    ends = [0, *itertools.accumulate(map(len, parts))]
    return "".join(parts), list(zip(ends[1::2], ends[2::2], strict=False))


def spoken(template: str, tokens: Mapping[str, Any], messages: Messages, tools: Any, first: int) -> Marked:
    """Return the text, and what the assistant says in it from message `first` on, with the end of each turn.

    Without blocks, that is what a message adds to the text of those before it and the beginning of an answer.

    Raises: as `rendered`, or DataError if a message changes the text before it.
    """

    def text(count: int, prompt: bool) -> str:
        return rendered(template, tokens, messages[:count], tools, prompt)[0]

    whole, spans = rendered(template, tokens, messages, tools, False)
    if BLOCK_END.search(template):
        begin = len(text(first, False)) if first else 0
        return whole, [span for span in spans if span[0] >= begin]
    for number, message in enumerate(messages[first:], first):
        content = message.get("content") or message.get("tool_calls")
        if message["role"] != "assistant" or not content:
            continue
        before, after = text(number, True), whole if number + 1 == len(messages) else text(number + 1, False)
        if not (after.startswith(before) and whole.startswith(after)):
            raise DataError(
                f"what the chat template writes up to messages[{number}] changes with what follows (thoughts left "
                "out, another beginning of an answer); end the record there, or give a template with "
                "{% generation %} blocks (--chat_template)"
            )
        said = after[len(before) :]
        if not said.rstrip().endswith(str(content).strip() or MARK):
            said = said.rstrip()  # white space follows the end of the turn; else it is the end
        spans.append((len(before), len(before) + len(said)))
    return whole, spans


@functools.lru_cache(maxsize=4)
def _compiled(text: str) -> jinja2.Template:
    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(BLOCK_END.sub(rf"{{%\1 if true %}}{MARK}{{% endif \2%}}", text))
