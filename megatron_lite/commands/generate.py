"""Continue texts with a model: an export, any Hugging Face folder, a checkpoint, or the folder of a
run.

    megatron_lite generate --model experiments/mine/export/1000 --prompt "Once upon a time" --temperature 0.8
    megatron_lite generate --model experiments/mine --prompts_file prompts.txt --json_lines
    megatron_lite generate --model experiments/chat --chat

Generation runs the training model (`megatron_lite/model/gpt.py`) and does not need transformers.
The prompt takes one forward pass and each new token another, with cached keys and values. Texts are
independent: each has its own seed, and its tokens do not depend on how many texts are generated at
a time.

A text ends at the end of its document, at a --stop string, after --max_new_tokens, or when it is as
long as the samples of the training (--sequence_length; a note says so).

Exit codes: 0 done, 2 usage, 3 data (prompt or tokenizer), 4 model, 5 numerics, 7 memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.rotation import again
from megatron_lite.cli.script_parser import LARGEST_COUNT, ScriptParser, number
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
from megatron_lite.generation.model import choose_device, load_model, model_arguments
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

GPU_BATCH_SIZE = 8


def parse_options(arguments: Sequence[str], program: str | None) -> argparse.Namespace:
    """Parse the command line; argparse exits with code 2 if it is wrong."""
    parser = ScriptParser(__doc__, prog=program, parents=[model_arguments()])
    add = parser.add_argument
    add("--prompt", action="append", default=[], help="a text to continue; may be repeated")
    add(
        "--prompts_file",
        help="a file with one prompt per line, without blank lines; -: standard input",
    )
    add(
        "--add_special_tokens",
        type=int,
        choices=(0, 1),
        default=1,
        help="add the special tokens of the tokenizer's template, such as <s>, to prompts (default: 1)",
    )
    add(
        "--chat",
        action="store_true",
        help="answer each prompt as a user's message, by the tokenizer's chat template; without a prompt, converse: "
        "answer the lines of standard input one after the other",
    )
    add(
        "--max_new_tokens",
        type=number(int, 1),
        default=64,
        help="maximum length of the continuation (default: 64)",
    )
    add(
        "--sequence_length",
        type=number(int, 2, LARGEST_COUNT),
        help="maximum length of prompt and continuation (default: as in training, or the model's context)",
    )
    add(
        "--temperature",
        type=number(float, 0),
        default=1.0,
        help="0: always take the most probable token (default: 1)",
    )
    add(
        "--top_k",
        type=number(int, 1),
        help="sample from this many most probable tokens (default: all)",
    )
    add(
        "--top_p",
        type=number(float, 0, 1, above=True),
        default=1.0,
        help="sample from the most probable tokens with this total probability (default: all)",
    )
    add("--seed", type=number(int, 0), default=1234, help="sampling seed (default: 1234)")
    add(
        "--stop", action="append", default=[], help="end a text before this string; may be repeated"
    )
    add(
        "--batch_size",
        type=number(int, 1, 4096),
        help=f"texts to generate at a time (default: 1 on a CPU, {GPU_BATCH_SIZE} on a GPU)",
    )
    add(
        "--json_lines",
        action="store_true",
        help="print a JSON object per text: index, prompt, text (continuation), finish (end, stop, length, context), "
        "prompt_tokens, tokens",
    )
    options = parser.parse_args(arguments)
    if "" in options.stop:
        parser.error("argument --stop: an empty string ends every text immediately; leave it out")
    if not options.prompt and options.prompts_file is None and not options.chat:
        parser.error("one of the arguments --prompt --prompts_file --chat is required")
    if options.temperature == 0 and (options.top_k or options.top_p < 1):
        parser.error("arguments --top_k, --top_p: --temperature=0 does not sample; leave them out")
    return options


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

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._device = options, choose_device(options.device)
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
        rows = options.batch_size or (1 if self._device.type == "cpu" else GPU_BATCH_SIZE)
        shown = 0
        for _ in continue_texts(
            model.run, self._device, texts, limits, rows, backend=model.prompt_attention()
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


def main(arguments: Sequence[str], program: str | None = None) -> int:
    """Print the texts as they finish; return the exit code."""
    options = parse_options(arguments, program)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    many = len(options.prompt) > 1 or options.prompts_file is not None
    try:
        prompts, writer = all_prompts(options), again(lambda: Writer(options))
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
