"""Convert checkpoints to Hugging Face folders and back, one tensor in memory at a time.

    megatron_lite convert_checkpoint --from=mine/checkpoints --to=exports/mine --format=huggingface --dtype=bf16
    megatron_lite convert_checkpoint --from=models/Mistral-7B --to=start/0 --format=distributed --verify
    megatron_lite convert_checkpoint --from=adapted --base=models/Mistral-7B --to=merged --format=huggingface

--from is a Hugging Face folder, a checkpoint, or the folder of a run (the newest good one is used).
--to is written under a temporary name and renamed when complete. --exist_ok replaces an existing
folder that holds only files of a checkpoint or an export. A Hugging Face folder becomes a
checkpoint of iteration 0 with fp32 weights and no optimizer state; use it with
--pretrained_checkpoint_path, or resume it as <experiment_dir>/checkpoints/0. --format=gguf writes
model.gguf for llama.cpp, and refuses what llama.cpp would compute otherwise. A checkpoint converted
to a checkpoint keeps everything (with --weights=average: only the iteration and the averages).
--verify compares the logits of random tokens from both folders, one layer in memory at a time,
before --to appears. Adapters, of a run's checkpoint or a folder of peft, are merged into their model:
--base, or the folder that they name. A run's adapters know their model by digest.

Exit codes: 0 done, 2 usage, 3 data (unreadable tokenizer), 4 checkpoint (unusable input, or the two
folders differ), 5 numerics (a weight is too large for --dtype), 8 storage.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_lite.checkpoint.rotation import again
from megatron_lite.cli.model_arguments import folder
from megatron_lite.cli.script_parser import ScriptParser
from megatron_lite.config.system import DTYPES
from megatron_lite.errors import EXIT_DONE, RunError, StorageError
from megatron_lite.huggingface.architectures import ARCHITECTURES
from megatron_lite.huggingface.model_folder import KINDS
from megatron_lite.run.exit_status import print_failure


def parse(arguments: Sequence[str], program: str | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = ScriptParser(__doc__, prog=program)
    add = parser.add_argument
    source = "Hugging Face folder, checkpoint, folder of checkpoints, or experiment directory"
    add("--from", dest="source", type=folder, required=True, help=source)
    add(
        "--base",
        type=folder,
        help="of adapters: the model's folder, Hugging Face or checkpoint (default: where they say)",
    )
    add("--to", type=folder, required=True, help="folder to write")
    add("--format", choices=(*KINDS, "gguf"), required=True, help="what to write")
    add("--dtype", choices=tuple(DTYPES), help="of exported weights (default: as trained or read)")
    add(
        "--export_model_type",
        choices=tuple(ARCHITECTURES),
        help="architecture (default: as saved, or one that fits)",
    )
    add(
        "--shard_size", default="5GB", help="largest file: 5GB, 500MB, 2GiB or bytes (default: 5GB)"
    )
    add(
        "--weights",
        choices=("raw", "average"),
        default="raw",
        help="weights to convert (default: raw)",
    )
    add(
        "--tokenizer_file",
        type=folder,
        help="tokenizer.json to include, or byte (default: the model's)",
    )
    add("--exist_ok", action="store_true", help="replace --to if it is a checkpoint or an export")
    add("--verify", action="store_true", help="compare the logits of both folders")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], program: str | None = None) -> int:
    """Convert; return the exit code."""
    options = parse(arguments, program)
    from megatron_lite.huggingface.convert import convert  # and torch, which takes seconds

    try:
        print(again(lambda: convert(options)))
    except RunError as error:
        return print_failure(error)
    except OSError as error:
        why = (
            "this is a file, not a folder"
            if isinstance(error, FileExistsError)
            else error.strerror or error
        )
        reason = f"{error.filename or options.to}: {why}; free some space or choose another --to"
        return print_failure(StorageError(reason))
    return EXIT_DONE
