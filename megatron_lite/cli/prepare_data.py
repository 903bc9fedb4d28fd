"""Tokenize text into token files: the command `prepare_data`, and scripts/prepare_data.py."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from megatron_lite import __version__
from megatron_lite.cli.script_parser import COUNT, LARGEST_COUNT, ScriptParser, number
from megatron_lite.corpus.documents import TextFields
from megatron_lite.corpus.fast_tokenizer import FAST
from megatron_lite.corpus.inputs import DEFAULT_SUFFIXES
from megatron_lite.corpus.prepare import CorpusOptions, prepare
from megatron_lite.corpus.prepared import inspect, verify
from megatron_lite.corpus.remote_copy import local_copy
from megatron_lite.corpus.token_files import TYPES, convert
from megatron_lite.corpus.tokenizer_choice import TokenizerChoice
from megatron_lite.data.tokenizing import CHAR
from megatron_lite.errors import EXIT_DONE, RunError, StorageError, UsageError
from megatron_lite.run.exit_status import name_missing_package, print_failure
from megatron_lite.run.host import available_cores

MOST_UNKNOWN = 0.01  # share of tokens without a warning
MOST_SHARDS = 99_999  # their names have five digits
DESCRIPTION = """\
Tokenize text files, folders, JSON, parquet and arrow files into <output_prefix>.bin and .idx.

    %(prog)s my_texts --output_prefix data/mine --tokenizer byte
    %(prog)s 'corpus/{web,books}/*.jsonl.zst' --output_prefix data/mine --train_tokenizer 4096
    %(prog)s ~/code --suffix .py,.md --output_prefix data/code --tokenizer some/tokenizer.json

A document is a text file, a line of a .jsonl or .json file, an item of a .json array, or a row of a parquet or arrow
file, with its text under --json_key. With --chat_template it is a conversation, with messages, or with prompt and
completion. Text and JSON may be compressed (.gz, .zst, .bz2, .xz). Folders, including those saved by Hugging Face
datasets, are read recursively in path order. An end-of-document token follows each document.

<output_prefix>.tokenizer.json (for --tokenizer_file in training) and <output_prefix>.summary.json are written next to
the token files. The .idx file is written last: without it the data are incomplete. Finished pieces of the work are
stored in <output_prefix>.partial, so that after an interruption the same command continues where it stopped. The result
does not depend on the number of processes.

    %(prog)s train.bin --from_tokens uint16 --split_documents_at 50256 --output_prefix data/mine
                                    token files of other programs, as a pair

    %(prog)s --inspect data/mine    counts, lengths, frequent tokens, some documents
    %(prog)s --verify data/mine     everything that can be checked; exit code 0 or 3

Exit codes: 0 done, 2 usage, 3 data, 6 a worker died, 7 memory, 8 storage.
"""


def read_options(options: argparse.Namespace) -> CorpusOptions:
    """Check the parsed command line and convert it to `CorpusOptions`.

    Raises: UsageError if a value is invalid.
    """
    suffixes = tuple(
        part if part.startswith(".") else "." + part for part in options.suffix.split(",") if part
    )
    if not suffixes:
        raise UsageError("--suffix: no file ending given; write for example --suffix=.txt,.md")
    keys = tuple(key.strip() for key in options.json_key.split(",") if key.strip())
    if not keys:
        raise UsageError("--json_key: no key given; write for example --json_key=text")
    tokenizer = TokenizerChoice(
        options.tokenizer,
        CHAR if options.tokenizer == CHAR else options.train_tokenizer,
        options.begin_of_document,
        options.end_of_document,
        options.special_tokens,
        options.tokenizer_library,
    )
    fields = TextFields(keys, options.separator.replace("\\n", "\n"))
    if options.chat_template is not None:
        # the only one to need jinja2
        from megatron_lite.corpus.conversations import conversation_fields

        fields = conversation_fields(options.chat_template, fields, tokenizer)
    same = "inputs output_prefix strict overwrite max_documents validation_documents shards deduplicate"
    return CorpusOptions(
        tokenizer=tokenizer,
        fields=fields,
        suffixes=suffixes,
        num_processes=options.num_processes or available_cores(),
        **{name: getattr(options, name) for name in same.split()},
    )


def report(options: CorpusOptions, summary: dict[str, Any], is_new: bool) -> None:
    """Print what was written."""
    pairs = ", ".join(f"{prefix}.bin" for prefix in options.outputs)
    print(
        f"{pairs}: {summary['documents']:,} documents, {summary['tokens']:,} tokens ({summary['dtype']})"
    )
    if not is_new:
        print("nothing to do: the same command has written these files before")
    print(f"vocabulary        {summary['vocab_size']} (--vocab_size)")
    print(f"bytes per token   {summary['bytes_per_token']:.3f}")
    print(f"unigram entropy   {summary['unigram_entropy_nats']:.4f} nats per token")
    if unknown := summary.get("unknown_tokens", 0):
        share = unknown / summary["tokens"]
        print(f"unknown tokens    {unknown:,} ({share:.2%})")
        if share > MOST_UNKNOWN:
            print(
                f"WARNING: the tokenizer does not know {share:.2%} of the text; take another one",
                file=sys.stderr,
            )
    if options.deduplicate:
        print(f"duplicates        {summary['duplicates']:,} left out")
    if masks := " ".join(options.masks):
        print(
            f"loss mask         --loss_mask {masks}; {summary['without_answer']:,} documents without an answer"
        )
    for kind, count in summary["skipped"].items():
        print(f"skipped           {count:,}: {kind}")
    if options.validation_documents:
        *training, validation = options.outputs
        of_data = f"--data_path {' '.join(training)} --valid_data_path={validation}"
        print(f"to train          {of_data} --validation_iters=all")


def _add_tokenizer(parser: ScriptParser) -> None:
    choice, add = parser.add_mutually_exclusive_group(), parser.add_argument
    choice.add_argument(
        "--tokenizer",
        default="byte",
        metavar="byte|char|PATH",
        help="the built-in byte tokenizer (default), the characters of the input, a tokenizer.json, or the folder of a "
        "Hugging Face tokenizer",
    )
    choice.add_argument(
        "--train_tokenizer",
        type=int,
        metavar="VOCAB",
        help="train a byte-level BPE tokenizer with this vocabulary size on the input",
    )
    add("--begin_of_document", metavar="TOKEN", help="token before each document (default: none)")
    add(
        "--end_of_document",
        metavar="TOKEN",
        help="token after each document, or none for no token (default: the tokenizer's own)",
    )
    add(
        "--special_tokens",
        action="store_true",
        help="treat special tokens spelled out in a text as special tokens",
    )
    add(
        "--tokenizer_library",
        choices=("auto", "tokenizers", FAST),
        default="auto",
        help="auto: fastokens where its ids are proved to be those of tokenizers (default)",
    )


def _add_reading(parser: ScriptParser) -> None:
    add = parser.add_argument
    add(
        "--suffix",
        default=",".join(DEFAULT_SUFFIXES),
        help="file endings to read in folders (default: %(default)s)",
    )
    add(
        "--json_key",
        default="text",
        metavar="KEY",
        help="key of the text in .jsonl lines, column in tables; a.b for a key in an object, a,b for several that are "
        "joined (default: text)",
    )
    add(
        "--chat_template",
        metavar="NAME",
        help="read conversations and write <PREFIX>_mask for --loss_mask; the tokenizer's own template (own), chatml, "
        "llama3, zephyr, or a file",
    )
    add(
        "--separator",
        default="\\n\\n",
        help="between the texts of several keys (default: %(default)s)",
    )
    add("--strict", action="store_true", help="stop at a bad document instead of skipping it")
    add(
        "--from_tokens",
        choices=TYPES,
        help="read tokens, not text, integers of this type: x.ds of datatrove, .npy and .bin of other programs",
    )
    add(
        "--split_documents_at",
        type=number(int, 0, LARGEST_COUNT),
        metavar="ID",
        help="read tokens, also of a pair (its .bin), and end a document after each token with this id",
    )


def _add_writing(parser: ScriptParser) -> None:
    add = parser.add_argument
    add("--num_processes", type=COUNT, metavar="N", help="processes (default: one per core)")
    add("--max_documents", type=COUNT, metavar="N", help="stop after this many documents")
    add(
        "--validation_documents",
        type=number(int, 0, LARGEST_COUNT),
        default=0,
        metavar="N",
        help="write N documents, spread evenly over the input, to <PREFIX>_validation instead",
    )
    add(
        "--shards",
        type=number(int, 1, MOST_SHARDS),
        default=1,
        metavar="N",
        help="write N pairs of files, <PREFIX>-00000-of-0000N, ...",
    )
    add("--deduplicate", action="store_true", help="keep only the first of identical documents")
    add("--overwrite", action="store_true", help="replace existing token files")


def parse(argv: Sequence[str], program: str) -> argparse.Namespace:
    """Parse the command line. program: the command as a user types it."""
    parser = ScriptParser(
        prog=program, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "inputs",
        nargs="*",
        help="files, folders, patterns such as 'x/**/*.txt', lists such as 'x/{a,b}{00..31}.jsonl'",
    )
    parser.add_argument(
        "--output_prefix", metavar="PREFIX", help="write <PREFIX>.bin, <PREFIX>.idx, ..."
    )
    for add_options in (_add_tokenizer, _add_reading, _add_writing):
        add_options(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--inspect", metavar="PREFIX", help="show the content of a pair of files; write nothing"
    )
    mode.add_argument(
        "--verify", metavar="PREFIX", help="check a pair of files completely; write nothing"
    )
    parser.add_argument("--version", action="version", version=f"megatron_lite {__version__}")
    options = parser.parse_args(argv)
    if (
        options.inspect is None
        and options.verify is None
        and not (options.inputs and options.output_prefix)
    ):
        parser.error(
            "give inputs and --output_prefix, or --inspect or --verify with the prefix of a pair"
        )
    used = ("inputs", "output_prefix", "from_tokens", "split_documents_at", "overwrite")
    given = [
        name
        for name, value in vars(options).items()
        if value != parser.get_default(name) and name not in used
    ]
    options.reads_tokens = options.from_tokens is not None or options.split_documents_at is not None
    if options.reads_tokens and given:
        parser.error(
            f"--from_tokens, --split_documents_at: leave out {', '.join(given)}, which tokens do not need"
        )
    return options


def main(argv: Sequence[str], program: str = "prepare_data") -> int:
    """Run the command; return the exit code."""
    words = parse(argv, program)
    try:
        if words.verify is not None:
            print(verify(words.verify))
        elif words.inspect is not None:
            print(*inspect(words.inspect), sep="\n")
        else:
            words.inputs = tuple(
                local_copy(name, "inputs", f"{words.output_prefix}.copies") for name in words.inputs
            )
            if words.reads_tokens:
                kind, end = words.from_tokens, words.split_documents_at
                print(convert(words.inputs, words.output_prefix, kind, end, words.overwrite))
            else:
                options = read_options(words)
                report(options, *prepare(options))
    except (RunError, OSError) as error:
        return print_failure(error if isinstance(error, RunError) else StorageError(error))
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        return 130
    return EXIT_DONE


def command() -> int:
    """Run the installed command (its entry point)."""
    sys.excepthook = name_missing_package
    return main(sys.argv[1:])
