"""The recommended command: the typed command line with some flags changed, and a Slurm job that
runs it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.config.values import SPELLINGS, is_flag, written
from megatron_lite.errors import UsageError

# Options of the dry run itself, dropped from the recommended command.
PLANNING = frozenset(
    {
        "dry_run",
        "world_size",
        "gpu",
        "device_memory_gib",
        "interconnect",
        "machine_speeds",
        "write_sbatch",
    }
)
PROGRAM = "pretrain_gpt.py"
GPUS_PER_NODE = 8
# Time limits of a job, which is requeued until the run is complete and needs time to save.
LONGEST_JOB_H = 24
MARGIN = 1.25  # on the predicted time
CORES = 8  # per rank, for itself and its data workers
SAVE_S = 300  # between the signal and the time limit
JOB = """\
#!/usr/bin/env bash
# Written by --write_sbatch. Submit from the root of the checkout, on a file system that all nodes see: sbatch {name}
# VENV names another virtual environment. A job that is requeued or submitted again resumes from its newest checkpoint.
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_node}
# Cores for {per_node} ranks with their data workers, and all memory of a node: without them Slurm may give one core.
#SBATCH --cpus-per-task={cores}
#SBATCH --mem=0
#SBATCH --time={time}
#SBATCH --requeue
#SBATCH --signal=TERM@{save_s}
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.log
set -euo pipefail

# Slurm signals each torchrun before the time limit; the run saves, which may take longer than torchrun's own 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${{TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-{shutdown_s}}}"
trap : TERM  # wait for srun all the same if this script is signalled, too

cd "${{SLURM_SUBMIT_DIR:-.}}"
# shellcheck source=/dev/null
source "${{VENV:-.venv}}/bin/activate"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))  # a port for each job, so that jobs do not meet

# SLURM_NODEID differs from node to node, so it is expanded there, not here.
# shellcheck disable=SC2016
exec srun --export=ALL --cpus-per-task={cores} --kill-on-bad-exit=1 bash scripts/examples/first_signal.sh bash -c \\
    'exec torchrun --nnodes={nodes} --nproc-per-node={per_node} \\
    --node-rank="$SLURM_NODEID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --max-restarts=0 "$@"' \\
    train {words}
"""


def changed_words(argv: Sequence[str], changes: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line without the dry-run options and with `changes` appended.

    A flag in an @file is kept; the appended one overrides it. A change to None becomes `none`,
    which unsets the option, if an @file may set it; otherwise the flag is dropped.
    """
    kept = [*_without(argv, PLANNING | changes.keys())]
    files = any(word.startswith("@") for word in kept)
    return [
        *kept,
        *(
            f"--{name}={written(value)}"
            for name, value in changes.items()
            if value is not None or files
        ),
    ]


def _without(argv: Sequence[str], names: Collection[str]) -> Iterator[str]:
    """Yield the words of all flags except `names`, each flag with its values."""
    keep = True
    for word in argv:
        if word.startswith("@"):
            keep = True
        elif is_flag(word):
            spelling = word.partition("=")[0].lstrip("-").replace("-", "_")
            keep = spelling not in SPELLINGS or SPELLINGS[spelling].name not in names
        if keep:
            yield word


def layout_of_nodes(world_size: int, together: int = 1) -> tuple[int, int]:
    """Return nodes and ranks per node: the fewest nodes with equal numbers of ranks.

    together: ranks that share a layer, which stay within a node if they fit.
    """
    sizes = [size for size in range(1, GPUS_PER_NODE + 1) if world_size % size == 0]
    per_node = max([size for size in sizes if size % together == 0] or sizes)
    return world_size // per_node, per_node


def launcher(nodes: int, per_node: int) -> list[str]:
    """Return the words that start a program on each of `nodes` nodes.

    With several nodes, run them on each node, with NODE_RANK counting from 0 and MASTER_ADDR naming
    the first node.
    """
    if nodes == per_node == 1:
        return ["python"]
    if nodes == 1:
        return ["torchrun", "--standalone", f"--nproc-per-node={per_node}"]
    return [
        "torchrun",
        f"--nnodes={nodes}",
        f"--nproc-per-node={per_node}",
        "--node-rank=$NODE_RANK",
        "--master-addr=$MASTER_ADDR",
    ]


def quoted(words: Sequence[str]) -> str:
    """Return shell-quoted words, wrapped at about 110 columns; $NAME stays a variable."""
    lines, width = [""], 110
    for word in words:
        text = word if word.startswith("--") and "=$" in word else shlex.quote(word)
        if lines[-1] and len(lines[-1]) + len(text) >= width:
            lines.append("   ")
        lines[-1] += f" {text}" if lines[-1] else text
    return " \\\n".join(lines)


def hours(seconds: float) -> str:
    """Format a duration: 12 min, 3.4 h, 21 days."""
    if seconds < 5400:
        return f"{max(math.ceil(seconds / 60), 1):,} min"
    return f"{seconds / 3600:,.1f} h" if seconds < 5 * 86400 else f"{seconds / 86400:,.1f} days"


def write_job(path: Path, words: Sequence[str], layout: tuple[int, int], seconds: float) -> None:
    """Write a Slurm job for a run predicted to take `seconds`.

    words: the program's flags. layout: nodes and ranks per node.

    Raises:
        UsageError: if the file exists or cannot be written.
    """
    nodes, per_node = layout
    time_h = min(max(math.ceil(seconds * MARGIN / 3600), 1), LONGEST_JOB_H)
    text = JOB.format(
        name=shlex.quote(path.name),
        nodes=nodes,
        per_node=per_node,
        cores=CORES * per_node,
        time=f"{time_h:02d}:00:00",
        save_s=SAVE_S,
        shutdown_s=SAVE_S - 60,
        words=" \\\n    ".join(shlex.quote(word) for word in (PROGRAM, *words)),
    )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        fix = (
            "name another file"
            if isinstance(error, FileExistsError)
            else "name a file in a folder that exists"
        )
        raise UsageError(f"--write_sbatch={path}: {error.strerror}; {fix}") from None
