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
from collections.abc import Sequence

from megatron_lite.cli.model_arguments import model_arguments
from megatron_lite.cli.script_parser import LARGEST_COUNT, ScriptParser, number

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


def main(arguments: Sequence[str], program: str | None = None) -> int:
    """Print the texts; return the exit code."""
    options = parse_options(arguments, program)
    from megatron_lite.generation.writer import print_texts  # and torch, which takes seconds

    return print_texts(options, GPU_BATCH_SIZE)
