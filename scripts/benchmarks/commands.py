"""Command lines of the benchmarks, and processes that a benchmark starts. Imports no torch."""

from __future__ import annotations

import argparse
import fnmatch
import os
from collections.abc import Collection
from pathlib import Path

from megatron_lite.cli.script_parser import COUNT

TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that prints the description as written and accepts no abbreviated flags."""
    return argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def measuring_parser(
    description: str | None, *, in_quiet: bool = False, **counts: int
) -> argparse.ArgumentParser:
    """Return a parser with --output, and an option per count, such as --turns=5, at least 1.

    in_quiet: also with --max_others.
    """
    parser = argument_parser(description)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    if in_quiet:
        parser.add_argument(
            "--max_others",
            type=float,
            help="count only turns in which other programs used at most this share of the cores",
        )
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=COUNT, default=default, help=f"default {default}")
    return parser


def names_in(text: str) -> list[str]:
    """Split a comma-separated list of names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def matching(known: Collection[str], what: str, text: str) -> list[str]:
    """Return the known names that a comma-separated list of names and wildcards selects, in their
    own order.

    Raises:
        ArgumentTypeError: if nothing matches one of them.
    """
    patterns = names_in(text)
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise argparse.ArgumentTypeError(
                f"no {what} is called {pattern!r}; choose from {list(known)}"
            )
    return [name for name in known if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def private_environment(folder: Path, pythonpath: str, **more: str) -> dict[str, str]:
    """Return variables that keep libraries offline and their files in `folder`. more: further
    variables.

    Caches of compiled code that are set already stay, so that a later process does not compile
    everything again.
    """
    compiled = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
    caches = ["HF_HOME", "XDG_CACHE_HOME", *(name for name in compiled if name not in os.environ)]
    return {
        "PYTHONPATH": pythonpath,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "TMPDIR": str(folder),
        **{name: str(folder / "cache" / name.lower()) for name in caches},
        **more,
    }
