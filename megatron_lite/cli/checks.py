"""Check what a command line asks for before anything heavy is imported."""

from __future__ import annotations

from megatron_lite.cli.parse import Arguments
from megatron_lite.cli.recorded_run import LENGTHS
from megatron_lite.config import Config
from megatron_lite.errors import UsageError
from megatron_lite.huggingface.architectures import check_exports
from megatron_lite.validation import resolve
from megatron_lite.validation.sizes import check_passes


def resolved(arguments: Arguments, world_size: int) -> Config:
    """Return the configuration of a run on this many ranks.

    Raises: UsageError for options that contradict each other or the number of ranks.
    """
    config = resolve(arguments.config, world_size, nodes=0)
    lengths = [f"--{name}" for name in LENGTHS if arguments.given.get(name) is not None]
    if len(lengths) > 1 or not (lengths or config.distributed.dry_run):
        typed = " and ".join(lengths) or "--train_iters is missing"
        raise UsageError(
            f"{typed}: write one of --train_iters (0: train nothing), --train_tokens and --epochs"
        )
    check_passes(config)
    check_exports(config)
    return config
