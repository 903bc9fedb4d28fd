"""`--write_sbatch`: a Slurm job that runs the recommended command, requeues itself and has time to save."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_lite.errors import UsageError
from megatron_lite.planner.command import PROGRAM

LONGEST_H = 24  # the job goes back into the queue until the run is complete
MARGIN = 1.25  # on the predicted time
SAVE_S = 300  # between the signal and the time limit
TEXT = """\
#!/usr/bin/env bash
# Written by --write_sbatch. Submit from the root of the checkout, on a file system that all nodes see: sbatch {name}
# VENV names another virtual environment. A job that is requeued or submitted again resumes from its newest checkpoint.
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_node}
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
exec srun --kill-on-bad-exit=1 bash -c 'exec torchrun --nnodes={nodes} --nproc-per-node={per_node} \\
    --node-rank="$SLURM_NODEID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --max-restarts=0 "$@"' \\
    train {words}
"""


def write_job(path: Path, words: Sequence[str], layout: tuple[int, int], seconds: float) -> None:
    """Write the job of a run of `words`, flags of the program, which is predicted to take `seconds`.

    layout: nodes, and ranks on each.

    Raises:
        UsageError: if the file exists or cannot be written.
    """
    nodes, per_node = layout
    time_h = min(max(math.ceil(seconds * MARGIN / 3600), 1), LONGEST_H)
    text = TEXT.format(
        name=shlex.quote(path.name),
        nodes=nodes,
        per_node=per_node,
        time=f"{time_h:02d}:00:00",
        save_s=SAVE_S,
        shutdown_s=SAVE_S - 60,
        words=" \\\n    ".join(shlex.quote(word) for word in (PROGRAM, *words)),
    )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        fix = "name another file" if isinstance(error, FileExistsError) else "name a file in a folder that exists"
        raise UsageError(f"--write_sbatch={path}: {error.strerror}; {fix}") from None
