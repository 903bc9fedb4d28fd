"""Measure loss, perplexity and bits per byte of one or several models on a data set.

    megatron_lite evaluate --model experiments/mine/export/1000 --data_path data/mine --split 969,30,1
    megatron_lite evaluate --model experiments/mine --text held_out.txt more.jsonl --json
    megatron_lite evaluate --model models/base experiments/mine --text held_out
    megatron_lite evaluate --model experiments/mine --tasks hellaswag

A model is an export, any Hugging Face folder, a checkpoint, or the folder of a run (the newest good
one is used). Several are measured one after the other, all in samples of one length: a longer
context predicts better. It is the shortest of their trainings, unless --sequence_length sets
another.

--data_path reads the validation split of token files with the samples and order of
--validation_iters=all, or its first --samples; text there is first made into such files. As in
training, the loss mask and the tokenizer are by default those that the summaries of the data name,
and `none` leaves them out. The loss equals the one that training logs for the same weights, split
and sequence length. With --seed it is that of a run whose metrics do not say `"evaluation_order":
"data"`, as an earlier version began it.
--tasks hands exports and other Hugging Face folders to EleutherAI's lm-eval, which loads them with
transformers, and prints its table. The results of an export of a run also go into its metrics.jsonl.
--text reads files, folders and patterns as scripts/prepare_data.py does, tokenizes them in the same
way, and predicts every token except the first exactly once.

`loss` is the mean over predicted tokens in nats. Bits per byte is the sum of their losses in bits,
divided by the UTF-8 bytes of their text; special tokens such as the end of a document cost bits and
have no bytes. It needs a tokenizer, from the model's folder or --tokenizer_file. --per_token first prints
every predicted token with its loss.

Exit codes: 0 done, 2 usage, 3 data, 4 model, 5 numerics, 7 memory.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from megatron_lite.cli.model_arguments import model_arguments
from megatron_lite.cli.script_parser import COUNT, ScriptParser


def parse_options(arguments: Sequence[str], program: str | None) -> argparse.Namespace:
    """Parse the command line; argparse exits with code 2 if it is wrong."""
    parser = ScriptParser(__doc__, prog=program, parents=[model_arguments("+")])
    add = parser.add_argument
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument(
        "--data_path",
        nargs="+",
        help="as in training: prefixes of .bin/.idx files, or text, perhaps with weights",
    )
    data.add_argument(
        "--text", nargs="+", help="files or folders to read whole: text, .jsonl, .parquet, .arrow"
    )
    data.add_argument(
        "--tasks", nargs="+", help="tasks of lm-eval (pip install lm_eval accelerate)"
    )
    add("--include_path", help="folder with tasks of your own for --tasks")
    add("--json_key", help='key of the text in .jsonl lines (default: "text")')
    add(
        "--split",
        help="--split of training; its second part is read; 0,1,0 reads everything (default: 969,30,1)",
    )
    add(
        "--loss_mask",
        nargs="+",
        help="as in training: a mask for each data set, or none (default: by their summaries)",
    )
    add("--samples", type=COUNT, help="number of samples of --data_path (default: all)")
    add(
        "--seed",
        type=int,
        help="--seed of the run, needed if an earlier version began it: its validation samples depend on the seed",
    )
    add(
        "--sequence_length",
        type=COUNT,
        help="tokens per sample (default: as in the shortest training)",
    )
    add("--micro_batch_size", type=COUNT, default=1, help="samples per forward pass (default: 1)")
    add(
        "--cross_document_attention",
        type=int,
        choices=(0, 1),
        default=1,
        help="as in training (default: 1)",
    )
    add(
        "--per_token",
        action="store_true",
        help="first print each predicted token with its loss and id, a line each; for one model",
    )
    add("--json", action="store_true", help="print a JSON object per model, each on a line")
    options = parser.parse_args(arguments)
    if options.per_token and len(options.model) > 1:
        parser.error("argument --per_token: give one --model")
    for name in options.text or ():
        if Path((prefix := re.sub(r"\.(bin|idx)$", "", name)) + ".idx").exists():
            parser.error(
                f"argument --text: {name} is a pair of token files; write --data_path={prefix}"
            )
    data_names = ("split", "samples", "seed", "loss_mask")
    idle = {
        "data_path": ("json_key", "include_path"),
        "text": (*data_names, "include_path"),
        "tasks": (*data_names, "json_key", "sequence_length", "tokenizer_file"),
    }
    given = next(name for name in idle if getattr(options, name))
    for name in idle[given]:
        if getattr(options, name) is not None:
            parser.error(f"argument --{name}: has no effect with --{given}")
    return options


def main(arguments: Sequence[str], program: str | None = None) -> int:
    """Evaluate and print; return the exit code."""
    options = parse_options(arguments, program)
    # These import torch, which takes seconds.
    if options.tasks:
        from megatron_lite.generation.tasks import print_tasks

        return print_tasks(options)
    from megatron_lite.generation.evaluation import print_losses

    return print_losses(options)
