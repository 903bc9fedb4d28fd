"""The command-line options that name a model and say how to load it, shared by the scripts that use one."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_lite.config.system import DTYPE_ALIASES, DTYPES


def model_options() -> argparse.ArgumentParser:
    """Return a parser of the shared options, for `parents=[...]`."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add(
        "--model", type=_folder, required=True, help="export, Hugging Face folder, checkpoint, or folder of checkpoints"
    )
    add("--tokenizer_file", help="tokenizer.json (default: from the model's folder, or the one used in training)")
    add(
        "--weights",
        choices=("raw", "average"),
        default="raw",
        help="average: the averaged weights in a checkpoint of a run with --ema_type (default: raw)",
    )
    add("--dtype", type=_dtype, choices=DTYPES, help="dtype of the weights (default: fp32 on a CPU, bf16 on a GPU)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: a GPU if there is one)")
    return parser


def _folder(text: str) -> Path:
    return Path(text).expanduser()  # the shell does not expand the ~ in --model=~/folder


def _dtype(text: str) -> str:
    return DTYPE_ALIASES.get(text, text)
