"""The work of the command `generate`: read prompts, continue them, and print the texts."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.rotation import again
from megatron_lite.corpus.conversations import Messages, find_template
from megatron_lite.data.disk_array import reading
from megatron_lite.data.tokenizing import Tokenizer
from megatron_lite.errors import EXIT_DONE
from megatron_lite.generation.continuation import (
    Limits,
    SamplingOptions,
    Text,
    TokenSampler,
    continue_texts,
)
from megatron_lite.generation.model import LocalModel, choose_device, load_model
from megatron_lite.generation.prompts import (
    Continuations,
    as_json,
    encode_prompt,
    end_tokens,
    numbered,
    open_tokenizer,
    read_prompts,
)
from megatron_lite.run.exit_status import print_failure, print_page
from megatron_lite.seeds import derive_seed

SHOWN_EVERY_S = 0.1  # decoding a long text anew for each token would cost as much as the token
# Takes a prompt and a function that decodes its continuation so far.
Grows = Callable[[str, Callable[[], str]], None]


def all_prompts(options: argparse.Namespace) -> list[str]:
    """Return the prompts of the command line, then those of the file.

    Raises:
        DataError: if the file cannot be read or holds no prompt.
    """
    prompts = [_as_text(prompt) for prompt in options.prompt]
    name = options.prompts_file
    if name is None:
        return prompts
    with reading(f"--prompts_file={name}"):
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    return [*prompts, *read_prompts(content, f"--prompts_file={name}")]


def typed() -> Iterator[str]:
    """Yield the lines of standard input that are not blank, each as soon as it is there."""
    with contextlib.suppress(EOFError):
        while True:
            if (line := input("> " if sys.stdin.isatty() else "")).strip():
                yield _as_text(line)


def _as_text(words: str) -> str:
    """Return words of the command line or of standard input with U+FFFD for bytes that are not
    UTF-8."""
    return words.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class Page:
    """Standard output, on which one text after the other grows."""

    def __init__(self) -> None:
        self._printed, self._at = "", 0.0

    def grow(self, text: Callable[[], str]) -> None:
        """Print what the text has more than the page, `SHOWN_EVERY_S` after the last time."""
        if time.monotonic() >= self._at + SHOWN_EVERY_S:
            self._print(text(), "")

    def end(self, text: str) -> None:
        """Print the rest of a text; all of it, on a new line, if its beginning is another now."""
        if not text.startswith(self._printed):
            print_page("")
            self._printed = ""
        self._print(text, "\n")
        self._printed, self._at = "", 0.0

    def cut(self) -> None:
        """End the line of a text that does not go on."""
        if self._printed and not self._printed.endswith("\n"):
            print_page("")

    def _print(self, text: str, end: str) -> None:
        if text.startswith(self._printed):
            print_page(text[len(self._printed) :], end)
            self._printed, self._at = text, time.monotonic()


class Writer:
    """A model that continues `rows` prompts at a time or, with --chat, answers messages.

    Raises: RunError if the chat template of the tokenizer cannot be used.
    """

    def __init__(
        self, options: argparse.Namespace, model: LocalModel, tokenizer: Tokenizer, rows: int = 1
    ) -> None:
        self._options, self._rows = options, rows
        self.model, self._tokenizer = model, tokenizer
        self._chat = find_template(tokenizer.path) if options.chat else None
        end_of_turn = self._chat.turn_end() if self._chat else ""
        self._continuations = Continuations(
            self._tokenizer, [*options.stop, *filter(None, [end_of_turn])]
        )
        self._ends = end_tokens(self.model.folder, self._tokenizer)

    def continued(
        self, prompts: Sequence[str], grows: Grows, before: Messages = ()
    ) -> Iterator[tuple[str, Text, str]]:
        """Yield each prompt with its tokens and continuation, in order.

        grows: called with each token of the first text that has not ended. before: messages before
        a prompt, in a chat.

        Raises: RunError if a prompt cannot be used.
        """
        options = self._options
        model = self.model
        written = prompts
        template = bool(self._options.add_special_tokens)
        if self._chat is not None:
            written = [
                self._chat.render([*before, _message("user", prompt)], None, True)
                for prompt in prompts
            ]
            template = False  # the chat template writes special tokens itself
        sampling = SamplingOptions(options.temperature, options.top_k, options.top_p)
        texts = [
            Text(
                encode_prompt(
                    self._tokenizer, prompt, template, model.config.vocab_size, model.longest
                ),
                TokenSampler(sampling, derive_seed("text", options.seed, prompt, repetition)),
            )
            for prompt, repetition in numbered(written)
        ]
        shown = 0

        def stopped(text: Text) -> bool:
            if text is texts[shown]:
                grows(prompts[shown], lambda: self._continuations.certain(text))
            return self._continuations.stopped(text)

        anew = model.config.longrope_length
        limits = Limits(options.max_new_tokens, model.longest, self._ends, stopped, anew)
        for _ in continue_texts(
            model.run, model.device, texts, limits, self._rows, backend=model.prompt_attention()
        ):
            while shown < len(texts) and texts[shown].finish is not None:
                yield prompts[shown], texts[shown], self._continuations.text(texts[shown])
                shown += 1

    def conversed(self, messages: Iterable[str], grows: Grows) -> Iterator[tuple[str, Text, str]]:
        """Yield each message of a conversation with its answer, which follows all that was said
        before."""
        said = list[Mapping[str, Any]]()
        for message in messages:
            ((_, text, answer),) = self.continued([message], grows, said)
            said += [_message("user", message), _message("assistant", answer)]
            yield message, text, answer


def open_writer(options: argparse.Namespace, gpu_batch_size: int) -> Writer:
    """Load the model and the tokenizer that options name.

    Raises: RunError if one of them cannot be used.
    """
    device = choose_device(options.device)
    # The user writes the prompts, so special tokens spelled out in them are intended.
    tokenizer = open_tokenizer(options.model, options.tokenizer_file, special_tokens=True)
    model = load_model(
        options.model, options.sequence_length, options.dtype, device, options.weights
    )
    rows = options.batch_size or (1 if device.type == "cpu" else gpu_batch_size)
    return Writer(options, model, tokenizer, rows)


def _message(role: str, content: str) -> Mapping[str, Any]:
    return {"role": role, "content": content}


def print_texts(options: argparse.Namespace, gpu_batch_size: int) -> int:
    """Print the texts as they grow, or JSON lines as they end; return the exit code."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    many = len(options.prompt) > 1 or options.prompts_file is not None
    page, index = Page(), 0

    def words(prompt: str, continuation: str) -> str:
        header = f"--- {index + 1} ---\n" if many else ""
        return header + ("" if options.chat else prompt) + continuation

    def grows(prompt: str, continuation: Callable[[], str]) -> None:
        if not options.json_lines:
            page.grow(lambda: words(prompt, continuation()))

    try:
        prompts, writer = all_prompts(options), again(lambda: open_writer(options, gpu_batch_size))
        found = writer.continued(prompts, grows) if prompts else writer.conversed(typed(), grows)
        for prompt, text, continuation in found:
            if options.json_lines:
                print_page(
                    json.dumps(as_json(index, prompt, text, continuation), ensure_ascii=False)
                )
            else:
                page.end(words(prompt, continuation))
            if text.finish == "context":
                length = f"{writer.model.longest:,} tokens (--sequence_length; by default, as in training)"
                print(f"NOTE: text {index + 1} ends at {length}", file=sys.stderr)
            index += 1
    except Exception as error:
        page.cut()
        return print_failure(
            error, "write a smaller --batch_size or --max_new_tokens, or --dtype=bf16"
        )
    return EXIT_DONE
