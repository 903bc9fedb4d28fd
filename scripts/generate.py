"""Continue texts with a model: an export, any Hugging Face folder, one of our checkpoints or a folder of them.

    python scripts/generate.py --model experiments/mine/export/1000 --prompt "Once upon a time" --temperature 0.8
    python scripts/generate.py --model experiments/mine/checkpoints --prompts_file prompts.txt --json_lines

The model is the one that was trained (`megatron_lite/gpt.py`); transformers is not needed. A prompt is one pass through
the model, and every new token one more, with the keys and values of the tokens before it kept. What becomes of a prompt
does not depend on the others: each draws from a seed of its own, and no product sees how many texts are under way.

A text ends at the end of its document, at a --stop string, after --max_new_tokens, or where it is as long as texts of
this model can be (max_position_embeddings; a note says so).

Exit codes: 0 done, 2 usage, 3 data (prompt or tokenizer), 4 model, 5 numerics, 7 memory.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a plain checkout, not installed

from megatron_lite.config.system import DTYPE_ALIASES, DTYPES  # noqa: E402
from megatron_lite.errors import EXIT_DONE, DataError  # noqa: E402
from megatron_lite.generation.continuation import Limits, Text, continue_texts  # noqa: E402
from megatron_lite.generation.model import choose_device, load_model  # noqa: E402
from megatron_lite.generation.prompts import (
    Continuations,
    as_json,
    encode_prompt,
    end_tokens,
    numbered,
    open_tokenizer,
    read_prompts,
)
from megatron_lite.generation.sampling import SamplingOptions, TokenSampler  # noqa: E402
from megatron_lite.run.exit_status import print_failure, print_page  # noqa: E402
from megatron_lite.seeds import derive_seed  # noqa: E402

GPU_BATCH_SIZE = 8


def number(kind: Callable[[str], Any], minimum: float, maximum: float = math.inf, above: bool = False) -> Any:
    """What argparse makes of an option's value, within bounds; `above`: the minimum itself is none."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not (minimum < value if above else minimum <= value) or not value <= maximum or value == math.inf:
            bounds = f"{'above' if above else 'of at least'} {minimum:g}"
            raise argparse.ArgumentTypeError(
                f"{text} is not a number {bounds}" + (f" and at most {maximum:g}" if maximum < math.inf else "")
            )
        return value

    parse.__name__ = "number"  # for the message about what is no number at all
    return parse


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; argparse leaves with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description="Continue texts with a model.", allow_abbrev=False)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="an export, a Hugging Face folder, a checkpoint or a folder of them")
    add("--prompt", action="append", default=[], help="a text to continue; may be repeated")
    add("--prompts_file", help="a file with a prompt on each line, blank ones left out; -: standard input")
    add("--tokenizer_file", help="tokenizer.json (default: that of the model's folder, or the checkpoint's own)")
    add(
        "--add_special_tokens",
        type=int,
        choices=(0, 1),
        default=1,
        help="begin prompts as the tokenizer's template says, for instance with <s> (default: 1)",
    )
    add("--max_new_tokens", type=number(int, 1), default=64, help="(default: 64)")
    add("--temperature", type=number(float, 0), default=1.0, help="0: most probable token (default: 1)")
    add("--top_k", type=number(int, 1), help="draw among this many tokens (default: all)")
    add(
        "--top_p",
        type=number(float, 0, 1, above=True),
        default=1.0,
        help="draw among the most probable tokens that have this probability together (default: all)",
    )
    add("--seed", type=number(int, 0), default=1234, help="of all draws (default: 1234)")
    add("--stop", action="append", default=[], help="end before this string; may be repeated")
    add(
        "--batch_size",
        type=number(int, 1, 4096),
        help=f"texts that grow side by side (default: 1 on a CPU, {GPU_BATCH_SIZE} on a GPU)",
    )
    add(
        "--weights",
        choices=("raw", "average"),
        default="raw",
        help="average: those that a checkpoint of a run with --ema_type keeps beside (default: raw)",
    )
    add("--dtype", choices=(*DTYPES, *DTYPE_ALIASES), help="of weights (default: fp32 on a CPU, bf16 on a GPU)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: a GPU if there is one)")
    add(
        "--json_lines",
        action="store_true",
        help="a JSON object a line: index, prompt, text (what follows), finish (end, stop, length or context), "
        "prompt_tokens, tokens",
    )
    options = parser.parse_args(arguments)
    options.model = options.model.expanduser()  # the shell leaves the ~ of --model=~/folder alone
    if "" in options.stop:
        parser.error("argument --stop: an empty string is in every text; leave it out")
    if not options.prompt and options.prompts_file is None:
        parser.error("one of the arguments --prompt --prompts_file is required")
    if options.temperature == 0 and (options.top_k or options.top_p < 1):
        parser.error("arguments --top_k, --top_p: nothing is drawn at --temperature=0; leave them out")
    return options


def all_prompts(options: argparse.Namespace) -> list[str]:
    """Those of the command line, then those of the file.

    Raises:
        DataError: if the file cannot be read or holds none.
    """
    # Bytes of the command line that are no UTF-8 become U+FFFD.
    prompts = [prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for prompt in options.prompt]
    name = options.prompts_file
    if name is None:
        return prompts
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise DataError(f"--prompts_file={name}: cannot be read: {error.strerror}") from None
    return [*prompts, *read_prompts(content, f"--prompts_file={name}")]


def continued(options: argparse.Namespace) -> Iterator[tuple[int, str, Text, str, int]]:
    """Number, prompt, tokens and continuation of every text in the order of the prompts, and the longest text's length.

    Raises:
        RunError: of the kind that says what is wrong with the model, a prompt or the tokenizer.
    """
    prompts = all_prompts(options)
    device = choose_device(options.device)
    # Special tokens that a prompt spells out are meant: nobody else's text is in it.
    tokenizer = open_tokenizer(options.model, options.tokenizer_file, special_tokens=True)
    template = bool(options.add_special_tokens)
    lengths = [len(tokenizer.encode(prompt, template)) for prompt in prompts]
    dtype = DTYPE_ALIASES.get(options.dtype, options.dtype)
    longest_text = max(lengths) + options.max_new_tokens + 1
    model = load_model(options.model, longest_text, dtype, device, options.weights)
    vocab_size, longest = model.config.vocab_size, model.config.max_position_embeddings
    assert longest is not None
    sampling = SamplingOptions(options.temperature, options.top_k, options.top_p)
    texts = [
        Text(
            encode_prompt(tokenizer, prompt, template, vocab_size, longest),
            TokenSampler(sampling, derive_seed("text", options.seed, prompt, repetition)),
        )
        for prompt, repetition in numbered(prompts)
    ]
    continuations = Continuations(tokenizer, options.stop)
    ends = end_tokens(options.model, tokenizer)
    limits = Limits(options.max_new_tokens, longest, ends, continuations.stopped)
    rows = options.batch_size or (1 if device.type == "cpu" else GPU_BATCH_SIZE)
    shown = 0
    for _ in continue_texts(model, texts, limits, rows, backend=model.prompt_attention()):
        while shown < len(texts) and texts[shown].finish is not None:
            yield shown, prompts[shown], texts[shown], continuations.text(texts[shown]), longest
            shown += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the texts as they are done; returns the exit code."""
    options = parse_options(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    many = len(options.prompt) > 1 or options.prompts_file is not None
    try:
        for index, prompt, text, continuation, longest in continued(options):
            if options.json_lines:
                print_page(json.dumps(as_json(index, prompt, text, continuation), ensure_ascii=False))
            else:
                print_page((f"--- {index + 1} ---\n" if many else "") + prompt + continuation)
            if text.finish == "context":
                note = f"NOTE: text {index + 1} ends at {longest:,} tokens, the most that this model takes"
                print(note + " (max_position_embeddings)", file=sys.stderr)
    except Exception as error:
        return print_failure(error, "write a smaller --batch_size or --max_new_tokens, or --dtype=bf16")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
