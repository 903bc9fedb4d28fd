"""Render conversations with a chat template and mark the assistant's tokens, the only ones in the
loss.

Templates are untrusted programs: transformers runs them in a sandbox, in a process with limits on
time, memory and output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.corpus.confined import Limits, confined
from megatron_lite.corpus.documents import TextFields, look_up
from megatron_lite.corpus.pieces import ABSENT
from megatron_lite.corpus.tokenizer_choice import TokenizerChoice
from megatron_lite.corpus.tokenizer_folder import effective, need_library
from megatron_lite.data.disk_array import reading
from megatron_lite.data.tokenizing import BYTE, JsonTokenizer, MarkedText
from megatron_lite.errors import DataError, UsageError

NAMED = Path(__file__).with_name("chat_templates")  # <name>.jinja
KEYS = ("messages", "conversations", "prompt", "completion", "tools")  # in a record
LIMITS = Limits()  # per conversation
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names


Messages = Sequence[Mapping[str, Any]]


class ChatTemplate(NamedTuple):
    """A template; config: the tokenizer_config.json, whose special tokens the template may name."""

    text: Any  # or several templates, as in a tokenizer_config.json
    config: dict[str, Any]

    def render(self, messages: Messages, tools: Any, prompt: bool) -> str:
        """Return the text. prompt: append the beginning of an answer.

        Raises: DataError if the template refuses the messages, or exceeds a limit.
        """
        return str(self._confined("rendered", messages, tools, prompt)[0])

    def spoken(self, messages: Messages, tools: Any = None, first: int = 0) -> MarkedText:
        """Return the text, marked by `rendering.spoken`. Raises: like `render`."""
        return MarkedText(*self._confined("spoken", messages, tools, first))

    def _confined(self, function: str, *arguments: Any) -> Any:
        tokens = {
            key: value
            for key, value in self.config.items()
            if key.endswith("_token") and isinstance(value, str)
        }
        return confined(LIMITS, function, self.text, tokens, *arguments)

    def turn_end(self) -> str:
        """Return what ends the assistant's turn, such as `<|im_end|>`; empty if only white space
        does."""
        text = self.spoken(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        )
        return text[slice(*text.spans[-1])].partition("y")[2].strip() if text.spans else ""


@dataclass(frozen=True)
class ConversationFields(TextFields):
    """The keys under which a record stores its conversation; defaults: `KEYS`."""

    _: KW_ONLY
    template: ChatTemplate
    end: str  # token after a conversation, unless already present; empty: none
    end_of_completion: str  # the same without roles

    marked = True

    def text_of(self, value: Any) -> MarkedText:
        """Return a record's text. Raises: DataError, which names the key and the rule."""
        messages, shared, prompt, completion, tools = (look_up(value, key) for key in self.keys)
        if messages is None and isinstance(prompt, str) and isinstance(completion, str):
            span = (len(prompt), len(prompt + completion))
            return _ended(
                MarkedText(prompt + completion, [span] if completion else []),
                self.end_of_completion,
            )
        first = 0
        if messages is None and isinstance(shared, list):
            turns = [turn if isinstance(turn, dict) else {} for turn in shared]
            roles = [ROLES.get(str(turn.get("from")), turn.get("from")) for turn in turns]
            messages = [
                {"role": role, "content": turn.get("value")}
                for role, turn in zip(roles, turns, strict=True)
            ]
        elif messages is None and isinstance(prompt, list) and isinstance(completion, list):
            messages, first = prompt + completion, len(prompt)
        if not isinstance(messages, list) or not messages:
            raise DataError(
                f"needs {self.keys[0]} (a list), conversations, or prompt and completion"
            )
        for number, message in enumerate(messages):
            found = (
                [message.get("role"), message.get("content", "")]
                if isinstance(message, dict)
                else [None]
            )
            if not isinstance(found[0], str) or not isinstance(found[-1], str | list | None):
                raise DataError(f"messages[{number}] needs a role and a content, both texts")
        messages = [
            {key: part for key, part in message.items() if part is not None} for message in messages
        ]
        return _ended(self.template.spoken(messages, tools, first), self.end)


def _ended(text: MarkedText, end: str) -> MarkedText:
    """Append a token to a text, unless already present; it counts if the assistant spoke last."""
    if text.endswith(end):
        return text
    last = text.spans and text.spans[-1][1] >= len(text.rstrip())
    return MarkedText(
        text + end, [*text.spans, (len(text), len(text + end))] if last else text.spans
    )


def find_template(tokenizer: str, name: str = "own") -> ChatTemplate:
    """Return a template: a tokenizer.json's (own; `byte` has none), a known one, or a file's.

    Raises: UsageError if there is none; DataError if a file cannot be read or is no template.
    """
    need_library()
    said = effective(tokenizer)
    opened = JsonTokenizer(tokenizer, needs_end=False, said=said)
    config = (said.config or {"clean_up_tokenization_spaces": False}) | opened.named_tokens
    files = {path.stem: path for path in sorted(NAMED.iterdir())}
    if name != "own":
        file = files.get(name, Path(name))
        with reading(file):
            config["chat_template"] = file.read_text("utf-8")
    if not config.get("chat_template"):
        known = ", ".join([*files, "own"])
        raise UsageError(
            f"this tokenizer has no chat template; --chat_template is {known}, or a file"
        )
    template = ChatTemplate(config["chat_template"], config)
    end = template.turn_end()
    if "eos_token" not in str(template.text) and opened.token_id(end) is not None:
        config["eos_token"] = end  # generation ends there, in transformers too
    return template


def conversation_fields(
    name: str, given: TextFields, tokenizer: TokenizerChoice
) -> ConversationFields:
    """Return the fields for --chat_template=<name>, --json_key and the tokenizer. Raises: like
    `find_template`."""
    if (
        given.separator != TextFields.separator
        or len(given.keys) > 1
        or tokenizer.begin is not None
    ):
        raise UsageError(
            "--chat_template: leave out --separator, --begin_of_document and a second --json_key"
        )
    template = find_template(
        BYTE if tokenizer.train or tokenizer.name == BYTE else str(tokenizer.source), name
    )
    end = "" if tokenizer.end in (None, ABSENT) else str(tokenizer.end)
    of_completion = template.config.get("eos_token", "") if tokenizer.end is None else end
    keys = KEYS if given.keys == ("text",) else (*given.keys, *KEYS[1:])
    return ConversationFields(keys, template=template, end=end, end_of_completion=of_completion)
