"""docs/slurm.md: under stand-ins for Slurm its commands start torchrun as they say; its lines are
in the scripts."""

import os
import re
from pathlib import Path

import pytest

from megatron_lite import validation
from megatron_lite.cli import parse
from tests.support import documents, warm_python
from tests.support.documents import ROOT

pytestmark = pytest.mark.guides
GUIDE = documents.read("slurm")
BLOCKS = documents.blocks(GUIDE)
EXAMPLES = sorted((ROOT / "scripts" / "examples").glob("*.sbatch"))
# Runs a batch script at once, on the nodes that the command line or the script asks for.
SBATCH = """#!/usr/bin/env bash
set -euo pipefail
nodes= tasks=
while [[ "$1" == --* ]]; do
    case "$1" in
        --nodes=*) nodes="${1#*=}" ;;
        --array=1-*) tasks="${1##*-}" ;;
        --job-name=* | --dependency=singleton) ;;
        *) exit 64 ;;
    esac
    shift
done
bash -n "$1"
[ -n "$nodes" ] || nodes="$(sed -n 's/^#SBATCH --nodes=//p' "$1")"
export SLURM_JOB_ID=4242 SLURM_SUBMIT_DIR="$PWD" SLURM_JOB_NODELIST=nodes SLURM_JOB_NUM_NODES="$nodes"
[ -n "$tasks" ] || exec bash "$@"
for ((task = 1; task <= tasks; task++)); do
    SLURM_ARRAY_JOB_ID=4242 SLURM_ARRAY_TASK_ID="$task" bash "$@"
done
"""
SRUN = """#!/usr/bin/env bash
[ "$1" = --export=ALL ] || exit 64  # SBATCH_EXPORT may have another value
while [[ "$1" == --* ]]; do shift; done
for ((SLURM_NODEID = 0; SLURM_NODEID < SLURM_JOB_NUM_NODES; SLURM_NODEID++)); do
    export SLURM_NODEID
    "$@" || exit 1
done
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames nodes" ] && printf 'node%s\\n' 7 8 9
exit 0
"""
# Writes down its words, one a line, and an empty line after the last; bash starts faster than
# Python.
TORCHRUN = """#!/usr/bin/env bash
printf '%s\n' "$@" '' >>"$CAPTURED"
"""


def launched(block: str, folder: Path) -> list[tuple[list[str], list[str]]]:
    """Run a block in a checkout; return the words of each torchrun for itself, and for the
    program."""
    documents.make_checkout(folder)
    stand_ins = {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL, "torchrun": TORCHRUN}
    (folder / "bin").mkdir()
    for name, text in stand_ins.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    environment = {"HOME": str(folder), "CAPTURED": str(folder / "captured")}
    environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{warm_python.search_path()}"
    result = documents.typed(f"set -e\nunset ${{!SLURM*}}\n{block}", folder, **environment)
    assert result.returncode == 0, result.stdout
    calls = []
    for job in (folder / "captured").read_text().removesuffix("\n\n").split("\n\n"):
        words = job.split("\n")
        (place,) = [index for index, word in enumerate(words) if word.endswith("pretrain_gpt.py")]
        calls.append((words[:place], words[place + 1 :]))
    return calls


@pytest.mark.parametrize(
    ("word", "nodes"),
    [
        ("slurm_single_node", [1]),
        ("--nodes=4", [4, 16]),
        ("--array", [2, 2, 2]),
        ("--write_sbatch", [2]),
        ("slurm_preemptible", [16]),
        ("singleton", [16, 16, 16]),
    ],
)
def test_commands(word: str, nodes: list[int], tmp_path: Path) -> None:
    """Each command starts a torchrun on each node, with legal flags, one address and port, and its
    own number."""
    (block,) = [block for block in BLOCKS if word in block]
    calls = launched(block, tmp_path)
    assert len(calls) == sum(nodes)
    for task, count in enumerate(nodes, 1):
        job, calls = calls[:count], calls[count:]
        config = validation.resolve(parse.parse(job[0][1]).config, 8 * count)
        run = f"mistral_{task}" if word == "--array" else "mistral"
        assert config.run.experiment_dir == str(tmp_path / "experiments" / run)
        assert word != "--array" or config.distributed.seed == task
        assert config.data.data_path == (str(tmp_path / "data" / "corpus"),)
        assert config.batch.batch_size == 128 and config.distributed.device == (
            "auto" if "write" in word else "cuda"
        )
        assert all(flags == job[0][1] for _, flags in job)
        if count > 1:
            expected = {
                f"--nnodes={count}",
                "--master-addr=node7",
                f"--master-port={20000 + 4242}",
                "--max-restarts=0",
            }
            assert all(
                expected | {f"--node-rank={rank}"} <= set(own) for rank, (own, _) in enumerate(job)
            )


def test_every_block_is_run() -> None:
    assert len(BLOCKS) == 6


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_lines_are_in_the_scripts(script: Path) -> None:
    """The table of time limits shows lines of the scripts; every script has a row."""
    assert f"[{script.name}](../scripts/examples/{script.name})" in GUIDE
    text = script.read_text("utf-8")
    for line in re.findall(r"^\| `(#SBATCH [^`]+|trap [^`]+)` \|", GUIDE, re.M):
        assert f"\n{line}\n" in text
    if "srun" in text:
        assert (
            "srun --export=ALL --kill-on-bad-exit=1 " in text
            and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240}" in text
        )
