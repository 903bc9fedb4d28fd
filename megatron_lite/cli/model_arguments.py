"""Options of the commands that read a model. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_lite.config.system import DTYPE_ALIASES, DTYPES


def folder(text: str) -> Path:
    """Parse a path; the shell does not expand the ~ in --model=~/folder."""
    return Path(text).expanduser()


def model_arguments(count: str | None = None) -> argparse.ArgumentParser:
    """Return a parser of the shared options, for `parents=[...]`. count: of models, as `nargs` of
    argparse."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add(
        "--model",
        type=folder,
        nargs=count,
        required=True,
        help="export, checkpoint, Hugging Face folder, or folder of a run",
    )
    add(
        "--tokenizer_file",
        help="tokenizer.json, or byte (default: the model's own, or the one it was trained with)",
    )
    add(
        "--weights",
        choices=("raw", "average"),
        default="raw",
        help="average: the averaged weights in a checkpoint of a run with --ema_type (default: raw)",
    )
    add(
        "--dtype",
        type=lambda text: DTYPE_ALIASES.get(text, text),
        choices=tuple(DTYPES),
        help="dtype of the weights (default: fp32 on a CPU, bf16 on a GPU)",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="(default: a GPU if there is one)",
    )
    return parser
