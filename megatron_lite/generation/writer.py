"""The work of the command `generate`: read prompts, continue them, and print the texts."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.rotation import again
from megatron_lite.corpus.conversations import Messages, find_template
from megatron_lite.data.disk_array import reading
from megatron_lite.errors import EXIT_DONE
from megatron_lite.generation.continuation import (
    Limits,
    SamplingOptions,
    Text,
    TokenSampler,
    continue_texts,
)
from megatron_lite.generation.model import choose_device, load_model
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


class Writer:
    """A model that continues prompts or, with --chat, answers messages.

    Raises: RunError if the model, the tokenizer or its chat template cannot be used.
    """

    def __init__(self, options: argparse.Namespace, gpu_batch_size: int) -> None:
        self._options, self._device = options, choose_device(options.device)
        self._rows = options.batch_size or (1 if self._device.type == "cpu" else gpu_batch_size)
        # The user writes the prompts, so special tokens spelled out in them are intended.
        self._tokenizer = open_tokenizer(options.model, options.tokenizer_file, special_tokens=True)
        self._chat = find_template(self._tokenizer.path) if options.chat else None
        self.model = load_model(
            options.model, options.sequence_length, options.dtype, self._device, options.weights
        )
        end_of_turn = self._chat.turn_end() if self._chat else ""
        self._continuations = Continuations(
            self._tokenizer, [*options.stop, *filter(None, [end_of_turn])]
        )
        self._ends = end_tokens(self.model.folder, self._tokenizer)

    def continued(
        self, prompts: Sequence[str], before: Messages = ()
    ) -> Iterator[tuple[str, Text, str]]:
        """Yield each prompt with its tokens and continuation, in order. before: messages before a
        prompt, in a chat.

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
        limits = Limits(
            options.max_new_tokens, model.longest, self._ends, self._continuations.stopped
        )
        shown = 0
        for _ in continue_texts(
            model.run, self._device, texts, limits, self._rows, backend=model.prompt_attention()
        ):
            while shown < len(texts) and texts[shown].finish is not None:
                yield prompts[shown], texts[shown], self._continuations.text(texts[shown])
                shown += 1

    def conversed(self, messages: Iterable[str]) -> Iterator[tuple[str, Text, str]]:
        """Yield each message of a conversation with its answer, which follows all that was said
        before."""
        said = list[Mapping[str, Any]]()
        for message in messages:
            ((_, text, answer),) = self.continued([message], said)
            said += [_message("user", message), _message("assistant", answer)]
            yield message, text, answer


def _message(role: str, content: str) -> Mapping[str, Any]:
    return {"role": role, "content": content}


def print_texts(options: argparse.Namespace, gpu_batch_size: int) -> int:
    """Print the texts as they finish; return the exit code."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    many = len(options.prompt) > 1 or options.prompts_file is not None
    try:
        prompts, writer = all_prompts(options), again(lambda: Writer(options, gpu_batch_size))
        found = writer.continued(prompts) if prompts else writer.conversed(typed())
        for index, (prompt, text, continuation) in enumerate(found):
            if options.json_lines:
                print_page(
                    json.dumps(as_json(index, prompt, text, continuation), ensure_ascii=False)
                )
            else:
                print_page(
                    (f"--- {index + 1} ---\n" if many else "")
                    + ("" if options.chat else prompt)
                    + continuation
                )
            if text.finish == "context":
                length = f"{writer.model.longest:,} tokens (--sequence_length; by default, as in training)"
                print(f"NOTE: text {index + 1} ends at {length}", file=sys.stderr)
    except Exception as error:
        return print_failure(
            error, "write a smaller --batch_size or --max_new_tokens, or --dtype=bf16"
        )
    return EXIT_DONE
